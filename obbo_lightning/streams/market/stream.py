"""Online hyperparameter optimization on market events: every event is a lane."""

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
from obbo_lightning.streams.fingerprints import digest_of
from obbo_lightning.streams.market.columns import Columns
from obbo_lightning.streams.market.prices import (
    BadEvent,
    detect_events,
    find_bar,
    name_moment,
    read_events,
    read_prices,
    same_clock,
    series_of,
    simulate_market,
)
from obbo_lightning.streams.stream import Metric, Stream
from obbo_lightning.streams.tasks import TaskSequence

SIMULATED = 40


class RollingSubsets(TaskSequence):
    """Task t: observations [t, t + length) of every lane, a view, split and standardised by its training part.

    Args:
        values: ``[observations, lanes]``.
        training: which observations of a subset are for training ``[length]``.
        rounds: how many subsets.
    """

    def __init__(self, values: Tensor, training: Tensor, rounds: int) -> None:
        self.values = values
        self.training = training
        self.length = rounds

    def task(self, t: int) -> Task:
        return spline_task(self.values[t : t + len(self.training)].T, training=self.training, standardise=True)


class MarketStream(Stream):
    """A smoothing spline's weight for each event, on the prices that lead to it; judged on the prices that follow.

    Round t sees the observations [t, t + subset) of the ``subset + subsets`` that end with the event's bar. Afterwards
    the last ``subset`` of them are fitted and the ``horizon`` next ones forecast.

    Args:
        prices: parquet or CSV with columns ticker, timestamp, close, or a folder of them; without a ticker column the
            ticker is the file's name; None simulates some.
        events: parquet or CSV with columns ticker, timestamp; ``auto`` finds jumps in the prices.
        subset: observations of a round.
        subsets: rounds.
        horizon: observations after the event, to judge the forecast on; 0 where there are none yet.
        validation: ``stride`` takes every fifth observation, ``random`` a fifth of the interior ones, by the seed.
        stride: one in how many is for validation.
        offset: the first of them, with ``stride``.
        transform: of prices: ``log`` or ``none``; subsets are standardised in any case.
        start: λ_1 of every event.
        on_bad_event: ``raise``, or ``skip`` and say which.
        threshold: of ``auto``: robust standard deviations that make a jump.
        lookback: of ``auto``: bars that the deviation is taken from.
        gap: of ``auto``: least bars between two events of a ticker.
        beyond: rounds behind the event's bar, on the bars that followed it; the forecast is of the bars after those.
        seed: of the random validation and of simulated prices.
        columns: what ticker, timestamp and close are called in the files, ``timestamp=Date,close=Close`` or a mapping;
            Date, Datetime, Time, Symbol and Close, in any case, are found without it.
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
        columns: dict[str, str] | str | None = None,
    ) -> None:
        counts = {"subset": (subset, 4), "subsets": (subsets, 1), "horizon": (horizon, 0), "beyond": (beyond, 0)}
        for name, (value, least) in {**counts, "lookback": (lookback, 2), "gap": (gap, 1)}.items():
            at_least(f"data.{name}", value, least)
        positive("data.threshold", threshold)
        one_of("data.transform", transform, ("log", "none"))
        one_of("data.on_bad_event", on_bad_event, ("raise", "skip"))
        self._first = positive("data.start", start)
        before, after = subset + subsets, beyond + horizon
        _require_room(1 if prices else SIMULATED, before + after)
        training = training_mask(subset, validation, stride, offset, seed)
        if prices is None:
            if events != "auto":
                raise ValueError(f"data.events needs data.prices, got {events!r} without any")
            table, named = simulate_market(SIMULATED, before, after, seed)
        else:
            table, named = _read_both(prices, events, columns, (threshold, lookback, gap, before, after))
        source = prices or "simulated prices"
        if named.is_empty():
            raise ValueError(f"data.events 'auto' found no jump of {threshold} deviations in {source}")
        _require_room(len(named), before + after)
        sources = source, source if events == "auto" else events
        raw, chosen, self.skipped = _cut_all(table, named, sources, before, after, on_bad_event)
        values = torch.from_numpy(np.log(raw) if transform == "log" else raw)
        self._before, self.lanes = before, chosen
        self.train = RollingSubsets(values, training, subsets + beyond)
        self._judge_last(values[subsets + beyond :], training, horizon)

    def _judge_last(self, values: Tensor, training: Tensor, horizon: int) -> None:
        """What is behind the last round: validation in its own subset, and the forecast where something follows."""
        self.validation = RollingSubsets(values, training, 1)
        if horizon:
            forecast = torch.arange(len(training) + horizon) < len(training)
            self.test = RollingSubsets(values, forecast, 1)
            self.lanes = self.lanes.with_columns(naive_mse=pl.Series(_naive(self.test[0]).tolist()))

    def fingerprint(self, t: int, task: Task) -> str:
        """Of the observations that round t is the first to see: the others were in the rounds before it."""
        values, seen = self.train.values.numpy(), len(self.train.training)
        return digest_of(values[t + seen - 1]) if t else digest_of(values[:seen], self.train.training.numpy())

    def describe(self, t: int) -> str:
        seen = len(self.train.training)
        return f"bar {t + seen} of every event" if t else f"one of the first {seen} bars of an event"

    def source_digests(self) -> dict[str, str]:
        """Of the prices up to each event's bar."""
        columns = self.train.values[: self._before].T.contiguous().numpy()
        names = zip(self.lanes["ticker"], self.lanes["timestamp"], strict=True)
        return {
            f"{ticker} {moment}": digest_of(column) for (ticker, moment), column in zip(names, columns, strict=True)
        }

    def start(self, problem: Problem, seed: int) -> Tensor:
        """λ_1, the same for every event."""
        return torch.full((len(self.lanes), 1), self._first, dtype=torch.float64)


