"""Two losses of a module, as people write them, as an online bilevel problem."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from obbo_lightning.core.blocks import Block, Blocks
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample, derive_seed
from obbo_lightning.core.validation import instance_of
from obbo_lightning.networks.flat import Factory, FlatNetwork
from obbo_lightning.networks.weights import Weights

Batch = Any  # what a loss is given: here a dict of tensors, in a Trainer whatever its loader gives
Hyper = dict[str, Tensor]
Loss = Callable[[Any, Batch, Hyper], Tensor]
Scores = Callable[[Any, Batch, Hyper], dict[str, Tensor]]


class ModuleProblem(Problem):
    """g_t(λ, β) is the training loss of a module whose parameters are β, f_t(λ, β) its validation loss.

    A loss is a function of the module, a batch and the hyperparameters by name, and returns the mean over the batch.
    The module may be used in any way, not through ``forward`` alone. A hyperparameter of one number has no axis, others
    are vectors. A task's tensors ``train_x``, ``train_y`` are ``x`` and ``y`` of the training batch, those that begin
    with ``validation_`` of the other; what has no such beginning goes with both. Mini-batches are rows of the training
    batch.

    Parameters that do not learn, and buffers, are constants; norms in training mode use the statistics of their batch
    and leave none. Dropout draws from the sample of an inner step, and is left out of hypergradients and scores. A
    block of `Weights` as long as β is where rounds with ``inner.start: outer`` start.

    Args:
        model: a module, whose weights are β_1; or a class or function that makes one without arguments.
        hyper: the blocks of λ.
        training_loss: of (module, batch, hyper).
        validation_loss: the same on other data.
        scores: what else to report, numbers by name, from (module, batch, hyper) with the tensors of a task that begin
            with ``test_``, or with those of ``validation_`` where there are none.

    >>> from obbo_lightning import OBBO, GradientDescent, Positive, online
    >>> def fit(model, batch, hyper):
    ...     shrink = sum(weight.square().sum() for weight in model.parameters())
    ...     return (model(batch["x"]) - batch["y"]).square().mean() + hyper["decay"] * shrink
    >>> def judge(model, batch, hyper):
    ...     return (model(batch["x"]) - batch["y"]).square().mean()
    >>> problem = ModuleProblem(nn.Linear(3, 1), {"decay": Positive(0.1, upper=10.0)}, fit, judge)
    >>> draw = lambda: {name: torch.randn(20, size) for name, size in
    ...     (("train_x", 3), ("train_y", 1), ("validation_x", 3), ("validation_y", 1))}
    >>> algorithm = OBBO(window=1, inner=GradientDescent(steps=10))
    >>> rounds = list(online(problem, algorithm, [draw() for _ in range(5)], problem.initial_outer(0)))
    >>> rounds[-1].step.outer.shape  # pure noise: the best decay is a large one
    torch.Size([1, 1])
    """

    def __init__(
        self,
        model: Factory | nn.Module,
        hyper: Blocks | Mapping[str, Block],
        training_loss: Loss,
        validation_loss: Loss,
        scores: Scores | None = None,
    ) -> None:
        self.network = FlatNetwork(model)
        self.hyper = hyper if isinstance(hyper, Blocks) else Blocks(instance_of("hyper", hyper, Mapping))
        self.training_loss, self.validation_loss, self.judge = training_loss, validation_loss, scores
        for name, loss in (("training_loss", training_loss), ("validation_loss", validation_loss)):
            if not callable(loss):
                raise ValueError(f"{name} must be a function of (module, batch, hyper), got {loss!r}")

    @property
    def blocks(self) -> Blocks:
        return self.hyper

    @property
    def random(self) -> bool:
        return self.network.random

    def notes(self) -> dict[str, str | int]:
        return {"parameters": self.network.size}

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return self._of_lanes("training_loss", outer, inner, batch_of(task, "train", sample), sample)

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return self._of_lanes("validation_loss", outer, inner, batch_of(task, "validation", sample), sample)

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor:
        if self._start() is not None:
            return self.inner_from_outer(outer)
        return self.network.initial(0).to(outer).expand(len(outer), -1)

    def inner_from_outer(self, outer: Tensor) -> Tensor:
        start = self._start()
        return outer if start is None else self.hyper.split(outer)[start]

    @torch.no_grad()
    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        if self.judge is None:
            return {}
        tested = any(name.startswith("test_") for name in task)
        batch = batch_of(task, "test" if tested else "validation", None)
        lanes = [
            self.network.apply(beta, self.judge, batch, self.hyper.values(at))
            for at, beta in zip(outer, inner, strict=True)
        ]
        return {name: torch.stack([torch.as_tensor(one[name]).to(inner) for one in lanes]) for name in lanes[0]}

    def _start(self) -> str | None:
        """Which block β starts from."""
        blocks = self.hyper.named.items()
        return next((name for name, b in blocks if isinstance(b, Weights) and b.size == self.network.size), None)

    def _of_lanes(self, name: str, outer: Tensor, inner: Tensor, batch: Batch, sample: Sample | None) -> Tensor:
        # a seed of its own: masks must not go with the choice of rows
        noise = None if sample is None else derive_seed(sample.seed, "dropout")
        function = getattr(self, name)
        found = [
            self.network.apply(beta, function, batch, self.hyper.values(at), noise=noise)
            for at, beta in zip(outer, inner, strict=True)
        ]
        return torch.stack([require_number(name, loss) for loss in found])


def require_number(name: str, loss: Any) -> Tensor:
    """Refuse a loss that is not the mean over its batch."""
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        what = f"the shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"{name} must return one number, a tensor without axes, got {what}")
    return loss


def batch_of(task: Task, kind: str, sample: Sample | None) -> dict[str, Tensor]:
    """The tensors of one kind without its name, ``sample.size`` rows of them where asked for, and what all share."""
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
