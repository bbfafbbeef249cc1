"""Bilevel problems from two losses of a module, on tasks of a stream or on the batches of its own training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample, derive_seed
from obbo_lightning.core.step_map import StepMap
from obbo_lightning.core.validation import instance_of
from obbo_lightning.networks.flat import Factory, FlatNetwork, Weights
from obbo_lightning.networks.hyperparameters import FunctionalModule

Batch = Any  # here a dict of tensors, in a Trainer whatever its loader gives
Hyper = dict[str, Tensor]
Loss = Callable[[Any, Batch, Hyper], Tensor]
Scores = Callable[[Any, Batch, Hyper], dict[str, Tensor]]


class ModuleProblem(Problem):
    """g_t(λ, β) is the training loss of a module whose parameters are β, f_t(λ, β) its validation loss.

    A loss is a function of the module, a batch and the hyperparameters by name, and returns the mean over the batch.
    A loss may use the module in any way, not only through ``forward``. A hyperparameter of one number has no axis,
    others are vectors. A task's tensors ``train_x``, ``train_y`` are ``x`` and ``y`` of the training batch, those with
    the prefix ``validation_`` of the validation batch; tensors without a prefix belong to both. Mini-batches are rows
    of the training batch.

    Parameters that are not trained, and buffers, are constants; norms in training mode use the statistics of their
    batch and record none. Dropout draws from the sample of an inner step, and is left out of hypergradients and scores.
    A parameter group of `Weights` as long as β is where rounds with ``inner.start: outer`` start.

    Args:
        model: a module, whose weights are β_1; or a class or function without arguments that makes one.
        hyper: the parameter groups of λ.
        training_loss: of (module, batch, hyper).
        validation_loss: of (module, batch, hyper), on other data.
        scores: further numbers to report, by name, of (module, batch, hyper), on the tensors of a task with the prefix
            ``test_``, or ``validation_`` where there are none.

    >>> from obbo_lightning import Positive
    >>> validate = lambda model, batch, hyper: (model(batch["x"]) - batch["y"]).square().mean()
    >>> fit = lambda model, batch, hyper: validate(model, batch, hyper) + hyper["decay"] * model.weight.square().sum()
    >>> ModuleProblem(nn.Linear(3, 1), {"decay": Positive(0.1, upper=10.0)}, fit, validate).initial_outer(0)
    tensor([[0.1000]])
    """

    def __init__(
        self,
        model: Factory | nn.Module,
        hyper: ParameterGroups | Mapping[str, ParameterGroup],
        training_loss: Loss,
        validation_loss: Loss,
        scores: Scores | None = None,
    ) -> None:
        self.network = FlatNetwork(model)
        self.is_stochastic = self.network.is_stochastic
        if not isinstance(hyper, ParameterGroups):
            hyper = ParameterGroups(instance_of("hyper", hyper, Mapping))
        self.groups = self.hyper = hyper
        self.training_loss, self.validation_loss, self.score_function = training_loss, validation_loss, scores
        for name, loss in (("training_loss", training_loss), ("validation_loss", validation_loss)):
            if not callable(loss):
                raise ValueError(f"{name} must be a function of (module, batch, hyper), got {loss!r}")

    def notes(self) -> dict[str, str | int]:
        return {"parameters": self.network.size}

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        found = self._of_lanes(self.training_loss, outer, inner, batch_of(task, "train", sample), sample)
        return torch.stack([require_number("training_loss", loss) for loss in found])

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        found = self._of_lanes(self.validation_loss, outer, inner, batch_of(task, "validation", sample), sample)
        return torch.stack([require_number("validation_loss", loss) for loss in found])

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor:
        if self._start() is not None:
            return self.inner_from_outer(outer)
        return self.network.initial(0).to(outer).expand(len(outer), -1)

    def inner_from_outer(self, outer: Tensor) -> Tensor:
        start = self._start()
        return outer if start is None else self.hyper.split(outer)[start]

    @torch.no_grad()
    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        if self.score_function is None:
            return {}
        tested = any(name.startswith("test_") for name in task)
        batch = batch_of(task, "test" if tested else "validation", None)
        lanes = self._of_lanes(self.score_function, outer, inner, batch)
        return {name: torch.stack([torch.as_tensor(one[name]).to(inner) for one in lanes]) for name in lanes[0]}

    def _start(self) -> str | None:
        """Return the parameter group that β starts from."""
        weights = {name: group for name, group in self.hyper.named.items() if isinstance(group, Weights)}
        return next((name for name, group in weights.items() if group.size == self.network.size), None)

    def _of_lanes(
        self, function: Callable[..., Any], outer: Tensor, inner: Tensor, batch: Batch, sample: Sample | None = None
    ) -> list[Any]:
        # its own seed: dropout masks must not depend on the choice of rows
        noise = None if sample is None else derive_seed(sample.seed, "dropout")
        rows = zip(outer, inner, strict=True)
        return [self.network.apply(beta, function, batch, self.hyper.values(at), noise=noise) for at, beta in rows]


class TrainedModuleProblem(Problem):
    """g(λ, β) and f(λ, β) of a module in training, on the batches ``training`` and ``validation`` of a task; one lane.

    Losses are functions of (module, batch, hyper); the module is in evaluation mode for the validation loss.
    """

    groups: ParameterGroups

    def __init__(self, network: FunctionalModule, training_loss: Loss, validation_loss: Loss) -> None:
        self.network, self.groups = network, network.groups
        self.training_loss, self.validation_loss = training_loss, validation_loss
        self.seed = 0  # of losses that draw random numbers
        self._training = torch.zeros(1)  # g where it was differentiated last

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        if not torch.is_grad_enabled():  # reported only, at the (λ, β) at which it has just been differentiated
            return self._training
        loss = self._loss("training_loss", outer, inner, task["training"])
        self._training = loss.detach()
        return loss

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return self._loss("validation_loss", outer, inner, task["validation"])

    def training_slope(self, outer: Tensor, task: Task) -> Tensor:
        """Return ∇_λ g ``[1, d]`` at the present weights of the module."""
        with torch.enable_grad():
            outer = outer.detach().requires_grad_()
            loss = self._loss("training_loss", outer, self.network.flat().unsqueeze(0), task["training"])
            if not loss.requires_grad:
                return torch.zeros_like(outer)
            return torch.autograd.grad(loss.sum(), outer, materialize_grads=True)[0]

    def _loss(self, name: str, outer: Tensor, inner: Tensor, batch: Any) -> Tensor:
        batch = cast_floats(batch, outer.dtype)
        with torch.autocast(outer.device.type, enabled=False):
            loss = self.network.apply(
                outer[0], inner[0], getattr(self, name), batch, seed=self.seed, evaluating=name == "validation_loss"
            )
        return require_number(name, loss).reshape(1)


@dataclass(frozen=True)
class CurrentWeights(InnerSolver):
    """The weights that the module has now: its own training is the inner solver.

    Args:
        network: the module.
        training_map: what one step of its optimizer does.
    """

    network: FunctionalModule
    training_map: StepMap

    def __repr__(self) -> str:
        return "CurrentWeights()"  # those of a network do not belong into an error message

    @property
    def step_map(self) -> StepMap | None:
        return self.training_map

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        return self.network.flat().unsqueeze(0)


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return a nested batch with its floating-point tensors in this dtype."""
    return tree_map_only(Tensor, lambda values: values.to(dtype) if values.is_floating_point() else values, batch)


def require_number(name: str, loss: Any) -> Tensor:
    """Return a loss; refuse one that is not a single number."""
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        what = f"the shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"{name} must return one number, a tensor without axes, got {what}")
    return loss


def batch_of(task: Task, kind: str, sample: Sample | None) -> dict[str, Tensor]:
    """Return the tensors with one prefix, without it, and those without any; ``sample.size`` rows of a sample."""
    kinds = ("train_", "validation_", "test_")
    batch = {name.removeprefix(f"{kind}_"): values for name, values in task.items() if name.startswith(f"{kind}_")}
    if not batch:
        raise ValueError(f"task must have tensors that begin with {kind}_, got {', '.join(task)}")
    if sample is not None and sample.size is not None:
        lengths = {len(values) for values in batch.values()}
        if len(lengths) != 1:
            raise ValueError(f"task must have as many rows in each {kind}_ tensor for mini-batches, got {lengths}")
        rows = sample.indices(lengths.pop(), next(iter(batch.values())).device)
        batch = {name: values[rows] for name, values in batch.items()}
    return {name: values for name, values in task.items() if not name.startswith(kinds)} | batch
