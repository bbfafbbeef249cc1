"""MAML and ANIL through learn2learn: second-order meta-gradients of plain adaptation, for few-shot problems."""

import contextlib
import io
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import Optimizer

from obbo_lightning.algorithms.adam import Adam
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.geometry import Euclidean
from obbo_lightning.core.hypergradients import Estimator, Hypergradient
from obbo_lightning.core.inner_solvers import GradientDescent, InnerSolver
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.optimizer import projected_optimizer
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.validation import instance_of, positive
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
        steps: K, number of inner steps.
        lr: η, inner step size.
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
            raise ValueError(f"inner must start at 'outer' and use whole tasks for learn2learn, got {solver!r}")
        return cls(solver.steps, solver.lr, head_only)

    @property
    def step_size(self) -> float | None:
        return self.lr

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        return self.adapt(oracle, first_order=True)[0]

    def adapt(self, oracle: Oracle, first_order: bool) -> tuple[Tensor, Tensor, list[nn.Parameter]]:
        """Return ω^K ``[1, d]``, the query loss, and the parameters λ, of which the loss is a function."""
        problem = instance_of("problem", oracle.problem, FewShot)
        network = without_running_statistics(problem.loaded_network(oracle.outer))
        examples, labels, queries = (oracle.task[name] for name in ("support", "support_labels", "query"))
        seeds = [oracle.key.seed_for("inner", k) for k in range(self.steps)]  # of dropout
        adapted, prefix = network, ""
        with torch.enable_grad():
            if self.head_only:
                with seeded(seeds[0], oracle.outer.device):
                    name, examples = last_layer(network, examples)
                adapted, prefix = network.get_submodule(name), f"{name}."
            # allow_nograd: the network may have frozen and unused parameters
            learner = load_learn2learn().algorithms.MAML(adapted, self.lr, first_order, allow_nograd=True).clone()
            for seed in seeds:
                with seeded(seed, oracle.outer.device):
                    learner.adapt(functional.cross_entropy(learner(examples), labels))
                oracle.evaluations["gradients"] += 1
            if self.head_only:
                _, queries = last_layer(without_noise(network), queries)
            loss = functional.cross_entropy(without_noise(learner)(queries), oracle.task["query_labels"])
        outer = {name: p for name, p in network.named_parameters() if p.requires_grad}
        after = {prefix + name: p for name, p in learner.module.named_parameters()}
        inner = torch.cat([after.get(name, p).detach().flatten() for name, p in outer.items()])
        return inner.unsqueeze(0), loss, list(outer.values())


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

    def __call__(self, oracle: Oracle, solver: InnerSolver, state: InnerState) -> Hypergradient:
        solver = instance_of("inner", solver, Adaptation)
        adapted, loss, outer = solver.adapt(oracle, first_order=False)
        gradients = torch.autograd.grad(loss, outer, materialize_grads=True)
        oracle.evaluations["gradients"] += 1
        oracle.evaluations["products"] += solver.steps
        value, loss = torch.cat([g.flatten() for g in gradients]).unsqueeze(0), loss.detach().reshape(1)
        return Hypergradient(value, adapted, loss, torch.zeros_like(loss))


@dataclass(frozen=True, eq=False, kw_only=True)
class MAML(Algorithm):
    """K steps from λ_t on the support examples, the gradient through all of them, Adam; no proximal term, no window.

    Reference: Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", 2017.

    Args:
        lr: α, outer step size.
        inner: inner solver (K, η); it must start at λ_t.
        clip: largest norm of d_t.

    >>> from obbo_lightning.solvers import GradientDescent
    >>> MAML(inner=GradientDescent(steps=5, lr=0.1, start="outer")).inner  # doctest: +SKIP
    Adaptation(steps=5, lr=0.1, head_only=False)
    """

    lr: float = 1e-3
    inner: InnerSolver = None  # type: ignore[assignment]
    hypergradient: Estimator = field(default=MetaGradient(), init=False)

    head_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        load_learn2learn()
        positive("lr", self.lr)
        object.__setattr__(self, "inner", Adaptation.like(self.inner, self.head_only))
        super().__post_init__()

    def optimizer(self, outer: Parameter, groups: ParameterGroups | None = None) -> Optimizer:
        return projected_optimizer(Adam.rule, outer, [ParameterGroup(None, Euclidean(), lr=self.lr)])


class ANIL(MAML):
    """As MAML, but only the last layer adapts; λ_t is still all of the network.

    Reference: Raghu, Raghu, Bengio, Vinyals, "Rapid Learning or Feature Reuse? Towards Understanding the Effectiveness
    of MAML", 2020.

    >>> ANIL().inner  # doctest: +SKIP
    Adaptation(steps=5, lr=0.1, head_only=True)
    """

    head_only = True
