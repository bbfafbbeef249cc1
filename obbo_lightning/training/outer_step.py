"""The callback that owns the outer step."""

from typing import Any

import lightning as L
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.rounds import OuterStep


class BregmanOuterStep(L.Callback):
    """Owns one `OuterStep`: window memory, rank reduction, non-finite policy, clipping, optimizer step, regret.

    The module's `training_step` calls it, because Lightning counts an optimizer's steps only there.

    Args:
        algorithm: brings memory, outer rule and clipping.
        regret_window: w_R.
        on_nonfinite: ``raise`` or ``skip``.
    """

    def __init__(self, algorithm: Algorithm, regret_window: int, on_nonfinite: str) -> None:
        self.algorithm = algorithm
        self.regret_window = regret_window
        self.on_nonfinite = on_nonfinite
        self.step: OuterStep | None = None
        self._restored: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build the step around Lightning's optimizer, and continue from a checkpoint if there was one."""
        optimizer = pl_module.optimizers()
        if isinstance(optimizer, list):
            raise TypeError(f"there is one outer variable and one optimizer, got {len(optimizer)}")
        outer = pl_module.get_parameter("outer")

        def reduce(hypergradients: Tensor) -> Tensor:
            reduced: Tensor = trainer.strategy.reduce(hypergradients, reduce_op="mean")
            return reduced

        self.step = OuterStep(
            outer,
            self.algorithm,
            self.regret_window,
            self.on_nonfinite,
            reduce if trainer.world_size > 1 else None,
            optimizer=optimizer.optimizer,
            apply=optimizer.step,
        )
        if self._restored is not None:
            # Lightning has restored the optimizer itself.
            self.step.load_state_dict({**self._restored, "optimizer": self.step.optimizer.state_dict()})
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Memory and regret; Lightning keeps the optimizer and the outer variable."""
        if self.step is None:
            return {}
        state = self.step.state_dict()
        del state["optimizer"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called before there is an optimizer: kept until training starts."""
        self._restored = state_dict or None
