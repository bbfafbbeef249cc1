"""FC100 on small files of the real formats; the real data where they are."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from toy import SIX

from obbo_lightning import cli
from obbo_lightning.streams.few_shot import fc100
from obbo_lightning.training.datamodule import StreamDataModule

CONFIG = Path(__file__).parents[2] / "configs" / "fc100.yaml"
REAL = Path(__file__).parents[3] / "shared" / "data"
COARSE = np.repeat(np.arange(20), 5)  # class c belongs to superclass c // 5 in the small files


def small_data(images_a_class=12):
    rng = np.random.default_rng(0)
    fine = np.repeat(np.arange(100), images_a_class).astype(np.uint8)
    is_test = np.tile((np.arange(images_a_class) >= images_a_class - 2).astype(np.uint8), 100)
    return fc100.Cifar100(
        rng.integers(0, 256, (len(fine), 32, 32, 3), dtype=np.uint8),
        fine,
        COARSE[fine].astype(np.uint8),
        is_test,
        np.array([f"fine{i}" for i in range(100)]),
        np.array([f"coarse{i}" for i in range(20)]),
    )


@pytest.fixture
def root(tmp_path, monkeypatch):
    data = small_data()
    monkeypatch.setattr(fc100, "CHECKSUM", fc100.checksum(data))
    np.savez_compressed(tmp_path / "cifar100.npz", **data._asdict())
    fc100.load_cifar100.cache_clear()
    yield tmp_path
    fc100.load_cifar100.cache_clear()


def test_the_split_is_fc100s_and_does_not_overlap(root):
    stream = fc100.FC100Stream(str(root))
    classes = {name: getattr(stream, name).classes.tolist() for name in ("train", "validation", "test")}
    assert [len(c) for c in classes.values()] == [60, 20, 20]
    assert len(set().union(*classes.values())) == 100
    assert {c // 5 for c in classes["test"]} == {0, 7, 12, 14}
    assert {c // 5 for c in classes["validation"]} == {8, 11, 13, 16}
    assert [len(getattr(stream, name)) for name in classes] == [20_000, 600, 600]


def test_the_images_of_a_task_are_distinct_and_belong_to_their_classes(root):
    stream = fc100.FC100Stream(str(root))
    data = fc100.load_cifar100(root)
    names = {image.tobytes(): int(label) for image, label in zip(data.images, data.fine_labels, strict=True)}
    task = stream.train[7]
    mean, deviation = (torch.tensor(x).reshape(3, 1, 1) for x in (fc100.MEAN, fc100.DEVIATION))
    pixels = ((torch.cat([task["support"], task["query"]]) * deviation + mean) * 255).round().byte()
    keys = [image.permute(1, 2, 0).contiguous().numpy().tobytes() for image in pixels]
    assert len(set(keys)) == 50
    labels = torch.cat([task["support_labels"], task["query_labels"]]).tolist()
    by_label = {}
    for key, label in zip(keys, labels, strict=True):
        by_label.setdefault(label, set()).add(names[key])
    assert sorted(by_label) == [0, 1, 2, 3, 4]
    assert all(len(found) == 1 for found in by_label.values())
    assert set().union(*by_label.values()) <= set(stream.train.classes.tolist())


def write_pickles(root, data):
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, flag in (("train", 0), ("test", 1)):
        rows = data.is_test == flag
        content = {
            "data": data.images[rows].transpose(0, 3, 1, 2).reshape(rows.sum(), -1),
            "fine_labels": data.fine_labels[rows].tolist(),
            "coarse_labels": data.coarse_labels[rows].tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"fine_label_names": data.fine_names.tolist(), "coarse_label_names": data.coarse_names.tolist()}
    (folder / "meta").write_bytes(pickle.dumps(names))


def test_torchvisions_pickles_are_read_and_cached_as_npz(tmp_path, monkeypatch):
    data = small_data()
    monkeypatch.setattr(fc100, "CHECKSUM", fc100.checksum(data))
    write_pickles(tmp_path, data)
    fc100.load_cifar100.cache_clear()
    with pytest.raises(ValueError, match="train is missing or damaged"):
        fc100.load_cifar100(tmp_path)
    assert list(tmp_path.glob("*.npz")) == []
    # torchvision's MD5s are those of the real files
    monkeypatch.setattr("torchvision.datasets.utils.check_integrity", lambda path, md5: path.exists())
    first = fc100.load_cifar100(tmp_path)
    assert [p.name for p in tmp_path.glob("*.npz")] == ["cifar100.npz"]
    fc100.load_cifar100.cache_clear()
    second = fc100.load_cifar100(tmp_path)
    assert np.array_equal(first.images, second.images)
    assert fc100.checksum(first) == fc100.checksum(data)


def test_without_data_and_network_one_line_names_the_three_ways(tmp_path, monkeypatch, capsys):
    def unreachable(url, root, **options):
        Path(root).mkdir()
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", unreachable)
    assert cli.main(["fit", "--data", "fc100", "--data.root", str(tmp_path / "data")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(way in message for way in ("cifar100.npz", "cifar-100-python", "download"))
    assert list(tmp_path.iterdir()) == []


def broken(data, **changes):
    return {**data._asdict(), **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: broken(d, images=d.images[:, :16]),
            "must be uint8 [n, 32, 32, 3], got uint8 [1200, 16, 32, 3]",
        ),
        (lambda d: broken(d, images=d.images.astype(np.int32)), "got int32"),
        (lambda d: broken(d, images=np.uint8(3)), "got uint8 []"),
        (lambda d: broken(d, fine_labels=d.fine_labels.astype(str)), "fine_labels must be integers, got <U"),
        (lambda d: broken(d, fine_labels=d.fine_labels[:-1]), "fine_labels must have shape [1200], got [1199]"),
        (lambda d: broken(d, coarse_labels=d.coarse_labels + 1), "coarse_labels must be below 20, got 20"),
        (lambda d: broken(d, images=d.images // 2), "is not CIFAR-100: its checksum is"),
        (lambda d: {k: v for k, v in d._asdict().items() if k != "is_test"}, "and has no is_test"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(root, change, message, capsys):
    np.savez_compressed(root / "cifar100.npz", **change(small_data()))
    assert cli.main(["fit", "--data", "fc100", "--data.root", str(root)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "cifar100.npz" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("keep", [0, 100, 50_000])
def test_a_truncated_file_is_said_in_one_line(root, keep, capsys):
    path = root / "cifar100.npz"
    path.write_bytes(path.read_bytes()[:keep])
    assert cli.main(["fit", "--data", "fc100", "--data.root", str(root)]) == 2
    error = capsys.readouterr().err
    assert "cannot be read as an npz file" in error
    assert error.count("\n") == 1


def test_too_many_images_for_a_class_are_refused_before_any_compute(root, capsys):
    assert cli.main(["fit", "--data", "fc100", "--data.root", str(root), "--data.shots", "10"]) == 2
    assert "data.shots + data.queries must be at most 12, all examples of class " in capsys.readouterr().err


def test_the_environment_names_the_root(root, monkeypatch):
    monkeypatch.setenv("OBBO_DATA", str(root))
    assert len(fc100.FC100Stream().train.classes) == 60


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    data = small_data()
    monkeypatch.setattr(fc100, "CHECKSUM", fc100.checksum(data))
    monkeypatch.setattr("torchvision.datasets.utils.check_integrity", lambda path, md5: path.exists())
    write_pickles(tmp_path, data)

    def full_disk(file, **arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    fc100.load_cifar100.cache_clear()
    with pytest.warns(UserWarning, match="cifar100.npz cannot be written \\(No space left on device\\)"):
        assert len(fc100.load_cifar100(tmp_path).images) == 1200
    assert [p.name for p in tmp_path.iterdir()] == ["cifar-100-python"]


def test_a_link_where_the_cache_is_written_aside_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for name in (f"cifar100.{os.getpid()}.part.npz", "cifar100.part", "cifar100.npz.part"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    fc100._write_npz(tmp_path / "cifar100.npz", small_data())
    assert (tmp_path / "precious").read_text() == "mine"
    assert len(np.load(tmp_path / "cifar100.npz")["images"]) == 1200
    assert (tmp_path / "cifar100.npz").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_task_is_the_same_in_any_process(root, workers):
    stream = fc100.FC100Stream(str(root), seed=3)
    for t, (task,) in enumerate(StreamDataModule(stream.train, rounds=5, workers=workers).train_dataloader()):
        assert all(torch.equal(task[k], stream.train[t][k]) for k in task)
    other = fc100.FC100Stream(str(root), seed=4)
    assert not torch.equal(other.train[0]["support"], stream.train[0]["support"])
    assert torch.equal(other.test[0]["support"], stream.test[0]["support"])


def test_drift_moves_through_the_superclasses_of_fc100(root):
    stream = fc100.FC100Stream(str(root), order="drift", period=100)
    early, late = stream.train.weights(0), stream.train.weights(50)
    assert int(early.argmax()) // 5 != int(late.argmax()) // 5
    assert torch.equal(stream.test.weights(0), stream.test.weights(50))  # judged on the same mix throughout


@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
@pytest.mark.parametrize("algorithm", SIX)
def test_every_algorithm_runs_with_the_papers_config_on_small_files(root, tmp_path, algorithm):
    flags = ["--config", str(CONFIG), "--data.root", str(root), "--algorithm", algorithm, "--rounds", "2"]
    flags += ["--problem.network.filters", "4", "--algorithm.inner.steps", "2", "--evaluation.tasks", "2"]
    assert cli.main(["fit", *flags, "--output", str(tmp_path / "runs")]) == 0
    (run,) = (tmp_path / "runs" / "fc100").iterdir()
    assert json.loads((run / "summary.json").read_text())["test_tasks"] == 2


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "cifar100.npz").exists(), reason="needs ../shared/data/cifar100.npz")
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
@pytest.mark.parametrize("algorithm", SIX)
def test_real_rounds(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rounds = 4 if algorithm == "oagd" else 15
    flags = ["--config", str(CONFIG), "--data.root", str(REAL), "--algorithm", algorithm, "--rounds", str(rounds)]
    assert cli.main(["fit", *flags, "--evaluation.tasks", "2", "--problem.network.filters", "32"]) == 0
    (run,) = (tmp_path / "runs" / "fc100").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == rounds
    assert summary["skipped"] == 0
    assert summary["stream_accuracy"] > 0.35  # chance is 0.2
    assert 0 < summary["regret_euclidean"] < 1000  # a single estimate may blow up
    assert (run / "figures" / "accuracy.png").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "cifar100.npz").exists(), reason="needs ../shared/data/cifar100.npz")
def test_the_real_data_are_what_they_should_be():
    stream = fc100.FC100Stream(str(REAL))
    assert stream.train.source.smallest(range(100)) == 600
    assert abs(float(torch.cat([stream.train[t]["support"] for t in range(20)]).mean())) < 0.3
