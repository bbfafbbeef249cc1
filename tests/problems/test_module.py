"""Problems from two losses of a module: against formulas, dense linear algebra and central differences."""

from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from toy import F64, normal

from obbo_lightning import Hyperparameters, ModuleProblem, OnSimplex, ParameterGroups, Positive, Weights
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Sample, derive_seed
from obbo_lightning.core.step_map import StepMap
from obbo_lightning.hypergradients import ConjugateGradient, FixedPoint, InnerState
from obbo_lightning.networks.hyperparameters import FunctionalModule
from obbo_lightning.problems.module import CurrentWeights, TrainedModuleProblem, batch_of, cast_floats
from obbo_lightning.testing import central_difference, check_problem


def training_loss(model, batch, hyper):
    residuals = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
    shrink = sum(w.square().sum() for w in model.parameters())
    return (hyper["sources"][batch["source"]] * residuals).mean() + hyper["decay"] * shrink + batch["level"]


def validation_loss(model, batch, hyper):
    return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean() + 0.01 * hyper["decay"].log() ** 2


def scores(model, batch, hyper):
    return {"error": (model(batch["x"]).squeeze(-1) - batch["y"]).abs().mean(), "decay": hyper["decay"]}


def mean_squares(model, batch, hyper):
    return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()


RIDGE = ModuleProblem(
    nn.Linear(3, 1, dtype=F64),
    ParameterGroups(decay=Positive(0.1, upper=10.0), sources=OnSimplex(2)),
    training_loss,
    validation_loss,
    scores,
)
TASK = {
    "train_x": normal(12, 3),
    "train_y": normal(12, seed=1),
    "train_source": torch.arange(12) % 2,
    "validation_x": normal(5, 3, seed=2),
    "validation_y": normal(5, seed=3),
    "test_x": normal(7, 3, seed=4),
    "test_y": normal(7, seed=5),
    "level": torch.tensor(0.25, dtype=F64),  # has no prefix: belongs to every batch
}
OUTER = torch.tensor([[0.5, 0.2, 0.8], [1.1, 0.6, 0.4]], dtype=F64)
INNER = normal(2, 4, seed=6)


def linear(inner, x):
    return inner[:, :3] @ x.T + inner[:, 3:]


def losses_from_matrices(outer, inner, task):
    """Return g, f and the error of the test rows per lane."""
    squares = (linear(inner, task["train_x"]) - task["train_y"]).square()
    decay, sources = outer[:, 0], outer[:, 1:]
    g = (sources[:, task["train_source"]] * squares).mean(-1) + decay * inner.square().sum(-1) + task["level"]
    f = (linear(inner, task["validation_x"]) - task["validation_y"]).square().mean(-1) + 0.01 * decay.log() ** 2
    return g, f, (linear(inner, task["test_x"]) - task["test_y"]).abs().mean(-1)


def test_losses_and_scores_are_on_their_own_batches():
    expected = losses_from_matrices(OUTER, INNER, TASK)

    def only(kind):
        return {
            name: value * torch.nan if value.is_floating_point() and not name.startswith((kind, "level")) else value
            for name, value in TASK.items()
        }

    assert torch.allclose(RIDGE.inner_loss(OUTER, INNER, only("train")), expected[0], rtol=1e-13)
    assert torch.allclose(RIDGE.outer_loss(OUTER, INNER, only("validation")), expected[1], rtol=1e-13)
    found = RIDGE.scores(OUTER, INNER, only("test"))
    assert torch.allclose(found["error"], expected[2], rtol=1e-13)
    assert torch.equal(found["decay"], OUTER[:, 0])
    untested = {name: value for name, value in TASK.items() if not name.startswith("test_")}
    at_validation = (linear(INNER, TASK["validation_x"]) - TASK["validation_y"]).abs().mean(-1)
    assert torch.allclose(RIDGE.scores(OUTER, INNER, untested)["error"], at_validation, rtol=1e-13)
    assert RIDGE.notes() == {"parameters": 4}
    assert not RIDGE.is_stochastic
    without = ModuleProblem(nn.Linear(3, 1), {"decay": Positive(0.1)}, mean_squares, mean_squares)
    assert without.scores(OUTER, INNER, TASK) == {}
    check_problem(RIDGE, OUTER, INNER, TASK)


def test_the_hypergradient_is_that_of_central_differences_through_an_exact_solution():
    def solution(outer):
        rows = torch.cat([TASK["train_x"], torch.ones(12, 1, dtype=F64)], -1)
        found = []
        for lane in outer:
            weights = lane[1:][TASK["train_source"]] / 12
            matrix = rows.T @ (weights[:, None] * rows) + lane[0] * torch.eye(4, dtype=F64)
            found.append(torch.linalg.solve(matrix, rows.T @ (weights * TASK["train_y"])))
        return torch.stack(found)

    expected = central_difference(lambda outer: losses_from_matrices(outer, solution(outer), TASK)[1], OUTER)
    for estimator in (ConjugateGradient(steps=20), FixedPoint(steps=2000, lr=0.2)):
        oracle = Oracle(RIDGE, OUTER, TASK)
        found = estimator(oracle, lambda *_: solution(OUTER), InnerState())
        assert (found.value - expected).abs().max() <= 1e-8


def test_a_mini_batch_is_rows_of_one_kind_and_the_rest_is_shared():
    sample = Sample(4, 3)
    for kind, rows, loss in (("train", 12, RIDGE.inner_loss), ("validation", 5, RIDGE.outer_loss)):
        chosen = sample.indices(rows)
        selected = {name: v[chosen] if name.startswith(kind) else v for name, v in TASK.items()}
        assert torch.equal(loss(OUTER, INNER, TASK, sample), loss(OUTER, INNER, selected))
        assert not torch.equal(loss(OUTER, INNER, TASK, Sample(5, 3)), loss(OUTER, INNER, selected))
    assert set(batch_of(TASK, "train", sample)) == {"x", "y", "source", "level"}
    assert torch.equal(batch_of(TASK, "validation", Sample(4, None))["x"], TASK["validation_x"])


