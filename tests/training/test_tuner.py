"""OnlineTuner: hypergradients against differences, training unchanged, checkpoints, loops of all kinds."""

import math
import random
from itertools import chain
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from small_runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from obbo_lightning import OAGD, OBBO, SOBOW, Adam, Hyperparameters, OnlineTuner, OnSimplex, Positive
from obbo_lightning.core.round import run_round
from obbo_lightning.hypergradients import ConjugateGradient, FixedPoint, Unrolled
from obbo_lightning.problems.module import CurrentWeights
from obbo_lightning.testing import central_difference
from obbo_lightning.training.tuner import ValidationBatches, _sgd_lr

F64, BATCH = torch.float64, torch.full((4,), 2.0)
pytestmark = [
    pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Sources(L.LightningModule):
    """Small network with all that could leave traces: dropout, batch norm, a frozen layer."""

    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 1)
        )
        self.net[4].requires_grad_(False)
        self.hyper = Hyperparameters(sources=OnSimplex(2), decay=Positive(1e-3, upper=1.0))
        self.automatic_optimization = not manual
        self.seen = []

    def training_loss(self, batch, hyper):
        x, y, source = batch
        errors = (self.net(x).squeeze(-1) - y).square()
        shrink = sum(p.square().sum() for p in self.net.parameters())
        return (hyper["sources"][source] * errors).mean() + hyper["decay"] * shrink

    def validation_loss(self, batch, hyper):
        return (self.net(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def training_step(self, batch, index):
        self.seen.append(float(self.hyper["sources"][0]))
        if self.automatic_optimization:
            return self.training_loss(batch, self.hyper)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.training_loss(batch, self.hyper))
        optimizer.step()
        return None

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


def loader(count=12):
    """Return batches of labelled rows of two sources; the labels of source 1 have the wrong sign."""
    x = torch.randn(count * 8, 4, generator=torch.Generator().manual_seed(0))
    source = torch.arange(count * 8) % 2
    return DataLoader(TensorDataset(x, x.sum(-1) * (1 - 2 * source), source), batch_size=8, shuffle=True)


def clean_loader():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(9))
    return DataLoader(TensorDataset(x, x.sum(-1)), batch_size=10, shuffle=True)


def fit(module, tuner=None, count=12, path=None, **more):
    if path is None:  # a resumed training continues with the random numbers of the one before it
        torch.manual_seed(3)
        random.seed(3)
    trainer = L.Trainer(**{**QUIET, **more}, callbacks=[] if tuner is None else [tuner])
    trainer.fit(module, loader(count), ckpt_path=path)
    return trainer


def make_still_tuner(every=2):
    """Return a tuner whose steps are too small to change anything."""
    algorithm = OBBO(lr=1e-30, window=1, hypergradient=FixedPoint(steps=3))
    return OnlineTuner(clean_loader(), every=every, algorithm=algorithm)


@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (True, 1), (False, 3)])
def test_training_is_unchanged_bit_for_bit_where_no_value_moves(manual, accumulate):
    plain, tuned, tuner = Sources(manual), Sources(manual), make_still_tuner()
    fit(plain, accumulate_grad_batches=accumulate)
    after = torch.get_rng_state(), random.random()
    fit(tuned, tuner, accumulate_grad_batches=accumulate)
    assert tuner.steps == 6
    for name, value in plain.state_dict().items():
        assert torch.equal(value, tuned.state_dict()[name]), name
    assert torch.equal(torch.get_rng_state(), after[0])
    assert random.random() == after[1]
    assert all(m.training for m in tuned.net.modules())


def test_the_wrong_source_loses_its_weight_and_training_uses_it():
    module, tuner = Sources(), OnlineTuner(clean_loader(), every=1)
    fit(module, tuner, count=100)
    assert module.seen[0] == 0.5
    assert sum(module.seen[-50:]) / 50 > 0.9
    assert tuner.values()["sources[0]"] == pytest.approx(float(module.hyper["sources"][0]))
    assert sorted(tuner.values()) == ["decay", "sources[0]", "sources[1]"]


