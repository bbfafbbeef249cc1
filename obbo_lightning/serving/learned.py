"""What a run has learned, and what it becomes for new classes."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from obbo_lightning.core.inner import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.recipes import make_again
from obbo_lightning.core.validation import at_least, positive
from obbo_lightning.networks.flat import forgetful, seeded, without_noise
from obbo_lightning.networks.settled import settled
from obbo_lightning.parts import class_named, only_installed, short_name
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.serving.heads import with_classes
from obbo_lightning.serving.inputs import Inputs, inputs_from
from obbo_lightning.serving.parcel import Parcel, read_parcel, require_finite

BATCH = 256  # queries that go through a network together; their predictions do not depend on one another


def load(path: str | Path, trust: bool = False) -> "Learned":
    """What was learned, from an export, a run directory (its newest checkpoint) or a checkpoint file.

    For few-shot runs a `LearnedNetwork`, which adapts to new classes; for others λ by names. Needs neither the training
    data nor Lightning.

    Args:
        path: of it.
        trust: run the code that it names (``file.py:Class``), where that is neither installed nor loaded already.
    """
    with only_installed(None if trust else f"load({str(path)!r}, trust=True)"):
        return learned(read_parcel(Path(path)))


def learned(parcel: Parcel) -> "Learned":
    """The same, from what was read."""
    require_finite(parcel)
    return LearnedNetwork(parcel) if parcel.few_shot else Learned(parcel)


class Learned:
    """λ by names, and what is known about it.

    Attributes:
        outer: λ: numbers for each lane by the problem's names, or all of it as ``outer`` ``[lanes, d]``; of a few-shot
            run the network's state_dict.
        about: what an export's JSON says: round, checkpoint, version, and so on.
    """

    def __init__(self, parcel: Parcel) -> None:
        self.about, self.outer = parcel.about, parcel.tensors

    def adapt(
        self, support: Any, labels: Sequence[Hashable], steps: int | None = None, lr: float | None = None
    ) -> "Adapted":
        """For few-shot runs, see `LearnedNetwork`; others have no network to adapt."""
        what = short_name(self.about["problem"] or "") or "a problem that could not be written down"
        raise ValueError(f"adapt needs what a few-shot run has learned, and this is λ of {what}")


class LearnedNetwork(Learned):
    """A learned initialisation, to be adapted to new classes.

    Attributes:
        inputs: makes what you have into what the network takes.
    """

    def __init__(self, parcel: Parcel) -> None:
        super().__init__(parcel)
        self._make: Callable[[], nn.Module] = make_again(self.about["network"])
        self.inputs: Inputs = inputs_from(self.about["inputs"])
        self.solver: InnerSolver = make_again(self.about["inner"])
        # Found here, where it is known who is trusted, and not when it is needed.
        self._kind, self._settings = _few_shot(self.about["problem"]), make_again(self.about["with"])
        with seeded(0, torch.device("cpu")):
            self._network = self._make()
        try:
            self._network.load_state_dict(self.outer)
        except RuntimeError:
            found = short_name(self.about["network"]["network"])
            raise ValueError(f"the weights do not fit the network {found}: its class is not what it was") from None
        self._network.to(next(p.dtype for p in self.outer.values() if p.is_floating_point()))

    def network(self) -> nn.Module:
        """The network with λ, as an ordinary module."""
        return copy.deepcopy(self._network)

    def adapt(
        self, support: Any, labels: Sequence[Hashable], steps: int | None = None, lr: float | None = None
    ) -> "Adapted":
        """The network adapted to a few labelled examples, as the run adapts it to its test tasks: from λ, near λ.

        Any number of classes from 2 up, any number of examples of each. The last layer starts as it was learned: class
        after class, in the order in which they come, takes one of its rows; more classes than in training share them.

        Args:
            support: images (a list of PIL images; a uint8 array [n, height, width, channels] or tensor [n, channels,
                height, width] of any size; floats between 0 and 1), or vectors as the run's file had them.
            labels: what each example is: words, numbers, anything hashable.
            steps: K; the run's where this is None.
            lr: η; the run's where this is None.
        """
        names = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        classes = list(dict.fromkeys(names))
        if len(classes) < 2:
            raise ValueError(f"labels must be of 2 classes or more, got {len(classes)}")
        solver, examples = _overridden(self.solver, steps, lr).whole, self._taken(support)
        if len(examples) != len(names):
            raise ValueError(f"labels must be one for each example, got {len(names)} and {len(examples)} examples")
        problem = self._problem(examples, len(classes))
        outer, numbers = problem.initial_outer(0), {name: i for i, name in enumerate(classes)}
        task = {"support": examples, "support_labels": torch.tensor([numbers[name] for name in names])}
        oracle = Oracle(problem, outer, task, Key(self.about["seed"], -1))
        inner = solver(oracle, problem.initial_inner(outer, task))
        return Adapted(self, classes, problem.loaded_network(inner), examples)

    def _taken(self, given: Any) -> Tensor:
        return self.inputs(given).to(next(self._network.parameters()).dtype)

    def _problem(self, examples: Tensor, classes: int) -> FewShot:
        """The run's, with a network for so many classes."""
        network = self._network
        with torch.no_grad():
            ways = without_noise(forgetful(self.network()))(examples).shape[1]
        if ways != classes:
            network = with_classes(network, self._make, ways, classes)
        return self._kind(network=network, **self._settings)


