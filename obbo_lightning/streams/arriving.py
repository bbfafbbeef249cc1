"""Tasks that arrive while a run waits for them: in a folder, in a growing file, or from standard input."""

import io
import json
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import positive
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.few_shot.stream import NETWORK_ARGUMENTS, network_arguments
from obbo_lightning.streams.readers import Arrays, read_npz
from obbo_lightning.streams.stream import Metric, Stream

POLL = 0.1  # seconds between two attempts to read
FEW_SHOT = {"support": "support_labels", "query": "query_labels"}


class DamagedTaskError(ValueError):
    """A task that cannot be used; the message names its file or line, and the rule that it breaks."""


class Arrival(NamedTuple):
    """A task that has arrived: its file or line, its arrays, and the position after it in plain values."""

    where: str
    arrays: Arrays
    position: Any


# What is there now, again and again: a task, None, or what is wrong with a task that may still become complete.
Arrivals = Iterator[Arrival | str | None]


def parse_npz(content: bytes) -> Arrays:
    """Return the arrays of an npz file; raise a ValueError if it is not complete, or not yet."""
    return read_npz(io.BytesIO(content), optional=None)


def parse_json(content: bytes) -> Arrays:
    """Return the arrays of a JSON object of nested lists; raise a ValueError if it is not complete, or not yet."""
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ValueError(f"cannot be read as JSON: {error}") from None
    try:
        return {name: np.array(value) for name, value in found.items()}
    except (AttributeError, ValueError):  # of lists of different lengths
        raise DamagedTaskError("must be an object of arrays by name") from None


PARSERS: dict[str, Callable[[bytes], Arrays]] = {".npz": parse_npz, ".json": parse_json}


def follow_folder(path: Path, position: str | None = None) -> Arrivals:
    """Yield the tasks of a folder with one file per task, in the order of their names; hidden files are ignored.

    A file that cannot be read to its end is waited for while it is the newest one or still grows.
    """
    last = position or ""
    listed: list[str] | None = None
    incomplete: tuple[str, int, int] | None = None
    while True:
        files = [file for file in path.iterdir() if file.suffix.lower() in PARSERS and file.name[0] != "."]
        names = sorted(file.name for file in files)
        late = [name for name in names if name <= last and listed is not None and name not in listed]
        if late:
            raise DamagedTaskError(f"{path / late[0]} must arrive before {last}, which was read, and arrived later")
        listed, following = names, [name for name in names if name > last]
        for name in following:
            file = path / name
            try:
                state = name, file.stat().st_size, file.stat().st_mtime_ns
                arrays = PARSERS[file.suffix.lower()](file.read_bytes())
            except FileNotFoundError:  # it was removed before it was read
                break
            except DamagedTaskError as damage:
                raise DamagedTaskError(f"{file}: {damage}") from None
            except ValueError as fault:
                if state == incomplete and name != following[-1]:
                    raise DamagedTaskError(f"{file} {fault}") from None
                incomplete = state
                yield f"{file} {fault}"
                break
            last = name
            yield Arrival(str(file), arrays, last)
        if not following:
            yield None


def follow_lines(path: Path, position: Sequence[int] | None = None) -> Arrivals:
    """Yield the tasks of a file of JSON lines after some bytes and lines; a line is complete with its newline."""
    start, number = position or (0, 0)
    while True:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < start:
                raise DamagedTaskError(f"{path} must only grow, got fewer than the {start} bytes already read")
            file.seek(start)
            line = file.readline()
        if not line.endswith(b"\n"):
            yield None
            continue
        start, number = start + len(line), number + 1
        if line.strip():
            yield _parse_line(f"{path}, line {number}", line, [start, number])


def follow_standard_input() -> Arrivals:
    """Yield tasks from JSON lines; they cannot be read again, so a resumed run continues with the next one."""
    buffer, number = b"", 0
    while True:
        line, newline, rest = buffer.partition(b"\n")
        if newline:
            buffer, number = rest, number + 1
            if line.strip():
                yield _parse_line(f"standard input, line {number}", line, number)
        elif not select.select([sys.stdin], [], [], 0)[0]:
            yield None
        elif more := os.read(sys.stdin.fileno(), 1 << 16):
            buffer += more
        else:
            return


