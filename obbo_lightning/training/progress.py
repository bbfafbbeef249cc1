"""The progress bar: round, stream and test scores, regret, speed."""

from collections import deque
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from obbo_lightning.foreign_text import visible
from obbo_lightning.training.judging import centre_and_error
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.recorder import Recorder
from obbo_lightning.training.rows import Row

RECENT = 50  # rounds that the stream's average is over


class RoundProgress(L.Callback):
    """One Rich bar for the run, with the module's row and the recorder's last evaluation."""

    def __init__(self, recorder: Recorder, console: Console) -> None:
        self.recorder = recorder
        self.console = console
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._progress: Progress | None = None
        self._bar = TaskID(0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar where the run stands."""
        if not trainer.is_global_zero:
            return
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[shown]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=2,  # on a machine whose cores are all busy every refresh makes them wait for one another
        )
        self._bar = self._progress.add_task(
            "", total=_finite(trainer.num_training_batches), completed=trainer.global_step, shown=""
        )
        self._progress.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on."""
        if self._progress is None:
            return
        row, metric = _row(pl_module), self.recorder.metric
        self._recent.append(float(row[metric] or 0.0))
        stream, tested = sum(self._recent) / len(self._recent), self.recorder.tested
        test = f"  test {centre_and_error(tested, len(self.recorder.test))[0]:.4g}" if tested else ""
        speed = self._progress.tasks[0].speed or self._progress.tasks[0].finished_speed or 0.0
        shown = f"{metric} {stream:.4g}{test}  regret {row['regret/euclidean']:.3g}  {speed:.1f}/s"
        self._progress.update(self._bar, completed=row["round"], shown=shown)

    def on_wait(self, what: str) -> None:
        """Say so."""
        if self._progress is not None:
            self._progress.update(self._bar, shown=visible(f"waiting for {what}"))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Lightning tears nothing down after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the bar as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _row(module: L.LightningModule) -> Row:
    if not isinstance(module, OnlineBilevelModule):
        raise TypeError(f"the bar belongs to an OnlineBilevelModule, got {type(module).__name__}")
    return module.row


def _finite(length: float) -> float | None:
    """A stream without an end has no length to show."""
    return None if length == float("inf") else length
