"""Inner solvers: K steps on the inner loss g, from ω⁰ to ω^K ≈ β̂_t(λ_t), or its exact minimiser."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.step_map import StepMap
from obbo_lightning.core.validation import at_least, decay, one_of, positive


class InnerSolver(Configurable, ABC):
    """Solver of the inner problem of a round."""

    @property
    def warm_starts(self) -> bool:
        """Whether the next round starts from this round's inner variable."""
        return False

    @property
    def is_stochastic(self) -> bool:
        """Whether it evaluates the loss on samples of a task."""
        return False

    @property
    def step_size(self) -> float | None:
        """η, or None for a solver that has none."""
        return None

    @property
    def step_map(self) -> StepMap | None:
        """The map of one step, whose fixed point implicit hypergradients are taken at; None for a solver without."""
        return None if self.step_size is None else StepMap(self.step_size)

    @property
    def without_sampling(self) -> "InnerSolver":
        """The same solver on whole tasks, for evaluations that must not depend on the choice of samples."""
        return self

    def require_compatible(self, problem: Problem) -> None:
        """Refuse, before the first round, a problem that lacks what this solver needs."""

    def require_start(self, problem: Problem, outer: Tensor, task: Task) -> None:
        """Refuse, before the first round, a problem without a first inner variable where one is needed."""
        if self.warm_starts:
            require_initial_inner(problem, problem.initial_inner(outer, task))

    def warm_start(self, oracle: Oracle, previous: Tensor | None) -> Tensor | None:
        """Return β_t: ``previous``, or in the first round of a warm-started solver the problem's own β_1."""
        if previous is None and self.warm_starts:
            return oracle.problem.initial_inner(oracle.outer.detach(), oracle.task)
        return previous

    @abstractmethod
    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        """Return ω^K, detached; ``previous`` is β_t."""


class IterativeSolver(InnerSolver):
    """K steps of size η, each on the whole task or on fresh samples of it.

    Subclasses are dataclasses with these attributes.
    """

    steps: int
    lr: float
    batch_size: int | None

    def __post_init__(self) -> None:
        at_least("inner.steps", self.steps, 1)
        positive("inner.lr", self.lr)
        if self.batch_size is not None:
            at_least("inner.batch_size", self.batch_size, 1)

    @property
    def is_stochastic(self) -> bool:
        return self.batch_size is not None

    @property
    def without_sampling(self) -> InnerSolver:
        return replace(self, batch_size=None) if self.is_stochastic else self  # type: ignore[type-var]

    @property
    def step_size(self) -> float | None:
        return self.lr


