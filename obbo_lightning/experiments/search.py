"""One method's search, by Optuna: which settings are tried next, which trials are given up, which one is best.

All that it knows is in Optuna's journal, a line an operation, and each of ours is one operation: a process that is
killed leaves a search that goes on as if it had not been. Trials are chosen in generations of a fixed size, each with a
seed of its own, so that how many are played side by side decides nothing.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.experiments.tune_request import Range, Request
from obbo_lightning.streams.stream import Metric

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial


class Trial(NamedTuple):
    """Settings that are tried.

    Attributes:
        number: of the method's trials.
        values: by their dotted keys.
        results: by rounds.
        ended: whether it was played to its end, or given up.
        pruned: given up, or blown up.
        rounds: that were played, over all seeds.
        calls: of gradients and products in them.
    """

    number: int
    values: dict[str, Any]
    results: dict[int, float]
    ended: bool
    pruned: bool
    rounds: int
    calls: int


class Result(NamedTuple):
    """What a trial gave after some rounds, and what it has cost until then; None where it blew up."""

    value: float | None
    rounds: int
    calls: int


def open_journal(path: Path) -> "JournalStorage":
    """Optuna's storage in a file that this process owns; the half line of a machine that lost its power goes."""
    optuna = _optuna()
    if path.is_file():
        written = path.read_bytes()
        os.truncate(path, written.rfind(b"\n") + 1)
    backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_Owned())
    journal: JournalStorage = optuna.storages.JournalStorage(backend)
    return journal


