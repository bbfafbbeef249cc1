"""What several algorithms learned, as a report reads and draws it."""

import numpy as np
import polars as pl
import pytest
from matplotlib import pyplot as plt

from obbo_lightning.config.registry import find_component
from obbo_lightning.experiments import report
from obbo_lightning.experiments.comparison_weights import MOMENTS, draw_all_weights, read_weights
from obbo_lightning.experiments.drawing import house_style
from obbo_lightning.experiments.runs import Run
from obbo_lightning.runs.directory import RunDirectory


def write_run(root, label, seed, rounds=6, names=("trust[0]", "trust[1]", "decay")):
    directory = RunDirectory(root / f"{label}-{seed}")
    directory.path.mkdir(parents=True)
    share = np.linspace(0.1, 0.4 + 0.1 * seed, rounds)
    columns = dict(zip(names, (share, 1 - share, 10.0 ** np.linspace(-4, 0, rounds)), strict=False))
    if columns:
        pl.DataFrame({"round": np.arange(1, rounds + 1), **columns}).write_csv(directory.outer)
    return Run(directory, {}, {"seed": seed}, pl.DataFrame(), find_component("data", "synthetic"), label)


@pytest.fixture
def weights(tmp_path):
    return read_weights([write_run(tmp_path, label, seed) for label in ("obbo", "adam") for seed in (3, 1)])


def test_the_first_seed_of_each_algorithm_is_read(weights):
    assert weights.columns == ["label", "seed", "round", "name", "value"]
    assert set(weights["seed"]) == {1}
    assert len(weights) == 2 * 6 * 3
    one = weights.filter((pl.col("label") == "adam") & (pl.col("name") == "trust[1]"))
    assert one["round"].to_list() == [1, 2, 3, 4, 5, 6]
    assert one["value"].to_numpy() == pytest.approx(1 - np.linspace(0.1, 0.5, 6))


def test_a_long_run_is_thinned_and_one_without_names_is_left_out(tmp_path):
    long, nameless = write_run(tmp_path, "obbo", 0, rounds=1001), write_run(tmp_path, "adam", 0, names=())
    found = read_weights([long, nameless])
    assert set(found["label"]) == {"obbo"}
    rounds = found["round"].unique().to_list()
    assert rounds[:3] == [1, 6, 11]
    assert len(rounds) <= MOMENTS
    assert read_weights([nameless]).is_empty()


def test_each_block_is_a_figure_with_a_row_an_algorithm(weights):
    with house_style():
        trust, decay = draw_all_weights(weights, ["adam", "obbo", "sgdm"], "What was learned")
    assert (trust.name, decay.name) == ("learned_trust", "learned_decay")
    assert [axes.get_ylabel() for axes in trust.figure.axes] == ["adam", "obbo"]
    shares = trust.figure.axes[1].collections  # a stack: the second one ends at one
    assert len(shares) == 2
    assert {round(float(y), 6) for y in shares[1].get_paths()[0].vertices[:, 1]} >= {1.0, 0.1, 0.5}
    assert trust.figure.axes[0].get_ylim() == (0, 1)
    (line,) = decay.figure.axes[0].get_lines()
    assert line.get_ydata() == pytest.approx(10.0 ** np.linspace(-4, 0, 6))
    assert decay.figure.axes[0].get_yscale() == "log"
    assert [text.get_text() for text in trust.figure.legends[0].get_texts()] == ["trust[0]", "trust[1]"]
    assert decay.figure.legends == []  # one number needs none
    assert "first seed (1)" in trust.caption
    plt.close("all")


def test_what_was_learned_is_drawn_again_from_an_earlier_report(tmp_path, weights):
    frames = {name: pl.DataFrame(schema=columns) for name, columns in (
        ("rounds", report.ROUND_COLUMNS), ("timings", report.TIME_COLUMNS), ("runs", report.RUN_COLUMNS))}  # fmt: skip
    for name, frame in {**frames, "weights": weights}.items():
        frame.write_csv(tmp_path / f"{name}.csv")
    found = report._earlier([tmp_path])
    assert found.weights.equals(weights)
    (tmp_path / "weights.csv").unlink()
    assert report._earlier([tmp_path]).weights.is_empty()
