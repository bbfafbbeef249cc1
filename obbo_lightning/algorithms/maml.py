"""MAML and ANIL through learn2learn: second-order meta-gradients of plain adaptation, for few-shot problems."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.algorithms.adam import Adam
from obbo_lightning.algorithms.learn2learn import Adaptation, MetaGradient, load_learn2learn
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.geometry import Euclidean
from obbo_lightning.core.hypergradients import Estimator
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.optimizer import projected_optimizer
from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups
from obbo_lightning.core.validation import positive


@dataclass(frozen=True, eq=False, kw_only=True)
class MAML(Algorithm):
    """K steps from λ_t on the support examples, the gradient through all of them, Adam; no proximal term, no window.

    Reference: Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", 2017.

    Args:
        lr: α, outer step size.
        inner: inner solver (K, η); it must start at λ_t.
        clip: largest norm of d_t.

    >>> from obbo_lightning.solvers import GradientDescent
    >>> MAML(inner=GradientDescent(steps=5, lr=0.1, start="outer")).inner  # doctest: +SKIP
    Adaptation(steps=5, lr=0.1, head_only=False)
    """

    lr: float = 1e-3
    inner: InnerSolver = None  # type: ignore[assignment]
    hypergradient: Estimator = field(default=MetaGradient(), init=False)

    head_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        load_learn2learn()
        positive("lr", self.lr)
        object.__setattr__(self, "inner", Adaptation.like(self.inner, self.head_only))
        super().__post_init__()

    def optimizer(self, outer: Parameter, groups: ParameterGroups | None = None) -> Optimizer:
        return projected_optimizer(Adam.rule, outer, [ParameterGroup(None, Euclidean(), lr=self.lr)])


class ANIL(MAML):
    """As MAML, but only the last layer adapts; λ_t is still all of the network.

    Reference: Raghu, Raghu, Bengio, Vinyals, "Rapid Learning or Feature Reuse? Towards Understanding the Effectiveness
    of MAML", 2020.

    >>> ANIL().inner  # doctest: +SKIP
    Adaptation(steps=5, lr=0.1, head_only=True)
    """

    head_only = True