def test_every_counts_batches():
    for every, steps in ((1, 12), (5, 2), (12, 1), (13, 0)):
        tuner = make_still_tuner(every)
        fit(Sources(), tuner)
        assert (tuner.steps, tuner.batches) == (steps, 12)


class Ridge(nn.Module):
    """Linear model without noise, in float64."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=F64)
        self.hyper = Hyperparameters(decay=Positive(0.3), sources=OnSimplex(2, start=[0.3, 0.7])).double()

    def training_loss(self, batch, hyper):
        x, y, source = batch
        errors = (self.linear(x).squeeze(-1) - y).square()
        # self.hyper is differentiated, too
        return (hyper["sources"][source] * errors).mean() + self.hyper["decay"] * self.linear.weight.square().sum()

    def validation_loss(self, batch, hyper):
        return (self.linear(batch[0]).squeeze(-1) - batch[1]).square().mean() + 0.1 * hyper["decay"] ** 2


def make_rows(rows=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 3, generator=g, dtype=F64), torch.randn(rows, generator=g, dtype=F64)
    return x, y, torch.arange(rows) % 2


def solve_exactly(outer, batch):
    """Return the minimiser of the training loss, from the normal equations."""
    x, y, source = batch
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=F64)], -1)
    weights = outer[1:][source] / len(x)
    matrix = rows.T @ (weights[:, None] * rows) + torch.diag(outer[0] * torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=F64))
    return torch.linalg.solve(matrix, rows.T @ (weights * y))


@pytest.mark.parametrize("estimator", [ConjugateGradient(steps=20), FixedPoint(steps=3000)])
def test_the_hypergradient_is_that_of_central_differences(estimator):
    model, batch, other = Ridge(), make_rows(), make_rows(7, seed=1)
    outer = model.hyper.outer.clone()

    def through(at):
        weight = torch.stack([solve_exactly(one, batch) for one in at])
        error = (weight[:, :3] @ other[0].T + weight[:, 3:] - other[1]).square().mean(-1)
        return error + 0.1 * at[:, 0] ** 2

    best = solve_exactly(outer[0], batch)
    with torch.no_grad():
        model.linear.weight.copy_(best[:3])
        model.linear.bias.copy_(best[3])
    inner_loss = float(model.training_loss(batch, model.hyper).detach())
    algorithm = OBBO(window=1, hypergradient=estimator)
    finished = OnlineTuner(algorithm=algorithm, lr=0.1).step(model, batch, other[:2])
    assert (finished.hypergradient - central_difference(through, outer)).abs().max() <= 1e-8
    assert finished.loss == pytest.approx(float(through(outer)), rel=1e-12)
    assert finished.inner_loss == pytest.approx(inner_loss, rel=1e-12)
    assert not torch.equal(model.hyper.outer, outer)


@pytest.mark.parametrize("algorithm", [None, SOBOW(lr="auto", window=2), OAGD(lr="auto", window=3), Adam(lr="auto")])
def test_a_resumed_training_equals_the_undisturbed_one(tmp_path, algorithm):
    whole, first, again = Sources(), Sources(), Sources()
    tuners = [OnlineTuner(clean_loader(), every=2, algorithm=algorithm) for _ in range(3)]
    fit(whole, tuners[0], max_epochs=2)
    trainer = fit(first, tuners[1])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(again, tuners[2], max_epochs=2, path=tmp_path / "half.ckpt")
    assert tuners[2].steps == 12
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_validation_batches_are_cycled_and_shuffled_by_their_seed():
    source = DataLoader(torch.arange(10), batch_size=4, shuffle=True)
    taken, other = ValidationBatches(source, seed=5), ValidationBatches(source, seed=6)
    seen = [taken.take().tolist() for _ in range(7)]
    assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:6])) == list(range(10))
    assert seen[:3] != seen[3:6]
    assert [other.take().tolist() for _ in range(3)] != seen[:3]
    returned = ValidationBatches(lambda n: n)
    assert [returned.take() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="validation must have at least one batch, got none"):
        ValidationBatches([]).take()


def test_a_plain_loop_and_a_trainer_give_the_same_values():
    module, tuner = Sources(), OnlineTuner(clean_loader(), every=2)
    fit(module, tuner, deterministic=True)
    plain, plain_tuner, validation = Sources(), OnlineTuner(every=2), ValidationBatches(clean_loader())
    (optimizer,), _ = plain.configure_optimizers()
    torch.manual_seed(3)
    for i, batch in enumerate(loader()):
        optimizer.zero_grad()
        plain.training_loss(batch, plain.hyper).backward()
        optimizer.step()
        if i % 2:
            plain_tuner.step(plain, batch, validation.take(), lr=optimizer.param_groups[0]["lr"])
    assert torch.equal(plain.hyper.outer, module.hyper.outer)
    assert not torch.equal(plain.hyper.outer, Sources().hyper.outer)


def test_bfloat16_training_has_hyperparameters_in_single_precision():
    module, tuner = Sources(), OnlineTuner(clean_loader(), every=2)
    fit(module, tuner, count=4, precision="bf16-true")
    assert module.net[0].weight.dtype == torch.bfloat16
    assert module.hyper.outer.dtype == torch.float32
    assert tuner.steps == 2


def test_values_are_logged_and_the_cost_is_reported(tmp_path, monkeypatch):
    reports = []
    monkeypatch.setattr("obbo_lightning.training.tuner.rank_zero_info", reports.append)
    fit(Sources(), OnlineTuner(clean_loader(), every=2), logger=CSVLogger(tmp_path), log_every_n_steps=4)
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    expected = {"hyper/sources[0]", "hyper/decay", "tuner/validation_loss", "tuner/lr/sources"}
    assert expected <= set(rows[0].split(","))
    assert len(rows) == 1 + 4  # steps 2, 4, 8, 12
    (report,) = reports
    assert "6 outer steps, one every 2 batches; training took " in report


class OneUnused(nn.Module):
    """Uses one of its two values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.hyper = Hyperparameters(used=Positive(0.5), unused=Positive(0.5))

    def training_loss(self, batch, hyper):
        return (self.weight - batch).square().mean() + hyper["used"] * self.weight.square().sum()

    def validation_loss(self, batch, hyper):
        return (self.weight - batch).square().mean()


