import functools

import pytest
import torch
from toy import F64, SIX, Nonlinear, toy_point, toy_task

from obbo_lightning import (
    L1,
    OBBO,
    SGDM,
    SOBBO,
    SOBOW,
    Adam,
    Algorithm,
    Box,
    ClosedForm,
    ConjugateGradient,
    Euclidean,
    FixedPoint,
    GradientDescent,
    L2Ball,
    Nonnegative,
    Simplex,
    StochasticNeumann,
    TaskWindow,
    Unrolled,
    names_of,
    online,
    part,
)
from obbo_lightning.checks import check_algorithm
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.regularizers import NoRegularizer
from obbo_lightning.core.rules import BregmanRule
from obbo_lightning.streams.quadratic import QuadraticStream

INNER = GradientDescent(steps=3, lr=0.5)


def test_the_registry_has_the_six_and_learn2learns_two():
    assert SIX == ["adam", "oagd", "obbo", "sgdm", "sobbo", "sobow"]
    assert sorted(names_of("algorithm")) == sorted([*SIX, "maml", "anil"])


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 3}, {"clip": 0.5}, {"hypergradient": ClosedForm()}, {"hypergradient": Unrolled(), "inner": INNER}],
    ids=["defaults", "window", "clip", "closed_form", "unrolled"],
)
def test_algorithm_contract(name, settings):
    if "window" in settings and name in ("adam", "sgdm"):
        with pytest.raises(TypeError, match="window"):
            part("algorithm", name)(**settings)
        return
    check_algorithm(part("algorithm", name), lr=1e-2, **settings)


class Forgetful(Algorithm):
    """Keeps its window where no state_dict finds it, and forgets nothing of the tasks it met."""

    hidden = None

    def __init__(self, lr=1e-2, domain=None):
        class Hidden(HypergradientWindow):
            def state_dict(self):
                return {}

            def load_state_dict(self, state):
                pass

        super().__init__(
            inner=INNER,
            hypergradient=ClosedForm(),
            memory=functools.partial(Hidden, 3),
            optimizer=BregmanRule(lr, Euclidean(), NoRegularizer(), domain or L2Ball(1.0)),
        )


class Escaping(OBBO):
    def __init__(self, lr=1.0, domain=None):
        super().__init__(lr=lr, hypergradient=ClosedForm())


class Spoiling(OBBO):
    """Writes into the tasks."""

    def __init__(self, lr=1e-2, domain=None):
        class Meddling(ClosedForm):
            def __call__(self, oracle, *args):
                oracle.task["b"] += 1e-3
                return super().__call__(oracle, *args)

        super().__init__(lr=lr, domain=domain, hypergradient=Meddling())


class Mixing(OBBO):
    """Lets lanes see each other."""

    def __init__(self, lr=1e-2, domain=None):
        class Averaging(ClosedForm):
            def __call__(self, *args):
                found = super().__call__(*args)
                return found._replace(value=found.value.mean(0, keepdim=True).expand_as(found.value))

        super().__init__(lr=lr, domain=domain, hypergradient=Averaging())


