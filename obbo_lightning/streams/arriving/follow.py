"""A stream that is still being written: tasks are played as they arrive."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import positive
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.arriving.arrivals import Arrivals, Folder, Found, LinesOfAFile, StandardInput
from obbo_lightning.streams.arriving.task_files import Arrays, DamagedTaskError
from obbo_lightning.streams.few_shot.stream import DERIVED_ARGUMENTS, facts_of
from obbo_lightning.streams.stream import Metric, Stream

POLL = 0.1  # seconds between two looks
FEW_SHOT = {"support": "support_labels", "query": "query_labels"}


class FollowedTasks:
    """Tasks from a place where they arrive, an iterable whose iterator waits, and knows where it is.

    Args:
        path: a folder, a file of JSON lines, or ``-`` for standard input.
        timeout: seconds to wait for a task before the stream is over; None waits for ever.

    Attributes:
        on_wait: is called with what is waited for, again and again while nothing comes; what it raises ends the wait.
        few_shot: whether tasks must be those of a few-shot problem.
        dtype: what floating-point numbers become.
    """

    def __init__(self, path: str, timeout: float | None) -> None:
        self.path, self.timeout = path, timeout
        self.on_wait: Callable[[str], None] = lambda what: None
        self.few_shot = False
        self.dtype = torch.float32
        self._standard_input = StandardInput() if path == "-" else None

    def __iter__(self) -> "Following":
        return Following(self, self.arrivals())

    def arrivals(self, position: Any = None) -> Arrivals:
        """Tasks behind a position."""
        if self._standard_input is not None:
            return self._standard_input
        path = Path(self.path).expanduser()
        return Folder(path, position or "") if path.is_dir() else LinesOfAFile(path, position)

    def so_far(self) -> Iterator[Task] | None:
        """What is there already, from the beginning; None where that is gone: it was piped in."""
        if self._standard_input is not None:
            return None
        following = Following(self, self.arrivals())
        return (following.checked(found) for found in iter(following.arrivals.take, None))

    def first(self) -> Found:
        """The first one there is, which is not played by this."""
        arrivals = self.arrivals()
        if (found := arrivals.take()) is None:
            print(f"obbo: waiting for the first task in {self.path}", file=sys.stderr, flush=True)
            found = self.wait(arrivals)
        if found is None:
            raise ValueError(f"data.path must bring a task, and {self.path} has brought none")
        if self._standard_input is not None:
            self._standard_input.give_back(found)
        return found

    def wait(self, arrivals: Arrivals) -> Found | None:
        """The next task as soon as it is there; None where the stream is over."""
        began = time.monotonic()
        while (found := arrivals.take()) is None:
            if arrivals.over:
                return None
            if self.timeout is not None and time.monotonic() - began >= self.timeout:
                arrivals.give_up()
                return None
            self.on_wait("tasks from standard input" if self.path == "-" else f"tasks in {self.path}")
            arrivals.wait(POLL)
        return found


class Following(Iterator[Task]):
    """The tasks of `FollowedTasks` one after the other, each checked; ``state_dict`` says where it is."""

    def __init__(self, tasks: FollowedTasks, arrivals: Arrivals) -> None:
        self.tasks, self.arrivals = tasks, arrivals
        self._count = 0
        self._like: dict[str, list[Any]] = {}  # kind and shape of each array of the first task

    def __next__(self) -> Task:
        found = self.tasks.wait(self.arrivals)
        if found is None:
            raise StopIteration
        return self.checked(found)

    def state_dict(self) -> dict[str, Any]:
        """Where it is, in plain values."""
        return {
            "path": self.tasks.path,
            "position": self.arrivals.position,
            "count": self._count,
            "like": dict(self._like),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; in another place behind as many tasks."""
        self._count, self._like = state["count"], dict(state["like"])
        if state["path"] == self.tasks.path:
            self.arrivals = self.tasks.arrivals(state["position"])
            return
        self.arrivals = self.tasks.arrivals()
        for _ in range(0 if self.tasks.path == "-" else self._count):
            if self.arrivals.take() is None:
                raise ValueError(
                    f"data.path must have the {self._count} tasks that were played, and {self.tasks.path} has not"
                )

    def checked(self, found: Found) -> Task:
        """As tensors, if it is what the first one promised."""
        where, arrays = found
        try:
            task = _tensors(arrays, self.tasks.few_shot, self.tasks.dtype)
            if self.tasks.few_shot:
                _require_few_shot(task)
            forms = {name: [str(values.dtype), list(values.shape)] for name, values in task.items()}
            self._like = self._like or forms
            _require_form(forms, self._like)
        except DamagedTaskError as damage:
            raise DamagedTaskError(f"{where}: {damage}") from None
        self._count += 1
        return task


