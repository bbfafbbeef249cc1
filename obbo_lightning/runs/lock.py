"""One owner: the process that plays a run holds a lock on its state.json, which the system gives back when it dies."""

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

SIZE = 512  # bytes of the file, always: what is written over has no rest of what was there
PATIENCE = 0.5  # seconds: whoever only looks holds the lock for an instant


class OwnedError(ValueError):
    """A run that another process plays."""


def own(path: Path) -> int:
    """Open a file and be the only one who has it; refuses where somebody else does, and says who."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be written, and cannot: {error.strerror}") from None
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
            owner = read_owned(descriptor)
            os.close(descriptor)
            who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}"
            raise OwnedError(f"{path.parent} is being played by {who}: wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(descriptor)
                raise
        return descriptor  # also on a file system without locks, where nobody can know


def is_owned(descriptor: int) -> bool | None:
    """Whether somebody has the file; None where that cannot be known. Those who look do not disturb each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def read_owned(descriptor: int) -> dict[str, Any]:
    """What its owner has written into it; nothing where that is being written, or never was."""
    try:
        found = json.loads(os.pread(descriptor, SIZE, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
