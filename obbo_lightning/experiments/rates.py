"""Rates on streams whose exact regret is known: in T, and in one setting of the stream, such as its κ."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.stats import t as student

from obbo_lightning.core.statistics import mean_and_error, standard_error
from obbo_lightning.experiments.comparison import put_first
from obbo_lightning.experiments.drawing import Drawing, finish, look_of, new_figure
from obbo_lightning.experiments.paired import as_cells, compare_pairs
from obbo_lightning.experiments.runs import LeftOut, Run, label_runs
from obbo_lightning.experiments.tables import Table

# Of streams.csv; between rounds and regret is the setting that rates are fitted over.
BEFORE = {"label": pl.String, "seed": pl.Int64, "rounds": pl.Int64}
AFTER = {"regret": pl.Float64}
KAPPA = "condition_number"
# The paper's comparison table (tab:label_table): the order of BLR_w(T), and the power of κ in it.
ORDERS = {
    "oagd": "T/w + H₁ + κ⁴ H₂",
    "sobow": "T/w + V₁ + κ³ H₂",
    "obbo": "T/w + V₁ + κ² H₂",
    "sobbo": "T/w (1 + κ²) + V₁ + κ² H₂",
}


class Rates(NamedTuple):
    """What several algorithms gave on streams of several lengths and, say, condition numbers.

    Attributes:
        streams: a row a run, with its exact regret after the last round.
    """

    streams: pl.DataFrame

    @property
    def labels(self) -> list[str]:
        """Algorithms, the paper's first; the first is what others face."""
        return self.streams["label"].unique(maintain_order=True).to_list()

    @property
    def over(self) -> str:
        """The setting of the stream that rates are fitted over, besides the length."""
        return self.streams.columns[len(BEFORE)]

    @property
    def symbol(self) -> str:
        """What tables call it: the paper's letter, where it has one."""
        return "κ" if self.over == KAPPA else self.over

    def facing(self, reference: str | None) -> "Rates":
        """In order, with ``reference`` first."""
        parts = {key[0]: part for key, part in self.streams.partition_by("label", as_dict=True).items()}
        return Rates(pl.concat([parts[label] for label in put_first(reference, self.labels)]))


def stream_columns(over: str) -> dict[str, type[pl.DataType]]:
    """Of the table that rates are made of.

    >>> list(stream_columns("condition_number"))
    ['label', 'seed', 'rounds', 'condition_number', 'regret']
    """
    return {**BEFORE, over: pl.Float64, **AFTER}


class Fit(NamedTuple):
    """A power law fitted to each seed by itself: the mean exponent and its 95 % confidence interval over seeds."""

    exponent: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.exponent:.2f}{interval}"


def has_rates(runs: Sequence[Run]) -> bool:
    """Whether rates can be fitted to these streams, and they are of several kinds: longer ones, or worse ones."""
    return all(run.stream.rates_over for run in runs) and len({_kind(run) for run in runs}) > 1


def read_rates(runs: Sequence[Run]) -> tuple[Rates, list[LeftOut]]:
    """From runs; algorithms are told apart among those on the same stream, since w, α and K follow T and κ."""
    rows, left_out = [], []
    for kind in sorted({_kind(run) for run in runs}):
        labelled, unused = label_runs([run for run in runs if _kind(run) == kind])
        left_out += unused
        for run in labelled:
            regret = run.metrics["regret/exact"][-1]
            if regret is None or not np.isfinite(regret) or regret <= 0:
                left_out.append(LeftOut(run.directory.path, f"its exact regret is {regret}"))
            else:
                rows.append((run.label, run.settings["seed"], *kind, regret))
    if not rows:
        raise ValueError(f"report needs an exact regret, and found none: {left_out[0].path} {left_out[0].reason}")
    columns = stream_columns(_over(runs[0]))
    return Rates(pl.DataFrame(rows, schema=columns, orient="row")).facing(None), left_out


def _kind(run: Run) -> tuple[int, float]:
    return run.settings["rounds"], float(run.settings["data"][_over(run)])


