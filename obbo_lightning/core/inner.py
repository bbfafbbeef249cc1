"""Inner solvers: from ω⁰ to ω^K ≈ β̂_t(λ_t)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.recipes import Part
from obbo_lightning.core.validation import at_least, one_of, positive


class InnerSolver(Part, ABC):
    """Finds the inner variable of a round."""

    @property
    def carries(self) -> bool:
        """Whether the next round starts from this round's inner variable."""
        return False

    @property
    def samples(self) -> bool:
        """Whether it looks at samples of a task."""
        return False

    @property
    @abstractmethod
    def step_size(self) -> float | None:
        """η, or None for a solver that has none."""

    @property
    def whole(self) -> "InnerSolver":
        """The same solver on whole tasks: how λ is judged, where luck in the choice of samples must not matter."""
        return self

    def require_fit(self, problem: Problem) -> None:
        """Refuse, before the first round, a problem that lacks what this solver asks for."""

    def require_start(self, problem: Problem, outer: Tensor, task: Task) -> None:
        """Refuse, before the first round, where there is nothing to start from."""

    def require_unrolled(self) -> None:
        """Refuse, before the first round, to be differentiated through."""
        raise ValueError(f"hypergradient 'Unrolled' needs inner steps to go back through, got inner {self!r}")

    @abstractmethod
    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        """ω^K, detached; ``previous`` is β_t."""

    def unroll(self, oracle: Oracle, previous: Tensor | None) -> tuple[Tensor, int]:
        """ω^K with the graph of all steps, and how many they were."""
        self.require_unrolled()
        raise AssertionError("a solver that can be unrolled must say how")


@dataclass(frozen=True)
class GradientDescent(InnerSolver):
    """ω^k = ω^{k−1} − η ∇_ω g_t(λ_t, ω^{k−1}), K times             (Algorithms 1 and 2).

    Args:
        steps: K.
        lr: η.
        start: ``previous`` starts from β_t, a constant (Algorithm 1); ``outer`` from λ_t, as few-shot adaptation does.
        batch_size: s, fresh samples for every step (SOBBO); None for the whole task.
        precision: ``full``, or ``bf16``: losses of inner steps in bfloat16 (autocast); ω itself, and whatever is done
            at ω^K, stay in full precision.
    """

    steps: int = 20
    lr: float = 0.1
    start: str = "previous"
    batch_size: int | None = None
    precision: str = "full"

    def __post_init__(self) -> None:
        at_least("inner.steps", self.steps, 1)
        positive("inner.lr", self.lr)
        one_of("inner.start", self.start, ("previous", "outer"))
        one_of("inner.precision", self.precision, ("full", "bf16"))
        if self.batch_size is not None:
            at_least("inner.batch_size", self.batch_size, 1)

    @property
    def carries(self) -> bool:
        return self.start == "previous"

    @property
    def samples(self) -> bool:
        return self.batch_size is not None

    @property
    def whole(self) -> InnerSolver:
        return replace(self, batch_size=None) if self.samples else self

    @property
    def step_size(self) -> float | None:
        return self.lr

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        return self.descend(oracle, previous, differentiable=False)

    def require_unrolled(self) -> None:
        if self.precision != "full":
            raise ValueError(f"inner.precision must be full for hypergradient 'Unrolled', got {self.precision!r}")

    def unroll(self, oracle: Oracle, previous: Tensor | None) -> tuple[Tensor, int]:
        self.require_unrolled()
        return self.descend(oracle, previous, differentiable=True), self.steps

    def descend(self, oracle: Oracle, previous: Tensor | None, differentiable: bool) -> Tensor:
        """ω^K; with ``differentiable`` the graph of all K steps is kept."""
        low = torch.autocast(oracle.outer.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        with torch.set_grad_enabled(differentiable), low:
            inner = self._first(oracle, previous)
            if differentiable and not inner.requires_grad:
                inner = inner.requires_grad_()
            for k in range(self.steps):
                sample = oracle.draw("inner", k, self.batch_size)
                # ω^k = ω^{k−1} − η ∇_ω g_t(λ_t, ω^{k−1})
                inner = inner - self.lr * oracle.inner_gradient(inner, sample, differentiable)
        return inner

    def require_start(self, problem: Problem, outer: Tensor, task: Task) -> None:
        first = problem.initial_inner(outer, task)
        name = type(problem).__name__
        if self.start == "previous":
            require_first(problem, first)
        elif first is not None and first.shape != problem.inner_from_outer(outer).shape:
            raise ValueError(
                f"inner.start must be previous for {name}, whose inner variable has {first.shape[-1]} coordinates "
                f"and λ {outer.shape[-1]}, got 'outer'"
            )

    def _first(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        if self.start == "outer":
            # part of the graph, so Unrolled differentiates through ω⁰ = λ; a copy, so ∇_ω is not ∇_ω + ∇_λ
            return oracle.problem.inner_from_outer(oracle.outer.clone())
        return require_first(oracle.problem, previous).detach()


@dataclass(frozen=True)
class ExactSolution(InnerSolver):
    """β̂_t(λ_t) from the problem's own closed form."""

    @property
    def step_size(self) -> float | None:
        return None

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        self.require_fit(oracle.problem)
        solution = oracle.problem.solution(oracle.outer.detach(), oracle.task)
        assert solution is not None
        return solution.detach()

    def require_fit(self, problem: Problem) -> None:
        if not problem.knows("solution"):
            raise ValueError(f"inner 'ExactSolution' needs a solution, and {type(problem).__name__} has none")


def require_first(problem: Problem, first: Tensor | None) -> Tensor:
    """Refuse to go on from nothing."""
    if first is None:
        raise ValueError(
            f"inner.start 'previous' needs a first inner variable: pass inner=..., give "
            f"{type(problem).__name__} an initial_inner, or use inner.start 'outer'"
        )
    return first
