"""Rates on streams whose exact regret is known: in the length T, and in one setting of the stream, such as its κ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl
from scipy.stats import t as student

from obbo_lightning.core.statistics import mean_and_error, standard_error
from obbo_lightning.experiments.comparison import compare_pairs
from obbo_lightning.experiments.report_data import (
    ReportData,
    ReportFigure,
    Table,
    finish_figure,
    line_style,
    new_figure,
)
from obbo_lightning.experiments.runs import LeftOut, Run, label_runs

KAPPA = "condition_number"
# The paper's comparison table (tab:label_table): the order of BLR_w(T), with the power of κ in it.
ORDERS = {
    "oagd": "T/w + H₁ + κ⁴ H₂",
    "sobow": "T/w + V₁ + κ³ H₂",
    "obbo": "T/w + V₁ + κ² H₂",
    "sobbo": "T/w (1 + κ²) + V₁ + κ² H₂",
}


class PowerLaw(NamedTuple):
    """Power law y ∝ x^exponent, fitted to each seed: mean exponent and its 95 % confidence interval over seeds."""

    exponent: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.exponent:.2f}{interval}"


def fit_power_law(x: np.ndarray, y: np.ndarray) -> PowerLaw:
    """Fit each row of ``y [seeds, points]`` by least squares in logarithms.

    >>> str(fit_power_law(np.array([1.0, 2.0, 4.0]), np.array([[8.0, 4.0, 2.0], [1.0, 0.5, 0.25]])))
    '-1.00 [-1.00, -1.00]'
    """
    exponents = np.array([np.polyfit(np.log(x), np.log(row), 1)[0] for row in y])
    mean, error = mean_and_error(exponents)
    if error is None:
        return PowerLaw(mean, None, None)
    half = float(student.ppf(0.975, len(exponents) - 1) * error)
    return PowerLaw(mean, mean - half, mean + half)


class Line(NamedTuple):
    """Regret of one algorithm at the points ``x``: ``values [seeds, points]``."""

    x: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Rates(ReportData):
    """Several algorithms on streams of several lengths and, for example, condition numbers.

    Attributes:
        streams: one row per run, with its exact regret after the last round; between ``rounds`` and ``regret`` the
            setting of the stream that rates are fitted over.
    """

    columns: ClassVar[dict[str, dict[str, Any]]] = {
        "streams": {"label": pl.String, "seed": pl.Int64, "rounds": pl.Int64, "regret": pl.Float64}
    }

    streams: pl.DataFrame

    @property
    def over(self) -> str:
        """The setting of the stream that rates are fitted over, beside the length."""
        return self.streams.columns[3]

    @property
    def symbol(self) -> str:
        """What tables call that setting: the paper's letter, where it has one."""
        return "κ" if self.over == KAPPA else self.over

    def lines(self, moving: str) -> dict[str, Line]:
        """Return by label the regret against κ, or regret(T)/T against T for ``rounds``; the other one is fixed.

        Lines have at least two points, and the seeds that have all of them.
        """
        fixed = self.over if moving == "rounds" else "rounds"
        chosen = self.streams.filter(pl.col(fixed) == self.fixed_value(moving))
        lines = {}
        for label in self.labels:
            table = chosen.filter(pl.col("label") == label)
            x = np.array(sorted(table[moving].unique().to_list()), dtype=float)
            wide = table.pivot(on=moving, index="seed", values="regret").sort("seed").drop("seed").drop_nulls()
            if len(x) > 1 and len(wide):
                columns = sorted(wide.columns, key=float)
                values = wide.select(columns).to_numpy()
                lines[label] = Line(x, values / x if moving == "rounds" else values)
        return lines

    def fixed_value(self, moving: str) -> float:
        """Return the κ that has the most lengths, or the length that has the most κ; the smallest of several."""
        fixed = self.over if moving == "rounds" else "rounds"
        counts = self.streams.group_by(fixed).agg(pl.col(moving).n_unique().alias("n"))
        return float(counts.sort(pl.col("n"), fixed, descending=[True, False])[fixed][0])

    def tables(self) -> list[Table]:
        """Return rates in T, exponents of κ, and paired differences at the longest stream."""
        lengths, numbers, tables = self.lines("rounds"), self.lines(self.over), []
        interval = "fitted for each seed: mean [95 % confidence interval over seeds]."
        if lengths:
            caption = (
                f"Exact bilevel local regret(T)/T, mean over seeds, {self.symbol} = {self.fixed_value('rounds'):g}; "
                f"slope of its logarithm against that of T, {interval} Below zero: sublinear regret."
            )
            tables.append(_line_table("rates", caption, lengths, "T", "slope"))
        if numbers:
            caption = (
                f"Exact bilevel local regret after T = {self.fixed_value(self.over):g} rounds, mean over seeds; "
                f"exponent of {self.symbol}, {interval}"
            )
            table = _line_table(f"{self.over}s", caption, numbers, self.symbol, f"exponent of {self.symbol}")
            if self.over == KAPPA:  # the paper has bounds in no other setting
                caption += " Beside it the order of the paper's upper bound, which is about the worst case."
                rows = [[*row, ORDERS.get(row[0].partition(",")[0], "")] for row in table.rows]
                table = Table(table.name, caption, [*table.columns, "the paper's order of regret"], rows)
            tables.append(table)
        return [*tables, *_paired_table(lengths)]

    def figures(self, title: str) -> list[ReportFigure]:
        """Return regret(T)/T against T, and regret against κ, both with their fits."""
        words = self.over.replace("_", " ")
        captions = {
            "rounds": f"Average exact regret against the length of the stream, {self.symbol} = {{:g}}.",
            self.over: f"Exact regret after T = {{:g}} rounds against the stream's {words}.",
        }
        xlabels = {"rounds": "rounds T", self.over: f"{words} κ" if self.over == KAPPA else words}
        figures = []
        for moving, caption in captions.items():
            lines = self.lines(moving)
            if not lines:
                continue
            figure, (axes,) = new_figure(4.0)
            for label, (x, values) in lines.items():
                look, exponent = line_style(self.labels, label), fit_power_law(x, values).exponent
                error = standard_error(values).numpy() if len(values) > 1 else None
                axes.errorbar(x, values.mean(axis=0), yerr=error, capsize=2, **{**look, "linestyle": "", "label": None})
                fitted = np.exp(np.log(values).mean()) * (x / np.exp(np.log(x).mean())) ** exponent
                axes.plot(x, fitted, **{**look, "marker": "", "label": f"{label}: {exponent:.2f}"})
            quantity = "exact regret(T) / T" if moving == "rounds" else "exact regret"
            axes.set(xlabel=xlabels[moving], ylabel=f"{quantity} (lower is better)", xscale="log", yscale="log")
            ticks = next(iter(lines.values())).x
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            marks = "Marks: mean over seeds ± standard error; lines: the fitted power law, its exponent in the legend."
            caption = f"{caption.format(self.fixed_value(moving))} {marks}"
            name = "rates" if moving == "rounds" else f"{self.over}s"
            figures.append(finish_figure(figure, axes, name, caption, title))
        return figures


