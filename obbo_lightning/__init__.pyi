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
from .core.blocks import (
    Block as Block,
    Blocks as Blocks,
    Interval as Interval,
    OnSimplex as OnSimplex,
    Positive as Positive,
    Real as Real,
)
from .core.domains import (
    Box as Box,
    Domain as Domain,
    L2Ball as L2Ball,
    Nonnegative as Nonnegative,
    RealSpace as RealSpace,
    Simplex as Simplex,
)
from .core.estimates import Estimate as Estimate, estimate as estimate
from .core.geometry import (
    AdaptiveDiagonal as AdaptiveDiagonal,
    Burg as Burg,
    Distance as Distance,
    Euclidean as Euclidean,
    FixedGeometry as FixedGeometry,
    Geometry as Geometry,
    NegativeEntropy as NegativeEntropy,
)
from .core.hypergradients.base import Estimator as Estimator, Hypergradient as Hypergradient
from .core.hypergradients.closed_form import ClosedForm as ClosedForm
from .core.hypergradients.conjugate_gradient import ConjugateGradient as ConjugateGradient
from .core.hypergradients.fixed_point import FixedPoint as FixedPoint
from .core.hypergradients.stochastic_neumann import StochasticNeumann as StochasticNeumann
from .core.hypergradients.unrolled import Unrolled as Unrolled
from .core.inner import (
    ExactSolution as ExactSolution,
    GradientDescent as GradientDescent,
    InnerSolver as InnerSolver,
)
from .core.memory import (
    HypergradientWindow as HypergradientWindow,
    Memory as Memory,
    NoMemory as NoMemory,
    TaskWindow as TaskWindow,
    Warm as Warm,
)
from .core.momentum import InnerAdam as InnerAdam, InnerSGD as InnerSGD
from .core.optimizer import (
    BregmanProx as BregmanProx,
    generalized_gradient as generalized_gradient,
)
from .core.outer_step import OuterStep as OuterStep, StepRecord as StepRecord
from .core.problem import Problem as Problem, Task as Task
from .core.randomness import Key as Key, Sample as Sample
from .core.regret import Regret as Regret
from .core.regularizers import (
    L1 as L1,
    ElasticNet as ElasticNet,
    NoRegularizer as NoRegularizer,
    SquaredL2 as SquaredL2,
)
from .core.rounds import Round as Round, online as online, play as play
from .core.rules import BregmanRule as BregmanRule, ProjectedRule as ProjectedRule
from .metrics import LocalRegret as LocalRegret
from .networks.cnn4 import CNN4 as CNN4
from .networks.hyperparameters import Hyperparameters as Hyperparameters
from .networks.mlp import MLP as MLP
from .networks.resnet12 import ResNet12 as ResNet12
from .networks.weights import Weights as Weights
from .parts import names_of as names_of, part as part, register as register
from .plots import plot_comparison as plot_comparison, plot_run as plot_run, plot_weights as plot_weights
from .problems.few_shot import FewShot as FewShot
from .problems.forgetting import Forgetting as Forgetting
from .problems.module import ModuleProblem as ModuleProblem
from .problems.quadratic import Quadratic as Quadratic
from .problems.spline import SmoothingSpline as SmoothingSpline
from .serving.forecast import Forecast as Forecast, forecast as forecast
from .serving.learned import Adapted as Adapted, Learned as Learned, LearnedNetwork as LearnedNetwork, load as load
from .serving.rows import RowForecast as RowForecast, predict_rows as predict_rows
from .streams.few_shot import FewShotStream as FewShotStream
from .streams.follow import FollowStream as FollowStream
from .streams.forgetting import ForgettingStream as ForgettingStream
from .streams.quadratic import QuadraticStream as QuadraticStream
from .streams.stream import Metric as Metric, Stream as Stream
from .streams.tasks import Tasks as Tasks, TaskSequence as TaskSequence
from .training.allocator import keep_freed_memory as keep_freed_memory
from .training.checkpoints import ExactCheckpoints as ExactCheckpoints
from .training.datamodule import StreamDataModule as StreamDataModule
from .training.module import OnlineBilevelModule as OnlineBilevelModule
from .training.outer_step import BregmanOuterStep as BregmanOuterStep
from .training.tuner import OnlineTuner as OnlineTuner
