"""Bilevel local regret, per lane."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from obbo_lightning.core.memory import HypergradientWindow

# euclidean: of d_t (eq. det_sobow_local_regret); generalized: of G_X (eq. det_local_regret); exact: of ∇F_t(λ_t);
# geometry: of the length of G_X in the geometry's own norm. The first three are also reported per parameter group.
REGRETS = ("euclidean", "generalized", "exact", "geometry")
GROUP_REGRETS = ("euclidean", "generalized", "exact")


class Regret:
    """BLR_w(T) = Σ_{t≤T} ‖(1/w) Σ_{i<w} x_{t−i}‖² with x_s = 0 for s ≤ 0, per lane, summed in float64.

    With x_t = d_t it is the Euclidean regret, with x_t = ∇F_t(λ_t) the exact one. The generalized one uses
    x_t = G_X(λ_t, q_t, α) and w = 1, because q_t is averaged already.

    Args:
        window: w.
        groups: coordinates of each parameter group, where the regret of each is summed, too.

    >>> import torch
    >>> regret = Regret(window=2)
    >>> regret.add(torch.tensor([[2.0]])), regret.add(torch.tensor([[2.0]])), regret.add(torch.tensor([[0.0]]))
    (tensor([1.], dtype=torch.float64), tensor([5.], dtype=torch.float64), tensor([6.], dtype=torch.float64))
    """

    def __init__(self, window: int = 1, groups: Mapping[str, slice] | None = None) -> None:
        self.memory = HypergradientWindow(window)
        self.total: Tensor | None = None
        self.groups = dict(groups or {})
        self.group_totals: dict[str, Tensor] = {}

    def add(self, vector: Tensor, known: Tensor | None = None) -> Tensor:
        """Add x_t ``[lanes, d]`` and return the regret so far ``[lanes]``.

        A lane whose x_t is not ``known [lanes]``, because it was not finite, counts as x_{t−1} once more: counted as
        zero it would lower the regret of a method that diverges. The sum is then a lower bound.
        """
        if known is not None and self.memory.newest is not None:
            vector = vector.where(known.unsqueeze(-1), self.memory.newest.to(vector.device))
        squares = self.memory.push(vector).double().square()
        self.total = _add(self.total, squares.sum(-1))
        for name, where in self.groups.items():
            self.group_totals[name] = _add(self.group_totals.get(name), squares[..., where].sum(-1))
        return self.total

    def state_dict(self) -> dict[str, Any]:
        """Return window and sums."""
        return {"window": self.memory.state_dict(), "total": self.total, "groups": dict(self.group_totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.memory.load_state_dict(state["window"])
        self.total = state["total"]
        self.group_totals = dict(state["groups"])


def _add(before: Tensor | None, added: Tensor) -> Tensor:
    return added if before is None else before.to(added.device) + added
