"""Inputs: images and vectors become exactly what the run was trained on."""

import numpy as np
import pytest
import torch
from PIL import Image

from obbo_lightning import load_model
from obbo_lightning.inference.inputs import ExampleInputs, ImageInputs, inputs_from
from obbo_lightning.streams.few_shot.stored import ImageFolderStream

GREY = ImageInputs([1, 16, 16], [0.25], [0.5])


def test_images_become_what_the_run_was_trained_on(image_run, image_data):
    stream = ImageFolderStream(str(image_data), image_size=16, ways=2, shots=3, queries=3)
    inputs = load_model(image_run).inputs
    opened = [Image.open(image_data / name / f"{i}.png") for name in stream.names for i in range(6)]
    expected = stream.scaler(stream.train.source.examples)
    arrays = [np.asarray(image) for image in opened]
    tensor = torch.from_numpy(np.stack(arrays)).unsqueeze(1)
    colour = [array[..., None].repeat(3, -1) for array in arrays]
    for same in (opened, arrays, np.stack(arrays), tensor, tensor / 255, colour):
        assert torch.equal(inputs(same), expected)


def test_floats_are_rounded_to_the_nearest_byte():
    shades = np.linspace(0, 1, 256).reshape(16, 16)
    expected = (np.round(shades * 255) / 255 - 0.25) / 0.5
    assert torch.allclose(GREY([shades])[0, 0], torch.from_numpy(expected).float())
    between = (np.arange(256) + 0.7).clip(0, 255).reshape(16, 16) / 255
    nearest = np.minimum(np.arange(256) + 1, 255).reshape(16, 16) / 255
    assert torch.allclose(GREY([between])[0, 0], torch.from_numpy((nearest - 0.25) / 0.5).float())


def test_channels_and_size_become_those_of_training():
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    grey = np.asarray(Image.fromarray(colour).convert("L"))
    for given in (colour, torch.from_numpy(colour).movedim(-1, 0), Image.fromarray(colour), grey, grey[:, :, None]):
        assert torch.allclose(GREY([given])[0, 0], torch.from_numpy((grey / 255 - 0.25) / 0.5).float())
    means, deviations = [0.1, 0.2, 0.3], [1.0, 0.5, 2.0]
    coloured = ImageInputs([3, 16, 16], means, deviations)
    for c in range(3):
        expected = (grey / 255 - means[c]) / deviations[c]
        assert torch.allclose(coloured([grey])[0, c], torch.from_numpy(expected).float())
        expected = (colour[:, :, c] / 255 - means[c]) / deviations[c]
        assert torch.allclose(coloured([colour])[0, c], torch.from_numpy(expected).float())
    wide = np.zeros((16, 40), np.uint8)
    wide[:, 12:28] = grey
    assert torch.equal(GREY([wide]), GREY([grey]))  # the square in the middle
    assert torch.equal(GREY(Image.fromarray(grey)), GREY([grey]))  # a single image is a batch of one
    assert GREY(torch.from_numpy(grey.copy()).unsqueeze(0)).shape == (1, 1, 16, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([np.zeros((8, 8), np.int64)], "an image must be of uint8, or of floats between 0 and 1, got int64"),
        (torch.full((2, 1, 8, 8), 3.0), "an image of floats must lie between 0 and 1"),
        (np.zeros((2, 8, 8, 4), np.uint8), "got ndarray of uint8 [8, 8, 4]"),
        (np.zeros((8, 8), np.uint8), "images must have 3 or 4 axes"),
        (["x.png"], "got str"),
        ([], "images must not be empty"),
    ],
)
def test_unusable_images_are_refused(given, message):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is compared as it is
        GREY(given)
    assert message in str(refusal.value)


@pytest.mark.parametrize("given", [np.full((2, 2), np.nan), np.zeros((2, 3)), np.zeros((0, 2)), np.zeros(2)])
def test_vectors_are_standardised_or_refused(given):
    inputs = ExampleInputs([2], "label", None, [1.0, 2.0], [0.5, 4.0])
    assert inputs([[2.0, 6.0]]).tolist() == [[2.0, 1.0]]
    with pytest.raises(ValueError, match=r"examples must be (finite )?numbers"):
        inputs(given)


def test_incomplete_descriptions_are_refused():
    with pytest.raises(ValueError, match=r"inputs.kind must be one of images, examples, got 'sounds'"):
        inputs_from({"kind": "sounds"})
    with pytest.raises(ValueError, match="inputs of kind images must have deviation, and have not"):
        inputs_from({"kind": "images", "shape": [1, 16, 16], "mean": [0.5]})
    with pytest.raises(ValueError, match="because its stream does not describe its inputs, got list"):
        inputs_from(None)([[1, 2]])