class NoLosses(L.LightningModule):
    def __init__(self, hypers):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        for i in range(hypers):
            setattr(self, f"hyper{i}", Hyperparameters(decay=Positive(1.0)))


@pytest.mark.parametrize(
    ("message", "options", "module"),
    [
        ("the module must have one Hyperparameters, .* got 0", {}, NoLosses(0)),
        ("the module must have one Hyperparameters, .* got 2", {}, NoLosses(2)),
        (r"training_loss must be given, or be a method training_loss\(batch, hyper\) of", {}, NoLosses(1)),
        ("needs steps of GradientDescent as inner", {"algorithm": OBBO(hypergradient=Unrolled())}, OneUnused()),
        ("every must be an integer of at least 1, got 0", {"every": 0}, None),
        ("algorithm must be an instance of Algorithm", {"algorithm": "obbo"}, None),
        (r"scale must be the algorithm's own .* got 0\.1 beside it", {"algorithm": OBBO(), "scale": 0.1}, None),
        ("validation must be a loader or a function that returns a batch, got 3", {"validation": 3}, None),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(message, options, module):
    with pytest.raises(ValueError, match=message):
        OnlineTuner(**options).step(module, BATCH)


def test_a_batch_that_is_not_finite_is_skipped_or_raised():
    model = Ridge()
    bad = (make_rows()[0] * torch.nan, *make_rows()[1:])
    before = model.hyper.outer.clone()
    finished = OnlineTuner().step(model, bad, make_rows()[:2])
    assert bool(finished.skipped.all())
    assert torch.equal(model.hyper.outer, before)
    with pytest.raises(FloatingPointError, match="hypergradient is not finite"):
        OnlineTuner(on_nonfinite="raise").step(model, bad, make_rows()[:2])


def test_an_unused_value_is_named_once_after_three_steps():
    tuner, module = OnlineTuner(), OneUnused()
    for _ in range(2):
        tuner.step(module, BATCH)
    with pytest.warns(UserWarning, match="the losses do not depend on 'unused': use hyper"):
        tuner.step(module, BATCH)
    tuner.step(module, BATCH)
    assert module.hyper["unused"] == 0.5
    assert module.hyper["used"] != 0.5


def test_a_smaller_scale_makes_smaller_steps():
    changes = []
    for scale in (None, 0.03):
        module = OneUnused()
        OnlineTuner(scale=scale).step(module, BATCH)
        changes.append(math.log(float(module.hyper["used"]) / 0.5))
    assert changes[0] == pytest.approx(10 * changes[1], rel=1e-4)
    assert abs(changes[0]) == pytest.approx(0.3, rel=1e-4)


def test_a_given_step_of_the_fixed_point_replaces_that_of_the_optimizer(monkeypatch):
    used = []
    monkeypatch.setattr(
        "obbo_lightning.training.tuner.CurrentWeights",
        lambda network, lr: used.append(lr) or CurrentWeights(network, lr),
    )
    OnlineTuner(lr=0.05).step(OneUnused(), BATCH, lr=0.2)
    OnlineTuner().step(OneUnused(), BATCH, lr=0.2)
    OnlineTuner().step(OneUnused(), BATCH)
    assert [lr for lr in used if lr != 0.1] == [0.05, 0.2]
    assert used[-1] == 0.1


def record_rounds(monkeypatch):
    """Return a list of the seed of the losses, the key and the inner state of each outer step."""
    asked = []

    def record(problem, algorithm, step, task, state, key, shard):
        asked.append((problem.seed, (key.seed, key.round), state))
        return run_round(problem, algorithm, step, task, state, key, shard)

    monkeypatch.setattr("obbo_lightning.training.tuner.run_round", record)
    return asked


def test_the_seed_is_that_of_validation_batches_and_of_every_step(monkeypatch):
    asked, source = record_rounds(monkeypatch), DataLoader(torch.arange(10), batch_size=4, shuffle=True)
    for seed in (6, 7):
        tuner = OnlineTuner(source, seed=seed)
        assert tuner.validation.take().tolist() == ValidationBatches(source, seed).take().tolist()
        for _ in range(2):
            tuner.step(OneUnused(), BATCH)
    assert [key for _, key, _ in asked] == [(6, 0), (6, 1), (7, 0), (7, 1)]
    assert len({seed for seed, *_ in asked}) == 4


def test_a_step_starts_from_the_linear_solution_of_the_last_one_also_after_a_checkpoint(monkeypatch):
    asked, model = record_rounds(monkeypatch), Ridge()
    tuner, again = (OnlineTuner(algorithm=SOBOW(lr="auto", window=2)) for _ in range(2))
    finished = tuner.step(model, make_rows(), make_rows(7, seed=1)[:2])
    again.load_state_dict(tuner.state_dict())
    for one in (tuner, again):
        one.step(model, make_rows(), make_rows(7, seed=1)[:2])
    assert asked[0][2].linear_solution is None
    assert torch.equal(asked[1][2].linear_solution, finished.states[0].linear_solution)
    assert torch.equal(asked[2][2].linear_solution, finished.states[0].linear_solution)


def test_a_step_starts_from_the_present_values_of_the_module():
    tuner, module = make_still_tuner(), OneUnused()
    tuner.step(module, BATCH)
    module.hyper.outer.fill_(0.25)
    tuner.step(module, BATCH)
    assert float(module.hyper["used"]) == pytest.approx(0.25)
    tuner, first, second = OnlineTuner(), OneUnused(), OneUnused()  # another module gets its own values
    tuner.step(first, BATCH)
    moved = float(first.hyper["used"])
    tuner.step(second, BATCH)
    assert float(first.hyper["used"]) == moved != 0.5
    assert float(second.hyper["used"]) != 0.5


def test_only_sgd_has_a_step_for_the_fixed_point():
    weight = [nn.Parameter(torch.ones(1))]
    given = [torch.optim.SGD(weight, lr=0.3), torch.optim.Adam(weight, lr=0.3)]
    assert [_sgd_lr(SimpleNamespace(optimizers=[one])) for one in given] == [0.3, None]
    assert _sgd_lr(SimpleNamespace(optimizers=[])) is None


def test_a_value_that_is_sometimes_used_and_skipped_steps_give_no_warning():
    class Sometimes(OneUnused):
        """Uses its second value in every other step."""

        uses = False

        def training_loss(self, batch, hyper):
            weight = hyper["unused"] if self.uses else 0.0
            return super().training_loss(batch, hyper) + weight * self.weight.square().sum()

    tuner, module = OnlineTuner(), Sometimes()
    for module.uses in (False, True, False):
        tuner.step(module, BATCH)
    broken = OnlineTuner()
    for _ in range(3):
        assert bool(broken.step(OneUnused(), torch.full((4,), torch.nan)).skipped.all())


def test_the_cost_is_reported_relative_to_the_training_alone(monkeypatch):
    reports = []
    monkeypatch.setattr("obbo_lightning.training.tuner.rank_zero_info", reports.append)
    monkeypatch.setattr("obbo_lightning.training.tuner.time", SimpleNamespace(perf_counter=lambda: 12.0))
    tuner = OnlineTuner(every=3)
    tuner.batches, tuner.steps, tuner.seconds, tuner._started = 9, 3, 2.0, 2.0
    tuner.on_train_end(None, None)
    assert tuner.seconds_of_training == 8.0
    assert reports.pop() == (
        "OnlineTuner: 3 outer steps, one every 3 batches; training took 1.25 times as long as without them"
    )
    short = OnlineTuner(every=3)
    short.batches = 2
    short.on_train_end(None, None)
    assert reports == ["OnlineTuner: no outer step: every is 3, and there were 2 batches"]


def test_a_validation_batch_is_moved_to_the_device_and_loggers_get_at_most_100_values():
    logged, moved = [], []
    loggers = [SimpleNamespace(log_metrics=lambda numbers, step: logged.append((step, numbers)))] * 2
    strategy = SimpleNamespace(batch_to_device=lambda batch, dataloader_idx: moved.append(batch) or batch + 1)
    trainer = SimpleNamespace(strategy=strategy, optimizers=[], global_rank=0, world_size=1, global_step=3)
    trainer.log_every_n_steps, trainer.loggers = 1, loggers
    for size, named in ((100, 100), (101, 0)):
        module = OneUnused()
        module.hyper = Hyperparameters(pull=OnSimplex(size))
        tuner = OnlineTuner(
            [torch.zeros(4)],
            every=1,
            training_loss=lambda module, batch, hyper: module.weight.sum() * hyper["pull"][0],
            validation_loss=OneUnused.validation_loss,
        )
        tuner.on_train_batch_end(trainer, module, None, BATCH, 0)
        (step, numbers), other = logged[-2:]
        assert (step, numbers) == other
        assert step == 3
        assert len([name for name in numbers if name.startswith("hyper/pull[")]) == named
        assert numbers["tuner/validation_loss"] == 0.0  # the weight is 1, and so is the batch that was moved
    assert len(moved) == 2


class RandomExamples(Dataset):
    """Draws from all three generators, as transforms do."""

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return place, random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002


class RandomWalk:
    """Each batch depends on all that were drawn before it in its pass."""

    def __iter__(self):
        place = (0, 0.0, 0.0, 0.0)
        for n in range(4):
            place = (n, *(a + b for a, b in zip(place[1:], RandomExamples()[n][1:], strict=True)))
            yield place


@pytest.mark.parametrize(
    "source",
    [
        DataLoader(RandomExamples(), batch_size=2, collate_fn=list, shuffle=True),
        RandomWalk(),
        lambda n: RandomExamples()[n],
    ],
)
def test_validation_batches_resume_where_they_were_and_neither_depend_on_the_global_generators_nor_change_them(source):
    def begin(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002

    first = ValidationBatches(source, seed=5)
    begin(1)
    seen, states = [], []
    for _ in range(5):
        states.append(first.state_dict())
        seen.append(first.take())
    after = RandomExamples()[0]
    begin(1)
    assert after == RandomExamples()[0]
    for state, expected in zip(states, seen, strict=True):
        again = ValidationBatches(source, seed=5)
        again.load_state_dict(state)
        begin(2)
        assert again.take() == expected
    numbers = [one[k] for batch in seen for one in (batch if isinstance(batch, list) else [batch]) for k in (1, 2, 3)]
    assert len(set(numbers)) == len(numbers)
