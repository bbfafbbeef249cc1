"""Problems from modules: losses as people write them, against formulas written out, and central differences."""

import pytest
import torch
from torch import nn

from obbo_lightning import (
    OBBO,
    Blocks,
    ConjugateGradient,
    FixedPoint,
    GradientDescent,
    InnerSGD,
    Interval,
    ModuleProblem,
    OnSimplex,
    Positive,
    Sample,
    Weights,
    online,
)
from obbo_lightning.checks import check_problem
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.core.oracle import Oracle

F64 = torch.float64


def fit(model, batch, hyper):
    residuals = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
    shrink = sum(w.square().sum() for w in model.parameters())
    return (hyper["trust"][batch["source"]] * residuals).mean() + hyper["decay"] * shrink


def judge(model, batch, hyper):
    return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean() + 0.01 * hyper["decay"].log() ** 2


def scores(model, batch, hyper):
    return {"error": (model(batch["x"]).squeeze(-1) - batch["y"]).abs().mean(), "decay": hyper["decay"]}


def draw(seed=0, rows=12):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)  # noqa: E731
    return {
        "train_x": normal(rows, 3),
        "train_y": normal(rows),
        "train_source": torch.arange(rows) % 2,
        "validation_x": normal(5, 3),
        "validation_y": normal(5),
    }


def ridge(**more):
    hyper = Blocks(decay=Positive(0.1, upper=10.0), trust=OnSimplex(2))
    return ModuleProblem(nn.Linear(3, 1, dtype=F64), hyper, fit, judge, **more)


def by_hand(outer, inner, task):
    """The same losses, from matrices."""
    weight, bias = inner[:, :3], inner[:, 3:]
    decay, trust = outer[:, 0], outer[:, 1:]
    residuals = (weight @ task["train_x"].T + bias - task["train_y"]).square()
    g = (trust[:, task["train_source"]] * residuals).mean(-1) + decay * inner.square().sum(-1)
    f = (weight @ task["validation_x"].T + bias - task["validation_y"]).square().mean(-1) + 0.01 * decay.log() ** 2
    return g, f


def point(lanes=2):
    g = torch.Generator().manual_seed(5)
    trust = torch.rand(lanes, 2, generator=g, dtype=F64)
    outer = torch.cat([torch.rand(lanes, 1, generator=g, dtype=F64) + 0.2, trust / trust.sum(-1, keepdim=True)], -1)
    return outer, torch.randn(lanes, 4, generator=g, dtype=F64)


def test_losses_are_those_written_by_hand_in_every_lane():
    problem, task = ridge(), draw()
    outer, inner = point()
    g, f = by_hand(outer, inner, task)
    assert torch.allclose(problem.inner_loss(outer, inner, task), g, rtol=1e-13)
    assert torch.allclose(problem.outer_loss(outer, inner, task), f, rtol=1e-13)


def test_the_contract_of_problems_holds():
    outer, inner = point()
    check_problem(ridge(), outer, inner, draw())


def test_the_hypergradient_is_the_derivative_of_the_validation_loss_of_the_trained_module():
    """Against central differences through an exact solution by dense linear algebra."""
    problem, task = ridge(), draw()
    outer, _ = point()

    def solution(at):
        rows = torch.cat([task["train_x"], torch.ones(12, 1, dtype=F64)], -1)
        found = []
        for one in at:
            weights = one[1:][task["train_source"]] / 12
            matrix = rows.T @ (weights[:, None] * rows) + one[0] * torch.eye(4, dtype=F64)
            found.append(torch.linalg.solve(matrix, rows.T @ (weights * task["train_y"])))
        return torch.stack(found)

    def through(at):
        return by_hand(at, solution(at), task)[1]

    expected = central_difference(through, outer)
    exact = solution(outer)
    solver = GradientDescent(steps=1, lr=1e-12)
    cg = ConjugateGradient(steps=20).differentiate(Oracle(problem, outer, task), solver, exact, None)
    assert (cg.value - expected).abs().max() <= 1e-8
    fixed = FixedPoint(steps=2000, lr=0.2).differentiate(Oracle(problem, outer, task), solver, exact, None)
    assert (fixed.value - expected).abs().max() <= 1e-8


