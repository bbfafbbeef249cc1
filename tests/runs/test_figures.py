"""The figures of one run."""

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from PIL import Image

from obbo_lightning.runs import figures
from obbo_lightning.runs.figures import draw_figures, draw_scores, draw_weights

NAN = float("nan")


def make_rounds(values, tests=(), errors=()):
    """Return columns of metrics.csv; the last rounds are tested."""
    missing = [NAN] * (len(values) - len(tests))
    columns = {"round": range(1, len(values) + 1), "loss": values}
    columns |= {"test_loss": [*missing, *tests], "test_loss_se": [*missing, *(errors or [NAN] * len(tests))]}
    return columns | {"regret/euclidean": np.arange(len(values)), "regret/exact": [NAN] * len(values)}


@pytest.fixture
def axes_of(tmp_path, monkeypatch):
    """Draw figures and return their axes by the names of the files."""

    def draw(rounds, initial=0.75, baselines=()):
        drawn = {}
        monkeypatch.setattr(
            figures.Figure, "savefig", lambda figure, path, dpi: drawn.update({path.name: figure.axes[0]})
        )
        draw_figures(tmp_path / "figures", rounds, "loss", initial, "$small$", dict(baselines))
        return drawn

    return draw


def test_two_figures_are_written(tmp_path):
    rounds = make_rounds([1 / t for t in range(1, 11)], [0.5, 0.25], [0.05, 0.02])
    paths = draw_figures(tmp_path / "figures", rounds, "loss", 1.0, "small", {})
    assert [path.name for path in paths] == ["loss.png", "regret.png"]
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (720, 480)


def test_the_running_mean_is_drawn_at_the_last_round_of_its_window(axes_of):
    values = np.random.default_rng(0).normal(size=20)
    drawn = axes_of(make_rounds(values, [0.5]) | {"regret/exact": np.arange(20.0) / 2})
    scores, regrets = drawn["loss.png"], drawn["regret.png"]
    every, smooth, tests = (line.get_xydata() for line in scores.lines[:3])
    assert np.allclose(every, np.stack([np.arange(1, 21), values], axis=1))
    assert np.allclose(smooth, [(t, values[t - 4 : t].mean()) for t in range(4, 21)])  # windows of 20 // 5 rounds
    assert tests.tolist() == [[0, 0.75], [20, 0.5]]
    assert scores.lines[-1].get_ydata() == [0.75, 0.75]
    assert [line.get_label() for line in regrets.lines] == ["euclidean", "exact"]
    assert regrets.lines[1].get_ydata()[-1] == 9.5
    for axes in drawn.values():
        assert axes.get_title() == r"\$small\$"
        assert all(tick == round(tick) for tick in axes.get_xticks())  # rounds are whole


@pytest.mark.parametrize("initial", [None, NAN])
def test_baselines_are_drawn_as_running_means_of_at_most_ten_rounds(axes_of, initial):
    values = np.random.default_rng(0).normal(size=(2, 100))
    drawn = axes_of(make_rounds(values[0]), initial, {"$equal$": values[1].tolist()})
    lines = {line.get_label(): line.get_xydata() for line in drawn["loss.png"].lines}
    for name, row in (("prequential, mean of 10 rounds", 0), (r"\$equal\$", 1)):
        assert np.allclose(lines[name], [(t, values[row, t - 10 : t].mean()) for t in range(10, 101)])
    assert len(lines) == 3  # no test tasks
    assert [line.get_label() for line in drawn["regret.png"].lines] == ["euclidean"]


def test_weights_on_a_simplex_are_a_stack_and_other_groups_lines():
    rounds, weights = np.arange(1, 6), np.random.default_rng(0).dirichlet(np.ones(3), 5)
    outer = pl.DataFrame({"round": rounds, "decay": 10.0**-rounds} | {f"sources[{i}]": weights[:, i] for i in range(3)})
    figure = Figure()
    draw_weights(figure, outer)
    decay, sources = figure.axes
    assert decay.get_ylabel() == "decay"
    assert decay.get_yscale() == "log"  # over four orders of magnitude
    assert np.allclose(decay.lines[0].get_xydata()[:, 1], 10.0**-rounds)
    assert sources.get_ylabel() == "sources"
    assert len(sources.collections) == 3
    tops = sources.collections[1].get_paths()[0].vertices  # the second weight lies on the first
    assert np.isclose(tops[:, 1].max(), weights[:, :2].sum(1).max())


@pytest.mark.parametrize(
    ("metric", "far", "scale"), [("loss", 5.0, "log"), ("loss", 3.0, "linear"), ("accuracy", 5.0, "linear")]
)
def test_a_baseline_that_is_far_away_makes_the_scale_of_a_loss_logarithmic(metric, far, scale):
    axes = Figure().subplots()
    draw_scores(axes, {"round": np.arange(1, 11), metric: np.ones(10)}, metric, NAN, {"far": np.full(10, far)})
    assert axes.get_yscale() == scale
