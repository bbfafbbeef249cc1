"""What cannot be served, and why: one line each; and shapes that are known in other ways."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from obbo_lightning import MLP, OBBO, ExactSolution, FewShot, cli
from obbo_lightning.serving.events import require_market
from obbo_lightning.serving.export import export
from obbo_lightning.serving.forecast import Forecast
from obbo_lightning.serving.forecast_files import write_forecast
from obbo_lightning.serving.formats import write_network
from obbo_lightning.serving.heads import with_classes
from obbo_lightning.serving.inputs import ExampleInputs, ImageInputs
from obbo_lightning.serving.learned import _overridden
from obbo_lightning.serving.parcel import Parcel, read_parcel, require_finite, shape_of, title_of
from obbo_lightning.serving.sets import read_support
from obbo_lightning.training.module import OnlineBilevelModule


@pytest.mark.parametrize(
    ("inputs", "given", "shape"),
    [
        ({"shape": [7]}, {"shape": [1]}, [7]),
        (None, {"shape": [3, 4]}, [3, 4]),
        (None, {"shape": None, "channels": 1, "image_size": 16}, [1, 16, 16]),
        (None, {"channels": 1}, None),
        (None, {}, None),
    ],
)
def test_the_shape_of_an_example_is_known_from_the_stream_or_the_network(inputs, given, shape):
    assert shape_of({"inputs": inputs, "network": {"with": given}}) == shape
    if shape is None:
        with pytest.raises(ValueError, match="--format onnx needs the shape of an example"):
            write_network(None, shape, None, "onnx")


def saved(path, changes=lambda content: {}):
    problem = FewShot(partial(MLP, ways=2, shape=[2], widths=[4]))
    module = OnlineBilevelModule(problem, OBBO())
    content = {"global_step": 3, "recipe": module._recipe(), "state_dict": {"outer": module.outer.detach()}}
    torch.save({**content, **changes(content)}, path)
    return path


def test_a_checkpoint_that_does_not_say_how_it_is_made_is_refused(tmp_path):
    for changes, said in (
        (lambda content: {"recipe": None}, "is of an older version, and does not say how it is made"),
        (
            lambda content: {"recipe": {"problem": content["recipe"]["problem"], "seed": 0, "no_algorithm": "why"}},
            "the run's inner solver cannot be used elsewhere: why",
        ),
    ):
        file = saved(tmp_path / "x.ckpt", changes=changes)
        with pytest.raises(ValueError, match=said):
            read_parcel(file)
        if "older" in said:
            with pytest.raises(ValueError, match=said):
                OnlineBilevelModule.load_from_checkpoint(file)
    parcel = read_parcel(saved(tmp_path / "x.ckpt"))
    assert (title_of(parcel), parcel.about["inputs"], parcel.few_shot) == ("MLP after 3 rounds", None, True)
    require_finite(parcel)
    name = next(iter(parcel.tensors))
    broken = Parcel(parcel.about, {**parcel.tensors, name: parcel.tensors[name] * float("inf")})
    with pytest.raises(ValueError, match=f"{name} of MLP after 3 rounds is not finite, so it cannot be used"):
        require_finite(broken)


def test_an_export_goes_into_a_new_or_empty_folder_and_leaves_nothing_where_it_cannot(tmp_path, monkeypatch):
    file = saved(tmp_path / "x.ckpt")
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        export(file, out)
        assert sorted(path.name for path in out.iterdir()) == ["export.json", "weights.safetensors"]
        assert json.loads((out / "export.json").read_text())["round"] == 3
        with pytest.raises(ValueError, match="must be a new or empty folder to export to, and is not"):
            export(file, out)
    for out in (file, file / "below"):
        with pytest.raises(ValueError, match=r"must be a (new or empty folder|folder that can be made)"):
            export(file, out)

    def failing(*arguments):
        raise RuntimeError("disk full")

    monkeypatch.setattr("obbo_lightning.serving.export._fill", failing)
    with pytest.raises(RuntimeError, match="disk full"):
        export(file, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "x.ckpt"]


class Square(nn.Module):
    def __init__(self, ways=2):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ways, ways))


def test_a_network_that_is_not_a_row_for_each_class_cannot_have_others():
    make = partial(Square, ways=2)
    with pytest.raises(ValueError, match=r"weight of the network is \[2, 2\], and with .* \[3, 3\]"):
        with_classes(make(), make, 2, 3)
    for other in (None, Square):
        with pytest.raises(ValueError, match="labels must be of 2 classes for a network whose class has no"):
            with_classes(make(), other, 2, 3)


def test_a_solver_without_steps_takes_none():
    assert _overridden(ExactSolution(), None, None) == ExactSolution()
    for name in ("steps", "lr"):
        with pytest.raises(ValueError, match=f"{name} cannot be chosen for the inner solver ExactSolution"):
            _overridden(ExactSolution(), *((3, None) if name == "steps" else (None, 0.1)))


def test_one_image_alone_is_an_image():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    inputs = ImageInputs([1, 16, 16], [0.0], [1.0])
    assert torch.equal(inputs(Image.fromarray(grey)), inputs([grey]))
    assert inputs(torch.from_numpy(grey).unsqueeze(0)).shape == (1, 1, 16, 16)


def test_support_needs_labels_and_two_classes(tmp_path):
    vectors = ExampleInputs([2], "label", None, [0, 0], [1, 1])
    np.savez(tmp_path / "s.npz", examples=np.ones((2, 2)))
    with pytest.raises(ValueError, match="must have labels to adapt to, and has none"):
        read_support(tmp_path / "s.npz", vectors)
    np.savez(tmp_path / "s.npz", examples=np.ones((2, 2)), labels=np.array([7, 7]))
    with pytest.raises(ValueError, match="must hold 2 classes or more, and has '7'"):
        read_support(tmp_path / "s.npz", vectors)


def test_a_forecast_needs_the_spline_and_a_place_to_write(tmp_path):
    settings = {"data": {"name": "market"}, "problem": "quadratic"}
    with pytest.raises(ValueError, match=r"a forecast needs the smoothing spline, and .* has the problem 'quadratic'"):
        require_market(settings, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output must be a file that can be written, got"):
        write_forecast(Forecast(None, None), tmp_path / "file" / "x.csv")
    with pytest.raises(ValueError, match=r"output must be a CSV file, like forecast\.csv"):
        write_forecast(Forecast(None, None), tmp_path)


def test_an_outer_variable_without_names_says_why(tmp_path, capsys):
    recipe = {"seed": 0, "no_problem": "a lambda"}
    torch.save({"global_step": 7, "recipe": recipe, "state_dict": {"outer": torch.ones(1, 2)}}, tmp_path / "x.ckpt")
    assert cli.main(["export", str(tmp_path / "x.ckpt"), str(tmp_path / "out")]) == 0
    assert "λ has no names: a lambda" in capsys.readouterr().out
