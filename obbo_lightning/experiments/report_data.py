"""What reports consist of: data frames with a CSV file each, tables, and figures in a common style."""

import csv
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, ClassVar, NamedTuple, TypeVar

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from obbo_lightning.escaping import escape_cell, escape_mathtext, escape_table, escape_terminal, unescape_table

DIGITS = 8  # of numbers in CSV files
# Algorithms in the order of tables and legends. Each has the same colour (Okabe and Ito's, distinguishable for
# colour-blind readers) and marker (for readers without colours) in every figure.
ALGORITHMS = ("obbo", "sobbo", "sobow", "oagd", "adam", "sgdm", "maml", "anil")
INK = "#262626"  # of everything that is not data; a page makes it light on a dark background
COLOURS = dict(
    zip(ALGORITHMS, ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", INK, "#888888"), strict=True)
)
MARKERS = dict(zip(ALGORITHMS, "osD^vPX*", strict=True))
LINE_STYLES = ("-", "--", ":", "-.")
WIDTH = 5.2  # inches: letters stay readable on a phone
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "obbo_lightning",  # the same figure gives the same file
}
report_style = partial(mpl.rc_context, STYLE)  # a context in which figures get the style of reports


class Table(NamedTuple):
    """A table whose cells are text, with the stem of its files and a caption; the first column names the rows."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def write(self, folder: Path) -> list[Path]:
        """Write ``name.md`` and ``name.csv``."""
        paths = {folder / f"{self.name}.md": self.markdown(), folder / f"{self.name}.csv": self.csv()}
        for path, text in paths.items():
            path.write_text(text, encoding="utf-8")
        return list(paths)

    def markdown(self) -> str:
        """Return a pipe table, without padding."""
        header, *rows = (
            " | ".join(escape_terminal(cell).replace("\n", " ").replace("|", r"\|") for cell in row)
            for row in (self.columns, *self.rows)
        )
        lines = [f"| {header} |", "|" + "---|" * len(self.columns), *(f"| {row} |" for row in rows)]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return the same text as CSV."""
        file = io.StringIO()
        rows = ([escape_cell(cell) for cell in row] for row in (self.columns, *self.rows))
        csv.writer(file, lineterminator="\n").writerows(rows)
        return file.getvalue()


def format_with_error(mean: float, error: float | None, digits: int, sign: str = "") -> str:
    """Return ``mean ± error`` with so many decimals, huge numbers in scientific notation; no error: the mean alone.

    >>> format_with_error(0.5, 0.01, 3), format_with_error(0.5, None, 1, "+"), format_with_error(3.2858e35, None, 1)
    ('0.500 ± 0.010', '+0.5', '3.29e+35')
    """
    numbers = [(mean, sign)] if error is None else [(mean, sign), (error, "")]
    return " ± ".join(f"{x:{plus}.{digits}f}" if abs(x) < 1e7 else f"{x:{plus}.3g}" for x, plus in numbers)


class ReportFigure(NamedTuple):
    """A figure, with the stem of its files and a caption."""

    name: str
    caption: str
    figure: Figure

    def save(self, folder: Path) -> list[Path]:
        """Write ``name.png`` and ``name.svg``, neither with a date; a logarithmic axis has few and plain numbers."""
        png, svg = (folder / f"{self.name}.{suffix}" for suffix in ("png", "svg"))
        with report_style():
            for axis in (axis for axes in self.figure.axes for axis in (axes.xaxis, axes.yaxis)):
                if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
                    low, high = axis.get_view_interval()
                    subs = (1, 2, 5) if high < 30 * low else (1, 3) if high < 1000 * low else (1,)
                    axis.set_major_locator(LogLocator(subs=subs))
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_locator(NullLocator())
            self.figure.savefig(png, dpi=160)
            self.figure.savefig(svg, transparent=True, dpi=160, metadata={"Date": None})
        return [png, svg]


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of the common width and its axes, row by row; without pyplot, whose state is the user's."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def finish_figure(figure: Figure, name: str, caption: str, title: str) -> ReportFigure:
    """Add the title, on as many lines as it needs, and the legend of the first axes below everything."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        longest = max(map(len, labels))
        columns = 3 if longest < 18 else 2 if longest < 32 else 1
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        figure.set_figheight(figure.get_figheight() + 0.17 * max(0, -(-len(labels) // columns) - 2))
    figure.suptitle(fill(escape_mathtext(title), 66), x=0.01, ha="left", fontsize="medium")
    return ReportFigure(name, caption, figure)


def line_style(labels: Sequence[str], label: str) -> dict[str, Any]:
    """Return arguments of `Axes.plot`: an algorithm's colour and marker, and a line style for each variant of it."""
    known = {one: one.partition(",")[0] if one.partition(",")[0] in COLOURS else "" for one in labels}
    variants = [other for other in labels if known[other] == known[label]]
    return {
        "color": COLOURS.get(known[label], "#7A5195"),
        "marker": MARKERS.get(known[label], "h"),
        "linestyle": LINE_STYLES[variants.index(label) % len(LINE_STYLES)],
        "markersize": 4,
        "label": escape_mathtext(label),
    }


