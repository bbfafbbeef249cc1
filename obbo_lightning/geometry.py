"""Geometries of the outer step: distance generating functions φ_t."""

from obbo_lightning.core.geometry import (
    AdaptiveDiagonal,
    Burg,
    DiagonalQuadratic,
    Distance,
    Euclidean,
    FixedGeometry,
    Geometry,
    NegativeEntropy,
)

__all__ = [
    "AdaptiveDiagonal",
    "Burg",
    "DiagonalQuadratic",
    "Distance",
    "Euclidean",
    "FixedGeometry",
    "Geometry",
    "NegativeEntropy",
]
