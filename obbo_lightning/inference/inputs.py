"""Turn images and vectors into the tensors that a network takes, exactly as the run's stream made its examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from obbo_lightning.core.validation import one_of
from obbo_lightning.streams.few_shot.stored import FeatureScaler, PixelScaler, channels_first
from obbo_lightning.streams.readers import image_bytes, resize_square


@dataclass(frozen=True)
class Inputs:
    """Tensors ``[n, …]`` as the tasks of the run hold them, for a stream that does not describe its inputs."""

    def __call__(self, given: Any) -> Tensor:
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim < 2:
            raise ValueError(
                f"examples must be a float tensor [n, …] as the run's tasks hold them, because its stream does not "
                f"describe its inputs, got {_describe(given)}"
            )
        return given


@dataclass(frozen=True)
class ImageInputs(Inputs):
    """Images, made square, scaled, and standardised as in training; grey or coloured as in training."""

    shape: Sequence[int]  # channels, size, size
    mean: Sequence[float]  # of each channel, for pixels between 0 and 1
    deviation: Sequence[float]

    def __call__(self, given: Any) -> Tensor:
        if isinstance(given, (Tensor, np.ndarray)) and given.ndim not in (3, 4):
            raise ValueError(f"images must have 3 or 4 axes, the first of which counts them, got {list(given.shape)}")
        images = [self.resize(_pixels(one)) for one in ([given] if isinstance(given, Image.Image) else given)]
        if not images:
            raise ValueError("images must not be empty, got none")
        return PixelScaler(self.mean, self.deviation)(channels_first(np.stack(images)))

    def resize(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return bytes ``[height, width, channels]`` with the channels and the size of training."""
        if self.shape[0] == 1 and pixels.shape[2] == 3:
            pixels = np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
        pixels = resize_square(pixels, self.shape[1])
        return np.broadcast_to(pixels, (*pixels.shape[:2], self.shape[0]))


@dataclass(frozen=True)
class ExampleInputs(Inputs):
    """Vectors, sequences or rows of a table, standardised as in training."""

    shape: Sequence[int]  # of one example
    label: str  # column of a table that holds the labels
    columns: Sequence[str] | None  # of a table that are features; None where they came from an npz file
    mean: Sequence[float]  # of each feature, flat
    deviation: Sequence[float]

    def __call__(self, given: Any) -> Tensor:
        examples = np.asarray(given, dtype=np.float64)
        if examples.ndim < 2 or list(examples.shape[1:]) != list(self.shape) or not len(examples):
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"examples must be numbers [n, {wanted}], got {list(examples.shape)}")
        if not np.isfinite(examples).all():
            raise ValueError("examples must be finite numbers, got NaN or infinity")
        return FeatureScaler(*(np.reshape(x, self.shape) for x in (self.mean, self.deviation)))(examples)


def inputs_from(description: dict[str, Any] | None) -> Inputs:
    """Return the inputs that a stream describes with its method ``inputs``."""
    if description is None:
        return Inputs()
    kinds: dict[str, type[Inputs]] = {"images": ImageInputs, "examples": ExampleInputs}
    kind = one_of("inputs.kind", description.get("kind"), kinds)
    names = list(kinds[kind].__dataclass_fields__)
    missing = [name for name in names if name not in description]
    if missing:
        raise ValueError(f"inputs of kind {kind} must have {', '.join(missing)}, and have not")
    return kinds[kind](**{name: description[name] for name in names})


def _pixels(image: Any) -> NDArray[np.uint8]:
    """Return bytes ``[height, width, channels]`` of a PIL image, of an array, or of a tensor with channels first."""
    if isinstance(image, Image.Image):
        return image_bytes(image)
    if isinstance(image, Tensor):
        image = image.movedim(0, -1).cpu().numpy() if image.ndim == 3 else image.cpu().numpy()
    if isinstance(image, np.ndarray) and image.ndim == 2:
        image = image[:, :, None]
    if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            f"an image must be of PIL, an array [height, width] or [height, width, 1 or 3], or a tensor [1 or 3, "
            f"height, width], got {_describe(image)}"
        )
    if image.dtype.kind == "f":
        if not ((image >= 0) & (image <= 1)).all():
            raise ValueError("an image of floats must lie between 0 and 1, got one that does not")
        image = (image * 255).round().astype(np.uint8)
    if image.dtype != np.uint8:
        raise ValueError(f"an image must be of uint8, or of floats between 0 and 1, got {image.dtype}")
    return image


def _describe(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"{type(given).__name__} of {given.dtype} {list(shape)}"
