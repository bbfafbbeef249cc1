"""Tasks that arrive while a run waits for them: in a folder, in a growing file, or from standard input."""

import io
import json
import os
import select
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
Arrival = tuple[str, Arrays]  # where a task was found, and its arrays


class DamagedTaskError(ValueError):
    """A task that cannot be used; the message names its file or line, and the rule that it breaks."""


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


class Arrivals(ABC):
    """A place where tasks arrive; each is read once, in order.

    Attributes:
        position: after the last task that was read, in plain values.
        ended: whether no more tasks can arrive.
        fault: of a task that is still incomplete; an error if nothing more arrives.
    """

    position: Any
    ended = False
    fault: str | None = None

    @abstractmethod
    def take(self) -> Arrival | None:
        """Return the next task; None if there is no complete one yet."""

    def wait(self, seconds: float) -> None:
        """Wait for the next task, at most so long."""
        time.sleep(seconds)


class TaskFolder(Arrivals):
    """Folder with one file per task (npz, json), read in the order of their names; other and hidden files are ignored.

    A file that cannot be read to its end is waited for while it is the newest one or still grows.
    """

    def __init__(self, path: Path, position: str = "") -> None:
        self.path, self.position = path, position
        self._listed: list[str] | None = None
        self._next: deque[str] = deque()
        self._incomplete: tuple[str, int, int] | None = None

    def take(self) -> Arrival | None:
        if not self._next:
            self._list_files()
        if not self._next:
            return None
        file = self.path / self._next[0]
        try:
            size, changed = file.stat().st_size, file.stat().st_mtime_ns
            arrays = PARSERS[file.suffix.lower()](file.read_bytes())
        except FileNotFoundError:  # it was removed before it was read
            self._next.clear()
            self._incomplete = self.fault = None
            return None
        except DamagedTaskError as damage:
            raise DamagedTaskError(f"{file}: {damage}") from None
        except ValueError as fault:
            now, known = (file.name, size, changed), self._incomplete
            self._incomplete, self.fault = now, f"{file} {fault}"
            if now == known and len(self._next) > 1:
                raise DamagedTaskError(self.fault) from None
            self._next.clear()  # list again which file is the newest
            return None
        self.position, self._incomplete, self.fault = self._next.popleft(), None, None
        return str(file), arrays

    def _list_files(self) -> None:
        files = [file for file in self.path.iterdir() if file.suffix.lower() in PARSERS and file.name[0] != "."]
        names = sorted(file.name for file in files)
        known = names if self._listed is None else self._listed
        late = [name for name in names if name <= self.position and name not in known]
        if late:
            raise DamagedTaskError(
                f"{self.path / late[0]} must arrive before {self.position}, which was read, and arrived after it"
            )
        self._listed = names
        self._next = deque(name for name in names if name > self.position)


class TaskLines(Arrivals):
    """File of JSON lines, one task each; a line is complete with its newline."""

    def __init__(self, path: Path, position: dict[str, int] | None = None) -> None:
        self.path = path
        self.position = position or {"bytes": 0, "line": 0}

    def take(self) -> Arrival | None:
        with self.path.open("rb") as file:
            start = self.position["bytes"]
            if file.seek(0, os.SEEK_END) < start:
                raise DamagedTaskError(f"{self.path} must only grow, got fewer than the {start} bytes already read")
            file.seek(start)
            line = file.readline()
        if not line.endswith(b"\n"):
            return None
        self.position = {"bytes": start + len(line), "line": self.position["line"] + 1}
        return _parse_line(f"{self.path}, line {self.position['line']}", line) if line.strip() else self.take()


class StandardInput(Arrivals):
    """JSON lines from standard input; they cannot be read again, so a resumed run continues with the next one."""

    def __init__(self) -> None:
        self.position: dict[str, int] = {"line": 0}
        self._buffer = b""
        self._returned: list[Arrival] = []

    def take(self) -> Arrival | None:
        if self._returned:
            return self._returned.pop()
        while b"\n" not in self._buffer:
            if not select.select([sys.stdin], [], [], 0)[0]:
                return None
            more = os.read(sys.stdin.fileno(), 1 << 16)
            if not more:
                self.ended = True
                return None
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        self.position = {"line": self.position["line"] + 1}
        return _parse_line(f"standard input, line {self.position['line']}", line) if line.strip() else self.take()

    def put_back(self, arrival: Arrival) -> None:
        """Make a task the next one again."""
        self._returned.append(arrival)

    def wait(self, seconds: float) -> None:
        select.select([sys.stdin], [], [], seconds)


