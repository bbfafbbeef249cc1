"""From the hypergradients of a round to the new outer variable."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.blocks import Blocks
from obbo_lightning.core.memory import Exchange
from obbo_lightning.core.optimizer import BregmanProx, auto_rates
from obbo_lightning.core.regret import Regret
from obbo_lightning.core.validation import at_least, one_of

OF_BLOCKS = ("euclidean", "generalized", "exact")  # regrets that each of several blocks has, too


class StepRecord(NamedTuple):
    """What the outer step did.

    Attributes:
        hypergradient: d_t, zero in skipped lanes ``[lanes, d]``.
        direction: q_t, clipped ``[lanes, d]``.
        generalized: G_X(λ_t, q_t, α) ``[lanes, d]``; None for outer rules that are no Bregman step.
        regret: euclidean, generalized, exact and geometry (the last three may be None), so far ``[lanes]``; where λ has
            several blocks also of each: ``euclidean/NAME``.
        hypergradient_error: ‖d_t − ∇F_t(λ_t)‖ ``[lanes]`` where the problem knows ∇F_t, else None.
        skipped: lanes whose hypergradient, or whose λ after the step, was not finite ``[lanes]``.
        outer: λ_{t+1} ``[lanes, d]``, a copy.
        numbers: ``lr``, α_t where it is auto, and ‖G_X‖ of each of several blocks, ``generalized_norm/NAME``; α_t is
            ``lr/NAME`` where λ has blocks ``[lanes]``.
    """

    hypergradient: Tensor
    direction: Tensor
    generalized: Tensor | None
    regret: dict[str, Tensor | None]
    hypergradient_error: Tensor | None
    skipped: Tensor
    outer: Tensor
    numbers: dict[str, Tensor]


class OuterStep:
    """From hypergradients to λ_{t+1}: non-finite → memory → clip → optimizer → regret.

    Args:
        outer: λ, updated in place.
        algorithm: brings the memory, the outer rule and the clipping.
        regret_window: w_R, the yardstick's window: it belongs to the experiment, the same for every algorithm.
        on_nonfinite: ``raise``, or ``skip``: the lane's d_t becomes zero, as for rounds before the first, and counts
            in the regret as d_{t−1} once more; a lane whose step overflows keeps λ_t.
        optimizer: the outer rule, where somebody else has made it from the algorithm already.
        apply: takes the optimizer's step, where that is more than ``optimizer.step()``.
        blocks: of λ, where it has them.
    """

    def __init__(
        self,
        outer: Parameter,
        algorithm: Algorithm,
        regret_window: int = 10,
        on_nonfinite: str = "raise",
        optimizer: Optimizer | None = None,
        apply: Callable[[], Any] | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        if outer.ndim != 2 or not outer.is_floating_point():
            raise ValueError(
                f"outer must be a floating-point parameter [lanes, d], got {outer.dtype} of shape {tuple(outer.shape)}"
            )
        if not bool(outer.detach().isfinite().all()):
            raise ValueError(
                f"outer start must be finite, got {int((~outer.detach().isfinite()).sum())} values that are not"
            )
        at_least("regret_window", regret_window, 1)
        self.outer = outer
        self.clip = algorithm.clip
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.memory = algorithm.memory()
        self.optimizer = optimizer or algorithm.outer_rule(outer, blocks)
        self._apply = apply or self.optimizer.step
        self.blocks = blocks.several if blocks is not None else {}
        windows = {"euclidean": regret_window, "generalized": 1, "exact": regret_window}
        self.regret = {name: Regret(window, self.blocks) for name, window in windows.items()}
        self.regret["geometry"] = Regret(1)

    @torch.no_grad()
    def __call__(self, hypergradients: Tensor, exact: Tensor | None = None) -> StepRecord:
        """Learn from the hypergradients ``[solved, lanes, d]`` of one round, the round's own task last."""
        if hypergradients.ndim != 3 or hypergradients.shape[1:] != self.outer.shape:
            raise ValueError(
                f"hypergradients must have shape [solved, {', '.join(map(str, self.outer.shape))}], "
                f"got {tuple(hypergradients.shape)}"
            )
        known = {"euclidean": hypergradients[-1].isfinite().all(-1)}
        hypergradients, skipped = self._finite(hypergradients)
        if exact is not None:
            known["exact"] = exact.isfinite().all(-1)
            exact = exact.where(known["exact"].unsqueeze(-1), 0.0)
        direction = self._clipped(self.memory.merge(hypergradients))
        before = self.outer.detach().clone()
        self.outer.grad = direction
        self._apply()
        self.outer.grad = None
        skipped = skipped | self._kept(before)
        generalized = lengths = None
        if isinstance(self.optimizer, BregmanProx):
            generalized = self.optimizer.generalized(before, self.outer)
            lengths = self.optimizer.lengths
            lengths = None if lengths is None else lengths.where(lengths.isfinite(), 0.0)  # a step that was not taken
        vectors = {"euclidean": hypergradients[-1], "generalized": generalized, "exact": exact, "geometry": lengths}
        error = None if exact is None else (hypergradients[-1] - exact).norm(dim=-1)
        return StepRecord(
            hypergradients[-1],
            direction,
            generalized,
            self._regrets(vectors, known),
            error,
            skipped,
            self.outer.detach().clone(),
            self._numbers(generalized),
        )

    def _finite(self, hypergradients: Tensor) -> tuple[Tensor, Tensor]:
        finite = hypergradients.isfinite().all(-1)  # [solved, lanes]
        if self.on_nonfinite == "raise" and not bool(finite.all()):
            lanes = (~finite).any(0).nonzero().flatten().tolist()
            raise FloatingPointError(
                f"hypergradient is not finite in {len(lanes)} of {finite.shape[1]} lanes (first: {lanes[:5]}); "
                f"use a smaller inner.lr, a stronger inner curvature, or on_nonfinite 'skip'"
            )
        return hypergradients.where(finite.unsqueeze(-1), 0.0), (~finite).any(0)

    def _kept(self, before: Tensor) -> Tensor:
        """Lanes whose step overflowed keep λ_t: skipped or refused, like a hypergradient that is not finite."""
        finite = self.outer.isfinite().all(-1, keepdim=True)  # [lanes, 1]
        if not bool(finite.all()):
            lanes = (~finite).flatten().nonzero().flatten().tolist()
            self.outer.copy_(self.outer.where(finite, before))  # also where it is raised: a λ that was is not lost
            if self.on_nonfinite == "raise":
                raise FloatingPointError(
                    f"outer variable is not finite after its step in {len(lanes)} of {len(finite)} lanes (first: "
                    f"{lanes[:5]}); use a smaller lr, a clip, a bounded domain, or on_nonfinite 'skip'"
                )
        return ~finite.squeeze(-1)

    def _clipped(self, direction: Tensor) -> Tensor:
        if self.clip is None:
            return direction
        # The largest entry is taken out first: the square of a huge one would overflow.
        largest = direction.abs().amax(-1, keepdim=True).clamp(min=self.clip)
        norm = (direction / largest).norm(dim=-1, keepdim=True)
        return torch.where(norm * largest > self.clip, direction / largest * (self.clip / norm), direction)

    def _regrets(self, vectors: dict[str, Tensor | None], known: dict[str, Tensor]) -> dict[str, Tensor | None]:
        totals = {
            name: None if vector is None or name not in self.regret else self.regret[name].add(vector, known.get(name))
            for name, vector in vectors.items()
        }
        of_blocks = {f"{name}/{b}": self.regret[name].of_block.get(b) for name in OF_BLOCKS for b in self.blocks}
        return {**totals, **of_blocks}

    def _numbers(self, generalized: Tensor | None) -> dict[str, Tensor]:
        rates = auto_rates(self.optimizer, self.outer)
        numbers = {f"lr/{name}" if name else "lr": rate for name, rate in rates.items()}
        if generalized is not None:
            numbers |= {f"generalized_norm/{b}": generalized[:, w].norm(dim=-1) for b, w in self.blocks.items()}
        return numbers

    def state_dict(self, gather: Exchange | None = None) -> dict[str, Any]:
        """Memory, optimizer and regret; the outer variable belongs to whoever owns the parameter.

        Where several processes share a round, ``gather`` turns the tasks of this one into those of all (`Memory`).
        """
        memory = copy.copy(self.memory)
        if gather is not None:
            memory.exchange(gather)
        return {
            "memory": memory.state_dict(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),  # torch hands out its live tensors
            "regret": {name: regret.state_dict() for name, regret in self.regret.items()},
        }

    def load_state_dict(self, state: dict[str, Any], own: Exchange | None = None) -> None:
        """Continue exactly where `state_dict` was taken; ``own`` turns the tasks of all into those of this process."""
        self.memory.load_state_dict(state["memory"])
        if own is not None:
            self.memory.exchange(own)
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would share its tensors
        for name in [name for name in self.regret if name not in state["regret"]]:
            del self.regret[name]  # an older version has played the first rounds, and did not know it
        for name, regret in self.regret.items():
            regret.load_state_dict(state["regret"][name])
