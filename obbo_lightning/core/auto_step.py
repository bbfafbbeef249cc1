"""``lr: auto``: an outer step in the geometry's own units, so that f need not have any."""

from typing import NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import Geometry

ROUNDS = 50  # how many directions the median is taken of
CUT = 5.0  # times the median: what is larger has blown up
SCALE = 0.3  # s, where nobody says another


class AutoStep(NamedTuple):
    """What one step is taken with.

    Attributes:
        rate: α_t ``[lanes, 1]``; 1 in lanes that have not moved yet.
        direction: q_t, cut where it has blown up ``[lanes, d]``.
        relative: the same divided by its typical size, for what must not depend on the units of f ``[lanes, d]``.
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
    """α_t = s · reach / median of unit(q) over the last 50 rounds that had a q; q is cut at 5 times that median.

    What unit and reach are is the geometry's to say. For the entropies α_t makes a typical change of log λ a round s;
    in Euclidean geometry a typical change of the coordinate that changes most is s times the size of λ or of X; and
    `AdaptiveDiagonal`, whose H_t takes the size out of every coordinate (and is that of q over its median here, so that
    ρ has no units either), moves λ by as much in all coordinates together. Medians forget, and a single q that blows
    up neither moves them nor λ by more than 5 s. Rounds without a direction (skipped ones) leave no trace.

    Args:
        geometry: φ_t.
        domain: X.
        outer: λ_t ``[lanes, d]``.
        direction: q_t ``[lanes, d]``, finite.
        scale: s.
        state: ``units``, the last ones of each lane, zero where there was none yet; and ``lr``, α_t. Updated.

    >>> from obbo_lightning import Euclidean, Box
    >>> state, outer = {}, torch.zeros(1, 1)
    >>> for size in (1.0, 3.0, 100.0):
    ...     step = auto_step(Euclidean(), Box(-1.0, 1.0), outer, torch.tensor([[size]]), 0.3, state)
    >>> round(float(step.rate), 6), round(float(step.direction), 4)
    (0.02, 15.0)
    """
    unit = geometry.unit(outer, direction, domain).clamp(max=torch.finfo(outer.dtype).max)
    units = state.get("units")
    if units is None:
        units = outer.new_zeros(*outer.shape[:-1], ROUNDS)
    units = torch.where(unit > 0, torch.cat([units[..., 1:], unit], -1), units)
    typical = median_of_positive(units)
    moves = typical > 0
    typical = typical.where(moves, 1.0)
    # q min(1, 5 median / unit)
    direction = direction * (CUT * typical / unit).clamp(max=1).where(unit > 0, 1.0)
    rate = (scale * geometry.reach(outer, domain) / typical).where(moves, 1.0)
    state.update(units=units, lr=rate.where(moves, 0.0))
    return AutoStep(rate, direction, direction / typical, moves)


def median_of_positive(values: Tensor) -> Tensor:
    """The median of those that are positive, over the last axis, which stays; 0 where none is.

    >>> median_of_positive(torch.tensor([[0.0, 3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    tensor([[2.],
            [0.]])
    """
    ordered = values.sort(-1).values
    count = (values > 0).sum(-1, keepdim=True)
    first = values.shape[-1] - count
    low = ordered.gather(-1, (first + (count - 1) // 2).clamp(max=values.shape[-1] - 1))
    high = ordered.gather(-1, (first + count // 2).clamp(max=values.shape[-1] - 1))
    return low / 2 + high / 2  # the sum of two large ones would overflow
