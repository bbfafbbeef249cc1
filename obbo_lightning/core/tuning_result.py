"""Whether learned hyperparameters helped: the held-out gain of their steps, and how far they moved."""

import copy
import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.domains import Box, Domain, Simplex
from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups
from obbo_lightning.core.round import Round

AT_A_BOUND = 1e-3  # relative distance to a bound that counts as reached
CONFIDENCE = 0.95  # of an interval around the gain that must not hold 0
SIGNIFICANT = 2.0  # standard errors, of a gain that every round measures with examples of its own
NEW_EXAMPLES = 8  # number of subsets of the rounds whose sums are compared, where every round has new examples
MOST_VALUES = 6  # that a line shows


class TuningResult:
    """Estimate, for each parameter group, of how much its steps from λ_1 to λ_T lowered the validation loss.

    Every fold k of the validation examples measures the whole path of λ, at the rounds t_1 < t_2 < … that it gives the
    hypergradient of, with t_0 = 1:

        A_k = −Σ_i ⟨d_{t_i}, λ_{t_i} − λ_{t_{i−1}}⟩                ≈ F_k(λ_1) − F_k(λ_T)

    F_k is the validation loss of fold k after training has responded to λ, as it is at the time of each round. Their
    mean Ā is too good by what λ has learned of the examples' noise: λ − λ_1 is −b times the mean hypergradient of the
    folds, noise included, which makes Ā too large by b σ²/K in each coordinate, where σ² is the variance of that
    coordinate between folds. Since the standard error s of Ā is b |mean| σ/√K in this coordinate, b σ²/K = s²/Ā, and

        gain = Σ_coordinates Ā − s²/max(Ā, s),                    where Ā > 0
        standard error: that of the mean of the folds' sums over coordinates; Student's t with K − 1 degrees of freedom

    Where every round has new examples there is nothing to subtract, and the rounds modulo 8 take the place of folds.
    Sums are over ends of intervals, so for a convex F and without noise the gain is a lower bound, exact for short
    steps. On the simplex hypergradients are centred, because a constant changes nothing.

    Args:
        folds: K; 1: there are no folds, and a gain is that on the very examples that produced it.
        new_examples: whether every round has new examples.
    """

    def __init__(self, folds: int = 1, new_examples: bool = False) -> None:
        self.new_examples = new_examples
        self.folds = NEW_EXAMPLES if new_examples else folds
        self.count = self.skipped = 0
        self.visits = [0] * self.folds
        self.start: Tensor | None = None  # λ_1 [d]
        self.final: Tensor | None = None  # λ_T [d]
        self.seen: Tensor | None = None  # λ at the last visit of each fold [K, d]
        self.gains: Tensor | None = None  # A_k of each coordinate [K, d]
        self._groups: dict[str, ParameterGroup] = {}
        self._slices: dict[str, slice] = {}  # of λ
        self._named: dict[str, slice] = {}  # of the coordinates here

    @property
    def held_out(self) -> bool:
        """Whether a gain can be told from noise."""
        return self.folds > 1

    def attach(self, groups: ParameterGroups) -> None:
        """Tell the groups of λ; the weights of a network are not reported one by one, and are left out."""
        self._groups = {name: group for name, group in groups.named.items() if group.has_named_coordinates}
        self._slices = {name: groups.slices[name] for name in self._groups}
        ends = [0, *accumulate(group.size for group in self._groups.values())]
        self._named = {name: slice(*ends[i : i + 2]) for i, name in enumerate(self._groups)}

    def add(self, before: Tensor, finished: Round, fold: int = 0) -> None:
        """Count an outer step from ``before``, λ_t; several lanes count by their mean."""
        point, self.final = self._select(before), self._select(finished.outer)
        if self.start is None or self.seen is None or self.gains is None:
            self.start, self.seen = point, point.repeat(self.folds, 1)
            self.gains = torch.zeros_like(self.seen)
        k = self.count % self.folds if self.new_examples else fold
        self.count += 1
        if bool(finished.skipped.any()):
            self.skipped += 1
            return  # the next visit of this fold measures the whole way
        hypergradient = self._select(finished.hypergradient)
        for name, where in self._named.items():
            if isinstance(self._groups[name].domain, Simplex):
                hypergradient[where] -= hypergradient[where].mean()
        self.gains[k] -= hypergradient * (point - self.seen[k])
        self.seen[k] = point
        self.visits[k] += 1

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return gain, standard error, first and last values, and a verdict of each group."""
        if self.start is None or self.final is None or self.gains is None:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for name, where in self._named.items():
            group = self._groups[name]
            gain, error = self._gain(self.gains[:, where])
            helped = gain > 0 and gain > self._quantile() * error
            bound = bound_reached(group.domain, self.final[where])
            verdict = "helped" if helped else "no evidence that it helped"
            found[name] = {
                "gain": gain,
                "gain_se": error,
                "start": self.start[where].tolist(),
                "final": self.final[where].tolist(),
                "moved": how_far(group, self.start[where], self.final[where]),
                "helped": helped,
                "bound": bound,
                "verdict": verdict if bound is None else f"{verdict}; reached its {bound}",
            }
        return found

    def lines(self) -> list[str]:
        """Return the result in words, one line for each group."""
        lines = []
        for name, one in self.summary().items():
            gain = f"gain {one['gain']:.3g} on the examples that produced it"
            if self.held_out:
                low, high = (one["gain"] + sign * self._quantile() * one["gain_se"] for sign in (-1, 1))
                gain = f"held-out gain {one['gain']:.3g} ± {one['gain_se']:.2g} of the validation loss"
                gain += f" ({100 * CONFIDENCE:.0f} % interval {low:.3g} to {high:.3g})"
                if not math.isfinite(one["gain_se"]):
                    gain = f"{self.count} outer steps are too few to measure a held-out gain"
            moved = f"{name} {_values(one['start'])} → {_values(one['final'])} ({one['moved']})"
            lines.append(f"OnlineTuner: {moved}; {gain}: {one['verdict']}")
        if self.skipped:
            lines.append(f"OnlineTuner: {self.skipped} of {self.count} outer steps were skipped: not finite")
        return lines

    def metrics(self) -> dict[str, float]:
        """Return gains, their finite errors and verdicts for a logger."""
        numbers = {
            f"tuner/{key}/{name}": float(one[key])
            for name, one in self.summary().items()
            for key in ("gain", "gain_se", "helped")
        }
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def state_dict(self) -> dict[str, Any]:
        """Return all sums."""
        names = ("count", "skipped", "visits", "start", "final", "seen", "gains")
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))

    def _gain(self, gains: Tensor) -> tuple[float, float]:
        """Return the gain and its standard error from A ``[K, coordinates]``."""
        mean = gains.mean(0)
        if self.folds == 1:
            return float(mean.sum()), math.inf
        if not self.new_examples:
            errors = gains.std(0) / math.sqrt(self.folds)
            # s²/Ā in a coordinate that gained more than its error
            excess = errors.square() / torch.maximum(mean, errors).where(mean > 0, 1.0)
            mean = mean - excess.where((mean > 0) & (errors > 0), 0.0)
        error = float(gains.sum(1).std()) / math.sqrt(self.folds)
        return float(mean.sum()), error if min(self.visits) > 1 else math.inf

    def _quantile(self) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.folds - 1, (1 + CONFIDENCE) / 2)) if self.folds > 1 else math.inf

    def _select(self, outer: Tensor) -> Tensor:
        """Return the mean over lanes of the coordinates with names, in double precision."""
        row = outer.detach().mean(0)
        return torch.cat([row[where] for where in self._slices.values()] or [row[:0]]).double().cpu()


def bound_reached(domain: Domain, values: Tensor) -> str | None:
    """Return which bounds of a box its values have reached, in words; None where there is none.

    >>> bound_reached(Box(0.0, 1.0), torch.tensor([0.5, 1.0]))
    'upper bound 1'
    """
    if not isinstance(domain, Box):
        return None
    found = []
    for name, bound in (("lower", domain.lower), ("upper", domain.upper)):
        # positive numbers differ by factors
        scale = domain.upper - domain.lower if domain.lower <= 0 and math.isfinite(domain.upper) else abs(bound)
        scale = scale if math.isfinite(scale) else abs(bound)
        if math.isfinite(bound) and bool(((values - bound).abs() <= AT_A_BOUND * scale).any()):
            found.append(f"{name} bound {bound:g}")
    return " and its ".join(found) or None


def how_far(group: ParameterGroup, start: Tensor, final: Tensor) -> str:
    """Return in words how far values have moved: a factor, a share of the weight, or a difference."""
    if isinstance(group.domain, Simplex):
        return f"{100 * float((final - start).abs().sum()) / 2:.0f} % of the weight moved"
    if isinstance(group.domain, Box) and group.domain.lower > 0:
        logs = (final / start).log()
        return f"by a factor of {float(logs[logs.abs().argmax()].exp()):.3g}"
    change = final - start
    return f"by {float(change[change.abs().argmax()]):+.3g}"


def _values(values: list[float]) -> str:
    shown = ", ".join(f"{value:.3g}" for value in values[:MOST_VALUES])
    return shown if len(values) == 1 else f"[{shown}{', …' if len(values) > MOST_VALUES else ''}]"
