"""What a run with many lanes leaves behind besides the medians of metrics.csv."""

from typing import Any

import lightning as L
import numpy as np
import polars as pl
import torch

from obbo_lightning.core.outer_step import StepRecord
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.training.module import OnlineBilevelModule

EVERY = 100


class LaneRecorder(L.Callback):
    """``lanes.npz``: every lane's regret every 100 rounds; ``events.csv``: what became of each lane.

    It must stand before the recorder that writes checkpoints: what it has seen goes with them.

    Args:
        run: where to write.
        lanes: what each lane is called, a row each.
    """

    def __init__(self, run: RunDirectory, lanes: pl.DataFrame) -> None:
        self.run = run
        self.lanes = lanes
        self.rounds: list[int] = []
        self.regret: list[torch.Tensor] = []
        self.gradient_norm = torch.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        """The regrets so far."""
        return {"rounds": self.rounds, "regret": self.regret, "gradient_norm": self.gradient_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the checkpoint's."""
        self.rounds, self.regret = list(state_dict["rounds"]), list(state_dict["regret"])
        self.gradient_norm = state_dict["gradient_norm"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remember this round if it is one to remember."""
        rounds, step = trainer.global_step, _played(pl_module).step
        self.gradient_norm = step.hypergradient.norm(dim=-1).cpu()
        if rounds % EVERY == 0:
            self._remember(rounds, step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last round is one to remember, whoever ended the run."""
        if trainer.global_step not in self.rounds:
            self._remember(trainer.global_step, _played(pl_module).step)

    def _remember(self, rounds: int, step: StepRecord) -> None:
        euclidean = step.regret["euclidean"]
        if euclidean is not None:
            self.rounds.append(rounds)
            self.regret.append(euclidean.detach().cpu().clone())

    def write(self, module: OnlineBilevelModule, tested: dict[str, list[float]]) -> None:
        """Write both files; ``tested`` are columns of one number a lane."""
        np.savez_compressed(self.run.lanes, rounds=np.array(self.rounds), regret=torch.stack(self.regret).numpy())
        outer = module.outer.detach()
        columns = {
            **({"weight": outer[:, 0].tolist()} if outer.shape[1] == 1 else {}),
            "regret": self.regret[-1].tolist(),
            "gradient_norm": self.gradient_norm.tolist(),
            **tested,
        }
        self.lanes.with_columns(**{name: pl.Series(values) for name, values in columns.items()}).write_csv(
            self.run.events
        )


def _played(module: L.LightningModule) -> Any:
    if not isinstance(module, OnlineBilevelModule) or module.played is None:
        raise RuntimeError("a batch ended without a round")
    return module.played
