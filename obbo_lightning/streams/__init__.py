"""Where tasks come from: task(t) is a function of (seed, t)."""

from obbo_lightning.streams.quadratic import QuadraticStream, Variation

__all__ = ["QuadraticStream", "Variation"]
