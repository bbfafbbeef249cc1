"""Few-shot tasks from users' own images (one folder per class, or an npz file), vectors, sequences and tables."""

import warnings

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from torch import nn

from obbo_lightning import OBBO, online
from obbo_lightning.networks import CNN4, MLP
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams import ExampleStream, ImageFolderStream
from obbo_lightning.streams.few_shot.stored import split_classes
from obbo_lightning.streams.fingerprints import digest_arrays

CLASSES, EACH = 12, 8
LABELS = np.repeat(np.arange(CLASSES), EACH)
RATIOS = [0.6, 0.2, 0.2]


def random_images(rng, count, height=20, width=20, channels=3):
    shape = (count, height, width) if channels == 1 else (count, height, width, channels)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_images(path, **changes):
    content = {"images": random_images(np.random.default_rng(0), 96), "labels": LABELS}
    np.savez(path, **{k: v for k, v in {**content, **changes}.items() if v is not None})
    return path


def write_folder(root, **shape):
    rng = np.random.default_rng(0)
    for c in range(12):
        (root / f"class{c:02d}").mkdir(parents=True)
        for i, image in enumerate(random_images(rng, 8, **shape)):
            Image.fromarray(image).save(root / f"class{c:02d}" / f"{i}.png")
    return root


def image_stream(path, **settings):
    return ImageFolderStream(str(path), **{"ways": 2, "shots": 3, "queries": 4, **settings})


@pytest.mark.parametrize("channels", [1, 3])
def test_folder_and_npz_of_the_same_images_give_the_same_classes(tmp_path, channels):
    folder = write_folder(tmp_path / "folder", channels=channels)
    rng = np.random.default_rng(0)
    images = np.concatenate([random_images(rng, 8, channels=channels) for _ in range(12)])
    names = np.repeat([f"class{c:02d}" for c in range(12)], 8)
    order = rng.permutation(len(names))
    np.savez(tmp_path / "own.npz", images=images[order], labels=names[order])
    streams = [image_stream(folder), image_stream(tmp_path / "own.npz")]
    for stream in streams:
        spec = {"ways": 2, "shape": [channels, 20, 20], "channels": channels, "image_size": 20}
        assert stream.task_spec() == spec
        assert stream.names == streams[0].names
        assert stream.train.classes.tolist() == streams[0].train.classes.tolist()
    drawn = [stream.train.source.draw(torch.zeros(8).long(), torch.Generator()) for stream in streams]
    one, two = ({tuple(image.flatten().tolist()) for image in images} for images in drawn)
    assert one == two


def test_pixels_are_standardised_by_each_channel_of_the_training_classes(tmp_path):
    images, labels = random_images(np.random.default_rng(0), 60, 16, 16), np.repeat(np.arange(6), 10)
    images[..., 1] = 51  # a constant has no deviation
    images[..., 2] //= 4
    images[labels == 5] = 255
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    lists = {"train_classes": [0, 1], "validation_classes": [2, 3], "test_classes": [4, 5]}
    stream = image_stream(tmp_path / "own.npz", shots=2, queries=2, **lists)
    seen = images[labels < 2] / 255
    mean, deviation = seen.mean((0, 1, 2)), seen.std((0, 1, 2))
    deviation[1] = 1.0
    assert np.allclose(stream.inputs()["mean"], mean)
    assert np.allclose(stream.inputs()["deviation"], deviation)
    assert stream.inputs()["trained_on"] == ["0", "1"]
    task = stream.train[3]
    known = torch.from_numpy((images / 255 - mean) / deviation).permute(0, 3, 1, 2).float()
    rows = [int((known - image).abs().amax((1, 2, 3)).argmin()) for image in task["support"]]
    assert torch.allclose(task["support"], known[rows], atol=1e-5)
    assert sorted(labels[rows]) == [0, 0, 1, 1]
    assert len({(int(label), labels[row]) for label, row in zip(task["support_labels"], rows, strict=True)}) == 2
    assert task["support"].is_contiguous()  # faster for second derivatives than channels-last
    assert task["query"].is_contiguous()