Score = tuple[float, float | None]  # mean score of a method and its standard error; None for one run
D = TypeVar("D", bound="ReportData")


class ReportData(ABC):
    """Base class of what a report shows: a dataclass of data frames, which have a CSV file each if they have rows."""

    columns: ClassVar[dict[str, dict[str, Any]]]  # of each frame, with their types

    @abstractmethod
    def tables(self) -> list[Table]:
        """Return the tables of the report."""

    @abstractmethod
    def figures(self, title: str) -> list[ReportFigure]:
        """Return the figures of the report; called in `report_style`."""

    def scores(self) -> tuple[str, bool, dict[str, Score]]:
        """Return what methods are ranked by, whether higher is better, and the score of each method."""
        raise ValueError("--by_folder needs comparisons of methods, got one of rates")

    @property
    def labels(self) -> list[str]:
        """Algorithms, with the settings in which those of one name differ; the first is the reference."""
        first: pl.DataFrame = getattr(self, next(iter(self.columns)))
        return first["label"].unique(maintain_order=True).to_list()

    def as_reported(self: D, reference: str | None = None) -> D:
        """Return the data with labels in order, the reference first, and with the digits that CSV files hold."""
        labels = sorted_labels(self.labels)
        if reference is not None and reference not in labels:
            raise ValueError(f"--reference must be one of {'; '.join(labels)}, got {reference!r}")
        place = {label: i for i, label in enumerate(labels)} | ({} if reference is None else {reference: -1})
        order = pl.col("label").replace_strict(place, return_dtype=pl.Int64, default=len(labels))
        frames = {}
        for name in self.columns:
            frame = getattr(self, name).with_columns(pl.col(pl.Float64).round_sig_figs(DIGITS))
            frames[name] = frame.sort(order, maintain_order=True) if "label" in frame.columns else frame
        return type(self)(**frames)

    def write(self, folder: Path) -> list[Path]:
        """Write a CSV file for each frame."""
        written = []
        for name in self.columns:
            frame, path = getattr(self, name), folder / f"{name}.csv"
            if len(frame):
                escape_table(frame).write_csv(path)
                written.append(path)
        return written

    @classmethod
    def read(cls: type[D], folder: Path) -> D | None:
        """Return what `write` wrote; None where there is no such report."""
        if not (folder / f"{next(iter(cls.columns))}.csv").is_file():
            return None
        frames = {name: pl.DataFrame(schema=columns) for name, columns in cls.columns.items()}
        try:
            for name, columns in cls.columns.items():
                if (path := folder / f"{name}.csv").is_file():
                    frame = pl.read_csv(path, schema_overrides=columns, infer_schema_length=None)
                    frame.select(*columns)  # refuses a frame without one of them
                    frames[name] = unescape_table(frame)
        except (OSError, pl.exceptions.PolarsError) as damage:
            reason = f"{type(damage).__name__} {' '.join(str(damage).split())}"
            raise ValueError(f"{folder} has a damaged report: {reason}") from None
        return cls(**frames)


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """Return labels in the order of their algorithms in `ALGORITHMS`, then of their settings, numbers by value."""

    def key(label: str) -> tuple[int, list[str | float]]:
        algorithm = label.partition(",")[0]
        words = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", label)  # every second one is a number
        numbers: list[str | float] = [float(word) if i % 2 else word for i, word in enumerate(words)]
        return (ALGORITHMS.index(algorithm) if algorithm in ALGORITHMS else len(ALGORITHMS)), numbers

    return sorted(labels, key=key)
