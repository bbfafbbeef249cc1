"""FC100 on small files of the real formats, and on the real data if they are there."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from toy import SIX

from obbo_lightning.streams.few_shot import fc100

REAL = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture
def data(monkeypatch):
    """Twelve images of each class, with their checksum; class c belongs to superclass c // 5."""
    fine, is_test = np.repeat(np.arange(100, dtype=np.uint8), 12), np.tile(np.arange(12) >= 10, 100).astype(np.uint8)
    images = np.random.default_rng(0).integers(0, 256, (1200, 32, 32, 3), dtype=np.uint8)
    data = fc100.Cifar100(images, fine, is_test, np.array([f"fine{i}" for i in range(100)]))
    monkeypatch.setattr(fc100, "SUPERCLASS", np.arange(100) // 5)
    monkeypatch.setattr(fc100, "CHECKSUM", fc100.checksum(data))
    fc100.load_cifar100.cache_clear()
    yield data
    fc100.load_cifar100.cache_clear()


@pytest.fixture
def root(data, tmp_path):
    np.savez_compressed(tmp_path / "cifar100.npz", **data._asdict())
    return tmp_path


def test_splits_are_those_of_fc100_and_do_not_overlap(root):
    stream = fc100.FC100Stream(str(root))
    classes = {name: getattr(stream, name).classes.tolist() for name in ("train", "validation", "test")}
    assert [len(c) for c in classes.values()] == [60, 20, 20]
    assert len(set().union(*classes.values())) == 100
    assert {c // 5 for c in classes["test"]} == {0, 7, 12, 14}
    assert {c // 5 for c in classes["validation"]} == {8, 11, 13, 16}
    assert [len(getattr(stream, name)) for name in classes] == [20_000, 600, 600]


def test_images_of_a_task_are_distinct_and_belong_to_their_classes(root, data):
    stream = fc100.FC100Stream(str(root))
    names = {image.tobytes(): int(label) for image, label in zip(data.images, data.fine_labels, strict=True)}
    task = stream.train[7]
    mean, deviation = (torch.tensor(x).reshape(3, 1, 1) for x in (fc100.SCALER.mean, fc100.SCALER.deviation))
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


def test_pickles_of_torchvision_are_read_if_their_md5_is_known(data, tmp_path, monkeypatch, refusal):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, flag in (("train", 0), ("test", 1)):
        rows = data.is_test == flag
        pixels = data.images[rows].transpose(0, 3, 1, 2).reshape(rows.sum(), -1)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "fine_labels": data.fine_labels[rows].tolist()}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": data.fine_names.tolist()}))
    with monkeypatch.context() as patched:
        patched.setattr("torchvision.datasets.cifar.download_and_extract_archive", lambda *given, **options: None)
        patched.setattr("pickle.load", lambda *given, **options: pytest.fail("unpickled"))
        assert "CIFAR-100 is not in" in refusal("--data", "fc100", "--data.root", tmp_path)
    # torchvision's MD5s are those of the real files
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).exists())
    found = fc100.load_cifar100(tmp_path)
    assert fc100.checksum(found) == fc100.checksum(data)
    assert found.fine_names.tolist() == data.fine_names.tolist()


def test_missing_data_without_network_are_explained(tmp_path, monkeypatch, refusal):
    def unreachable(url, root, **options):
        Path(root).mkdir(exist_ok=True)
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", unreachable)
    message = refusal("--data", "fc100", "--data.root", tmp_path / "data")
    assert all(way in message for way in ("cifar100.npz", "cifar-100-python", "download"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"images": d.images[:, :16]}, "[1200, 16, 32, 3]"),
        (lambda d: {"images": d.images.reshape(1200, -1)}, "[1200, 3072]"),
        (lambda d: {"images": d.images.astype(np.int32)}, "[1200, 32, 32, 3]"),
        (lambda d: {"images": np.uint8(3)}, "none… and []"),
        (lambda d: {"fine_labels": d.fine_labels.astype(str)}, "none… and"),
        (lambda d: {"fine_labels": d.fine_labels[:-1]}, "none… and"),
        (lambda d: {"fine_labels": d.fine_labels + 1}, "none… and"),
        (lambda d: {"is_test": 1 - d.is_test}, "[1200, 32, 32, 3]"),
        (lambda d: {"images": d.images // 2}, "[1200, 32, 32, 3]"),
    ],
)
def test_files_that_are_not_cifar100_are_refused(root, data, change, message, refusal):
    np.savez_compressed(root / "cifar100.npz", **data._asdict() | change(data))
    error = refusal("--data", "fc100", "--data.root", root)
    assert "cifar100.npz must be CIFAR-100 with the checksum" in error
    assert message in error


