"""All algorithms: their defaults, the contract suite, their definitions, and reductions to each other and to torch."""

import pytest
import torch
from toy import F64, SIX, Nonlinear, toy_point, toy_task

from obbo_lightning import OAGD, OBBO, SGDM, SOBBO, SOBOW, Adam, online
from obbo_lightning.config.registry import component_names, find_component
from obbo_lightning.core.memory import HypergradientWindow, InnerState, Memory, TaskWindow
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import estimate_hypergradient
from obbo_lightning.domains import RealSpace
from obbo_lightning.geometry import AdaptiveDiagonal, Euclidean
from obbo_lightning.hypergradients import ClosedForm, ConjugateGradient, FixedPoint, StochasticNeumann, Unrolled
from obbo_lightning.regularizers import L1
from obbo_lightning.solvers import GradientDescent, InnerSGD
from obbo_lightning.streams.quadratic import QuadraticTasks
from obbo_lightning.testing import check_algorithm

INNER = GradientDescent(steps=3, lr=0.5)
ADAPTIVE, WARM_STARTED = AdaptiveDiagonal(0.9, 1e-8), ConjugateGradient(5, warm_start=True)
# inner solver, estimator, memory with its window and discount, geometry
DEFAULTS = {
    "obbo": (GradientDescent(20, 0.1), FixedPoint(5), (HypergradientWindow, 10, 1.0), ADAPTIVE),
    "sobbo": (GradientDescent(20, 0.1, batch_size=10), StochasticNeumann(10), (HypergradientWindow, 10, 1.0), ADAPTIVE),
    "sobow": (GradientDescent(1, 0.1), WARM_STARTED, (HypergradientWindow, 10, 0.9), Euclidean()),
    "oagd": (GradientDescent(20, 0.1), FixedPoint(5), (TaskWindow, 10, None), Euclidean()),
    "adam": (GradientDescent(20, 0.1), FixedPoint(5), (Memory, None, None), None),
    "sgdm": (GradientDescent(20, 0.1), FixedPoint(5), (Memory, None, None), None),
}


def test_the_registry_has_the_algorithms_of_the_paper_and_two_of_learn2learn():
    assert sorted(DEFAULTS) == SIX
    assert sorted(component_names("algorithm")) == sorted([*SIX, "maml", "anil"])


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_papers(name):
    inner, hypergradient, expected_memory, geometry = DEFAULTS[name]
    algorithm = find_component("algorithm", name)()
    assert (algorithm.inner, algorithm.hypergradient, algorithm.clip) == (inner, hypergradient, None)
    memory = algorithm.memory()
    assert (type(memory), getattr(memory, "window", None), getattr(memory, "discount", None)) == expected_memory
    optimizer = algorithm.optimizer(torch.nn.Parameter(torch.zeros(1, 2)))
    assert optimizer.param_groups[0]["lr"] == 1e-4
    if geometry is not None:
        (group,) = optimizer.groups
        assert repr(group.geometry) == repr(geometry)
        assert (group.regularizer.l1, group.regularizer.l2, group.domain) == (0, 0, RealSpace())
    else:
        assert algorithm.geometry == ADAPTIVE  # the units of lr: auto
        key, value = ("betas", (0.9, 0.999)) if name == "adam" else ("momentum", 0.9)
        assert optimizer.param_groups[0][key] == value


SETTINGS = {
    "defaults": {},
    "window": {"window": 3},
    "clip": {"clip": 0.5},
    "closed_form": {"hypergradient": ClosedForm()},
    "unrolled": {"hypergradient": Unrolled(), "inner": INNER},
    "auto": {"lr": "auto", "scale": 0.02},
    "inner states": {"inner": InnerSGD(3, 0.5), "hypergradient": WARM_STARTED},
}
ONLY = {"window": ("obbo", "sobbo", "sobow", "oagd"), "auto": ("obbo", "sgdm")}


@pytest.mark.parametrize(
    ("name", "settings"), [(name, key) for name in SIX for key in SETTINGS if name in ONLY.get(key, SIX)]
)
def test_algorithms_keep_their_contract(name, settings):
    check_algorithm(find_component("algorithm", name), **{"lr": 1e-2} | SETTINGS[settings])


TASKS = [toy_task(seed=s) for s in range(20)]


def run(algorithm):
    return list(online(Nonlinear(), algorithm, TASKS, toy_point()))


def path(algorithm):
    return torch.stack([finished.outer for finished in run(algorithm)])


@pytest.mark.parametrize("estimator", [FixedPoint(4), WARM_STARTED, Unrolled()])
def test_euclidean_obbo_is_sobow_at_equal_inner_work(estimator):
    common = {"lr": 0.05, "window": 4, "inner": INNER, "hypergradient": estimator}
    assert torch.equal(path(OBBO(**common, geometry=Euclidean())), path(SOBOW(**common, discount=1.0)))


