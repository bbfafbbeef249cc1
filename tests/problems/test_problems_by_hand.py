"""Problems written out: what is refused, samples and parts of lanes, losses of modules, halted prices."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from toy import F64

from obbo_lightning import CNN4, MLP, Blocks, FewShot, ModuleProblem, Positive, Sample, Weights
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.problems.module import batch_of
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.problems.sources import TrustedSources
from obbo_lightning.problems.spline import SmoothingSpline, spline_task
from obbo_lightning.problems.tridiagonal import _solve_anywhere, solve_chain


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        ([[2.0, 0.0], [0.0, -1.0]], r"must be positive definite, got an eigenvalue of -1\.0"),
        ([[2.0, 0.0], [0.0, 0.0]], r"must be positive definite, got an eigenvalue of 0\.0"),
        ([[2.0, 1.0], [0.0, 2.0]], "must be symmetric"),
        ([[2.0]], r"must have shape \(1, 2, 2\) to match coupling \(1, 2, 3\), got \(1, 1, 1\)"),
    ],
)
def test_an_inner_matrix_has_a_minimum_in_every_direction(matrix, said):
    with pytest.raises(ValueError, match=said):
        Quadratic(torch.tensor([matrix], dtype=F64), torch.ones(1, 2, 3, dtype=F64))


def quadratic(lanes=3, ridge=0.4, noise=0.0):
    root = draw(lanes, 4, 4)
    matrix = root @ root.mT + torch.eye(4, dtype=F64)
    return Quadratic(matrix, draw(lanes, 4, 2, seed=1), ridge, noise), matrix


def test_a_part_of_the_lanes_is_the_same_problem():
    problem, matrix = quadratic(noise=0.5)
    outer, inner, task = draw(3, 2, seed=2), draw(3, 4, seed=3), {"b": draw(3, 4, seed=4), "c": draw(3, 4, seed=5)}
    part, its_task = problem.of_lanes(task, slice(1, 3))
    for name in ("inner_loss", "outer_loss"):
        for sample in (None, Sample(3, 2)):
            whole = getattr(problem, name)(outer, inner, task, sample)[1:]
            assert torch.equal(getattr(part, name)(outer[1:], inner[1:], its_task, sample), whole)
    assert torch.allclose(part.hypergradient(outer[1:], its_task)[0], problem.hypergradient(outer, task)[0][1:])
    response = torch.linalg.solve(matrix, problem.coupling)
    largest = torch.stack([torch.linalg.eigvalsh(s.mT @ s)[-1] for s in response])
    assert torch.allclose(problem.outer_smoothness, 0.4 + largest)
    values = torch.linalg.eigvalsh(matrix)
    assert torch.allclose(problem.strong_convexity, values[:, 0])
    assert torch.allclose(problem.smoothness(outer, task), values[:, -1])


def test_noise_is_as_large_as_that_of_a_mean_of_observations():
    problem, _ = quadratic(lanes=1, noise=2.0)
    outer, inner, task = draw(1, 2, seed=2), draw(1, 4, seed=3), {"b": draw(1, 4, seed=4), "c": draw(1, 4, seed=5)}
    for size in (1, 16):
        for loss in (problem.inner_loss, problem.outer_loss):
            exact = loss(outer, inner, task)
            found = torch.stack([loss(outer, inner, task, Sample(seed, size)) - exact for seed in range(2000)])
            assert float(found.std()) == pytest.approx(2.0 / size**0.5 * float(inner.norm()), rel=0.06)
            assert abs(float(found.mean())) < 4 * float(found.std()) / 2000**0.5
            assert torch.equal(loss(outer, inner, task, Sample(3, None)), exact)


@pytest.mark.parametrize("price", [37.29, 0.1, 1e-3, 12345.67, 1e9 / 3])
def test_a_halted_price_has_no_deviation_and_what_follows_it_keeps_its_units(price):
    values = torch.full((2, 41), price, dtype=F64)
    values[:, 30:] = price + 0.5
    values[1, ::2] += 1.0
    training = torch.arange(41) < 30
    task = spline_task(values, training=training, standardise=True)
    seen = values[:, :30]
    assert torch.allclose(task["validation_values"][0], torch.full((11,), 0.5, dtype=F64), rtol=1e-6)
    expected = (values[1, 30:] - seen[1].mean()) / seen[1].std(correction=0)
    assert torch.allclose(task["validation_values"][1], expected, rtol=1e-6, atol=1e-6)


def test_samples_of_a_spline_are_scaled_to_the_whole_sum():
    task = spline_task(draw(2, 20), training=torch.arange(20) % 4 != 1)
    outer, inner, spline = torch.tensor([[0.5], [2.0]], dtype=F64), draw(2, 15, seed=1), SmoothingSpline()
    sample = Sample(5, 6)
    rows = sample.indices(15)
    fit = (inner - task["values"])[:, rows].square().sum(-1) * 15 / 6
    bend = (inner.diff(dim=-1).square() / task["sites"].diff()).sum(-1)
    assert torch.allclose(spline.inner_loss(outer, inner, task, sample), fit + outer[:, 0] * bend)
    rows = sample.indices(5)
    ahead = (spline.predict(inner, task) - task["validation_values"])[:, rows].square().sum(-1) * 5 / 6
    assert torch.allclose(spline.outer_loss(outer, inner, task, sample), ahead)
    assert torch.equal(spline.initial_inner(outer, task), task["values"])


def test_the_derivative_of_the_path_for_other_types_sums_to_zero():
    values, stiffness = (1e4 + draw(3, 60)).float(), torch.rand(59).float() + 0.1
    solution, derivative = _solve_anywhere(values, stiffness, torch.tensor([0.3, 2.0, 50.0]))
    assert float(derivative.double().sum(1).abs().max()) < 1e-5 * float(derivative.abs().max())
    assert solution.dtype == torch.float32


def test_a_few_shot_problem_refuses_what_it_cannot_learn_and_lays_images_out():
    make = partial(CNN4, ways=2, filters=2, channels=1, image_size=16)
    with pytest.raises(ValueError, match=r"problem\.proximity must be positive where problem\.learn_proximity is true"):
        FewShot(make, proximity=0, learn_proximity=True)
    problem = FewShot(make, proximity=0.5, learn_proximity=True)
    outer = problem.initial_outer(3)
    assert torch.equal(outer[:, :-1], FewShot(make).initial_outer(3))
    assert float(problem.proximity_at(outer)) == pytest.approx(0.5)
    assert FewShot(make, proximity=0).proximity_at(outer) == 0
    images = torch.randn(4, 1, 16, 16)
    task = {"support": images, "support_labels": torch.tensor([0, 1, 0, 1]), "query": images[:, :, :, :1]}
    laid = problem.laid_out(task)["support"]
    assert laid.is_contiguous(memory_format=torch.channels_last)
    together = problem.as_lanes([{**task, "query_labels": torch.ones(4)}] * 3)
    assert together["support"].shape == (3, 4, 1, 16, 16)
    assert problem.laid_out(together) is together
    with pytest.raises(ValueError, match=r"a few-shot problem has 1 lane, got 2"):
        problem.scores(outer, outer[:, :-1].repeat(2, 1), {**task, "query": images, "query_labels": torch.ones(4)})
    with pytest.raises(ValueError, match=r"an output for each class of a task, got 2 outputs and the label 2"):
        problem.inner_loss(outer, outer[:, :-1], {**task, "support_labels": torch.tensor([0, 1, 2, 1])})


def fit(model, batch, hyper):
    shrink = sum(weight.square().sum() for weight in model.parameters())
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean() + hyper["decay"] * shrink + batch["level"]


def judge(model, batch, hyper):
    return (model(batch["x"])[:, 0] - batch["y"]).abs().mean()


def told(model, batch, hyper):
    return {"error": (model(batch["x"])[:, 0] - batch["y"]).abs().max(), "decay": hyper["decay"]}


def batches(seed=0, **names):
    found = {"level": torch.tensor(0.25, dtype=F64)}
    for i, kind in enumerate(("train", "validation", "test")):
        found |= {f"{kind}_x": draw(5 + i, 3, seed=seed + i), f"{kind}_y": draw(5 + i, seed=seed + 10 + i)}
    return {**found, **names}


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return ModuleProblem(nn.Linear(3, 1).double(), {"decay": Positive(0.1, upper=10.0)}, fit, judge, told)


def test_the_losses_of_a_module_are_on_their_own_batches(linear):
    task, outer = batches(), torch.tensor([[0.2], [0.7]], dtype=F64)
    inner = draw(2, 4, seed=30)
    for kind, found in (("train", linear.inner_loss), ("validation", linear.outer_loss)):
        poisoned = {n: v if n.startswith(kind) or n == "level" else v * float("nan") for n, v in task.items()}
        for lane in range(2):
            weight, bias = inner[lane, :3], inner[lane, 3]
            errors = task[f"{kind}_x"] @ weight + bias - task[f"{kind}_y"]
            expected = errors.abs().mean()
            if kind == "train":
                expected = errors.square().mean() + outer[lane, 0] * inner[lane].square().sum() + 0.25
            assert float(found(outer, inner, poisoned)[lane]) == pytest.approx(float(expected), rel=1e-12)
    tested = {name: value for name, value in task.items() if not name.startswith("test_")}
    for there, kind in ((task, "test"), (tested, "validation")):
        scores = linear.scores(outer, inner, there)
        errors = task[f"{kind}_x"] @ inner[1, :3] + inner[1, 3] - task[f"{kind}_y"]
        assert float(scores["error"][1]) == pytest.approx(float(errors.abs().max()), rel=1e-12)
        assert scores["decay"].tolist() == pytest.approx([0.2, 0.7])
    assert linear.notes() == {"parameters": 4}
    assert not linear.random
    assert torch.equal(linear.initial_inner(outer, task), linear.network.initial(0).expand(2, -1))
    unjudged = ModuleProblem(nn.Linear(3, 1), linear.hyper, fit, judge)
    assert unjudged.scores(outer, inner, task) == {}


def test_a_mini_batch_is_rows_of_one_kind_and_the_rest_is_shared(linear):
    task, sample = batches(), Sample(4, 3)
    rows = sample.indices(5)
    found = batch_of(task, "train", sample)
    assert set(found) == {"x", "y", "level"}
    assert torch.equal(found["x"], task["train_x"][rows])
    assert torch.equal(found["y"], task["train_y"][rows])
    assert torch.equal(batch_of(task, "validation", Sample(4, None))["x"], task["validation_x"])
    with pytest.raises(ValueError, match=r"as many rows in each train_ tensor for mini-batches, got \{.*\}"):
        batch_of(batches(train_y=draw(4)), "train", sample)
    with pytest.raises(ValueError, match="task must have tensors that begin with train_, got a"):
        batch_of({"a": draw(1)}, "train", None)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            lambda model, batch, hyper: model(batch["x"]),
            r"training_loss must return one number, .* got the shape \[5, 1\]",
        ),
        (lambda model, batch, hyper: 3.0, r"training_loss must return one number, .* got 3\.0"),
        (7, r"training_loss must be a function of \(module, batch, hyper\), got 7"),
    ],
)
def test_a_loss_is_one_number(loss, said):
    def play():
        problem = ModuleProblem(nn.Linear(3, 1).double(), {"decay": Positive(0.1)}, loss, judge)
        return problem.inner_loss(torch.full((1, 1), 0.1, dtype=F64), draw(1, 4), batches())

    with pytest.raises(ValueError, match=said):
        play()


def test_rounds_start_from_the_block_of_weights_that_fits():
    torch.manual_seed(0)
    make = partial(nn.Linear, 3, 1)
    hyper = Blocks(decay=Positive(0.1), start=Weights(make))
    problem = ModuleProblem(make, hyper, fit, judge)
    outer = problem.initial_outer(0)
    assert torch.equal(problem.inner_from_outer(outer), outer[:, 1:])
    assert torch.equal(problem.initial_inner(outer, {}), outer[:, 1:])
    other = ModuleProblem(make, Blocks(decay=Positive(0.1), start=Weights(partial(nn.Linear, 4, 1))), fit, judge)
    assert other.inner_from_outer(outer) is outer


def test_dropout_of_a_module_has_a_seed_of_its_own_and_is_left_out_of_whole_losses():
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)).double()
    plain = lambda model, batch, hyper: (model(batch["x"])[:, 0] - batch["y"]).square().mean()  # noqa: E731
    problem = ModuleProblem(network, {"decay": Positive(0.1)}, plain, plain)
    task, outer, inner = batches(), torch.full((1, 1), 0.1, dtype=F64), draw(1, 4, seed=1)
    assert problem.random
    whole = (task["train_x"] @ inner[0, :3] + inner[0, 3] - task["train_y"]).square().mean()
    assert float(problem.inner_loss(outer, inner, task)) == pytest.approx(float(whole))
    sample = Sample(9, None)
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(9, "dropout"))
        thinned = functional.dropout(task["train_x"], 0.5)
    expected = (thinned @ inner[0, :3] + inner[0, 3] - task["train_y"]).square().mean()
    assert float(problem.inner_loss(outer, inner, task, sample)) == pytest.approx(float(expected))


def test_trusted_sources_weigh_the_mean_loss_of_each_source():
    problem = TrustedSources(partial(MLP, ways=3, shape=[2], widths=[4]), sources=3)
    outer = torch.tensor([[0.5, 0.3, 0.2]])
    inner = problem.network.initial(0).unsqueeze(0)
    network = problem.network.loaded(inner[0]).requires_grad_(False)
    source = torch.arange(3).repeat_interleave(4)
    task = {"train_x": draw(12, 2).float(), "train_y": torch.arange(12) % 3, "train_source": source}
    for kind, count in (("validation", 5), ("test", 7)):
        task |= {f"{kind}_x": draw(count, 2, seed=count).float(), f"{kind}_y": torch.arange(count) % 3}
    each = functional.cross_entropy(network(task["train_x"]), task["train_y"], reduction="none")
    expected = sum(outer[0, s] * each[source == s].mean() for s in range(3))
    assert float(problem.inner_loss(outer, inner, task)) == pytest.approx(float(expected), rel=1e-6)
    trusted = functional.cross_entropy(network(task["validation_x"]), task["validation_y"])
    assert float(problem.outer_loss(outer, inner, task)) == pytest.approx(float(trusted), rel=1e-6)
    hits = (network(task["test_x"]).argmax(-1) == task["test_y"]).float().mean()
    assert float(problem.scores(outer, inner, task)["accuracy"]) == pytest.approx(float(hits))
    assert torch.allclose(problem.initial_outer(0), torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_chain_is_solved_in_any_precision_lane_by_lane(dtype):
    values, stiffness = (
        draw(4, 9).to(dtype),
        (torch.rand(8, generator=torch.Generator().manual_seed(0)) + 0.2).to(dtype),
    )
    weight = torch.tensor([0.2, 0.9, 3.0, 40.0], dtype=dtype)
    solution, derivative = solve_chain(values, stiffness, weight)
    assert solution.dtype == derivative.dtype == dtype
    differences = torch.eye(9, dtype=F64).diff(dim=0)
    bend = differences.T @ torch.diag(stiffness.double()) @ differences
    for lane in range(4):
        matrix = torch.eye(9, dtype=F64) + weight[lane].double() * bend
        expected = torch.linalg.solve(matrix, values[lane].double())
        slope = -torch.linalg.solve(matrix, bend @ expected)
        close = {"rtol": 1e-9, "atol": 1e-11} if dtype == F64 else {"rtol": 2e-4, "atol": 1e-5}
        assert torch.allclose(solution[lane].double(), expected, **close)
        assert torch.allclose(derivative[lane].double(), slope, **close)


def test_some_lanes_of_a_spline_share_its_sites():
    task = spline_task(draw(5, 20), training=torch.arange(20) % 4 != 1)
    outer, inner, spline = torch.rand(5, 1, dtype=F64) + 0.1, draw(5, 15, seed=1), SmoothingSpline()
    part, its = spline.of_lanes(task, slice(1, 3))
    assert torch.equal(part.outer_loss(outer[1:3], inner[1:3], its), spline.outer_loss(outer, inner, task)[1:3])
    assert torch.equal(part.inner_loss(outer[1:3], inner[1:3], its), spline.inner_loss(outer, inner, task)[1:3])
    assert torch.equal(its["sites"], task["sites"])
