"""What a run with many lanes leaves behind besides the medians of metrics.csv."""

from typing import Any

import lightning as L
import numpy as np
import polars as pl
import torch

from obbo_lightning.foreign_text import cells
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
        self.latest: tuple[int, torch.Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The regrets so far."""
        remembered = {"rounds": self.rounds, "regret": self.regret, "latest": self.latest}
        return {**remembered, "gradient_norm": self.gradient_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the checkpoint's."""
        self.rounds, self.regret = list(state_dict["rounds"]), list(state_dict["regret"])
        self.gradient_norm, self.latest = state_dict["gradient_norm"], state_dict.get("latest")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remember this round if it is one to remember; the latest always is, whoever ends the run."""
        rounds, step = trainer.global_step, _played(pl_module).step
        self.gradient_norm = step.hypergradient.norm(dim=-1).cpu()
        self.latest = rounds, step.regret["euclidean"].detach().cpu().clone()
        if rounds % EVERY == 0:
            self._remember()

    def _remember(self) -> None:
        if self.latest is not None and self.latest[0] not in self.rounds:
            self.rounds.append(self.latest[0])
            self.regret.append(self.latest[1])

    def write(self, module: OnlineBilevelModule, tested: dict[str, list[float]]) -> None:
        """Write both files; ``tested`` are columns of one number a task and lane, of which events.csv has the mean."""
        self._remember()
        np.savez_compressed(self.run.lanes, rounds=np.array(self.rounds), regret=torch.stack(self.regret).numpy())
        outer = module.outer.detach()
        columns = {
            **({"weight": outer[:, 0].tolist()} if outer.shape[1] == 1 else {}),
            "regret": self.regret[-1].tolist(),
            "gradient_norm": self.gradient_norm.tolist(),
            # none without test tasks
            **{n: np.reshape(scores, (-1, len(outer))).mean(0).tolist() for n, scores in tested.items() if scores},
        }
        table = self.lanes.with_columns(**{name: pl.Series(values) for name, values in columns.items()})
        cells(table).write_csv(self.run.events)


def _played(module: L.LightningModule) -> Any:
    if not isinstance(module, OnlineBilevelModule) or module.played is None:
        raise RuntimeError("a batch ended without a round")
    return module.played
