"""``lr: auto``: an outer step size in the geometry's own units, so that it does not depend on the units of f."""

from typing import NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import Geometry, Rate

WINDOW = 50  # number of directions that the median is taken of
LARGEST = 5.0  # a direction is cut at this multiple of the median
DEFAULT_SCALE = 0.3  # s


class AutoStep(NamedTuple):
    """Step size and direction of one outer step."""

    rate: Tensor  # α_t [lanes, 1]; 1 in lanes that have not moved yet
    direction: Tensor  # q_t, cut where it is too large [lanes, d]
    relative: Tensor  # direction divided by its typical size, free of the units of f [lanes, d]
    moves: Tensor  # lanes in which a direction was ever seen [lanes, 1]; the others stay where they are


def auto_step(
    geometry: Geometry, domain: Domain, outer: Tensor, direction: Tensor, scale: Rate, state: dict[str, Tensor]
) -> AutoStep:
    """Return α_t = s · reach / median of unit(q) over the last 50 rounds that had a q, and q cut at 5 medians.

    ``unit`` and ``reach`` belong to the geometry. A typical step:

    - entropies: log λ changes by s;
    - Euclidean: the coordinate that changes most moves by s times the size of λ or of X;
    - `AdaptiveDiagonal`: all coordinates together move by as much. H_t is computed from q over its median.

    A single large q hardly changes the median and moves λ by at most 5 s. Skipped rounds do not count.

    ``state`` is updated: ``units``, the last ones of each lane, zero where there was none yet; and ``lr``, α_t.
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
    """Return the median of the positive values over the last axis, which stays; 0 where there is none."""
    ordered = values.sort(-1).values
    count = (values > 0).sum(-1, keepdim=True)
    first = values.shape[-1] - count
    low = ordered.gather(-1, (first + (count - 1) // 2).clamp(max=values.shape[-1] - 1))
    high = ordered.gather(-1, (first + count // 2).clamp(max=values.shape[-1] - 1))
    return low / 2 + high / 2  # the sum of two large values would overflow
