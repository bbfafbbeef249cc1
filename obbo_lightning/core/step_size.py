"""``lr: auto``: an outer step size in the geometry's own units, so that it does not depend on the units of f."""

from typing import NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import Geometry

WINDOW = 50  # number of directions that the median is taken of
LARGEST = 5.0  # a direction is cut at this multiple of the median
DEFAULT_SCALE = 0.3  # s


class AutoStep(NamedTuple):
    """Step size and direction of one outer step.

    Attributes:
        rate: α_t ``[lanes, 1]``; 1 in lanes that have not moved yet.
        direction: q_t, cut where it is too large ``[lanes, d]``.
        relative: ``direction`` divided by its typical size, free of the units of f ``[lanes, d]``.
        moves: lanes in which a direction was ever seen ``[lanes, 1]``; the others stay where they are.
    """

    rate: Tensor
    direction: Tensor
    relative: Tensor
    moves: Tensor


def auto_step(
    geometry: Geometry,
    domain: Domain,
    outer: Tensor,
    direction: Tensor,
    scale: float | Tensor,
    state: dict[str, Tensor],
) -> AutoStep:
    """Return α_t = s · reach / median of unit(q) over the last 50 rounds that had a q, and q cut at 5 medians.

    ``unit`` and ``reach`` belong to the geometry. For the entropies a typical change of log λ per round is s; in
    Euclidean geometry a typical change of the coordinate that changes most is s times the size of λ or of X; and
    `AdaptiveDiagonal`, whose H_t removes the size of every coordinate (and is computed from q over its median here, so
    that ρ has no units either), moves all coordinates together by as much. The median is not affected by a single
    large q, which moves λ by at most 5 s. Rounds without a direction (skipped ones) leave no trace.

    Args:
        geometry: φ_t.
        domain: X.
        outer: λ_t ``[lanes, d]``.
        direction: q_t ``[lanes, d]``, finite.
        scale: s.
        state: ``units``, the last ones of each lane, zero where there was none yet; and ``lr``, α_t. Updated.

    >>> from obbo_lightning.domains import Box
    >>> from obbo_lightning.geometry import Euclidean
    >>> state, outer = {}, torch.zeros(1, 1)
    >>> for size in (1.0, 3.0, 100.0):
    ...     step = auto_step(Euclidean(), Box(-1.0, 1.0), outer, torch.tensor([[size]]), 0.3, state)
    >>> round(float(step.rate), 6), round(float(step.direction), 4)
    (0.02, 15.0)
    """
    unit = geometry.unit(outer, direction, domain).clamp(max=torch.finfo(outer.dtype).max)
    units = state.get("units")
    if units is None:
        units = outer.new_zeros(*outer.shape[:-1], WINDOW)
    units = torch.where(unit > 0, torch.cat([units[..., 1:], unit], -1), units)
    typical = median_of_positive(units)
    moves = typical > 0
    typical = typical.where(moves, 1.0)
    # q min(1, 5 median / unit)
    direction = direction * (LARGEST * typical / unit).clamp(max=1).where(unit > 0, 1.0)
    rate = (scale * geometry.reach(outer, domain) / typical).where(moves, 1.0)
    state.update(units=units, lr=rate.where(moves, 0.0))
    return AutoStep(rate, direction, direction / typical, moves)


def median_of_positive(values: Tensor) -> Tensor:
    """Return the median of the positive values over the last axis, which stays; 0 where there is none.

    >>> median_of_positive(torch.tensor([[0.0, 3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    tensor([[2.],
            [0.]])
    """
    ordered = values.sort(-1).values
    count = (values > 0).sum(-1, keepdim=True)
    first = values.shape[-1] - count
    low = ordered.gather(-1, (first + (count - 1) // 2).clamp(max=values.shape[-1] - 1))
    high = ordered.gather(-1, (first + count // 2).clamp(max=values.shape[-1] - 1))
    return low / 2 + high / 2  # the sum of two large values would overflow
