"""Rates on quadratic streams, where the exact regret is known: in T, and in the condition number."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.stats import t as student

from obbo_lightning.experiments.comparison import put_first
from obbo_lightning.experiments.drawing import Drawing, finish, look_of, new_figure
from obbo_lightning.experiments.paired import as_cells, compare_pairs
from obbo_lightning.experiments.runs import LeftOut, Run, label_runs
from obbo_lightning.experiments.tables import Table

STREAM_COLUMNS = {
    "label": pl.String,
    "seed": pl.Int64,
    "rounds": pl.Int64,
    "condition_number": pl.Float64,
    "regret": pl.Float64,
}
# The paper's comparison table (tab:label_table): the order of BLR_w(T), and the power of κ in it.
ORDERS = {
    "oagd": "T/w + H₁ + κ⁴ H₂",
    "sobow": "T/w + V₁ + κ³ H₂",
    "obbo": "T/w + V₁ + κ² H₂",
    "sobbo": "T/w (1 + κ²) + V₁ + κ² H₂",
}


class Rates(NamedTuple):
    """What several algorithms gave on quadratic streams of several lengths and condition numbers.

    Attributes:
        streams: a row a run, with its exact regret after the last round.
    """

    streams: pl.DataFrame

    @property
    def labels(self) -> list[str]:
        """Algorithms, the paper's first; the first is what others face."""
        return self.streams["label"].unique(maintain_order=True).to_list()

    def facing(self, reference: str | None) -> "Rates":
        """In order, with ``reference`` first."""
        parts = {key[0]: part for key, part in self.streams.partition_by("label", as_dict=True).items()}
        return Rates(pl.concat([parts[label] for label in put_first(reference, self.labels)]))


class Fit(NamedTuple):
    """A power law fitted to each seed by itself: the mean exponent and its 95 % confidence interval over seeds."""

    exponent: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.exponent:.2f}{interval}"


def has_rates(runs: Sequence[Run]) -> bool:
    """Whether these are quadratic streams of several lengths or condition numbers."""
    quadratic = all(run.settings["data"]["name"] == "quadratic" for run in runs)
    return quadratic and len({_kind(run) for run in runs}) > 1


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
    return Rates(pl.DataFrame(rows, schema=STREAM_COLUMNS, orient="row")).facing(None), left_out


def _kind(run: Run) -> tuple[int, float]:
    return run.settings["rounds"], float(run.settings["data"]["condition_number"])


def fit_power(x: np.ndarray, y: np.ndarray) -> Fit:
    """Fit y ∝ x^exponent by least squares in logarithms to each row of ``y [seeds, points]``.

    >>> str(fit_power(np.array([1.0, 2.0, 4.0]), np.array([[8.0, 4.0, 2.0], [1.0, 0.5, 0.25]])))
    '-1.00 [-1.00, -1.00]'
    """
    exponents = np.array([np.polyfit(np.log(x), np.log(row), 1)[0] for row in y])
    n, mean = len(exponents), float(exponents.mean())
    if n < 2:
        return Fit(mean, None, None)
    half = float(student.ppf(0.975, n - 1) * exponents.std(ddof=1) / n**0.5)
    return Fit(mean, mean - half, mean + half)


class _Line(NamedTuple):
    """How an algorithm's regret moves with ``x``: ``values [seeds, points]``."""

    x: np.ndarray
    values: np.ndarray

    @property
    def fit(self) -> Fit:
        return fit_power(self.x, self.values)


def over_rounds(rates: Rates) -> dict[str, _Line]:
    """regret(T)/T against T, at the condition number that has the most lengths."""
    lines = _lines(rates, "rounds", "condition_number")
    return {label: _Line(x, values / x) for label, (x, values) in lines.items()}


def over_condition_numbers(rates: Rates) -> dict[str, _Line]:
    """Regret against κ, at the length that has the most condition numbers."""
    return _lines(rates, "condition_number", "rounds")


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
    tables = []
    lengths, numbers = over_rounds(rates), over_condition_numbers(rates)
    if lengths:
        kappa = fixed_value(rates, "rounds", "condition_number")
        x = next(iter(lengths.values())).x
        tables.append(
            Table(
                "rates",
                f"Exact bilevel local regret(T)/T, mean over seeds, κ = {kappa:g}; slope of its logarithm against that "
                "of T, fitted for each seed: mean [95 % confidence interval over seeds]. Below zero: sublinear regret.",
                ["algorithm", "seeds", *(f"T = {t:g}" for t in x), "slope"],
                [_row(label, line, x) for label, line in lengths.items()],
            )
        )
    if numbers:
        length = fixed_value(rates, "condition_number", "rounds")
        x = next(iter(numbers.values())).x
        tables.append(
            Table(
                "condition_numbers",
                f"Exact bilevel local regret after T = {length:g} rounds, mean over seeds; exponent of κ, fitted for "
                "each seed: mean [95 % confidence interval over seeds]; beside it the order of the paper's upper "
                "bound, which speaks of the worst case.",
                ["algorithm", "seeds", *(f"κ = {k:g}" for k in x), "exponent of κ", "the paper's order of regret"],
                [[*_row(label, line, x), ORDERS.get(label.partition(",")[0], "")] for label, line in numbers.items()],
            )
        )
    return [*tables, *_paired(lengths)]


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
    lengths, numbers = over_rounds(rates), over_condition_numbers(rates)
    if lengths:
        kappa = fixed_value(rates, "rounds", "condition_number")
        caption = (
            f"Average exact regret against the length of the stream, κ = {kappa:g}. Marks: mean over seeds ± standard "
            "error; lines: the fitted power law, its slope in the legend."
        )
        labels = ("rounds T", "exact regret(T) / T")
        drawings.append(_draw(rates, lengths, labels, "rates", caption, title))
    if numbers:
        length = fixed_value(rates, "condition_number", "rounds")
        caption = (
            f"Exact regret after T = {length:g} rounds against the condition number of the inner problem. Marks: mean "
            "over seeds ± standard error; lines: the fitted power law, its exponent in the legend."
        )
        labels = ("condition number κ", "exact regret")
        drawings.append(_draw(rates, numbers, labels, "condition_numbers", caption, title))
    return drawings


def _draw(
    rates: Rates, lines: dict[str, _Line], labels: tuple[str, str], name: str, caption: str, title: str
) -> Drawing:
    figure, (axes,) = new_figure(4.0)
    for label, line in lines.items():
        look = look_of(rates.labels, label)
        mean = line.values.mean(axis=0)
        error = line.values.std(axis=0, ddof=1) / len(line.values) ** 0.5 if len(line.values) > 1 else None
        axes.errorbar(line.x, mean, yerr=error, capsize=2, **{**look, "linestyle": "", "label": None})
        middle = np.exp(np.log(line.values).mean())
        fitted = middle * (line.x / np.exp(np.log(line.x).mean())) ** line.fit.exponent
        axes.plot(line.x, fitted, **{**look, "marker": "", "label": f"{label}: {line.fit.exponent:.2f}"})
    axes.set(xlabel=labels[0], ylabel=labels[1], xscale="log", yscale="log")
    ticks = next(iter(lines.values())).x
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    return finish(figure, axes, name, caption, title)
