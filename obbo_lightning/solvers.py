"""Inner solvers."""

from obbo_lightning.core.inner_solvers import ExactSolution, GradientDescent, InnerAdam, InnerSGD, InnerSolver

__all__ = ["ExactSolution", "GradientDescent", "InnerAdam", "InnerSGD", "InnerSolver"]
