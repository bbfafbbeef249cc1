"""Feasible sets X of the outer variable."""

from obbo_lightning.core.domains import Box, Domain, L2Ball, Nonnegative, RealSpace, Simplex

__all__ = ["Box", "Domain", "L2Ball", "Nonnegative", "RealSpace", "Simplex"]