class FollowStream(Stream):
    """Tasks as they arrive, in order: ``--problem`` says what is learned from them, and where λ starts.

    Every task has the names, kinds and shapes of the first one. A run ends with its rounds, with the end of standard
    input, or when nothing has come for ``timeout`` seconds; it goes on by `resume`.

    Args:
        path: a folder with a file a task (npz, parquet, json; played in the order of their names), a file of JSON lines
            with a task a line, or ``-``, JSON lines from standard input.
        timeout: seconds to wait for the next task; None waits for ever.
    """

    derived_arguments = DERIVED_ARGUMENTS
    train: FollowedTasks

    def __init__(self, path: str, timeout: float | None = None) -> None:
        if path != "-" and not _can_be_followed(Path(path).expanduser()):
            raise ValueError(f"data.path must be a folder, a file of JSON lines, or -, and exist, got {path!r}")
        if timeout is not None:
            positive("data.timeout", timeout)
        self.train = FollowedTasks(path, timeout)
        self._facts: dict[str, Any] = {}

    def task_spec(self) -> dict[str, Any]:
        return self._facts

    def problem(self, problem_type: type[Problem] | None = None, **settings: Any) -> Problem:
        """Of few-shot tasks the first one decides what the network must take."""
        if problem_type is None:
            raise ValueError("problem must be given for data follow: few_shot, or file.py:Class, got none")
        if issubclass(problem_type, FewShot):
            self.metric = Metric("accuracy", higher_is_better=True)
            self.train.few_shot = True
            first = Following(self.train, self.train.arrivals()).checked(self.train.first())
            self._facts = facts_of(int(first["support_labels"].max()) + 1, first["support"].shape[1:])
        return super().problem(problem_type, **settings)

    def start(self, problem: Problem, seed: int) -> Tensor:
        """The problem's own; the numbers of tasks become like it."""
        outer = super().start(problem, seed)
        self.train.dtype = outer.dtype
        return outer


def _can_be_followed(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.suffix.lower() not in (".npz", ".parquet"))


def _tensors(arrays: Arrays, few_shot: bool, dtype: torch.dtype) -> Task:
    if not arrays:
        raise DamagedTaskError("must hold arrays, and has none")
    task = {}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise DamagedTaskError(f"{name!r} must be numbers, got {array.dtype}")
        if not np.isfinite(array).all():
            raise DamagedTaskError(f"{name!r} must be finite, and has NaN or infinity")
        floating = array.dtype.kind == "f" or (few_shot and name in FEW_SHOT)
        kind = dtype if floating else torch.bool if array.dtype.kind == "b" else torch.int64
        task[name] = torch.from_numpy(array.astype(np.float64 if floating else array.dtype)).to(kind)
    return task


def _require_form(forms: dict[str, list[Any]], like: dict[str, list[Any]]) -> None:
    if forms.keys() != like.keys():
        raise DamagedTaskError(f"must have the arrays {', '.join(like)} of the first task, got {', '.join(forms)}")
    for name, form in forms.items():
        if form != like[name]:
            wanted, got = (f"{kind.removeprefix('torch.')} {shape}" for kind, shape in (like[name], form))
            raise DamagedTaskError(f"{name!r} must be {wanted} as in the first task, got {got}")


def _require_few_shot(task: Task) -> None:
    missing = [name for pair in FEW_SHOT.items() for name in pair if name not in task]
    if missing:
        raise DamagedTaskError(
            f"must have support, support_labels, query and query_labels, and has no {', '.join(missing)}"
        )
    for name, labels in FEW_SHOT.items():
        examples, classes = task[name], task[labels]
        if classes.dtype != torch.int64 or classes.shape != examples.shape[:1] or not len(classes):
            raise DamagedTaskError(
                f"{labels!r} must be a whole number for each of the {name} examples {list(examples.shape)}, "
                f"got {str(classes.dtype).removeprefix('torch.')} {list(classes.shape)}"
            )
    known = task["support_labels"].unique()
    if not torch.equal(known, torch.arange(len(known))) or not torch.isin(task["query_labels"], known).all():
        raise DamagedTaskError("labels must be the classes 0, 1, …, each of them in support_labels")
