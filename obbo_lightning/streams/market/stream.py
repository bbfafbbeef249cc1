"""Smoothing of prices before market events, online: every event is a lane."""

import warnings
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, one_of, positive, require_memory
from obbo_lightning.problems.spline import SmoothingSpline, spline_task
from obbo_lightning.streams.fingerprints import digest_arrays
from obbo_lightning.streams.market.prices import (
    BadEvent,
    detect_events,
    format_time,
    prices_around,
    read_events,
    read_prices,
    same_clock,
    simulate_market,
)
from obbo_lightning.streams.stream import Metric, Stream, TaskSequence

SIMULATED_EVENTS = 40


class RollingSubsets(TaskSequence):
    """Task t: the observations [t, t + n) of every lane, a view, standardised by those that are for training."""

    def __init__(self, values: Tensor, training: Tensor, rounds: int) -> None:
        self.values, self.training, self.length = values, training, rounds

    def task(self, t: int) -> Task:
        return spline_task(self.values[t : t + len(self.training)].T, training=self.training, standardise=True)


class MarketStream(Stream):
    """Weight of a smoothing spline for each event, learned on the prices before it, evaluated on those after it.

    Round t uses the observations [t, t + subset) of the ``subset + subsets`` that end with the event's bar. After the
    last round the last ``subset`` of them are fitted and the next ``horizon`` ones forecast.

    Args:
        prices: parquet or CSV file with columns ticker, timestamp, close; None simulates prices.
        events: parquet or CSV file with columns ticker, timestamp; ``auto`` detects jumps in the prices.
        subset: observations per round.
        subsets: number of rounds up to the event.
        horizon: observations after the event, to evaluate the forecast on; 0 if there are none yet.
        validation: ``stride`` takes every fifth observation, ``random`` a fifth of the interior ones, by the seed.
        stride: one of so many observations is for validation.
        offset: index of the first of them, with ``stride``.
        transform: of prices: ``log`` or ``none``; subsets are standardised in any case.
        start: λ_1 of every event.
        on_bad_event: ``raise``, or ``skip`` with a warning.
        threshold: for ``auto``: smallest jump, in robust standard deviations.
        lookback: for ``auto``: bars that the deviation is estimated from.
        gap: for ``auto``: least number of bars between two events of a ticker.
        beyond: number of further rounds, on the bars after the event; the forecast is of the bars after those.
        seed: of the random validation and of simulated prices.
    """

    metric = Metric("mse", higher_is_better=False)
    problem_type = SmoothingSpline
    may_differ = ("start",)
    lanes: pl.DataFrame
    train: RollingSubsets

    def __init__(
        self,
        prices: str | None = None,
        events: str = "auto",
        subset: int = 700,
        subsets: int = 600,
        horizon: int = 120,
        validation: str = "stride",
        stride: int = 5,
        offset: int = 2,
        transform: str = "log",
        start: float = 0.1,
        on_bad_event: str = "raise",
        threshold: float = 8.0,
        lookback: int = 500,
        gap: int = 130,
        beyond: int = 0,
        seed: int = 0,
    ) -> None:
        counts = {"subset": (subset, 4), "subsets": (subsets, 1), "horizon": (horizon, 0), "beyond": (beyond, 0)}
        for name, (value, least) in {**counts, "lookback": (lookback, 2), "gap": (gap, 1)}.items():
            at_least(f"data.{name}", value, least)
        positive("data.threshold", threshold)
        one_of("data.transform", transform, ("log", "none"))
        one_of("data.on_bad_event", on_bad_event, ("raise", "skip"))
        self._start = positive("data.start", start)
        before, after = subset + subsets, beyond + horizon
        _require_capacity(1 if prices else SIMULATED_EVENTS, before + after)
        training = training_mask(subset, validation, stride, offset, seed)
        if prices is None:
            if events != "auto":
                raise ValueError(f"data.events needs data.prices, got {events!r} without any")
            table, found = simulate_market(SIMULATED_EVENTS, before, after, seed)
        else:
            table = read_prices(Path(prices).expanduser())
            if events == "auto":
                found = detect_events(table, threshold, lookback, gap, before, after)
            else:
                found = read_events(Path(events).expanduser())
            table, found = same_clock(table, found)
        source = (prices or "simulated prices") if events == "auto" else events
        if found.is_empty():
            raise ValueError(f"data.events 'auto' found no jump of {threshold} deviations in {source}")
        _require_capacity(len(found), before + after)
        raw, self.lanes, self.skipped = _cut_events(table, found, source, before, after, on_bad_event)
        values = torch.from_numpy(np.log(raw) if transform == "log" else raw)
        self._before = before
        self.train = RollingSubsets(values, training, subsets + beyond)
        # after the last round: validation within its subset, and the forecast if bars follow
        last = values[subsets + beyond :]
        self.validation = RollingSubsets(last, training, 1)
        if horizon:
            self.test = RollingSubsets(last, torch.arange(subset + horizon) < subset, 1)
            task = self.test[0]
            naive = (task["validation_values"] - task["values"][:, -1:]).square().mean(-1)  # forecasts the last value
            self.lanes = self.lanes.with_columns(naive_mse=pl.Series(naive.tolist()))

    def fingerprint(self, t: int, task: Task) -> str:
        """Return a digest of the observations that are new in round t; the others were in the rounds before."""
        values, seen = self.train.values.numpy(), len(self.train.training)
        return digest_arrays(values[t + seen - 1]) if t else digest_arrays(values[:seen], self.train.training.numpy())

    def describe(self, t: int) -> str:
        seen = len(self.train.training)
        return f"bar {t + seen} of every event" if t else f"one of the first {seen} bars of an event"

    def source_digests(self) -> dict[str, str]:
        """Return a digest of the prices up to each event's bar."""
        columns = self.train.values[: self._before].T.contiguous().numpy()
        names = zip(self.lanes["ticker"], self.lanes["timestamp"], strict=True)
        return {
            f"{ticker} {moment}": digest_arrays(column) for (ticker, moment), column in zip(names, columns, strict=True)
        }

    def start(self, problem: Problem, seed: int) -> Tensor:
        """Return λ_1, the same for every event."""
        return torch.full((len(self.lanes), 1), self._start, dtype=torch.float64)


