"""`OnlineTuner`: hyperparameters that follow the data in your own training, which is the inner solver."""

import copy
import time
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from obbo_lightning.algorithms.obbo import OBBO
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.hypergradients import FixedPoint
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key, derive_seed
from obbo_lightning.core.round import Round, run_round
from obbo_lightning.core.step_map import StepMap, step_map
from obbo_lightning.core.tuning_result import TuningResult
from obbo_lightning.core.validation import at_least, instance_of, one_of
from obbo_lightning.networks.hyperparameters import FunctionalModule
from obbo_lightning.problems.module import CurrentWeights, Loss, TrainedModuleProblem
from obbo_lightning.training.distributed import Processes
from obbo_lightning.training.validation_batches import Source, ValidationBatches

STEPS_TO_REFUSE = 3  # outer steps after which a hyperparameter that no loss depends on is refused
MOST_LOGGED = 100  # coordinates of λ
ANY_STEP = StepMap(1e-6)  # of an optimizer that is not known: so short that only the direction of a step matters


class OnlineTuner(L.Callback):
    """Learns the `Hyperparameters` of your LightningModule while the module is trained as before.

    Every ``every`` batches it takes a validation batch, one hypergradient at the present weights of the module, and one
    outer step. Training sees the new values and nothing else: weights, gradients, buffers and random numbers are
    unchanged. Its state is in the Trainer's checkpoints, and several processes average their hypergradients.

    A loss is a function of (module, batch, hyper) that returns the mean over the batch; ``hyper`` has the values by
    name, to be differentiated through. The validation loss is computed in evaluation mode.

    Steps have no size to choose (``lr: auto``): the validation examples are divided into folds, one for each outer step
    in turn, and steps grow while what is learned on some folds also helps on the others.

    Args:
        validation: a DataLoader, cycled indefinitely, or a function of the number of batches taken before; None: the
            validation loss gets the training batch, which then holds both.
        every: batches between outer steps.
        training_loss: of (module, batch, hyper); None: the module's own method ``training_loss(batch, hyper)``.
        validation_loss: the same; None: the module's own ``validation_loss(batch, hyper)``.
        algorithm: everything but the inner solver; None: OBBO with a window of 1, the groups' own geometry and steps,
            and a fixed point of 2 iterations.
        folds: number of disjoint folds of validation examples; None: 4 of a loader with a map-style dataset (2 of less
            than 100 examples). Of anything else you say where its batches come from: K, batch i is of fold i mod K; or
            ``new``, every batch has new examples.
        labels: class of every validation example, so that folds have the same shares of classes.
        seed: of folds and validation batches.
        on_nonfinite: ``skip`` a hypergradient that is not finite, or ``raise``.

    >>> import torch
    >>> from obbo_lightning import Hyperparameters, Positive
    >>> class Mean(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.value, self.hyper = nn.Parameter(torch.zeros(1)), Hyperparameters(pull=Positive(1.0))
    ...     def training_loss(self, batch, hyper):
    ...         return (self.value - batch).square().mean() + hyper["pull"] * self.value.square().sum()
    ...     def validation_loss(self, batch, hyper):
    ...         return (self.value - batch).square().mean()
    >>> model, tuner = Mean(), OnlineTuner(folds="new")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(30):
    ...     batch = torch.ones(8)
    ...     optimizer.zero_grad()
    ...     model.training_loss(batch, model.hyper).backward()
    ...     optimizer.step()
    ...     round = tuner.step(model, batch, batch, optimizer)
    >>> bool(model.hyper["pull"] < 0.1)
    True
    """

    def __init__(
        self,
        validation: Source | None = None,
        every: int = 5,
        training_loss: Loss | None = None,
        validation_loss: Loss | None = None,
        algorithm: Algorithm | None = None,
        folds: int | Literal["new"] | None = None,
        labels: Sequence[int] | Tensor | None = None,
        seed: int = 0,
        on_nonfinite: str = "skip",
    ) -> None:
        self.every = at_least("every", every, 1)
        default = OBBO(window=1, hypergradient=FixedPoint(steps=2, while_contracting=True))
        self.algorithm = instance_of("algorithm", algorithm or default, Algorithm)
        self.validation = ValidationBatches(validation, folds, seed, labels)
        self.losses = {"training_loss": training_loss, "validation_loss": validation_loss}
        self.seed = seed
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("skip", "raise"))
        self.batches = self.steps = 0
        self.seconds = self.seconds_of_training = 0.0
        self.result = TuningResult(self.validation.held_out)
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
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        fold: int | None = None,
        shard: Shard | None = None,
    ) -> Round:
        """Take one outer step: for your own loop, after your optimizer's step.

        Args:
            module: has one `Hyperparameters`.
            batch: training batch.
            validation_batch: None: the training batch holds validation data, too.
            optimizer: what trains the module: the hypergradient is that of its steps; None: of a short gradient step.
            fold: number of the validation batch's fold, below ``folds``; None: outer step mod ``folds``.
            shard: where several processes share the batch.
        """
        if self._problem is None or self._problem.network.module is not module:
            self._attach(module)
        assert self._problem is not None
        assert self._outer_step is not None
        network, parameter = self._problem.network, self._outer_step.outer
        parameter.data.copy_(network.hyper.outer)  # a checkpoint may have been loaded into the module
        before = parameter.detach().clone()
        self._problem.seed = derive_seed(self.seed, "losses", self.steps)
        task = {"training": batch, "validation": batch if validation_batch is None else validation_batch}
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        training_map = step_map(optimizers, network.trainable(), parameter.dtype) if optimizers else ANY_STEP
        algorithm, key = self._with_training_as_solver(training_map), Key(self.seed, self.steps)
        evidence = shard or Shard(), fold
        finished = run_round(self._problem, algorithm, self._outer_step, task, self._state, key, *evidence)
        self._state = finished.states[0]
        self.steps += 1
        network.hyper.outer.copy_(parameter.detach())
        self.result.add(before, finished, self._problem.groups)
        self._refuse_unused(finished)
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
        validation_batch = self.validation.take(self.steps)
        if validation_batch is not None:
            validation_batch = trainer.strategy.batch_to_device(validation_batch, dataloader_idx=0)
        shard = Processes(trainer, lanes=1, tasks_per_round=trainer.world_size).shard  # every rank has a batch
        finished = self.step(pl_module, batch, validation_batch, trainer.optimizers, shard=shard)
        self._log(trainer, finished)
        self.seconds += time.perf_counter() - began

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report what it cost, and whether it helped."""
        self.seconds_of_training = time.perf_counter() - self._started - self.seconds
        if self.steps:
            times = 1 + self.seconds / max(self.seconds_of_training, 1e-9)
            rank_zero_info(
                f"OnlineTuner: {self.steps} outer steps, one every {self.every} batches; training took {times:.2f} "
                f"times as long as without them"
            )
            for line in self.result.lines():
                rank_zero_info(line)
            for logger in trainer.loggers:
                logger.log_metrics(self.result.metrics(), step=trainer.global_step)
        elif self.batches < self.every:
            rank_zero_info(f"OnlineTuner: no outer step: every is {self.every}, and there were {self.batches} batches")

    def state_dict(self) -> dict[str, Any]:
        """Return everything but λ, which is the module's."""
        return {
            "batches": self.batches,
            "steps": self.steps,
            "inner_state": self._state.state_dict(),
            "outer_step": None if self._outer_step is None else self._outer_step.state_dict(),
            "validation": self.validation.state_dict(),
            "result": self.result.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, as soon as there is a module."""
        self.batches, self.steps = state_dict["batches"], state_dict["steps"]
        self._state = InnerState(**state_dict["inner_state"])
        self._loaded = state_dict["outer_step"]
        self.validation.load_state_dict(state_dict["validation"])
        self.result.load_state_dict(state_dict["result"])

    def _attach(self, module: nn.Module) -> None:
        network = FunctionalModule(module)
        losses: dict[str, Any] = {n: given or getattr(type(module), n, None) for n, given in self.losses.items()}
        for name, loss in losses.items():
            if not callable(loss):
                cls = type(module).__name__
                raise ValueError(f"{name} must be given, or be a method {name}(batch, hyper) of {cls}, got none")
        self._problem = TrainedModuleProblem(network, **losses)
        self._with_training_as_solver(ANY_STEP).require_compatible(self._problem)
        outer = nn.Parameter(network.hyper.outer.detach().clone())
        folds = self.validation.folds
        self._outer_step = OuterStep(outer, self.algorithm, 1, self.on_nonfinite, groups=network.groups, folds=folds)
        if self._loaded is not None:
            self._outer_step.load_state_dict(self._loaded)
            self._loaded = None

    def _refuse_unused(self, finished: Round) -> None:
        """Refuse hyperparameters on which the losses do not depend: they would never change."""
        if self._problem is None or self.steps > STEPS_TO_REFUSE:
            return
        by_name = self._problem.groups.split(finished.hypergradient)
        zero = {name for name, values in by_name.items() if not bool(values.any())}
        self._unused = zero if self._unused is None else self._unused & zero
        if self.steps == STEPS_TO_REFUSE and self._unused and not bool(finished.skipped.any()):
            names = ", ".join(map(repr, sorted(self._unused)))
            raise ValueError(
                f"the losses must depend on {names}: use hyper[name] in training_loss, as a tensor (no .item()); a "
                f"learning rate cannot be tuned in this way (docs/tunable.md), got no derivative in {self.steps} steps"
            )

    def _with_training_as_solver(self, training_map: StepMap) -> Algorithm:
        """Return the algorithm with the module's own training as its inner solver."""
        assert self._problem is not None
        algorithm = copy.copy(self.algorithm)
        object.__setattr__(algorithm, "inner", CurrentWeights(self._problem.network, training_map))  # it is frozen
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
