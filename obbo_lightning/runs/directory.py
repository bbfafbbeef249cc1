"""Where a run keeps its files."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RunDirectory:
    """``<output>/<experiment>/<algorithm>-<time>/``: config, metrics, timings, checkpoints, summary, figures."""

    def __init__(self, path: Path) -> None:
        self.settle(path)

    def settle(self, path: Path) -> None:
        """Be at ``path``: other ranks learn from rank 0 where the run lives."""
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.csv"
        self.outer = path / "outer.csv"
        self.timings = path / "timings.csv"
        self.baselines = path / "baselines.csv"
        self.tests = path / "tests.csv"
        self.tasks = path / "tasks.csv"
        self.sources = path / "sources.json"
        self.state = path / "state.json"
        self.manifest = path / "manifest.json"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.validation = path / "validation.json"
        self.figures = path / "figures"
        self.lanes = path / "lanes.npz"
        self.events = path / "events.csv"
        self.skipped = path / "skipped.csv"

    @classmethod
    def create(cls, output: str, experiment: str, algorithm: str) -> "RunDirectory":
        """Make a new one; two runs never share one, also when they start in the same second."""
        parent = Path(output) / experiment
        stem = f"{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
        for attempt in range(1, 1000):
            path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if path.exists():
                    continue
                raise ValueError(
                    f"output must be a directory that can be made, got {output!r}: a file is there"
                ) from None
            except OSError as error:
                raise ValueError(
                    f"output must be a directory that can be written, got {output!r}: {error.strerror}"
                ) from None
            return cls(path)
        raise ValueError(f"output has no free name left for {parent / stem}")

    @classmethod
    def existing(cls, path: str | Path) -> "RunDirectory":
        """An earlier run's."""
        run = cls(Path(path))
        if not run.config.is_file():
            raise ValueError(f"{path} is no run directory: it has no {run.config.name}")
        folders = (run.path, run.checkpoints, run.figures)
        inside = run.checkpoints.glob("round-*")
        for place in (place for place in (*vars(run).values(), *inside) if place.exists()):
            if place.is_dir() != (place in folders):
                raise ValueError(f"{place} must be a {'folder' if place in folders else 'file'}, and is not")
        return run

    @classmethod
    def newest(cls, path: str | Path) -> "RunDirectory":
        """An earlier run's; of a folder with several below, the one that began last."""
        below = sorted(Path(path).rglob("config.yaml"), key=lambda config: config.stat().st_mtime)
        if (Path(path) / "config.yaml").is_file() or not below:
            return cls.existing(path)
        return cls.existing(below[-1].parent)

    @property
    def finished(self) -> bool:
        """A run is finished when its summary exists."""
        return self.summary.is_file()

    def write_summary(self, summary: dict[str, Any]) -> None:
        """The last thing a run does, at once or not at all."""
        write_atomically(self.summary, summary_text(summary))


def summary_text(summary: dict[str, Any]) -> str:
    """As summary.json has it."""
    return json.dumps(summary, indent=2) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step that survives a loss of power."""
    with replacing(path) as aside:
        aside.write_text(text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write beside ``path``, which takes its place at the end, file and folder synced.

    Its name cannot be guessed and it is made anew, so that no link that somebody has put there is followed.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666))
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """What was written to a file, or which files a folder has, survives anything."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
