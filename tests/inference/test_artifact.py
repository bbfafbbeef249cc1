"""Artifacts: what is read from checkpoints and exports, the files of an export, and what is refused."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from small_runs import FAST, fit, save_few_shot_checkpoint

from obbo_lightning import __version__, cli, load_model
from obbo_lightning.inference.artifact import read_artifact
from obbo_lightning.inference.model import export_model
from obbo_lightning.networks import CNN4
from obbo_lightning.runs.provenance import list_checkpoints, newest_checkpoint
from obbo_lightning.streams.fingerprints import sha256_of

FILES = ["metadata.json", "weights.safetensors"]
MLP = {"network": "obbo_lightning.networks.mlp.MLP", "init_args": {}}
SPLINE = {"component": "obbo_lightning.problems.spline.SmoothingSpline", "init_args": {}}


@pytest.fixture(scope="session")
def quadratic_run(tmp_path_factory):
    flags = ["--config", "quadratic", "--rounds", 4, "--checkpoint.every", 2, *FAST[2:4]]
    return fit(tmp_path_factory.mktemp("quadratic"), *flags)


@pytest.fixture
def few_shot_checkpoint(tmp_path):
    save_few_shot_checkpoint(tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def save_checkpoint(path, **changes):
    module = {"seed": 0, "problem": SPLINE}
    content = {"global_step": 7, "module": module, "state_dict": {"outer": torch.tensor([[0.1], [0.2]])}, **changes}
    torch.save(content, path)
    return path


def test_lanes_and_coordinates_have_names(tmp_path):
    lanes = {"ticker": ["A", "B"], "timestamp": ["2020", "2021"]}
    artifact = read_artifact(save_checkpoint(tmp_path / "x.ckpt", lanes=lanes))
    assert artifact.metadata["lanes"] == lanes
    assert artifact.tensors["weight"].tolist() == pytest.approx([0.1, 0.2])
    assert load_model(tmp_path / "x.ckpt").title == "SmoothingSpline after 7 rounds"


def test_outer_variable_of_a_problem_without_config_is_read_and_exported(tmp_path, capsys):
    file = save_checkpoint(tmp_path / "x.ckpt", module={"seed": 0, "no_problem": "a lambda"})
    assert read_artifact(file).metadata["note"] == "a lambda"
    assert load_model(file).outer["outer"].shape == (2, 1)
    assert cli.main(["export", str(file), str(tmp_path / "out")]) == 0
    assert "λ has no names: a lambda" in capsys.readouterr().out


def test_unusable_checkpoints_are_refused(tmp_path, few_shot_checkpoint):
    file = save_checkpoint(tmp_path / "y.ckpt", state_dict={"outer": torch.tensor([[float("nan")]])})
    with pytest.raises(ValueError, match=r"weight of .*y.ckpt must be finite to be used, got NaN or infinity"):
        read_artifact(file)
    torch.save({"global_step": 7, "state_dict": {"outer": torch.ones(1)}}, file)
    with pytest.raises(ValueError, match=r"y.ckpt must be of a run of obbo_lightning, and is not"):
        read_artifact(file)
    module = torch.load(few_shot_checkpoint)["module"]
    del module["algorithm"]
    save_checkpoint(file, module=module | {"no_algorithm": "a lambda"})
    with pytest.raises(ValueError, match="the run's inner solver cannot be used elsewhere: a lambda"):
        read_artifact(file)


def change_metadata(folder, **changes):
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(metadata | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: change_metadata(out, format=2), "metadata.json must be of format 1, got 2"),
        (lambda out: (out / "metadata.json").write_text("[]"), "metadata.json must be of format 1, got None"),
        (lambda out: (out / "metadata.json").write_text("{"), "cannot be read: Expecting property name"),
        (lambda out: (out / "weights.safetensors").unlink(), "cannot be read: No such file"),
        (lambda out: (out / "weights.safetensors").write_bytes(b"x" * 99), "cannot be read: Error while deserializing"),
        (lambda out: change_metadata(out, problem="torch.nn.Linear"), "'torch.nn.Linear' is neither a registered"),
        (lambda out: change_metadata(out, problem=SPLINE["component"], init_args={}), "must be a FewShot, got 'Smooth"),
        (lambda out: change_metadata(out, inner={"component": "os.system", "init_args": {}}), "'os.system' is neither"),
        (lambda out: change_metadata(out, init_args={"network": MLP}), "the weights do not fit the network MLP"),
    ],
)
def test_damaged_exports_are_refused(exported, damage, message):
    damage(exported)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is compared as it is
        load_model(exported)
    assert message in str(refusal.value)


def test_export_is_a_state_dict_and_metadata(image_run, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["export", str(image_run), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "CNN4 after 3 rounds" in printed
    assert "--support DIR --query DIR" in printed
    assert sorted(file.name for file in out.iterdir()) == FILES
    CNN4(ways=2, filters=4, channels=1, image_size=16).load_state_dict(load_file(out / "weights.safetensors"))
    metadata = json.loads((out / "metadata.json").read_text())
    newest = newest_checkpoint(image_run / "checkpoints")
    assert metadata["checkpoint"] == {"file": newest.name, "sha256": sha256_of(newest)}
    assert (metadata["format"], metadata["obbo_lightning"], metadata["round"]) == (1, __version__, 3)
    assert metadata["inner"]["init_args"]["steps"] == 2
    assert metadata["init_args"]["proximity"] == 0.5
    network = metadata["init_args"]["network"]["init_args"]
    assert (network["ways"], network["filters"]) == (2, 4)
    inputs = metadata["inputs"]
    assert (inputs["shape"], len(inputs["mean"]), len(inputs["deviation"])) == ([1, 16, 16], 1, 1)
    assert len(inputs["trained_on"]) == 6


def test_export_and_checkpoint_predict_what_their_run_predicts(image_run, exported):
    images = torch.randint(0, 256, (6, 1, 20, 24), dtype=torch.uint8)
    paths = (image_run, exported, newest_checkpoint(image_run / "checkpoints"))
    first, *others = (load_model(path).adapt(images, [0, 1] * 3).probabilities(images) for path in paths)
    assert all(torch.equal(first, other) for other in others)


def test_onnx_gives_the_logits_of_the_network(image_run, tmp_path):
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    from onnx.reference import ReferenceEvaluator

    assert cli.main(["export", str(image_run), str(tmp_path / "out"), "--format", "onnx"]) == 0
    session = ReferenceEvaluator(str(tmp_path / "out" / "network.onnx"))
    network = load_model(image_run).network().double()  # batch norm loses digits in single precision
    for count in (2, 5):
        examples = torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(count))
        logits = torch.from_numpy(session.run(None, {"examples": examples.numpy()})[0])
        with torch.no_grad():
            assert torch.allclose(logits.double(), network(examples.double()), atol=1e-4)


def test_onnx_needs_its_packages_and_the_shape_of_an_example(image_run, tmp_path, monkeypatch, capsys):
    save_few_shot_checkpoint(tmp_path / "x.ckpt", inputs=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(ValueError, match="--format onnx needs a run whose stream describes its inputs"):
        export_model(tmp_path / "x.ckpt", tmp_path / "out", file_format="onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["export", str(image_run), str(tmp_path / "out"), "--format", "onnx"]) == 2
    assert "--format onnx needs onnx, which is not installed: pip install '.[onnx]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


def test_problem_without_network_exports_its_outer_variable(quadratic_run, tmp_path, capsys):
    old, new = list_checkpoints(quadratic_run / "checkpoints")
    for out, checkpoint, rounds in (("old", old, 2), ("new", new, 4)):
        more = ["--checkpoint", str(checkpoint)] if out == "old" else []
        assert cli.main(["export", str(quadratic_run), str(tmp_path / out), *more]) == 0
        assert f"Quadratic after {rounds} rounds" in capsys.readouterr().out
        model = load_model(tmp_path / out)
        assert (model.metadata["round"], model.metadata["checkpoint"]["file"]) == (rounds, checkpoint.name)
        saved = torch.load(checkpoint, weights_only=True)["state_dict"]["outer"]
        assert torch.equal(model.outer["outer"], saved)
    with pytest.raises(ValueError, match="adapt needs a model of a few-shot run, got λ of Quadratic"):
        load_model(quadratic_run).adapt([], [])


def test_export_makes_a_new_folder_that_others_can_read(few_shot_checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        export_model(few_shot_checkpoint, out)
        assert {file.name: file.stat().st_mode & 0o777 for file in out.iterdir()} == dict.fromkeys(FILES, 0o644)
        assert out.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ValueError, match="must be a folder that can be made, and cannot"):
        export_model(few_shot_checkpoint, few_shot_checkpoint / "below")


def test_export_is_complete_and_synced_or_leaves_nothing(few_shot_checkpoint, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("obbo_lightning.inference.artifact.save_file", fail)
        with pytest.raises(RuntimeError, match="disk full"):
            export_model(few_shot_checkpoint, tmp_path / "new")
    assert list(tmp_path.iterdir()) == [few_shot_checkpoint]
    seen, replace = [], os.replace
    monkeypatch.setattr("obbo_lightning.inference.artifact.sync", lambda path: seen.append(path.name))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("renamed"), replace(a, b)))
    export_model(few_shot_checkpoint, tmp_path / "out")
    assert set(FILES) < set(seen[: seen.index("renamed")])
    assert seen[-1] == tmp_path.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "nowhere must be a run directory, an export or a checkpoint, and does not exist"),
        (["RUN", "taken"], "taken must be a new or empty folder to export to, and is not"),
        (["RUN", "out", "--format", "keras"], "--format must be one of safetensors, onnx, got 'keras'"),
        (["RUN", "out", "--format", "onnx"], "--format must be safetensors for a run without a network, got 'onnx'"),
        (["RUN", "out", "--checkpoint", "no.ckpt"], "checkpoint no.ckpt does not exist"),
        (["RUN"], "export: the following arguments are required: OUT"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(quadratic_run, tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert cli.main(["export", *(str(quadratic_run) if word == "RUN" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
