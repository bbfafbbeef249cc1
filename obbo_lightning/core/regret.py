"""Bilevel local regret, per lane."""

from typing import Any

from torch import Tensor

from obbo_lightning.core.memory import HypergradientWindow


class Regret:
    """BLR_w(T) = Σ_{t≤T} ‖(1/w) Σ_{i<w} x_{t−i}‖² with x_s = 0 for s ≤ 0, one number a lane, summed in float64.

    Fed with d_t it is the Euclidean regret (eq. det_sobow_local_regret), with ∇F_t(λ_t) the exact one, and with
    G_X(λ_t, q_t, α) and w = 1 the generalized one (eq. det_local_regret), because q_t is averaged already.

    Args:
        window: w.

    >>> import torch
    >>> regret = Regret(window=2)
    >>> regret.add(torch.tensor([[2.0]])), regret.add(torch.tensor([[2.0]])), regret.add(torch.tensor([[0.0]]))
    (tensor([1.], dtype=torch.float64), tensor([5.], dtype=torch.float64), tensor([6.], dtype=torch.float64))
    """

    def __init__(self, window: int = 1) -> None:
        self.memory = HypergradientWindow(window)
        self.total: Tensor | None = None

    def add(self, vector: Tensor) -> Tensor:
        """Take one round ``[lanes, d]``; the regret so far ``[lanes]``."""
        added = self.memory.push(vector).double().square().sum(-1)
        self.total = added if self.total is None else self.total.to(added.device) + added
        return self.total

    def state_dict(self) -> dict[str, Any]:
        """Window and sum."""
        return {"window": self.memory.state_dict(), "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, also from that of version 0.1.0, where this was a torchmetrics metric."""
        if "_extra_state" in state:
            state = {"window": state["_extra_state"], "total": next(iter(state["total"]), None)}
        self.memory.load_state_dict(state["window"])
        self.total = state["total"]