def _parse_line(where: str, line: bytes, position: Any) -> Arrival:
    try:
        return Arrival(where, parse_json(line), position)
    except ValueError as damage:
        raise DamagedTaskError(f"{where}: {damage}") from None


class ArrivingTasks:
    """Tasks from a place where they arrive: an iterable whose iterator waits for them; see `FollowStream`."""

    def __init__(self, path: str, timeout: float | None) -> None:
        self.path, self.timeout = path, timeout
        self.few_shot = False  # whether tasks must be those of a few-shot problem
        self.dtype = torch.float32  # of floating-point tensors
        self._standard_input = follow_standard_input() if path == "-" else None

    def __iter__(self) -> "ArrivingTaskIterator":
        return ArrivingTaskIterator(self)

    def arrivals(self, position: Any = None) -> Arrivals:
        """Return the tasks after a position."""
        if self._standard_input is not None:
            return self._standard_input
        path = Path(self.path).expanduser()
        return (follow_folder if path.is_dir() else follow_lines)(path, position)

    def so_far(self) -> Iterator[Task] | None:
        """Return the tasks that have arrived, from the first one on; None for standard input, which is gone."""
        return None if self._standard_input is not None else iter(self).so_far()

    def first(self) -> Task:
        """Return the first task, waiting for it if necessary; it stays the first one."""
        arrivals = self.arrivals()
        found = next(arrivals, None)
        if not isinstance(found, Arrival):
            print(f"obbo: waiting for the first task in {self.path}", file=sys.stderr, flush=True)
            found = self.wait(arrivals)
        if found is None:
            raise ValueError(f"data.path must have a task, and none has arrived in {self.path}")
        if self._standard_input is not None:
            self._standard_input = chain([found], arrivals)
        return iter(self).to_task(found)

    def wait(self, arrivals: Arrivals) -> Arrival | None:
        """Return the next task as soon as it has arrived; None if the stream has ended."""
        began = monotonic()
        for found in arrivals:
            if isinstance(found, Arrival):
                return found
            if self.timeout is not None and monotonic() - began >= self.timeout:
                if found is not None:
                    raise DamagedTaskError(found)
                return None
            sleep(POLL)
        return None


class ArrivingTaskIterator(Iterator[Task]):
    """Iterator over `ArrivingTasks`, each validated; ``state_dict`` holds its position."""

    def __init__(self, tasks: ArrivingTasks) -> None:
        self.tasks, self.arrivals = tasks, tasks.arrivals()
        self._position: Any = None  # after the last task
        self._count = 0
        self._form: dict[str, str] = {}  # dtype and shape of each tensor of the first task

    def __next__(self) -> Task:
        found = self.tasks.wait(self.arrivals)
        if found is None:
            raise StopIteration
        return self.to_task(found)

    def so_far(self) -> Iterator[Task]:
        """Yield the tasks that are there now."""
        for found in self.arrivals:
            if not isinstance(found, Arrival):
                return
            yield self.to_task(found)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the form of tasks, in plain values."""
        return {"path": self.tasks.path, "position": self._position, "count": self._count, "form": dict(self._form)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; with another path, after as many tasks."""
        self._position, self._count, self._form = state["position"], state["count"], dict(state["form"])
        if state["path"] == self.tasks.path:
            self.arrivals = self.tasks.arrivals(self._position)
            return
        self.arrivals = self.tasks.arrivals()
        for _ in range(0 if self.tasks.path == "-" else self._count):
            found = next(self.arrivals, None)
            if not isinstance(found, Arrival):
                raise ValueError(
                    f"data.path must have the {self._count} tasks of the finished rounds, and {self.tasks.path} has not"
                )
            self._position = found.position

    def to_task(self, arrival: Arrival) -> Task:
        """Return the tensors of a task; refuse one that differs in form from the first one."""
        try:
            task = _to_tensors(arrival.arrays, self.tasks.few_shot, self.tasks.dtype)
            if self.tasks.few_shot:
                _require_few_shot(task)
            form = {name: _form_of(values) for name, values in task.items()}
            self._form = self._form or form
            for name in self._form | form:
                wanted, got = (known.get(name, "missing") for known in (self._form, form))
                if wanted != got:
                    raise DamagedTaskError(f"{name!r} must be {wanted} as in the first task, got {got}")
        except DamagedTaskError as damage:
            raise DamagedTaskError(f"{arrival.where}: {damage}") from None
        self._position, self._count = arrival.position, self._count + 1
        return task


