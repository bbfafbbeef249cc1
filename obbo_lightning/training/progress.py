"""The progress bar: rounds, prequential and test scores, regret, speed."""

from collections import deque
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

RECENT = 50  # rounds that the prequential score is averaged over


class RoundProgress(L.Callback):
    """One Rich bar for the run."""

    def __init__(self, metric: str, console: Console) -> None:
        self.metric, self.console = metric, console
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._metrics: dict[str, Any] = {}  # of the last round
        self._progress: Progress | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=2,  # every refresh takes time from a machine whose cores are all busy
        )
        total = None if trainer.num_training_batches == float("inf") else trainer.num_training_batches
        self._progress.add_task("", total=total, completed=trainer.global_step, text="")
        self._progress.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._progress is not None:
            self._metrics = outputs["metrics"]
            self._recent.append(float(self._metrics[self.metric] or 0.0))
            self._update(trainer)

    def _update(self, trainer: L.Trainer) -> None:
        assert self._progress is not None
        test = trainer.callback_metrics.get(f"test_{self.metric}")
        speed = self._progress.tasks[0].speed or self._progress.tasks[0].finished_speed or 0.0
        text = f"{self.metric} {sum(self._recent) / len(self._recent):.4g}"
        text += "" if test is None else f"  test {float(test):.4g}"
        text += f"  regret {self._metrics['regret/euclidean']:.3g}  {speed:.1f}/s"
        self._progress.update(self._progress.task_ids[0], completed=trainer.global_step, text=text)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop the bar, which Lightning does not do after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Show the last evaluation, which follows the last round, and leave the bar as it is."""
        if self._progress is not None:
            if self._metrics:
                self._update(trainer)
            self._progress.stop()
            self._progress = None
