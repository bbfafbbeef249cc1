"""Bilevel local regret, per lane."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from obbo_lightning.core.memory import HypergradientWindow


class Regret:
    """BLR_w(T) = Σ_{t≤T} ‖(1/w) Σ_{i<w} x_{t−i}‖² with x_s = 0 for s ≤ 0, one number a lane, summed in float64.

    Fed with d_t it is the Euclidean regret (eq. det_sobow_local_regret), with ∇F_t(λ_t) the exact one, and with
    G_X(λ_t, q_t, α) and w = 1 the generalized one (eq. det_local_regret), because q_t is averaged already; with the
    length of G_X in the geometry's own norm that of the geometry.

    Args:
        window: w.
        blocks: which coordinates each block has, where the regret of each is summed, too.

    >>> import torch
    >>> regret = Regret(window=2)
    >>> regret.add(torch.tensor([[2.0]])), regret.add(torch.tensor([[2.0]])), regret.add(torch.tensor([[0.0]]))
    (tensor([1.], dtype=torch.float64), tensor([5.], dtype=torch.float64), tensor([6.], dtype=torch.float64))
    """

    def __init__(self, window: int = 1, blocks: Mapping[str, slice] | None = None) -> None:
        self.memory = HypergradientWindow(window)
        self.total: Tensor | None = None
        self.blocks = dict(blocks or {})
        self.of_block: dict[str, Tensor] = {}

    def add(self, vector: Tensor, known: Tensor | None = None) -> Tensor:
        """Take one round ``[lanes, d]``; the regret so far ``[lanes]``.

        A lane whose x_t is not ``known [lanes]``, because it was not finite, counts as x_{t−1} once more: as nothing
        it would lower the regret of a method that blows up. What the sum then is, is a lower bound.
        """
        if known is not None and self.memory.newest is not None:
            vector = vector.where(known.unsqueeze(-1), self.memory.newest.to(vector.device))
        squares = self.memory.push(vector).double().square()
        self.total = _sum(self.total, squares.sum(-1))
        for name, where in self.blocks.items():
            self.of_block[name] = _sum(self.of_block.get(name), squares[..., where].sum(-1))
        return self.total

    def state_dict(self) -> dict[str, Any]:
        """Window and sums."""
        state = {"window": self.memory.state_dict(), "total": self.total}
        return {**state, "of_block": dict(self.of_block)} if self.blocks else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, also from that of version 0.1.0, where this was a torchmetrics metric."""
        if "_extra_state" in state:
            state = {"window": state["_extra_state"], "total": next(iter(state["total"]), None)}
        self.memory.load_state_dict(state["window"])
        self.total = state["total"]
        self.of_block = dict(state.get("of_block", {}))


def _sum(before: Tensor | None, added: Tensor) -> Tensor:
    return added if before is None else before.to(added.device) + added
