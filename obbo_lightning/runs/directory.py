"""Files of a run, and how they are written."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from obbo_lightning.config.parse import Config, ConfigError, parse_yaml
from obbo_lightning.config.registry import require_trusted_values


class RunDirectory:
    """Paths of the files of a run in ``<output>/<experiment>/<algorithm>-<time>/``."""

    def __init__(self, path: Path, new_parents: Sequence[Path] = ()) -> None:
        self._new_parents = new_parents  # folders that `create` had to make
        self.set_path(path)

    def set_path(self, path: Path) -> None:
        """Set the path: other ranks get it from rank 0."""
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.csv"
        self.outer = path / "outer.csv"
        self.timings = path / "timings.csv"
        self.baselines = path / "baselines.csv"
        self.test_scores = path / "test_scores.csv"
        self.fingerprints = path / "fingerprints.csv"
        self.lock = path / ".lock"
        self.status = path / "status.json"
        self.provenance = path / "provenance.json"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.validation = path / "validation.json"
        self.figures = path / "figures"
        self.lanes = path / "lanes.npz"
        self.events = path / "events.csv"
        self.skipped = path / "skipped.csv"

    @classmethod
    def create(cls, output: str, experiment: str, algorithm: str) -> "RunDirectory":
        """Make a new directory; two runs never share one, also when they start in the same second."""
        parent = Path(output) / experiment
        stem = f"{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
        new_parents = [folder for folder in (parent, parent.parent) if not folder.exists()]
        for attempt in count(1):
            path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
                break
            except OSError as error:
                if not path.exists():
                    reason = f"got {output!r}: {error.strerror}"
                    raise ValueError(f"output must be a directory that can be written, {reason}") from None
        return cls(path, new_parents)

    @classmethod
    def existing(cls, path: str | Path) -> "RunDirectory":
        """Return the directory of an existing run; refuse what is none."""
        run = cls(Path(path))
        if not run.config.is_file():
            raise ValueError(f"{path} must be a run directory, got one without {run.config.name}")
        folders = (run.path, run.checkpoints, run.figures)
        files = [place for place in vars(run).values() if isinstance(place, Path)]
        for place in (*files, *run.checkpoints.glob("round-*")):
            if place.exists() and place.is_dir() != (place in folders):
                raise ValueError(f"{place} must be a {'folder' if place in folders else 'file'}, and is not")
        return run

    @classmethod
    def newest(cls, path: str | Path) -> "RunDirectory":
        """Return the directory of an existing run, or the newest one below a folder."""
        below = sorted(Path(path).rglob("config.yaml"), key=lambda config: config.stat().st_mtime)
        if (Path(path) / "config.yaml").is_file() or not below:
            return cls.existing(path)
        return cls.existing(below[-1].parent)

    @property
    def finished(self) -> bool:
        """Whether the run is finished: its summary is written last."""
        return self.summary.is_file()

    def discard(self) -> None:
        """Remove a new directory in which no run was started, and the folders that were made for it."""
        if not self.config.exists():
            shutil.rmtree(self.path, ignore_errors=True)
            for folder in self._new_parents:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def read_config(run: RunDirectory) -> Config:
    """Return the configuration of a run; refuse one that names classes or folders which are not trusted."""
    try:
        config = parse_yaml(run.config.read_text(), str(run.config))
    except (OSError, ValueError) as damage:
        raise ConfigError(f"{run.config} cannot be read: {type(damage).__name__}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{run.config} must hold the configuration of a run, got something else")
    require_trusted_values(config.get("trainer"), "trainer", run.path)
    return config


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file in one step that survives a power cut."""
    with replacing(path) as aside:
        aside.write_text(text)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield an empty file beside ``path`` that takes its place at the end.

    Its name cannot be guessed and it must not exist, so that no planted link is followed. ``durable``: file and folder
    are synced, so that the replacement survives a power cut.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666))
    try:
        yield aside
        if durable:
            sync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Write a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