def test_a_mini_batch_is_rows_of_the_training_batch_alone():
    problem, task = ridge(), draw()
    outer, inner = point(1)
    sample = Sample(seed=3, size=4)
    rows = sample.indices(12)
    some = {**task, **{name: task[name][rows] for name in ("train_x", "train_y", "train_source")}}
    expected = problem.inner_loss(outer, inner, some)
    assert torch.equal(problem.inner_loss(outer, inner, task, sample), expected)
    assert not torch.equal(problem.inner_loss(outer, inner, task, Sample(4, 4)), expected)


def test_scores_are_of_the_test_rows_where_there_are_some():
    task = draw()
    outer, inner = point()
    problem = ridge(scores=scores)
    at_validation = problem.scores(outer, inner, task)
    expected = (inner[:, :3] @ task["validation_x"].T + inner[:, 3:] - task["validation_y"]).abs().mean(-1)
    assert torch.allclose(at_validation["error"], expected)
    assert torch.equal(at_validation["decay"], outer[:, 0])
    other = problem.scores(outer, inner, {**task, "test_x": 2 * task["validation_x"], "test_y": task["validation_y"]})
    assert not torch.allclose(other["error"], expected)


def test_a_tensor_without_a_beginning_goes_with_both_batches():
    seen = []

    def watch(model, batch, hyper):
        seen.append(sorted(batch))
        return model.weight.sum() * hyper["decay"]

    problem = ModuleProblem(nn.Linear(1, 1, dtype=F64), {"decay": Positive(0.1)}, watch, watch)
    outer, inner = problem.initial_outer(0).double(), torch.zeros(1, 2, dtype=F64)
    task = {"train_x": torch.ones(2), "validation_y": torch.ones(2), "t": torch.ones(())}
    problem.inner_loss(outer, inner, task)
    problem.outer_loss(outer, inner, task)
    assert seen == [["t", "x"], ["t", "y"]]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.5)

    def hidden(self, x):
        return self.drop(self.norm(self.first(x)))


def through_hidden(model, batch, hyper):
    return (model.last(model.hidden(batch["x"])) * hyper["scale"]).square().mean()


def test_a_module_may_be_used_in_any_way_and_is_left_as_it_was():
    module = Noisy()
    problem = ModuleProblem(module, {"scale": Positive(1.0)}, through_hidden, through_hidden)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    task = {"train_x": torch.randn(6, 3), "validation_x": torch.randn(6, 3)}
    state = torch.get_rng_state()
    outer = problem.initial_outer(0)
    inner = problem.initial_inner(outer, task)
    quiet = problem.inner_loss(outer, inner, task)
    assert torch.equal(quiet, problem.inner_loss(outer, inner, task))
    noisy = [problem.inner_loss(outer, inner, task, Sample(seed, None)) for seed in (1, 1, 2)]
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])
    assert not torch.equal(noisy[0], quiet)
    assert problem.random
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_rounds_start_from_a_block_of_weights_where_there_is_one():
    net = nn.Linear(2, 1)

    def loss(model, batch, hyper):
        return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()

    problem = ModuleProblem(net, {"decay": Positive(0.1), "init": Weights(net)}, loss, loss)
    outer = problem.initial_outer(0)
    outer[:, 1:] = torch.tensor([5.0, 6.0, 7.0])
    assert torch.equal(problem.inner_from_outer(outer), outer[:, 1:])
    assert torch.equal(problem.initial_inner(outer, {}), outer[:, 1:])
    plain = ModuleProblem(net, {"decay": Positive(0.1)}, loss, loss)
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])[None]
    assert torch.equal(plain.initial_inner(plain.initial_outer(0), {}), expected)


