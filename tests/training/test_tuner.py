"""OnlineTuner: hypergradients against differences, training unchanged, checkpoints, loops of all kinds."""

import csv
import random
import re
import warnings
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from small_runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from obbo_lightning import OAGD, OBBO, SOBBO, SOBOW, Adam, Hyperparameters, OnlineTuner, OnSimplex, Positive
from obbo_lightning.core.round import run_round
from obbo_lightning.core.step_map import SHORT, StepMap
from obbo_lightning.hypergradients import ClosedForm, ConjugateGradient, FixedPoint, Unrolled
from obbo_lightning.problems.module import CurrentWeights
from obbo_lightning.testing import central_difference
from obbo_lightning.training.tuner import ValidationBatches

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finished = OnlineTuner(algorithm=algorithm, folds="new").step(model, batch, other[:2], optimizer)
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
    assert tuners[2].result.summary() == tuners[0].result.summary()
    assert tuners[2].values() == tuners[0].values()


def test_a_result_is_known_as_soon_as_a_training_is_resumed():
    first, again, module = *(OnlineTuner(clean_loader(), every=2) for _ in range(2)), Sources()
    fit(module, first)
    again.load_state_dict(first.state_dict())
    again.on_train_start(None, module)
    assert len(again.result.lines()) == 2
    assert again.result.lines() == first.result.lines()


def test_a_second_fit_goes_on_where_the_first_one_ended():
    whole, parts = Sources(), Sources()
    tuners = [OnlineTuner(clean_loader(), every=2) for _ in range(2)]
    batch = next(iter(loader()))
    for tuner, module in zip(tuners, (whole, parts), strict=True):
        trainer = SimpleNamespace(loggers=[])
        for step in range(6):
            if tuner is tuners[1]:
                tuner.on_train_start(trainer, module)
            fold, validation_batch = tuner.validation.take(step)
            tuner.step(module, batch, validation_batch, fold=fold)
    assert torch.equal(whole.hyper.outer, parts.hyper.outer)
    assert tuners[0].result.summary() == tuners[1].result.summary()


def test_a_module_in_float64_starts_at_exactly_a_third_and_takes_values_learned_in_float32():
    class Thirds(Ridge):
        def __init__(self, dtype=F64):
            super().__init__()
            self.hyper = Hyperparameters(sources=OnSimplex(3), decay=Positive(0.7, lower=0.7)).to(dtype)

    module = Thirds()
    assert module.hyper["sources"].tolist() == [1 / 3] * 3
    tuner = OnlineTuner(folds="new")
    assert tuner.step(module, make_rows(), make_rows(7, seed=1)).outer.dtype == F64
    single = Thirds(torch.float32)
    rounded = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.7]])
    single.hyper.outer.copy_(rounded)
    for learned in (single, Thirds()):
        learned.double()
        learned.hyper.load_state_dict({"outer": rounded})
        found = OnlineTuner(folds="new").step(learned, make_rows(), make_rows(7, seed=1))
        assert bool(found.outer.isfinite().all())
        assert float(learned.hyper["sources"].sum()) == pytest.approx(1, abs=1e-15)
        assert float(learned.hyper["decay"]) >= 0.7


def test_accumulated_gradients_and_clipping_leave_outer_steps_as_they_are():
    for options, steps in (({"accumulate_grad_batches": 4}, 6), ({"gradient_clip_val": 1e-9}, 6)):
        module, tuner = Sources(), OnlineTuner(clean_loader(), every=2)
        fit(module, tuner, **options)
        assert tuner.steps == steps
        assert not torch.equal(module.hyper.outer, Sources().hyper.outer)


