"""What f_t and g_t are."""

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.problems.quadratic import Quadratic

__all__ = ["Problem", "Quadratic", "Task"]
