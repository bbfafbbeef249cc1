"""Impossible values are refused with the key, the rule and the value: by constructors, and before the first round."""

import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from toy import F64, Nonlinear, Proximal, example_groups, own_network, toy_point, toy_task

from obbo_lightning import OAGD, OBBO, SOBBO, SOBOW, Adam, BregmanProx, FewShot, Forgetting, OuterStep, online
from obbo_lightning.core import validation
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.domains import entropic_simplex
from obbo_lightning.core.memory import HypergradientWindow, InnerState
from obbo_lightning.core.parameter_groups import Interval, OnSimplex, ParameterGroups, Positive, Real
from obbo_lightning.core.randomness import Key, Sample
from obbo_lightning.core.round import run_round
from obbo_lightning.core.validation import at_least, decay, fraction, instance_of, nonnegative, number, one_of, positive
from obbo_lightning.domains import Box, L2Ball, Nonnegative, Simplex
from obbo_lightning.geometry import AdaptiveDiagonal, Burg, NegativeEntropy
from obbo_lightning.hypergradients import ClosedForm, ConjugateGradient, FixedPoint, StochasticNeumann, Unrolled
from obbo_lightning.metrics import LocalRegret
from obbo_lightning.networks import CNN4, MLP, ResNet12
from obbo_lightning.networks.flat import FlatNetwork
from obbo_lightning.networks.hyperparameters import FunctionalModule
from obbo_lightning.problems.imbalance import VectorScaling
from obbo_lightning.problems.module import ModuleProblem
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.problems.sources import SourceWeights
from obbo_lightning.problems.spline import spline_task
from obbo_lightning.regularizers import L1, ElasticNet
from obbo_lightning.solvers import ExactSolution, GradientDescent, InnerAdam, InnerSGD
from obbo_lightning.streams.quadratic import QuadraticTasks

NAN, INF = math.nan, math.inf
LINEAR = nn.Linear(2, 3)
POSITIVE = [
    ("key", partial(positive, "key")),
    ("inner.lr", lambda value: GradientDescent(lr=value)),
    ("inner.epsilon", lambda value: InnerAdam(epsilon=value)),
    ("hypergradient.lr", lambda value: FixedPoint(3, lr=value)),
    ("hypergradient.smoothness", lambda value: StochasticNeumann(smoothness=value)),
    ("lr", lambda value: OBBO(lr=value)),
    ("lr", lambda value: Adam(lr=value)),
    ("lr", lambda value: BregmanProx([parameter(1.0)], lr=value)),
    ("lr", lambda value: BregmanProx([{"params": [parameter(1.0)], "lr": value}], lr=0.1)),
    ("lr", lambda value: Real(lr=value)),
    ("algorithm.groups.decay.lr", lambda value: optimizer(OBBO(groups={"decay": {"lr": value}}))),
    ("scale", lambda value: OBBO(scale=value)),
    ("clip", lambda value: OBBO(clip=value)),
    ("geometry.rho", lambda value: AdaptiveDiagonal(rho=value)),
    ("domain.radius", L2Ball),
    ("ridge", lambda value: Forgetting(5, ridge=value)),
    ("problem.reach", lambda value: VectorScaling(LINEAR, ways=3, reach=value)),
]
NONNEGATIVE = [
    ("key", partial(nonnegative, "key")),
    ("hypergradient.tol", lambda value: ConjugateGradient(tol=value)),
    ("regularizer.l1", L1),
    ("regularizer.l2", lambda value: ElasticNet(l2=value)),
    ("domain.floor", Simplex),
    ("problem.proximity", lambda value: FewShot(LINEAR, proximity=value)),
]
FRACTIONS = [("key", partial(fraction, "key")), ("discount", lambda value: SOBOW(discount=value))]
DECAYS = [
    ("key", partial(decay, "key")),
    ("geometry.decay", AdaptiveDiagonal),
    ("inner.momentum", lambda value: InnerSGD(momentum=value)),
    ("inner.beta1", lambda value: InnerAdam(beta1=value)),
    ("inner.beta2", lambda value: InnerAdam(beta2=value)),
    ("floor", lambda value: SourceWeights(LINEAR, floor=value)),
]
INTEGERS = [
    ("key", lambda value: at_least("key", value, 1)),
    *[("inner.steps", solver) for solver in (GradientDescent, InnerSGD, InnerAdam)],
    ("inner.batch_size", lambda value: GradientDescent(batch_size=value)),
    ("hypergradient.steps", FixedPoint),
    ("hypergradient.steps", ConjugateGradient),
    ("hypergradient.max_terms", StochasticNeumann),
    ("hypergradient.batch_size", lambda value: StochasticNeumann(batch_size=value)),
    *[("window", lambda value, cls=cls: cls(window=value)) for cls in (OBBO, SOBBO, SOBOW, OAGD, LocalRegret)],
    ("window", HypergradientWindow),
    ("regret_window", lambda value: OuterStep(parameter(1.0), OBBO(), regret_window=value)),
    ("rounds", lambda value: QuadraticTasks(rounds=value)),
    ("problem.network.filters", lambda value: CNN4(filters=value)),
    ("problem.network.width", lambda value: ResNet12(width=value)),
    ("problem.network.channels", lambda value: ResNet12(channels=value)),
    ("problem.network.widths", lambda value: MLP(widths=[8, value])),
]
FROM_TWO = [
    ("size", OnSimplex),
    ("past", Forgetting),
    ("ways", lambda value: VectorScaling(LINEAR, ways=value)),
    ("problem.network.ways", CNN4),
]
RULES = [
    ("be a positive finite number", (0, -1.0, NAN, INF), POSITIVE),
    ("be zero or a positive finite number", (-0.1, NAN, INF), NONNEGATIVE),
    ("lie in (0, 1]", (0, 1.5, NAN), FRACTIONS),
    ("lie in [0, 1)", (1, -0.1, NAN), DECAYS),
    ("be an integer of at least 1", (0, -3, 2.5, True), INTEGERS),
    ("be an integer of at least 2", (1, 2.0), FROM_TWO),
]


