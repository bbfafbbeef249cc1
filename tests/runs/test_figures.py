"""The figures of one run."""

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from PIL import Image

from obbo_lightning.runs.figures import draw_figures, draw_scores, draw_weights, save_figure


def test_figures_are_drawn_of_a_table_with_gaps(tmp_path):
    rounds = pl.DataFrame(
        {
            "round": range(1, 11),
            "mse": [1 / t for t in range(1, 11)],
            "test_mse": [None, None, None, None, 0.5, None, None, None, None, 0.25],
            "test_mse_se": [None, None, None, None, 0.05, None, None, None, None, 0.02],
            "regret/euclidean": range(10),
            "regret/exact": [None] * 10,
        }
    )
    rounds.write_csv(tmp_path / "metrics.csv")
    drawn = draw_figures(tmp_path / "metrics.csv", tmp_path / "figures", "mse", 1.0, "small")
    assert [path.name for path in drawn] == ["mse.png", "regret.png"]
    for path in drawn:
        with Image.open(path) as image:
            assert image.size == (720, 480)


def test_ticks_are_on_whole_rounds(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2, 3], [0, 1, 2])
    save_figure(figure, axes, tmp_path / "one.png")
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_the_moving_mean_stands_at_the_last_round_of_its_window(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        "obbo_lightning.runs.figures.save_figure", lambda figure, axes, path: drawn.update({path: axes})
    )
    values = np.random.default_rng(0).normal(size=20)
    columns = {"round": range(1, 21), "loss": values, "test_loss": [None] * 19 + [0.5], "test_loss_se": [None] * 20}
    columns |= {"regret/euclidean": np.arange(20.0), "regret/exact": np.arange(20.0) / 2}
    pl.DataFrame(columns).write_csv(tmp_path / "metrics.csv")
    draw_figures(tmp_path / "metrics.csv", tmp_path / "figures", "loss", 0.75, "small")
    scores, regrets = drawn.values()
    every, smooth, tests = (line.get_xydata() for line in scores.lines[:3])
    assert np.allclose(every, np.stack([np.arange(1, 21), values], axis=1))
    # windows of 20 // 5 rounds
    assert np.allclose(smooth, [(t, values[t - 4 : t].mean()) for t in range(4, 21)])
    assert tests.tolist() == [[0, 0.75], [20, 0.5]]
    assert scores.lines[-1].get_ydata() == [0.75, 0.75]
    assert [line.get_label() for line in regrets.lines] == ["euclidean", "exact"]
    assert regrets.lines[1].get_ydata()[-1] == 9.5


def test_shares_are_a_stack_and_other_values_lines_a_panel_a_block():
    rounds, trust = np.arange(1, 6), np.random.default_rng(0).dirichlet(np.ones(3), 5)
    outer = pl.DataFrame({"round": rounds, "decay": 10.0**-rounds} | {f"trust[{i}]": trust[:, i] for i in range(3)})
    figure = Figure()
    draw_weights(figure, outer)
    decay, shares = figure.axes
    assert decay.get_ylabel() == "decay"
    assert decay.get_yscale() == "log"  # it goes over four orders
    assert np.allclose(decay.lines[0].get_xydata()[:, 1], 10.0**-rounds)
    assert shares.get_ylabel() == "trust"
    assert len(shares.collections) == 3
    tops = shares.collections[1].get_paths()[0].vertices  # the second share lies on the first
    assert np.isclose(tops[:, 1].max(), trust[:, :2].sum(1).max())


@pytest.mark.parametrize(
    ("metric", "far", "scale"), [("loss", 5.0, "log"), ("loss", 3.0, "linear"), ("accuracy", 5.0, "linear")]
)
def test_a_baseline_that_is_far_away_does_not_squash_the_others(metric, far, scale):
    axes = Figure().subplots()
    draw_scores(axes, {"round": np.arange(1, 11), metric: np.ones(10)}, metric, np.nan, "", {"far": np.full(10, far)})
    assert axes.get_yscale() == scale