@dataclass(frozen=True)
class GradientDescent(IterativeSolver):
    """ω^k = ω^{k−1} − η ∇_ω g_t(λ_t, ω^{k−1}), K times             (Algorithms 1 and 2).

    Args:
        steps: K, number of inner steps.
        lr: η, inner step size.
        start: ``previous`` starts from β_t, a constant (Algorithm 1); ``outer`` from λ_t, as few-shot adaptation does.
        batch_size: s, number of fresh samples for every step (SOBBO); None for the whole task.
        precision: ``full``, or ``bf16`` for losses of inner steps in bfloat16 (autocast); ω itself and everything
            evaluated at ω^K stay in full precision.

    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> oracle = QuadraticTasks().oracle()
    >>> inner = GradientDescent(steps=200, lr=1.0)(oracle, torch.zeros(1, 8, dtype=torch.float64))
    >>> torch.allclose(inner, oracle.problem.solution(oracle.outer, oracle.task))
    True
    """

    steps: int = 20
    lr: float = 0.1
    start: str = "previous"
    batch_size: int | None = None
    precision: str = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("inner.start", self.start, ("previous", "outer"))
        one_of("inner.precision", self.precision, ("full", "bf16"))

    @property
    def warm_starts(self) -> bool:
        return self.start == "previous"

    def __call__(self, oracle: Oracle, previous: Tensor | None, differentiable: bool = False) -> Tensor:
        """Return ω^K; with ``differentiable`` the graph of all K steps is kept."""
        autocast = torch.autocast(oracle.outer.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        with torch.set_grad_enabled(differentiable), autocast:
            if self.start == "outer":
                # Part of the graph, so Unrolled differentiates through ω⁰ = λ; a copy, so ∇_ω is not ∇_ω + ∇_λ.
                inner = oracle.problem.inner_from_outer(oracle.outer.clone())
            else:
                inner = require_initial_inner(oracle.problem, previous).detach()
            if differentiable and not inner.requires_grad:
                inner = inner.requires_grad_()
            for k in range(self.steps):
                sample = oracle.draw("inner", k, self.batch_size)
                # ω^k = ω^{k−1} − η ∇_ω g_t(λ_t, ω^{k−1})
                inner = inner - self.lr * oracle.inner_gradient(inner, sample, differentiable)
        return inner

    def require_start(self, problem: Problem, outer: Tensor, task: Task) -> None:
        super().require_start(problem, outer, task)
        initial = problem.initial_inner(outer, task)
        if self.start == "outer" and initial is not None and initial.shape != problem.inner_from_outer(outer).shape:
            raise ValueError(
                f"inner.start must be previous for {type(problem).__name__}, whose inner variable has "
                f"{initial.shape[-1]} coordinates and λ {outer.shape[-1]}, got 'outer'"
            )


@dataclass(frozen=True)
class ExactSolution(InnerSolver):
    """β̂_t(λ_t) from the problem's own closed form.

    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> ExactSolution()(QuadraticTasks().oracle(), None).shape
    torch.Size([1, 8])
    """

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        self.require_compatible(oracle.problem)
        solution = oracle.problem.solution(oracle.outer.detach(), oracle.task)
        assert solution is not None
        return solution.detach()

    def require_compatible(self, problem: Problem) -> None:
        if not problem.provides("solution"):
            raise ValueError(f"inner 'ExactSolution' needs a solution, and {type(problem).__name__} has none")


class StatefulSolver(IterativeSolver):
    """K steps from β_t with a state (momentum, moments) that is carried from round to round together with β."""

    warm_starts = True

    @torch.no_grad()
    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        inner = require_initial_inner(oracle.problem, previous).detach()
        state = self.initial_state(inner) if oracle.solver_state is None else oracle.solver_state
        for k in range(self.steps):
            gradient = oracle.inner_gradient(inner, oracle.draw("inner", k, self.batch_size))
            inner, state = self.step(inner, gradient, state)
        oracle.solver_state = state
        return inner

    @abstractmethod
    def initial_state(self, inner: Tensor) -> Tensor:
        """Return the state before the first step ``[lanes, …]``."""

    @abstractmethod
    def step(self, inner: Tensor, gradient: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return ω^k and the new state from ω^{k−1}, ∇_ω g and the old state."""


@dataclass(frozen=True)
class InnerSGD(StatefulSolver):
    """m^k = μ m^{k−1} + ∇_ω g_t(λ_t, ω^{k−1}), ω^k = ω^{k−1} − η m^k, K times; m is carried between rounds.

    Args:
        steps: K, number of inner steps.
        lr: η, inner step size.
        momentum: μ, weight of the past steps.
        batch_size: number of fresh observations for every step; None for the whole task.

    >>> InnerSGD(20, 0.1, 0.9).momentum
    0.9
    """

    steps: int = 20
    lr: float = 0.1
    momentum: float = 0.9
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        decay("inner.momentum", self.momentum)

    def initial_state(self, inner: Tensor) -> Tensor:
        return torch.zeros_like(inner)

    def step(self, inner: Tensor, gradient: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        # m^k = μ m^{k−1} + ∇_ω g, ω^k = ω^{k−1} − η m^k
        state = self.momentum * state + gradient
        return inner - self.lr * state, state


@dataclass(frozen=True)
class InnerAdam(StatefulSolver):
    """K steps of Adam; its moments and its step count are carried between rounds.

    m^k = b₁ m^{k−1} + (1 − b₁) g, v^k = b₂ v^{k−1} + (1 − b₂) g², ω^k = ω^{k−1} − η m̂^k / (√v̂^k + ε), both moments
    divided by 1 − b^k. Adam's η is no step size for `FixedPoint`: give ``hypergradient.lr``.

    Args:
        steps: K, number of inner steps.
        lr: η, inner step size.
        beta1: b₁, decay of the average of gradients.
        beta2: b₂, decay of the average of their squares.
        epsilon: ε, added to the square root of that average.
        batch_size: number of fresh observations for every step; None for the whole task.

    >>> InnerAdam(20, 1e-3, 0.9, 0.99).beta2
    0.99
    """

    steps: int = 20
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    batch_size: int | None = None

    step_size = None

    def __post_init__(self) -> None:
        super().__post_init__()
        decay("inner.beta1", self.beta1)
        decay("inner.beta2", self.beta2)
        positive("inner.epsilon", self.epsilon)

    def initial_state(self, inner: Tensor) -> Tensor:
        return inner.new_zeros(len(inner), 2 * inner.shape[-1] + 1)  # m, v, k

    def step(self, inner: Tensor, gradient: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        first, second, count = state.split([inner.shape[-1], inner.shape[-1], 1], dim=-1)
        # m^k = b₁ m^{k−1} + (1 − b₁) g, v^k = b₂ v^{k−1} + (1 − b₂) g²
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient.square()
        count = count + 1
        # ω^k = ω^{k−1} − η m̂^k / (√v̂^k + ε)
        corrected_first, corrected_second = first / (1 - self.beta1**count), second / (1 - self.beta2**count)
        updated = inner - self.lr * corrected_first / (corrected_second.sqrt() + self.epsilon)
        return updated, torch.cat([first, second, count], dim=-1)


def require_initial_inner(problem: Problem, initial: Tensor | None) -> Tensor:
    """Return ``initial``; refuse None."""
    if initial is None:
        raise ValueError(
            f"inner.start 'previous' needs a first inner variable: pass inner=..., give "
            f"{type(problem).__name__} an initial_inner, or use inner.start 'outer'"
        )
    return initial
