"""The losses of a module that somebody else trains."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.blocks import Blocks
from obbo_lightning.core.inner import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample
from obbo_lightning.networks.live import LiveNetwork
from obbo_lightning.problems.module import Loss, require_number


class LiveProblem(Problem):
    """g(λ, β) and f(λ, β) of a live module, on the batches ``training`` and ``validation`` of a task; one lane.

    Args:
        network: the module.
        training_loss: of (module, batch, hyper).
        validation_loss: the same on other data, in evaluation mode.
    """

    def __init__(self, network: LiveNetwork, training_loss: Loss, validation_loss: Loss) -> None:
        self.network = network
        self.training_loss, self.validation_loss = training_loss, validation_loss
        self.seed = 0  # of what draws random numbers although it should not
        self._training = torch.zeros(1)  # g where it was differentiated

    @property
    def blocks(self) -> Blocks:
        return self.network.blocks

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        if not torch.is_grad_enabled():  # to be reported, at the (λ, β) at which it was differentiated a moment ago
            return self._training
        loss = self._loss("training_loss", outer, inner, task["training"])
        self._training = loss.detach()
        return loss

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return self._loss("validation_loss", outer, inner, task["validation"])

    def _loss(self, name: str, outer: Tensor, inner: Tensor, batch: Any) -> Tensor:
        batch = as_precise(batch, outer.dtype)
        with torch.autocast(outer.device.type, enabled=False):
            loss = self.network.apply(
                outer[0], inner[0], getattr(self, name), batch, seed=self.seed, judging=name == "validation_loss"
            )
        return require_number(name, loss).reshape(1)


@dataclass(frozen=True)
class AsTrained(InnerSolver):
    """The weights that the module has: its own training is the inner solver.

    Attributes:
        network: the module.
        lr: η of a fixed point.
    """

    network: LiveNetwork
    lr: float

    @property
    def step_size(self) -> float | None:
        return self.lr

    def __call__(self, oracle: Oracle, previous: Tensor | None) -> Tensor:
        return self.network.flat().unsqueeze(0)


def as_precise(batch: Any, dtype: torch.dtype) -> Any:
    """The same batch, with its floating-point tensors in this dtype, however it is nested."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: as_precise(value, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(as_precise(value, dtype) for value in batch))
    return type(batch)(as_precise(value, dtype) for value in batch) if isinstance(batch, (list, tuple)) else batch
