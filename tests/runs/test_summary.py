"""The closing table, in plain words."""

import io
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from obbo_lightning.config.parse import parse_arguments
from obbo_lightning.runs.summary import Judgement, last_value, print_summary, summarise
from obbo_lightning.streams.stream import Metric

RUN = Path("runs/one")


def printed(*flags, metric="accuracy", higher=True, more=None, geometry=None):
    settings = parse_arguments(list(flags))[0]
    names = ("loss", "accuracy", "mse", "regret/euclidean", "regret/generalized", "regret/exact", "skipped")
    rounds = pl.DataFrame({"round": [1.0, 2.0], **{name: [0.25, 0.5] for name in names}})
    if geometry is not None:
        rounds = rounds.with_columns(pl.lit(geometry).alias("regret/geometry"))
    judged = Judgement(Metric(metric, higher), [0.1, 0.2], [0.3, 0.6])
    summary = summarise(settings, rounds, judged, 7.0) | (more or {})
    out = io.StringIO()
    print_summary(Console(file=out, width=200), settings, summary, [], RUN)
    return out.getvalue()


def test_every_number_says_what_it_is_and_which_direction_is_better():
    text = printed()
    assert "accuracy on 2 test tasks before learning; higher is better" in text
    assert "accuracy on the same after 2 rounds" in text
    assert "gain by learning, paired; above 0 is better" in text
    assert "accuracy on the stream, last 2 rounds, each judged before it is learned from; higher is better" in text
    assert "regret: squared norms of windowed hypergradients, summed over rounds; lower is better" in text


def test_the_generalized_regret_that_is_shown_is_in_the_geometrys_own_norm():
    (line,) = (line for line in printed(geometry=2.5).splitlines() if "generalized regret" in line)
    assert "in the geometry's own norm" in line
    assert "2.5" in line
    assert "generalized regret" not in printed()  # Adam has none, nor has a run that an older version began


def test_the_market_has_the_last_price_beside_its_forecast():
    baseline = last_value(pl.DataFrame({"ticker": ["A", "B", "C"], "naive_mse": [0.1, 0.2, 0.9]}), "mse")
    assert baseline == {"last_value_mse": pytest.approx(0.4), "last_value_mse_median": 0.2}
    assert last_value(pl.DataFrame({"ticker": ["A"]}), "mse") == {}
    text = printed("--config", "market", metric="mse", higher=False, more={"events": 3, **baseline})
    assert "forecast error (mse) on 3 events before learning; lower is better" in text
    (line,) = (line for line in text.splitlines() if "of the last price as the forecast" in line)
    assert "0.400; 0.200" in line


def test_the_next_steps_are_those_of_the_problem():
    resumed = f"next   python -m obbo_lightning resume {RUN} --rounds N"
    forecast = f"next   python -m obbo_lightning predict {RUN}\n"
    images = f"next   python -m obbo_lightning predict {RUN} --support DIR --query DIR"
    texts = [printed(), printed("--config", "market"), printed("--config", "quadratic")]
    assert all(resumed in text for text in texts)
    assert [images in text for text in texts] == [True, False, False]
    assert [f"export {RUN} OUT" in text for text in texts] == [True, False, False]
    assert [forecast in text for text in texts] == [False, True, False]