def _over(run: Run) -> str:
    if run.stream.rates_over is None:
        raise ValueError(f"rates need a stream that says what they are fitted over, got {run.stream.__name__}")
    return run.stream.rates_over


def fit_power(x: np.ndarray, y: np.ndarray) -> Fit:
    """Fit y ∝ x^exponent by least squares in logarithms to each row of ``y [seeds, points]``.

    >>> str(fit_power(np.array([1.0, 2.0, 4.0]), np.array([[8.0, 4.0, 2.0], [1.0, 0.5, 0.25]])))
    '-1.00 [-1.00, -1.00]'
    """
    exponents = np.array([np.polyfit(np.log(x), np.log(row), 1)[0] for row in y])
    mean, error = mean_and_error(exponents)
    if error is None:
        return Fit(mean, None, None)
    half = float(student.ppf(0.975, len(exponents) - 1) * error)
    return Fit(mean, mean - half, mean + half)


class _Line(NamedTuple):
    """How an algorithm's regret moves with ``x``: ``values [seeds, points]``."""

    x: np.ndarray
    values: np.ndarray

    @property
    def fit(self) -> Fit:
        return fit_power(self.x, self.values)


def over_rounds(rates: Rates) -> dict[str, _Line]:
    """regret(T)/T against T, at the κ that has the most lengths."""
    lines = _lines(rates, "rounds", rates.over)
    return {label: _Line(x, values / x) for label, (x, values) in lines.items()}


def over_setting(rates: Rates) -> dict[str, _Line]:
    """Regret against κ, at the length that has the most of them."""
    return _lines(rates, rates.over, "rounds")


def fixed_value(rates: Rates, moving: str, fixed: str) -> float:
    """The value of ``fixed`` at which ``moving`` takes the most values; the smallest of several."""
    counts = rates.streams.group_by(fixed).agg(pl.col(moving).n_unique().alias("n"))
    return float(counts.sort(pl.col("n"), fixed, descending=[True, False])[fixed][0])


def _lines(rates: Rates, moving: str, fixed: str) -> dict[str, _Line]:
    """Of the seeds that have every point of an algorithm's line; two points at least."""
    chosen = rates.streams.filter(pl.col(fixed) == fixed_value(rates, moving, fixed))
    lines = {}
    for label in rates.labels:
        table = chosen.filter(pl.col("label") == label)
        x = np.array(sorted(table[moving].unique().to_list()), dtype=float)
        wide = table.pivot(on=moving, index="seed", values="regret").sort("seed").drop("seed").drop_nulls()
        if len(x) > 1 and len(wide):
            ordered = sorted(wide.columns, key=float)
            lines[label] = _Line(x, wide.select(ordered).to_numpy())
    return lines


def rates_tables(rates: Rates) -> list[Table]:
    """Rates in T, exponents of κ, and paired differences at the longest stream."""
    lengths, numbers = over_rounds(rates), over_setting(rates)
    return [*_table_over_rounds(rates, lengths), *_table_over_setting(rates, numbers), *_paired(lengths)]


def _table_over_rounds(rates: Rates, lines: dict[str, _Line]) -> list[Table]:
    if not lines:
        return []
    fixed, x = fixed_value(rates, "rounds", rates.over), next(iter(lines.values())).x
    caption = (
        f"Exact bilevel local regret(T)/T, mean over seeds, {rates.symbol} = {fixed:g}; slope of its logarithm against "
        "that of T, fitted for each seed: mean [95 % confidence interval over seeds]. Below zero: sublinear regret."
    )
    columns = ["algorithm", "seeds", *(f"T = {t:g}" for t in x), "slope"]
    return [Table("rates", caption, columns, [_row(label, line, x) for label, line in lines.items()])]