def test_images_of_any_size_are_cropped_and_resized(tmp_path):
    root = write_folder(tmp_path, height=40, width=30)
    Image.fromarray(np.zeros((25, 50), np.uint8)).save(root / "class00" / "grey.jpg")  # grey among RGB
    stream = image_stream(root, image_size=16)
    assert stream.train[0]["support"].shape == (6, 3, 16, 16)
    assert (stream.task_spec()["channels"], stream.task_spec()["image_size"]) == (3, 16)


def test_images_of_an_npz_file_are_resized_by_pillow(tmp_path):
    images, labels = random_images(np.random.default_rng(0), 40, 32, 48, channels=1), np.arange(40) % 10
    expected = np.asarray(Image.fromarray(images[7][:, 8:40]).resize((16, 16), Image.Resampling.BILINEAR))
    square = np.ascontiguousarray(images[:, :, 8:40])
    # at the border of the square, Pillow uses pixels beside it
    for given, inside in ((images, slice(1, 15)), (square, slice(0, 16))):
        np.savez(tmp_path / "own.npz", images=given, labels=labels)
        stream = image_stream(tmp_path / "own.npz", image_size=16, shots=1, queries=1)
        assert np.array_equal(stream.train.source.examples[7, 0, :, inside], expected[:, inside])


def test_class_that_no_split_uses_may_be_small(tmp_path):
    labels = np.repeat(np.arange(13), 8)[: 12 * 8 + 1]
    np.savez(tmp_path / "own.npz", images=random_images(np.random.default_rng(0), len(labels)), labels=labels)
    lists = {"train_classes": [0, 1, 2], "validation_classes": [3, 4], "test_classes": [5, 6]}
    assert image_stream(tmp_path / "own.npz", **lists).names[-1] == "9"
    with pytest.raises(ValueError, match="at most 1, all examples of class"):
        image_stream(tmp_path / "own.npz", **{**lists, "test_classes": [5, 12]})


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"labels": None}, [], "must hold images, labels, got images"),
        ({"images": np.zeros((96, 20, 20))}, [], "images must be uint8 [n, height, width]"),
        ({"images": np.zeros((96, 20, 20, 2), np.uint8)}, [], "got uint8 [96, 20, 20, 2]"),
        ({"labels": np.zeros(5, int)}, [], "labels must be integers or text [96], got int64 [5]"),
        ({"labels": np.zeros(96)}, [], "got float64 [96]"),
        ({"images": np.zeros((96, 20, 30), np.uint8)}, [], "data.image_size must be given"),
        ({"images": np.zeros((96, 8, 8), np.uint8)}, [], "must be an integer of at least 16, got 8"),
        ({}, ["--data.image_size", "8"], "data.image_size must be an integer of at least 16, got 8"),
        ({}, ["--data.ways", "3"], "at most the 2 classes of the test split, got 3"),
        ({}, ["--data.shots", "6"], "data.shots + data.queries must be at most 8, all examples of class"),
        ({}, ["--data.test_classes", "[77]"], "data.test_classes must be of the 12 classes, and in no other"),
        ({}, ["--data.train_classes", "[1, 2]", "--data.test_classes", "[2, 3]"], "and in no other list, got '2'"),
        ({}, ["--data.ratios", "[0.5, 0.5]"], "data.ratios must be three shares, none negative"),
        ({}, ["--data.ratios", "[0, 0.5, 0.5]"], "must leave classes to train on, got none"),
    ],
)
def test_unusable_files_and_settings_are_refused(tmp_path, changes, flags, message, refusal):
    write_images(tmp_path / "own.npz", **changes)
    assert message in refusal("--data", "images", "--data.path", "own.npz", "--data.ways", 2, "--data.shots", 3, *flags)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: [p.unlink() for p in (root / "class03").iterdir()], "class03 must hold images"),
        (lambda root: (root / "class03" / "0.png").write_bytes(b"no image"), "cannot be read as an image"),
        (
            lambda root: Image.fromarray(np.zeros((20, 20), np.float32)).save(root / "class03" / "x.tiff"),
            "x.tiff cannot be read as an image: its pixels are of mode F",
        ),
        (
            lambda root: Image.fromarray(np.zeros((30, 30, 3), np.uint8)).save(root / "class03" / "x.png"),
            "data.image_size must be given for images of several sizes, got 20x20, 30x30",
        ),
    ],
)
def test_unusable_folders_are_refused(tmp_path, spoil, message, refusal):
    spoil(write_folder(tmp_path / "f"))
    assert message in refusal("--data", "images", "--data.path", "f")
    assert "data.path" in refusal("--data", "images")
    error = refusal("--data", "images", "--data.path", "none.npz")
    assert "data.path must be a folder or an npz file that exists, got 'none.npz'" in error


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(CLASSES * EACH, *shape)) + LABELS.reshape(-1, *(1 for _ in shape))


