"""The figures of one run."""

import matplotlib.pyplot as plt
import polars as pl
from PIL import Image

from obbo_lightning.runs.figures import draw_figures, save_figure


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
    assert [path.name for path in drawn] == ["regret.png", "mse.png"]
    for path in drawn:
        with Image.open(path) as image:
            assert image.size == (720, 480)


def test_ticks_are_on_whole_rounds(tmp_path):
    figure, axes = plt.subplots()
    axes.plot([1, 2, 3], [0, 1, 2])
    save_figure(figure, axes, tmp_path / "one.png")
    assert all(tick == round(tick) for tick in axes.get_xticks())
