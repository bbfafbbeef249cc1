"""Users' own images: a folder for each class, or an npz."""

import numpy as np
import pytest
import torch
from PIL import Image

from obbo_lightning import cli
from obbo_lightning.streams.few_shot.classes import divide
from obbo_lightning.streams.few_shot.images import ImageFolderStream

FAST = ["--rounds", "2", "--evaluation.tasks", "2", "--problem.network.filters", "4", "--algorithm.inner.steps", "2"]


def pictures(rng, count, height=20, width=20, channels=3):
    shape = (count, height, width) if channels == 1 else (count, height, width, channels)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_npz(path, classes=12, each=8, **changes):
    rng = np.random.default_rng(0)
    content = {"images": pictures(rng, classes * each), "labels": np.repeat(np.arange(classes), each)}
    np.savez(path, **{k: v for k, v in {**content, **changes}.items() if v is not None})
    return path


def write_folder(root, classes=12, each=8, **shape):
    rng = np.random.default_rng(0)
    for c in range(classes):
        (root / f"class{c:02d}").mkdir(parents=True)
        for i, image in enumerate(pictures(rng, each, **shape)):
            Image.fromarray(image).save(root / f"class{c:02d}" / f"{i}.png")
    return root


def small(path, **settings):
    return ImageFolderStream(str(path), **{"ways": 2, "shots": 3, "queries": 4, **settings})


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_and_an_npz_of_the_same_images_give_the_same_tasks(tmp_path, channels):
    folder = write_folder(tmp_path / "folder", channels=channels)
    rng = np.random.default_rng(0)
    images = np.concatenate([pictures(rng, 8, channels=channels) for _ in range(12)])
    names = np.repeat([f"class{c:02d}" for c in range(12)], 8)
    order = rng.permutation(len(names))
    np.savez(tmp_path / "own.npz", images=images[order], labels=names[order])
    one, two = small(folder), small(tmp_path / "own.npz")
    assert (
        one.task_spec()
        == two.task_spec()
        == {"ways": 2, "shape": [channels, 20, 20], "channels": channels, "image_size": 20}
    )
    assert one.names == two.names
    assert one.train.classes.tolist() == two.train.classes.tolist()
    as_sets = [
        {
            tuple(image.flatten().tolist())
            for image in stream.train.source.draw(torch.zeros(8).long(), torch.Generator())
        }
        for stream in (one, two)
    ]
    assert as_sets[0] == as_sets[1]


