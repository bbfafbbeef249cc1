"""One round, from the task to the new outer variable. Nothing else puts a round together."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.hypergradients import ClosedForm, FixedPoint, StochasticNeumann, Unrolled
from obbo_lightning.core.inner import ExactSolution, GradientDescent
from obbo_lightning.core.memory import Met, Warm
from obbo_lightning.core.optimizer import BregmanProx
from obbo_lightning.core.oracle import Oracle, require_shape
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.regret import LocalRegret
from obbo_lightning.core.share import Share, stack_warm
from obbo_lightning.core.validation import at_least, instance_of, one_of


class Estimate(NamedTuple):
    """What one task says about λ_t.

    Attributes:
        hypergradient: d_t ``[lanes, d]``.
        inner: β_{t+1} ``[lanes, p]``.
        warm: where the task's next solve starts.
        loss: f_t(λ_t, β_{t+1}) ``[lanes]``, before anything was learned from the task by λ.
        residual: of the linear system, relative ``[lanes]``.
        calls: oracle calls: gradients and second-derivative products.
    """

    hypergradient: Tensor
    inner: Tensor
    warm: Warm
    loss: Tensor
    residual: Tensor
    calls: dict[str, int]


class StepRecord(NamedTuple):
    """What the outer step did.

    Attributes:
        hypergradient: d_t after the reduction over ranks, zero in skipped lanes ``[lanes, d]``.
        direction: q_t, clipped ``[lanes, d]``.
        generalized: G_X(λ_t, q_t, α) ``[lanes, d]``; None for outer rules that are no Bregman step.
        regret: euclidean, generalized (or None) and exact (or None), so far ``[lanes]``.
        hypergradient_error: ‖d_t − ∇F_t(λ_t)‖ ``[lanes]`` where the problem knows ∇F_t, else None.
        skipped: lanes whose hypergradient was not finite ``[lanes]``.
        outer: λ_{t+1} ``[lanes, d]``, a copy.
    """

    hypergradient: Tensor
    direction: Tensor
    generalized: Tensor | None
    regret: dict[str, Tensor | None]
    hypergradient_error: Tensor | None
    skipped: Tensor
    outer: Tensor


class Round(NamedTuple):
    """A round that was played.

    Attributes:
        estimate: of the round's own task; where it has several, means over them, and the first one's inner variable.
        step: what became of it.
        inner_loss: g_t(λ_t, β_{t+1}) on the round's own task ``[lanes]``.
        scores: what else the problem reports of λ_t on the round's own task, such as accuracy ``[lanes]``.
        calls: oracle calls of the whole round, past tasks included.
        warms: where the next round starts, for each of this process's tasks.
    """

    estimate: Estimate
    step: StepRecord
    inner_loss: Tensor
    scores: dict[str, Tensor]
    calls: dict[str, int]
    warms: list[Warm]


class OuterStep:
    """From hypergradients to λ_{t+1}: reduce → non-finite → memory → clip → optimizer → regret.

    Args:
        outer: λ, updated in place.
        algorithm: brings the memory, the outer rule and the clipping.
        regret_window: w_R, the yardstick's window: it belongs to the experiment, the same for every algorithm.
        on_nonfinite: ``raise``, or ``skip``: the lane's d_t becomes zero, as for rounds before the first.
        share: what this process computes of a round, where several share it.
        optimizer: the outer rule, where somebody else has made it from the algorithm already.
        apply: takes the optimizer's step, where that is more than ``optimizer.step()``.
    """

    def __init__(
        self,
        outer: Parameter,
        algorithm: Algorithm,
        regret_window: int = 10,
        on_nonfinite: str = "raise",
        share: Share | None = None,
        optimizer: Optimizer | None = None,
        apply: Callable[[], Any] | None = None,
    ) -> None:
        if outer.ndim != 2 or not outer.is_floating_point():
            raise ValueError(
                f"outer must be a floating-point parameter [lanes, d], got {outer.dtype} of shape {tuple(outer.shape)}"
            )
        if not bool(outer.detach().isfinite().all()):
            raise ValueError(
                f"outer start must be finite, got {int((~outer.detach().isfinite()).sum())} values that are not"
            )
        at_least("regret_window", regret_window, 1)
        self.outer = outer
        self.clip = algorithm.clip
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.share = share or Share()
        self.memory = algorithm.memory()
        self.optimizer = optimizer or algorithm.optimizer(outer)
        self._apply = apply or self.optimizer.step
        # Every rank sees the same reduced values: there is nothing to synchronise.
        self.regret = {
            "euclidean": LocalRegret(regret_window, sync_on_compute=False),
            "generalized": LocalRegret(1, sync_on_compute=False),
            "exact": LocalRegret(regret_window, sync_on_compute=False),
        }

    @torch.no_grad()
    def __call__(self, hypergradients: Tensor, exact: Tensor | None = None) -> StepRecord:
        """Learn from the hypergradients ``[solved, lanes, d]`` of one round, the round's own task last."""
        if hypergradients.ndim != 3 or hypergradients.shape[1:] != self.outer.shape:
            raise ValueError(
                f"hypergradients must have shape [solved, {', '.join(map(str, self.outer.shape))}], "
                f"got {tuple(hypergradients.shape)}"
            )
        hypergradients, exact = self._reduced(hypergradients, exact)
        hypergradients, skipped = self._finite(hypergradients)
        if exact is not None:
            exact = exact.where(exact.isfinite().all(-1, keepdim=True), 0.0)
        direction = self._clipped(self.memory.merge(hypergradients))
        before = self.outer.detach().clone()
        self.outer.grad = direction
        self._apply()
        self.outer.grad = None
        generalized = None
        if isinstance(self.optimizer, BregmanProx):
            # G_X(λ_t, q_t, α) = (λ_t − λ_{t+1})/α
            generalized = (before - self.outer) / self.optimizer.param_groups[0]["lr"]
        regret = {
            "euclidean": self._accumulate("euclidean", hypergradients[-1]),
            "generalized": self._accumulate("generalized", generalized),
            "exact": self._accumulate("exact", exact),
        }
        error = None if exact is None else (hypergradients[-1] - exact).norm(dim=-1)
        return StepRecord(
            hypergradients[-1], direction, generalized, regret, error, skipped, self.outer.detach().clone()
        )

    def _reduced(self, hypergradients: Tensor, exact: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One sum over all processes. What is not finite in one is then not finite in any: all decide together."""
        if exact is None:
            return self.share.sum(hypergradients), None
        together = self.share.sum(torch.cat([hypergradients, exact.unsqueeze(0)]))
        return together[:-1], together[-1]

    def _finite(self, hypergradients: Tensor) -> tuple[Tensor, Tensor]:
        finite = hypergradients.isfinite().all(-1)  # [solved, lanes]
        if self.on_nonfinite == "raise" and not bool(finite.all()):
            lanes = (~finite).any(0).nonzero().flatten().tolist()
            raise FloatingPointError(
                f"hypergradient is not finite in {len(lanes)} of {finite.shape[1]} lanes (first: {lanes[:5]}); "
                f"use a smaller inner.lr, a stronger inner curvature, or on_nonfinite 'skip'"
            )
        return hypergradients.where(finite.unsqueeze(-1), 0.0), (~finite).any(0)

    def _clipped(self, direction: Tensor) -> Tensor:
        if self.clip is None:
            return direction
        # The largest entry is taken out first: the square of a huge one would overflow.
        largest = direction.abs().amax(-1, keepdim=True).clamp(min=self.clip)
        norm = (direction / largest).norm(dim=-1, keepdim=True)
        return torch.where(norm * largest > self.clip, direction / largest * (self.clip / norm), direction)

    def _accumulate(self, name: str, vectors: Tensor | None) -> Tensor | None:
        if vectors is None:
            return None
        self.regret[name].update(vectors)
        return self.regret[name].compute().reshape(-1)  # torchmetrics squeezes a single lane

    def state_dict(self) -> dict[str, Any]:
        """Memory, optimizer and regret; the outer variable belongs to whoever owns the parameter."""
        return {
            "memory": self.memory.state_dict(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),  # torch hands out its live tensors
            "regret": {name: dict(metric.state_dict()) for name, metric in self.regret.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.memory.load_state_dict(state["memory"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would share its tensors
        for name, metric in self.regret.items():
            metric.load_state_dict(dict(state["regret"][name]))


def estimate(problem: Problem, algorithm: Algorithm, outer: Tensor, task: Task, warm: Warm, key: Key) -> Estimate:
    """The hypergradient of one task at λ. Pure: the same arguments give the same estimate."""
    oracle = Oracle(problem, outer, task, key)
    first = warm.inner
    if first is None and algorithm.inner.carries:
        first = problem.initial_inner(outer, task)
    found = algorithm.hypergradient(oracle, algorithm.inner, first, warm.solve)
    carried = Warm(
        _last_finite(found.inner, first) if algorithm.inner.carries else None,
        _last_finite(found.solve, warm.solve),
    )
    return Estimate(found.value, found.inner, carried, found.loss, found.residual, oracle.calls)


def play(
    problem: Problem,
    algorithm: Algorithm,
    step: OuterStep,
    task: Task | Sequence[Task],
    warm: Warm | Sequence[Warm],
    key: Key,
) -> Round:
    """One round: λ_t meets its task, is judged on it, learns from it. The next round starts from ``warms``.

    A round may have several tasks, each with its own warm start: d_t is then the mean of their hypergradients.
    """
    tasks = [task] if isinstance(task, dict) else list(task)
    met = list(zip(tasks, [warm] * len(tasks) if isinstance(warm, Warm) else warm, strict=True))
    share, outer = step.share, step.outer.detach()
    recalled = step.memory.recall(met)
    solved = [
        _solve(problem, algorithm, share, outer, past, key._replace(task=len(recalled) - 1 - i))
        for i, past in enumerate(recalled)
    ]
    if algorithm.hypergradient.contracts:
        _warn_if_diverging(torch.cat([one.estimate.residual for past in solved for one in past]))
    whole = _Whole(share, len(outer), share.tasks or len(met))
    newest = solved[-1]
    # d_t = (1/n) Σ_j d_{t,j}
    hypergradients = torch.stack([whole.mean([one.estimate.hypergradient for one in past]) for past in solved])
    exact = None if newest[0].exact is None else whole.mean([one.exact for one in newest if one.exact is not None])
    reported = {
        "loss": whole.mean([one.estimate.loss for one in newest]),
        "residual": whole.mean([one.estimate.residual for one in newest]),
        "inner_loss": whole.mean([one.inner_loss for one in newest]),
        **{f"scores.{name}": whole.mean([one.scores[name] for one in newest]) for name in newest[0].scores},
    }
    calls = {
        name: sum(one.estimate.calls[name] for past in solved for one in past) for name in ("gradients", "products")
    }
    reported, calls = whole.reduced(reported, calls)
    record = step(hypergradients, exact)
    ended = [[share.spread_warm(one.estimate.warm, len(outer)) for one in past] for past in solved]
    step.memory.keep([[(t, w) for (t, _), w in zip(*pair, strict=True)] for pair in zip(recalled, ended, strict=True)])
    estimate_of_all = newest[0].estimate._replace(
        hypergradient=hypergradients[-1], loss=reported["loss"], residual=reported["residual"], warm=ended[-1][0]
    )
    scores = {name.partition(".")[2]: value for name, value in reported.items() if name.startswith("scores.")}
    return Round(estimate_of_all, record, reported["inner_loss"], scores, calls, ended[-1])


class _Solved(NamedTuple):
    """One task, and what is reported of it; all in the lanes of this process."""

    estimate: Estimate
    inner_loss: Tensor
    scores: dict[str, Tensor]
    exact: Tensor | None


def _solve(
    problem: Problem, algorithm: Algorithm, share: Share, outer: Tensor, met: list[Met], key: Key
) -> list[_Solved]:
    """The tasks of one round at λ_t."""
    together = None
    if share.side_by_side and algorithm.side_by_side and len(met) > 1:
        together = problem.side_by_side([task for task, _ in met])
    if together is not None:
        lanes = estimate(
            problem, algorithm, outer.expand(len(met), -1), together, stack_warm([warm for _, warm in met]), key
        )
        estimates = [_lane(lanes, j) for j in range(len(met))]
    else:
        estimates = []
        for j, (task, warm) in enumerate(met):
            mine, its_outer, its_task, its_warm = share.view(problem, outer, task, warm)
            slot = key._replace(slot=share.first + j)
            estimates.append(estimate(mine, algorithm, its_outer, its_task, its_warm, slot))
    solved = []
    for found, (task, warm) in zip(estimates, met, strict=True):
        if key.task:  # of an earlier round: nobody asks
            solved.append(_Solved(found, found.loss, {}, None))
            continue
        mine, its_outer, its_task, _ = share.view(problem, outer, task, warm)
        known = algorithm.hypergradient.exact
        exact = found.hypergradient if known else _exact_hypergradient(mine, its_outer, its_task)
        with torch.no_grad():  # to be reported, not learned from
            inner_loss = mine.inner_loss(its_outer, found.inner, mine.laid_out(its_task))
        solved.append(_Solved(found, inner_loss, mine.scores(its_outer, found.inner, its_task), exact))
    return solved


def _lane(found: Estimate, j: int) -> Estimate:
    """One of several tasks that were solved side by side; a call for all was a call for each."""
    row = slice(j, j + 1)
    warm = Warm(*(None if v is None else v[row] for v in (found.warm.inner, found.warm.solve)))
    return Estimate(found.hypergradient[row], found.inner[row], warm, found.loss[row], found.residual[row], found.calls)


class _Whole(NamedTuple):
    """From what this process has to what the round is."""

    share: Share
    lanes: int
    tasks: int

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """This process's part of the mean over the round's tasks, in all lanes."""
        total = values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
        return self.share.spread(total if self.tasks == 1 else total / self.tasks, self.lanes)

    def reduced(self, values: dict[str, Tensor], calls: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What is reported, in one sum over all processes; processes that divide lanes make the same calls."""
        if self.share.total is None:
            return values, calls
        like = next(iter(values.values()))
        part = 1.0 if self.share.lanes is None else (self.share.lanes.stop - self.share.lanes.start) / self.lanes
        rows = [*values.values(), *(torch.full_like(like, part * count) for count in calls.values())]
        found = self.share.sum(torch.stack(rows))
        counts = found[len(values) :, 0].round().int().tolist()
        return dict(zip(values, found, strict=False)), dict(zip(calls, counts, strict=True))


def require_fit(problem: Problem, algorithm: Algorithm) -> None:
    """Refuse an algorithm that asks a problem for what it does not have, before the first round."""
    name = type(problem).__name__
    solver, estimator = algorithm.inner, algorithm.hypergradient
    estimator.require_fit(problem)
    if isinstance(estimator, ClosedForm):
        if type(problem).hypergradient is Problem.hypergradient:
            raise ValueError(f"hypergradient 'ClosedForm' needs a closed form, and {name} has none")
        return
    if isinstance(estimator, Unrolled) and not isinstance(solver, GradientDescent):
        raise ValueError(f"hypergradient 'Unrolled' needs inner steps to go back through, got inner {solver!r}")
    if isinstance(estimator, Unrolled) and isinstance(solver, GradientDescent) and solver.precision != "full":
        raise ValueError(f"inner.precision must be full for hypergradient 'Unrolled', got {solver.precision!r}")
    if isinstance(solver, ExactSolution) and type(problem).solution is Problem.solution:
        raise ValueError(f"inner 'ExactSolution' needs a solution, and {name} has none")
    if isinstance(estimator, FixedPoint) and estimator.lr is None and solver.step_size is None:
        raise ValueError(f"hypergradient.lr must be given for inner {solver!r}, which has no step size, got None")
    unknown = type(problem).smoothness is Problem.smoothness
    if isinstance(estimator, StochasticNeumann) and estimator.smoothness is None and unknown:
        raise ValueError(f"hypergradient.smoothness must be given for {name}, which does not know its own, got None")


def online(
    problem: Problem,
    algorithm: Algorithm,
    stream: Iterable[Task | Sequence[Task]],
    outer: Tensor,
    inner: Tensor | None = None,
    seed: int = 0,
    regret_window: int = 10,
    on_nonfinite: str = "raise",
) -> Iterator[Round]:
    """Play a stream from its first task; yields every round after it was learned from.

    Args:
        problem: what f_t and g_t are.
        algorithm: what to do in a round.
        stream: the tasks, in order; any iterable, also one that never ends. A round of several tasks is a list.
        outer: λ_1 ``[lanes, d]``; a `Parameter` is updated in place, any other tensor is copied.
        inner: β_1 ``[lanes, p]``, where rounds start from the last one's inner variable.
        seed: of all randomness.
        regret_window: w_R of the reported regrets.
        on_nonfinite: ``raise`` or ``skip``.
    """
    instance_of("problem", problem, Problem)
    instance_of("algorithm", algorithm, Algorithm)
    require_fit(problem, algorithm)
    instance_of("outer", outer, Tensor)
    if not outer.is_floating_point():
        raise ValueError(f"outer must be a floating-point tensor [lanes, d], got {outer.dtype}")
    parameter = outer if isinstance(outer, Parameter) else Parameter(outer.detach().clone())
    step = OuterStep(parameter, algorithm, regret_window, on_nonfinite)
    if inner is not None:
        _require_inner(inner, parameter)
    return _rounds(problem, algorithm, stream, step, Warm(inner), seed)


def _rounds(
    problem: Problem,
    algorithm: Algorithm,
    stream: Iterable[Task | Sequence[Task]],
    step: OuterStep,
    warm: Warm,
    seed: int,
) -> Iterator[Round]:
    warms: Warm | list[Warm] = warm
    for t, task in enumerate(stream):
        played = play(problem, algorithm, step, task, warms, Key(seed, t))
        warms = played.warms if len(played.warms) > 1 else played.warms[0]
        yield played


def _exact_hypergradient(problem: Problem, outer: Tensor, task: Task) -> Tensor | None:
    known = problem.hypergradient(outer, task)
    return None if known is None else require_shape(problem, "hypergradient", known[0].detach(), outer.shape)


def _require_inner(inner: Tensor, outer: Tensor) -> None:
    instance_of("inner", inner, Tensor)
    if inner.ndim != 2 or inner.shape[0] != outer.shape[0]:
        raise ValueError(f"inner must have shape [{outer.shape[0]} lanes, p], got {tuple(inner.shape)}")
    if inner.dtype != outer.dtype:
        raise ValueError(f"inner must have the dtype of outer, {outer.dtype}, got {inner.dtype}")
    if not bool(inner.isfinite().all()):
        raise ValueError(f"inner start must be finite, got {int((~inner.isfinite()).sum())} values that are not")


def _last_finite(found: Tensor | None, before: Tensor | None) -> Tensor | None:
    """A lane that blew up starts its next round from where this one started, not from NaN."""
    if found is None:
        return None
    finite = found.isfinite().all(-1, keepdim=True)
    return found.where(finite, 0.0 if before is None else before)


def _warn_if_diverging(residual: Tensor) -> None:
    if float(residual.nan_to_num(nan=0.0).max()) > 1:  # a NaN comes from the task, an overflow is infinite
        warnings.warn(
            "the fixed point of the hypergradient does not contract (its residual grows): "
            "use a smaller inner.lr, a stronger inner curvature, or ConjugateGradient",
            RuntimeWarning,
            stacklevel=3,
        )
