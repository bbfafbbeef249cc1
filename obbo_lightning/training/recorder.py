"""What a run leaves behind: a row a round, evaluations, checkpoints; and how it is stopped."""

import math
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import Tensor

from obbo_lightning.core.problem import Task
from obbo_lightning.core.rounds import Round
from obbo_lightning.core.validation import at_least
from obbo_lightning.training.checkpoints import save_checkpoint
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.ranks import Ranks
from obbo_lightning.training.run_directory import RunDirectory
from obbo_lightning.training.table import RoundTable

REGRETS = ("euclidean", "generalized", "exact")
NUMBERS = ("hypergradient_norm", "direction_norm", "generalized_norm", "residual", "hypergradient_error")
COUNTS = ("gradients", "products", "window_fill", "skipped")


class Stopped(Exception):
    """A signal ended the run after a complete round and its checkpoint."""

    def __init__(self, signum: int, rounds: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after round {rounds}")
        self.signum = signum


class Recorder(L.Callback):
    """Writes a row after every round, evaluates and saves every so many, in that order, so that a resume is exact.

    Args:
        run: where to write.
        test: the fixed test tasks.
        metric: what is evaluated: ``accuracy`` or ``loss``.
        evaluate_every: rounds between evaluations.
        checkpoint_every: rounds between checkpoints.
    """

    def __init__(
        self, run: RunDirectory, test: Sequence[Task], metric: str, evaluate_every: int, checkpoint_every: int
    ) -> None:
        self.run = run
        self.test = test
        self.metric = metric
        self.evaluate_every = at_least("evaluation.every", evaluate_every, 1)
        self.checkpoint_every = at_least("checkpoint.every", checkpoint_every, 1)
        scores = [] if metric == "loss" else [metric]
        self.metrics = RoundTable(
            run.metrics,
            ["round", "loss", "inner_loss", *scores, f"test_{metric}", f"test_{metric}_se"]
            + [f"regret/{name}" for name in REGRETS]
            + [*NUMBERS, *COUNTS],
        )
        self.timings = RoundTable(run.timings, ["round", "seconds", "evaluation_seconds"])
        self.untrained: list[float] = []
        self.tested: list[float] = []
        self.row: dict[str, Any] = {}
        self.seconds_before = 0.0
        self.oracle_calls = 0
        self._born = time.perf_counter()
        self._began = 0.0
        self._signal = 0
        self._handlers: dict[signal.Signals, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The evaluations that the summary compares."""
        seconds = self.seconds_before + time.perf_counter() - self._born
        calls = self.oracle_calls
        return {"untrained": self.untrained, "tested": self.tested, "seconds": seconds, "oracle_calls": calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the evaluations made before the checkpoint."""
        self.untrained, self.tested = state_dict["untrained"], state_dict["tested"]
        self.seconds_before = state_dict["seconds"]
        self.oracle_calls = state_dict.get("oracle_calls", 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the tables where the checkpoint ended; judge the untrained λ_1 once."""
        self.run.settle(Path(trainer.strategy.broadcast(str(self.run.path))))  # rank 0 has made it
        if threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.signal(n, self._remember) for n in (signal.SIGINT, signal.SIGTERM)}
        if trainer.is_global_zero:
            self.metrics.cut(trainer.global_step)
            self.timings.cut(trainer.global_step)
        if not self.untrained:
            self.untrained = self.tested = self._evaluate(_online(pl_module))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Row, evaluation, then checkpoint: what a checkpoint follows is on disk already."""
        module, rounds = _online(pl_module), trainer.global_step
        if module.played is None or module.outer_step.step is None:
            raise RuntimeError("a batch ended without a round")
        last = rounds == trainer.num_training_batches
        stop = _ranks(module).any(self._signal, module.device)
        clock = {"round": rounds, "seconds": time.perf_counter() - self._began}
        self.row = {"round": rounds, **summarise(module.played, module.outer_step.step.memory.fill)}
        if rounds % self.evaluate_every == 0 or last:
            began = time.perf_counter()
            self.tested = self._evaluate(module)
            centre, error = self.centre_and_error(self.tested)
            self.row |= {f"test_{self.metric}": centre, f"test_{self.metric}_se": error}
            clock["evaluation_seconds"] = time.perf_counter() - began
        if trainer.is_global_zero:
            self.metrics.append(self.row)
            self.timings.append(clock)
        self.oracle_calls += sum(module.played.calls.values())
        watched = {**self.row, **clock, "oracle_calls": self.oracle_calls}
        for logger in trainer.loggers:
            logger.log_metrics({k: v for k, v in watched.items() if v is not None}, step=rounds)
        if rounds % self.checkpoint_every == 0 or last or stop:
            if trainer.is_global_zero:
                self.metrics.sync()
                self.timings.sync()
            save_checkpoint(trainer, self.run.checkpoints)
        if stop and not last:
            raise Stopped(stop, rounds)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Lightning tears nothing down after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the tables, and give the signals back."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}
        self.metrics.close()
        self.timings.close()

    def centre_and_error(self, values: Sequence[float]) -> tuple[float, float | None]:
        """What stands for an evaluation: like all of a row the median over lanes; tasks of one lane have a mean."""
        several_lanes = len(values) > len(self.test)
        return (statistics.median(values), None) if several_lanes else mean_and_error(values)

    def _evaluate(self, module: OnlineBilevelModule) -> list[float]:
        """Each rank judges some of the tasks, and all know the scores."""
        ranks = _ranks(module)
        module.gather_judged_from()
        scores = module.outer.detach().new_zeros(len(self.test), len(module.outer))
        for i in range(ranks.rank, len(self.test), ranks.size):
            task = module.transfer_batch_to_device(self.test[i], module.device, 0)
            task = module.trainer.precision_plugin.convert_input(task)
            scores[i] = module.evaluate(task)[self.metric]
        return ranks.share.sum(scores).flatten().tolist()

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self._signal:  # asked twice: at once
            raise Stopped(signum, int(self.row.get("round", 0)))
        self._signal = signum


def summarise(played: Round, window_fill: int) -> dict[str, float | int | None]:
    """A round as a row of numbers: medians over lanes."""
    step = played.step
    per_lane: dict[str, Tensor | None] = {
        "loss": played.loss,
        "inner_loss": played.inner_loss,
        **played.scores,
        **{f"regret/{name}": step.regret[name] for name in REGRETS},
        "hypergradient_norm": step.hypergradient.norm(dim=-1),
        "direction_norm": step.direction.norm(dim=-1),
        "generalized_norm": None if step.generalized is None else step.generalized.norm(dim=-1),
        "residual": played.residual,
        "hypergradient_error": step.hypergradient_error,
    }
    known = {name: values for name, values in per_lane.items() if values is not None}
    numbers = torch.stack([_median(values) for values in known.values()]).tolist()  # one transfer
    row: dict[str, float | int | None] = dict.fromkeys(per_lane)
    row |= dict(zip(known, numbers, strict=True))
    return row | {**played.calls, "window_fill": window_fill, "skipped": int(step.skipped.sum())}


def _median(values: Tensor) -> Tensor:
    """The mean of the two in the middle, also where they are infinite; NaN sorts last."""
    ordered = values.double().sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error; one value has none."""
    numbers = torch.tensor(values, dtype=torch.float64)
    mean = float(numbers.mean()) if values else math.nan
    error = float(numbers.std()) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return mean, error if math.isfinite(error) else None


def _ranks(module: OnlineBilevelModule) -> Ranks:
    if module.outer_step.ranks is None:
        raise RuntimeError("the recorder needs a module that is being trained")
    return module.outer_step.ranks


def _online(module: L.LightningModule) -> OnlineBilevelModule:
    if not isinstance(module, OnlineBilevelModule):
        raise TypeError(f"the recorder belongs to an OnlineBilevelModule, got {type(module).__name__}")
    return module
