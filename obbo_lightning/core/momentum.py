"""Inner solvers with a state of their own, which goes on from round to round with β."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from obbo_lightning.core.inner import InnerSolver, require_first
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import at_least, decay, positive


@dataclass(frozen=True)
class _Stateful(InnerSolver):
    """K steps from β_t, each with a fresh mini-batch; implicit estimators do not ask how β was reached."""

    steps: int
    lr: float
    batch_size: int | None

    def __post_init__(self) -> None:
        at_least("inner.steps", self.steps, 1)
        positive("inner.lr", self.lr)
        if self.batch_size is not None:
            at_least("inner.batch_size", self.batch_size, 1)

    @property
    def carries(self) -> bool:
        return True

    @property
    def samples(self) -> bool:
        return self.batch_size is not None

    @property
    def whole(self) -> InnerSolver:
        return replace(self, batch_size=None) if self.samples else self

    def require_unrolled(self) -> None:
        raise ValueError(
            f"hypergradient must not go back through the steps of an inner solver that has a state: choose fixed_point "
            f"or conjugate_gradient, got 'Unrolled' with inner {self!r}"
        )

    def require_start(self, problem: Problem, outer: Tensor, task: Task) -> None:
        require_first(problem, problem.initial_inner(outer, task))

    @torch.no_grad()
    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        inner = require_first(oracle.problem, previous).detach()
        state = self.initial(inner) if oracle.carried is None else oracle.carried
        for k in range(self.steps):
            gradient = oracle.inner_gradient(inner, oracle.draw("inner", k, self.batch_size))
            inner, state = self.step(inner, gradient, state)
        oracle.carried = state
        return inner

    @abstractmethod
    def initial(self, inner: Tensor) -> Tensor:
        """What it remembers before the first step ``[lanes, …]``."""

    @abstractmethod
    def step(self, inner: Tensor, gradient: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """ω^k and the new state from ω^{k−1}, ∇_ω g and the old state."""


@dataclass(frozen=True)
class InnerSGD(_Stateful):
    """m^k = μ m^{k−1} + ∇_ω g_t(λ_t, ω^{k−1}), ω^k = ω^{k−1} − η m^k, K times, m carried between rounds.

    Args:
        steps: K.
        lr: η.
        momentum: μ.
        batch_size: observations of a step, fresh ones for each; None for the whole task.
    """

    steps: int = 20
    lr: float = 0.1
    momentum: float = 0.9
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        decay("inner.momentum", self.momentum)

    @property
    def step_size(self) -> float | None:
        return self.lr

    def initial(self, inner: Tensor) -> Tensor:
        return torch.zeros_like(inner)

    def step(self, inner: Tensor, gradient: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.momentum * state + gradient
        return inner - self.lr * state, state


@dataclass(frozen=True)
class InnerAdam(_Stateful):
    """K steps of Adam, its moments and its count of steps carried between rounds.

    m^k = b₁ m^{k−1} + (1 − b₁) g, v^k = b₂ v^{k−1} + (1 − b₂) g², ω^k = ω^{k−1} − η m̂^k / (√v̂^k + ε), both moments
    divided by 1 − b^k. η is no step of a fixed point: ``hypergradient.lr`` must be given.

    Args:
        steps: K.
        lr: η.
        beta1: b₁.
        beta2: b₂.
        epsilon: ε.
        batch_size: observations of a step, fresh ones for each; None for the whole task.
    """

    steps: int = 20
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        decay("inner.beta1", self.beta1)
        decay("inner.beta2", self.beta2)
        positive("inner.epsilon", self.epsilon)

    @property
    def step_size(self) -> float | None:
        return None

    def initial(self, inner: Tensor) -> Tensor:
        return inner.new_zeros(len(inner), 2 * inner.shape[-1] + 1)  # m, v, k

    def step(self, inner: Tensor, gradient: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        first, second, count = state.split([inner.shape[-1], inner.shape[-1], 1], dim=-1)
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient.square()
        count = count + 1
        fair_first, fair_second = first / (1 - self.beta1**count), second / (1 - self.beta2**count)
        moved = inner - self.lr * fair_first / (fair_second.sqrt() + self.epsilon)
        return moved, torch.cat([first, second, count], dim=-1)
