"""`OnlineTuner`: hyperparameters that follow the data in your own training, which is the inner solver."""

import copy
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from obbo_lightning.algorithms.obbo import OBBO
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.domains import Box, Simplex
from obbo_lightning.core.hypergradients import FixedPoint
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.parameter_groups import ParameterGroups
from obbo_lightning.core.randomness import Key, derive_seed
from obbo_lightning.core.round import Round, run_round
from obbo_lightning.core.step_map import SHORT, StepMap, step_map, unknown_optimizers
from obbo_lightning.core.tuning_result import TuningResult
from obbo_lightning.core.validation import at_least, instance_of, one_of
from obbo_lightning.networks.hyperparameters import FunctionalModule
from obbo_lightning.problems.module import CurrentWeights, Loss, TrainedModuleProblem
from obbo_lightning.training.distributed import Processes
from obbo_lightning.training.validation_batches import Source, ValidationBatches

STEPS_TO_REFUSE = 3  # outer steps after which a hyperparameter that no training loss depended on is refused
MOST_LOGGED = 100  # coordinates of λ
ANY_STEP = StepMap(SHORT)  # where no optimizer is given: only the direction of a step matters


class OnlineTuner(L.Callback):
    """Learns the `Hyperparameters` of your LightningModule while the module is trained as before.

    Every ``every`` batches it takes a validation batch, one hypergradient at the present weights of the module, and one
    outer step. Training sees the new values and nothing else: weights, gradients, buffers and random numbers are
    unchanged. Its state is in the Trainer's checkpoints, and several processes average their hypergradients.

    A loss is a function of (module, batch, hyper) that returns the mean over the batch; ``hyper`` has the values by
    name, to be differentiated through. The validation loss is computed in evaluation mode.

    Steps have no size to choose (``lr: auto``): the validation examples are divided into folds, one for each outer step
    in turn, and steps grow while what is learned on some folds also helps on the others.

    The hypergradient is that of the steps of your optimizer, with its learning rates, momentum, weight decay and
    preconditioner as they are now (`step_map`). With accumulated gradients the last batch stands for all batches of a
    step, ``every`` counts batches, and there is an outer step even if the optimizer has none to take yet. Clipping of
    gradients, scaling of losses and changes of the learning rate in the steps to come are ignored: they do not change
    where training converges to.

    Args:
        validation: a DataLoader, cycled indefinitely, or a function of the number of batches taken before; None: the
            validation loss gets the training batch, which then holds both.
        every: batches between outer steps.
        training_loss: of (module, batch, hyper); None: the module's own method ``training_loss(batch, hyper)``.
        validation_loss: the same; None: the module's own ``validation_loss(batch, hyper)``.
        algorithm: everything but the inner solver; None: OBBO with a window of 1, the groups' own geometry and steps,
            and a fixed point of 2 iterations. Its hypergradient is `FixedPoint`, or `ConjugateGradient`.
        folds: number of disjoint folds of validation examples; None: 4 of a loader with a map-style dataset (2 of less
            than 20 examples). Of anything else you say where its batches come from: K, batch i of every pass is of
            fold i mod K; or ``new``, every batch has new examples.
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
        if self.algorithm.hypergradient.is_stochastic:
            raise ValueError(
                "hypergradient must be FixedPoint or ConjugateGradient: a batch of training cannot be sampled from, "
                f"got {self.algorithm.hypergradient!r}"
            )
        self.validation = ValidationBatches(validation, folds, seed, labels)
        self.losses = {"training_loss": training_loss, "validation_loss": validation_loss}
        self.seed = seed
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("skip", "raise"))
        self.batches = self.steps = 0
        self.seconds = self.seconds_of_training = 0.0
        self.result = self._new_result()
        self._problem: TrainedModuleProblem | None = None
        self._outer_step: OuterStep | None = None
        self._state = InnerState()
        self._loaded: dict[str, Any] | None = None
        self._started = 0.0
        self._last_logged = -1
        self._unused: set[str] | None = None
        self._checked = 0  # outer steps in which the training loss was tested for what it depends on
        self._warned: set[str] = set()  # optimizers that are not known

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
        if fold is not None and not 0 <= fold < self.validation.folds:
            raise ValueError(f"fold must be from 0 to {self.validation.folds - 1}, got {fold!r}")
        if self._problem is None or self._problem.network.module is not module:
            self._attach(module)
        assert self._problem is not None
        assert self._outer_step is not None
        network, parameter = self._problem.network, self._outer_step.outer
        parameter.data.copy_(network.hyper.outer)  # a checkpoint may have been loaded into the module
        before = parameter.detach().clone()
        self._problem.seed = derive_seed(self.seed, "losses", self.steps)
        task = {"training": batch, "validation": batch if validation_batch is None else validation_batch}
        shard, fold = shard or Shard(), self.steps % self.validation.folds if fold is None else fold
        algorithm = self._with_training_as_solver(self._training_map(optimizer, network.trainable(), parameter.dtype))
        key = Key(self.seed, self.steps)
        finished = run_round(self._problem, algorithm, self._outer_step, task, self._state, key, shard, fold)
        self._state = finished.states[0]
        self.steps += 1
        network.hyper.outer.copy_(parameter.detach())
        self.result.add(before, finished, fold)
        if self._checked < STEPS_TO_REFUSE and not bool(finished.skipped.any()):
            self._refuse_unused(before, task, shard)
        return finished

    def values(self) -> dict[str, float]:
        """Return every hyperparameter by the name of its coordinate, ``sources[3]``."""
        if self._problem is None:
            return {}
        row = self._problem.network.hyper.outer[0].tolist()
        return {name: row[i] for name, i in self._problem.groups.coordinates().items()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse what cannot be tuned, before the first batch."""
        if self._outer_step is not None and self._problem is not None and self._problem.network.module is pl_module:
            self._loaded = self._loaded or self._outer_step.state_dict()  # training goes on, perhaps on another device
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
        fold, validation_batch = self.validation.take(self.steps)
        if validation_batch is not None:
            validation_batch = trainer.strategy.batch_to_device(validation_batch, dataloader_idx=0)
        shard = Processes(trainer, lanes=1, tasks_per_round=trainer.world_size).shard  # every rank has a batch
        finished = self.step(pl_module, batch, validation_batch, trainer.optimizers, fold, shard)
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
                log_result(logger, self.result, self._logged_values(), trainer.global_step)
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
            "unused": None if self._unused is None else sorted(self._unused),
            "checked": self._checked,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, as soon as there is a module."""
        self.batches, self.steps = state_dict["batches"], state_dict["steps"]
        self._state = InnerState(**state_dict["inner_state"])
        self._loaded = state_dict["outer_step"]
        self.validation.load_state_dict(state_dict["validation"])
        self.result.load_state_dict(state_dict["result"])
        self._unused = None if state_dict["unused"] is None else set(state_dict["unused"])
        self._checked = state_dict["checked"]

    def _attach(self, module: nn.Module) -> None:
        network = FunctionalModule(module)
        losses: dict[str, Any] = {n: given or getattr(type(module), n, None) for n, given in self.losses.items()}
        for name, loss in losses.items():
            if not callable(loss):
                cls = type(module).__name__
                raise ValueError(f"{name} must be given, or be a method {name}(batch, hyper) of {cls}, got none")
        if self._problem is not None and self._problem.network.module is not module:
            self.result, self._unused, self._checked = self._new_result(), None, 0
        self._problem = TrainedModuleProblem(network, **losses)
        self._with_training_as_solver(ANY_STEP).require_compatible(self._problem)
        self.result.attach(network.groups)
        with torch.no_grad():
            network.hyper.outer.copy_(inside(network.hyper.outer, network.groups))
        outer = nn.Parameter(network.hyper.outer.detach().clone())
        folds = self.validation.folds
        self._outer_step = OuterStep(outer, self.algorithm, 1, self.on_nonfinite, groups=network.groups, folds=folds)
        if self._loaded is not None:
            self._outer_step.load_state_dict(self._loaded)
            self._loaded = None

    def _new_result(self) -> TuningResult:
        return TuningResult(self.validation.folds, new_examples=self.validation.held_out and self.validation.folds == 1)

    def _training_map(
        self, optimizer: Optimizer | Sequence[Optimizer] | None, parameters: dict[str, nn.Parameter], dtype: torch.dtype
    ) -> StepMap:
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or []
        # by the names of their own classes
        optimizers = [one.optimizer if isinstance(one, LightningOptimizer) else one for one in given]
        for name in unknown_optimizers(optimizers):
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"the steps of {name} are not known to OnlineTuner: its lr is used as that of gradient descent "
                    "(SGD, Adam, AdamW, RMSprop and Adagrad are known)",
                    stacklevel=3,
                )
        return step_map(optimizers, parameters, dtype) if optimizers else ANY_STEP

    def _refuse_unused(self, outer: Tensor, task: dict[str, Any], shard: Shard) -> None:
        """Refuse hyperparameters on which the training loss does not depend: they cannot be learned in this way."""
        assert self._problem is not None
        slopes = self._problem.training_slope(outer, task)
        used = torch.stack([values.count_nonzero() for values in self._problem.groups.split(slopes).values()])
        if shard.all_reduce is not None:
            used = shard.all_reduce(used.to(slopes.dtype))  # all ranks refuse together
        zero = {name for name, number in zip(self._problem.groups.named, used.tolist(), strict=True) if not number}
        self._unused = zero if self._unused is None else self._unused & zero
        self._checked += 1
        if self._checked == STEPS_TO_REFUSE and self._unused:
            names = ", ".join(map(repr, sorted(self._unused)))
            raise ValueError(
                f"training_loss must depend on {names}: use hyper[name] in it, as a tensor (no .item()); what acts on "
                f"training in another way, such as a learning rate, cannot be tuned (docs/tunable.md), got no "
                f"derivative in {self._checked} steps"
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
        numbers = self._logged_values()
        numbers["tuner/validation_loss"] = float(finished.loss.mean())
        numbers |= {f"tuner/{name}": float(value.mean()) for name, value in finished.step_metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    def _logged_values(self) -> dict[str, float]:
        values = self.values()
        return {f"hyper/{name}": value for name, value in values.items()} if len(values) <= MOST_LOGGED else {}


def inside(outer: Tensor, groups: ParameterGroups) -> Tensor:
    """Return λ in its domain, which values rounded to a lower precision may have left.

    >>> from obbo_lightning import OnSimplex
    >>> rounded = torch.full((1, 3), 1 / 3).double()
    >>> float(inside(rounded, ParameterGroups(sources=OnSimplex(3))).sum()) - 1
    0.0
    """
    outer = outer.clone()
    for name, where in groups.slices.items():
        domain, values = groups.named[name].domain, outer[:, where]
        if bool(domain.contains(values).all()) or not bool(domain.contains(values.float()).all()):
            continue  # an impossible start is refused later
        if isinstance(domain, Box):
            outer[:, where] = domain.project(values)
        elif isinstance(domain, Simplex):
            outer[:, where] = values / values.sum(-1, keepdim=True)
    return outer


def log_result(logger: Logger, result: TuningResult, values: dict[str, float], step: int) -> None:
    """Write the result of a training to a logger: numbers, and sentences where the logger has a place for them."""
    logger.log_metrics(values | result.metrics(), step=step)
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("tuner/result", "\n\n".join(result.lines()), step)
    elif isinstance(logger, WandbLogger):
        logger.experiment.summary.update({f"tuner/result/{name}": one for name, one in result.summary().items()})
