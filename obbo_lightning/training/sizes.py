"""What a run will keep in memory, estimated from its first task and λ_1, before any of it is made."""

from typing import Any

from torch import Tensor

from obbo_lightning.core.capacity import require_memory
from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least
from obbo_lightning.settings.files import Settings

LEAST = 1000  # bytes of a task, whatever is in it
PROCESSES = 1000


def require_sizes(settings: Settings, start: Tensor | None, first: Task | None) -> None:
    """Refuse windows, tasks and processes that this machine cannot hold, each by its key."""
    task = max(LEAST, sum(value.nbytes for value in (first or {}).values() if isinstance(value, Tensor)))
    algorithm: dict[str, Any] = settings["algorithm"]
    vector = LEAST if start is None else start.nbytes
    for key, size in (
        ("tasks_per_round", settings["tasks_per_round"]),
        ("evaluation.tasks", settings["evaluation"]["tasks"]),
    ):
        require_memory(key, at_least(key, size, 1), float(size) * task)
    windows = {"regret_window": settings["regret_window"], "algorithm.window": algorithm.get("window")}
    for key, window in windows.items():
        if isinstance(window, int) and window > 0:  # other values are the part's own to refuse
            solved = task if algorithm["name"] == "oagd" and key != "regret_window" else 0
            # A slot has its place in a list, too.
            require_memory(key, window, float(window) * (vector + solved + 100))
    workers = settings["workers"]
    if workers > PROCESSES:
        raise ValueError(f"workers must be at most {PROCESSES}, got {workers}")
