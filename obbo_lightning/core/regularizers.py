"""Nonsmooth term h(λ) = l1 ‖λ‖₁ + (l2/2) ‖λ‖² of the outer objective.

>>> import torch
>>> [h(torch.tensor([[3.0, -1.0]])).item() for h in (NoRegularizer(), L1(0.5), SquaredL2(0.5), ElasticNet(1.0, 2.0))]
[0.0, 2.0, 2.5, 14.0]
"""

from dataclasses import dataclass

from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.validation import nonnegative


@dataclass(frozen=True)
class ElasticNet(Configurable):
    """h(λ) = l1 ‖λ‖₁ + (l2/2) ‖λ‖², per lane.

    Args:
        l1: weight of the absolute values.
        l2: weight of the squares.
    """

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        nonnegative("regularizer.l1", self.l1)
        nonnegative("regularizer.l2", self.l2)

    def __call__(self, outer: Tensor) -> Tensor:
        return self.l1 * outer.abs().sum(-1) + 0.5 * self.l2 * outer.square().sum(-1)


class NoRegularizer(ElasticNet):
    """h = 0."""

    def __init__(self) -> None:
        super().__init__()


class L1(ElasticNet):
    """h(λ) = weight ‖λ‖₁.

    Args:
        weight: of the absolute values.
    """

    def __init__(self, weight: float) -> None:
        super().__init__(l1=weight)


class SquaredL2(ElasticNet):
    """h(λ) = (weight/2) ‖λ‖².

    Args:
        weight: of the squares.
    """

    def __init__(self, weight: float) -> None:
        super().__init__(l2=weight)
