"""Few-shot tasks from users' own images: one folder per class, or an npz file."""

import numpy as np
import pytest
import torch
from PIL import Image

from obbo_lightning.streams import ImageFolderStream

FAST = ["--rounds", "2", "--evaluation.tasks", "2", "--problem.network.filters", "4", "--algorithm.inner.steps", "2"]


def random_images(rng, count, height=20, width=20, channels=3):
    shape = (count, height, width) if channels == 1 else (count, height, width, channels)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_npz(path, **changes):
    content = {"images": random_images(np.random.default_rng(0), 96), "labels": np.repeat(np.arange(12), 8)}
    np.savez(path, **{k: v for k, v in {**content, **changes}.items() if v is not None})
    return path


def write_folder(root, **shape):
    rng = np.random.default_rng(0)
    for c in range(12):
        (root / f"class{c:02d}").mkdir(parents=True)
        for i, image in enumerate(random_images(rng, 8, **shape)):
            Image.fromarray(image).save(root / f"class{c:02d}" / f"{i}.png")
    return root


def small(path, **settings):
    return ImageFolderStream(str(path), **{"ways": 2, "shots": 3, "queries": 4, **settings})


@pytest.mark.parametrize("channels", [1, 3])
def test_folder_and_npz_of_the_same_images_give_the_same_classes(tmp_path, channels):
    folder = write_folder(tmp_path / "folder", channels=channels)
    rng = np.random.default_rng(0)
    images = np.concatenate([random_images(rng, 8, channels=channels) for _ in range(12)])
    names = np.repeat([f"class{c:02d}" for c in range(12)], 8)
    order = rng.permutation(len(names))
    np.savez(tmp_path / "own.npz", images=images[order], labels=names[order])
    streams = [small(folder), small(tmp_path / "own.npz")]
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
    stream = small(tmp_path / "own.npz", shots=2, queries=2, **lists)
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
    stream = small(root, image_size=16)
    assert stream.train[0]["support"].shape == (6, 3, 16, 16)
    assert (stream.task_spec()["channels"], stream.task_spec()["image_size"]) == (3, 16)


def test_images_of_an_npz_file_are_resized_by_pillow(tmp_path):
    images, labels = random_images(np.random.default_rng(0), 40, 32, 48, channels=1), np.arange(40) % 10
    expected = np.asarray(Image.fromarray(images[7][:, 8:40]).resize((16, 16), Image.Resampling.BILINEAR))
    square = np.ascontiguousarray(images[:, :, 8:40])
    # at the border of the square, Pillow uses pixels beside it
    for given, inside in ((images, slice(1, 15)), (square, slice(0, 16))):
        np.savez(tmp_path / "own.npz", images=given, labels=labels)
        found = small(tmp_path / "own.npz", image_size=16, shots=1, queries=1).train.source.examples[7, 0].numpy()
        assert np.array_equal(found[:, inside], expected[:, inside])


def test_sixteen_bits_keep_their_shades_and_unknown_ranges_are_refused(tmp_path):
    root = write_folder(tmp_path, channels=1)
    ramp = np.linspace(0, 65535, 400).reshape(20, 20).astype(np.uint16)
    Image.fromarray(ramp).save(root / "class00" / "deep.png")
    stream = small(root)
    assert len(stream.train.source.examples[8].unique()) > 100  # the ninth of the first class, by name
    Image.fromarray(ramp.astype(np.float32)).save(root / "class00" / "range.tiff")
    with pytest.raises(ValueError, match=r"range.tiff cannot be read as an image: its pixels are of mode F"):
        small(root)


def test_class_that_no_split_uses_may_be_small(tmp_path):
    labels = np.repeat(np.arange(13), 8)[: 12 * 8 + 1]
    np.savez(tmp_path / "own.npz", images=random_images(np.random.default_rng(0), len(labels)), labels=labels)
    lists = {"train_classes": [0, 1, 2], "validation_classes": [3, 4], "test_classes": [5, 6]}
    assert small(tmp_path / "own.npz", **lists).names[-1] == "9"
    with pytest.raises(ValueError, match="at most 1, all examples of class"):
        small(tmp_path / "own.npz", **{**lists, "test_classes": [5, 12]})


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_images_become_a_run_with_flags_only(tmp_path, kind, fit, capsys):
    path = write_folder(tmp_path / "f", channels=1) if kind == "folder" else write_npz(tmp_path / "own.npz")
    flags = ["--data", "images", "--data.path", path, "--data.ways", "2", "--data.shots", "3"]
    fit(*flags, "--data.test_classes", "[class00, class01]" if kind == "folder" else "[0, 1]", *FAST)
    assert "gain by learning, paired; above 0 is better" in capsys.readouterr().out


def damaged(path):
    write_npz(path)
    path.write_bytes(path.read_bytes()[:-300])


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (lambda p: None, [], "data.path must be a folder or an npz file that exists, got 'own.npz'"),
        (damaged, [], "cannot be read as an npz file"),
        (lambda p: p.write_text("no zip"), [], "cannot be read as an npz file"),
        (lambda p: write_npz(p, labels=None), [], "must hold images, labels, got images"),
        (lambda p: write_npz(p, images=np.zeros((96, 20, 20))), [], "images must be uint8 [n, height, width]"),
        (lambda p: write_npz(p, images=np.zeros((96, 20, 20, 2), np.uint8)), [], "got uint8 [96, 20, 20, 2]"),
        (lambda p: write_npz(p, labels=np.zeros(5, int)), [], "labels must be integers or text [96], got int64 [5]"),
        (lambda p: write_npz(p, labels=np.zeros(96)), [], "got float64 [96]"),
        (lambda p: write_npz(p, images=np.zeros((96, 20, 30), np.uint8)), [], "data.image_size must be given"),
        (lambda p: write_npz(p, images=np.zeros((96, 8, 8), np.uint8)), [], "must be an integer of at least 16, got 8"),
        (write_npz, ["--data.image_size", "8"], "data.image_size must be an integer of at least 16, got 8"),
        (write_npz, ["--data.ways", "3"], "at most the 2 classes of the test split, got 3"),
        (write_npz, ["--data.shots", "6"], "data.shots + data.queries must be at most 8, all examples of class"),
        (write_npz, ["--data.test_classes", "[77]"], "data.test_classes must be of the 12 classes, and in no other"),
        (
            write_npz,
            ["--data.train_classes", "[1, 2]", "--data.test_classes", "[2, 3]"],
            "data.test_classes must be of the 12 classes, and in no other list, got '2'",
        ),
        (write_npz, ["--data.ratios", "[0.5, 0.5]"], "data.ratios must be three shares, none negative"),
        (write_npz, ["--data.ratios", "[0, 0.5, 0.5]"], "must leave classes to train on, got none"),
    ],
)
def test_unusable_files_and_settings_are_refused(tmp_path, make, flags, message, refusal):
    make(tmp_path / "own.npz")
    assert message in refusal("--data", "images", "--data.path", "own.npz", "--data.ways", 2, "--data.shots", 3, *flags)


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
def test_unusable_folders_are_refused(tmp_path, spoil, message, refusal):
    spoil(write_folder(tmp_path / "f"))
    assert message in refusal("--data", "images", "--data.path", "f")
    assert "data.path" in refusal("--data", "images")
