"""The parts by the names that configuration files and flags use."""

from typing import Any

from obbo_lightning.algorithms import ALGORITHMS
from obbo_lightning.core.domains import Box, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.core.geometry import AdaptiveDiagonal, Burg, Euclidean, NegativeEntropy
from obbo_lightning.core.hypergradients import ClosedForm, ConjugateGradient, FixedPoint, StochasticNeumann, Unrolled
from obbo_lightning.core.inner import ExactSolution, GradientDescent
from obbo_lightning.core.regularizers import L1, ElasticNet, NoRegularizer, SquaredL2
from obbo_lightning.streams.fc100 import FC100Stream
from obbo_lightning.streams.images import ImageFolderStream
from obbo_lightning.streams.market import MarketStream
from obbo_lightning.streams.quadratic import QuadraticData
from obbo_lightning.streams.synthetic import SyntheticStream

PARTS: dict[str, dict[str, type[Any]]] = {
    "algorithm": ALGORITHMS,
    "algorithm.inner": {"gradient_descent": GradientDescent, "exact": ExactSolution},
    "algorithm.hypergradient": {
        "fixed_point": FixedPoint,
        "unrolled": Unrolled,
        "conjugate_gradient": ConjugateGradient,
        "stochastic_neumann": StochasticNeumann,
        "closed_form": ClosedForm,
    },
    "algorithm.geometry": {
        "adaptive_diagonal": AdaptiveDiagonal,
        "euclidean": Euclidean,
        "negative_entropy": NegativeEntropy,
        "burg": Burg,
    },
    "algorithm.regularizer": {"none": NoRegularizer, "l1": L1, "squared_l2": SquaredL2, "elastic_net": ElasticNet},
    "algorithm.domain": {"real": RealSpace, "box": Box, "nonnegative": Nonnegative, "ball": L2Ball, "simplex": Simplex},
    "data": {
        "synthetic": SyntheticStream,
        "fc100": FC100Stream,
        "images": ImageFolderStream,
        "market": MarketStream,
        "quadratic": QuadraticData,
    },
}
