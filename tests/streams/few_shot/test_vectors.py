"""Few-shot tasks from users' own vectors, sequences and tables."""

import warnings

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from obbo_lightning import OBBO, online
from obbo_lightning.networks import CNN4, MLP
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams import ExampleStream
from obbo_lightning.streams.fingerprints import digest_arrays

CLASSES, EACH = 12, 8
LABELS = np.repeat(np.arange(CLASSES), EACH)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(CLASSES * EACH, *shape)) + LABELS.reshape(-1, *(1 for _ in shape))


def write_npz(path, **changes):
    content = {"examples": numbers(5), "labels": LABELS, **changes}
    np.savez(path, **{k: v for k, v in content.items() if v is not None})
    return path


def table(**columns):
    features = {f"x{i}": column for i, column in enumerate(numbers(5).T)}
    return pl.DataFrame({"label": LABELS, **features, **columns})


def small(path, **settings):
    return ExampleStream(str(path), **{"ways": 2, "shots": 3, "queries": 4, **settings})


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_table_and_npz_of_the_same_examples_give_the_same_tasks(tmp_path, kind):
    path = tmp_path / f"own.{kind}"
    getattr(table(), f"write_{kind}")(path)
    one, two = small(path), small(write_npz(tmp_path / "own.npz"))
    assert one.names == two.names
    for tasks in ("train", "validation", "test"):
        first, second = (getattr(stream, tasks)[5] for stream in (one, two))
        assert first["support"].shape == (6, 5)
        assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_each_feature_is_standardised_by_the_training_classes(tmp_path, shape):
    examples = numbers(5) * [1, 10, 100, 1e-3, 0] + [0, 0, 1e9, 0, 7]
    examples[LABELS >= 9] *= 5
    path = write_npz(tmp_path / "own.npz", examples=examples.reshape(-1, *shape))
    stream = small(path, test_classes=[9, 10, 11])
    rows = np.isin(LABELS, [int(name) for name in stream.inputs()["trained_on"]])
    assert rows.sum() == 56
    found = stream.train.source.examples.numpy().reshape(-1, 5)
    seen = examples[:, :4]
    assert np.allclose(found[:, :4], (seen - seen[rows].mean(0)) / seen[rows].std(0), rtol=1e-5, atol=1e-5)
    assert (found[rows, 4] == 0).all()  # a constant
    assert np.isfinite(found).all()


def test_classes_are_split_and_have_digests(tmp_path):
    path = write_npz(tmp_path / "own.npz")
    stream = small(path, test_classes=["3", 7])
    assert sorted(stream.names[c] for c in stream.test.classes) == ["3", "7"]
    splits = [set(tasks.classes.tolist()) for tasks in (stream.train, stream.validation, stream.test)]
    assert len(set.union(*splits)) == sum(map(len, splits)) == 12
    again = small(path, test_classes=["3", 7], seed=5)
    assert again.train.classes.tolist() == stream.train.classes.tolist()
    digests = stream.source_digests()
    assert digests["3"] == digest_arrays(numbers(5)[24:32])
    assert len(set(digests.values())) == 12


def test_labels_are_kept_as_text(tmp_path):
    text = [f"0{c:02d}" for c in LABELS]
    table().with_columns(kind=pl.Series(text)).drop("label").write_csv(tmp_path / "own.csv")
    stream = small(tmp_path / "own.csv", label="kind", test_classes=["010", "011"])
    assert stream.names[:2] == ["000", "001"]
    assert [stream.names[c] for c in stream.test.classes] == ["010", "011"]


class Recurrent(nn.Module):
    def __init__(self, ways, shape):
        super().__init__()
        self.layer = nn.GRU(shape[1], 6, batch_first=True)
        self.linear = nn.Linear(6, ways)

    def forward(self, sequences):
        return self.linear(self.layer(sequences)[0][:, -1])