def parameter(*values):
    return Parameter(torch.tensor([list(values)]))


def optimizer(algorithm, groups=None, start=None):
    groups = groups or example_groups()
    return algorithm.optimizer(Parameter(groups.start() if start is None else start), groups)


@pytest.mark.parametrize(
    ("key", "rule", "values", "make"), [(key, rule, values, make) for rule, values, m in RULES for key, make in m]
)
def test_numbers_out_of_range_are_refused(key, rule, values, make):
    for value in values:
        with pytest.raises(ValueError, match=f"^{re.escape(f'{key} must {rule}, got {value!r}')}$"):
            make(value)


def flat(network):
    return lambda: FlatNetwork(network)


def logits(network):
    return lambda: FlatNetwork(network)(FlatNetwork(network).initial(0), torch.ones(12, 4))


def module_problem(hyper=None, training=lambda *_: torch.ones(()), validation=lambda *_: torch.ones(())):
    return ModuleProblem(nn.Linear(1, 1), {"a": Positive()} if hyper is None else hyper, training, validation)


def module_loss(loss, task, sample=None):
    problem = module_problem(training=loss)
    return lambda: problem.inner_loss(problem.initial_outer(0), torch.zeros(1, 2), task, sample)


def few_shot(network, lanes, labels):
    outer = FewShot(network).initial_outer(0).repeat(lanes, 1)
    task = {"support": torch.ones(2, 2), "support_labels": torch.tensor(labels)}
    return lambda: FewShot(network).inner_loss(outer, outer, task)


def quadratic(matrix):
    return lambda: Quadratic(torch.tensor([matrix]), torch.ones(1, 2, 3))


