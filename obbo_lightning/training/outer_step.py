"""The callback that owns the outer step."""

from typing import Any

import lightning as L

from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.validation import at_least, one_of


class BregmanOuterStep(L.Callback):
    """Owner of one `OuterStep`: window memory, non-finite policy, clipping, optimizer step, regret.

    `OnlineBilevelModule` always brings it. Its ``training_step`` applies ``step``, because Lightning counts an
    optimizer's steps only there.

    Attributes:
        step: built when training starts, around Lightning's optimizer.

    Args:
        regret_window: w_R.
        on_nonfinite: ``raise`` or ``skip``.
    """

    def __init__(self, regret_window: int = 10, on_nonfinite: str = "raise") -> None:
        self.regret_window = at_least("regret_window", regret_window, 1)
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.step: OuterStep | None = None
        self._loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Build the step, and continue from a checkpoint if there was one."""
        optimizer = pl_module.optimizers()
        if isinstance(optimizer, list):
            raise TypeError(f"there is one outer variable and one optimizer, got {len(optimizer)}")
        self.step = OuterStep(
            pl_module.outer,
            pl_module.algorithm,
            self.regret_window,
            self.on_nonfinite,
            optimizer=optimizer.optimizer,
            apply=optimizer.step,
            groups=pl_module.problem.groups,
        )
        if self._loaded is not None:
            # Lightning has restored the optimizer itself.
            state = {**self._loaded, "optimizer": self.step.optimizer.state_dict()}
            self.step.load_state_dict(state, pl_module.processes.select_entries)
            self._loaded = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save memory and regret of all ranks; Lightning saves the optimizer and the outer variable."""
        if self.step is not None:
            state = self.step.state_dict(pl_module.processes.gather_entries)
            checkpoint["outer_step"] = {name: state[name] for name in ("memory", "regret")}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember the state until training starts: there is no optimizer yet."""
        self._loaded = checkpoint.get("outer_step")