def test_a_plain_loop_and_a_trainer_give_the_same_values():
    module, tuner = Sources(), OnlineTuner(clean_loader(), every=2)
    fit(module, tuner, deterministic=True)
    plain, plain_tuner, validation = Sources(), OnlineTuner(every=2, folds=4), ValidationBatches(clean_loader())
    (optimizer,), _ = plain.configure_optimizers()
    torch.manual_seed(3)
    for i, batch in enumerate(loader()):
        optimizer.zero_grad()
        plain.training_loss(batch, plain.hyper).backward()
        optimizer.step()
        if i % 2:
            fold, validation_batch = validation.take(plain_tuner.steps)
            plain_tuner.step(plain, batch, validation_batch, optimizer, fold)
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
    tuner = OnlineTuner(clean_loader(), every=2)
    fit(Sources(), tuner, logger=CSVLogger(tmp_path), log_every_n_steps=4)
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "8", "12", "12"]  # and the result
    expected = {"hyper/sources[0]", "hyper/decay", "tuner/validation_loss", "tuner/lr/sources"}
    assert all(row[name] for row in rows[:-1] for name in expected)
    found = tuner.result.summary()
    assert {name: float(rows[-1][name]) for name in tuner.result.metrics()} == tuner.result.metrics()
    for name, value in tuner.values().items():
        assert float(rows[-1][f"hyper/{name}"]) == value
    assert float(rows[-1]["tuner/gain/decay"]) == found["decay"]["gain"]
    assert "6 outer steps, one every 2 batches; training took " in reports[0]
    assert reports[1:] == tuner.result.lines()
    assert reports[1].startswith("OnlineTuner: sources [0.5, 0.5] → [")
    assert reports[2].startswith("OnlineTuner: decay 0.001 → ")


def test_the_result_is_written_as_text_where_a_logger_has_a_place_for_it(tmp_path, monkeypatch):
    texts, numbers, summary = [], [], {}
    board = TensorBoardLogger(tmp_path)
    monkeypatch.setattr(TensorBoardLogger, "experiment", SimpleNamespace(add_text=lambda *text: texts.append(text)))
    monkeypatch.setattr(TensorBoardLogger, "log_metrics", lambda self, metrics, step: numbers.append((metrics, step)))
    online = WandbLogger.__new__(WandbLogger)
    monkeypatch.setattr(WandbLogger, "experiment", SimpleNamespace(summary=summary))
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda self, metrics, step: numbers.append((metrics, step)))
    tuner = OnlineTuner(clean_loader(), every=2, folds=2)
    fit(Sources(), tuner)
    tuner.on_train_end(SimpleNamespace(loggers=[board, online], global_step=12), None)
    assert [step for _, step in numbers] == [12, 12]
    assert numbers[0][0].keys() >= {"hyper/decay", "tuner/gain/decay", "tuner/gain_se/decay", "tuner/helped/decay"}
    assert texts == [("tuner/result", "\n\n".join(tuner.result.lines()), 12)]
    assert summary["tuner/result/decay"] == tuner.result.summary()["decay"]


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
        (
            r"needs steps of GradientDescent as inner, got inner CurrentWeights\(\)$",
            {"algorithm": OBBO(hypergradient=Unrolled())},
            OneUnused(),
        ),
        (r"hypergradient must be FixedPoint or ConjugateGradient: .*, got StochasticN", {"algorithm": SOBBO()}, None),
        (
            "hypergradient 'ClosedForm' needs a closed form",
            {"algorithm": OBBO(hypergradient=ClosedForm())},
            OneUnused(),
        ),
        ("every must be an integer of at least 1, got 0", {"every": 0}, None),
        ("algorithm must be an instance of Algorithm", {"algorithm": "obbo"}, None),
        ("validation must be a loader or a function that returns a batch, got 3", {"validation": 3}, None),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(message, options, module):
    with pytest.raises(ValueError, match=message):
        OnlineTuner(**{"folds": "new", **options}).step(module, BATCH)


def test_a_batch_that_is_not_finite_is_skipped_or_raised():
    model = Ridge()
    bad = (make_rows()[0] * torch.nan, *make_rows()[1:])
    before = model.hyper.outer.clone()
    finished = OnlineTuner(folds="new").step(model, bad, make_rows()[:2])
    assert bool(finished.skipped.all())
    assert torch.equal(model.hyper.outer, before)
    with pytest.raises(FloatingPointError, match="hypergradient is not finite"):
        OnlineTuner(on_nonfinite="raise", folds="new").step(model, bad, make_rows()[:2])


def test_an_unused_value_is_refused_after_three_steps_with_its_name_and_where_to_read():
    tuner, module = OnlineTuner(folds="new"), OneUnused()
    for _ in range(2):
        tuner.step(module, BATCH)
    message = r"^training_loss must depend on 'unused': use hyper\[name\] in it.* learning rate.*\(docs/tunable.md\)"
    with pytest.raises(ValueError, match=message):
        tuner.step(module, BATCH)
    assert module.hyper["unused"] == 0.5


def test_a_value_that_only_the_validation_loss_uses_is_refused_also_after_a_checkpoint():
    class InValidation(OneUnused):
        def validation_loss(self, batch, hyper):
            return super().validation_loss(batch, hyper) * hyper["unused"]

    tuner, again, module = OnlineTuner(folds="new"), OnlineTuner(folds="new"), InValidation()
    for _ in range(2):
        tuner.step(module, BATCH)
    again.load_state_dict(tuner.state_dict())
    with pytest.raises(ValueError, match="training_loss must depend on 'unused'"):
        again.step(module, BATCH)


