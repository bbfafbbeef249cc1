"""What reports consist of: data frames with a CSV file each, tables, and figures in a common style."""

import csv
import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import Any, ClassVar, NamedTuple, TypeVar

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from tabulate import LATEX_ESCAPE_RULES, tabulate

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
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "obbo_lightning",  # the same figure gives the same file
}
# Symbols of our headers and captions that LaTeX does not print outside of formulas; tabulate escapes all others.
LATEX_SYMBOLS = {"±": r"\pm", "−": "-", "√": r"\surd", "≥": r"\geq", "‖": r"\|", "|": "|"}
LATEX_SYMBOLS |= {"α": r"\alpha", "η": r"\eta", "ρ": r"\rho", "κ": r"\kappa", "λ": r"\lambda", "ν": r"\nu"}
LATEX_SYMBOLS |= {"²": "^2", "³": "^3", "⁴": "^4", "₁": "_1", "₂": "_2"}


class Table(NamedTuple):
    """A table whose cells are text.

    Attributes:
        name: of its files.
        caption: what it shows, with units, in sentences.
        columns: the header; the first column names the rows.
        rows: as many cells each.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def write(self, folder: Path) -> list[Path]:
        """Write ``name.md``, ``name.csv`` and ``name.tex``."""
        written = []
        for suffix, text in ((".md", self.markdown()), (".csv", self.csv()), (".tex", self.latex())):
            written.append(folder / f"{self.name}{suffix}")
            written[-1].write_text(text, encoding="utf-8")
        return written

    def markdown(self) -> str:
        r"""Return a pipe table, without padding.

        >>> print(Table("t", "Regret.", ("algorithm", "‖d‖ | regret"), [("obbo", "1.0 ± 0.1")]).markdown(), end="")
        | algorithm | ‖d‖ \| regret |
        |---|---|
        | obbo | 1.0 ± 0.1 |
        """
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

    def latex(self) -> str:
        r"""Return a table for a paper: booktabs, label ``tab:name``.

        >>> print(Table("t", "Regret, w = 10.", ("algorithm", "α"), [("a_b", "50 %")]).latex(), end="")
        \begin{table}
        \centering
        \caption{Regret, w = 10.}\label{tab:t}
        \begin{tabular}{lr}
        \toprule
         algorithm   &    $\alpha$ \\
        \midrule
         a\_b        & 50 \% \\
        \bottomrule
        \end{tabular}
        \end{table}
        """
        alignment = ["left"] + ["right"] * (len(self.columns) - 1)
        tabular = tabulate(self.rows, self.columns, "latex_booktabs", disable_numparse=True, colalign=alignment)
        caption = "".join(LATEX_ESCAPE_RULES.get(character, character) for character in self.caption)
        head = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}\label{{tab:{self.name}}}"]
        text = "\n".join([*head, tabular, r"\end{table}"]) + "\n"
        return text.translate({ord(symbol): f"${formula}$" for symbol, formula in LATEX_SYMBOLS.items()})


def format_number(value: float, digits: int, sign: str = "") -> str:
    """Return a number with so many decimals; a huge one in scientific notation.

    >>> format_number(0.5, 3), format_number(1.5, 1, "+"), format_number(3.2858e35, 1)
    ('0.500', '+1.5', '3.29e+35')
    """
    return f"{value:{sign}.{digits}f}" if abs(value) < 1e7 else f"{value:{sign}.3g}"


def format_with_error(mean: float, error: float | None, digits: int, sign: str = "") -> str:
    """Return ``mean ± error``; the mean alone where there is no error.

    >>> format_with_error(0.5, 0.01, 3), format_with_error(0.5, None, 1, "+")
    ('0.500 ± 0.010', '+0.5')
    """
    return format_number(mean, digits, sign) + ("" if error is None else f" ± {format_number(error, digits)}")


class ReportFigure(NamedTuple):
    """A figure.

    Attributes:
        name: of its files.
        caption: what it shows, in sentences.
        figure: matplotlib's.
    """

    name: str
    caption: str
    figure: Figure

    def save(self, folder: Path) -> list[Path]:
        """Write ``name.png`` and ``name.svg``, neither with a date."""
        png, svg = (folder / f"{self.name}.{suffix}" for suffix in ("png", "svg"))
        with report_style():
            for axes in self.figure.axes:
                _set_ticks(axes)
            self.figure.savefig(png, dpi=160)
            self.figure.savefig(svg, transparent=True, dpi=160, metadata={"Date": None})
        return [png, svg]


def report_style() -> AbstractContextManager[None]:
    """Return a context in which figures get the style of reports."""
    return mpl.rc_context(STYLE)


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of the common width and its axes, row by row; without pyplot, whose state is the user's."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def set_title(figure: Figure, title: str) -> None:
    """Set a title above all axes, on as many lines as it needs."""
    figure.suptitle(fill(escape_mathtext(title), 66), x=0.01, ha="left", fontsize="medium")


def finish_figure(figure: Figure, axes: Axes, name: str, caption: str, title: str) -> ReportFigure:
    """Add the title, and the legend of ``axes`` below everything, where no line is."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels))
    columns = 3 if longest < 18 else 2 if longest < 32 else 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, rows - 2))
    set_title(figure, title)
    return ReportFigure(name, caption, figure)


