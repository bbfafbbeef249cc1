"""``lr: auto``: an outer step size that grows with evidence, free of the units of f.

A step is tested on validation examples that did not produce it: the examples are divided into folds, one after the
other gives the hypergradient of a round, and c_t compares it with the directions of the other folds' last steps. Where
every round has new examples, every round is such a test.

    M_t = average size of q, memory 0.99;                 r_t = q_t / M_t, cut at 2 (on the simplex at 5)
    c_t = cosine of d_t and U_{−k} = Σ_{j ≠ k} U_j, times min(1, size of d_t / M_t)
    log s_t = 0.97 log s_{t−1} + 0.03 log 0.05 + log(1 + 0.32 c_t n / (n + 1)),  s_0 = 0.08,  0.01 ≤ s_t ≤ 1
    α_t = s_t · reach(λ_t) · max(0, cosine of d_t and q_t) / M_t
    U_j ← 0.7 U_j for all j,  U_k ← U_k + r_t

with k the fold of round t, and n the number of coordinates, one less on the simplex: the cosine of two numbers is their
sign, which proves less than agreement in many coordinates. Cosines are those of the geometry at λ_t
(`Distance.inner_weights`). The last factor of α_t is 1 without a window; with one it is small where the newest
hypergradient contradicts the averaged direction, so that a window cannot push λ past its optimum. Where there is a
regularizer h, d_t and what λ moves along include its slope, in the units of f.

c_t is positive where steps learned on some examples help on others, around 0 where they follow noise, and negative
where they are too long: s_t grows from 0.08 to 1 in 11 rounds of full agreement in many coordinates, in 27 in
one, and falls faster.

Directions in many coordinates are nearly orthogonal: above n = 100 both cosines are multiplied by √n/10, by 10 at most,
and cut at ±1. Above 1,000 coordinates, the weights of a network, s_0 and log 0.05 become 0.2 and log 0.2: noise in one
of so many coordinates does little harm, and evidence of a few percent per round cannot make up for steps that are too
short.

A step that is too long makes a training diverge where λ is a number without bounds, and does no lasting harm on the
simplex. So elsewhere M_t is at least the average of the last few sizes: a hypergradient that grows does not lengthen
the steps.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.domains import Domain, Simplex
from obbo_lightning.core.geometry import Distance, Geometry

DEFAULT_SCALE = 0.08  # first s
NEUTRAL = 0.05  # s where there is no evidence either way
NEUTRAL_OF_MANY, MANY = 0.2, 1000  # the same, of more than so many coordinates
SMALLEST, LARGEST = 0.01, 1.0  # of s
GROWTH = 0.32  # of s in a round of full agreement in many coordinates
SCALE_MEMORY = 0.97  # of log s
SIZE_MEMORY = 0.99  # of M
MOVE_MEMORY = 0.7  # of U
CUT, CUT_ON_SIMPLEX = 2.0, 5.0  # largest q, in units of M
RECENT_MEMORY = 0.5  # of the least M outside the simplex
OUTLIER = 10.0  # largest size that counts for it, in units of M
# tensors of a group between steps
STATE = ("sizes", "weights", "recent", "moves", "log_scale", "agreement", "reach", "lr")


class Fold(NamedTuple):
    """Which validation examples gave a hypergradient.

    Attributes:
        number: of the fold, from 0.
        folds: number of disjoint folds, which are used again and again; 1: every round has new examples.
    """

    number: int = 0
    folds: int = 1


NEW_EXAMPLES = Fold()


class Measured(NamedTuple):
    """A direction in units of the typical one.

    Attributes:
        direction: what the geometry steps along, q_t cut where it is too large ``[lanes, d]``.
        relative: r_t ``[lanes, d]``.
        typical: M_t ``[lanes, 1]``; 1 in lanes without any direction so far.
        moves: lanes in which a direction was ever seen ``[lanes, 1]``; the others stay where they are.
    """

    direction: Tensor
    relative: Tensor
    typical: Tensor
    moves: Tensor


def measure(geometry: Geometry, domain: Domain, outer: Tensor, direction: Tensor, state: dict[str, Any]) -> Measured:
    """Return q_t in units of M_t, and update M_t in ``state``; skipped rounds, whose q is zero, do not count."""
    info, on_simplex = torch.finfo(outer.dtype), isinstance(domain, Simplex)
    cut = CUT_ON_SIMPLEX if on_simplex else CUT
    unit = geometry.unit(outer, direction, domain).clamp(max=info.max)
    seen = unit >= info.tiny  # a subnormal q has lost its digits, and 1/q may overflow
    total, weight = state.get("sizes", torch.zeros_like(unit)), state.get("weights", torch.zeros_like(unit))

    def at_most(times: float) -> Tensor:
        # (x / w) times rather than times x / w, which would overflow earlier
        limit = (total / weight.where(weight > 0, 1.0) * times).where(weight > 0, unit)
        return torch.minimum(unit, limit.clamp(max=info.max))

    last = state.get("recent", torch.zeros_like(unit))
    recent = (RECENT_MEMORY * last + (1 - RECENT_MEMORY) * at_most(OUTLIER)).where(seen, last)
    # M_t = Σ 0.99^i u_{t−i} / Σ 0.99^i, in which an outlier counts as a cut one
    size = at_most(cut)
    total = torch.where(seen, SIZE_MEMORY * total + (1 - SIZE_MEMORY) * size, total)
    weight = torch.where(seen, SIZE_MEMORY * weight + (1 - SIZE_MEMORY), weight)
    state.update(sizes=total, weights=weight, recent=recent)
    moves = weight > 0
    typical = total / weight.where(moves, 1.0)
    typical = (typical if on_simplex else torch.maximum(typical, recent)).where(moves, 1.0)
    direction = geometry.auto_direction(outer, direction, domain)
    direction = direction * (cut * typical / unit.where(seen, typical)).clamp(max=1)
    direction = direction.where(seen, 0.0)
    return Measured(direction, direction / typical, typical, moves)


def auto_length(
    geometry: Geometry,
    distance: Distance,
    domain: Domain,
    outer: Tensor,
    newest: Tensor,
    measured: Measured,
    move: Tensor,
    fold: Fold,
    first: float,
    state: dict[str, Any],
) -> Tensor:
    """Return s_t · reach · max(0, cosine) ``[lanes, 1]``: α_t for directions in units of M_t; 0 where λ stays.

    Args:
        geometry: of the steps.
        distance: φ_t.
        domain: X.
        outer: λ_t ``[lanes, d]``.
        newest: d_t, the hypergradient of one fold ``[lanes, d]``, plus the slope of h.
        measured: of q_t.
        move: what λ moves against: r_t plus the slope of h, or what a torch optimizer makes of r_t ``[lanes, d]``.
        fold: of d_t.
        first: s_0.
        state: updated: ``log_scale``, ``agreement``, ``moves``, ``reach`` and ``lr``.
    """
    reach, weights = geometry.reach(outer, domain), distance.inner_weights(outer, domain)
    free = outer.shape[-1] - isinstance(domain, Simplex)
    neutral = NEUTRAL if free <= MANY else NEUTRAL_OF_MANY
    if "moves" not in state:
        start = math.log(min(max(first, neutral if free > MANY else SMALLEST), LARGEST))
        state.update(moves=move.new_zeros(fold.folds, *move.shape), reach=reach)
        state["log_scale"] = torch.full_like(reach, start)
    if len(state["moves"]) != fold.folds:
        raise ValueError(f"folds must be {len(state['moves'])} to continue, got {fold.folds}")
    size = geometry.unit(outer, newest, domain)
    newest = geometry.auto_direction(outer, newest, domain)
    present = (size > 0) & measured.moves
    newest = newest / newest.abs().amax(-1, keepdim=True).where(present, 1.0)  # its squares neither overflow nor vanish
    # c_t: d_t of fold k against the last moves of the other folds
    others = state["moves"].sum(0)
    if fold.folds > 1:
        others = others - state["moves"][fold.number]
    sharpness = min(max(free**0.5 / 10, 1.0), 10.0)
    agreement = (sharpness * cosine(newest, others, weights, domain)).clamp(-1, 1)
    agreement = agreement * (size / measured.typical).clamp(max=1)
    # log s_t = 0.97 log s_{t−1} + 0.03 log 0.05 + log(1 + 0.32 c_t n / (n + 1))
    growth = GROWTH * free / (free + 1)
    log_scale = SCALE_MEMORY * state["log_scale"] + (1 - SCALE_MEMORY) * math.log(neutral)
    log_scale = (log_scale + (growth * agreement).log1p()).clamp(math.log(SMALLEST), math.log(LARGEST))
    log_scale = log_scale.where(present, state["log_scale"])
    # Without bounds the reach is the size of λ, which must not vanish when λ passes 0.
    reach = torch.maximum(reach, SIZE_MEMORY * state["reach"])
    length = log_scale.exp() * reach * (sharpness * cosine(newest, move, weights, domain)).clamp(0, 1)
    length = length.where(measured.moves, 0.0)
    moves = MOVE_MEMORY * state["moves"]
    moves[fold.number] += move
    moves = moves.where(present, state["moves"])  # a skipped round is no evidence
    state.update(log_scale=log_scale, agreement=agreement, moves=moves, reach=reach, lr=length / measured.typical)
    return length


def cosine(first: Tensor, second: Tensor, weights: Tensor, domain: Domain) -> Tensor:
    """Return the cosine of two vectors in the inner product Σ w_i x_i y_i ``[lanes, 1]``; 0 where one vanishes.

    On the simplex a constant changes nothing, so vectors are centred.

    >>> x, y = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5.0, 7.0, 9.0]])
    >>> cosine(x, y, torch.ones(1, 3), Simplex())
    tensor([[1.]])
    """
    if isinstance(domain, Simplex):
        total = weights.sum(-1, keepdim=True)
        first = first - (weights * first).sum(-1, keepdim=True) / total
        second = second - (weights * second).sum(-1, keepdim=True) / total

    def inner(x: Tensor, y: Tensor) -> Tensor:
        return (weights * x * y).sum(-1, keepdim=True)

    norms = inner(first, first).sqrt() * inner(second, second).sqrt()
    return (inner(first, second) / norms.where(norms > 0, 1.0)).clamp(-1, 1)
