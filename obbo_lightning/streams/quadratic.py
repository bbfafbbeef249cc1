"""Quadratic tasks whose drift decays."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.domains import L2Ball
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, nonnegative, require_memory
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.streams.stream import Stream, Tasks, TaskSequence


class QuadraticTasks(TaskSequence):
    """Task t of a `Quadratic` problem: b_t = b + drift t^{−1/2} ξ_t, c_t = c + drift t^{−1/2} ξ'_t, ξ unit vectors.

    So the stream's variation over the ball X = `domain` is sublinear, as the theorems require: H_{2,T} = O(log T) and
    V_{1,T} = O(√T). ℓ_{g,1} = 1 and μ_g = 1/κ_g.

    Args:
        condition_number: κ_g, one for all lanes or one per lane.
        rounds: T, the length of the stream.
        lanes: number of independent problems, each with its own A, B, b_t, c_t.
        outer_dim: d.
        inner_dim: p.
        drift: size of the first round's change.
        noise: standard deviation of one observation, see `Quadratic`.
        radius: of the ball X.
        seed: of the problem and its tasks.
        dtype: of the problem and its tasks.

    >>> stream = QuadraticTasks(condition_number=10, rounds=3)
    >>> len(stream), sorted(stream[0]), stream[0]["b"].shape
    (3, ['b', 'c'], torch.Size([1, 8]))
    """

    def __init__(
        self,
        condition_number: float | Sequence[float] = 10.0,
        rounds: int = 300,
        lanes: int = 1,
        outer_dim: int = 4,
        inner_dim: int = 8,
        drift: float = 1.0,
        noise: float = 0.0,
        radius: float = 10.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.length = at_least("rounds", rounds, 1)
        self.lanes = at_least("lanes", lanes, 1)
        self.outer_dim = at_least("outer_dim", outer_dim, 1)
        self.inner_dim = at_least("inner_dim", inner_dim, 2)
        if outer_dim > inner_dim:
            raise ValueError(f"outer_dim must be at most inner_dim ({inner_dim}), got {outer_dim}")
        require_memory("lanes × inner_dim²", lanes * inner_dim**2, 24.0 * lanes * inner_dim**2)
        self.drift = nonnegative("drift", drift)
        self.domain = L2Ball(radius)
        self.seed = seed
        self.dtype = dtype
        numbers = list(condition_number) if isinstance(condition_number, Sequence) else [condition_number] * lanes
        if len(numbers) != lanes or not all(k >= 1 for k in numbers):
            raise ValueError(
                f"condition_number must be at least 1, one for all or one for each of {lanes} lanes, "
                f"got {condition_number!r}"
            )
        matrices = []
        for lane, number in enumerate(numbers):
            basis = self._orthogonal("A", lane)
            eigenvalues = torch.logspace(0, -1, inner_dim, base=number, dtype=torch.float64)
            matrices.append((basis * eigenvalues) @ basis.mT)
        couplings = [self._orthogonal("B", lane)[:, :outer_dim] for lane in range(lanes)]
        self.problem = Quadratic(torch.stack(matrices).to(dtype), torch.stack(couplings).to(dtype), noise=noise)

    def task(self, t: int) -> Task:
        """Return task t, counted from 0: a pure function of (seed, t), also beyond the length."""
        size = self.drift / (t + 1) ** 0.5
        return {
            name: torch.stack(
                [self._unit(name, lane) + size * self._unit(name, lane, t) for lane in range(self.lanes)]
            ).to(self.dtype)
            for name in ("b", "c")
        }

    def initial_outer(self) -> Tensor:
        """Return λ_1 = 0."""
        return torch.zeros(self.lanes, self.outer_dim, dtype=self.dtype)

    def oracle(self) -> Oracle:
        """Return the oracle of the first task at λ_1."""
        return Oracle(self.problem, self.initial_outer(), self[0])

    def _orthogonal(self, name: str, lane: int) -> Tensor:
        return torch.linalg.qr(self._normal((self.inner_dim, self.inner_dim), name, lane)).Q

    def _unit(self, name: str, lane: int, *round_index: int) -> Tensor:
        vector = self._normal((self.inner_dim,), name, lane, *round_index)
        return vector / vector.norm()

    def _normal(self, shape: tuple[int, ...], *purpose: str | int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, *purpose))
        return torch.randn(shape, generator=generator, dtype=torch.float64)


class QuadraticStream(Stream):
    """Quadratic tasks with exact regret; validation and test tasks are later tasks of the same sequence.

    Args:
        condition_number: κ_g.
        outer_dim: d.
        inner_dim: p.
        drift: size of the first round's change.
        noise: standard deviation of one observation.
        radius: of the ball X, ``train.domain``.
        seed: of the problem and its tasks.
    """

    problem_type = Quadratic
    derived_arguments = ("inner_matrix", "coupling", "ridge", "noise")
    rates_over = "condition_number"
    LENGTH = 1_000_000
    train: QuadraticTasks

    def __init__(
        self,
        condition_number: float = 10.0,
        outer_dim: int = 4,
        inner_dim: int = 8,
        drift: float = 1.0,
        noise: float = 0.0,
        radius: float = 10.0,
        seed: int = 0,
    ) -> None:
        self.train = QuadraticTasks(
            condition_number, self.LENGTH, 1, outer_dim, inner_dim, drift, noise, radius, seed, torch.float64
        )
        self.validation = Tasks(lambda t: self.train.task(self.LENGTH + t), 600)
        self.test = Tasks(lambda t: self.train.task(2 * self.LENGTH + t), 600)

    def task_spec(self) -> dict[str, Any]:
        return {name: getattr(self.train.problem, name) for name in self.derived_arguments}

    def start(self, problem: Problem, seed: int) -> Tensor:
        """Return λ_1 = 0."""
        return self.train.initial_outer()
