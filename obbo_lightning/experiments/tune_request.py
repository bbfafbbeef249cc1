"""What a search is asked to do: the ``tune`` section of a comparison file."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from obbo_lightning.config.parse import Config, ConfigError

STEPS = {"algorithm.lr": "step α", "algorithm.scale": "scale of the step"}  # one of them is always searched


class Range(NamedTuple):
    """Where a setting is looked for.

    Attributes:
        low: of an interval, in which logarithms are uniform; None for a list.
        high: the other end.
        values: a list to choose from; empty for an interval.
    """

    low: float | int | None = None
    high: float | int | None = None
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.values:
            return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in self.values)
        return f"{self.low:g} to {self.high:g}"

    def has(self, value: Any) -> bool:
        """Whether a value can be found here."""
        if self.values:
            return value in self.values
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (self.low or 0) <= value <= (self.high or 0)

    def ends_at(self, value: Any) -> bool:
        """Whether a value is in the outer twentieth of an interval: beyond it there may be better ones.

        >>> Range(1e-4, 1.0).ends_at(0.9), Range(1e-4, 1.0).ends_at(0.3), Range(values=(1, 2)).ends_at(2)
        (True, False, False)
        """
        if self.low is None or self.high is None:
            return False
        place = math.log(value / self.low) / math.log(self.high / self.low)
        return not 0.05 < place < 0.95


class Request(NamedTuple):
    """A search for each method of a comparison, the same for all.

    Attributes:
        search: where each setting is looked for; a method that does not take one is searched without it.
        rounds: of a trial; None: those of the comparison.
        budget: of each method: how many in all, of rounds or of oracle calls.
        unit: ``rounds`` or ``calls``.
        judge: ``validation`` tasks, or the ``stream``'s own score before it learns.
        tasks: validation tasks; None: as many as the comparison's evaluations have.
        seeds: of the trials; a trial's result is the mean over them.
        sampler: ``tpe``, ``random`` or ``grid``.
        prune: ``median``, or ``none``.
        rungs: rounds after which a trial may be given up.
        at_once: trials of a method that are chosen together, and can be played side by side.
        seed: of the search.
        settings: what trials have and the comparison has not, such as other data.
    """

    search: dict[str, Range]
    rounds: int | None
    budget: int
    unit: str
    judge: str
    tasks: int | None
    seeds: tuple[int, ...]
    sampler: str
    prune: str
    rungs: tuple[int, ...]
    at_once: int
    seed: int
    settings: Config


def read_tune(found: Any) -> Request:
    """From the section as it was written."""
    section = _mapping("tune", found)
    for key in section:
        if key not in KEYS:
            raise ConfigError(f"tune takes {', '.join(KEYS)}, got {key!r}")
    read = {key: section.get(key, usual) for key, usual in KEYS.items()}
    search = {key: _range(key, given) for key, given in _mapping("tune.search", read["search"]).items()}
    if len([key for key in STEPS if key in search]) != 1:
        wanted = " or (where that is auto) ".join(STEPS)
        raise ConfigError(f"tune.search must have {wanted}, which every method is tuned by, got {', '.join(search)}")
    budget = _mapping("tune.budget", read["budget"])
    if len(budget) != 1 or next(iter(budget)) not in ("rounds", "calls"):
        raise ConfigError(f"tune.budget must have rounds or calls, got {read['budget']!r}")
    ((unit, amount),) = budget.items()
    request = Request(
        search=search,
        rounds=None if read["rounds"] is None else _whole("tune.rounds", read["rounds"]),
        budget=_whole(f"tune.budget.{unit}", amount),
        unit=unit,
        judge=_one_of("tune.judge", read["judge"], ("validation", "stream")),
        tasks=None if read["tasks"] is None else _whole("tune.tasks", read["tasks"]),
        seeds=_each("tune.seeds", read["seeds"], lambda key, value: _whole(key, value, 0)),
        sampler=_one_of("tune.sampler", read["sampler"], ("tpe", "random", "grid")),
        prune=_one_of("tune.prune", read["prune"], ("median", "none")),
        rungs=_each("tune.rungs", read["rungs"], _whole),
        at_once=_whole("tune.at_once", read["at_once"]),
        seed=_whole("tune.seed", read["seed"], 0),
        settings=_mapping("tune.settings", read["settings"]),
    )
    _require_consistent(request)
    return request


KEYS: dict[str, Any] = {
    "search": None,
    "rounds": None,
    "budget": None,
    "judge": "validation",
    "tasks": None,
    "seeds": [1000],
    "sampler": "tpe",
    "prune": "none",
    "rungs": [],
    "at_once": 4,
    "seed": 0,
    "settings": {},
}


def _require_consistent(request: Request) -> None:
    if not request.seeds:
        raise ConfigError("tune.seeds must have at least one seed, got none")
    if (request.prune == "none") != (not request.rungs):
        raise ConfigError(
            f"tune.rungs must be given with tune.prune median, and only then, got {list(request.rungs)} with "
            f"{request.prune}"
        )
    if sorted(set(request.rungs)) != list(request.rungs):
        raise ConfigError(f"tune.rungs must grow, got {list(request.rungs)}")
    intervals = [key for key, given in request.search.items() if not given.values]
    if request.sampler == "grid" and intervals:
        raise ConfigError(f"tune.search.{intervals[0]} must be a list with tune.sampler grid, got an interval")


def _range(key: str, given: Any) -> Range:
    where = f"tune.search.{key}"
    if isinstance(given, list):
        if not given or len(set(map(repr, given))) != len(given):
            raise ConfigError(f"{where} must have values that differ, got {given!r}")
        return Range(values=tuple(given))
    ends = _mapping(where, given)
    if set(ends) != {"low", "high"}:
        raise ConfigError(f"{where} must be a list, or have low and high, got {given!r}")
    low, high = ends["low"], ends["high"]
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{where} must be between numbers, got {value!r}")
    if not 0 < low < high < float("inf"):  # logarithms are uniform
        raise ConfigError(f"{where} must have 0 < low < high, got {low!r} and {high!r}")
    return Range(low, high)


def _mapping(key: str, given: Any) -> Config:
    if not isinstance(given, dict):
        raise ConfigError(f"{key} must have keys and values, got {given!r}")
    return given


def _whole(key: str, given: Any, least: int = 1) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigError(f"{key} must be an integer of at least {least}, got {given!r}")
    return given


def _each(key: str, given: Any, read: Callable[[str, Any], int]) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise ConfigError(f"{key} must be a list, got {given!r}")
    return tuple(read(key, value) for value in given)


def _one_of(key: str, given: Any, allowed: Sequence[str]) -> str:
    if given not in allowed:
        raise ConfigError(f"{key} must be one of {', '.join(allowed)}, got {given!r}")
    return str(given)
