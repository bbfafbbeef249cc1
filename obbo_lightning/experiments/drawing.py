"""What all figures of a report share: size, colours, files."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.experiments.runs import ORDER

WIDTH = 5.2  # inches: letters stay readable when a phone shows it
INK = "#262626"  # of everything that is not data; a page turns it light on dark paper
# Okabe and Ito's colours, distinguishable for colour-blind readers; an algorithm has the same one everywhere.
COLOURS = dict(
    zip(ORDER, ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", INK, "#888888"), strict=True)
)
MARKERS = dict(zip(ORDER, "osD^vPX*", strict=True))  # for readers without colours
STYLES = ("-", "--", ":", "-.")
LOOK: dict[Any, Any] = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "obbo_lightning",  # the same figure gives the same file
}


class Drawing(NamedTuple):
    """A figure.

    Attributes:
        name: of its files.
        caption: what it shows, in sentences.
        figure: matplotlib's.
    """

    name: str
    caption: str
    figure: Figure


@contextmanager
def house_style() -> Iterator[None]:
    """Draw inside of this."""
    with mpl.rc_context(LOOK):
        yield


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: object) -> tuple[Figure, list[Axes]]:
    """A figure of the usual width; its axes row by row."""
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **options)  # type: ignore[call-overload]
    return figure, list(axes.flat)


def set_title(figure: Figure, title: str) -> None:
    """Above everything, on as many lines as it needs."""
    figure.suptitle(fill(escape_mathtext(title), 66), x=0.01, ha="left", fontsize="medium")


def finish(figure: Figure, axes: Axes, name: str, caption: str, title: str) -> Drawing:
    """With a title, and the legend of ``axes`` below everything, where no line is."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels))
    columns = 3 if longest < 18 else 2 if longest < 32 else 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, rows - 2))
    set_title(figure, title)
    return Drawing(name, caption, figure)


def look_of(labels: Sequence[str], label: str) -> dict[str, Any]:
    """For `Axes.plot`: the algorithm's colour and marker, and a line style for each variant of it among ``labels``.

    Algorithms that are not ours share a colour and a marker, and are told apart by their line styles.
    """
    algorithm = _known_algorithm(label)
    variants = [other for other in labels if _known_algorithm(other) == algorithm]
    return {
        "color": COLOURS.get(algorithm, "#7A5195"),
        "marker": MARKERS.get(algorithm, "h"),
        "linestyle": STYLES[variants.index(label) % len(STYLES)],
        "markersize": 4,
        "label": escape_mathtext(label),
    }


def _known_algorithm(label: str) -> str:
    algorithm = label.partition(",")[0]
    return algorithm if algorithm in COLOURS else ""


def _tidy(axes: Axes) -> None:
    """Few and plain numbers on logarithmic axes, whole ones where rounds are counted."""
    if axes.get_xlabel().startswith("round") and axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axis, scale, limits in (
        (axes.xaxis, axes.get_xscale(), axes.get_xlim()),
        (axes.yaxis, axes.get_yscale(), axes.get_ylim()),
    ):
        if scale == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
            decades = math.log10(limits[1] / limits[0])
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.5 else (1, 3) if decades < 3 else (1,)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())


def save_drawing(drawing: Drawing, directory: Path) -> list[Path]:
    """``name.png`` and ``name.svg``, neither with a date."""
    for axes in drawing.figure.axes:
        _tidy(axes)
    png, svg = (directory / f"{drawing.name}.{suffix}" for suffix in ("png", "svg"))
    drawing.figure.savefig(png, dpi=160)
    drawing.figure.savefig(svg, transparent=True, dpi=160, metadata={"Date": None})
    plt.close(drawing.figure)
    return [png, svg]