def _parse_line(where: str, line: bytes) -> Arrival:
    try:
        return where, parse_json(line)
    except ValueError as damage:
        raise DamagedTaskError(f"{where}: {damage}") from None


class ArrivingTasks:
    """Tasks from a place where they arrive: an iterable whose iterator waits for them; see `FollowStream`."""

    def __init__(self, path: str, timeout: float | None) -> None:
        self.path, self.timeout = path, timeout
        self.few_shot = False  # whether tasks must be those of a few-shot problem
        self.dtype = torch.float32  # of floating-point tensors
        self._standard_input = StandardInput() if path == "-" else None

    def __iter__(self) -> "ArrivingTaskIterator":
        return ArrivingTaskIterator(self, self.arrivals())

    def arrivals(self, position: Any = None) -> Arrivals:
        """Return the tasks after a position."""
        if self._standard_input is not None:
            return self._standard_input
        path = Path(self.path).expanduser()
        return TaskFolder(path, position or "") if path.is_dir() else TaskLines(path, position)

    def so_far(self) -> Iterator[Task] | None:
        """Return the tasks that have arrived, from the first one on; None for standard input, which is gone."""
        if self._standard_input is not None:
            return None
        iterator = iter(self)
        return (iterator.to_task(found) for found in iter(iterator.arrivals.take, None))

    def first(self) -> Task:
        """Return the first task, waiting for it if necessary; it stays the first one."""
        arrivals = self.arrivals()
        if (found := arrivals.take()) is None:
            print(f"obbo: waiting for the first task in {self.path}", file=sys.stderr, flush=True)
            found = self.wait(arrivals)
        if found is None:
            raise ValueError(f"data.path must have a task, and none has arrived in {self.path}")
        if self._standard_input is not None:
            self._standard_input.put_back(found)
        return iter(self).to_task(found)

    def wait(self, arrivals: Arrivals) -> Arrival | None:
        """Return the next task as soon as it has arrived; None if the stream has ended."""
        began = time.monotonic()
        while (found := arrivals.take()) is None:
            if arrivals.ended:
                return None
            if self.timeout is not None and time.monotonic() - began >= self.timeout:
                if arrivals.fault is not None:
                    raise DamagedTaskError(arrivals.fault)
                return None
            arrivals.wait(POLL)
        return found


class ArrivingTaskIterator(Iterator[Task]):
    """Iterator over `ArrivingTasks`, each validated; ``state_dict`` holds its position."""

    def __init__(self, tasks: ArrivingTasks, arrivals: Arrivals) -> None:
        self.tasks, self.arrivals = tasks, arrivals
        self._count = 0
        self._form: dict[str, str] = {}  # dtype and shape of each tensor of the first task

    def __next__(self) -> Task:
        found = self.tasks.wait(self.arrivals)
        if found is None:
            raise StopIteration
        return self.to_task(found)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the form of tasks, in plain values."""
        position = self.arrivals.position
        return {"path": self.tasks.path, "position": position, "count": self._count, "form": dict(self._form)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; with another path, after as many tasks."""
        self._count, self._form = state["count"], dict(state["form"])
        if state["path"] == self.tasks.path:
            self.arrivals = self.tasks.arrivals(state["position"])
            return
        self.arrivals = self.tasks.arrivals()
        for _ in range(0 if self.tasks.path == "-" else self._count):
            if self.arrivals.take() is None:
                raise ValueError(
                    f"data.path must have the {self._count} tasks of the finished rounds, and {self.tasks.path} has not"
                )

    def to_task(self, arrival: Arrival) -> Task:
        """Return the tensors of a task; refuse one that differs in form from the first one."""
        where, arrays = arrival
        try:
            task = _to_tensors(arrays, self.tasks.few_shot, self.tasks.dtype)
            if self.tasks.few_shot:
                _require_few_shot(task)
            form = {name: _form_of(values) for name, values in task.items()}
            self._form = self._form or form
            for name in self._form | form:
                wanted, got = (known.get(name, "missing") for known in (self._form, form))
                if wanted != got:
                    raise DamagedTaskError(f"{name!r} must be {wanted} as in the first task, got {got}")
        except DamagedTaskError as damage:
            raise DamagedTaskError(f"{where}: {damage}") from None
        self._count += 1
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
