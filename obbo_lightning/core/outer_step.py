"""From the hypergradients of a round to the new outer variable."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import Exchange
from obbo_lightning.core.optimizer import BregmanProx, auto_metrics
from obbo_lightning.core.oracle import require_finite, require_outer
from obbo_lightning.core.parameter_groups import ParameterGroups
from obbo_lightning.core.regret import GROUP_REGRETS, REGRETS, Regret
from obbo_lightning.core.step_size import Fold
from obbo_lightning.core.validation import at_least, one_of


@dataclass(frozen=True, eq=False, kw_only=True)
class OuterUpdate:
    """Result of an outer step.

    Attributes:
        hypergradient: d_t, zero in skipped lanes ``[lanes, d]``.
        direction: q_t, clipped ``[lanes, d]``.
        generalized_gradient: G_X(λ_t, q_t, α) ``[lanes, d]``; None for outer rules that are no Bregman step.
        regret: by the names of `REGRETS`, so far ``[lanes]``, None where it is not known; where λ has several
            parameter groups also ``euclidean/NAME``.
        hypergradient_error: ‖d_t − ∇F_t(λ_t)‖ ``[lanes]`` where the problem has ∇F_t, else None.
        skipped: lanes whose hypergradient, or whose λ after the step, was not finite ``[lanes]``.
        outer: λ_{t+1} ``[lanes, d]``, a copy.
        step_metrics: ``held_out_gain``; where α is auto ``lr``, ``scale`` and ``agreement`` (α_t, s_t, c_t); ‖G_X‖ of
            each of several groups, ``generalized_norm`` ``[lanes]``. Where λ has groups, with ``/NAME``.
    """

    hypergradient: Tensor
    direction: Tensor
    generalized_gradient: Tensor | None
    regret: dict[str, Tensor | None]
    hypergradient_error: Tensor | None
    skipped: Tensor
    outer: Tensor
    step_metrics: dict[str, Tensor]


class OuterStep:
    """From hypergradients to λ_{t+1}: non-finite policy → memory → clip → optimizer → regret.

    Args:
        outer: λ, updated in place.
        algorithm: determines the memory, the optimizer and the clipping.
        regret_window: w_R, window of the regret: it belongs to the experiment, the same for every algorithm.
        on_nonfinite: ``raise``, or ``skip``: the window gets a zero for the lane, and every regret counts the round
            before once more, so that divergence does not lower it; a lane whose step overflows keeps λ_t.
        optimizer: of λ, where the caller has created it from the algorithm already.
        apply: takes the optimizer's step, where that is more than ``optimizer.step()``.
        groups: parameter groups of λ, where it has them.
        folds: number of disjoint folds of validation examples that rounds use in turn; 1: new examples in every round.

    >>> from obbo_lightning import SGDM
    >>> step = OuterStep(Parameter(torch.ones(1, 2)), SGDM(lr=0.5))
    >>> step(torch.tensor([[[1.0, -1.0]]])).outer  # d_t of one round and one lane
    tensor([[0.5000, 1.5000]])
    """

    def __init__(
        self,
        outer: Parameter,
        algorithm: Algorithm,
        regret_window: int = 10,
        on_nonfinite: str = "raise",
        optimizer: Optimizer | None = None,
        apply: Callable[..., Any] | None = None,
        groups: ParameterGroups | None = None,
        folds: int = 1,
    ) -> None:
        require_outer(outer)
        require_finite("outer start", outer.detach())
        at_least("regret_window", regret_window, 1)
        self.outer = outer
        self.clip = algorithm.clip
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.memory = algorithm.memory()
        self.optimizer = optimizer or algorithm.optimizer(outer, groups)
        self._apply: Callable[..., Any] = apply or self.optimizer.step
        self.folds = at_least("folds", folds, 1)
        self.groups = groups.slices if groups is not None and len(groups.slices) > 1 else {}
        self._named = (
            {"": slice(None)} if groups is None else {f"/{name}": where for name, where in groups.slices.items()}
        )
        self._moved: Tensor | None = None  # λ_t − λ_{t−1}
        windows = dict.fromkeys(REGRETS, 1) | {"euclidean": regret_window, "exact": regret_window}
        self.regret = {name: Regret(windows[name], self.groups if name in GROUP_REGRETS else None) for name in REGRETS}

    @torch.no_grad()
    def __call__(self, hypergradients: Tensor, exact: Tensor | None = None, fold: int = 0) -> OuterUpdate:
        """Update λ from the hypergradients ``[rounds, lanes, d]`` of what was solved, this round's own last.

        ``fold`` is the number of the validation examples that gave this round's hypergradient.
        """
        if hypergradients.ndim != 3 or hypergradients.shape[1:] != self.outer.shape:
            raise ValueError(
                f"hypergradients must have shape [rounds, {', '.join(map(str, self.outer.shape))}], "
                f"got {tuple(hypergradients.shape)}"
            )
        finite = hypergradients.isfinite().all(-1)  # [rounds, lanes]
        known, skipped = {"euclidean": finite[-1]}, ~finite.all(0)
        self._refuse_nonfinite(skipped, "hypergradient is not finite", "inner.lr, a stronger inner curvature")
        hypergradients = hypergradients.where(finite.unsqueeze(-1), 0.0)
        if exact is not None:
            known["exact"] = exact.isfinite().all(-1)
            exact = exact.where(known["exact"].unsqueeze(-1), 0.0)
        direction = self._clip(self.memory.merge(hypergradients))
        before = self.outer.detach().clone()
        # The last step, tested on examples that did not produce it: f(λ_{t−1}) − f(λ_t) ≈ −⟨d_t, λ_t − λ_{t−1}⟩
        tested = -hypergradients[-1] * (torch.zeros_like(before) if self._moved is None else self._moved)
        self.outer.grad = direction
        if getattr(self.optimizer, "takes_evidence", False):
            self._apply(newest=hypergradients[-1], fold=Fold(fold, self.folds))
        else:
            self._apply()
        self.outer.grad = None
        overflowed = ~self.outer.isfinite().all(-1)
        if bool(overflowed.any()):
            self.outer.copy_(before.where(overflowed.unsqueeze(-1), self.outer))  # also before raising
        self._refuse_nonfinite(
            overflowed, "outer variable is not finite after its step", "lr, a clip, a bounded domain"
        )
        self._moved = self.outer.detach() - before
        generalized = lengths = None
        if isinstance(self.optimizer, BregmanProx):
            generalized = self.optimizer.generalized_gradient(before, self.outer)
            lengths = self.optimizer.lengths
            lengths = None if lengths is None else lengths.where(lengths.isfinite(), 0.0)  # the step was undone
        skipped = skipped | overflowed
        known |= {"generalized": ~skipped, "geometry": ~skipped}  # of steps, which a skipped lane has not taken
        vectors = {"euclidean": hypergradients[-1], "generalized": generalized, "exact": exact, "geometry": lengths}
        regret = {n: None if v is None else self.regret[n].add(v, known.get(n)) for n, v in vectors.items()}
        metrics = auto_metrics(self.optimizer, self.outer)
        metrics |= {f"held_out_gain{suffix}": tested[:, where].sum(-1) for suffix, where in self._named.items()}
        for name in GROUP_REGRETS:
            regret |= {f"{name}/{group}": self.regret[name].group_totals.get(group) for group in self.groups}
        if generalized is not None:
            metrics |= {f"generalized_norm/{name}": generalized[:, w].norm(dim=-1) for name, w in self.groups.items()}
        return OuterUpdate(
            hypergradient=hypergradients[-1],
            direction=direction,
            generalized_gradient=generalized,
            regret=regret,
            hypergradient_error=None if exact is None else (hypergradients[-1] - exact).norm(dim=-1),
            skipped=skipped,
            outer=self.outer.detach().clone(),
            step_metrics=metrics,
        )

    def _refuse_nonfinite(self, lanes: Tensor, what: str, remedies: str) -> None:
        if self.on_nonfinite == "raise" and bool(lanes.any()):
            bad = lanes.nonzero().flatten().tolist()
            raise FloatingPointError(
                f"{what} in {len(bad)} of {len(lanes)} lanes (first: {bad[:5]}); use a smaller {remedies}, or "
                "on_nonfinite 'skip'"
            )

    def _clip(self, direction: Tensor) -> Tensor:
        if self.clip is None:
            return direction
        # Divide by the largest entry first: the square of a huge entry would overflow.
        largest = direction.abs().amax(-1, keepdim=True).clamp(min=self.clip)
        norm = (direction / largest).norm(dim=-1, keepdim=True)
        return torch.where(norm * largest > self.clip, direction / largest * (self.clip / norm), direction)

    def state_dict(self, gather: Exchange | None = None) -> dict[str, Any]:
        """Return memory, optimizer and regret; the outer variable belongs to the owner of the parameter.

        Where several processes share a round, ``gather`` turns the tasks of this one into those of all (`Memory`).
        """
        memory = copy.copy(self.memory)
        if gather is not None:
            memory.exchange(gather)
        return {
            "memory": memory.state_dict(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),  # torch returns its live tensors
            "regret": {name: regret.state_dict() for name, regret in self.regret.items()},
            "moved": None if self._moved is None else self._moved.clone(),
        }

    def load_state_dict(self, state: dict[str, Any], select: Exchange | None = None) -> None:
        """Continue from `state_dict`; ``select`` turns the tasks of all processes into those of this one."""
        self.memory.load_state_dict(state["memory"])
        if select is not None:
            self.memory.exchange(select)
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would share its tensors
        for name, regret in self.regret.items():
            regret.load_state_dict(state["regret"][name])
        self._moved = None if state["moved"] is None else state["moved"].to(self.outer.device)
