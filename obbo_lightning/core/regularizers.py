"""Nonsmooth term h(λ) = l1 ‖λ‖₁ + (l2/2) ‖λ‖² of the outer objective."""

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

    >>> import torch
    >>> ElasticNet(l1=1.0, l2=2.0)(torch.tensor([[3.0, -1.0]]))
    tensor([14.])
    """

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        nonnegative("regularizer.l1", self.l1)
        nonnegative("regularizer.l2", self.l2)

    def __call__(self, outer: Tensor) -> Tensor:
        return self.l1 * outer.abs().sum(-1) + 0.5 * self.l2 * outer.square().sum(-1)


class NoRegularizer(ElasticNet):
    """h = 0.

    >>> import torch
    >>> NoRegularizer()(torch.ones(1, 3))
    tensor([0.])
    """

    def __init__(self) -> None:
        super().__init__()


class L1(ElasticNet):
    """h(λ) = weight ‖λ‖₁.

    Args:
        weight: of the absolute values.

    >>> import torch
    >>> L1(0.5)(torch.tensor([[3.0, -1.0]]))
    tensor([2.])
    """

    def __init__(self, weight: float) -> None:
        super().__init__(l1=weight)


class SquaredL2(ElasticNet):
    """h(λ) = (weight/2) ‖λ‖².

    Args:
        weight: of the squares.

    >>> import torch
    >>> SquaredL2(0.5)(torch.tensor([[3.0, -1.0]]))
    tensor([2.5000])
    """

    def __init__(self, weight: float) -> None:
        super().__init__(l2=weight)