def _table_over_setting(rates: Rates, lines: dict[str, _Line]) -> list[Table]:
    """The paper has bounds in κ, and in no other setting."""
    if not lines:
        return []
    length, x = fixed_value(rates, rates.over, "rounds"), next(iter(lines.values())).x
    caption = (
        f"Exact bilevel local regret after T = {length:g} rounds, mean over seeds; exponent of {rates.symbol}, fitted "
        "for each seed: mean [95 % confidence interval over seeds]"
    )
    columns = ["algorithm", "seeds", *(f"{rates.symbol} = {k:g}" for k in x), f"exponent of {rates.symbol}"]
    rows = [_row(label, line, x) for label, line in lines.items()]
    if rates.over == KAPPA:
        caption += "; beside it the order of the paper's upper bound, which speaks of the worst case"
        columns.append("the paper's order of regret")
        rows = [[*row, ORDERS.get(row[0].partition(",")[0], "")] for row in rows]
    return [Table(f"{rates.over}s", f"{caption}.", columns, rows)]


def _row(label: str, line: _Line, x: np.ndarray) -> list[str]:
    means = dict(zip(line.x.tolist(), line.values.mean(axis=0).tolist(), strict=True))
    cells = [f"{float(f'{means[value]:.3g}'):g}" if value in means else "" for value in x.tolist()]  # no 2.45e+03
    return [label, str(len(line.values)), *cells, str(line.fit)]


def _paired(lengths: dict[str, _Line]) -> list[Table]:
    if len(lengths) < 2:
        return []
    first, *others = lengths
    mine = lengths[first]
    rows = []
    for label in others:
        theirs = lengths[label]
        same = len(theirs.values) == len(mine.values) and theirs.x[-1] == mine.x[-1]
        ratio = compare_pairs(np.log10(mine.values[:, -1]), np.log10(theirs.values[:, -1])) if same else None
        rows.append([label, *as_cells(ratio, 2)])
    caption = (
        f"Regret at T = {mine.x[-1]:g} of each against {first}, seed by seed: mean difference of log10 ± its standard "
        "error (+1 is ten times the regret); seeds in which it is larger and smaller; p of the two-sided sign test."
    )
    return [Table("paired", caption, ["algorithm", "log10 of the ratio of regrets", "larger / smaller"], rows)]


def draw_rates(rates: Rates, title: str) -> list[Drawing]:
    """regret(T)/T against T, and regret against κ, both with their fits."""
    drawings = []
    lengths, numbers = over_rounds(rates), over_setting(rates)
    marks = "Marks: mean over seeds ± standard error; lines: the fitted power law, its exponent in the legend."
    if lengths:
        fixed = fixed_value(rates, "rounds", rates.over)
        caption = f"Average exact regret against the length of the stream, {rates.symbol} = {fixed:g}. {marks}"
        labels = ("rounds T", "exact regret(T) / T (lower is better)")
        drawings.append(_draw(rates, lengths, labels, "rates", caption, title))
    if numbers:
        length, words = fixed_value(rates, rates.over, "rounds"), rates.over.replace("_", " ")
        caption = f"Exact regret after T = {length:g} rounds against the stream's {words}. {marks}"
        labels = (f"{words} κ" if rates.over == KAPPA else words, "exact regret (lower is better)")
        drawings.append(_draw(rates, numbers, labels, f"{rates.over}s", caption, title))
    return drawings


def _draw(
    rates: Rates, lines: dict[str, _Line], labels: tuple[str, str], name: str, caption: str, title: str
) -> Drawing:
    figure, (axes,) = new_figure(4.0)
    for label, line in lines.items():
        look = look_of(rates.labels, label)
        mean = line.values.mean(axis=0)
        error = standard_error(line.values).numpy() if len(line.values) > 1 else None
        axes.errorbar(line.x, mean, yerr=error, capsize=2, **{**look, "linestyle": "", "label": None})
        middle = np.exp(np.log(line.values).mean())
        fitted = middle * (line.x / np.exp(np.log(line.x).mean())) ** line.fit.exponent
        axes.plot(line.x, fitted, **{**look, "marker": "", "label": f"{label}: {line.fit.exponent:.2f}"})
    axes.set(xlabel=labels[0], ylabel=labels[1], xscale="log", yscale="log")
    ticks = next(iter(lines.values())).x
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    return finish(figure, axes, name, caption, title)