def line_style(labels: Sequence[str], label: str) -> dict[str, Any]:
    """Return arguments of `Axes.plot`: an algorithm's colour and marker, and a line style for each variant of it.

    Algorithms that are not in `ALGORITHMS` share a colour and a marker, and differ in their line styles.
    """
    known = {one: one.partition(",")[0] if one.partition(",")[0] in COLOURS else "" for one in labels}
    variants = [other for other in labels if known[other] == known[label]]
    return {
        "color": COLOURS.get(known[label], "#7A5195"),
        "marker": MARKERS.get(known[label], "h"),
        "linestyle": LINE_STYLES[variants.index(label) % len(LINE_STYLES)],
        "markersize": 4,
        "label": escape_mathtext(label),
    }


def _set_ticks(axes: Axes) -> None:
    """Set few and plain numbers on logarithmic axes, whole ones where rounds are counted."""
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


class Score(NamedTuple):
    """Mean score of a method and its standard error; None for one run."""

    mean: float
    error: float | None


D = TypeVar("D", bound="ReportData")


class ReportData(ABC):
    """Base class of what a report shows: data frames, from which its tables and figures are made.

    A subclass is a dataclass with the frames as fields. Each frame has a CSV file of its name.

    Attributes:
        columns: columns of each frame, with their types.
        optional: frames that may have no rows; there is no file then.
    """

    columns: ClassVar[dict[str, dict[str, Any]]]
    optional: ClassVar[tuple[str, ...]] = ()

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
    def frames(self) -> dict[str, pl.DataFrame]:
        """The data frames by name, without those that have no rows."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: frame for name, frame in found.items() if len(frame) or name not in self.optional}

    @property
    def labels(self) -> list[str]:
        """Algorithms, with the settings in which those of one name differ; the first is the reference."""
        first: pl.DataFrame = next(iter(self.frames.values()))
        return first["label"].unique(maintain_order=True).to_list()

    def sorted(self: D, reference: str | None = None) -> D:
        """Return the same data with labels in order, the reference first."""
        labels = sorted_labels(self.labels)
        if reference is not None and reference not in labels:
            raise ValueError(f"--reference must be one of {'; '.join(labels)}, got {reference!r}")
        place = {label: i for i, label in enumerate(labels)} | ({} if reference is None else {reference: -1})
        order = pl.col("label").replace_strict(place, return_dtype=pl.Int64, default=len(labels))
        return self._map(lambda frame: frame.sort(order, maintain_order=True) if "label" in frame.columns else frame)

    def rounded(self: D) -> D:
        """Return the numbers that CSV files hold, so that what is made of them again is the same to the last digit."""
        return self._map(lambda frame: frame.with_columns(pl.col(pl.Float64).round_sig_figs(DIGITS)))

    def _map(self: D, change: Callable[[pl.DataFrame], pl.DataFrame]) -> D:
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields(self)})  # type: ignore[arg-type]

    def write(self, folder: Path) -> list[Path]:
        """Write a CSV file for each frame."""
        paths = {folder / f"{name}.csv": frame for name, frame in self.frames.items()}
        for path, frame in paths.items():
            escape_table(frame).write_csv(path)
        return list(paths)

    @classmethod
    def read(cls: type[D], folder: Path) -> D | None:
        """Return what `write` wrote; None where there is no such report."""
        if not (folder / f"{next(iter(cls.columns))}.csv").is_file():
            return None
        try:
            return cls(**{name: cls._read_frame(folder / f"{name}.csv") for name in cls.columns})
        except (OSError, pl.exceptions.PolarsError) as damage:
            reason = f"{type(damage).__name__} {' '.join(str(damage).split())}"
            raise ValueError(f"{folder} has a damaged report: {reason}") from None

    @classmethod
    def _read_frame(cls, path: Path) -> pl.DataFrame:
        columns = cls.columns[path.stem]
        if path.stem in cls.optional and not path.is_file():
            return pl.DataFrame(schema=columns)
        frame = pl.read_csv(path, schema_overrides=columns, infer_schema_length=None)
        frame.select(*columns)  # refuses a frame without one of them
        return unescape_table(frame)


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """Return labels in the order of their algorithms in `ALGORITHMS`, then of their settings, numbers by value.

    >>> sorted_labels(["mine", "adam", "obbo, window = 25", "obbo, window = 3"])
    ['obbo, window = 3', 'obbo, window = 25', 'adam', 'mine']
    """

    def key(label: str) -> tuple[int, list[str | float]]:
        algorithm = label.partition(",")[0]
        words = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", label)  # every second one is a number
        numbers: list[str | float] = [float(word) if i % 2 else word for i, word in enumerate(words)]
        return (ALGORITHMS.index(algorithm) if algorithm in ALGORITHMS else len(ALGORITHMS)), numbers

    return sorted(labels, key=key)
