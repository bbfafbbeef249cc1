"""Normalisation layers by name; none of them keeps statistics from one forward pass to the next."""

from torch import nn

from obbo_lightning.core.validation import one_of

NORMS = ("batch", "group", "layer", "none")


def norm_of_images(norm: str, channels: int) -> nn.Module:
    """Return the layer for feature maps ``[n, channels, height, width]``."""
    one_of("problem.network.norm", norm, NORMS)
    if norm == "batch":
        return nn.BatchNorm2d(channels, track_running_stats=False)
    if norm == "group":
        return nn.GroupNorm(groups_of(channels), channels)
    return nn.GroupNorm(1, channels) if norm == "layer" else nn.Identity()


def norm_of_vectors(norm: str, width: int) -> nn.Module:
    """Return the layer for vectors ``[n, width]``."""
    one_of("problem.network.norm", norm, NORMS)
    if norm == "batch":
        return nn.BatchNorm1d(width, track_running_stats=False)
    if norm == "group":
        return nn.GroupNorm(groups_of(width), width)
    return nn.LayerNorm(width) if norm == "layer" else nn.Identity()


def groups_of(channels: int) -> int:
    """Return the number of groups: the largest divisor of the channels up to 32 with at least four channels each.

    >>> groups_of(64), groups_of(160), groups_of(6), groups_of(3)
    (16, 32, 1, 1)
    """
    return max((g for g in range(1, 33) if channels % g == 0 and channels // g >= 4), default=1)