def test_truncated_files_missing_arrays_and_too_many_shots_are_refused(root, data, refusal):
    file, flags = root / "cifar100.npz", ["--data", "fc100", "--data.root", root]
    content = file.read_bytes()
    for keep in (0, 100, 50_000):
        file.write_bytes(content[:keep])
        assert "cannot be read as an npz file" in refusal(*flags)
    np.savez_compressed(file, images=data.images)
    assert "cifar100.npz must hold images, fine_labels, " in refusal(*flags)
    file.write_bytes(content)
    error = refusal(*flags, "--data.shots", 10)
    assert "data.shots + data.queries must be at most 12, all examples of class " in error


@pytest.mark.parametrize(
    ("root", "variable", "place"), [("mine", "theirs", "mine"), (None, "theirs", "theirs"), (None, None, "data")]
)
def test_root_is_the_given_folder_then_that_of_the_environment(root, variable, place, monkeypatch):
    asked = []

    def load(path):
        asked.append(str(path))
        raise ValueError("not there")

    monkeypatch.setattr(fc100, "load_cifar100", load)
    monkeypatch.delenv("OBBO_DATA", raising=False)
    if variable:
        monkeypatch.setenv("OBBO_DATA", variable)
    with pytest.raises(ValueError, match="not there"):
        fc100.FC100Stream(root)
    assert asked == [place]


def test_drift_moves_through_the_superclasses_of_fc100(root):
    stream = fc100.FC100Stream(str(root), order="drift", period=100)
    early, late = stream.train.weights(0), stream.train.weights(50)
    assert int(early.argmax()) // 5 != int(late.argmax()) // 5
    assert torch.equal(stream.test.weights(0), stream.test.weights(50))  # always the same mix


@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
@pytest.mark.parametrize("algorithm", SIX)
def test_every_algorithm_runs_with_the_papers_configuration(root, fit, algorithm):
    flags = ["--config", "fc100", "--data.root", root, "--algorithm", algorithm, "--rounds", "2"]
    run = fit(*flags, "--problem.network.filters", 4, "--algorithm.inner.steps", 2, "--evaluation.tasks", 2)
    assert json.loads((run / "summary.json").read_text())["test_tasks"] == 2


needs_real_data = pytest.mark.skipif(not (REAL / "cifar100.npz").exists(), reason="needs ../shared/data/cifar100.npz")


@pytest.mark.slow
@needs_real_data
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
@pytest.mark.parametrize("algorithm", SIX)
def test_rounds_on_the_real_data(algorithm, fit):
    rounds = 4 if algorithm == "oagd" else 15
    flags = ["--config", "fc100", "--data.root", REAL, "--algorithm", algorithm, "--rounds", rounds]
    run = fit(*flags, "--evaluation.tasks", 2, "--problem.network.filters", 32)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == rounds
    assert summary["skipped"] == 0
    assert summary["prequential_accuracy"] > 0.35  # chance is 0.2
    assert 0 < summary["regret_euclidean"] < 1000  # a single estimate may blow up
    assert (run / "figures" / "accuracy.png").exists()


@pytest.mark.slow
@needs_real_data
def test_real_data_have_600_images_per_class():
    stream = fc100.FC100Stream(str(REAL))
    assert {len(members) for members in stream.train.source.members.values()} == {600}
    assert abs(float(torch.cat([stream.train[t]["support"] for t in range(20)]).mean())) < 0.3