def test_training_images_are_standardised_by_the_training_classes_alone(tmp_path):
    rng = np.random.default_rng(0)
    images = pictures(rng, 12 * 8)
    labels = np.repeat(np.arange(12), 8)
    images[labels >= 9] //= 10  # dark test classes
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    stream = small(tmp_path / "own.npz", test_classes=[9, 10, 11])
    drawn = torch.cat([stream.train.source.draw(torch.full((8,), c), torch.Generator()) for c in stream.train.classes])
    assert torch.allclose(drawn.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(drawn.std((0, 2, 3)), torch.ones(3), atol=1e-3)


def test_images_come_in_the_layout_that_second_derivatives_like(tmp_path):
    task = small(write_npz(tmp_path / "own.npz")).train[0]
    assert task["support"].is_contiguous()
    assert task["query"].is_contiguous()


def test_lists_come_first_and_the_rest_is_shared_by_ratio():
    names = [f"c{i}" for i in range(20)]
    by_ratio = divide(names, [0.6, 0.2, 0.2], [None, None, None])
    assert [len(v) for v in by_ratio.values()] == [12, 4, 4]
    assert sorted(i for split in by_ratio.values() for i in split) == list(range(20))
    mixed = divide(names, [0.6, 0.2, 0.2], [None, None, ["c3", "c7"]])
    assert mixed["test"] == [3, 7]
    assert [len(v) for v in mixed.values()] == [13, 5, 2]
    assert sorted(i for split in mixed.values() for i in split) == list(range(20))
    listed = divide(names, [0.6, 0.2, 0.2], [["c0", "c1"], ["c2"], ["c3"]])
    assert listed == {"train": [0, 1], "validation": [2], "test": [3]}  # the others are left out
    assert divide(names, [0.6, 0.2, 0.2], [None] * 3) == by_ratio


def test_images_of_any_size_are_cropped_and_scaled(tmp_path):
    root = write_folder(tmp_path, height=40, width=30)
    Image.fromarray(np.zeros((25, 50), np.uint8)).save(root / "class00" / "grey.jpg")  # grey among RGB
    stream = small(root, image_size=16)
    assert stream.train[0]["support"].shape == (6, 3, 16, 16)
    assert (stream.task_spec()["channels"], stream.task_spec()["image_size"]) == (3, 16)


def test_sixteen_bits_keep_their_shades_and_unknown_ranges_are_refused(tmp_path):
    root = write_folder(tmp_path, channels=1)
    ramp = np.linspace(0, 65535, 400).reshape(20, 20).astype(np.uint16)
    Image.fromarray(ramp).save(root / "class00" / "deep.png")
    stream = small(root)
    assert len(stream.train.source.examples[8].unique()) > 100  # the ninth of the first class, by name
    Image.fromarray(ramp.astype(np.float32)).save(root / "class00" / "range.tiff")
    with pytest.raises(ValueError, match=r"range.tiff cannot be read as an image: its pixels are of mode F"):
        small(root)


def test_a_class_that_no_split_uses_may_be_small(tmp_path):
    labels = np.repeat(np.arange(13), 8)[: 12 * 8 + 1]
    np.savez(tmp_path / "own.npz", images=pictures(np.random.default_rng(0), len(labels)), labels=labels)
    lists = {"train_classes": [0, 1, 2], "validation_classes": [3, 4], "test_classes": [5, 6]}
    assert small(tmp_path / "own.npz", **lists).names[-1] == "9"
    with pytest.raises(ValueError, match="at most 1, all examples of class"):
        small(tmp_path / "own.npz", **{**lists, "test_classes": [5, 12]})


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_users_images_become_a_run_with_flags_only(tmp_path, kind, capsys):
    path = write_folder(tmp_path / "f", channels=1) if kind == "folder" else write_npz(tmp_path / "own.npz")
    flags = ["--data", "images", "--data.path", str(path), "--data.ways", "2", "--data.shots", "3"]
    flags += ["--data.test_classes", "[class00, class01]" if kind == "folder" else "[0, 1]"]
    assert cli.main(["fit", *flags, *FAST, "--output", str(tmp_path / "runs")]) == 0
    assert "gain by learning, paired; above 0 is better" in capsys.readouterr().out


def damaged(path):
    write_npz(path)
    path.write_bytes(path.read_bytes()[:-300])


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (lambda p: None, [], "own.npz', which does not exist"),
        (damaged, [], "cannot be read as an npz file"),
        (lambda p: p.write_text("no zip"), [], "cannot be read as an npz file"),
        (lambda p: write_npz(p, labels=None), [], "must hold images and labels, and has no labels"),
        (lambda p: write_npz(p, images=np.zeros((96, 20, 20))), [], "images must be uint8 [n, height, width]"),
        (lambda p: write_npz(p, images=np.zeros((96, 20, 20, 2), np.uint8)), [], "got uint8 [96, 20, 20, 2]"),
        (lambda p: write_npz(p, labels=np.zeros(5, int)), [], "labels must be numbers or words [96], got int64 [5]"),
        (lambda p: write_npz(p, labels=np.zeros(96)), [], "got float64 [96]"),
        (lambda p: write_npz(p, images=np.zeros((96, 20, 30), np.uint8)), [], "data.image_size must be given"),
        (
            lambda p: write_npz(p, images=np.zeros((96, 8, 8), np.uint8)),
            [],
            "data.image_size must be an integer of at least 16",
        ),
        (write_npz, ["--data.image_size", "8"], "data.image_size must be an integer of at least 16, got 8"),
        (write_npz, ["--data.ways", "3"], "at most the 2 classes of the test split, got 3"),
        (write_npz, ["--data.shots", "6"], "data.shots + data.queries must be at most 8, all examples of class"),
        (write_npz, ["--data.test_classes", "[77]"], "data.test_classes must be of the 12 classes there are, got '77'"),
        (
            write_npz,
            ["--data.train_classes", "[1, 2]", "--data.test_classes", "[2, 3]"],
            "data.test_classes must not share a class with train, got '2'",
        ),
        (write_npz, ["--data.ratios", "[0.5, 0.5]"], "data.ratios must be three shares, none negative"),
        (write_npz, ["--data.ratios", "[0, 0.5, 0.5]"], "must leave classes to train on, got none"),
    ],
)
def test_bad_images_are_refused_in_one_line(tmp_path, make, flags, message, capsys):
    path = tmp_path / "own.npz"
    make(path)
    before = sorted(tmp_path.iterdir())
    base = ["--data", "images", "--data.path", str(path), "--data.ways", "2", "--data.shots", "3"]
    assert cli.main(["fit", *base, *FAST, *flags, "--output", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: [p.unlink() for p in (root / "class03").iterdir()], "class03 must hold images"),
        (lambda root: (root / "class03" / "0.png").write_bytes(b"no image"), "cannot be read as an image"),
        (
            lambda root: Image.fromarray(np.zeros((30, 30, 3), np.uint8)).save(root / "class03" / "x.png"),
            "data.image_size must be given for images of several sizes, got 20x20, 30x30",
        ),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, spoil, message, capsys):
    spoil(write_folder(tmp_path / "f"))
    assert cli.main(["fit", "--data", "images", "--data.path", str(tmp_path / "f"), *FAST]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_path_is_asked_for(capsys):
    assert cli.main(["fit", "--data", "images"]) == 2
    error = capsys.readouterr().err
    assert "data.path" in error
    assert error.count("\n") == 1
