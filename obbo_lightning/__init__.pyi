# What `from obbo_lightning import …` gives; __init__.py imports each of them when it is first used.
__version__: str

from .algorithms.adam import Adam as Adam
from .algorithms.maml import ANIL as ANIL, MAML as MAML
from .algorithms.oagd import OAGD as OAGD
from .algorithms.obbo import OBBO as OBBO
from .algorithms.sgdm import SGDM as SGDM
from .algorithms.sobbo import SOBBO as SOBBO
from .algorithms.sobow import SOBOW as SOBOW
from .config.registry import register_component as register_component
from .core.algorithm import Algorithm as Algorithm, BregmanAlgorithm as BregmanAlgorithm
from .core.optimizer import BregmanProx as BregmanProx
from .core.outer_step import OuterStep as OuterStep
from .core.parameter_groups import (
    Interval as Interval,
    OnSimplex as OnSimplex,
    ParameterGroups as ParameterGroups,
    Positive as Positive,
    Real as Real,
)
from .core.problem import Problem as Problem, Task as Task
from .core.round import Round as Round, online as online, run_round as run_round
from .experiments.report import plot_comparison as plot_comparison
from .inference.model import load_model as load_model
from .inference.predictions import predict_rows as predict_rows
from .networks.flat import Weights as Weights
from .networks.hyperparameters import Hyperparameters as Hyperparameters
from .problems.few_shot import FewShot as FewShot
from .problems.forgetting import Forgetting as Forgetting
from .problems.module import ModuleProblem as ModuleProblem
from .problems.quadratic import Quadratic as Quadratic
from .problems.spline import SmoothingSpline as SmoothingSpline
from .runs.figures import plot_run as plot_run, plot_weights as plot_weights
from .streams.stream import Metric as Metric, Stream as Stream, Tasks as Tasks
from .training.checkpoints import ExactCheckpoints as ExactCheckpoints
from .training.datamodule import StreamDataModule as StreamDataModule
from .training.module import BregmanOuterStep as BregmanOuterStep, OnlineBilevelModule as OnlineBilevelModule
from .training.tuner import OnlineTuner as OnlineTuner
