"""The callback that writes a run directory."""

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import polars as pl
import torch
import yaml
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from obbo_lightning.config.parse import Config
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.problem import Task
from obbo_lightning.core.round import Round
from obbo_lightning.core.statistics import median
from obbo_lightning.escaping import escape_table
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.provenance import Provenance, restore_tables
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.runs.table import TIMING_COLUMNS, RoundTable, TableMark
from obbo_lightning.streams.fingerprints import fingerprint_of
from obbo_lightning.streams.stream import Stream, has_random_access
from obbo_lightning.training.checkpoints import save_checkpoint
from obbo_lightning.training.datamodule import StreamDataModule
from obbo_lightning.training.evaluation import Scores, evaluate_tasks
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.signals import Stopped, StopSignals

FEW_COORDINATES = 100  # up to this number λ is written in every round, otherwise with every evaluation
LANES_EVERY = 100  # rounds between two regrets per lane in lanes.npz
HISTORY = ("regret/euclidean", "regret/exact", "skipped")  # columns that the figures and the summary need


class RunWriter(Checkpoint):
    """Evaluate when due, write the row, update the provenance, save: in this order, after every round.

    A checkpoint is written last, so that what it follows is on disk already. Lightning calls checkpoint callbacks after
    all others, and this one after the user's: what they did in a round is in the checkpoint of the round.

    Args:
        run: where to write.
        config: complete configuration of the run.
        stream: names the metric and the lanes, and fingerprints tasks.
        data: has the test tasks, and records fingerprints.
        validation: tasks that are evaluated together with the test tasks.
        status: of the run, for `watch`.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: Config,
        stream: Stream,
        data: StreamDataModule,
        validation: Sequence[Task],
        status: RunStatus,
    ) -> None:
        self.run, self.config, self.stream, self.status = run, config, stream, status
        self.data, self.validation = data, validation
        self._waits = not has_random_access(data.train)  # for the tasks of the next round
        self.metric = stream.metric.name
        self.evaluate_every, self.checkpoint_every = config["evaluation"]["every"], config["checkpoint"]["every"]
        self.metrics = RoundTable(run.metrics, history=("round", self.metric, *self._test_columns, *HISTORY))
        self.timings = RoundTable(run.timings, TIMING_COLUMNS)
        self.fingerprints = RoundTable(run.fingerprints, ["round", "tasks"])
        self.outer: RoundTable | None = None
        self.initial, self.latest = Scores(), Scores()  # of λ_1, and of the last evaluation
        self.seconds = self.evaluations = 0.0
        self._test_score: float | None = None
        self._last_due = Scores()  # of the last evaluation that was due
        self._lanes = LaneHistory()
        self._clock = _RoundClock(config["threads"])
        self._signals = StopSignals()
        self._provenance: Provenance | None = None
        self.last_row: dict[str, Any] = {}
        self._timing: dict[str, Any] = {}
        self._test_digests = [fingerprint_of(task) for task in data.test]
        self._test_tasks_changed = False
        self._has_final_evaluation = False  # the last row was evaluated only because it was the last
        self._save_after_validation = False
        self._stop_signal = 0
        self._saved_round = 0
        self._ended = False
        self._saved_tables: dict[str, TableMark] = {}
        self._started = time.perf_counter()

    @property
    def _test_columns(self) -> tuple[str, str]:
        return f"test_{self.metric}", f"test_{self.metric}_se"

    @property
    def _validation_columns(self) -> tuple[str, str]:
        return f"validation/{self.metric}", f"validation/{self.metric}_se"

    @property
    def _score_columns(self) -> tuple[str, ...]:
        return (*self._test_columns, *(self._validation_columns if self.validation else ()))

    @property
    def tables(self) -> list[RoundTable]:
        """The tables that are equal in every run with this configuration; timings are not."""
        return [self.metrics, self.fingerprints, *([] if self.outer is None else [self.outer])]

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations that the summary compares, and totals."""
        scores = {"initial": self.initial, "latest": self.latest, "last_due": self._last_due}
        return {
            **{name: {"values": list(one), "others": one.others} for name, one in scores.items()},
            "test_digests": self._test_digests,
            "seconds": self.elapsed(),
            "evaluations": self.evaluations,
            "lanes": self._lanes.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the evaluations made before the checkpoint."""
        scores = (Scores(**state_dict[name]) for name in ("initial", "latest", "last_due"))
        self.initial, self.latest, self._last_due = scores
        self._test_tasks_changed = state_dict["test_digests"] != self._test_digests
        self.seconds, self.evaluations = state_dict["seconds"], state_dict["evaluations"]
        self._lanes.load_state_dict(state_dict["lanes"])

    def elapsed(self) -> float:
        """Return the seconds since the run was started, without the time between being stopped and resumed."""
        return self.seconds + time.perf_counter() - self._started

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Write provenance and configuration, before a checkpoint is loaded into the module."""
        if not isinstance(pl_module, OnlineBilevelModule):
            raise TypeError(f"RunWriter needs an OnlineBilevelModule, got {type(pl_module).__name__}")
        self._initial_outer = pl_module.outer.detach().clone()
        groups = pl_module.problem.groups
        self._coordinates = {} if groups is None else groups.coordinates()
        if self._coordinates:
            every = 1 if len(self._coordinates) <= FEW_COORDINATES else self.evaluate_every
            self.outer = RoundTable(self.run.outer, ["round", *self._coordinates], every)
        if trainer.is_global_zero:
            # Before config.yaml has more rounds: if the process dies in between, the run is to be finished as it was.
            self.run.summary.unlink(missing_ok=True)
            self._provenance = Provenance.start(self.run, self.config, self.stream.source_digests())
            write_atomically(self.run.config, yaml.safe_dump(self.config, sort_keys=False))
            if self.stream.skipped:
                escape_table(pl.DataFrame(self.stream.skipped)).write_csv(self.run.skipped)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember whether a callback had ended the run, and what its tables held."""
        self._ended = bool(checkpoint["ended"])
        self._saved_tables = checkpoint["provenance"]["tables"]

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Open the tables where the checkpoint ended; evaluate λ_1 once."""
        module, rounds = pl_module, trainer.global_step
        self.run.set_path(Path(trainer.strategy.broadcast(str(self.run.path))))
        self._signals.listen()
        self._saved_round = rounds
        trainer.should_stop = trainer.should_stop or self._ended
        if trainer.is_global_zero:
            if self._provenance is not None and self._provenance.rounds != rounds:  # an older checkpoint
                self._provenance = self._provenance._replace(rounds=rounds, tables={}).write(self.run)
            restore_tables(self.run, rounds, self._saved_tables)
            for table in (self.timings, *self.tables):
                last = table.open(rounds)
                self.last_row = last if table is self.metrics else self.last_row
                self._timing = last if table is self.timings else self._timing
        self.last_row = trainer.strategy.broadcast(self.last_row)
        self._has_final_evaluation = bool(self.last_row) and rounds % self.evaluate_every != 0 and self._is_evaluated()
        if self._test_tasks_changed:
            warnings.warn(f"the test tasks are others than before round {rounds}", stacklevel=2)
            self.initial = self._evaluate(trainer, module, self.data.test, self._initial_outer, InnerState())
            if self.last_row:
                self.last_row[self._test_columns[0]] = None  # to be evaluated again, where no round follows
        if not self.initial:
            self.initial = self.latest = self._last_due = self._evaluate(trainer, module, self.data.test)
        self._show(trainer)
        self._signals.raise_at_once = self._waits

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock. Extending a run discards its final evaluation."""
        self._signals.raise_at_once = False
        self.status.set("running")
        self._clock.start()
        if self._has_final_evaluation:
            self._has_final_evaluation, self.latest = False, self._last_due
            if trainer.is_global_zero:
                self.metrics.replace_last({**self.last_row, **dict.fromkeys(self._score_columns)})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Evaluate when due, write the row, update the provenance, save."""
        module, rounds = pl_module, trainer.global_step
        self._timing = {"round": rounds, "seconds": self._clock.stop(module.device.type == "cpu")}
        last = rounds >= _planned_rounds(trainer)
        self._stop_signal = module.processes.largest(self._signals.received, module.device)
        self._signals.rounds = rounds
        self.last_row = {**outputs["metrics"], **dict.fromkeys(self._score_columns)}
        if rounds % self.evaluate_every == 0 or last:
            self._evaluate_all(trainer, module)
            outputs["log"] = True
        self._write_row(trainer, outputs["round"])
        outputs["metrics"].update(self.last_row, **self._timing, evaluations=self.evaluations)
        self._update_status(trainer)
        if rounds % self.checkpoint_every == 0 or last or self._stop_signal:
            self._save_after_validation = True
            # A validation that is due now belongs to this round: callbacks that monitor it are saved after it.
            if not _validates_now(trainer):
                self._save(trainer, last)
        self._signals.raise_at_once = self._waits  # no round is running

    def _write_row(self, trainer: L.Trainer, finished: Round) -> None:
        rounds = trainer.global_step
        self.evaluations += sum(finished.evaluations.values())
        if self.stream.lanes is not None:
            self._lanes.add(rounds, finished)
        if not trainer.is_global_zero:
            return
        self.metrics.append(self.last_row)
        self.timings.append(self._timing)
        self.fingerprints.append({"round": rounds, "tasks": self.data.pop_fingerprints(rounds)})
        if self.outer is not None and rounds % self.outer.every == 0:
            values = torch.stack([median(finished.outer[:, i]) for i in self._coordinates.values()]).tolist()
            self.outer.append({"round": rounds, **dict(zip(self._coordinates, values, strict=True))})

    def _update_status(self, trainer: L.Trainer) -> None:
        planned, rounds, seconds = _planned_rounds(trainer), trainer.global_step, self._clock.average
        numbers = {
            "round": rounds,
            "rounds": None if planned == float("inf") else planned,
            self.metric: self.last_row[self.metric],
            "test": self._test_score,
            "regret": self.last_row["regret/euclidean"],
            "rounds_per_second": 1 / seconds if seconds else None,
            "seconds_left": None if planned == float("inf") else round(seconds * (planned - rounds)),
        }
        self.status.set("waiting for the next task" if self._waits else "running", **numbers)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Save what has waited for Lightning's validation."""
        if self._save_after_validation:
            self._save(trainer, trainer.global_step >= _planned_rounds(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Evaluate the last round of a run that ended early (early stopping, a time limit), and save."""
        if self.last_row and not self._is_evaluated():
            self._evaluate_all(trainer, pl_module)
            if trainer.is_global_zero:
                self.metrics.replace_last(self.last_row)
                self.timings.replace_last(self._timing)
            self._save_after_validation = True
        if self._save_after_validation or self._saved_round != trainer.global_step:
            self._save(trainer, last=True)

    def _save(self, trainer: L.Trainer, last: bool) -> None:
        self._save_after_validation = False
        self._saved_round = trainer.global_step
        save_checkpoint(trainer, self.run.checkpoints)
        if self._stop_signal and not last and not trainer.should_stop:
            raise Stopped(self._stop_signal, trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the tables to the disk before any checkpoint, also one of the user's, and its provenance into it."""
        checkpoint["ended"] = trainer.should_stop  # by a callback, such as EarlyStopping: a resume must not continue
        if trainer.is_global_zero and self._provenance is not None:
            for table in (self.timings, *self.tables):
                table.sync()
            self._provenance = self._provenance._replace(
                rounds=trainer.global_step,
                planned=self.config["rounds"],
                tables={table.path.name: table.mark() for table in self.tables},
                replaced={},
            ).write(self.run)
            checkpoint["provenance"] = self._provenance.as_dict()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Save a run that is stopped while it waits for a task; close the tables, which Lightning does not do."""
        if isinstance(exception, Stopped):
            if trainer.global_step and self._saved_round != trainer.global_step and self._signals.raise_at_once:
                self._saved_round = trainer.global_step
                save_checkpoint(trainer, self.run.checkpoints)
            self.status.set(str(exception))
        else:
            self.status.set(f"stopped by {type(exception).__name__}: {exception}")
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Close the tables."""
        for table in (self.timings, *self.tables):
            table.close()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, after the hashes of all closing files; a run with a summary is finished."""
        if self._provenance is not None:
            self._provenance = self._provenance.finish(self.run, self.tables, summary)
        self.run.write_summary(summary)

    def write_closing_files(self, outer: Tensor) -> None:
        """Write the scores of each test task, and what became of each lane."""
        if self.stream.lanes is not None:
            self._lanes.write(self.run, self.stream.lanes, outer, {self._test_columns[0]: self.latest})
        elif len(self.latest) == len(self.data.test) > 0:
            columns: dict[str, Any] = {"task": range(1, len(self.latest) + 1)}
            for name, values in {self.metric: self.latest, **self.latest.others}.items():
                before = self.initial if name == self.metric else self.initial.others[name]
                columns |= {f"initial_{name}": before, name: values}
            write_atomically(self.run.test_scores, pl.DataFrame(columns).write_csv())

    def _is_evaluated(self) -> bool:
        if self.data.test:
            return self.last_row.get(self._test_columns[0]) not in (None, "")
        return not self.validation or self.last_row.get(self._validation_columns[0]) not in (None, "")

    def _evaluate_all(self, trainer: L.Trainer, module: OnlineBilevelModule) -> None:
        began = time.perf_counter()
        self.latest = self._evaluate(trainer, module, self.data.test)
        if trainer.global_step % self.evaluate_every == 0:
            self._last_due = self.latest
        self.last_row |= dict(zip(self._test_columns, self.latest.center(len(self.data.test)), strict=True))
        if self.validation:
            scores = self._evaluate(trainer, module, self.validation)
            self.last_row |= dict(zip(self._validation_columns, scores.center(len(self.validation)), strict=True))
        self._timing["evaluation_seconds"] = time.perf_counter() - began
        self._show(trainer)

    def _evaluate(self, trainer: L.Trainer, module: OnlineBilevelModule, *arguments: Any) -> Scores:
        self.status.set("evaluating")
        return evaluate_tasks(trainer, module, self.metric, *arguments)

    def _show(self, trainer: L.Trainer) -> None:
        """Show the test score to `watch` and to callbacks."""
        self._test_score, _ = self.latest.center(len(self.data.test))
        if self._test_score is not None:
            trainer.callback_metrics[self._test_columns[0]] = torch.tensor(self._test_score, dtype=torch.float64)


class LaneHistory:
    """Regret of every lane every 100 rounds, for runs whose lanes have names."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.regret: list[Tensor] = []
        self.latest: tuple[int, Tensor] | None = None
        self.gradient_norm = torch.zeros(0)

    def add(self, rounds: int, finished: Round) -> None:
        """Take the regrets of one round."""
        self.gradient_norm = finished.hypergradient.norm(dim=-1).cpu()
        regret = finished.regret["euclidean"]
        assert regret is not None
        self.latest = rounds, regret.detach().cpu().clone()
        if rounds % LANES_EVERY == 0:
            self._keep_latest()

    def _keep_latest(self) -> None:
        if self.latest is not None and self.latest[0] not in self.rounds:
            self.rounds.append(self.latest[0])
            self.regret.append(self.latest[1])

    def write(self, run: RunDirectory, lanes: pl.DataFrame, outer: Tensor, scores: dict[str, Scores]) -> None:
        """Write lanes.npz, and events.csv with one row per lane: weight, regret, norm, mean score over tasks."""
        self._keep_latest()
        np.savez_compressed(run.lanes, rounds=np.array(self.rounds), regret=torch.stack(self.regret).numpy())
        columns = {
            **({"weight": outer[:, 0].tolist()} if outer.shape[1] == 1 else {}),
            "regret": self.regret[-1].tolist(),
            "gradient_norm": self.gradient_norm.tolist(),
            **{name: np.reshape(v, (-1, len(outer))).mean(0).tolist() for name, v in scores.items() if v},
        }
        table = lanes.with_columns(**{name: pl.Series(values) for name, values in columns.items()})
        escape_table(table).write_csv(run.events)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain tensors and numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        vars(self).update(state)
        self.rounds, self.regret = list(self.rounds), list(self.regret)


class _RoundClock:
    """Times rounds, and prints once where they take much longer than their CPU time.

    A round that has its cores computes all the time. One that does not waits for something: other work on its cores,
    swapped memory, or another process of its run.
    """

    WINDOW = 5.0  # seconds of rounds that are compared together
    RATIO = 2.0  # of elapsed to CPU time

    def __init__(self, threads: int) -> None:
        self.average = 0.0  # seconds of a round, recently
        self._threads = threads
        self._begun = self._window = (0.0, 0.0)
        self._rounds = 0
        self._warned = False

    def start(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def stop(self, on_cpu: bool) -> float:
        """Return the seconds since `start`; what a GPU computes is no CPU time."""
        seconds, busy = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        self.average = seconds if not self.average else 0.95 * self.average + 0.05 * seconds
        self._rounds += 1
        self._window = self._window[0] + seconds, self._window[1] + busy
        if self._window[0] >= self.WINDOW:
            if on_cpu and not self._warned and self._window[0] > self.RATIO * self._window[1]:
                self._warned = True
                each, cpu = self._window[0] / self._rounds, self._window[1] / self._rounds
                hint = ", or with fewer threads: --threads 1" if self._threads > 1 else ""
                print(
                    f"obbo: a round takes {each:.2g} s and computes for {cpu:.2g} s of them: other work may use its "
                    f"cores (nothing is wrong; it would be faster alone{hint})",
                    file=sys.stderr,
                )
            self._rounds, self._window = 0, (0.0, 0.0)
        return seconds


def _planned_rounds(trainer: L.Trainer) -> float:
    """Return the number of rounds, if nothing stops the run earlier."""
    return min(trainer.num_training_batches, trainer.max_steps if trainer.max_steps >= 0 else float("inf"))


def _validates_now(trainer: L.Trainer) -> bool:
    """Return whether Lightning validates after this round."""
    every, batches = trainer.val_check_batch, trainer.num_val_batches
    tasks = sum(batches) if isinstance(batches, list) else batches
    by_epoch = trainer.check_val_every_n_epoch not in (None, 1)
    due = every is not None and trainer.global_step % every == 0
    return trainer.enable_validation and due and tasks > 0 and not by_epoch
