"""Contract suites, for the package's own components and for yours."""

from obbo_lightning.testing.algorithm import check_algorithm
from obbo_lightning.testing.geometry import check_geometry
from obbo_lightning.testing.problem import central_difference, check_problem
from obbo_lightning.testing.stream import check_stream

__all__ = ["central_difference", "check_algorithm", "check_geometry", "check_problem", "check_stream"]