class _Owned:
    """The folder has a lock already, which the system gives back when its owner dies; those of Optuna would stay."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError("tune needs optuna, which is not installed: pip install 'obbo_lightning[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Search:
    """The trials of one method.

    Args:
        journal: see `open_journal`.
        name: of the method.
        request: what is searched, how, and with what budget.
        ranges: those of the request that the method takes.
        untuned: what it has without a search: the first trial, where the ranges have it.
        rounds: of a whole trial, for each seed.
        metric: what results are, and their direction.
    """

    def __init__(
        self,
        journal: "JournalStorage",
        name: str,
        request: Request,
        ranges: dict[str, Range],
        untuned: dict[str, Any],
        rounds: int,
        metric: Metric,
    ) -> None:
        self.name, self.request, self.ranges, self.rounds = name, request, ranges, rounds
        self.metric = metric
        optuna = _optuna()
        self._study: Study = optuna.create_study(
            storage=journal,
            study_name=name,
            direction="maximize" if metric.higher_is_better else "minimize",
            load_if_exists=True,
        )
        self._distributions = {key: _distribution(given) for key, given in ranges.items()}
        in_range = all(given.has(untuned[key]) for key, given in ranges.items())
        self._planned: list[dict[str, Any]] = [untuned] if in_range and request.sampler != "grid" else []
        if request.sampler == "grid":
            self._planned = list(_combinations(ranges))

    @property
    def trials(self) -> list[Trial]:
        """All that were chosen so far."""
        return [_read(trial) for trial in self._study.get_trials(deepcopy=False)]

    @property
    def best(self) -> Trial | None:
        """Of those that were played to their end; None where there is none. The first of equals."""
        whole = [trial for trial in self.trials if trial.ended and not trial.pruned]
        better = max if self.metric.higher_is_better else min
        return better(whole, key=lambda trial: trial.results[self.rounds], default=None)

    def generation(self) -> list[Trial]:
        """The trials of a generation that has not ended, chosen now where there is none; nothing when all is spent."""
        told = self._study.get_trials(deepcopy=False)
        number, size = told[-1].user_attrs["generation"] if told else (0, 0)
        members = [trial for trial in told if trial.user_attrs["generation"][0] == number]
        if len(members) == size and all(trial.state.is_finished() for trial in members):
            number, size = number + 1, self._affordable()
            members = []
        for _ in range(size - len(members)):
            self._choose(number, size)
        now = self._study.get_trials(deepcopy=False)
        return [_read(trial) for trial in now if trial.user_attrs["generation"][0] == number] if size else []

    def _affordable(self) -> int:
        """How many trials the next generation may have, so that the budget is not exceeded."""
        trials, whole = self.trials, self.rounds * len(self.request.seeds)
        if self.request.unit == "calls" and not trials:
            return 1  # what one costs is not known before
        spent = sum(getattr(trial, self.request.unit) for trial in trials)
        dearest = max((trial.calls / trial.rounds for trial in trials if trial.rounds), default=1.0)
        cost = whole * (dearest if self.request.unit == "calls" else 1)
        size = min(self.request.at_once, int((self.request.budget - spent) // cost))
        return max(0, min(size, len(self._planned) - len(trials)) if self.request.sampler == "grid" else size)

    def _choose(self, generation: int, size: int) -> None:
        """One more trial, in one operation of the journal: there are no halves of trials."""
        optuna = _optuna()
        number = len(self._study.get_trials(deepcopy=False))
        values = self._planned[number] if number < len(self._planned) else self._sampled(number)
        created = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=values,
            distributions=self._distributions,
            user_attrs={"generation": [generation, size]},
        )
        self._study.add_trial(created)

    def _sampled(self, number: int) -> dict[str, Any]:
        """What Optuna suggests, asked in a copy that is forgotten: it writes a trial down key by key."""
        optuna = _optuna()
        seed = derive_seed(self.request.seed, self.name, number) % 2**32
        samplers = optuna.samplers
        startup = self.request.at_once
        sampler = samplers.RandomSampler(seed=seed)
        if self.request.sampler == "tpe":
            sampler = samplers.TPESampler(seed=seed, n_startup_trials=startup, multivariate=False, constant_liar=True)
        copy = optuna.create_study(sampler=sampler, direction=self._study.direction)
        copy.add_trials(self._study.get_trials())
        return dict(copy.ask(self._distributions).params)

    def report(self, trial: Trial, rounds: int, result: Result) -> None:
        """What a trial gave after so many rounds; one that blew up has ended, and so has one that played them all."""
        optuna = _optuna()
        asked = optuna.trial.Trial(self._study, self._study.get_trials(deepcopy=False)[trial.number]._trial_id)
        asked.set_user_attr("spent", [result.rounds, result.calls])
        pruned = optuna.trial.TrialState.PRUNED
        if result.value is None:
            self._study.tell(asked, state=pruned)
            return
        if rounds not in trial.results:
            asked.report(result.value, rounds)
        if rounds == self.rounds:
            self._study.tell(asked, result.value)
        elif self._falls_behind(trial.number):
            self._study.tell(asked, state=pruned)

    def _falls_behind(self, number: int) -> bool:
        """What Optuna's pruner says, who sees no other trial of the generation, however far those have come."""
        optuna = _optuna()
        told = self._study.get_trials()
        generation = told[number].user_attrs["generation"][0]
        copy = optuna.create_study(pruner=optuna.pruners.MedianPruner(1), direction=self._study.direction)
        copy.add_trials([trial for trial in told if trial.user_attrs["generation"][0] < generation])
        copy.add_trial(told[number])
        behind = optuna.trial.Trial(copy, copy.get_trials(deepcopy=False)[-1]._trial_id).should_prune()
        return bool(behind)


def _read(trial: "FrozenTrial") -> Trial:
    spent = trial.user_attrs.get("spent", [0, 0])
    ended = trial.state.is_finished()
    pruned = trial.state.name == "PRUNED"
    return Trial(trial.number, dict(trial.params), dict(trial.intermediate_values), ended, pruned, *spent)


def _distribution(given: Range) -> "BaseDistribution":
    """Logarithms are uniform in an interval; of whole numbers where both ends are."""
    kinds = _optuna().distributions
    if given.values:
        return kinds.CategoricalDistribution(given.values)
    whole = isinstance(given.low, int) and isinstance(given.high, int)
    return (kinds.IntDistribution if whole else kinds.FloatDistribution)(given.low, given.high, log=True)


def _combinations(ranges: dict[str, Range]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(given.values for given in ranges.values())):
        yield dict(zip(ranges, values, strict=True))