class OwnNoise(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


X = torch.ones(2, 1)
SPLINE = partial(spline_task, torch.zeros(1, 3))
CASES = [
    # validation
    ("key must be a number, got True", lambda: number("key", True)),
    ("key must be a number, got '0.1'", lambda: number("key", "0.1")),
    ("key must be one of a, b, got 'c'", lambda: one_of("key", "c", ("a", "b"))),
    ("key must be an instance of str, got 3", lambda: instance_of("key", 3, str)),
    # inner solvers and estimators
    ("inner.start must be one of previous, outer, got 'zero'", lambda: GradientDescent(start="zero")),
    ("inner.precision must be one of full, bf16, got 'fp8'", lambda: GradientDescent(precision="fp8")),
    # algorithms
    ("lr must be a positive finite number or auto, got 'fast'", lambda: OBBO(lr="fast")),
    ("lr must be a finite number, got one beyond the largest float", lambda: OBBO(lr=10**400)),
    ("inner must be an instance of InnerSolver, got 'gd'", lambda: OBBO(inner="gd")),
    ("hypergradient must be an instance of Estimator, got <class", lambda: OBBO(hypergradient=Unrolled)),
    ("domain must be an instance of Domain, got <class", lambda: OBBO(domain=Simplex)),
    ("geometry must be an instance of Geometry, got 'euclidean'", lambda: OBBO(geometry="euclidean")),
    ("regularizer must be an instance of ElasticNet, got 0.1", lambda: Adam(regularizer=0.1)),
    ("regularizer must be none for an outer rule of torch.optim", lambda: Adam(regularizer=L1(0.1))),
    ("Burg: every regularizer; Box with lower >= 0 and", lambda: OBBO(geometry=Burg(), domain=Nonnegative())),
    ("these are", lambda: OBBO(geometry=Burg()).optimizer(parameter(1.0))),
    # domains and geometries
    ("geometry.decay must be a number, got 'a'", lambda: AdaptiveDiagonal(decay="a")),
    ("domain.lower must be a number, got '0'", lambda: Box("0", "1")),
    ("domain.lower must be smaller than domain.upper, got 2.0 and 1.0", lambda: Box(2.0, 1.0)),
    ("domain.lower must be smaller than domain.upper, got nan and 1.0", lambda: Box(NAN, 1.0)),
    ("domain.floor must be less than 1/4 for 4 weights", lambda: Simplex(0.25).project(torch.ones(1, 4))),
    ("domain.floor must be less than 1/4 for 4 weights", lambda: entropic_simplex(torch.ones(1, 4), 0.25)),
    # outer steps, their starts and states
    ("outer start must lie in L2Ball(radius=1.0); lane 0 begins with [3.0,", lambda: prox([3.0, 4.0], L2Ball(1.0))),
    ("outer start must lie in Simplex(floor=0.0)", lambda: prox([0.7, 0.7], Simplex())),
    ("where NegativeEntropy() is smooth; lane 0 begins with [0.0, 1.0]", lambda: prox([0.0, 1.0], Simplex())),
    ("outer start must lie in RealSpace()", lambda: BregmanProx([parameter(NAN)], 0.1)),
    ("outer start must lie in L2Ball", lambda: prox([0.5], L2Ball(1.0)).add_param_group({"params": [parameter(2.0)]})),
    ("outer start must lie in Box(lower=0.0,", lambda: OuterStep(parameter(2.0), Adam(domain=Box(0.0, 1.0)))),
    ("outer start must be floating-point, got torch.int64", lambda: BregmanProx([torch.ones(1, 1).long()], 0.1)),
    ("outer start must be finite, got 1 values that are not", lambda: OuterStep(parameter(1.0, NAN), OBBO())),
    ("[lanes, d], got torch.float32 of shape (3,)", lambda: OuterStep(Parameter(torch.zeros(3)), OBBO())),
    ("on_nonfinite must be one of raise, skip, got 'no'", lambda: OuterStep(parameter(1.0), OBBO(), on_nonfinite="no")),
    ("must have shape [rounds, 1, 1], got (1, 2, 1)", lambda: OuterStep(parameter(1.0), OBBO())(torch.ones(1, 2, 1))),
    ("must have shape [rounds, 1, 1], got (1, 1)", lambda: OuterStep(parameter(1.0), OBBO())(torch.ones(1, 1))),
    ("hypergradient must keep the shape (2, 3), got (2, 4)", lambda: window(3).push(torch.zeros(2, 4))),
    ("window must be 3 to continue from this state, got 4", lambda: window(4).load_state_dict(window(3).state_dict())),
    ("discount must be 1.0 to continue from this", lambda: window(3, 0.9).load_state_dict(window(3).state_dict())),
    ("must be that of a TaskWindow", lambda: OAGD(window=3).memory().load_state_dict(window(3).state_dict())),
    ("windows must agree in length, discount and rounds", lambda: window(3).join(HypergradientWindow(3))),
    # parameter groups
    ("groups must have at least one parameter group, got none", ParameterGroups),
    ("groups must have names of letters, digits and _, got 'a b'", lambda: ParameterGroups({"a b": Real()})),
    ("groups must be a mapping from names to parameter groups", lambda: ParameterGroups([Real()])),
    ("a must be a parameter group, such as Positive(0.1) or", lambda: ParameterGroups(a=3.0)),
    ("start must lie in Box(lower=0.0, upper=0.3), got [0.5]", lambda: Interval(0.0, 0.3, 0.5)),
    ("start must lie in Simplex(floor=0.1)", lambda: OnSimplex(2, start=[0.95, 0.05], floor=0.1)),
    ("start must be above 0 and finite, got [0.0]", lambda: Positive(0.0)),
    ("start must be above 0 and finite, got [inf]", lambda: Positive(INF)),
    ("start must lie in Box(lower=0.0005, upper=0.2), got [0.5]", lambda: Positive(0.5, upper=0.2)),
    ("start must lie in Box(lower=0.7, upper=500.0), got [0.5]", lambda: Positive(0.5, lower=0.7)),
    ("lower must be zero or a positive finite number, got -0.1", lambda: Positive(0.5, lower=-0.1)),
    ("domain.lower must be smaller than domain.upper, got 1.0 and 0.5", lambda: Positive(0.7, lower=1.0, upper=0.5)),
    ("low must be smaller than high, both finite, got 1.0 and 0.0", lambda: Interval(1.0, 0.0)),
    ("start must be a number or a list of 3, got the shape [2]", lambda: Real([1.0, 2.0], size=3)),
    ("start must be a number or a list of numbers, got the shape [0]", lambda: Real([])),
    ("these are:", lambda: Positive(1.0, upper=INF, geometry=Burg())),
    ("algorithm.groups must be settings of parameter groups, by name", lambda: OBBO(groups=["decay"])),
    ("algorithm.groups.decay must be keys and values, got 0.1", lambda: OBBO(groups={"decay": 0.1})),
    ("of lr, scale, geometry, regularizer, domain, got 'w'", lambda: OBBO(groups={"a": {"w": 3}})),
    ("groups.a must be one of lr, scale, regularizer, domain", lambda: SOBOW(groups={"a": {"geometry": Burg()}})),
    ("groups.a must be one of lr, scale, domain, got", lambda: Adam(groups={"a": {"geometry": Burg()}})),
    ("algorithm.groups must be one of decay, sources", lambda: optimizer(OBBO(groups={"x": {}}))),
    ("decay.geometry must be an instance of", lambda: optimizer(OBBO(groups={"decay": {"geometry": "x"}}))),
    ("algorithm.groups.sources.geometry Burg() with", lambda: optimizer(OBBO(geometry=Burg()))),
    ("groups.a.regularizer must be none", lambda: optimizer(Adam(), ParameterGroups(a=Real(regularizer=L1(1.0))))),
    ("the 7 coordinates of its parameter groups (decay", lambda: optimizer(Adam(), start=torch.ones(1, 6))),
    ("outer start must lie in", lambda: optimizer(OBBO(), start=2 * example_groups().start())),
    ("a problem without parameter groups, got decay", lambda: OBBO(groups={"decay": {}}).optimizer(parameter(1.0))),
    # problems
    ("inner_matrix must be symmetric and positive definite", quadratic([[2.0, 0.0], [0.0, 0.0]])),
    ("inner_matrix must be symmetric and positive definite", quadratic([[2.0, 1.0], [0.0, 2.0]])),
    ("must have shape (1, 2, 2) to match coupling (1, 2, 3), got (1, 1, 1)", quadratic([[2.0]])),
    ("condition_number must be at least 1", lambda: QuadraticTasks(condition_number=0.5)),
    ("outer_dim must be at most inner_dim (8), got 9", lambda: QuadraticTasks(outer_dim=9, inner_dim=8)),
    ("problem.proximity must be positive where", lambda: FewShot(LINEAR, proximity=0, learn_proximity=True)),
    ("a few-shot problem has 1 lane, got 2", few_shot(LINEAR, 2, [0, 1])),
    ("an output for each class of a task, got 3 outputs and the label 3", few_shot(LINEAR, 1, [0, 3])),
    ("kind must be one of classification, regression, got 'ranking'", lambda: Forgetting(kind="ranking")),
    ("problem.factor must be more than 1, got 1.0", lambda: VectorScaling(LINEAR, ways=3, factor=1.0)),
    ("sites must increase", lambda: SPLINE(torch.tensor([0.0, 2.0, 1.0]))),
    ("training must choose at least one site", lambda: SPLINE(training=torch.zeros(3) > 0)),
    ("values must be [lanes, n]", lambda: SPLINE(torch.zeros(2))),
    ("training_loss must be a function of (module, batch, hyper), got", lambda: module_problem(training=None)),
    ("validation_loss must be a function of (module, batch, hyper), got 3", lambda: module_problem(validation=3)),
    ("hyper must be an instance of Mapping", lambda: module_problem([Positive()])),
    (
        "training_loss must return one number, a tensor without axes, got 3.0",
        module_loss(lambda *_: 3.0, {"train_x": X}),
    ),
    ("training_loss must return one number, a tensor without axes, got the", module_loss(lambda *_: X, {"train_x": X})),
    ("task must have tensors that begin with train_, got test_x", module_loss(lambda *_: X, {"test_x": X})),
    ("as many rows in each train_", module_loss(lambda *_: X, {"train_x": X, "train_y": X[:1]}, Sample(0, 2))),
    # networks
    ("problem.network.image_size must be an integer of at least 16, got 15", lambda: CNN4(image_size=15)),
    ("problem.network.shape must have an axis or more, got []", lambda: MLP(shape=[])),
    ("problem.network.norm must be one of batch, group, layer, none, got 'bn'", lambda: CNN4(norm="bn")),
    ("problem.network must have a trainable parameter, got", flat(own_network().requires_grad_(False))),
    ("makes one without arguments, got Linear: missing a required argument", flat(nn.Linear)),
    ("makes one without arguments, got 'cnn4': 'cnn4' is not a callable object", flat("cnn4")),
    ("problem.network must make an nn.Module, got <lambda>, which made 3", flat(lambda: 3)),
    ("must know the sizes of its layers, got LazyLinear with lazy", flat(partial(nn.LazyLinear, 3))),
    ("must return logits [12, ways], got [36]", logits(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)))),
    ("must return logits [12, ways], got tuple", logits(nn.LSTM(4, 3))),
    ("in modules of torch.nn such as nn.Dropout, got OwnNoise, which draws in", logits(OwnNoise(4, 3))),
    ("the module must have one Hyperparameters, such as", lambda: FunctionalModule(nn.Linear(1, 1))),
]


