"""Which process owns a run, and what it is doing: a lock, a status file, and the lines of `watch`."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from obbo_lightning.runs.directory import RunDirectory

PATIENCE = 0.5  # seconds to wait for the lock, which `watch` holds for an instant
INTERVAL = 1.0  # seconds between two updates of the numbers in status.json


class RunStatus:
    """Ownership of a run by this process, and ``status.json`` for `watch`.

    The lock belongs to the process: the system releases it when the process dies.
    """

    def __init__(self) -> None:
        self._lock: filelock.BaseFileLock | None = None
        self._path = Path()
        self._content: dict[str, Any] = {}
        self._written = -INTERVAL

    @contextlib.contextmanager
    def own(self, run: RunDirectory) -> Iterator[None]:
        """Hold the lock of a run; refuse a run that another process holds, and name that process."""
        if self._lock is not None:  # a nested call
            yield
            return
        lock = filelock.FileLock(run.lock, timeout=PATIENCE)
        try:
            lock.acquire()
        except filelock.Timeout:
            owner = _read(run.status)
            who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}"
            raise ValueError(f"{run.path} is in use by {who}: wait for it, or stop it") from None
        except OSError as error:
            raise ValueError(f"{run.lock} must be a file that can be written, got {error.strerror}") from None
        self._lock, self._path = lock, run.status
        try:
            yield
        finally:
            self._lock = None
            lock.release()

    def set(self, doing: str, **numbers: Any) -> None:
        """Write what the run is doing, and numbers by name; numbers alone are written once in a second."""
        due = doing != self._content.get("doing") or time.monotonic() - self._written >= INTERVAL
        if self._lock is None or not due:
            return
        self._written = time.monotonic()
        self._content |= {"doing": doing[:200], **numbers, "pid": os.getpid(), "host": socket.gethostname()}
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        aside.write_text(json.dumps(self._content) + "\n")
        os.replace(aside, self._path)


def describe_run(run: RunDirectory) -> str:
    """Return one line for `watch`: what the run is doing, its numbers, and the time left."""
    status = _read(run.status)
    doing = str(status.pop("doing", "not started"))
    running = _is_running(run)
    if run.finished:
        doing = "finished"
    elif running is False and doing != "not started" and not doing.startswith("stopped"):
        doing = f"dead (was {doing})"
    words = [str(run.path), doing]
    if "round" in status:
        words.append(f"round {status['round']} of {status['rounds']}")
    speed, left = status.pop("rounds_per_second", None), status.pop("seconds_left", None)
    words += [f"{name} {value:.4g}" for name, value in status.items() if isinstance(value, float)]
    words += [f"{speed:.3g} rounds/s"] if isinstance(speed, float) else []
    return "  ".join([*words, f"{_duration(left)} left"] if running and isinstance(left, int) else words)


def find_run_directories(paths: list[Path]) -> list[RunDirectory]:
    """Return run directories, and those below a folder; each path must have one."""
    found = []
    for path in paths:
        here = [path] if (path / "config.yaml").is_file() else sorted(p.parent for p in path.rglob("config.yaml"))
        if not here:
            raise ValueError(f"{path} must be a run directory, or have one below it, got none")
        found += [RunDirectory(run) for run in here]
    return found


def _is_running(run: RunDirectory) -> bool | None:
    """Return whether a process holds the lock of a run; None where that cannot be known."""
    if not run.lock.exists():
        return False
    try:
        with filelock.FileLock(run.lock, timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _duration(seconds: float) -> str:
    """Return a duration in words.

    >>> _duration(42), _duration(160), _duration(7300)
    ('42 s', '3 min', '2 h 2 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