class Adapted:
    """A network that tells some classes apart.

    Attributes:
        classes: the labels that it was adapted to, in the order of `probabilities`.
        network: for one query or many: norms use the statistics of the support examples. An ordinary module.
    """

    def __init__(self, learned: LearnedNetwork, classes: list[Hashable], network: nn.Module, support: Tensor) -> None:
        self._learned, self.classes = learned, classes
        self._together = without_noise(forgetful(network))
        self._support = support
        self._alone: nn.Module | None = None

    @property
    def network(self) -> nn.Module:
        if self._alone is None:
            self._alone = settled(self._together, self._support)
        return self._alone

    @torch.no_grad()
    def probabilities(self, queries: Any, transductive: bool = False) -> Tensor:
        """Of each class for each query ``[n, classes]``.

        Args:
            queries: as `LearnedNetwork.adapt` takes them.
            transductive: all queries are normalised together, as in the run's own evaluation: a prediction then depends
                on which queries it is asked with. Otherwise it depends on the support examples alone.
        """
        examples = self._learned._taken(queries)
        if transductive:
            return self._together(examples).softmax(-1)
        return torch.cat([self.network(some) for some in examples.split(BATCH)]).softmax(-1)

    def predict(self, queries: Any, transductive: bool = False) -> list[Hashable]:
        """The likeliest class of each query."""
        return [self.classes[i] for i in self.probabilities(queries, transductive).argmax(-1).tolist()]


def _few_shot(name: str) -> type[FewShot]:
    cls = class_named(name, "an export's problem")
    if not (isinstance(cls, type) and issubclass(cls, FewShot)):
        raise ValueError(f"an export's problem must be a FewShot, got {name!r}")
    return cls


def _overridden(solver: InnerSolver, steps: int | None, lr: float | None) -> InnerSolver:
    """The run's solver, from λ, with other steps where they are asked for."""
    changes: dict[str, Any] = {}
    if steps is not None:
        changes["steps"] = at_least("steps", steps, 1)
    if lr is not None:
        changes["lr"] = positive("lr", lr)
    known: set[str] = {field.name for field in fields(solver)} if is_dataclass(solver) else set()
    for name in changes:
        if name not in known:
            raise ValueError(f"{name} cannot be chosen for the inner solver {type(solver).__name__}, which has none")
    if "start" in known:
        changes["start"] = "outer"
    return replace(solver, **changes) if changes else solver  # type: ignore[type-var]
