"""Rates on streams whose exact regret is known: in the length T, and in one setting of the stream, such as its κ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from obbo_lightning.experiments.runs import Run, label_runs

# The paper's comparison table (tab:label_table): the order of BLR_w(T), with the power of κ in it.
ORDERS = {
    "oagd": "T/w + H₁ + κ⁴ H₂",
    "sobow": "T/w + V₁ + κ³ H₂",
    "obbo": "T/w + V₁ + κ² H₂",
    "sobbo": "T/w (1 + κ²) + V₁ + κ² H₂",
}
WORDS = {"rounds": ("T", "length T"), "condition_number": ("κ", "condition number κ")}  # letters of the paper
Lines = dict[str, tuple[np.ndarray, np.ndarray]]  # by label: x [points], y [seeds, points]


def fit_power_law(x: np.ndarray, y: np.ndarray) -> tuple[float, float | None]:
    """Fit y ∝ x^exponent to each row of ``y [seeds, points]`` by least squares in logarithms.

    Returns the mean exponent and half of its 95 % confidence interval over seeds; None for one seed.
    """
    exponents = np.array([np.polyfit(np.log(x), np.log(row), 1)[0] for row in y])
    mean, error = mean_and_error(exponents)
    return mean, None if error is None else float(student.ppf(0.975, len(exponents) - 1) * error)


@dataclass(frozen=True)
class Rates(ReportData):
    """Exact regrets of several algorithms on streams of several lengths and, for example, condition numbers."""

    columns: ClassVar[dict[str, dict[str, Any]]] = {
        "streams": {"label": pl.String, "seed": pl.Int64, "rounds": pl.Int64, "regret": pl.Float64}
    }

    streams: pl.DataFrame  # one row per run; between rounds and regret the setting that rates are fitted over

    def lines(self) -> Iterator[tuple[str, str, str, str, Lines]]:
        """Yield regret(T)/T against T, and regret against κ, each where an algorithm has two points or more.

        Each is the name of a table and a figure, symbol and words of x, what y is, and the lines. The fixed κ is that
        with the most lengths, the fixed length that with the most κ; the smallest of several. A line has the seeds that
        have all its points.
        """
        over = self.streams.columns[3]
        for moving, fixed, name in (("rounds", over, "rates"), (over, "rounds", f"{over}s")):
            counts = self.streams.group_by(fixed).agg(pl.col(moving).n_unique().alias("n"))
            value = float(counts.sort(pl.col("n"), fixed, descending=[True, False])[fixed][0])
            lines = {}
            for label in self.labels:
                table = self.streams.filter(pl.col(fixed) == value, label=label)
                wide = table.pivot(on=moving, index="seed", values="regret").sort("seed").drop("seed").drop_nulls()
                points = sorted(wide.columns, key=float)
                if len(points) > 1 and len(wide):
                    x, y = np.array(points, dtype=float), wide.select(points).to_numpy()
                    lines[label] = x, y / x if moving == "rounds" else y
            (symbol, words), (other, _) = (WORDS.get(key, (key, key)) for key in (moving, fixed))
            regret = f"regret{'(T)/T' if moving == 'rounds' else ''} at {other} = {value:g}"
            if lines:
                yield name, symbol, words, regret, lines

    def tables(self) -> list[Table]:
        """Return rates in T, exponents of κ, and paired differences at the longest stream."""
        tables, paired = [], []
        for name, symbol, words, regret, lines in self.lines():
            points = next(iter(lines.values()))[0].tolist()
            columns = ["algorithm", "seeds", *(f"{symbol} = {point:g}" for point in points)]
            columns += ["slope"] if symbol == "T" else [f"exponent of {symbol}"]
            columns += ["the paper's order of regret"] if symbol == "κ" else []  # it has bounds in nothing else
            rows = []
            for label, (x, y) in lines.items():
                means = dict(zip(x.tolist(), y.mean(axis=0).tolist(), strict=True))
                cells = [f"{float(f'{means[point]:.3g}'):g}" if point in means else "" for point in points]
                power, half = fit_power_law(x, y)
                cells.append(f"{power:.2f}" + ("" if half is None else f" [{power - half:.2f}, {power + half:.2f}]"))
                order = [ORDERS.get(label.partition(",")[0], "")] if symbol == "κ" else []
                rows.append([label, str(len(y)), *cells, *order])
            caption = (
                f"Exact bilevel local {regret}, mean over seeds, and its power of the {words}, fitted for each seed: "
                "mean [95 % confidence interval over seeds]. A slope below zero is sublinear regret; the paper's "
                "orders are those of upper bounds, which are about the worst case."
            )
            tables.append(Table(name, caption, columns, rows))
            if symbol == "T" and len(lines) > 1:
                paired = [_paired_table(lines)]
        return tables + paired

    def figures(self, title: str) -> list[ReportFigure]:
        """Return regret(T)/T against T, and regret against κ, both with their fits."""
        figures = []
        for name, _, words, regret, lines in self.lines():
            figure, (axes,) = new_figure(4.0)
            for label, (x, y) in lines.items():
                look, (power, _) = line_style(self.labels, label), fit_power_law(x, y)
                error = standard_error(y).numpy() if len(y) > 1 else None
                axes.errorbar(x, y.mean(axis=0), yerr=error, capsize=2, **{**look, "linestyle": "", "label": None})
                fitted = np.exp(np.log(y).mean()) * (x / np.exp(np.log(x).mean())) ** power
                axes.plot(x, fitted, **{**look, "marker": "", "label": f"{look['label']}: {power:.2f}"})
            axes.set(xlabel=words, ylabel=f"exact {regret}\n(lower is better)", xscale="log", yscale="log")
            ticks = next(iter(lines.values()))[0]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            caption = (
                f"Exact {regret} against the {words}. Marks: mean over seeds ± standard error; lines: the fitted power "
                "law, its exponent in the legend."
            )
            figures.append(finish_figure(figure, name, caption, title))
        return figures


def _paired_table(lines: Lines) -> Table:
    """Return the differences to the first algorithm at the longest stream, seed by seed."""
    first, *others = lines
    longest, mine = lines[first][0][-1], lines[first][1][:, -1]
    rows = []
    for label in others:
        x, y = lines[label]
        same = len(y) == len(mine) and x[-1] == longest
        rows.append([label, *(compare_pairs(np.log10(mine), np.log10(y[:, -1]), 2) if same else ("", ""))])
    caption = (
        f"Regret at T = {longest:g} of each against {first}, seed by seed: mean difference of log10 ± its standard "
        "error (+1 is ten times the regret); seeds in which it is larger and smaller; p of the two-sided sign test."
    )
    return Table("paired", caption, ["algorithm", "log10 of the ratio of regrets", "larger / smaller"], rows)


def has_rates(runs: Sequence[Run]) -> bool:
    """Return whether rates can be fitted: the streams know over what, and are of several lengths or settings."""
    return all(run.stream.rates_over for run in runs) and len({_point(run) for run in runs}) > 1


def read_rates(runs: Sequence[Run]) -> tuple[Rates, list[str]]:
    """Return the data of runs, labelled among those on the same stream, since w, α and K follow T and κ."""
    rows, left_out = [], []
    for point in sorted({_point(run) for run in runs}):
        labelled, unused = label_runs([run for run in runs if _point(run) == point])
        left_out += unused
        for run in labelled:
            regret = run.metrics["regret/exact"][-1]
            if regret is None or not np.isfinite(regret) or regret <= 0:
                left_out.append(f"{run.directory.path} is left out: its exact regret is {regret}")
            else:
                rows.append((run.label, run.config["seed"], *point, regret))
    if not rows:
        raise ValueError(f"report needs an exact regret, and found none: {left_out[0]}")
    columns = ["label", "seed", "rounds", str(runs[0].stream.rates_over), "regret"]
    return Rates(pl.DataFrame(rows, schema=columns, orient="row")), left_out


def _point(run: Run) -> tuple[int, float]:
    return run.config["rounds"], float(run.config["data"][run.stream.rates_over])