def write_examples(path, **changes):
    content = {"examples": numbers(5), "labels": LABELS, **changes}
    np.savez(path, **{k: v for k, v in content.items() if v is not None})
    return path


def table(**columns):
    features = {f"x{i}": column for i, column in enumerate(numbers(5).T)}
    return pl.DataFrame({"label": LABELS, **features, **columns})


def example_stream(path, **settings):
    return ExampleStream(str(path), **{"ways": 2, "shots": 3, "queries": 4, **settings})


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_table_and_npz_of_the_same_examples_give_the_same_tasks(tmp_path, kind):
    path = tmp_path / f"own.{kind}"
    getattr(table(), f"write_{kind}")(path)
    one, two = example_stream(path), example_stream(write_examples(tmp_path / "own.npz"))
    assert one.names == two.names
    for tasks in ("train", "validation", "test"):
        first, second = (getattr(stream, tasks)[5] for stream in (one, two))
        assert first["support"].shape == (6, 5)
        assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_each_feature_is_standardised_by_the_training_classes(tmp_path, shape):
    examples = numbers(5) * [1, 10, 100, 1e-3, 0] + [0, 0, 1e9, 0, 7]
    examples[LABELS >= 9] *= 5
    path = write_examples(tmp_path / "own.npz", examples=examples.reshape(-1, *shape))
    stream = example_stream(path, test_classes=[9, 10, 11])
    rows = np.isin(LABELS, [int(name) for name in stream.inputs()["trained_on"]])
    assert rows.sum() == 56
    found = stream.train.source.examples.numpy().reshape(-1, 5)
    seen = examples[:, :4]
    assert np.allclose(found[:, :4], (seen - seen[rows].mean(0)) / seen[rows].std(0), rtol=1e-5, atol=1e-5)
    assert (found[rows, 4] == 0).all()  # a constant
    assert np.isfinite(found).all()


def test_classes_are_split_and_have_digests(tmp_path):
    path = write_examples(tmp_path / "own.npz")
    stream = example_stream(path, test_classes=["3", 7])
    assert sorted(stream.names[c] for c in stream.test.classes) == ["3", "7"]
    splits = [set(tasks.classes.tolist()) for tasks in (stream.train, stream.validation, stream.test)]
    assert len(set.union(*splits)) == sum(map(len, splits)) == 12
    again = example_stream(path, test_classes=["3", 7], seed=5)
    assert again.train.classes.tolist() == stream.train.classes.tolist()
    digests = stream.source_digests()
    assert digests["3"] == digest_arrays(numbers(5)[24:32])
    assert len(set(digests.values())) == 12


def test_labels_are_kept_as_text(tmp_path):
    text = [f"0{c:02d}" for c in LABELS]
    table().with_columns(kind=pl.Series(text)).drop("label").write_csv(tmp_path / "own.csv")
    stream = example_stream(tmp_path / "own.csv", label="kind", test_classes=["010", "011"])
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
    stream = example_stream(write_examples(tmp_path / "own.npz", examples=numbers(*shape)))
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