def loss_of_layers(model, batch, hyper):
    hidden = model["drop"](model["norm"](model["first"](batch["x"])))
    return (model["last"](hidden) * hyper["scale"]).square().mean()


def test_a_loss_may_call_any_method_and_the_module_is_not_changed():
    layers = {"first": nn.Linear(3, 8), "norm": nn.BatchNorm1d(8), "drop": nn.Dropout(0.5), "last": nn.Linear(8, 1)}
    module, task = nn.ModuleDict(layers), {"train_x": torch.randn(6, 3)}  # has no forward
    problem = ModuleProblem(module, {"scale": Positive(1.0)}, loss_of_layers, loss_of_layers)
    before, state = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    outer = problem.initial_outer(0)
    inner = problem.initial_inner(outer, task)
    without, noisy = (problem.inner_loss(outer, inner, task, sample) for sample in (None, Sample(1, None)))
    assert problem.is_stochastic
    assert not torch.equal(noisy, without)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_dropout_masks_have_a_seed_derived_from_that_of_the_rows():
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)).double()
    problem = ModuleProblem(network, {"decay": Positive(0.1)}, mean_squares, mean_squares)
    outer, inner = torch.full((1, 1), 0.1, dtype=F64), INNER[:1]
    whole = (linear(inner, TASK["train_x"]) - TASK["train_y"]).square().mean()
    assert float(problem.inner_loss(outer, inner, TASK)) == pytest.approx(float(whole))
    rows = Sample(9, 4).indices(12)
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(9, "dropout"))
        thinned = functional.dropout(TASK["train_x"][rows], 0.5)
    expected = (linear(inner, thinned) - TASK["train_y"][rows]).square().mean()
    assert float(problem.inner_loss(outer, inner, TASK, Sample(9, 4))) == pytest.approx(float(expected))


def test_rounds_start_from_a_group_of_weights_of_the_right_size_else_from_the_module():
    network = nn.Linear(2, 1)
    make = partial(ModuleProblem, network, training_loss=mean_squares, validation_loss=mean_squares)
    problem = make({"decay": Positive(0.1), "init": Weights(network)})
    outer = problem.initial_outer(0)
    outer[:, 1:] = torch.tensor([5.0, 6.0, 7.0])
    assert torch.equal(problem.inner_from_outer(outer), outer[:, 1:])
    assert torch.equal(problem.initial_inner(outer, {}), outer[:, 1:])
    own = torch.cat([p.detach().flatten() for p in network.parameters()])[None]
    for hyper in ({"decay": Positive(0.1)}, {"other": Weights(nn.Linear(5, 1))}):
        problem = make(hyper)
        outer = problem.initial_outer(0)
        assert torch.equal(problem.initial_inner(outer, {}), own)
        assert problem.inner_from_outer(outer) is outer


def test_floating_point_tensors_of_a_nested_batch_are_cast_and_labels_are_not():
    Pair = namedtuple("Pair", "x labels")
    half, labels = torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 1])
    found = cast_floats({"a": [half, (labels, "text")], "b": Pair(half, labels), "c": None}, F64)
    assert found["a"][0].dtype == found["b"].x.dtype == F64
    assert found["a"][1] == (labels, "text")
    assert found["b"].labels is labels
    assert (type(found["a"]), type(found["a"][1]), type(found["b"])) == (list, tuple, Pair)
    assert found["c"] is None


def test_a_module_in_training_has_losses_of_its_own_batches_in_full_precision_at_its_current_weights():
    def loss(module, batch, hyper):
        return module["linear"](batch["x"]).square().mean() + hyper["decay"]

    hyper = Hyperparameters(decay=Positive(0.5))
    network = FunctionalModule(nn.ModuleDict({"linear": nn.Linear(3, 1), "hyper": hyper}))
    problem = TrainedModuleProblem(network, loss, lambda *arguments: 10 + loss(*arguments))
    task = {kind: {"x": normal(8, 3, seed=i).float()} for i, kind in enumerate(("training", "validation"))}
    outer, inner, solver = hyper.outer, network.flat().unsqueeze(0), CurrentWeights(network, StepMap(0.25))
    assert torch.equal(solver(None, torch.zeros_like(inner)), inner)
    assert (solver.step_map, solver.step_size, repr(solver)) == (StepMap(0.25), None, "CurrentWeights()")
    slope = problem.training_slope(outer, task)
    assert slope.tolist() == [[1.0]]
    assert not outer.requires_grad
    expected = [float(loss(network.module, batch, hyper).detach()) for batch in task.values()]
    with torch.autocast("cpu", torch.bfloat16):
        found = [float(problem.inner_loss(outer, inner, task)), float(problem.outer_loss(outer, inner, task))]
    assert found == pytest.approx([expected[0], 10 + expected[1]], rel=1e-6)
    with torch.no_grad():  # only reported: the value where it was differentiated
        assert float(problem.inner_loss(outer, 0 * inner, task)) == found[0]
    modes = []
    recording = TrainedModuleProblem(network, *[lambda *a: [modes.append(a[0]["linear"].training), loss(*a)][1]] * 2)
    recording.inner_loss(outer, inner, task)
    recording.outer_loss(outer, inner, task)
    assert modes == [True, False]  # the validation loss is computed in evaluation mode
