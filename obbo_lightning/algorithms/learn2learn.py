"""Adaptation and meta-gradients by learn2learn, as an inner solver and an estimator."""

import contextlib
import io
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.hypergradients.base import Estimator, Hypergradient
from obbo_lightning.core.inner_solvers import GradientDescent, InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import instance_of
from obbo_lightning.networks.flat import seeded, without_noise, without_running_statistics
from obbo_lightning.problems.few_shot import FewShot


def load_learn2learn() -> Any:
    """Import learn2learn; refuse with how to install it where it is missing."""
    try:
        # Its gym prints a page about its own end of life.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import learn2learn
    except ImportError as missing:
        raise ValueError(
            f"algorithm 'maml' and 'anil' need learn2learn, which cannot be imported ({missing}): "
            f"install it with docker/install-learn2learn"
        ) from None
    return learn2learn


@dataclass(frozen=True)
class Adaptation(InnerSolver):
    """K steps of learn2learn's MAML on the support examples, without a proximal term.

    Args:
        steps: K.
        lr: η.
        head_only: adapt the last layer only (ANIL).
    """

    steps: int
    lr: float
    head_only: bool = False

    @classmethod
    def like(cls, solver: InnerSolver | None, head_only: bool) -> "Adaptation":
        """Return the steps and η of a `GradientDescent` that starts at λ."""
        solver = instance_of("inner", solver or GradientDescent(steps=5, start="outer"), GradientDescent)
        if solver.start != "outer" or solver.batch_size is not None:
            raise ValueError(
                "inner must start at 'outer' and use whole tasks for learn2learn, which adapts a few-shot problem, "
                f"got {solver!r}"
            )
        return cls(solver.steps, solver.lr, head_only)

    @property
    def step_size(self) -> float | None:
        return self.lr

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        return self.adapt(oracle, first_order=True).inner

    def adapt(self, oracle: Oracle, first_order: bool) -> "AdaptedNetwork":
        """Take K steps from λ, as a graph of λ where they are not ``first_order``."""
        network = _network(oracle)
        examples, labels = oracle.task["support"], oracle.task["support_labels"]
        with torch.enable_grad():
            name, module = "", network
            if self.head_only:
                with self._noise(oracle, 0):
                    name, examples = last_layer(network, examples)
                module = network.get_submodule(name)
            # allow_nograd: the network may have frozen and unused parameters
            learner = load_learn2learn().algorithms.MAML(module, self.lr, first_order, allow_nograd=True).clone()
            for k in range(self.steps):
                with self._noise(oracle, k):
                    learner.adapt(functional.cross_entropy(learner(examples), labels))
                oracle.evaluations["gradients"] += 1
        return AdaptedNetwork(network, name, learner)

    def _noise(self, oracle: Oracle, step: int) -> contextlib.AbstractContextManager[None]:
        return seeded(oracle.key.seed_for("inner", step), oracle.outer.device)


class AdaptedNetwork(NamedTuple):
    """A network after adaptation.

    Attributes:
        network: before adaptation; its parameters are λ.
        name: of the layer that was adapted, empty for the whole network.
        learner: learn2learn's, whose parameters are functions of λ.
    """

    network: nn.Module
    name: str
    learner: Any

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of λ by name, in order."""
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    @property
    def inner(self) -> Tensor:
        """ω^K ``[1, d]``."""
        prefix = f"{self.name}." if self.name else ""
        adapted = {prefix + name: p for name, p in self.learner.module.named_parameters()}
        return torch.cat([adapted.get(k, p).detach().flatten() for k, p in self.parameters.items()]).unsqueeze(0)

    def loss(self, task: Task) -> Tensor:
        """Return the query loss without dropout, as a function of λ."""
        with torch.enable_grad():
            examples = task["query"]
            if self.name:
                _, examples = last_layer(without_noise(self.network), examples)
            return functional.cross_entropy(without_noise(self.learner)(examples), task["query_labels"])


def last_layer(network: nn.Module, examples: Tensor) -> tuple[str, Tensor]:
    """Return the name of the linear layer whose output is the network's, and its input."""
    layers: list[tuple[str, Tensor, Tensor]] = []  # name, input, output
    hooks = [
        module.register_forward_hook(lambda _, given, output, name=name: layers.append((name, given[0], output)))
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear)
    ]
    logits = network(examples)
    for hook in hooks:
        hook.remove()
    for name, features, output in layers:
        if output is logits:
            return name, features
    raise ValueError(f"algorithm 'anil' needs a network that ends in an nn.Linear, got {type(network).__name__}")


@dataclass(frozen=True)
class MetaGradient(Estimator):
    """Gradient of the adapted network's query loss in its initialisation, through all steps of adaptation."""

    supports_lanes = False

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        if not isinstance(problem, FewShot) or problem.learn_proximity:
            wanted = "a few-shot problem with problem.learn_proximity false"
            raise ValueError(f"algorithm 'maml' and 'anil' need {wanted}, got {type(problem).__name__}")

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, linear_solution: Tensor | None
    ) -> Hypergradient:
        solver = instance_of("inner", solver, Adaptation)
        adapted = solver.adapt(oracle, first_order=False)
        loss, outer = adapted.loss(oracle.task), list(adapted.parameters.values())
        gradients = torch.autograd.grad(loss, outer, allow_unused=True, materialize_grads=True)
        oracle.evaluations["gradients"] += 1
        oracle.evaluations["products"] += solver.steps
        value = torch.cat([g.flatten() for g in gradients]).unsqueeze(0)
        loss = loss.detach().reshape(1)
        return Hypergradient(value, adapted.inner, loss, torch.zeros_like(loss))


def _network(oracle: Oracle) -> nn.Module:
    return without_running_statistics(instance_of("problem", oracle.problem, FewShot).loaded_network(oracle.outer))