NAN = numbers(5)
NAN[3, 2] = np.nan


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.npz", None, "data.path must be an npz, csv or parquet file that exists, got"),
        ("own.txt", "1,2", "must be an npz, csv or parquet file that exists, got"),
        ("own.npz", {"labels": None}, "must hold examples, labels, got examples"),
        ("own.npz", {"examples": LABELS}, "examples must be numbers [n, …], at least one, got"),
        ("own.npz", {"examples": np.zeros((96, 0))}, "at least one, got float64 [96, 0]"),
        ("own.npz", {"examples": numbers(5).astype(str)}, "examples must be numbers [n, …]"),
        ("own.npz", {"examples": numbers(5) + 1j}, "at least one, got complex128 [96, 5]"),
        ("own.npz", {"examples": NAN}, "got NaN or infinity in example 4"),
        ("own.csv", "", "own.csv cannot be read as CSV"),
        ("own.parquet", "no", "own.parquet cannot be read as parquet"),
        ("own.csv", table().rename({"label": "kind"}), "which are 'kind', 'x0', 'x1', 'x2', 'x3', …"),
        ("own.csv", table(x1="red"), "row 1: 'x1' must be a finite number, got 'red'"),
        ("own.csv", table()[:0], "must have rows, and columns besides 'label', got [0, 6]"),
        ("own.csv", table()["label"].to_frame(), "and columns besides 'label', got [96, 1]"),
        ("own.parquet", table(label=LABELS / 2), "'label' must be integers or text"),
        ("own.parquet", table(x2=[1.0, None] * 48), "row 2: 'x2' must be a finite"),
        ("own.csv", table(x2=NAN[:, 2]), "row 4: 'x2' must be a finite number"),
    ],
)
def test_unusable_examples_are_refused_in_one_line(tmp_path, name, content, message):
    if isinstance(content, dict):
        write_examples(tmp_path / name, **content)
    elif isinstance(content, pl.DataFrame):
        getattr(content, f"write_{name[4:]}")(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"^.*$") as refused:
        example_stream(tmp_path / name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("data", "write", "flags"),
    [
        ("images", write_folder, ["--data.test_classes", "[class00, class01]", "--problem.network.filters", 4]),
        ("images", write_images, ["--data.test_classes", "[0, 1]", "--problem.network.filters", 4]),
        ("examples", write_examples, ["--problem.network", "mlp"]),
        ("examples", write_examples, ["--problem.network", "mlp", "--problem.network.widths", "[6]"]),
    ],
)
def test_files_become_a_run_with_flags_only(tmp_path, data, write, flags, fit, capsys):
    path = write(tmp_path / ("folder" if write is write_folder else "own.npz"))
    flags = ["--data", data, "--data.path", path, "--data.ways", 2, "--data.shots", 3, "--rounds", 2, *flags]
    fit(*flags, "--evaluation.tasks", 2, "--algorithm.inner.steps", 2)
    assert "gain by learning, paired; above 0 is better" in capsys.readouterr().out


def test_classes_are_split_by_lists_first_and_by_ratio_otherwise():
    names = [f"c{i}" for i in range(20)]
    mixed = split_classes(names, RATIOS, [None, None, ["c3", "c7"]])
    assert mixed["test"] == [3, 7]
    assert [len(v) for v in mixed.values()] == [13, 5, 2]
    assert sorted(i for split in mixed.values() for i in split) == list(range(20))
    listed = split_classes(names, RATIOS, [["c0", "c1"], ["c2"], ["c3"]])
    assert listed == {"train": [0, 1], "validation": [2], "test": [3]}  # the other classes are not used


@pytest.mark.parametrize(
    ("count", "ratios", "sizes"),
    [(20, RATIOS, [12, 4, 4]), (8, RATIOS, [5, 1, 2]), (11, RATIOS, [7, 2, 2]), (4, [1, 1, 2], [1, 1, 2])],
)
def test_shares_are_rounded_cumulatively(count, ratios, sizes):
    found = split_classes([f"class{i:02d}" for i in range(count)], ratios, (None, None, None))
    assert [len(found[split]) for split in ("train", "validation", "test")] == sizes
    assert sorted(c for split in found.values() for c in split) == list(range(count))
