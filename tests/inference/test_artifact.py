"""Artifacts: what is read from checkpoints and exports, and what is refused."""

import json

import pytest
import torch
from small_runs import save_few_shot_checkpoint

from obbo_lightning import load_model
from obbo_lightning.inference.artifact import read_artifact

SPLINE = {"component": "obbo_lightning.problems.spline.SmoothingSpline", "init_args": {}}


def save_checkpoint(path, **changes):
    recipe = {"seed": 0, "problem": SPLINE}
    content = {"global_step": 7, "module": recipe, "state_dict": {"outer": torch.tensor([[0.1], [0.2]])}, **changes}
    torch.save(content, path)
    return path


def test_lanes_and_coordinates_have_names(tmp_path):
    lanes = {"ticker": ["A", "B"], "timestamp": ["2020", "2021"]}
    artifact = read_artifact(save_checkpoint(tmp_path / "x.ckpt", lanes=lanes))
    assert artifact.metadata["lanes"] == lanes
    assert artifact.tensors["weight"].tolist() == pytest.approx([0.1, 0.2])
    assert load_model(tmp_path / "x.ckpt").title == "SmoothingSpline after 7 rounds"


def test_outer_variable_of_a_problem_without_config_can_be_read(tmp_path):
    file = save_checkpoint(tmp_path / "x.ckpt", module={"seed": 0, "no_problem": "a lambda"})
    assert read_artifact(file).metadata["note"] == "a lambda"
    assert load_model(file).outer["outer"].shape == (2, 1)


def test_unusable_checkpoints_are_refused(tmp_path):
    file = save_checkpoint(tmp_path / "x.ckpt", state_dict={"outer": torch.tensor([[float("nan")]])})
    with pytest.raises(ValueError, match=r"weight of .*x.ckpt must be finite to be used, got NaN or infinity"):
        read_artifact(file)
    torch.save({"global_step": 7, "state_dict": {"outer": torch.ones(1)}}, file)
    with pytest.raises(ValueError, match=r"x.ckpt must be of a run of obbo_lightning, and is not"):
        read_artifact(file)


def test_few_shot_run_without_inner_solver_is_refused(tmp_path):
    save_few_shot_checkpoint(tmp_path / "x.ckpt")
    content = torch.load(tmp_path / "x.ckpt")
    del content["module"]["algorithm"]
    content["module"]["no_algorithm"] = "a lambda"
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="the run's inner solver cannot be used elsewhere: a lambda"):
        read_artifact(tmp_path / "x.ckpt")


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
        (
            lambda out: change_metadata(out, problem=SPLINE["component"], init_args={}),
            "problem of an export with a network must be a FewShot, got 'SmoothingSpline'",
        ),
        (
            lambda out: change_metadata(out, inner={"component": "os.system", "init_args": {}}),
            "'os.system' is neither a registered component",
        ),
        (
            lambda out: change_metadata(
                out, init_args={"network": {"network": "obbo_lightning.networks.mlp.MLP", "init_args": {}}}
            ),
            "the weights do not fit the network MLP",
        ),
    ],
)
def test_damaged_exports_are_refused(exported, damage, message):
    damage(exported)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is compared as it is
        load_model(exported)
    assert message in str(refusal.value)


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a run directory, an export or a checkpoint, and does not exist"):
        load_model(tmp_path / "nowhere")
