"""Estimators of the hypergradient ∇F_t(λ_t), one per file."""

from obbo_lightning.core.hypergradients.base import Estimator, Hypergradient
from obbo_lightning.core.hypergradients.closed_form import ClosedForm
from obbo_lightning.core.hypergradients.conjugate_gradient import ConjugateGradient
from obbo_lightning.core.hypergradients.fixed_point import FixedPoint
from obbo_lightning.core.hypergradients.stochastic_neumann import StochasticNeumann
from obbo_lightning.core.hypergradients.unrolled import Unrolled

__all__ = [
    "ClosedForm",
    "ConjugateGradient",
    "Estimator",
    "FixedPoint",
    "Hypergradient",
    "StochasticNeumann",
    "Unrolled",
]
