"""Online bilevel optimization with Bregman geometry."""

from obbo_lightning.algorithms import (
    ALGORITHMS,
    OAGD,
    OBBO,
    SGDM,
    SOBBO,
    SOBOW,
    Adam,
    make_algorithm,
    register,
)
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.allocator import keep_freed_memory
from obbo_lightning.core.domains import Box, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.core.estimates import Estimate, estimate
from obbo_lightning.core.geometry import AdaptiveDiagonal, Burg, Euclidean, NegativeEntropy
from obbo_lightning.core.hypergradients import (
    ClosedForm,
    ConjugateGradient,
    FixedPoint,
    StochasticNeumann,
    Unrolled,
)
from obbo_lightning.core.inner import ExactSolution, GradientDescent
from obbo_lightning.core.memory import HypergradientWindow, NoMemory, TaskWindow, Warm
from obbo_lightning.core.optimizer import BregmanProx, generalized_gradient
from obbo_lightning.core.outer_step import OuterStep, StepRecord
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key, Sample
from obbo_lightning.core.regret import LocalRegret
from obbo_lightning.core.regularizers import L1, ElasticNet, NoRegularizer, SquaredL2
from obbo_lightning.core.rounds import Round, online, play

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "L1",
    "OAGD",
    "OBBO",
    "SGDM",
    "SOBBO",
    "SOBOW",
    "Adam",
    "AdaptiveDiagonal",
    "Algorithm",
    "Box",
    "BregmanProx",
    "Burg",
    "ClosedForm",
    "ConjugateGradient",
    "ElasticNet",
    "Estimate",
    "Euclidean",
    "ExactSolution",
    "FixedPoint",
    "GradientDescent",
    "HypergradientWindow",
    "Key",
    "L2Ball",
    "LocalRegret",
    "NegativeEntropy",
    "NoMemory",
    "NoRegularizer",
    "Nonnegative",
    "OuterStep",
    "Problem",
    "RealSpace",
    "Round",
    "Sample",
    "Simplex",
    "SquaredL2",
    "StepRecord",
    "StochasticNeumann",
    "Task",
    "TaskWindow",
    "Unrolled",
    "Warm",
    "estimate",
    "generalized_gradient",
    "keep_freed_memory",
    "make_algorithm",
    "online",
    "play",
    "register",
]
