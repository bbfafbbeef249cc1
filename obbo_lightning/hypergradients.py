"""Estimators of the hypergradient, and the memories that average its estimates."""

from obbo_lightning.core.hypergradients import (
    ClosedForm,
    ConjugateGradient,
    Estimator,
    FixedPoint,
    Hypergradient,
    StochasticNeumann,
    Unrolled,
)
from obbo_lightning.core.memory import HypergradientWindow, InnerState, Memory, TaskWindow
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key, Sample
from obbo_lightning.core.regret import Regret
from obbo_lightning.core.round import estimate_hypergradient

__all__ = [
    "ClosedForm",
    "ConjugateGradient",
    "Estimator",
    "FixedPoint",
    "Hypergradient",
    "HypergradientWindow",
    "InnerState",
    "Key",
    "Memory",
    "Oracle",
    "Regret",
    "Sample",
    "StochasticNeumann",
    "TaskWindow",
    "Unrolled",
    "estimate_hypergradient",
]