@pytest.mark.parametrize(("cls", "settings"), [(Adam, {}), (SGDM, {"momentum": 0.9})])
def test_adam_and_sgdm_are_torchs_own(cls, settings):
    outer = torch.nn.Parameter(toy_point())
    optimizer = (torch.optim.Adam if cls is Adam else torch.optim.SGD)([outer], lr=0.01, **settings)
    for finished in run(cls(lr=0.01, inner=INNER)):
        outer.grad = finished.hypergradient
        optimizer.step()
        assert torch.allclose(finished.outer, outer.detach(), rtol=1e-12, atol=1e-14)


def test_euclidean_obbo_with_l1_is_ista_on_the_hypergradients():
    lr, weight = 0.05, 0.4
    algorithm = OBBO(lr=lr, window=1, inner=INNER, geometry=Euclidean(), regularizer=L1(weight))
    ista = toy_point()
    for finished in run(algorithm):
        z = ista - lr * finished.hypergradient
        ista = z.sign() * (z.abs() - lr * weight).clamp(min=0)
        assert torch.allclose(finished.outer, ista, rtol=1e-13, atol=1e-15)


def test_sobbo_on_whole_tasks_with_one_term_is_a_deterministic_obbo():
    neumann = StochasticNeumann(1, smoothness=2.0, batch_size=None)
    sobbo = SOBBO(lr=0.05, window=3, inner=INNER, hypergradient=neumann)
    obbo = OBBO(lr=0.05, window=3, inner=INNER, hypergradient=FixedPoint(1, lr=0.5))
    assert torch.allclose(path(sobbo), path(obbo), rtol=1e-12)
    assert SOBBO(window=7).inner.batch_size == 7  # s = w


def test_obbo_is_its_definition():
    """Algorithm 1 with a list for the window and the formulas of the hypergradient and of the step."""
    problem, lr, window, clip = Nonlinear(), 0.05, 4, 0.02
    algorithm = OBBO(lr=lr, window=window, inner=INNER, hypergradient=FixedPoint(1), clip=clip)
    outer, inner, past, moment = toy_point(), torch.zeros(2, 3, dtype=F64), [], torch.zeros(2, 3, dtype=F64)
    for task, finished in zip(TASKS[:9], online(problem, algorithm, TASKS[:9], outer), strict=True):
        lam = outer.clone().requires_grad_()
        for _ in range(3):
            beta = inner.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(problem.inner_loss(outer, beta, task).sum(), beta)
            inner = beta.detach() - 0.5 * gradient
        beta = inner.clone().requires_grad_()
        by_outer, by_inner = torch.autograd.grad(problem.outer_loss(lam, beta, task).sum(), (lam, beta))
        (slope,) = torch.autograd.grad(problem.inner_loss(lam, beta, task).sum(), beta, create_graph=True)
        # d_t = ∇_λ f − η ∇²_λβ g · ∇_β f, the first iterate of the fixed point
        past.append(by_outer - 0.5 * torch.autograd.grad(slope, lam, by_inner)[0])
        q = sum(past[-window:]) / window
        q = q * torch.clamp(clip / q.norm(dim=-1, keepdim=True), max=1)
        moment = 0.9 * moment + 0.1 * q**2
        outer = outer - lr * q / (moment.sqrt() + 1e-8)
        assert torch.allclose(finished.direction, q, rtol=1e-10)
        assert torch.allclose(finished.outer, outer, rtol=1e-10)
        assert torch.allclose(finished.generalized_gradient, q / (moment.sqrt() + 1e-8), rtol=1e-9)


def test_oagd_is_its_definition():
    """q_t = (1/w) Σ ∇f_{t−i}(λ_t): the last w tasks are solved again, from their own inner states and at λ_t."""
    stream, window, lr = QuadraticTasks(rounds=7, condition_number=4.0), 3, 0.05
    algorithm = OAGD(lr=lr, window=window, inner=GradientDescent(steps=3, lr=1.0), hypergradient=FixedPoint(4))
    outer, states, newest = stream.initial_outer(), {}, InnerState(torch.zeros(1, 8, dtype=F64))
    for t, finished in enumerate(online(stream.problem, algorithm, stream, outer)):
        total = torch.zeros_like(outer)
        for s in range(max(0, t - window + 1), t + 1):
            state = states.get(s, newest)
            found = estimate_hypergradient(stream.problem, algorithm, outer, stream[s], state, Key(0, t))
            states[s] = found.state
            total += found.value
        newest = states[t]
        outer = stream.domain.project(outer - lr * total / window)
        assert torch.allclose(finished.outer, outer, rtol=1e-13, atol=1e-15)
        assert torch.allclose(finished.hypergradient, found.value, rtol=1e-12, atol=1e-14)


def test_tasks_are_remembered_where_a_stream_fills_one_dict_again_and_again():
    stream, algorithm = QuadraticTasks(rounds=6), OAGD(lr=0.1, window=3, inner=INNER)

    def one_dict():
        task = {}
        for fresh in stream:
            task.update(fresh)
            yield task

    arguments = stream.problem, algorithm
    one, other = (list(online(*arguments, tasks, stream.initial_outer()))[-1] for tasks in (stream, one_dict()))
    assert torch.equal(one.outer, other.outer)
