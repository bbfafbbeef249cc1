"""What a run leaves behind: a row a round, evaluations, checkpoints, in that order."""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from obbo_lightning.core.blocks import Blocks
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.state import RunState
from obbo_lightning.runs.table import TIMINGS, RoundTable
from obbo_lightning.streams.fingerprints import fingerprint_of
from obbo_lightning.training.checkpoints import save_checkpoint
from obbo_lightning.training.clock import RoundClock
from obbo_lightning.training.evaluation import Scores
from obbo_lightning.training.judging import centre_and_error, scores_of
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.ranks import Ranks
from obbo_lightning.training.rows import columns_of, values_of
from obbo_lightning.training.signals import Stopped, StopSignals
from obbo_lightning.training.trainer import validates_now

SMALL = 100  # so many coordinates of λ are written every round; more with every evaluation


class Recorder(Checkpoint):
    """Writes a row after every round, evaluates and saves every so many, in that order, so that a resume is exact.

    Lightning calls checkpoint callbacks last, and those of the user before this one: what they did in a round is in the
    checkpoint of the round.

    Args:
        run: where to write.
        test: the fixed test tasks.
        metric: what is evaluated: ``loss``, or one of the problem's scores.
        evaluate_every: rounds between evaluations.
        checkpoint_every: rounds between checkpoints.
        more_columns: of metrics.csv, see `rows.more_columns`.
        blocks: of λ, where it has them: their values are written by name.
        state: where to say what is done, for those who watch.
        validation: fixed validation tasks, judged with the test tasks.
    """

    def __init__(
        self,
        run: RunDirectory,
        test: Sequence[Task],
        metric: str,
        evaluate_every: int,
        checkpoint_every: int,
        more_columns: Sequence[str] = (),
        blocks: Blocks | None = None,
        state: RunState | None = None,
        validation: Sequence[Task] = (),
    ) -> None:
        self.run = run
        self.test, self.validation = test, validation
        self.metric = metric
        self.evaluate_every = at_least("evaluation.every", evaluate_every, 1)
        self.checkpoint_every = at_least("checkpoint.every", checkpoint_every, 1)
        self.metrics = RoundTable(run.metrics, columns_of(metric, more_columns))
        self.timings = RoundTable(run.timings, TIMINGS)
        self.named = {} if blocks is None else blocks.coordinates()
        every = 1 if len(self.named) <= SMALL else evaluate_every
        self.outer = RoundTable(run.outer, ["round", *self.named], every) if self.named else None
        self.untrained = Scores()
        self.tested = Scores()
        self.judged_on = [fingerprint_of(task) for task in test]
        self.due = Scores()  # the last of those that come every so many rounds
        self.row: dict[str, Any] = {}
        self.clock: dict[str, Any] = {}
        self.seconds_before = 0.0
        self.oracle_calls = 0
        self.signals = StopSignals()
        self.state = RunState() if state is None else state
        self._born = time.perf_counter()
        self._clock = RoundClock()
        self._ended = False
        self._saved = 0  # round of the last checkpoint
        self._other_tests = False
        self._trainer: L.Trainer | None = None
        self._first: Tensor | None = None  # λ_1
        self._goes_on = False  # behind a round that was judged because it was the last
        self._after_validation = 0  # the signal, or −1 for none, of a checkpoint that waits for a validation

    def state_dict(self) -> dict[str, Any]:
        """The evaluations that the summary compares."""
        judged = {"untrained": self.untrained, "tested": self.tested, "due": self.due}
        seconds = self.seconds_before + time.perf_counter() - self._born
        return {
            **{name: list(scores) for name, scores in judged.items()},
            "further": {name: scores.further for name, scores in judged.items()},
            "judged_on": self.judged_on,
            "seconds": seconds,
            "oracle_calls": self.oracle_calls,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the evaluations made before the checkpoint."""
        further = state_dict.get("further", {})
        names = ("untrained", "tested", "due" if "due" in state_dict else "tested")
        self.untrained, self.tested, self.due = (Scores(state_dict[n], further.get(n)) for n in names)
        self._other_tests = state_dict.get("judged_on", self.judged_on) != self.judged_on
        self.seconds_before = state_dict["seconds"]
        self.oracle_calls = state_dict.get("oracle_calls", 0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """What λ is before a checkpoint is loaded."""
        self._first = _online(pl_module).outer.detach().clone()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the tables where the checkpoint ended; judge the untrained λ_1 once."""
        self.run.settle(Path(trainer.strategy.broadcast(str(self.run.path))))  # rank 0 has made it
        self.signals.listen()
        self._trainer, self._saved = trainer, trainer.global_step
        trainer.should_stop = trainer.should_stop or self._ended
        if trainer.is_global_zero:
            self.row = self.metrics.cut(trainer.global_step)
            self.clock = self.timings.cut(trainer.global_step)
            if self.outer is not None:
                self.outer.cut(trainer.global_step)
        self.row = trainer.strategy.broadcast(self.row)
        self._goes_on = bool(self.row) and trainer.global_step % self.evaluate_every != 0 and self._is_judged()
        if self._other_tests:
            self._judge_the_first_again(_online(pl_module))
        if not self.untrained:
            self.untrained = self.tested = self.due = self._evaluate(_online(pl_module), self.test)

    def _judge_the_first_again(self, module: OnlineBilevelModule) -> None:
        """Data that have grown have other test tasks: what is compared must be judged on the same ones."""
        warnings.warn(f"the test tasks are others than before round {module.trainer.global_step}", stacklevel=2)
        now, warm = module.outer.detach().clone(), module.judged_from
        module.outer.data.copy_(now if self._first is None else self._first)
        module.judged_from = Warm()
        self.untrained = self._evaluate(module, self.test)
        module.outer.data.copy_(now)
        module.judged_from = warm
        self.row |= {f"test_{self.metric}": None} if self.row else {}  # where no round follows, judge it again

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock; what was judged only because it was the last round then is so no longer."""
        self._clock.begin()
        self.state.say("playing")
        if self._goes_on:
            self._goes_on, self.tested = False, self.due
            if trainer.is_global_zero:
                self.metrics.amend(self.row | dict.fromkeys(filter(_is_judgement, self.row)))

    def on_wait(self, what: str) -> None:
        """No round is being played: a signal is answered at once."""
        self.state.say(f"waiting for {what}")
        if self.signals.came and self._trainer is not None:
            self._after_validation = self.signals.came
            if self._trainer.global_step:
                self._save(self._trainer)
            raise Stopped(self.signals.came, self._trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Row, evaluation, then checkpoint: what a checkpoint follows is on disk already."""
        module, rounds = _online(pl_module), trainer.global_step
        if module.played is None:
            raise RuntimeError("a batch ended without a round")
        last, stop = rounds >= _planned(trainer), _ranks(module).any(self.signals.came, module.device)
        self.signals.rounds = rounds
        self.clock = {"round": rounds, "seconds": self._clock.end(module.device.type == "cpu")}
        self.row = dict(module.row)
        if rounds % self.evaluate_every == 0 or last:
            self._test(module)
        if trainer.is_global_zero:
            self.metrics.append(self.row)
            self.timings.append(self.clock)
            if self.outer is not None and rounds % self.outer.every == 0:
                self.outer.append({"round": rounds, **values_of(module.played.step.outer, self.named)})
        self.oracle_calls += sum(module.played.calls.values())
        self._log(trainer, module)
        if rounds % self.checkpoint_every == 0 or last or stop:
            # A validation that is due now belongs to this round: callbacks that watch it must be saved after it.
            self._after_validation = stop if stop and not last else -1
            if not validates_now(trainer, rounds):
                self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what has waited for this."""
        if self._after_validation and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Where somebody ended the run before its last round (early stopping, a time limit), judge what it has."""
        if self.row and not self._is_judged():
            self._test(_online(pl_module))
            if trainer.is_global_zero:
                self.metrics.amend(self.row)
                self.timings.amend(self.clock)
            self._after_validation = -1
        if self._after_validation or self._saved != trainer.global_step:
            self._save(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whoever asked for a checkpoint: the rows before it are on disk before it is."""
        checkpoint["ended"] = trainer.should_stop  # by a callback, such as EarlyStopping: a resume must not play on
        if trainer.is_global_zero:
            for table in self.tables:
                table.sync()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whether the run was over."""
        self._ended = bool(checkpoint.get("ended", False))

    def _log(self, trainer: L.Trainer, module: OnlineBilevelModule) -> None:
        """What the module does not know; an evaluation to the loggers alone: `log` would repeat it in later rounds."""
        spent = {"oracle_calls": self.oracle_calls}
        module.log_numbers({**spent, "seconds": self.clock["seconds"]})
        tested = {name: value for name, value in self.row.items() if _is_judgement(name) and value is not None}
        for logger in trainer.loggers if tested else ():
            logger.log_metrics({**self.clock, **spent, **tested}, step=trainer.global_step)

    def _save(self, trainer: L.Trainer) -> None:
        stop, self._after_validation = self._after_validation, 0
        self._saved = trainer.global_step
        save_checkpoint(trainer, self.run.checkpoints)
        if stop > 0 and not trainer.should_stop:
            raise Stopped(stop, trainer.global_step)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Lightning tears nothing down after an exception."""
        stopped = isinstance(exception, Stopped)
        self.state.say(str(exception) if stopped else f"stopped by {type(exception).__name__}: {exception}")
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the tables, and give the signals back."""
        self.signals.give_back()
        for table in self.tables:
            table.close()

    @property
    def tables(self) -> list[RoundTable]:
        """Everything that has a row a round."""
        return [self.metrics, self.timings, *([] if self.outer is None else [self.outer])]

    @property
    def kept(self) -> list[RoundTable]:
        """Of these, those that are the same in every run with these settings."""
        return [table for table in self.tables if table is not self.timings]

    def _is_judged(self) -> bool:
        name = f"test_{self.metric}" if self.test else f"validation/{self.metric}" if self.validation else None
        return name is None or self.row.get(name) not in (None, "")

    def _test(self, module: OnlineBilevelModule) -> None:
        began = time.perf_counter()
        module.gather_start()
        self.tested = self._evaluate(module, self.test)
        if module.trainer.global_step % self.evaluate_every == 0:
            self.due = self.tested
        self._enter(f"test_{self.metric}", self.tested, self.test)
        if self.validation:
            self._enter(f"validation/{self.metric}", self._evaluate(module, self.validation), self.validation)
        self.clock["evaluation_seconds"] = time.perf_counter() - began

    def _enter(self, name: str, scores: Sequence[float], tasks: Sequence[Task]) -> None:
        found = centre_and_error(scores, len(tasks)) if scores else (None, None)
        self.row |= dict(zip((name, f"{name}_se"), found, strict=True))

    def _evaluate(self, module: OnlineBilevelModule, tasks: Sequence[Task]) -> Scores:
        self.state.say("evaluating")
        return scores_of(module, tasks, self.metric, _ranks(module))


def _is_judgement(column: str) -> bool:
    return column.startswith(("test_", "validation/"))


def _planned(trainer: L.Trainer) -> float:
    """How many rounds there will be, if nobody stops them earlier."""
    return min(trainer.num_training_batches, trainer.max_steps if trainer.max_steps >= 0 else float("inf"))


def _ranks(module: OnlineBilevelModule) -> Ranks:
    if module.outer_step.ranks is None:
        raise RuntimeError("the recorder needs a module that is being trained")
    return module.outer_step.ranks


def _online(module: L.LightningModule) -> OnlineBilevelModule:
    if not isinstance(module, OnlineBilevelModule):
        raise TypeError(f"the recorder belongs to an OnlineBilevelModule, got {type(module).__name__}")
    return module
