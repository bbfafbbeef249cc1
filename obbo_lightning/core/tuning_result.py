"""Whether learned hyperparameters helped: the held-out gain of their steps, and how far they moved."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.domains import Box, Domain, Simplex
from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups
from obbo_lightning.core.round import Round

AT_A_BOUND = 1e-3  # relative distance to a bound that counts as reached
SIGNIFICANT = 2.0  # standard errors
MOST_VALUES = 6  # that a line shows


class TuningResult:
    """Sums over outer steps, and a verdict at the end, for each parameter group.

    The gain of a step is −⟨d_{t+1}, λ_{t+1} − λ_t⟩, to first order how much lower the step made the validation loss of
    the next outer step, whose examples did not produce it.

    Args:
        held_out: whether the examples of consecutive outer steps are disjoint.
    """

    def __init__(self, held_out: bool = True) -> None:
        self.held_out = held_out
        self.count = self.skipped = 0
        self.start: dict[str, list[float]] = {}
        self.final: dict[str, list[float]] = {}
        self.sums: dict[str, list[float]] = {}  # of gains, and of their squares
        self._groups: dict[str, ParameterGroup] = {}

    def add(self, before: Tensor, finished: Round, groups: ParameterGroups) -> None:
        """Count an outer step from ``before``, λ_t; several lanes count by their means."""
        # the weights of a network are not reported one by one
        self._groups = {name: group for name, group in groups.named.items() if group.has_named_coordinates}
        for values, outer in ((self.start, before), (self.final, finished.outer)):
            if values is self.final or not values:
                by_name = groups.split(outer.mean(0))
                values.update({name: by_name[name].tolist() for name in self._groups})
        self.count += 1
        self.skipped += int(finished.skipped.any())
        for name in self._groups:
            gain = float(finished.step_metrics[f"held_out_gain/{name}"].mean())
            total, squares = self.sums.get(name, [0.0, 0.0])
            self.sums[name] = [total + gain, squares + gain**2]

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return gain, standard error, first and last values, and a verdict of each group."""
        found = {}
        for name, group in self._groups.items():
            total, squares = self.sums[name]
            start, final = torch.tensor(self.start[name]), torch.tensor(self.final[name])
            error = standard_error_of_sum(self.count, total, squares)
            bound = bound_reached(group.domain, final)
            verdict = "helped" if self.held_out and total > SIGNIFICANT * error else "no evidence that it helped"
            found[name] = {
                "gain": total,
                "gain_se": error,
                "start": self.start[name],
                "final": self.final[name],
                "moved": how_far(group, start, final),
                "verdict": verdict if bound is None else f"{verdict}; reached its {bound}",
            }
        return found

    def lines(self) -> list[str]:
        """Return the result in words, one line for each group."""
        kind = "held-out gain" if self.held_out else "gain on the examples that produced it"
        lines = [
            f"OnlineTuner: {name} {_values(one['start'])} → {_values(one['final'])} ({one['moved']}); {kind} "
            f"{one['gain']:.3g} ± {one['gain_se']:.2g} of the validation loss, summed over steps: {one['verdict']}"
            for name, one in self.summary().items()
        ]
        if self.skipped:
            lines.append(f"OnlineTuner: {self.skipped} of {self.count} outer steps were skipped: not finite")
        return lines

    def metrics(self) -> dict[str, float]:
        """Return gains and errors for a logger."""
        return {f"tuner/{key}/{name}": one[key] for name, one in self.summary().items() for key in ("gain", "gain_se")}

    def state_dict(self) -> dict[str, Any]:
        """Return all sums."""
        return {name: copy.deepcopy(getattr(self, name)) for name in ("count", "skipped", "start", "final", "sums")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


def standard_error_of_sum(count: int, total: float, squares: float) -> float:
    """Return the standard error of a sum of ``count`` independent terms, from their sum and sum of squares.

    >>> standard_error_of_sum(4, 4.0, 4.0)  # four equal terms
    0.0
    """
    if count < 2:
        return math.inf
    return math.sqrt(max(squares - total**2 / count, 0.0) * count / (count - 1))


def bound_reached(domain: Domain, values: Tensor) -> str | None:
    """Return which bound of a box a value has reached, in words; None where there is none.

    >>> bound_reached(Box(0.0, 1.0), torch.tensor([0.5, 1.0]))
    'upper bound 1'
    """
    if not isinstance(domain, Box):
        return None
    for name, bound in (("lower", domain.lower), ("upper", domain.upper)):
        scale = abs(bound) if domain.lower > 0 else domain.upper - domain.lower  # positive numbers differ by factors
        if math.isfinite(scale) and bool(((values - bound).abs() <= AT_A_BOUND * scale).any()):
            return f"{name} bound {bound:g}"
    return None


def how_far(group: ParameterGroup, start: Tensor, final: Tensor) -> str:
    """Return in words how far values have moved: a factor, a share of the weight, or a difference."""
    if isinstance(group.domain, Simplex):
        return f"{100 * float((final - start).abs().sum()) / 2:.0f} % of the weight moved"
    if bool((start > 0).all()) and bool((final > 0).all()) and isinstance(group.domain, Box) and group.domain.lower > 0:
        logs = (final / start).log()
        return f"by a factor of {float(logs[logs.abs().argmax()].exp()):.3g}"
    change = final - start
    return f"by {float(change[change.abs().argmax()]):+.3g}"


def _values(values: list[float]) -> str:
    shown = ", ".join(f"{value:.3g}" for value in values[:MOST_VALUES])
    return shown if len(values) == 1 else f"[{shown}{', …' if len(values) > MOST_VALUES else ''}]"
