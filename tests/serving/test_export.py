"""Exports: what is in them, that they need nothing else, and what is refused."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from served import FAST, played

from obbo_lightning import CNN4, __version__, cli, load
from obbo_lightning.runs.checkpoints import digest, newest_checkpoint
from obbo_lightning.serving.export import export
from obbo_lightning.serving.parcel import read_parcel


@pytest.fixture
def exported(image_run, tmp_path, capsys):
    assert cli.main(["export", str(image_run), str(tmp_path / "out")]) == 0
    assert "CNN4 after 3 rounds" in capsys.readouterr().out
    return tmp_path / "out"


def test_an_export_is_a_state_dict_and_a_small_json(image_run, exported):
    assert sorted(p.name for p in exported.iterdir()) == ["export.json", "weights.safetensors"]
    network = CNN4(ways=2, filters=4, channels=1, image_size=16)
    network.load_state_dict(load_file(exported / "weights.safetensors"))
    about = json.loads((exported / "export.json").read_text())
    newest = newest_checkpoint(image_run / "checkpoints")
    assert about["checkpoint"] == {"file": newest.name, "sha256": digest(newest)}
    assert (about["format"], about["obbo_lightning"], about["round"], about["ways"]) == (1, __version__, 3, 2)
    assert about["inner"]["with"]["steps"] == 2
    assert about["with"]["proximity"] == 0.5
    assert about["network"]["with"]["filters"] == 4
    said = about["inputs"]
    assert (said["shape"], len(said["mean"]), len(said["deviation"]), len(said["trained_on"])) == ([1, 16, 16], 1, 1, 6)


def test_an_export_predicts_to_the_bit_what_its_run_does(image_run, exported):
    images = torch.randint(0, 256, (6, 1, 20, 24), dtype=torch.uint8)
    chances = [load(x).adapt(images, [0, 1] * 3).probabilities(images) for x in (image_run, exported)]
    assert torch.equal(*chances)
    file = newest_checkpoint(image_run / "checkpoints")
    assert torch.equal(load(file).outer["linear.bias"], load(exported).outer["linear.bias"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.load.* is deprecated")
@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
def test_other_formats_give_the_logits_of_the_network(image_run, tmp_path, kind):
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    assert cli.main(["export", str(image_run), str(tmp_path / "out"), "--format", kind]) == 0
    network = load(image_run).network().double()  # batch norm loses digits in single precision
    for count in (2, 5):
        examples = torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(count))
        if kind == "onnx":
            from onnx.reference import ReferenceEvaluator

            session = ReferenceEvaluator(str(tmp_path / "out" / "network.onnx"))
            logits = torch.from_numpy(session.run(None, {"examples": examples.numpy()})[0])
        else:
            logits = torch.jit.load(tmp_path / "out" / "network.pt")(examples)
        with torch.no_grad():
            assert torch.allclose(logits.double(), network(examples.double()), atol=1e-4)


def test_without_onnx_the_export_says_what_to_install(image_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["export", str(image_run), str(tmp_path / "out"), "--format", "onnx"]) == 2
    assert "--format onnx needs onnx, which is not installed: pip install '.[onnx]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_problem_without_a_network_leaves_its_outer_variable(tmp_path, capsys):
    run = played(tmp_path, "--config", "quadratic", "--rounds", "2", *FAST[2:4])
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    checkpoint = torch.load(newest_checkpoint(run / "checkpoints"), weights_only=True)
    assert torch.equal(load(tmp_path / "out").outer["outer"], checkpoint["state_dict"]["outer"])
    with pytest.raises(ValueError, match="adapt needs what a few-shot run has learned, and this is λ of Quadratic"):
        load(run).adapt([], [])
    capsys.readouterr()
    assert cli.main(["predict", str(run), "--support", ".", "--query", "."]) == 2
    assert "predict needs a few-shot, a table" in capsys.readouterr().err
    assert cli.main(["export", str(run), str(tmp_path / "other"), "--format", "onnx"]) == 2
    assert "--format must be safetensors for a run without a network, got 'onnx'" in capsys.readouterr().err


def checkpoint_of(path, **changes):
    recipe = {"seed": 0, "problem": {"part": "obbo_lightning.problems.spline.SmoothingSpline", "with": {}}}
    content = {"global_step": 7, "recipe": recipe, "state_dict": {"outer": torch.tensor([[0.1], [0.2]])}, **changes}
    torch.save(content, path)
    return path


def test_an_export_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    file, seen, replace = checkpoint_of(tmp_path / "x.ckpt"), [], os.replace
    monkeypatch.setattr("obbo_lightning.serving.export.sync", lambda path: seen.append(path.name))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("renamed"), replace(a, b)))
    export(file, tmp_path / "out")
    assert {"export.json", "weights.safetensors"} < set(seen[: seen.index("renamed")])
    assert seen[-1] == tmp_path.name


def test_lanes_and_coordinates_keep_their_names(tmp_path):
    lanes = {"ticker": ["A", "B"], "timestamp": ["2020", "2021"]}
    parcel = read_parcel(checkpoint_of(tmp_path / "x.ckpt", lanes=lanes))
    assert parcel.about["lanes"] == lanes
    assert parcel.tensors["weight"].tolist() == pytest.approx([0.1, 0.2])


def test_a_problem_that_cannot_be_written_down_still_leaves_its_outer_variable(tmp_path):
    file = checkpoint_of(tmp_path / "x.ckpt", recipe={"seed": 0, "no_problem": "a lambda"})
    assert read_parcel(file).about["note"] == "a lambda"
    assert load(file).outer["outer"].shape == (2, 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: change(out, format=2), "export.json must be of format 1, got 2"),
        (lambda out: (out / "export.json").write_text("{"), "export.json is damaged"),
        (lambda out: (out / "weights.safetensors").unlink(), "weights.safetensors cannot be read"),
        (lambda out: (out / "weights.safetensors").write_bytes(b"x" * 99), "weights.safetensors cannot be read"),
        (
            lambda out: change(out, problem="torch.nn.Linear"),
            "an export's problem must be a FewShot, got 'torch.nn.Linear'",
        ),
        (
            lambda out: change(out, inner={"part": "os.system", "with": {}}),
            "may name parts and networks, got 'os.system'",
        ),
        (
            lambda out: change(out, network={"network": "obbo_lightning.networks.mlp.MLP", "with": {}}),
            "the weights do not fit the network MLP",
        ),
    ],
)
def test_a_damaged_export_or_one_of_another_version_is_refused(exported, spoil, message):
    spoil(exported)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is compared as it is
        load(exported).adapt(torch.zeros(2, 1, 16, 16), [0, 1])
    assert message in str(refusal.value)


def change(out, **changes):
    about = json.loads((out / "export.json").read_text())
    (out / "export.json").write_text(json.dumps({**about, **changes}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "nowhere must be a run directory, an export or a checkpoint, and does not exist"),
        (["RUN", "taken"], "taken must be a new or empty folder to export to, and is not"),
        (["RUN", "out", "--format", "keras"], "--format must be one of safetensors, onnx, torchscript, got 'keras'"),
        (["RUN", "out", "--checkpoint", "no.ckpt"], "checkpoint no.ckpt does not exist"),
        (["RUN"], "export: the following arguments are required: OUT"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(image_run, tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert cli.main(["export", *(str(image_run) if word == "RUN" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_weights_that_are_not_finite_are_refused(tmp_path):
    file = checkpoint_of(tmp_path / "x.ckpt", state_dict={"outer": torch.tensor([[float("nan")]])})
    with pytest.raises(ValueError, match="weight of SmoothingSpline after 7 rounds is not finite"):
        load(file)
