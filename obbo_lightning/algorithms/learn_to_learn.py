"""Adaptation and meta-gradients by learn2learn, as an inner solver and an estimator of ours."""

import contextlib
import io
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from obbo_lightning.core.hypergradients.base import Estimator, Hypergradient
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.validation import instance_of
from obbo_lightning.problems.few_shot import CNN4, FewShot


def load_learn2learn() -> Any:
    """The learn2learn package; one line on how to get it where it is not there."""
    try:
        # Its gym greets everybody with a page on its own end of life.
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
    """K steps of learn2learn's MAML on the support images, without a proximal term.

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
        """The steps and η of a `GradientDescent` that starts at λ."""
        solver = instance_of("inner", solver or GradientDescent(steps=5, start="outer"), GradientDescent)
        if solver.start != "outer" or solver.batch_size is not None:
            raise ValueError(f"inner must start at 'outer' and use whole tasks for learn2learn, got {solver!r}")
        return cls(solver.steps, solver.lr, head_only)

    @property
    def step_size(self) -> float | None:
        return self.lr

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        network = _network(oracle)
        return self.flat(network, self.adapt(network, oracle, first_order=True))

    def adapt(self, network: CNN4, oracle: Oracle, first_order: bool) -> Any:
        """A learner whose parameters are functions of those of ``network``."""
        learn2learn, task = load_learn2learn(), oracle.task
        with torch.enable_grad():
            adapted = network.linear if self.head_only else network
            features = network.blocks(task["support"]).flatten(1) if self.head_only else task["support"]
            learner = learn2learn.algorithms.MAML(adapted, lr=self.lr, first_order=first_order).clone()
            for _ in range(self.steps):
                learner.adapt(functional.cross_entropy(learner(features), task["support_labels"]))
                oracle.calls["gradients"] += 1
        return learner

    def flat(self, network: CNN4, learner: Any) -> Tensor:
        """ω^K ``[1, d]``."""
        parameters = dict(network.named_parameters())
        prefix = "linear." if self.head_only else ""
        parameters |= {prefix + name: p for name, p in learner.module.named_parameters()}
        return torch.cat([p.detach().flatten() for p in parameters.values()]).unsqueeze(0)


@dataclass(frozen=True)
class MetaGradient(Estimator):
    """The gradient of the adapted network's query loss by its initialisation, through all steps of adaptation."""

    takes_lanes = False

    def require_fit(self, problem: Problem) -> None:
        if not isinstance(problem, FewShot) or problem.learn_proximity:
            wanted = "a few-shot problem with problem.learn_proximity false"
            raise ValueError(f"algorithm 'maml' and 'anil' need {wanted}, got {type(problem).__name__}")

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, solve: Tensor | None
    ) -> Hypergradient:
        solver, task = instance_of("inner", solver, Adaptation), oracle.task
        network = _network(oracle)
        learner = solver.adapt(network, oracle, first_order=False)
        with torch.enable_grad():
            features = network.blocks(task["query"]).flatten(1) if solver.head_only else task["query"]
            loss = functional.cross_entropy(learner(features), task["query_labels"])
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        oracle.calls["gradients"] += 1
        oracle.calls["products"] += solver.steps
        value = torch.cat([g.flatten() for g in gradients]).unsqueeze(0)
        loss = loss.detach().reshape(1)
        return Hypergradient(value, solver.flat(network, learner), loss, torch.zeros_like(loss))


def _network(oracle: Oracle) -> CNN4:
    return instance_of("problem", oracle.problem, FewShot).loaded_network(oracle.outer)