def test_a_learning_rate_of_zero_or_weights_of_zero_are_no_reason_to_refuse():
    class Penalty(OneUnused):
        def training_loss(self, batch, hyper):
            return super().training_loss(batch, hyper) + hyper["unused"]

    module, tuner = Penalty(), OnlineTuner(folds="new")
    for _ in range(4):
        finished = tuner.step(module, BATCH, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
        assert not finished.hypergradient.any()


def test_the_fixed_point_is_that_of_the_users_optimizer(monkeypatch):
    used = []
    monkeypatch.setattr(
        "obbo_lightning.training.tuner.CurrentWeights",
        lambda network, found: used.append(found) or CurrentWeights(network, found),
    )
    module = OneUnused()
    given = [
        torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5, weight_decay=0.1),
        [torch.optim.AdamW(module.parameters(), lr=0.2, weight_decay=0.5)],
        LightningOptimizer(torch.optim.SGD(module.parameters(), lr=0.3)),
        None,
        [],
    ]
    expected = [StepMap(0.4, 0.1), StepMap(0.2, 0.0, 0.1), StepMap(0.3), StepMap(SHORT), StepMap(SHORT)]
    for optimizer, found in zip(given, expected, strict=True):
        OnlineTuner(folds="new").step(module, BATCH, optimizer=optimizer)
        assert used[-1] == found
    optimizer, other = (torch.optim.Adam(module.parameters(), lr=0.2) for _ in range(2))
    wrapper = LightningOptimizer(optimizer)
    module.weight.grad = torch.full((1,), 5.0)
    other.step()
    optimizer.load_state_dict(other.state_dict())  # as a checkpoint does
    OnlineTuner(folds="new").step(module, BATCH, optimizer=wrapper)
    assert float(used[-1].size) == pytest.approx(0.2 / 5)


def test_an_unknown_optimizer_is_named_once():
    module, tuner = OneUnused(), OnlineTuner(folds="new")
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="the steps of LBFGS are not known to OnlineTuner: its lr is used as that of"):
        tuner.step(module, BATCH, optimizer=optimizer)
    tuner.step(module, BATCH, optimizer=[LightningOptimizer(optimizer)])


@pytest.mark.filterwarnings("error:the fixed point")
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad"])
def test_large_steps_of_the_optimizer_give_no_warning_about_contraction(name):
    module, tuner = Sources(), OnlineTuner(folds="new")
    optimizer = getattr(torch.optim, name)(module.net.parameters(), lr=50.0)
    batch = next(iter(loader()))
    for _ in range(2):
        optimizer.zero_grad()
        module.training_loss(batch, module.hyper).backward()
        assert bool(tuner.step(module, batch, batch, optimizer).hypergradient.isfinite().all())
        optimizer.step()


def test_conjugate_gradients_use_the_decay_of_the_optimizer():
    estimates = {}
    for decay in (0.0, 0.5):
        for estimator in (FixedPoint(steps=2000), ConjugateGradient(steps=10)):
            torch.manual_seed(0)
            model = Ridge()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay)
            tuner = OnlineTuner(algorithm=OBBO(window=1, hypergradient=estimator), folds="new")
            found = tuner.step(model, make_rows(), make_rows(7, seed=1), optimizer)
            estimates[decay, type(estimator)] = found.hypergradient
    for decay in (0.0, 0.5):
        torch.testing.assert_close(estimates[decay, FixedPoint], estimates[decay, ConjugateGradient], rtol=1e-8, atol=0)
    assert not torch.allclose(estimates[0.0, FixedPoint], estimates[0.5, FixedPoint], rtol=1e-2)


def test_a_fold_must_be_one_of_the_folds():
    for fold in (-1, 2):
        with pytest.raises(ValueError, match=f"fold must be from 0 to 1, got {fold}"):
            OnlineTuner(folds=2).step(OneUnused(), BATCH, fold=fold)


