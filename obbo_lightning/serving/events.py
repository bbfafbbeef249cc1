"""Whose λ is whose: the events of a market run, from its files, with the weight that a checkpoint has for each."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from obbo_lightning.experiments.runs import DAMAGE
from obbo_lightning.foreign_text import uncelled_table
from obbo_lightning.problems.spline import SmoothingSpline
from obbo_lightning.runs.checkpoints import newest_checkpoint, read_checkpoint, verify_checkpoint
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.layers import part_class
from obbo_lightning.streams.market import MarketStream


def is_market(settings: Settings) -> bool:
    """Whether these are the settings of a market run."""
    cls = part_class(settings, "data")
    return inspect.isclass(cls) and issubclass(cls, MarketStream)


def require_market(settings: Settings, path: Path) -> dict[str, Any]:
    """The settings of its stream; refuses a run that is not of the market, or is not of the spline."""
    if not is_market(settings):
        raise ValueError(f"a forecast needs a run with --data market, got {path}, with {settings['data']['name']!r}")
    if part_class(settings, "problem") is not SmoothingSpline:
        raise ValueError(f"a forecast needs the smoothing spline, and {path} has the problem {settings['problem']!r}")
    data: dict[str, Any] = settings["data"]
    return data


def events_of(run: RunDirectory, checkpoint: Path | None) -> pl.DataFrame:
    """Ticker, timestamp and weight of every event, in the order of λ's rows; refuses files that do not agree."""
    if not (run.events.is_file() and run.lanes.is_file()):
        raise ValueError(f"{run.path} has no {run.events.name} that says whose λ is whose: it is not finished")
    chosen = verify_checkpoint(checkpoint) if checkpoint else newest_checkpoint(run.checkpoints)
    state = read_checkpoint(chosen)
    try:
        events = pl.read_csv(run.events, try_parse_dates=True, schema_overrides={"ticker": pl.String})
        events = uncelled_table(events)
        with np.load(run.lanes, allow_pickle=False) as lanes:
            kept = dict(zip(lanes["rounds"].tolist(), lanes["regret"], strict=True))
        agree = np.array_equal(events["regret"].to_numpy(), kept[max(kept)])
        events = events.with_columns(pl.col("timestamp").cast(pl.Datetime("us")))
    except DAMAGE as damage:
        raise ValueError(f"{run.path} is damaged: {type(damage).__name__} {' '.join(str(damage).split())}") from None
    if not agree:
        raise ValueError(f"{run.events} must be of the same events as {run.lanes.name}, and is not")
    # A checkpoint has the regrets that lanes.npz has: it is of this run, or of one that is the same bit for bit.
    seen = state["callbacks"].get("LaneRecorder", {"rounds": [], "regret": []})
    remembered = [*zip(seen["rounds"], seen["regret"], strict=True), *filter(None, [seen.get("latest")])]
    outer = state["state_dict"]["outer"].double()
    strange = [t for t, regret in remembered if t in kept and not np.array_equal(kept[t], regret.numpy())]
    if strange or outer.shape != (len(events), 1):
        raise ValueError(f"checkpoint {chosen} must be of the {len(events)} events of {run.events}, and is not")
    return events.with_columns(weight=pl.Series(outer[:, 0].tolist()))


def choose_events(known: pl.DataFrame, asked: pl.DataFrame, source: str, run: Path) -> pl.DataFrame:
    """Those of ``known`` that are asked for, in the order of asking; λ has been learned for no other event."""
    chosen = asked.join(
        known.with_row_index("lane"), on=("ticker", "timestamp"), how="left", maintain_order="left"
    ).unique(("ticker", "timestamp"), keep="first", maintain_order=True)
    strange = chosen.filter(pl.col("lane").is_null())
    if len(strange):
        row, ticker, when = strange.select("row", "ticker", "timestamp").row(0)
        raise ValueError(f"{source}, row {row}: must be one of the {len(known)} events of {run}, got {ticker} {when}")
    return known[chosen["lane"].to_list()]
