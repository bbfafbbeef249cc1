# What `from obbo_lightning import …` gives; __init__.py imports each of them when it is first asked for.
__version__: str

from .algorithms.adam import Adam as Adam
from .algorithms.anil import ANIL as ANIL
from .algorithms.maml import MAML as MAML
from .algorithms.oagd import OAGD as OAGD
from .algorithms.obbo import OBBO as OBBO
from .algorithms.sgdm import SGDM as SGDM
from .algorithms.sobbo import SOBBO as SOBBO
from .algorithms.sobow import SOBOW as SOBOW
from .core.algorithm import Algorithm as Algorithm
from .core.domains import (
    Box as Box,
)
from .core.domains import (
    Domain as Domain,
)
from .core.domains import (
    L2Ball as L2Ball,
)
from .core.domains import (
    Nonnegative as Nonnegative,
)
from .core.domains import (
    RealSpace as RealSpace,
)
from .core.domains import (
    Simplex as Simplex,
)
from .core.estimates import Estimate as Estimate
from .core.estimates import estimate as estimate
from .core.geometry import (
    AdaptiveDiagonal as AdaptiveDiagonal,
)
from .core.geometry import (
    Burg as Burg,
)
from .core.geometry import (
    Distance as Distance,
)
from .core.geometry import (
    Euclidean as Euclidean,
)
from .core.geometry import (
    FixedGeometry as FixedGeometry,
)
from .core.geometry import (
    Geometry as Geometry,
)
from .core.geometry import (
    NegativeEntropy as NegativeEntropy,
)
from .core.hypergradients.base import Estimator as Estimator
from .core.hypergradients.base import Hypergradient as Hypergradient
from .core.hypergradients.closed_form import ClosedForm as ClosedForm
from .core.hypergradients.conjugate_gradient import ConjugateGradient as ConjugateGradient
from .core.hypergradients.fixed_point import FixedPoint as FixedPoint
from .core.hypergradients.stochastic_neumann import StochasticNeumann as StochasticNeumann
from .core.hypergradients.unrolled import Unrolled as Unrolled
from .core.inner import (
    ExactSolution as ExactSolution,
)
from .core.inner import (
    GradientDescent as GradientDescent,
)
from .core.inner import (
    InnerSolver as InnerSolver,
)
from .core.memory import (
    HypergradientWindow as HypergradientWindow,
)
from .core.memory import (
    Memory as Memory,
)
from .core.memory import (
    NoMemory as NoMemory,
)
from .core.memory import (
    TaskWindow as TaskWindow,
)
from .core.memory import (
    Warm as Warm,
)
from .core.optimizer import (
    BregmanProx as BregmanProx,
)
from .core.optimizer import (
    BregmanRule as BregmanRule,
)
from .core.optimizer import (
    ProjectedRule as ProjectedRule,
)
from .core.optimizer import (
    generalized_gradient as generalized_gradient,
)
from .core.outer_step import OuterStep as OuterStep
from .core.outer_step import StepRecord as StepRecord
from .core.problem import Problem as Problem
from .core.problem import Task as Task
from .core.randomness import Key as Key
from .core.randomness import Sample as Sample
from .core.regret import LocalRegret as LocalRegret
from .core.regularizers import (
    L1 as L1,
)
from .core.regularizers import (
    ElasticNet as ElasticNet,
)
from .core.regularizers import (
    NoRegularizer as NoRegularizer,
)
from .core.regularizers import (
    SquaredL2 as SquaredL2,
)
from .core.rounds import Round as Round
from .core.rounds import online as online
from .core.rounds import play as play
from .networks.cnn4 import CNN4 as CNN4
from .networks.mlp import MLP as MLP
from .networks.resnet12 import ResNet12 as ResNet12
from .parts import names_of as names_of
from .parts import part as part
from .parts import register as register
from .problems.few_shot import FewShot as FewShot
from .problems.quadratic import Quadratic as Quadratic
from .problems.spline import SmoothingSpline as SmoothingSpline
from .streams.few_shot import FewShotStream as FewShotStream
from .streams.quadratic import QuadraticStream as QuadraticStream
from .streams.stream import Metric as Metric
from .streams.stream import Stream as Stream
from .streams.tasks import Tasks as Tasks
from .streams.tasks import TaskSequence as TaskSequence
from .training.allocator import keep_freed_memory as keep_freed_memory
from .training.checkpoints import ExactCheckpoints as ExactCheckpoints
from .training.datamodule import StreamDataModule as StreamDataModule
from .training.module import OnlineBilevelModule as OnlineBilevelModule
from .training.outer_step import BregmanOuterStep as BregmanOuterStep