def test_a_decay_is_learned_with_a_momentum_on_mini_batches():
    """Targets are noise: the best weight is none, so the decay must grow."""
    torch.manual_seed(0)

    def loss(model, batch, hyper):
        return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean() + hyper[
            "decay"
        ] * model.weight.square().sum()

    def judged(model, batch, hyper):
        return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()

    problem = ModuleProblem(nn.Linear(8, 1), {"decay": Positive(0.01, upper=10.0)}, loss, judged)
    tasks = [
        {n: torch.randn(*s) for n, s in (("train_x", (12, 8)), ("train_y", (12,)), ("validation_x", (40, 8)))}
        | {"validation_y": torch.randn(40)}
        for _ in range(60)
    ]
    algorithm = OBBO(window=1, inner=InnerSGD(steps=10, lr=0.02, batch_size=6), hypergradient=FixedPoint(steps=10))
    rounds = list(online(problem, algorithm, tasks, problem.initial_outer(0), on_nonfinite="skip"))
    assert float(rounds[-1].step.outer) > 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleProblem(nn.Linear(1, 1), {"a": Positive()}, None, fit), "training_loss must be a function of"),
        (lambda: ModuleProblem(nn.Linear(1, 1), {"a": Positive()}, fit, 3), "validation_loss must be a function of"),
        (lambda: ModuleProblem(nn.Linear(1, 1), [Positive()], fit, fit), "hyper must be an instance of Mapping"),
        (lambda: ModuleProblem(nn.Linear(1, 1), {}, fit, fit), "blocks must have at least one block"),
    ],
)
def test_what_is_no_problem_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda m, b, h: m(b["x"]),
            r"training_loss must return one number, a tensor without axes, got the shape \[2, 1\]",
        ),
        (lambda m, b, h: 3.0, "training_loss must return one number, a tensor without axes, got 3.0"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(loss, message):
    problem = ModuleProblem(nn.Linear(1, 1), {"smoothing": Interval(0.0, 0.3)}, loss, loss)
    outer = problem.initial_outer(0)
    with pytest.raises(ValueError, match=message):
        problem.inner_loss(outer, torch.zeros(1, 2), {"train_x": torch.ones(2, 1)})


def test_a_task_without_the_rows_of_a_batch_is_refused():
    outer, inner = point(1)
    with pytest.raises(ValueError, match="task must have tensors that begin with validation_, got train_x"):
        ridge().outer_loss(outer, inner, {"train_x": torch.ones(2, 3)})
    task = draw() | {"train_y": torch.ones(3, dtype=F64)}
    with pytest.raises(ValueError, match="task must have as many rows in each train_ tensor"):
        ridge().inner_loss(outer, inner, task, Sample(0, 2))


def test_names_of_single_numbers_have_no_axis():
    blocks = Blocks(decay=Positive(0.5), sources=OnSimplex(3))
    values = blocks.values(blocks.start()[0])
    assert values["decay"].shape == ()
    assert values["sources"].shape == (3,)


def test_a_sample_of_the_validation_loss_is_rows_of_its_own_batch():
    problem, task = ridge(), draw()
    outer, inner = point(1)
    sample = Sample(seed=3, size=2)
    some = {**task, **{name: task[name][sample.indices(5)] for name in ("validation_x", "validation_y")}}
    assert torch.equal(problem.outer_loss(outer, inner, task, sample), problem.outer_loss(outer, inner, some))
    assert not torch.equal(problem.outer_loss(outer, inner, task, sample), problem.outer_loss(outer, inner, task))


def test_masks_do_not_go_with_the_choice_of_rows_and_the_module_says_its_size():
    problem, drawn = ridge(), []
    problem.network.apply = lambda *given, noise: drawn.append(noise) or torch.zeros(())
    outer, inner = point(1)
    for sample in (None, Sample(3, 4), Sample(3, 4), Sample(4, 4)):
        problem.inner_loss(outer, inner, draw(), sample)
    assert drawn[0] is None
    assert drawn[1] == drawn[2] != drawn[3]
    assert drawn[1] != 3  # the seed of the rows
    assert problem.notes() == {"parameters": 4}


def test_a_block_of_weights_of_another_size_is_not_where_rounds_start():
    net = nn.Linear(2, 1)
    problem = ModuleProblem(net, {"other": Weights(nn.Linear(5, 1))}, judge, judge)
    outer = problem.initial_outer(0)
    assert torch.equal(problem.initial_inner(outer, {})[0, :2], net.weight.detach()[0])