def prox(start, domain):
    geometry = NegativeEntropy() if isinstance(domain, Simplex) else None
    return BregmanProx([parameter(*start)], 0.1, geometry, domain=domain)


def window(length, discount=1.0):
    memory = HypergradientWindow(length, discount)
    memory.push(torch.zeros(2, 3))
    return memory


@pytest.mark.parametrize(("message", "make"), CASES)
def test_impossible_values_are_refused(message, make):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def broken(**methods):
    """Return a problem with other methods."""
    return type("Broken", (Nonlinear,), methods)()


NO_START = broken(initial_inner=lambda *_: None)
SUMMED = broken(inner_loss=lambda self, *a: Nonlinear.inner_loss(self, *a).sum())
EXACT, UNROLLED = OBBO(inner=ExactSolution()), Unrolled()
LOW = GradientDescent(start="outer", precision="bf16")
ROUNDS = [
    ("problem must be an instance of Problem, got None", {"problem": None}),
    ("algorithm must be an instance of Algorithm", {"algorithm": OBBO}),
    ("outer must be an instance of Tensor, got [[0.0]]", {"outer": [[0.0]]}),
    ("outer must be a floating-point tensor [lanes, d], got torch.int64", {"outer": torch.ones(2, 3).long()}),
    ("outer must be a floating-point tensor [lanes, d], got torch.float32 of shape (3,)", {"outer": torch.zeros(3)}),
    ("outer start must be finite", {"outer": toy_point() * NAN}),
    ("inner must be an instance of Tensor, got [[0.0]]", {"inner": [[0.0]]}),
    ("inner must have shape [2 lanes, p], got (1, 3)", {"inner": torch.zeros(1, 3, dtype=F64)}),
    ("inner must have the dtype of outer, torch.float64, got torch.float32", {"inner": torch.zeros(2, 3)}),
    ("inner start must be finite, got 6 values that are not", {"inner": toy_point() * INF}),
    ("Broken.inner_loss must return shape (2,), got ()", {"problem": SUMMED}),
    ("inner.start 'previous' needs a first inner variable", {"problem": NO_START}),
    ("inner.start 'previous' needs a first inner", {"problem": NO_START, "algorithm": OBBO(inner=InnerSGD())}),
    ("Broken.mixed_term must return shape (2, 3), got", {"problem": broken(mixed_term=lambda *a: a[4][:, :1])}),
    ("hypergradient must return shape (2, 3)", {"problem": broken(hypergradient=lambda s, o, t: (o[:, :1], o))}),
    ("must return shape (2,)", {"problem": broken(smoothness=lambda s, o, t: o[:, :1]), "algorithm": SOBBO()}),
    ("must be positive, got 0", {"problem": broken(smoothness=lambda s, o, t: 0 * o[:, 0]), "algorithm": SOBBO()}),
    ("hypergradient.smoothness must be given for Nonlinear, which has none", {"algorithm": SOBBO()}),
    ("inner 'ExactSolution' needs a solution, and Nonlinear has none", {"algorithm": EXACT}),
    ("'ClosedForm' needs a closed form, and Nonlinear has", {"algorithm": OBBO(hypergradient=ClosedForm())}),
    ("hypergradient.lr must be given for inner InnerAdam", {"algorithm": OBBO(inner=InnerAdam())}),
    *[
        ("'Unrolled' needs steps of GradientDescent", {"algorithm": OBBO(inner=solver, hypergradient=UNROLLED)})
        for solver in (ExactSolution(), InnerSGD(), InnerAdam())
    ],
    ("inner.precision must be full for hyper", {"algorithm": OBBO(inner=LOW, hypergradient=UNROLLED)}),
]


