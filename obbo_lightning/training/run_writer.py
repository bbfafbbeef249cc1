"""The callback that writes a run directory."""

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
from obbo_lightning.core.parameter_groups import FEW_COORDINATES, ParameterGroups
from obbo_lightning.core.problem import Task
from obbo_lightning.core.round import Round
from obbo_lightning.core.tuning_result import TuningResult
from obbo_lightning.escaping import escape_table
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.provenance import Provenance, restore_tables
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.runs.table import TIMING_COLUMNS, RoundTable, TableMark
from obbo_lightning.streams.fingerprints import fingerprint_of
from obbo_lightning.streams.stream import Stream, has_random_access
from obbo_lightning.training.checkpoints import save_checkpoint
from obbo_lightning.training.datamodule import StreamDataModule
from obbo_lightning.training.evaluation import center, evaluate_tasks
from obbo_lightning.training.signals import Stopped, StopSignals

LANES_EVERY = 100  # rounds between two regrets per lane in lanes.npz
HISTORY = ("regret/euclidean", "regret/exact", "skipped")  # columns that the figures and the summary need
SAVED = ("initial", "latest", "last_due", "evaluations", "lane_regrets", "gradient_norms")  # in checkpoints


class RunWriter(Checkpoint):
    """After every round: evaluate if due and write the row. When a checkpoint is due: write provenance.json and save.

    A checkpoint is written last, when everything that it refers to is on disk. Lightning calls checkpoint callbacks
    after all others, and this one after the user's: what they did in a round is in the checkpoint of the round.
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
        self.run, self.config, self.stream, self.data, self.status = run, config, stream, data, status
        self.validation = validation
        self.metric, self._test = stream.metric.name, f"test_{stream.metric.name}"
        # Tasks that are evaluated, by the names of their columns; every row has those of the test tasks.
        self._evaluated = {self._test: data.test}
        self._evaluated |= {f"validation/{self.metric}": validation} if validation else {}
        self._score_columns = [f"{column}{end}" for column in self._evaluated for end in ("", "_se")]
        self._waits = not has_random_access(data.train)  # for the tasks of the next round
        self.evaluate_every, self.checkpoint_every = config["evaluation"]["every"], config["checkpoint"]["every"]
        self.metrics = RoundTable(run.metrics, history=("round", self.metric, *self._score_columns[:2], *HISTORY))
        self.timings = RoundTable(run.timings, TIMING_COLUMNS)
        self.fingerprints = RoundTable(run.fingerprints, ["round", "tasks"])
        self.outer: RoundTable | None = None
        self._groups: ParameterGroups | None = None
        folds, shared = stream.folds_of(data.tasks_per_round), stream.folds > 1
        self.tuning = TuningResult(folds, new_examples=not shared)
        self._before: Tensor | None = None  # λ_t of a round that is running, where λ has parameter groups
        # Test scores by name: of λ_1, of the last evaluation, and of the last one on the schedule of evaluation.every.
        self.initial: dict[str, list[float]] = {}
        self.latest = self.last_due = self.initial
        self.last_row: dict[str, Any] = {}
        self.seconds = self.evaluations = 0.0
        self._started, self._begun = time.perf_counter(), 0.0
        self._average = 0.0  # seconds of a round
        self._timing: dict[str, Any] = {}
        self.lane_regrets: dict[int, Tensor] = {}  # by round
        self.gradient_norms = torch.zeros(0)
        self._signals, self._stop_signal = StopSignals(), 0
        self._provenance: Provenance | None = None
        self._saved_tables: dict[str, TableMark] = {}
        self._test_digests = [fingerprint_of(task) for task in data.test]
        self._test_tasks_changed = False
        self._has_final_evaluation = False  # the last row was evaluated only because it was the last
        self._save_after_validation = False
        self._saved_round = 0
        self._ended = False

    @property
    def tables(self) -> list[RoundTable]:
        """The tables that are equal in every run with this configuration; timings are not."""
        return [self.metrics, self.fingerprints, *([] if self.outer is None else [self.outer])]

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in SAVED}
        state |= {"seconds": self.elapsed(), "test_digests": self._test_digests}
        return {**state, "tuning": self.tuning.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update({name: state_dict[name] for name in (*SAVED, "seconds")})
        self.tuning.load_state_dict(state_dict["tuning"])
        self._test_tasks_changed = state_dict["test_digests"] != self._test_digests

    def elapsed(self) -> float:
        """Return the seconds since the run was started, without the time between being stopped and resumed."""
        return self.seconds + time.perf_counter() - self._started

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Write provenance and configuration, before a checkpoint is loaded into the module."""
        self.initial_outer = pl_module.outer.detach().clone()
        self._groups = groups = pl_module.problem.groups
        names = [""] if groups is None else [f"/{name}" for name in groups.named]
        self.metrics.history |= {f"held_out_gain{name}": [] for name in names}
        if groups is not None:  # with the bounds that the outer step uses
            resolved = pl_module.algorithm.resolved_groups(groups)
            self.tuning.attach(ParameterGroups({group.name: group for group in resolved}))
        if groups is not None and (coordinates := groups.coordinates()):
            every = 1 if len(coordinates) <= FEW_COORDINATES else self.evaluate_every
            self.outer = RoundTable(self.run.outer, ["round", *coordinates], every)
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
        rounds = self._saved_round = trainer.global_step
        self.run.set_path(Path(trainer.strategy.broadcast(str(self.run.path))))
        self._signals.rounds = rounds
        self._signals.listen()
        trainer.should_stop = trainer.should_stop or self._ended
        if trainer.is_global_zero:
            if self._provenance is not None and self._provenance.rounds != rounds:  # an older checkpoint
                self._provenance = self._provenance._replace(rounds=rounds, tables={}).write(self.run)
            restore_tables(self.run, rounds, self._saved_tables)
            last = {table: table.open(rounds) for table in (self.timings, *self.tables)}
            self._timing, self.last_row = last[self.timings], last[self.metrics]
        self.last_row = trainer.strategy.broadcast(self.last_row)
        self._has_final_evaluation = bool(self.last_row) and rounds % self.evaluate_every != 0 and self._is_evaluated()
        if self._test_tasks_changed:
            warnings.warn(f"the test tasks are others than before round {rounds}", stacklevel=2)
            self.initial = self._evaluate(trainer, pl_module, self.data.test, self.initial_outer, InnerState())
            if self.last_row:
                self.last_row[self._test] = None  # to be evaluated again, where no round follows
        if not self.initial:
            self.initial = self.latest = self.last_due = self._evaluate(trainer, pl_module, self.data.test)
        self._show_test_score(trainer)
        self._wait_for_task(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock. Extending a run discards its final evaluation."""
        self._signals.raise_at_once = False
        self.status.set("running")
        self._begun = time.perf_counter()
        self._before = None if self._groups is None else pl_module.outer.detach().clone()
        if self._has_final_evaluation:
            self._has_final_evaluation, self.latest = False, self.last_due
            if trainer.is_global_zero:
                self.metrics.replace_last({**self.last_row, **dict.fromkeys(self._score_columns)})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Evaluate when due, write the row, update the provenance, save."""
        rounds, last = trainer.global_step, trainer.global_step >= _planned_rounds(trainer)
        seconds = time.perf_counter() - self._begun
        self._average = 0.95 * self._average + 0.05 * seconds if self._average else seconds
        self._timing = {"round": rounds, "seconds": seconds}
        self._stop_signal = pl_module.processes.largest(self._signals.received, pl_module.device)
        self._signals.rounds = rounds
        if self._before is not None:
            fold = (rounds - 1) % self.stream.folds_of(self.data.tasks_per_round)
            self.tuning.add(self._before, outputs["round"], fold)
        self.last_row = {**outputs["metrics"], **dict.fromkeys(self._score_columns)}
        if rounds % self.evaluate_every == 0 or last:
            self._evaluate_all(trainer, pl_module)
            outputs["log"] = True
        self._write_row(trainer, outputs["round"])
        outputs["metrics"].update(self.last_row, **self._timing, evaluations=self.evaluations)
        self._update_status(trainer)
        if rounds % self.checkpoint_every == 0 or last or self._stop_signal:
            self._save_after_validation = True
            # A validation that is due now belongs to this round: callbacks that monitor it are saved after it.
            if not _validates_now(trainer):
                self._save(trainer)
        if not self._save_after_validation:
            self._wait_for_task(trainer)

    def _write_row(self, trainer: L.Trainer, finished: Round) -> None:
        rounds = trainer.global_step
        self.evaluations += sum(finished.evaluations.values())
        if self.stream.lanes is not None and finished.regret["euclidean"] is not None:
            if rounds - 1 in self.lane_regrets and (rounds - 1) % LANES_EVERY:
                del self.lane_regrets[rounds - 1]
            self.lane_regrets[rounds] = finished.regret["euclidean"].detach().cpu().clone()
            self.gradient_norms = finished.hypergradient.norm(dim=-1).cpu()
        if not trainer.is_global_zero:
            return
        self.metrics.append(self.last_row)
        self.timings.append(self._timing)
        self.fingerprints.append({"round": rounds, "tasks": self.data.pop_fingerprints(rounds)})
        if self.outer is not None and self._groups is not None and rounds % self.outer.every == 0:
            self.outer.append({"round": rounds, **self._groups.medians(finished.outer)})

    def _update_status(self, trainer: L.Trainer) -> None:
        planned, rounds, test = _planned_rounds(trainer), trainer.global_step, trainer.callback_metrics.get(self._test)
        endless = planned == float("inf")
        numbers = {
            "round": rounds,
            "rounds": None if endless else planned,
            self.metric: self.last_row[self.metric],
            "test": None if test is None else float(test),
            "regret": self.last_row["regret/euclidean"],
            "rounds_per_second": 1 / self._average if self._average else None,
            "seconds_left": None if endless else round(self._average * (planned - rounds)),
        }
        self.status.set("waiting for the next task" if self._waits else "running", **numbers)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Save what has waited for Lightning's validation."""
        if self._save_after_validation:
            self._save(trainer)
            self._wait_for_task(trainer)

    def _wait_for_task(self, trainer: L.Trainer) -> None:
        if self._waits and _continues(trainer):
            self._signals.raise_while_waiting()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Evaluate the last round of a run that ended early (early stopping, a time limit), and save."""
        if self.last_row and not self._is_evaluated():
            self._evaluate_all(trainer, pl_module)
            if trainer.is_global_zero:
                self.metrics.replace_last(self.last_row)
                self.timings.replace_last(self._timing)
            self._save_after_validation = True
        if self._save_after_validation or self._saved_round != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        self._save_after_validation = False
        self._saved_round = trainer.global_step
        save_checkpoint(trainer, self.run.checkpoints)
        if self._stop_signal and _continues(trainer):
            raise Stopped(self._stop_signal, trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the tables to the disk before any checkpoint, also one of the user's, and its provenance into it."""
        checkpoint["ended"] = trainer.should_stop  # by a callback, such as EarlyStopping: a resume must not continue
        if self._provenance is not None:
            for table in (self.timings, *self.tables):
                table.sync()
            self._provenance = self._provenance._replace(
                rounds=trainer.global_step,
                planned=self.config["rounds"],
                tables={table.path.name: table.mark() for table in self.tables},
                replaced={},
            ).write(self.run)
            checkpoint["provenance"] = self._provenance._asdict()

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
        for table in (self.timings, *self.tables):
            table.close()

    def write_closing_files(self, outer: Tensor) -> None:
        """Write the scores of each test task, or what became of each lane."""
        if self.stream.lanes is not None:
            regrets, scores = torch.stack(list(self.lane_regrets.values())), self.latest[self.metric]
            np.savez_compressed(self.run.lanes, rounds=np.array(list(self.lane_regrets)), regret=regrets.numpy())
            columns: dict[str, Any] = {"weight": outer[:, 0].tolist()} if outer.shape[1] == 1 else {}
            columns |= {"regret": regrets[-1].tolist(), "gradient_norm": self.gradient_norms.tolist()}
            columns |= {self._test: np.reshape(scores, (-1, len(outer))).mean(0).tolist()} if scores else {}
            table = self.stream.lanes.with_columns(**{name: pl.Series(values) for name, values in columns.items()})
            escape_table(table).write_csv(self.run.events)
        elif len(self.latest[self.metric]) == len(self.data.test) > 0:
            columns = {"task": range(1, len(self.data.test) + 1)}
            for name, values in self.latest.items():
                columns |= {f"initial_{name}": self.initial[name], name: values}
            write_atomically(self.run.test_scores, pl.DataFrame(columns).write_csv())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the hashes of all closing files and then the summary."""
        assert self._provenance is not None
        self._provenance.finish(self.run, self.tables, summary)

    def _is_evaluated(self) -> bool:
        scores = [self.last_row.get(column) for column, tasks in self._evaluated.items() if tasks]
        return not scores or scores[0] not in (None, "")

    def _evaluate_all(self, trainer: L.Trainer, module: Any) -> None:
        began = time.perf_counter()
        for column, tasks in self._evaluated.items():
            scores = self._evaluate(trainer, module, tasks)
            self.last_row[column], self.last_row[f"{column}_se"] = center(scores[self.metric], len(tasks))
            self.latest = scores if column == self._test else self.latest
        if trainer.global_step % self.evaluate_every == 0:
            self.last_due = self.latest
        self._timing["evaluation_seconds"] = time.perf_counter() - began
        self._show_test_score(trainer)

    def _evaluate(self, trainer: L.Trainer, module: Any, *arguments: Any) -> dict[str, list[float]]:
        self.status.set("evaluating")
        return evaluate_tasks(trainer, module, self.metric, *arguments)

    def _show_test_score(self, trainer: L.Trainer) -> None:
        """Show the test score to `watch` and to callbacks."""
        score, _ = center(self.latest[self.metric], len(self.data.test))
        if score is not None:
            trainer.callback_metrics[self._test] = torch.tensor(score, dtype=torch.float64)


def _planned_rounds(trainer: L.Trainer) -> float:
    """Return the number of rounds, if nothing stops the run earlier."""
    return min(trainer.num_training_batches, trainer.max_steps if trainer.max_steps >= 0 else float("inf"))


def _continues(trainer: L.Trainer) -> bool:
    """Return whether another round follows."""
    return trainer.global_step < _planned_rounds(trainer) and not trainer.should_stop


def _validates_now(trainer: L.Trainer) -> bool:
    """Return whether Lightning validates after this round."""
    every, batches = trainer.val_check_batch, trainer.num_val_batches
    tasks = sum(batches) if isinstance(batches, list) else batches
    due = every is not None and trainer.global_step % every == 0 and trainer.check_val_every_n_epoch in (None, 1)
    return trainer.enable_validation and due and tasks > 0