class FollowStream(Stream):
    """Tasks as they arrive, in order; ``--problem`` names what is learned from them, and where λ starts.

    Every task has the names, dtypes and shapes of the first one. A run ends after its rounds, at the end of standard
    input, or when no task has arrived for ``timeout`` seconds; `resume` continues it.

    Args:
        path: a folder with one file per task (npz, json; in the order of their names), a file of JSON lines with one
            task per line, or ``-``, JSON lines from standard input.
        timeout: seconds to wait for the next task; None waits forever.
    """

    derived_arguments = NETWORK_ARGUMENTS
    train: ArrivingTasks

    def __init__(self, path: str, timeout: float | None = None) -> None:
        file = Path(path).expanduser()
        if path != "-" and not file.is_dir() and (not file.is_file() or file.suffix.lower() == ".npz"):
            raise ValueError(f"data.path must be a folder, a file of JSON lines, or -, and exist, got {path!r}")
        if timeout is not None:
            positive("data.timeout", timeout)
        self.train = ArrivingTasks(path, timeout)
        self._task_spec: dict[str, Any] = {}

    def task_spec(self) -> dict[str, Any]:
        return self._task_spec

    def problem(self, problem_type: type[Problem] | None = None, **settings: Any) -> Problem:
        """Return the problem; the first of few-shot tasks decides the arguments of the network."""
        if problem_type is None:
            raise ValueError("problem must be given for data follow: few_shot, or file.py:Class, got none")
        if issubclass(problem_type, FewShot):
            self.metric = Metric("accuracy", higher_is_better=True)
            self.train.few_shot = True
            first = self.train.first()
            self._task_spec = network_arguments(int(first["support_labels"].max()) + 1, first["support"].shape[1:])
        return super().problem(problem_type, **settings)

    def start(self, problem: Problem, seed: int) -> Tensor:
        """Return the problem's λ_1; tasks get its dtype."""
        outer = super().start(problem, seed)
        self.train.dtype = outer.dtype
        return outer


def _form_of(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def _to_tensors(arrays: Arrays, few_shot: bool, dtype: torch.dtype) -> Task:
    if not arrays:
        raise DamagedTaskError("must hold arrays, and has none")
    task = {}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise DamagedTaskError(f"{name!r} must be finite numbers, got {array.dtype} values that are not")
        floating = array.dtype.kind == "f" or (few_shot and name in FEW_SHOT)
        kind = dtype if floating else torch.bool if array.dtype.kind == "b" else torch.int64
        task[name] = torch.from_numpy(array.astype(np.float64 if floating else array.dtype)).to(kind)
    return task


def _require_few_shot(task: Task) -> None:
    for name, labels in FEW_SHOT.items():
        if name not in task or labels not in task:
            raise DamagedTaskError(f"must have support, support_labels, query and query_labels, got {', '.join(task)}")
        count = task[name].shape[:1]
        if task[labels].dtype != torch.int64 or task[labels].shape != count or not count.numel():
            raise DamagedTaskError(
                f"{labels!r} must be one integer for each of the {name} examples {list(task[name].shape)}, "
                f"got {_form_of(task[labels])}"
            )
    known = task["support_labels"].unique()
    if not torch.equal(known, torch.arange(len(known))) or not torch.isin(task["query_labels"], known).all():
        raise DamagedTaskError("labels must be the classes 0, 1, …, each of them in support_labels")
