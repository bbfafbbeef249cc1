"""What runs on disk are doing, one line each, from their files alone."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import yaml

from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.state import read_state

TAIL = 1 << 15  # bytes at the end of a table that are looked at
RECENT = 50  # rounds that the rate is of


def find_runs(paths: list[Path]) -> list[RunDirectory]:
    """Run directories, and those below a folder; each path must have one."""
    found = []
    for path in paths:
        here = [path] if (path / "config.yaml").is_file() else sorted(p.parent for p in path.rglob("config.yaml"))
        if not here:
            raise ValueError(f"{path} is no run directory, and has none below it")
        found += [RunDirectory(run) for run in here]
    return found


def describe(run: RunDirectory) -> str:
    """One line: what it is doing, its last row, rate, time left."""
    rounds = _planned(run)
    rows, clocks = _last_rows(run.metrics, 1), _last_rows(run.timings, RECENT)
    played = int(rows[-1]["round"]) if rows else 0
    doing, runs = _doing(run)
    words = [str(run.path), doing, f"round {played}" + (f" of {rounds}" if rounds else "")]
    words += _scores(rows[-1]) if rows else []
    seconds = [float(clock["seconds"]) + float(clock.get("evaluation_seconds") or 0) for clock in clocks]
    if seconds and sum(seconds) > 0:
        each = sum(seconds) / len(seconds)
        words.append(f"{1 / each:.3g} rounds/s")
        if runs and rounds and not doing.startswith("waiting"):
            words.append(f"{_duration((rounds - played) * each)} left")
    return "  ".join(words)


def _doing(run: RunDirectory) -> tuple[str, bool]:
    """In a word or two, and whether there is a process that does it."""
    if run.finished:
        return "finished", False
    found = read_state(run.state)
    if found is None:
        return "not begun" if not run.metrics.is_file() else "not finished", False
    if found.alive is False and not found.doing.startswith("stopped"):
        return f"dead (was {found.doing})", False
    return found.doing, found.alive is not False and not found.doing.startswith("stopped")


def _scores(row: dict[str, str]) -> list[str]:
    metric = next((name.removeprefix("test_") for name in row if name.startswith("test_")), "loss")
    named = {metric: row.get(metric), "test": row.get(f"test_{metric}"), "regret": row.get("regret/euclidean")}
    return [f"{name} {float(value):.4g}" for name, value in named.items() if value]


def _planned(run: RunDirectory) -> int | None:
    """How many rounds it is to have; of a finished one, how many it has."""
    try:
        if run.finished:
            return int(json.loads(run.summary.read_text())["rounds"])
        return int(yaml.safe_load(run.config.read_text())["rounds"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The last complete rows of a table."""
    try:
        with path.open("rb") as file:
            header = file.readline()
            end = file.seek(0, os.SEEK_END)
            file.seek(max(len(header), end - TAIL))
            text = file.read().decode()
    except (OSError, UnicodeDecodeError):
        return []
    names = header.decode().strip().split(",")
    lines = text[: text.rfind("\n") + 1].splitlines()
    if end - TAIL > len(header):
        lines = lines[1:]  # which begins somewhere
    found = csv.reader(lines[-count:])
    return [dict(zip(names, row, strict=True)) for row in found if len(row) == len(names)]


def _duration(seconds: float) -> str:
    """As people say it.

    >>> _duration(42), _duration(160), _duration(7300)
    ('42 s', '3 min', '2 h 2 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
