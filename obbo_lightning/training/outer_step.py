"""The callback that owns the outer step."""

from typing import Any

import lightning as L

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.blocks import Blocks
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.validation import at_least, one_of
from obbo_lightning.training.ranks import Ranks


class BregmanOuterStep(L.Callback):
    """Owns one `OuterStep`: window memory, non-finite policy, clipping, optimizer step, regret.

    `OnlineBilevelModule` brings it along, and its `training_step` calls it, because Lightning counts an optimizer's
    steps only there.

    Args:
        algorithm: brings memory, outer rule and clipping.
        regret_window: w_R.
        on_nonfinite: ``raise`` or ``skip``.
        blocks: of λ, where it has them.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        regret_window: int = 10,
        on_nonfinite: str = "raise",
        blocks: Blocks | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.blocks = blocks
        self.regret_window = at_least("regret_window", regret_window, 1)
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.step: OuterStep | None = None
        self.ranks: Ranks | None = None
        self._restored: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Build the step around Lightning's optimizer, and continue from a checkpoint if there was one."""
        if self.ranks is None:
            raise RuntimeError("the module must say what this rank computes before training starts")
        optimizer = pl_module.optimizers()
        if isinstance(optimizer, list):
            raise TypeError(f"there is one outer variable and one optimizer, got {len(optimizer)}")
        self.step = OuterStep(
            pl_module.get_parameter("outer"),
            self.algorithm,
            self.regret_window,
            self.on_nonfinite,
            optimizer=optimizer.optimizer,
            apply=optimizer.step,
            blocks=self.blocks,
        )
        if self._restored is not None:
            # Lightning has restored the optimizer itself.
            state = {**self._restored, "optimizer": self.step.optimizer.state_dict()}
            self.step.load_state_dict(state, self.ranks.own_rounds)
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Memory and regret of all ranks; Lightning keeps the optimizer and the outer variable."""
        if self.step is None or self.ranks is None:
            return {}
        state = self.step.state_dict(self.ranks.gather_rounds)
        del state["optimizer"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called before there is an optimizer: kept until training starts."""
        self._restored = state_dict or None
