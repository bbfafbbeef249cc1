"""What was played: a fingerprint of every task, kept with the run, so that changed data are noticed."""

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L

from obbo_lightning.core.problem import Task
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.table import RoundTable
from obbo_lightning.streams.fingerprints import compare
from obbo_lightning.streams.stream import Stream
from obbo_lightning.streams.tasks import has_random_access

COLUMNS = ["round", "tasks"]


class Played(L.Callback):
    """``tasks.csv``: the fingerprints of each round's tasks; ``sources.json``: of what they are made from.

    With several processes they are of the tasks that the first one solves.

    Args:
        run: where to write.
        stream: which knows the fingerprint of a task.
        tasks_per_round: n.
    """

    def __init__(self, run: RunDirectory, stream: Stream, tasks_per_round: int) -> None:
        self.run, self.stream, self.tasks_per_round = run, stream, tasks_per_round
        self.table: RoundTable | None = None
        self._seen: dict[int, str] = {}

    def see(self, t: int, tasks: Sequence[Task]) -> None:
        """The tasks of round t, counted from 0, as they came from the stream."""
        first = t * self.tasks_per_round
        self._seen[t + 1] = " ".join(self.stream.fingerprint(first + i, task) for i, task in enumerate(tasks))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on behind the rounds that were played."""
        if not trainer.is_global_zero:
            return
        self.table, path = RoundTable(self.run.tasks, COLUMNS), self.run.tasks
        if not path.exists():  # a run of a version that did not keep them
            rows = [f"{t}," for t in range(1, trainer.global_step + 1)]
            write_atomically(path, "\n".join([",".join(COLUMNS), *rows]) + "\n")
        self.table.cut(trainer.global_step)
        sources = self.stream.origins()
        if sources:
            write_atomically(self.run.sources, json.dumps(sources, indent=0) + "\n")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One more."""
        if self.table is not None:
            rounds = trainer.global_step
            self.table.append({"round": rounds, "tasks": self._seen.pop(rounds, None)})

    @property
    def tables(self) -> list[RoundTable]:
        """The one that this process writes."""
        return [] if self.table is None else [self.table]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint, as all rows."""
        if self.table is not None:
            self.table.sync()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Lightning tears nothing down after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the table."""
        if self.table is not None:
            self.table.close()


def require_same_past(run: RunDirectory, stream: Stream, rounds: int, tasks_per_round: int, changed: bool) -> None:
    """Refuse to go on with a stream whose first rounds are not those that were played.

    Args:
        run: which has the fingerprints.
        stream: as it is now.
        rounds: that were played.
        tasks_per_round: n.
        changed: whether the settings of the data are others; where they are not, and no source of the tasks has
            changed, tasks are not drawn again.
    """
    if not rounds or not run.tasks.is_file():
        return
    before, now = _sources(run.sources), stream.origins()
    differs = compare(before, now) if before else ""
    if not (changed or differs or (now and not before)):  # where sources.json is lost, nobody knows
        return
    tasks = _tasks_again(stream)
    if tasks is None:
        return
    for t, known in _recorded(run.tasks, rounds, tasks_per_round):
        task = next(tasks, None)
        if task is None:
            raise ValueError(
                f"data must have the {rounds} rounds that {run.path} played, and end before {stream.place(t)}"
            )
        if known and stream.fingerprint(t, task) != known:
            where = f"{stream.place(t)}, in round {t // tasks_per_round + 1}"
            # all columns of a table change when it grows: that says nothing of which of them has another past
            all_changed = len(now) > 1 and all(before.get(name) != now[name] for name in now)
            raise ValueError(
                f"data must begin with what {run.path} played, but they differ from {where} on"
                + (f": {differs}" if differs and not all_changed else "")
            )


def _sources(path: Path) -> dict[str, str]:
    """What sources.json says; nothing where it is gone."""
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: delete it, and the tasks that were played are compared instead") from None


def _recorded(path: Path, rounds: int, tasks_per_round: int) -> Iterator[tuple[int, str]]:
    """Each task's number and fingerprint; none where there is none."""
    with path.open(newline="") as file:
        for row in islice(csv.DictReader(file), rounds):
            known = (row["tasks"] or "").split(" ")
            for i in range(tasks_per_round):
                yield (int(row["round"]) - 1) * tasks_per_round + i, known[i] if i < len(known) else ""


def _tasks_again(stream: Stream) -> Iterator[Task] | None:
    """All tasks that there are, from the first one on; None where they cannot be had again."""
    train = stream.train
    if has_random_access(train):
        return (train[t] for t in range(len(train)))
    if hasattr(train, "so_far"):  # what waits for more must not do so here
        so_far: Iterator[Task] | None = train.so_far()
        return so_far
    return iter(train)