@pytest.mark.parametrize(("message", "changes"), ROUNDS)
def test_impossible_combinations_are_refused_in_the_first_round(message, changes):
    arguments = {"problem": Nonlinear(), "algorithm": OBBO(), "stream": [toy_task()], "outer": toy_point()}
    with pytest.raises(ValueError, match=re.escape(message)):
        next(online(**arguments | changes))


def test_refusals_come_before_the_first_task_is_requested():
    def stream():
        raise AssertionError("a task was requested")
        yield

    for algorithm in (OBBO(domain=L2Ball(1e-3)), EXACT, SOBBO()):
        with pytest.raises(ValueError, match=r"must lie in|needs a solution|must be given"):
            online(Nonlinear(), algorithm, stream(), toy_point())


def test_a_problem_that_cannot_be_divided_by_lanes_is_refused():
    step = OuterStep(Parameter(toy_point()), OBBO())
    with pytest.raises(ValueError, match="Nonlinear cannot be divided by lanes: it has no select_lanes"):
        run_round(Nonlinear(), OBBO(), step, toy_task(), InnerState(), Key(), Shard(lanes=slice(0, 1)))


def test_an_inner_start_that_does_not_fit_is_refused_before_a_run():
    for solver in (GradientDescent(), InnerSGD(), InnerAdam()):
        with pytest.raises(ValueError, match="give Proximal an initial_inner"):
            solver.require_start(Proximal(), toy_point(), toy_task())
        solver.require_start(Nonlinear(), toy_point(), toy_task())
    stream, solver = QuadraticTasks(lanes=1), GradientDescent(start="outer")
    with pytest.raises(ValueError, match=r"inner.start must be previous for Quadratic, .* 8 coordinates and λ 4, got"):
        solver.require_start(stream.problem, stream.initial_outer(), stream[0])
    solver.require_start(Nonlinear(), toy_point(), toy_task())


@pytest.mark.parametrize(
    ("validate", "value"), [(positive, 3), (nonnegative, 0), (fraction, 1), (decay, 0), (number, -math.inf)]
)
def test_values_at_the_bounds_are_returned(validate, value):
    assert validate("key", value) == value


def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("12345\n")
    monkeypatch.setattr(validation, "CONTAINER_LIMITS", (str(tmp_path / "none"), str(tmp_path / "memory.max")))
    assert validation.available_memory.__wrapped__() == 12345
