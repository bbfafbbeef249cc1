"""Bilevel local regret as a torchmetrics metric."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from obbo_lightning.core.regret import Regret


class LocalRegret(Metric):
    """`core.regret.Regret` for loops that use torchmetrics: one number per lane.

    Merging, across processes or with `merge_state`, concatenates lanes.

    Args:
        window: w.

    >>> regret = LocalRegret(window=2)
    >>> regret.update(torch.tensor([[2.0]]))               # one round: [lanes, d]
    >>> regret.update(torch.tensor([[[2.0]], [[0.0]]]))    # two rounds: [rounds, lanes, d]
    >>> regret.compute()
    tensor(6., dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    total: list[Tensor]

    def __init__(self, window: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.window = window
        self._regret = Regret(window)
        self.add_state("total", default=[], dist_reduce_fx="cat", persistent=True)

    def update(self, vectors: Tensor) -> None:
        """Add one round ``[lanes, d]`` or several ``[rounds, lanes, d]``."""
        if vectors.ndim not in (2, 3):
            raise ValueError(f"vectors must be [lanes, d] or [rounds, lanes, d], got shape {tuple(vectors.shape)}")
        for vector in vectors if vectors.ndim == 3 else vectors.unsqueeze(0):
            self.total = [self._regret.add(vector)]

    def compute(self) -> Tensor:
        """Return the regret so far ``[lanes]``; torchmetrics squeezes a single lane to a number."""
        nothing_yet = isinstance(self.total, list) and not self.total  # a tensor while processes are synchronised
        return torch.zeros(0, dtype=torch.float64) if nothing_yet else dim_zero_cat(self.total)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Add rounds and return what they added to the regret ``[lanes]``."""
        before = self.total[0] if self.total else 0.0
        self.update(*args, **kwargs)
        return self.total[0] - before

    def reset(self) -> None:
        """Reset window and sums."""
        super().reset()
        self._regret = Regret(self.window)

    def merge_state(self, incoming_state: "dict[str, Any] | Metric") -> None:
        """Append the lanes of another metric."""
        if not isinstance(incoming_state, LocalRegret):
            raise ValueError(f"incoming_state must be a LocalRegret, got {type(incoming_state).__name__}")
        self._regret.memory.join(incoming_state._regret.memory)
        both = [*self.total, *incoming_state.total]
        self.total = [torch.cat(both)] if both else []
        self._regret.total = self.total[0] if both else None
        self._computed = None

    def get_extra_state(self) -> dict[str, Any]:
        """Return the window, for `state_dict`."""
        return self._regret.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the window, from `load_state_dict`."""
        self._regret.load_state_dict(state)
        self._computed = None
        self._update_count = self._regret.memory.rounds
