"""Market runs side by side: the paper's tables 1 to 3."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from obbo_lightning.core.statistics import clustered_error, clustered_interval
from obbo_lightning.escaping import unescape_table
from obbo_lightning.experiments.comparison import put_first
from obbo_lightning.experiments.paired import as_cells, compare_clusters, compare_pairs
from obbo_lightning.experiments.runs import DAMAGE, LeftOut, Run
from obbo_lightning.experiments.tables import Table

EVENT_COLUMNS = ("ticker", "timestamp", "naive_mse", "weight", "regret", "gradient_norm", "test_mse")
PAIRED_COLUMNS = (
    "difference of the mean squared error",
    "95 % interval",
    "events larger / smaller",
    "days larger / smaller",
)
FORECAST_COLUMNS = ("mean", "standard error", "median", "median abs. deviation")


class MarketComparison(NamedTuple):
    """What several runs gave on the same events.

    Attributes:
        events: a row an event of a run.
        regret: median and median absolute deviation over events, every 100 rounds of a run.
    """

    events: pl.DataFrame
    regret: pl.DataFrame

    @property
    def labels(self) -> list[str]:
        """Algorithms (and what tells two of the same apart), the paper's first; the first is what others face."""
        return self.events["label"].unique(maintain_order=True).to_list()

    def facing(self, reference: str | None) -> "MarketComparison":
        """In order, with ``reference`` first."""
        labels = put_first(reference, self.labels)
        events, regret = ({k[0]: t for k, t in table.partition_by("label", as_dict=True).items()} for table in self)
        return MarketComparison(pl.concat([events[x] for x in labels]), pl.concat([regret[x] for x in labels]))

    def column(self, label: str, name: str) -> np.ndarray:
        """An algorithm's numbers, one an event."""
        return self.events.filter(pl.col("label") == label)[name].to_numpy()

    @property
    def days(self) -> np.ndarray:
        """Of each event; events of one day share its news, and their errors go together."""
        moments = self.events.filter(pl.col("label") == self.labels[0])["timestamp"]
        return moments.cast(pl.String).str.slice(0, 10).to_numpy()


class _Lanes(NamedTuple):
    events: pl.DataFrame
    rounds: np.ndarray
    regret: np.ndarray


def has_events(run: Run) -> bool:
    """Whether a run's lanes are market events."""
    try:
        return set(EVENT_COLUMNS) <= set(pl.read_csv(run.directory.events, n_rows=0).columns)
    except DAMAGE:
        return False


def read_market(runs: Sequence[Run]) -> tuple[MarketComparison, list[LeftOut]]:
    """From labelled runs; an event's numbers are means over the seeds that all algorithms have."""
    lanes: dict[str, dict[int, _Lanes]] = {}
    left_out = []
    for run in runs:
        try:
            read = _read_lanes(run)
            first = next(iter(next(iter(lanes.values())).values())) if lanes else read
            if not read.events.select("ticker", "timestamp").equals(first.events.select("ticker", "timestamp")):
                raise ValueError("it has other events than the first run")
            lanes.setdefault(run.label, {})[run.settings["seed"]] = read
        except ValueError as reason:
            left_out.append(LeftOut(run.directory.path, str(reason)))
    if not lanes:
        raise ValueError(f"report needs finished runs, and found none: {left_out[0].path} {left_out[0].reason}")
    common = sorted(set.intersection(*(set(found) for found in lanes.values())))
    if not common:
        found = "; ".join(f"{sorted(seeds)} for {label}" for label, seeds in lanes.items())
        raise ValueError(f"report needs a seed that all have, got {found}")
    # The last value's error knows nothing of algorithms: where seeds differ in it, they differ in their prices.
    prices = {tuple(seeds[seed].events["naive_mse"]) for seeds in lanes.values() for seed in common}
    if len(common) > 1 and len(prices) > 1:
        raise ValueError(f"report needs one seed where each has its own simulated prices, got {common}")
    for run in runs:
        if run.settings["seed"] in lanes.get(run.label, {}) and run.settings["seed"] not in common:
            left_out.append(LeftOut(run.directory.path, f"not all algorithms have the seed {run.settings['seed']}"))
    keys = ("label", "ticker", "timestamp")
    events, middles = [], []
    for label, seeds in lanes.items():
        used = [seeds[seed] for seed in common]
        events.append(pl.concat([one.events for one in used]).group_by(keys, maintain_order=True).mean())
        middles.append(_middle(label, used[0].rounds, np.mean([one.regret for one in used], axis=0)))
    return MarketComparison(pl.concat(events), pl.concat(middles)).facing(None), left_out


