"""Hyperparameters that follow the data, in your own training: the Trainer is the inner solver."""

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from obbo_lightning.algorithms.obbo import OBBO
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.auto_step import SCALE
from obbo_lightning.core.hypergradients import FixedPoint
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key, derive_seed
from obbo_lightning.core.rounds import Round, play
from obbo_lightning.core.share import Share
from obbo_lightning.core.validation import at_least, instance_of, one_of, positive
from obbo_lightning.networks.live import LiveNetwork
from obbo_lightning.problems.live import AsTrained, LiveProblem
from obbo_lightning.problems.module import Loss
from obbo_lightning.training.validation_batches import ValidationBatches

UNMOVED = 3  # outer steps after which a value that no loss depends on is named
LOGGED = 100  # so many coordinates of λ at most
USUAL_STEP = 0.1  # η of the fixed point, where the module is not trained by SGD


class OnlineTuner(L.Callback):
    """Learns the `Hyperparameters` of your LightningModule while it is trained by its own steps, as before.

    Every ``every`` batches it takes a validation batch, one hypergradient at the weights that the module has then, and
    one outer step. Training sees the new values and nothing else of it: weights, gradients, buffers and random numbers
    are untouched. Its state is in the Trainer's checkpoints, and several processes average their hypergradients.

    A loss is a function of (module, batch, hyper) that returns the mean over the batch; ``hyper`` has the values by
    name, to be differentiated through. The validation loss is judged in evaluation mode.

    Args:
        validation: a loader, or a function of the number of batches taken before; None: the validation loss gets the
            training batch, which then holds both.
        every: batches between outer steps.
        training_loss: of (module, batch, hyper); None: the module's own method ``training_loss(batch, hyper)``.
        validation_loss: the same; None: the module's own ``validation_loss(batch, hyper)``.
        algorithm: brings everything but the inner solver; None: OBBO with a window of 1, the blocks' own geometry and
            steps, and a fixed point of 2 iterations.
        lr: η of the fixed point, where the algorithm leaves it open; None: that of the module's SGD, or 0.1.
        scale: a typical change a step, of the size of a value; smaller is calmer. Not with an ``algorithm``.
        seed: of validation batches.
        on_nonfinite: ``skip`` a hypergradient that is not finite, or ``raise``.

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
    ...     played = tuner.step(model, batch, batch)
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
        usual = OBBO(window=1, hypergradient=FixedPoint(steps=2), scale=SCALE if scale is None else scale)
        self.algorithm = instance_of("algorithm", algorithm or usual, Algorithm)
        self.validation = None if validation is None else ValidationBatches(validation, seed)
        self.losses = {"training_loss": training_loss, "validation_loss": validation_loss}
        self.lr = None if lr is None else positive("lr", lr)
        self.seed = seed
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("skip", "raise"))
        self.batches = self.steps = 0
        self.seconds = self.seconds_of_training = 0.0
        self._problem: LiveProblem | None = None
        self._outer_step: OuterStep | None = None
        self._warm = Warm()
        self._loaded: dict[str, Any] | None = None
        self._began = 0.0
        self._logged = -1
        self._unmoved: set[str] | None = None

    def step(
        self,
        module: nn.Module,
        batch: Any,
        validation_batch: Any = None,
        lr: float | None = None,
        share: Share | None = None,
    ) -> Round:
        """One outer step now: for your own loop, after your optimizer's step. ``lr`` is η of the fixed point."""
        if self._problem is None or self._problem.network.module is not module:
            self._attach(module)
        assert self._problem is not None
        assert self._outer_step is not None
        hyper, parameter = self._problem.network.hyper, self._outer_step.outer
        parameter.data.copy_(hyper.outer)  # a checkpoint may have been loaded into the module
        self._problem.seed = derive_seed(self.seed, "losses", self.steps)
        task = {"training": batch, "validation": batch if validation_batch is None else validation_batch}
        algorithm = self._live(self.lr or lr or USUAL_STEP)
        played = play(
            self._problem, algorithm, self._outer_step, task, self._warm, Key(self.seed, self.steps), share or Share()
        )
        self._warm = played.warms[0]
        self.steps += 1
        hyper.outer.copy_(parameter.detach())
        self._notice(played)
        return played

    def values(self) -> dict[str, float]:
        """Every hyperparameter by the name of its coordinate, ``sources[3]``."""
        if self._problem is None:
            return {}
        row = self._problem.network.hyper.outer[0].tolist()
        return {name: row[i] for name, i in self._problem.blocks.coordinates().items()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse what cannot be tuned, before the first batch."""
        self._attach(pl_module)
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every so many batches, an outer step."""
        self.batches += 1
        if self.batches % self.every:
            return
        began = time.perf_counter()
        validation_batch = None
        if self.validation is not None:
            validation_batch = trainer.strategy.batch_to_device(self.validation.take(), dataloader_idx=0)
        played = self.step(pl_module, batch, validation_batch, _sgd_step(trainer), _share_of(trainer))
        self._log(trainer, played)
        self.seconds += time.perf_counter() - began

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What it cost."""
        self.seconds_of_training = time.perf_counter() - self._began - self.seconds
        if self.steps:
            times = 1 + self.seconds / max(self.seconds_of_training, 1e-9)
            rank_zero_info(
                f"OnlineTuner: {self.steps} outer steps, one every {self.every} batches; training took {times:.2f} "
                f"times as long as without them"
            )
        elif self.batches < self.every:
            rank_zero_info(f"OnlineTuner: no outer step: every is {self.every}, and there were {self.batches} batches")

    def state_dict(self) -> dict[str, Any]:
        """Everything but λ, which is the module's."""
        return {
            "batches": self.batches,
            "steps": self.steps,
            "warm": self._warm.state_dict(),
            "outer_step": None if self._outer_step is None else self._outer_step.state_dict(),
            "validation": None if self.validation is None else self.validation.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, as soon as there is a module."""
        self.batches, self.steps = state_dict["batches"], state_dict["steps"]
        self._warm = Warm(**state_dict["warm"])
        self._loaded = state_dict["outer_step"]
        if self.validation is not None and state_dict["validation"] is not None:
            self.validation.load_state_dict(state_dict["validation"])

    def _attach(self, module: nn.Module) -> None:
        network = LiveNetwork(module)
        losses: dict[str, Any] = {n: given or getattr(type(module), n, None) for n, given in self.losses.items()}
        for name, loss in losses.items():
            if not callable(loss):
                method = f"a method {name}(batch, hyper) of {type(module).__name__}"
                raise ValueError(f"{name} must be given, or be {method}, got none")
        self._problem = LiveProblem(network, **losses)
        self._live(USUAL_STEP).require_fit(self._problem)
        outer = nn.Parameter(network.hyper.outer.detach().clone())
        self._outer_step = OuterStep(
            outer, self.algorithm, regret_window=1, on_nonfinite=self.on_nonfinite, blocks=network.blocks
        )
        if self._loaded is not None:
            self._outer_step.load_state_dict(self._loaded)
            self._loaded = None

    def _notice(self, played: Round) -> None:
        """Say so, once, where the losses do not depend on a value: it would stay where it is for ever."""
        if self._problem is None or self.steps > UNMOVED:
            return
        by_name = self._problem.blocks.split(played.step.hypergradient)
        still = {name for name, values in by_name.items() if not bool(values.any())}
        self._unmoved = still if self._unmoved is None else self._unmoved & still
        if self.steps == UNMOVED and self._unmoved and not bool(played.step.skipped.any()):
            names = ", ".join(map(repr, sorted(self._unmoved)))
            warnings.warn(
                f"the losses do not depend on {names}: use hyper[name] in training_loss, as a tensor (no .item())",
                stacklevel=4,
            )

    def _live(self, lr: float) -> Algorithm:
        """The algorithm, with the module's own training as its inner solver."""
        assert self._problem is not None
        given = self.algorithm
        solver = AsTrained(self._problem.network, lr)
        return Algorithm(solver, given.hypergradient, given.memory, given.optimizer, given.clip)

    def _log(self, trainer: L.Trainer, played: Round) -> None:
        due = trainer.global_step // max(1, getattr(trainer, "log_every_n_steps", 50))
        if due == self._logged or not trainer.loggers:
            return
        self._logged = due
        values = self.values()
        numbers = {f"hyper/{name}": value for name, value in values.items()} if len(values) <= LOGGED else {}
        numbers["tuner/validation_loss"] = float(played.loss.mean())
        numbers |= {f"tuner/{name}": float(value.mean()) for name, value in played.step.numbers.items()}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)


def _sgd_step(trainer: L.Trainer) -> float | None:
    """η of the module's own steps, where they are those of gradient descent."""
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    return float(optimizer.param_groups[0]["lr"]) if isinstance(optimizer, torch.optim.SGD) else None


def _share_of(trainer: L.Trainer) -> Share | None:
    if trainer.world_size == 1:
        return None

    def total(values: Tensor) -> Tensor:
        found: Tensor = trainer.strategy.reduce(values, reduce_op="sum")
        return found

    return Share(first=trainer.global_rank, tasks=trainer.world_size, total=total)
