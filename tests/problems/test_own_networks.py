"""Anybody's network in a few-shot problem: what learns, what stays, what is random, and that losses are pure."""

from functools import partial

import pytest
import torch
from torch import nn
from toy import F64

from obbo_lightning import CNN4, MLP, OBBO, FewShot, FixedPoint, GradientDescent, Sample, Unrolled, online
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key, derive_seed
from obbo_lightning.streams.classes import StoredClasses
from obbo_lightning.streams.few_shot import Drawing, FewShotTasks


class Own(nn.Module):
    """One of everything: a parameter of its own, a frozen one, a buffer that it writes to, norms and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.group = nn.GroupNorm(2, 8)
        self.running = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        self.calls += 1
        x = self.running(self.group(self.first(x))).tanh()
        return self.last(self.dropout(self.frozen(x).tanh() * self.scale + self.shift))


LEARNED = 4 * 8 + 8 + 2 * 8 + 2 * 8 + 8 + 8 * 3 + 3


@pytest.fixture
def tasks():
    examples = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 6
    examples += labels.unsqueeze(-1)
    return FewShotTasks(StoredClasses(examples, labels.numpy()), range(6), 50, Drawing(3, 4, 5))


def double(task):
    return {k: v.double() if v.is_floating_point() else v for k, v in task.items()}


def state_of(problem):
    return {k: v.clone() for k, v in problem.network.template.state_dict().items()}


def pretrained(mode="train"):
    torch.manual_seed(3)
    network = Own()
    with torch.no_grad():
        for _ in range(5):
            network(3 * torch.randn(20, 4))  # so that running statistics are something
    return getattr(network, mode)()


def test_what_learns_is_lambda_and_the_rest_is_not():
    problem = FewShot(Own)
    assert problem.initial_outer(0).shape == (1, LEARNED)
    assert problem.notes()["parameters"] == LEARNED
    assert [name for name in problem.network.sizes if name.startswith("frozen")] == []
    assert "scale" in problem.network.sizes


@pytest.mark.parametrize("make", [Own, partial(Own, dropout=0.3), lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3))])
def test_a_network_that_is_made_starts_from_the_seed_whatever_its_layers(make):
    problem = FewShot(make)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one, two, other = (problem.initial_outer(seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(1), expected)  # the global generator was left alone
    torch.manual_seed(1)
    directly = torch.cat([p.detach().flatten() for p in make().parameters() if p.requires_grad])
    assert torch.equal(one[0], directly)


def test_a_network_that_is_given_starts_from_its_weights_and_is_not_touched(tasks):
    network = pretrained()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    problem = FewShot(network)
    assert torch.equal(problem.initial_outer(0), problem.initial_outer(1))
    learned = [p.detach().flatten() for p in network.parameters() if p.requires_grad]
    assert torch.equal(problem.initial_outer(0)[0], torch.cat(learned))
    list(online(problem, OBBO(inner=GradientDescent(2, 0.01, "outer")), tasks[:2], problem.initial_outer(0)))
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_losses_are_those_of_the_module_itself_in_the_mode_that_it_came_in(tasks, mode):
    network, task = pretrained(mode), tasks[0]
    problem = FewShot(network, proximity=0.3)
    before = state_of(problem)
    outer = problem.initial_outer(0)
    inner = outer + 0.01
    first, second = (problem.inner_loss(outer, inner, task) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(v, before[k]) for k, v in state_of(problem).items())
    with torch.no_grad():
        for p in network.parameters():
            p += 0.01 if p.requires_grad else 0.0
        expected = nn.functional.cross_entropy(network(task["support"]), task["support_labels"])
    assert float(first) == pytest.approx(float(expected + 0.15 * LEARNED * 0.01**2), rel=1e-5)
    assert problem.transductive == (mode == "train")
    assert str(problem.notes()["predictions"]).startswith("transductive" if mode == "train" else "inductive")


def test_the_network_that_is_handed_out_has_lambda_and_the_constants(tasks):
    problem, task = FewShot(pretrained("eval"), learn_proximity=True), tasks[0]
    outer = (problem.initial_outer(0) + 0.1).double()
    network = problem.loaded_network(outer)
    assert network.running.track_running_stats
    assert network.frozen.weight.dtype == F64
    assert torch.equal(network.frozen.weight.float(), problem.network.template.frozen.weight)
    expected = problem._logits(problem.inner_from_outer(outer), task["query"].double())
    assert torch.allclose(network(task["query"].double()), expected, rtol=1e-12)


def test_constants_follow_the_precision_of_lambda(tasks):
    problem = FewShot(pretrained("eval"))
    outer = problem.initial_outer(0)
    single = problem.outer_loss(outer, outer, tasks[0])
    precise = problem.outer_loss(outer.double(), outer.double(), double(tasks[0]))
    assert precise.dtype == F64
    assert float(single) == pytest.approx(float(precise), rel=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_hypergradient_of_an_own_network_is_that_of_central_differences(tasks, dropout, mode):
    torch.manual_seed(0)
    problem = FewShot(getattr(Own(dropout), mode)(), proximity=0.7, learn_proximity=True)
    task, outer = double(tasks[0]), problem.initial_outer(1).double()
    solver, key = GradientDescent(steps=2, lr=0.05, start="outer"), Key(seed=4)
    found = Unrolled()(Oracle(problem, outer, task, key), solver, None, None)

    def loss(point):
        return problem.outer_loss(point, solver(Oracle(problem, point, task, key), None), task)

    expected = central_difference(loss, outer, step=1e-3)
    assert torch.allclose(found.value, expected, rtol=1e-6, atol=1e-8)
    near = FixedPoint(60, lr=0.05)(Oracle(problem, outer, task, key), solver, None, None)
    assert near.value.shape == outer.shape


def test_dropout_is_drawn_from_the_sample_and_left_out_without_one(tasks):
    noisy, quiet = FewShot(partial(Own, dropout=0.5)), FewShot(Own)
    task, outer = tasks[0], quiet.initial_outer(0)
    assert noisy.random
    assert not quiet.random
    assert not FewShot(Own(dropout=0.5).eval()).random
    assert torch.equal(noisy.initial_outer(0), outer)
    for name in ("inner_loss", "outer_loss"):
        losses = [getattr(noisy, name)(outer, outer, task, Sample(seed, None)) for seed in (1, 2, 1)]
        torch.manual_seed(7)
        expected = torch.rand(1)
        torch.manual_seed(7)
        again = getattr(noisy, name)(outer, outer, task, Sample(1, None))
        assert torch.equal(torch.rand(1), expected)  # noise does not come from the global generator
        assert torch.equal(losses[0], losses[2])
        assert torch.equal(losses[0], again)
        assert not torch.equal(losses[0], losses[1])
        without = getattr(noisy, name)(outer, outer, task)
        assert torch.equal(without, getattr(quiet, name)(outer, outer, task))
    assert torch.equal(noisy.scores(outer, outer, task)["accuracy"], quiet.scores(outer, outer, task)["accuracy"])


def test_the_noise_of_an_attention_and_of_a_recurrent_layer_counts_too():
    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(self.attention(x, x, x)[0].mean(1))

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True)
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            return self.linear(self.layer(x)[0][:, -1])

    sequences = torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(0))
    task = {"query": sequences, "query_labels": torch.arange(6) % 3}
    for network in (Attentive, Recurrent):
        problem = FewShot(network)
        outer = problem.initial_outer(0)
        assert problem.random
        one, two = (problem.outer_loss(outer, outer, task) for _ in range(2))
        assert torch.equal(one, two)
        noisy = [problem.outer_loss(outer, outer, task, Sample(seed, None)) for seed in (1, 1, 2)]
        assert torch.equal(noisy[0], noisy[1])
        assert not torch.equal(noisy[0], noisy[2])


def test_rounds_with_dropout_are_the_same_from_the_same_seed(tasks):
    problem = FewShot(partial(Own, dropout=0.5))
    algorithm = OBBO(inner=GradientDescent(3, 0.05, "outer"), hypergradient=FixedPoint(3))
    ends = [
        list(online(problem, algorithm, tasks[:3], problem.initial_outer(0), seed=seed))[-1].step.outer
        for seed in (0, 0, 1)
    ]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_vectors_side_by_side_are_lanes_and_random_ones_are_not(tasks):
    chosen = tasks[:3]
    for network in (partial(MLP, ways=3, shape=[4], widths=[6]), Own):
        problem = FewShot(network)
        outer = problem.initial_outer(0)
        lanes = problem.as_lanes(chosen)
        assert lanes["support"].shape == (3, 12, 4)
        assert problem.laid_out(lanes) is lanes
        for name in ("inner_loss", "outer_loss"):
            together = getattr(problem, name)(outer.expand(3, -1), outer.expand(3, -1) + 0.1, lanes)
            alone = torch.cat([getattr(problem, name)(outer, outer + 0.1, task) for task in chosen])
            assert torch.allclose(together, alone, rtol=1e-5)
    assert FewShot(partial(Own, dropout=0.5)).as_lanes(chosen) is None


def test_a_sample_of_all_examples_is_the_whole_task(tasks):
    problem = FewShot(partial(MLP, ways=3, shape=[4], widths=[6]))
    outer, task = problem.initial_outer(0), tasks[0]
    assert torch.equal(problem.inner_loss(outer, outer, task, Sample(1, None)), problem.inner_loss(outer, outer, task))
    some = problem.inner_loss(outer, outer, task, Sample(1, 4))
    rows = Sample(1, 4).indices(12)
    part = {"support": task["support"][rows], "support_labels": task["support_labels"][rows]}
    assert torch.equal(some, problem.inner_loss(outer, outer, part))


def test_a_few_rounds_teach_vectors(tasks):
    problem = FewShot(partial(MLP, ways=3, shape=[4], widths=[16]))
    algorithm = OBBO(lr=0.02, inner=GradientDescent(5, 0.1, "outer"), hypergradient=Unrolled())
    rounds = list(online(problem, algorithm, tasks[:30], problem.initial_outer(0)))
    first, last = (sum(float(r.loss) for r in part) for part in (rounds[:10], rounds[-10:]))
    assert last < first


class Frozen(Own):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Frozen, "problem.network must have a parameter that learns, got Frozen without any"),
        (nn.ReLU(), "problem.network must have a parameter that learns, got ReLU without any"),
        (nn.Linear, "or a class or function that makes one without arguments, got Linear: missing a required argument"),
        ("cnn4", "that makes one without arguments, got 'cnn4': 'cnn4' is not a callable object"),
        (lambda: 3, "problem.network must make an nn.Module, got <lambda>, which made 3"),
        (partial(nn.LazyLinear, 3), "problem.network must know the sizes of its layers, got LazyLinear with lazy ones"),
    ],
)
def test_what_is_no_network_is_refused_in_one_line(network, message):
    with pytest.raises(ValueError, match=r"^problem\.network must") as refused:
        FewShot(network)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), r"must return logits \[12, ways\], got \[36\]"),
        (nn.LSTM(4, 3), r"must return logits \[12, ways\], got tuple"),
        (nn.Linear(4, 2), r"must have an output for each class of a task, got 2 outputs and the label 2"),
    ],
    ids=["flat", "tuple", "few"],
)
def test_what_returns_no_logits_is_refused_in_one_line(tasks, network, message):
    problem = FewShot(network)
    outer = problem.initial_outer(0)
    with pytest.raises(ValueError, match=message):
        problem.inner_loss(outer, outer, tasks[0])


def test_the_default_network_is_cnn4():
    assert isinstance(FewShot().network.template, CNN4)


def test_the_noise_of_a_sample_does_not_go_with_its_choice_of_examples(tasks):
    """Both written out: rows from the sample's seed, masks from one that is derived from it."""
    task, network = tasks[0], Own(dropout=0.5)
    problem, sample = FewShot(network), Sample(11, 4)
    outer = problem.initial_outer(0)
    rows = torch.randint(len(task["query"]), (4,), generator=torch.Generator().manual_seed(11))
    torch.manual_seed(derive_seed(11, "dropout"))
    expected = torch.nn.functional.cross_entropy(network(task["query"][rows]), task["query_labels"][rows])
    assert torch.allclose(problem.outer_loss(outer, outer, task, sample), expected, rtol=1e-5)