@pytest.mark.parametrize(("shape", "network"), [((5,), None), ((7, 3), None), ((7, 3), Recurrent), ((3, 16, 16), CNN4)])
def test_rounds_run_on_examples_of_any_shape(tmp_path, shape, network):
    stream = small(write_npz(tmp_path / "own.npz", examples=numbers(*shape)))
    channels, size = (3, 16) if len(shape) == 3 else (None, None)
    assert stream.task_spec() == {"ways": 2, "shape": list(shape), "channels": channels, "image_size": size}
    problem = stream.problem(network=network)
    assert isinstance(problem.network.template, network or MLP)
    algorithm = OBBO(inner=GradientDescent(2, 0.01, "outer"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fixed point need not contract here
        *_, last = online(problem, algorithm, stream.train[:3], stream.start(problem, 0))
    assert bool(last.loss.isfinite().all())
    if channels is None:
        with pytest.raises(ValueError, match="must not need channels, which these tasks do not have, got CNN4"):
            stream.problem(network=CNN4)


@pytest.mark.parametrize("network", [[], ["--problem.network.widths", "[6]"]])
def test_examples_become_a_run_with_flags_only(tmp_path, network, fit, capsys):
    path = write_npz(tmp_path / "own.npz")
    flags = ["--data", "examples", "--data.path", path, "--data.ways", "2", "--data.shots", "3"]
    flags += ["--problem.network", "mlp", *network]
    fit(*flags, "--rounds", "2", "--evaluation.tasks", "2", "--algorithm.inner.steps", "2")
    assert "gain by learning, paired; above 0 is better" in capsys.readouterr().out


def nan_in_row_4():
    examples = numbers(5)
    examples[3, 2] = np.nan
    return examples


@pytest.mark.parametrize(
    ("name", "make", "settings", "message"),
    [
        ("own.npz", lambda p: None, {}, "data.path must be an npz, csv or parquet file that exists, got"),
        ("own.txt", lambda p: p.write_text("1,2"), {}, "must be an npz, csv or parquet file that exists, got"),
        ("own.npz", lambda p: write_npz(p, labels=None), {}, "must hold examples, labels, got examples"),
        ("own.npz", lambda p: write_npz(p, examples=LABELS), {}, "examples must be numbers [n, …], at least one, got"),
        ("own.npz", lambda p: write_npz(p, examples=np.zeros((96, 0))), {}, "at least one, got float64 [96, 0]"),
        ("own.npz", lambda p: write_npz(p, examples=numbers(5).astype(str)), {}, "examples must be numbers [n, …]"),
        ("own.npz", lambda p: write_npz(p, examples=numbers(5) + 1j), {}, "at least one, got complex128 [96, 5]"),
        ("own.npz", lambda p: write_npz(p, examples=nan_in_row_4()), {}, "got NaN or infinity in example 4"),
        ("own.csv", lambda p: p.write_text(""), {}, "own.csv cannot be read as CSV"),
        ("own.parquet", lambda p: p.write_text("no"), {}, "own.parquet cannot be read as parquet"),
        ("own.csv", lambda p: table().write_csv(p), {"label": "kind"}, "which are 'label', 'x0', 'x1', 'x2', 'x3', …"),
        ("own.csv", lambda p: table(x1="red").write_csv(p), {}, "row 1: 'x1' must be a finite number, got 'red'"),
        ("own.csv", lambda p: table()[:0].write_csv(p), {}, "must have rows, and columns besides 'label', got [0, 6]"),
        ("own.csv", lambda p: table()["label"].to_frame().write_csv(p), {}, "and columns besides 'label', got [96, 1]"),
        ("own.parquet", lambda p: table(label=LABELS / 2).write_parquet(p), {}, "'label' must be integers or text"),
        ("own.parquet", lambda p: table(x2=[1.0, None] * 48).write_parquet(p), {}, "row 2: 'x2' must be a finite"),
        ("own.csv", lambda p: table(x2=nan_in_row_4()[:, 2]).write_csv(p), {}, "row 4: 'x2' must be a finite number"),
    ],
)
def test_unusable_examples_are_refused_in_one_line(tmp_path, name, make, settings, message):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=r"^.*$") as refused:
        small(tmp_path / name, **settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
