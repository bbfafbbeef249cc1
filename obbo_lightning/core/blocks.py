"""An outer variable of named blocks, each with its own geometry, regularizer, domain and step."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from obbo_lightning.core.domains import Box, Domain, RealSpace, Simplex
from obbo_lightning.core.geometry import Euclidean, Geometry, NegativeEntropy, require_support
from obbo_lightning.core.recipes import Part
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer
from obbo_lightning.core.validation import at_least, instance_of, number, positive

LearningRate = float | Literal["auto"]
Start = float | Sequence[float] | Tensor
SMALLEST = torch.finfo(torch.float32).tiny  # of a positive number: an open interval has no nearest point


class Block(Part):
    """Some coordinates of λ: where they start, and what their outer step is made with.

    Args:
        start: their first values ``[size]``.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        lr: α, or ``auto`` (`auto_step`).
    """

    listed = True  # each coordinate has a name that people read; the weights of a network have none

    def __init__(
        self,
        start: Tensor,
        geometry: Geometry,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        lr: LearningRate = "auto",
    ) -> None:
        self._start = start
        self.size = start.numel()
        self.geometry = instance_of("geometry", geometry, Geometry)
        self.regularizer = instance_of("regularizer", regularizer or NoRegularizer(), ElasticNet)
        self.domain = instance_of("domain", domain or RealSpace(), Domain)
        self.lr = learning_rate("lr", lr)
        require_support(self.geometry, self.regularizer, self.domain)
        if not bool(self.domain.contains(start)):
            rule = "be above 0, and at most its upper end" if isinstance(self, Positive) else f"lie in {self.domain!r}"
            raise ValueError(f"start must {rule}, got {start[:4].tolist()}")

    def start(self, seed: int = 0) -> Tensor:
        """Its first values ``[size]``; ``seed`` is for blocks that draw them."""
        return self._start


class Real(Block):
    """Any numbers: Euclidean geometry on R^size.

    Args:
        start: first value, or a list of them.
        size: how many numbers, where ``start`` is one for all.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        lr: α, or ``auto``: a typical change is s times the size of λ.
    """

    def __init__(
        self,
        start: Start = 0.0,
        size: int | None = None,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        lr: LearningRate = "auto",
    ) -> None:
        super().__init__(_values(start, size), geometry or Euclidean(), regularizer, domain, lr)


class Positive(Block):
    """Positive numbers, such as weights of penalties: negative entropy on (0, upper]^size.

    Args:
        start: first value, or a list of them.
        upper: largest value; may be infinite.
        size: how many numbers, where ``start`` is one for all.
        geometry: φ_t.
        regularizer: h.
        domain: X; the smallest value is 1.2e-38, so that there is one.
        lr: α, or ``auto``: a typical change of log λ is s.
    """

    def __init__(
        self,
        start: Start = 1.0,
        upper: float = math.inf,
        size: int | None = None,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        lr: LearningRate = "auto",
    ) -> None:
        domain = domain or Box(SMALLEST, number("upper", upper))
        super().__init__(_values(start, size), geometry or NegativeEntropy(), regularizer, domain, lr)


class OnSimplex(Block):
    """Weights that are nonnegative and sum to 1: negative entropy on the simplex, from equal weights.

    Args:
        size: how many weights.
        start: first weights; equal ones where this is None.
        floor: smallest weight, so that nothing is given up for good; less than 1/size.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        lr: α, or ``auto``: a typical change of log λ is s.
    """

    def __init__(
        self,
        size: int,
        start: Start | None = None,
        floor: float = 0.0,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        lr: LearningRate = "auto",
    ) -> None:
        first = _values(1 / at_least("size", size, 2) if start is None else start, size)
        super().__init__(first, geometry or NegativeEntropy(), regularizer, domain or Simplex(floor), lr)


class Interval(Block):
    """Numbers between two bounds: Euclidean geometry on [low, high]^size, from the middle.

    Args:
        low: smallest value.
        high: largest value.
        start: first value, or a list of them; the middle where this is None.
        size: how many numbers, where ``start`` is one for all.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        lr: α, or ``auto``: a typical change is s times a tenth of the width.
    """

    def __init__(
        self,
        low: float,
        high: float,
        start: Start | None = None,
        size: int | None = None,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        lr: LearningRate = "auto",
    ) -> None:
        if not -math.inf < number("low", low) < number("high", high) < math.inf:
            raise ValueError(f"low must be smaller than high, both finite, got {low!r} and {high!r}")
        first = _values((low + high) / 2 if start is None else start, size)
        super().__init__(first, geometry or Euclidean(), regularizer, domain or Box(low, high), lr)


class Blocks(Part):
    """λ ``[lanes, d]`` as named blocks, one after the other.

    Bregman divergences add over blocks, so the composite step is the blocks' own steps side by side, exactly.

    Args:
        blocks: the blocks by name.
        named: the same as keywords.

    >>> hyper = Blocks(decay=Positive(0.5), sources=OnSimplex(4), smoothing=Interval(0.0, 0.3))
    >>> hyper.size, hyper.start()
    (6, tensor([[0.5000, 0.2500, 0.2500, 0.2500, 0.2500, 0.1500]]))
    >>> hyper.split(hyper.start())["sources"].shape, list(hyper.coordinates())[:3]
    (torch.Size([1, 4]), ['decay', 'sources[0]', 'sources[1]'])
    """

    def __init__(self, blocks: Mapping[str, Block] | None = None, **named: Block) -> None:
        if blocks is not None and not isinstance(blocks, Mapping):
            raise ValueError(f"blocks must be a mapping from names to blocks, got {blocks!r}")
        both = {**(blocks or {}), **named}
        if not both:
            raise ValueError("blocks must have at least one block, got none")
        for name, block in both.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"blocks must have names of letters, digits and _, got {name!r}")
            if not isinstance(block, Block):
                raise ValueError(f"{name} must be a block, such as Positive(0.1) or Interval(0.0, 1.0), got {block!r}")
        self.named = both
        ends = [0]
        for block in both.values():
            ends.append(ends[-1] + block.size)
        self.size = ends[-1]
        self.slices = {name: slice(*ends[i : i + 2]) for i, name in enumerate(both)}

    @property
    def several(self) -> dict[str, slice]:
        """Which coordinates each block has, where there is more than one to tell apart."""
        return self.slices if len(self.slices) > 1 else {}

    def start(self, seed: int = 0, lanes: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """λ_1 ``[lanes, d]``, in torch's default dtype unless another is asked for."""
        dtype = dtype or torch.get_default_dtype()
        flat = torch.cat([block.start(seed).to(dtype) for block in self.named.values()])
        return flat.repeat(lanes, 1)

    def split(self, outer: Tensor) -> dict[str, Tensor]:
        """Views ``[lanes, size]`` of λ by name; they can be differentiated through."""
        self.require_size(outer)
        return {name: outer[..., where] for name, where in self.slices.items()}

    def values(self, row: Tensor) -> dict[str, Tensor]:
        """One lane ``[d]`` by name, as losses of modules get it: a block of one number has no axis."""
        return {name: value.squeeze(-1) if value.shape[-1] == 1 else value for name, value in self.split(row).items()}

    def coordinates(self) -> dict[str, int]:
        """Which coordinate of λ each name is, without those that nobody reads (the weights of networks)."""
        return {
            name if block.size == 1 else f"{name}[{i}]": self.slices[name].start + i
            for name, block in self.named.items()
            if block.listed
            for i in range(block.size)
        }

    def require_size(self, outer: Tensor) -> None:
        """Refuse a λ that these blocks do not make up."""
        if outer.shape[-1] != self.size:
            sizes = ", ".join(f"{name} {block.size}" for name, block in self.named.items())
            raise ValueError(
                f"outer must have the {self.size} coordinates of its blocks ({sizes}), got {outer.shape[-1]}"
            )


def learning_rate(name: str, value: LearningRate) -> LearningRate:
    """Return ``value`` if it is a positive number, or ``auto``."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"{name} must be a positive finite number or auto, got {value!r}")
    return value if isinstance(value, str) else positive(name, value)


def _values(start: Start, size: int | None) -> Tensor:
    """The first values of a block, in double precision: each is rounded once, when the dtype is known."""
    if isinstance(start, (int, float)):
        count = 1 if size is None else at_least("size", size, 1)
        return torch.full((count,), number("start", start), dtype=torch.float64)
    values = torch.as_tensor(start, dtype=torch.float64).detach().clone()
    if values.ndim != 1 or values.numel() != (values.numel() if size is None else size) or not values.numel():
        wanted = "a number or a list of them" if size is None else f"a number or a list of {size}"
        raise ValueError(f"start must be {wanted}, got the shape {list(values.shape)}")
    return values
