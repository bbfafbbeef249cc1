"""Which process owns a run, and what it is doing: a lock, a status file, and the lines of `watch`."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import filelock

from obbo_lightning.runs.directory import RunDirectory, replacing

PATIENCE = 0.5  # seconds to wait for the lock, which `watch` holds for an instant
INTERVAL = 1.0  # seconds between two updates of the numbers in status.json
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of file systems without locks


class RunStatus:
    """Ownership of a run by this process, by a lock that the system releases when it dies; status.json for `watch`."""

    def __init__(self) -> None:
        self._path: Path | None = None  # of status.json, while this process owns the run
        self._content: dict[str, Any] = {}
        self._written = -INTERVAL

    @contextlib.contextmanager
    def own(self, run: RunDirectory) -> Iterator[None]:
        """Hold the lock of a run; refuse a run that another process holds, and name that process."""
        if self._path is not None:  # a nested call
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
            if error.errno not in NO_LOCKS:
                raise ValueError(f"{run.lock} must be a file that can be written, got {error.strerror}") from None
        self._path = run.status
        try:
            yield
        finally:
            self._path = None
            lock.release()

    def set(self, doing: str, **numbers: Any) -> None:
        """Write what the run is doing, and numbers by name; numbers alone are written once in a second."""
        due = doing != self._content.get("doing") or time.monotonic() - self._written >= INTERVAL
        self._content |= {"doing": doing, **numbers}
        if self._path is None or not due:
            return
        self._written = time.monotonic()
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        with replacing(self._path, durable=False) as aside:
            aside.write_text(json.dumps({**self._content, **process}) + "\n")


def describe_run(run: RunDirectory) -> str:
    """Return one line for `watch`: what the run is doing, its numbers, and the time left."""
    status = _read(run.status)
    doing = str(status.pop("doing", "not started"))[:200]
    running = _is_running(run)
    if run.finished:
        doing, running = "finished", False
    elif running is False and doing != "not started" and not doing.startswith("stopped"):
        doing = f"dead (was {doing})"
    words = [str(run.path), doing]
    if "round" in status:
        planned = status.get("rounds")
        words.append(f"round {status['round']}" + ("" if planned is None else f" of {planned}"))
    speed, left = status.pop("rounds_per_second", None), status.pop("seconds_left", None)
    words += [f"{name} {value:.4g}" for name, value in status.items() if isinstance(value, float)]
    words += [f"{speed:.3g} rounds/s"] if isinstance(speed, float) else []
    predictable = running and isinstance(left, int) and not doing.startswith("waiting")
    return "  ".join([*words, f"{timedelta(seconds=left)} left"] if predictable else words)


def find_run_directories(paths: Sequence[Path]) -> list[RunDirectory]:
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
    try:
        with run.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several processes can look at the same time
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