def _require_room(lanes: int, sites: int) -> None:
    """Prices, their logarithms and what they are cut from: about five numbers an observation."""
    require_memory(
        "events × (data.subset + data.subsets + data.beyond + data.horizon)", lanes * sites, 40.0 * lanes * sites
    )


def training_mask(subset: int, validation: str, stride: int, offset: int, seed: int) -> Tensor:
    """Which observations of a subset are for training; the same in every round."""
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


def _read_both(
    prices: str, events: str, columns: Columns, jumps: tuple[float, int, int, int, int]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Prices and events on one clock; ``jumps`` are what `detect_events` takes."""
    table = read_prices(Path(prices).expanduser(), columns)
    named = detect_events(table, *jumps) if events == "auto" else read_events(Path(events).expanduser(), columns)
    return same_clock(table, named)


def _cut_all(
    prices: pl.DataFrame, events: pl.DataFrame, sources: tuple[str, str], before: int, after: int, on_bad_event: str
) -> tuple[np.ndarray, pl.DataFrame, list[BadEvent]]:
    """Prices ``[before + after, events]``, the events, and those that were left out."""
    series = series_of(prices, events["ticker"].unique().to_list(), sources[0])
    columns, kept, bad = [], [], []
    seen: dict[tuple[str, np.datetime64], int] = {}
    times = events["timestamp"].to_numpy()
    for i, (row, ticker) in enumerate(events.select("row", "ticker").iter_rows()):
        found = find_bar(series.get(ticker), times[i], before, after)
        if (ticker, times[i]) in seen:
            found = f"must occur once, and is in row {seen[ticker, times[i]]} too"
        seen.setdefault((ticker, times[i]), row)
        if isinstance(found, str):
            bad.append(BadEvent(sources[1], row, ticker, name_moment(times[i]), found))
            if on_bad_event == "raise":
                raise ValueError(f"{bad[-1]} (data.on_bad_event skip leaves it out)")
        else:
            columns.append(series[ticker].prices[found + 1 - before : found + 1 + after])
            kept.append(i)
    if not kept:
        raise ValueError(f"data.events must leave at least one event that can be used; {bad[0]}")
    if bad:
        warnings.warn(f"{len(bad)} of {len(events)} events skipped: {'; '.join(map(str, bad))}", stacklevel=2)
    return np.ascontiguousarray(np.stack(columns, axis=1)), events[kept].select("ticker", "timestamp"), bad


def _naive(test: Task) -> Tensor:
    """The error of forecasting the last value."""
    return (test["validation_values"] - test["values"][:, -1:]).square().mean(-1)