def _line_table(name: str, caption: str, lines: dict[str, Line], symbol: str, fit: str) -> Table:
    points = next(iter(lines.values())).x.tolist()
    rows = []
    for label, (x, values) in lines.items():
        means = dict(zip(x.tolist(), values.mean(axis=0).tolist(), strict=True))
        cells = [f"{float(f'{means[point]:.3g}'):g}" if point in means else "" for point in points]  # no 2.45e+03
        rows.append([label, str(len(values)), *cells, str(fit_power_law(x, values))])
    return Table(name, caption, ["algorithm", "seeds", *(f"{symbol} = {point:g}" for point in points), fit], rows)


def _paired_table(lines: dict[str, Line]) -> list[Table]:
    """Return the differences to the first algorithm at the longest stream, seed by seed."""
    if len(lines) < 2:
        return []
    first, *others = lines
    mine = lines[first]
    rows = []
    for label in others:
        theirs = lines[label]
        same = len(theirs.values) == len(mine.values) and theirs.x[-1] == mine.x[-1]
        logarithms = (np.log10(line.values[:, -1]) for line in (mine, theirs))
        rows.append([label, *(compare_pairs(*logarithms).cells(2) if same else ("", ""))])
    caption = (
        f"Regret at T = {mine.x[-1]:g} of each against {first}, seed by seed: mean difference of log10 ± its standard "
        "error (+1 is ten times the regret); seeds in which it is larger and smaller; p of the two-sided sign test."
    )
    return [Table("paired", caption, ["algorithm", "log10 of the ratio of regrets", "larger / smaller"], rows)]


def has_rates(runs: Sequence[Run]) -> bool:
    """Return whether rates can be fitted: the streams know over what, and are of several lengths or settings."""
    return all(run.stream.rates_over for run in runs) and len({_point(run) for run in runs}) > 1


def read_rates(runs: Sequence[Run]) -> tuple[Rates, list[LeftOut]]:
    """Return the data of runs, labelled among those on the same stream, since w, α and K follow T and κ."""
    rows, left_out = [], []
    for point in sorted({_point(run) for run in runs}):
        labelled, unused = label_runs([run for run in runs if _point(run) == point])
        left_out += unused
        for run in labelled:
            regret = run.metrics["regret/exact"][-1]
            if regret is None or not np.isfinite(regret) or regret <= 0:
                left_out.append(LeftOut(run.directory.path, f"its exact regret is {regret}"))
            else:
                rows.append((run.label, run.config["seed"], *point, regret))
    if not rows:
        raise ValueError(f"report needs an exact regret, and found none: {left_out[0].path} {left_out[0].reason}")
    columns = ["label", "seed", "rounds", str(runs[0].stream.rates_over), "regret"]
    return Rates(pl.DataFrame(rows, schema=columns, orient="row")).sorted(), left_out


def _point(run: Run) -> tuple[int, float]:
    return run.config["rounds"], float(run.config["data"][run.stream.rates_over])
