"""Draw the figure of the README: python -m pages.benefit RUN_DIR, a finished run of `fit --config sources --seed 1`."""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import yaml

FIGURE = Path(__file__).parents[1] / "docs" / "assets" / "benefit.svg"
PAPER, INK = "#fbfbfa", "#262626"  # a background, so that the figure can be read on dark pages
LINES = {  # columns of baselines.csv: label, colour and style
    "weights that know the truth": ("weights that know the truth", "#009E73", "--"),
    "clean validation examples only": ("clean validation examples only", "#E69F00", "-"),
    "equal weights": ("equal weights", "#888888", "-"),
}


def draw(run: Path) -> None:
    """Draw the accuracy of learned, equal and true weights, averaged over ten rounds, with the phases shaded."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    learned, baselines = (pl.read_csv(run / name) for name in ("metrics.csv", "baselines.csv"))
    period, rounds = settings["data"]["period"], learned["round"].to_numpy()
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "obbo_lightning", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(7.2, 3.3), facecolor=PAPER, layout="constrained")
    axes.set_facecolor(PAPER)
    for start in range(0, len(rounds), 2 * period):
        axes.axvspan(start, start + period, color="#0072B2", alpha=0.07, linewidth=0)
    curves = [(LINES[name], baselines[name].to_numpy()) for name in LINES]
    curves.insert(1, (("weights learned while it runs", "#D55E00", "-"), learned["accuracy"].to_numpy()))
    for (label, colour, style), values in curves:
        smooth = np.convolve(values, np.ones(10) / 10, mode="valid")
        axes.plot(rounds[9:], smooth, style, color=colour, linewidth=2, label=f"{label}: {values.mean():.2f}")
    for start in range(0, len(rounds), period):
        text = "six of ten sources\nare wrong" if not start else "six others"
        axes.text(start + period / 2, 0.07, text, ha="center", color=INK, fontsize=9)
    axes.set(xlabel="round", ylabel="accuracy, mean of 10 rounds", ylim=(0, 1.04), xlim=(0, len(rounds)))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9.5, handlelength=1.4, columnspacing=1.2)
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