def _read_lanes(run: Run) -> _Lanes:
    try:
        table = pl.read_csv(run.directory.events, try_parse_dates=True, schema_overrides={"ticker": pl.String})
        events = unescape_table(table).select(pl.lit(run.label).alias("label"), *EVENT_COLUMNS)
        with np.load(run.directory.lanes, allow_pickle=False) as lanes:
            return _Lanes(events, lanes["rounds"], lanes["regret"])
    except DAMAGE as damage:
        raise ValueError(f"it is damaged: {type(damage).__name__} {' '.join(str(damage).split())}") from None


def _middle(label: str, rounds: np.ndarray, curves: np.ndarray) -> pl.DataFrame:
    median = np.median(curves, axis=1)
    deviation = np.median(np.abs(curves - median[:, None]), axis=1)
    return pl.DataFrame({"label": label, "round": rounds, "median": median, "mad": deviation})


def market_tables(comparison: MarketComparison) -> list[Table]:
    """The columns of the paper's tables 1 to 3 with regret and gradient norm; and the paired differences."""
    first, *others = comparison.labels
    rows, days = [], comparison.days
    for label in comparison.labels:
        regret, norm = (np.median(comparison.column(label, name)) for name in ("regret", "gradient_norm"))
        errors = comparison.column(label, "test_mse")
        rows.append([label, *_forecast_cells(errors, days), f"{regret:.3f}", f"{norm:.4f}"])
    naive, count = comparison.column(first, "naive_mse"), len(set(days))
    rows.append(["last value", *_forecast_cells(naive, days), "", ""])
    final = Table(
        "table",
        f"Forecast mean squared error over {len(naive)} events on {count} days, in the units of each fit's "
        "standardised log price (the columns of the paper's tables 1 to 3), with the median cumulative regret and the "
        "median gradient norm after the last round; lower is better in all. The standard error is that of whole days, "
        "whose events go together. “Last value” forecasts the last price.",
        ["algorithm", *FORECAST_COLUMNS, "median regret", "median gradient norm at T"],
        rows,
    )
    reference = comparison.column(first, "test_mse")
    compared = {label: comparison.column(label, "test_mse") for label in others} | {"last value": naive}
    paired = Table(
        "paired",
        f"Forecast error of each minus that of {first}, event by event: mean difference ± its standard error by days, "
        f"and its 95 % interval when the {count} days are drawn again with replacement; on how many events it is "
        "larger and smaller, ties in neither; on how many days the mean over the day's events is, with p of the "
        "two-sided sign test of the days.",
        ["algorithm", *PAIRED_COLUMNS],
        [[label, *_paired_cells(reference, errors, days)] for label, errors in compared.items()],
    )
    return [final, paired]


def _forecast_cells(errors: np.ndarray, days: np.ndarray) -> list[str]:
    median, error = np.median(errors), clustered_error(errors, days)
    values = (errors.mean(), median, np.median(np.abs(errors - median)))
    mean, *middle = (f"{value:.4f}" for value in values)
    return [mean, "" if error is None else f"{error:.4f}", *middle]


def _paired_cells(first: np.ndarray, second: np.ndarray, days: np.ndarray) -> list[str]:
    by_event, interval = compare_pairs(first, second), clustered_interval(second - first, days)
    difference, of_days = as_cells(compare_clusters(first, second, days), 4)
    limits = "" if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"
    return [difference, limits, f"{by_event.larger} / {by_event.smaller}", of_days]