def test_folds_are_those_of_the_validation_batches(monkeypatch):
    asked = record_rounds(monkeypatch)
    fit(Sources(), OnlineTuner(clean_loader(), every=2))
    fit(Sources(), OnlineTuner(clean_loader(), every=2, folds=3))
    fit(Sources(), OnlineTuner(list(clean_loader()) + list(clean_loader())[:1], every=2, folds=2))
    plain = OnlineTuner(folds=2)
    for fold in (None, None, 0):
        plain.step(OneUnused(), BATCH, fold=fold)
    folds = [fold for *_, fold in asked]
    assert folds == [0, 1, 2, 3, 0, 1] + [0, 1, 2] * 2 + [0, 1, 0] * 2 + [0, 1, 0]


def record_rounds(monkeypatch):
    """Return a list of the seed of the losses, the key, the inner state and the fold of each outer step."""
    asked = []

    def record(problem, algorithm, step, task, state, key, shard, fold):
        asked.append((problem.seed, (key.seed, key.round), state, fold))
        return run_round(problem, algorithm, step, task, state, key, shard, fold)

    monkeypatch.setattr("obbo_lightning.training.tuner.run_round", record)
    return asked


def test_the_seed_is_that_of_validation_batches_and_of_every_step(monkeypatch):
    asked, source = record_rounds(monkeypatch), DataLoader(torch.arange(10), batch_size=4, shuffle=True)
    for seed in (6, 7):
        tuner = OnlineTuner(source, seed=seed)
        expected = ValidationBatches(source, seed=seed).take(0)
        assert [tuner.validation.take(0)[1].tolist()] == [expected[1].tolist()]
        for _ in range(2):
            tuner.step(OneUnused(), BATCH)
    assert [key for _, key, *_ in asked] == [(6, 0), (6, 1), (7, 0), (7, 1)]
    assert len({seed for seed, *_ in asked}) == 4


def test_a_step_starts_from_the_linear_solution_of_the_last_one_also_after_a_checkpoint(monkeypatch):
    asked, model = record_rounds(monkeypatch), Ridge()
    tuner, again = (OnlineTuner(algorithm=SOBOW(lr="auto", window=2), folds="new") for _ in range(2))
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
    tuner, first, second = OnlineTuner(folds="new"), OneUnused(), OneUnused()  # another module gets its own values
    tuner.step(first, BATCH)
    moved = float(first.hyper["used"])
    tuner.step(second, BATCH)
    assert float(first.hyper["used"]) == moved != 0.5
    assert float(second.hyper["used"]) != 0.5


def test_a_value_that_is_sometimes_used_and_skipped_steps_are_not_refused():
    class Sometimes(OneUnused):
        """Uses its second value in every other step."""

        uses = False

        def training_loss(self, batch, hyper):
            weight = hyper["unused"] if self.uses else 0.0
            return super().training_loss(batch, hyper) + weight * self.weight.square().sum()

    tuner, module = OnlineTuner(folds="new"), Sometimes()
    for module.uses in (False, True, False):
        tuner.step(module, BATCH)
    broken, module = OnlineTuner(folds="new"), OneUnused()
    for _ in range(4):
        assert bool(broken.step(module, torch.full((4,), torch.nan)).skipped.all())


def test_the_cost_is_reported_relative_to_the_training_alone(monkeypatch):
    reports = []
    monkeypatch.setattr("obbo_lightning.training.tuner.rank_zero_info", reports.append)
    monkeypatch.setattr("obbo_lightning.training.tuner.time", SimpleNamespace(perf_counter=lambda: 12.0))
    tuner = OnlineTuner(every=3, folds="new")
    tuner.batches, tuner.steps, tuner.seconds, tuner._started = 9, 3, 2.0, 2.0
    tuner.on_train_end(SimpleNamespace(loggers=[]), None)
    assert tuner.seconds_of_training == 8.0
    assert reports.pop() == (
        "OnlineTuner: 3 outer steps, one every 3 batches; training took 1.25 times as long as without them"
    )
    short = OnlineTuner(every=3, folds="new")
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
            folds="new",
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


def test_a_fixed_point_that_is_told_to_go_on_warns_of_what_is_wrong_and_of_nothing_else():
    module, batch = Sources(), next(iter(loader()))
    algorithm = OBBO(window=1, hypergradient=FixedPoint(steps=5))
    for lr, expected in ((1e-3, []), (100.0, [r"does not contract \(its residual grows\), .* FixedPoint\(while_con"])):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer = torch.optim.SGD(module.net.parameters(), lr=lr)
            OnlineTuner(algorithm=algorithm, folds="new").step(module, batch, batch, optimizer)
        assert len(seen) == len(expected)
        for warning, message in zip(seen, expected, strict=True):
            assert re.search(message, str(warning.message))