class Climbing(OBBO):
    def __init__(self, lr=1e-2, domain=None):
        class Uphill(ClosedForm):
            def __call__(self, *args):
                found = super().__call__(*args)
                return found._replace(value=-found.value)

        super().__init__(lr=lr, domain=domain, hypergradient=Uphill())


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Forgetful, "after a resume"),
        (Escaping, "leaves L2Ball"),
        (Spoiling, "two different outer variables|changed in place"),
        (Mixing, "neighbours"),
        (Climbing, "did not reduce"),
    ],
)
def test_algorithm_contract_catches(broken, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_algorithm(broken)


def path(algorithm, rounds=20):
    tasks = [toy_task(seed=s) for s in range(rounds)]
    return torch.stack([r.step.outer for r in online(Nonlinear(), algorithm, tasks, toy_point())])


def hypergradients(algorithm, rounds=20):
    tasks = [toy_task(seed=s) for s in range(rounds)]
    return [r.step.hypergradient for r in online(Nonlinear(), algorithm, tasks, toy_point())]


@pytest.mark.parametrize("estimator", [FixedPoint(4), ConjugateGradient(4, warm_start=True), Unrolled()])
def test_euclidean_obbo_is_sobow_at_equal_inner_work(estimator):
    common = {"lr": 0.05, "window": 4, "inner": INNER, "hypergradient": estimator}
    assert torch.equal(path(OBBO(**common, geometry=Euclidean())), path(SOBOW(**common, discount=1.0)))


def torch_reference(make_optimizer, algorithm, rounds=20):
    """Feed a torch optimizer with the hypergradients that the algorithm saw."""
    outer = torch.nn.Parameter(toy_point())
    optimizer, found = make_optimizer([outer]), []
    for gradient in hypergradients(algorithm, rounds):
        outer.grad = gradient
        optimizer.step()
        found.append(outer.detach().clone())
    return torch.stack(found)


@pytest.mark.parametrize(
    ("algorithm", "reference"),
    [
        (
            OBBO(lr=0.01, window=1, inner=INNER),
            functools.partial(torch.optim.RMSprop, lr=0.01, alpha=0.9, eps=1e-8),
        ),
        (OBBO(lr=0.01, window=1, inner=INNER, geometry=Euclidean()), functools.partial(torch.optim.SGD, lr=0.01)),
        (Adam(lr=0.01, inner=INNER), functools.partial(torch.optim.Adam, lr=0.01)),
        (SGDM(lr=0.01, inner=INNER), functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    ],
    ids=["rmsprop", "sgd", "adam", "sgdm"],
)
def test_without_window_and_constraints_the_outer_rule_is_torch_optims(algorithm, reference):
    assert torch.allclose(path(algorithm), torch_reference(reference, algorithm), rtol=1e-12, atol=1e-14)


def test_euclidean_obbo_with_l1_is_ista_on_the_hypergradients():
    lr, weight = 0.05, 0.4
    algorithm = OBBO(lr=lr, window=1, inner=INNER, geometry=Euclidean(), regularizer=L1(weight))
    ista = toy_point()
    for gradient, found in zip(hypergradients(algorithm), path(algorithm), strict=True):
        z = ista - lr * gradient
        ista = z.sign() * (z.abs() - lr * weight).clamp(min=0)
        assert torch.allclose(found, ista, rtol=1e-13, atol=1e-15)


def test_sobbo_on_whole_tasks_with_one_term_is_a_deterministic_obbo():
    inner = GradientDescent(steps=3, lr=0.5)
    sobbo = SOBBO(lr=0.05, window=3, inner=inner, hypergradient=StochasticNeumann(1, smoothness=2.0, batch_size=None))
    obbo = OBBO(lr=0.05, window=3, inner=inner, hypergradient=FixedPoint(1, lr=0.5))
    assert torch.allclose(path(sobbo), path(obbo), rtol=1e-12)


def test_sobbo_depends_on_the_seed_and_only_on_it():
    tasks = [toy_task(seed=s) for s in range(5)]
    algorithm = SOBBO(lr=0.05, inner=GradientDescent(2, 0.1, batch_size=2), hypergradient=StochasticNeumann(4, 3.0))
    last = [list(online(Nonlinear(), algorithm, tasks, toy_point(), seed=s))[-1].step.outer for s in (1, 1, 2)]
    assert torch.equal(last[0], last[1])
    assert not torch.equal(last[0], last[2])


@pytest.mark.parametrize("cls", [Adam, SGDM])
def test_torch_rules_are_projected_on_the_domain(cls):
    stream = QuadraticStream(rounds=10, radius=0.02)
    algorithm = cls(lr=0.5, hypergradient=ClosedForm(), domain=stream.domain)
    for played in online(stream.problem, algorithm, stream, stream.initial_outer()):
        assert stream.domain.contains(played.step.outer).all()
        assert played.step.generalized is None
        assert played.step.regret["generalized"] is None
    assert abs(float(played.step.outer.norm()) - 0.02) < 1e-9


@pytest.mark.parametrize("cls", [Adam, SGDM])
@pytest.mark.parametrize("domain", [Box(0.1, 0.3), Nonnegative(), Simplex()], ids=str)
def test_torch_rules_are_projected_on_every_domain(cls, domain):
    tasks = [toy_task(lanes=1, seed=s) for s in range(6)]
    start = torch.tensor([[0.2, 0.2, 0.2]] if isinstance(domain, Box) else [[0.2, 0.3, 0.5]], dtype=F64)
    for played in online(Nonlinear(), cls(lr=1.0, inner=INNER, domain=domain), tasks, start):
        assert domain.contains(played.step.outer).all()


def test_algorithms_can_be_pickled():
    import pickle

    for name in SIX:
        again = pickle.loads(pickle.dumps(part("algorithm", name)()))
        assert type(again) is part("algorithm", name)


def test_oagd_keeps_tasks_and_the_others_do_not():
    assert {n for n in SIX if isinstance(part("algorithm", n)().memory(), TaskWindow)} == {"oagd"}


def test_single_precision_and_double_precision_agree():
    last = {}
    for dtype in (torch.float32, F64):
        stream = QuadraticStream(rounds=5, dtype=dtype)
        rounds = list(online(stream.problem, OBBO(lr=0.01, inner=INNER), stream, stream.initial_outer()))
        last[dtype] = rounds[-1].step.outer
        assert last[dtype].dtype == dtype
    assert torch.allclose(last[torch.float32].double(), last[F64], rtol=1e-4)
