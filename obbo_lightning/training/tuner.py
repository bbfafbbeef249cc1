"""`OnlineTuner`: hyperparameters that follow the data in your own training, which is the inner solver."""

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from obbo_lightning.algorithms.obbo import OBBO
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.hypergradients import FixedPoint
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key, derive_seed
from obbo_lightning.core.round import Round, run_round
from obbo_lightning.core.step_size import DEFAULT_SCALE
from obbo_lightning.core.validation import at_least, instance_of, one_of, positive
from obbo_lightning.networks.hyperparameters import FunctionalModule
from obbo_lightning.problems.module import CurrentWeights, Loss, TrainedModuleProblem
from obbo_lightning.training.distributed import Processes

STEPS_TO_WARN = 3  # outer steps after which a hyperparameter that no loss depends on is named
MOST_LOGGED = 100  # coordinates of λ
DEFAULT_LR = 0.1  # η of the fixed point, where the module is not trained by SGD


class OnlineTuner(L.Callback):
    """Learns the `Hyperparameters` of your LightningModule while the module is trained as before.

    Every ``every`` batches it takes a validation batch, one hypergradient at the present weights of the module, and one
    outer step. Training sees the new values and nothing else: weights, gradients, buffers and random numbers are
    unchanged. Its state is in the Trainer's checkpoints, and several processes average their hypergradients.

    A loss is a function of (module, batch, hyper) that returns the mean over the batch; ``hyper`` has the values by
    name, to be differentiated through. The validation loss is computed in evaluation mode.

    Args:
        validation: a DataLoader, cycled indefinitely, or a function of the number of batches taken before; None: the
            validation loss gets the training batch, which then holds both.
        every: batches between outer steps.
        training_loss: of (module, batch, hyper); None: the module's own method ``training_loss(batch, hyper)``.
        validation_loss: the same; None: the module's own ``validation_loss(batch, hyper)``.
        algorithm: everything but the inner solver; None: OBBO with a window of 1, the groups' own geometry and steps,
            and a fixed point of 2 iterations.
        lr: η of the fixed point, where the algorithm leaves it open; None: that of the module's SGD, or 0.1.
        seed: of validation batches.
        on_nonfinite: ``skip`` a hypergradient that is not finite, or ``raise``.
        scale: a typical change per step, relative to the size of a value. Not with an ``algorithm``.

    >>> from obbo_lightning import Hyperparameters, Positive
    >>> class Mean(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.value, self.hyper = nn.Parameter(torch.zeros(1)), Hyperparameters(pull=Positive(1.0, upper=10.0))
    ...     def training_loss(self, batch, hyper):
    ...         return (self.value - batch).square().mean() + hyper["pull"] * self.value.square().sum()
    ...     def validation_loss(self, batch, hyper):
    ...         return (self.value - batch).square().mean()
    >>> model, tuner = Mean(), OnlineTuner()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(30):
    ...     batch = torch.ones(8)
    ...     optimizer.zero_grad()
    ...     model.training_loss(batch, model.hyper).backward()
    ...     optimizer.step()
    ...     round = tuner.step(model, batch, batch)
    >>> bool(model.hyper["pull"] < 0.1)
    True
    """

    def __init__(
        self,
        validation: Iterable[Any] | Callable[[int], Any] | None = None,
        every: int = 5,
        training_loss: Loss | None = None,
        validation_loss: Loss | None = None,
        algorithm: Algorithm | None = None,
        lr: float | None = None,
        seed: int = 0,
        on_nonfinite: str = "skip",
        scale: float | None = None,
    ) -> None:
        self.every = at_least("every", every, 1)
        if algorithm is not None and scale is not None:
            raise ValueError(f"scale must be the algorithm's own where one is given, got {scale!r} beside it")
        default = OBBO(window=1, hypergradient=FixedPoint(steps=2), scale=DEFAULT_SCALE if scale is None else scale)
        self.algorithm = instance_of("algorithm", algorithm or default, Algorithm)
        self.validation = None if validation is None else ValidationBatches(validation, seed)
        self.losses = {"training_loss": training_loss, "validation_loss": validation_loss}
        self.lr = None if lr is None else positive("lr", lr)
        self.seed = seed
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("skip", "raise"))
        self.batches = self.steps = 0
        self.seconds = self.seconds_of_training = 0.0
        self._problem: TrainedModuleProblem | None = None
        self._outer_step: OuterStep | None = None
        self._state = InnerState()
        self._loaded: dict[str, Any] | None = None
        self._started = 0.0
        self._last_logged = -1
        self._unused: set[str] | None = None

    def step(
        self,
        module: nn.Module,
        batch: Any,
        validation_batch: Any = None,
        lr: float | None = None,
        shard: Shard | None = None,
    ) -> Round:
        """Take one outer step: for your own loop, after your optimizer's step. ``lr`` is η of the fixed point."""
        if self._problem is None or self._problem.network.module is not module:
            self._attach(module)
        assert self._problem is not None
        assert self._outer_step is not None
        hyper, parameter = self._problem.network.hyper, self._outer_step.outer
        parameter.data.copy_(hyper.outer)  # a checkpoint may have been loaded into the module
        self._problem.seed = derive_seed(self.seed, "losses", self.steps)
        task = {"training": batch, "validation": batch if validation_batch is None else validation_batch}
        algorithm = self._with_training_as_solver(self.lr or lr or DEFAULT_LR)
        key = Key(self.seed, self.steps)
        finished = run_round(self._problem, algorithm, self._outer_step, task, self._state, key, shard or Shard())
        self._state = finished.states[0]
        self.steps += 1
        hyper.outer.copy_(parameter.detach())
        self._warn_of_unused(finished)
        return finished

    def values(self) -> dict[str, float]:
        """Return every hyperparameter by the name of its coordinate, ``sources[3]``."""
        if self._problem is None:
            return {}
        row = self._problem.network.hyper.outer[0].tolist()
        return {name: row[i] for name, i in self._problem.groups.coordinates().items()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse what cannot be tuned, before the first batch."""
        self._attach(pl_module)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take an outer step every so many batches."""
        self.batches += 1
        if self.batches % self.every:
            return
        began = time.perf_counter()
        validation_batch = None
        if self.validation is not None:
            validation_batch = trainer.strategy.batch_to_device(self.validation.take(), dataloader_idx=0)
        shard = Processes(trainer, lanes=1, tasks_per_round=trainer.world_size).shard  # every rank has a batch
        finished = self.step(pl_module, batch, validation_batch, _sgd_lr(trainer), shard)
        self._log(trainer, finished)
        self.seconds += time.perf_counter() - began

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report what it cost."""
        self.seconds_of_training = time.perf_counter() - self._started - self.seconds
        if self.steps:
            times = 1 + self.seconds / max(self.seconds_of_training, 1e-9)
            rank_zero_info(
                f"OnlineTuner: {self.steps} outer steps, one every {self.every} batches; training took {times:.2f} "
                f"times as long as without them"
            )
        elif self.batches < self.every:
            rank_zero_info(f"OnlineTuner: no outer step: every is {self.every}, and there were {self.batches} batches")

    def state_dict(self) -> dict[str, Any]:
        """Return everything but λ, which is the module's."""
        return {
            "batches": self.batches,
            "steps": self.steps,
            "inner_state": self._state.state_dict(),
            "outer_step": None if self._outer_step is None else self._outer_step.state_dict(),
            "validation": None if self.validation is None else self.validation.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, as soon as there is a module."""
        self.batches, self.steps = state_dict["batches"], state_dict["steps"]
        self._state = InnerState(**state_dict["inner_state"])
        self._loaded = state_dict["outer_step"]
        if self.validation is not None and state_dict["validation"] is not None:
            self.validation.load_state_dict(state_dict["validation"])

    def _attach(self, module: nn.Module) -> None:
        network = FunctionalModule(module)
        losses: dict[str, Any] = {n: given or getattr(type(module), n, None) for n, given in self.losses.items()}
        for name, loss in losses.items():
            if not callable(loss):
                cls = type(module).__name__
                raise ValueError(f"{name} must be given, or be a method {name}(batch, hyper) of {cls}, got none")
        self._problem = TrainedModuleProblem(network, **losses)
        self._with_training_as_solver(DEFAULT_LR).require_compatible(self._problem)
        outer = nn.Parameter(network.hyper.outer.detach().clone())
        self._outer_step = OuterStep(
            outer, self.algorithm, regret_window=1, on_nonfinite=self.on_nonfinite, groups=network.groups
        )
        if self._loaded is not None:
            self._outer_step.load_state_dict(self._loaded)
            self._loaded = None

    def _warn_of_unused(self, finished: Round) -> None:
        """Warn once of hyperparameters on which the losses do not depend: they would never change."""
        if self._problem is None or self.steps > STEPS_TO_WARN:
            return
        by_name = self._problem.groups.split(finished.hypergradient)
        zero = {name for name, values in by_name.items() if not bool(values.any())}
        self._unused = zero if self._unused is None else self._unused & zero
        if self.steps == STEPS_TO_WARN and self._unused and not bool(finished.skipped.any()):
            names = ", ".join(map(repr, sorted(self._unused)))
            warnings.warn(
                f"the losses do not depend on {names}: use hyper[name] in training_loss, as a tensor (no .item())",
                stacklevel=4,
            )

    def _with_training_as_solver(self, lr: float) -> Algorithm:
        """Return the algorithm with the module's own training as its inner solver."""
        assert self._problem is not None
        algorithm = copy.copy(self.algorithm)
        object.__setattr__(algorithm, "inner", CurrentWeights(self._problem.network, lr))  # it is frozen
        return algorithm

    def _log(self, trainer: L.Trainer, finished: Round) -> None:
        due = trainer.global_step // max(1, getattr(trainer, "log_every_n_steps", 50))
        if due == self._last_logged or not trainer.loggers:
            return
        self._last_logged = due
        values = self.values()
        numbers = {f"hyper/{name}": value for name, value in values.items()} if len(values) <= MOST_LOGGED else {}
        numbers["tuner/validation_loss"] = float(finished.loss.mean())
        numbers |= {f"tuner/{name}": float(value.mean()) for name, value in finished.step_metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)


def _sgd_lr(trainer: L.Trainer) -> float | None:
    """Return η of the module's own steps, where they are those of gradient descent."""
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    return float(optimizer.param_groups[0]["lr"]) if isinstance(optimizer, torch.optim.SGD) else None


class ValidationBatches:
    """Batches of a loader, cycled indefinitely, or of a function, without a trace in the global random numbers.

    Every pass over a loader has its own seeds, so that a resumed run gets the same batches.
    """

    def __init__(self, source: Iterable[Any] | Callable[[int], Any], seed: int = 0) -> None:
        if not callable(source) and not isinstance(source, Iterable):
            raise ValueError(f"validation must be a loader or a function that returns a batch, got {source!r}")
        self.source, self.seed = source, seed
        self.passes = self.taken = 0
        self._batches: Iterator[Any] | None = None

    def take(self) -> Any:
        """Return the next batch."""
        with isolate_rng(include_cuda=False):
            if callable(self.source) and not isinstance(self.source, Iterable):
                self._seed(self.taken)
                self.taken += 1
                return self.source(self.taken - 1)
            if self._batches is None:
                self._seed(0)  # shuffling is drawn between here and the first batch
                self._batches = iter(self.source)
                for index in range(self.taken):  # a pass that is resumed
                    if index:
                        self._seed(index)
                    next(self._batches)
            if self.taken:
                self._seed(self.taken)
            for batch in self._batches:
                self.taken += 1
                return batch
            if not self.taken:
                raise ValueError("validation must have at least one batch, got none")
            self.passes, self.taken, self._batches = self.passes + 1, 0, None
        return self.take()

    def _seed(self, index: int) -> None:
        seed = derive_seed(self.seed, self.passes, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (transforms draw from the global generator)
        torch.default_generator.manual_seed(seed)

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.taken, self._batches = state["passes"], state["taken"], None