def _require_capacity(lanes: int, sites: int) -> None:
    """Refuse more observations than fit into memory: they take about five numbers each, with logarithms and tables."""
    require_memory(
        "events × (data.subset + data.subsets + data.beyond + data.horizon)", lanes * sites, 40.0 * lanes * sites
    )


def training_mask(subset: int, validation: str, stride: int, offset: int, seed: int) -> Tensor:
    """Return which observations of a subset are for training, the same in every round."""
    one_of("data.validation", validation, ("stride", "random"))
    at_least("data.stride", stride, 2)
    if stride > subset // 2:
        raise ValueError(f"data.stride must be at most half of data.subset, {subset // 2}, got {stride}")
    place = torch.arange(subset)
    if validation == "stride":
        if not 0 <= offset < stride:
            raise ValueError(f"data.offset must lie in 0..{stride - 1}, below data.stride, got {offset}")
        return place % stride != offset
    generator = torch.Generator().manual_seed(derive_seed(seed, "validation"))
    held = 1 + torch.randperm(subset - 2, generator=generator)[: subset // stride]
    return ~torch.isin(place, held)


def _cut_events(
    prices: pl.DataFrame, events: pl.DataFrame, source: str, before: int, after: int, on_bad_event: str
) -> tuple[np.ndarray, pl.DataFrame, list[BadEvent]]:
    """Return prices ``[before + after, events]``, the events, and the events that were skipped."""
    wanted = prices.filter(pl.col("ticker").is_in(events["ticker"].unique().to_list()))
    bars = wanted.partition_by("ticker", as_dict=True)
    columns, kept, bad = [], [], []
    seen: dict[tuple[str, np.datetime64], int] = {}
    times = events["timestamp"].to_numpy()
    for i, (row, ticker) in enumerate(events.select("row", "ticker").iter_rows()):
        found = prices_around(bars.get((ticker,)), times[i], before, after)
        if seen.setdefault((ticker, times[i]), row) != row:
            found = f"must occur once, and is in row {seen[ticker, times[i]]} too"
        if isinstance(found, str):
            bad.append(BadEvent(source, row, ticker, format_time(times[i]), found))
            if on_bad_event == "raise":
                raise ValueError(f"{bad[-1]} (--data.on_bad_event skip leaves it out)")
        else:
            columns.append(found)
            kept.append(i)
    if not kept:
        raise ValueError(f"data.events must leave at least one event that can be used; {bad[0]}")
    if bad:
        warnings.warn(f"{len(bad)} of {len(events)} events skipped: {'; '.join(map(str, bad))}", stacklevel=2)
    return np.ascontiguousarray(np.stack(columns, axis=1)), events[kept].select("ticker", "timestamp"), bad
