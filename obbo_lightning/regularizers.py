"""Regularizers h of the outer variable."""

from obbo_lightning.core.regularizers import L1, ElasticNet, NoRegularizer, SquaredL2

__all__ = ["L1", "ElasticNet", "NoRegularizer", "SquaredL2"]
