"""From what you have (images, vectors) to what a network takes, exactly as the run's stream made its examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from obbo_lightning.streams.examples import Features
from obbo_lightning.streams.images import Pixels, channels_first, image_bytes, scaled


@dataclass(frozen=True)
class Inputs:
    """Tensors as the tasks of the run held them: for a stream that does not say how it makes them."""

    def __call__(self, given: Any) -> Tensor:
        """Examples ``[n, …]``."""
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim < 2:
            raise ValueError(
                f"examples must be a float tensor [n, …] as the run's tasks held them, because the run does not say "
                f"how anything else becomes one (inputs of its stream), got {_kind(given)}"
            )
        return given


@dataclass(frozen=True)
class ImageInputs(Inputs):
    """Images: made square, scaled and standardised as in training; grey or coloured as in training.

    Attributes:
        shape: of one image: channels, size, size.
        mean: of each channel, of pixels between 0 and 1.
        deviation: of each channel.
    """

    shape: Sequence[int]
    mean: Sequence[float]
    deviation: Sequence[float]

    def __call__(self, given: Any) -> Tensor:
        images = [self.fitted(_bytes(one)) for one in _each(given)]
        if not images:
            raise ValueError("images must not be empty, got none")
        return Pixels(self.mean, self.deviation)(channels_first(np.stack(images)))

    def fitted(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes ``[height, width, channels]`` with the channels and the size of training."""
        if self.shape[0] == 1 and pixels.shape[2] == 3:
            pixels = np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
        pixels = scaled(pixels, self.shape[1])
        return np.broadcast_to(pixels, (*pixels.shape[:2], self.shape[0]))


@dataclass(frozen=True)
class ExampleInputs(Inputs):
    """Vectors, sequences, rows of a table: standardised as in training.

    Attributes:
        shape: of one example.
        label: the column of a table that has the labels.
        columns: what a table calls the features; None where they came from an npz file.
        mean: of each feature, flat.
        deviation: of each feature, flat.
    """

    shape: Sequence[int]
    label: str
    columns: Sequence[str] | None
    mean: Sequence[float]
    deviation: Sequence[float]

    def __call__(self, given: Any) -> Tensor:
        examples = np.asarray(given, dtype=np.float64)
        if examples.ndim < 2 or list(examples.shape[1:]) != list(self.shape) or not len(examples):
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"examples must be numbers [n, {wanted}], got {list(examples.shape)}")
        if not np.isfinite(examples).all():
            raise ValueError("examples must be finite numbers, got NaN or infinity")
        return Features(*(np.reshape(x, self.shape) for x in (self.mean, self.deviation)))(examples)


def inputs_from(said: dict[str, Any] | None) -> Inputs:
    """What a stream's `inputs` said."""
    if said is None:
        return Inputs()
    kinds: dict[str, Any] = {"images": ImageInputs, "examples": ExampleInputs}
    if said.get("kind") not in kinds:
        raise ValueError(f"inputs.kind must be one of {', '.join(kinds)}, got {said.get('kind')!r}")
    cls = kinds[said["kind"]]
    missing = [name for name in cls.__dataclass_fields__ if name not in said]
    if missing:
        raise ValueError(f"inputs of kind {said['kind']} must have {missing[0]}, and have not")
    made: Inputs = cls(**{name: said[name] for name in cls.__dataclass_fields__})
    return made


def _each(given: Any) -> Sequence[Any]:
    """Image by image."""
    if isinstance(given, Image.Image):
        return [given]
    if isinstance(given, (Tensor, np.ndarray)) and given.ndim not in (3, 4):
        raise ValueError(f"images must have 3 or 4 axes, the first of which counts them, got {list(given.shape)}")
    return list(given)


def _bytes(one: Any) -> NDArray[np.uint8]:
    """``[height, width, channels]`` of a PIL image, an array with its channels last, or a tensor with them first."""
    if isinstance(one, Image.Image):
        return image_bytes(one)
    if isinstance(one, Tensor):
        one = one.movedim(0, -1).cpu().numpy() if one.ndim == 3 else one.cpu().numpy()
    if not isinstance(one, np.ndarray) or one.ndim not in (2, 3) or (one.ndim == 3 and one.shape[2] not in (1, 3)):
        raise ValueError(
            f"an image must be of PIL, an array [height, width] or [height, width, 1 or 3], or a tensor [1 or 3, "
            f"height, width], got {_kind(one)}"
        )
    if one.dtype.kind == "f":
        if not ((one >= 0) & (one <= 1)).all():
            raise ValueError("an image of floats must lie between 0 and 1, got one that does not")
        one = (one * 255).round().astype(np.uint8)
    if one.dtype != np.uint8:
        raise ValueError(f"an image must be of uint8, or of floats between 0 and 1, got {one.dtype}")
    return one if one.ndim == 3 else one[:, :, None]


def _kind(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"{type(given).__name__} of {given.dtype} {list(shape)}"
