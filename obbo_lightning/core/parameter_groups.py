"""Parameter groups of the outer variable, each with its own geometry, regularizer, domain and step size."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.domains import Box, Domain, RealSpace, Simplex
from obbo_lightning.core.geometry import SUPPORTED_STEPS, Euclidean, Geometry, NegativeEntropy
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer
from obbo_lightning.core.statistics import median
from obbo_lightning.core.step_size import DEFAULT_SCALE
from obbo_lightning.core.validation import at_least, instance_of, nonnegative, number, one_of, positive

LearningRate = float | Literal["auto"]
Start = float | Sequence[float] | Tensor
FEW_COORDINATES = 100  # up to this number λ is written and logged in every round, and in the summary of a run
AROUND = 1000.0  # factor between the start of a positive number and its usual bounds, either way
SMALLEST = torch.finfo(torch.float32).tiny  # least value of a positive group: an open interval has no nearest point
COMPONENTS = {"geometry": Geometry, "regularizer": ElasticNet, "domain": Domain}
SETTINGS = ("lr", "scale", *COMPONENTS)


class ParameterGroup(Configurable):
    """Coordinates of λ that share a geometry, a regularizer, a domain and a step size.

    Attributes:
        name: empty where λ has no groups.
        where: its coordinates of λ.
        size: number of coordinates.

    Args:
        start: first values ``[size]``; None where λ has no groups, so that its start is given elsewhere.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        lr: α, or ``auto``, a step that grows with evidence (`obbo_lightning.core.step_size`).
        scale: first s, where ``lr`` is ``auto``; its effect fades within a few dozen rounds.
    """

    name = ""
    where = slice(None)
    has_named_coordinates = True  # false for the weights of a network, which are not reported one by one

    def __init__(
        self,
        start: Tensor | None,
        geometry: Geometry,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        lr: LearningRate = "auto",
        scale: float = DEFAULT_SCALE,
    ) -> None:
        self._start = start
        self.size = 0 if start is None else start.numel()
        self.geometry: Geometry = geometry
        self.regularizer: ElasticNet = regularizer or NoRegularizer()
        self.domain: Domain = domain or RealSpace()
        self.lr = lr
        self.scale = scale
        self._validate()
        if start is not None and not bool(self.domain.contains(start)):
            raise ValueError(f"start must lie in {self.domain!r}, got {start[:4].tolist()}")

    def start(self, seed: int = 0) -> Tensor:
        """Return the first values ``[size]``; ``seed`` is for groups with random ones."""
        assert self._start is not None, "start must be given where λ has no parameter groups"
        return self._start

    def replace(self, name: str = "", where: slice | None = None, **settings: Any) -> "ParameterGroup":
        """Return a copy with a name, coordinates and other settings (`SETTINGS`)."""
        group = copy.copy(self)
        group.name, group.where = name, where or slice(None)
        for key, value in settings.items():
            setattr(group, key, value)
        group._validate()
        return group

    def _validate(self) -> None:
        prefix = f"algorithm.groups.{self.name}." if self.name else ""
        positive(f"{prefix}scale", self.scale)
        if isinstance(self.lr, str) and self.lr != "auto":
            raise ValueError(f"{prefix}lr must be a positive finite number or auto, got {self.lr!r}")
        positive(f"{prefix}lr", self.rate)
        for key, base in COMPONENTS.items():
            instance_of(f"{prefix}{key}", getattr(self, key), base)
        if not self.geometry.supports(self.regularizer, self.domain):
            raise ValueError(
                f"{prefix}geometry {self.geometry!r} with regularizer {self.regularizer!r} and domain {self.domain!r} "
                f"is not supported; these are:\n{SUPPORTED_STEPS}"
            )

    @property
    def rate(self) -> float:
        """What multiplies the step: α, or the first s where α is ``auto``."""
        return self.scale if self.lr == "auto" else self.lr

    @property
    def factor(self) -> float:
        """Factor on the optimizer's ``lr``: `rate` of a named group; 1 where λ has no groups and ``lr`` is `rate`."""
        return self.rate if self.name else 1.0


class Real(ParameterGroup):
    """Any numbers: Euclidean geometry on R^size. With ``lr: auto`` a typical change is s times the size of λ.

    Args:
        start: first value, or a list of first values.
        size: how many numbers, where ``start`` is one for all.
        settings: ``geometry``, ``regularizer``, ``domain`` and ``lr`` of a `ParameterGroup`.

    >>> Real([0.5, -0.5]).start(), Real(size=3).size
    (tensor([ 0.5000, -0.5000], dtype=torch.float64), 3)
    """

    def __init__(self, start: Start = 0.0, size: int | None = None, **settings: Any) -> None:
        super().__init__(_values(start, size), **{"geometry": Euclidean()} | settings)


class Positive(ParameterGroup):
    """Positive numbers, such as weights of penalties: negative entropy on [lower, upper]^size.

    With ``lr: auto`` a typical change of log λ is s.

    Args:
        start: first value, or a list of first values.
        lower: smallest value; None: a thousandth of the smallest start.
        upper: largest value, which may be infinite; None: a thousand times the largest start.
        size: how many numbers, where ``start`` is one for all.
        settings: ``geometry``, ``regularizer``, ``domain`` and ``lr`` of a `ParameterGroup`.

    >>> Positive(0.5).domain
    Box(lower=0.0005, upper=500.0)
    """

    def __init__(
        self,
        start: Start = 1.0,
        lower: float | None = None,
        upper: float | None = None,
        size: int | None = None,
        **settings: Any,
    ) -> None:
        first = _values(start, size)
        least, most = float(first.min()), float(first.max())
        if not 0 < least <= most < math.inf:
            raise ValueError(f"start must be above 0 and finite, got {first[:4].tolist()}")
        lower = least / AROUND if lower is None else nonnegative("lower", lower)
        upper = most * AROUND if upper is None else number("upper", upper)
        defaults = {"geometry": NegativeEntropy(), "domain": Box(max(lower, SMALLEST), upper)}
        super().__init__(first, **defaults | settings)


class OnSimplex(ParameterGroup):
    """Weights that are nonnegative and sum to 1: negative entropy on the simplex, from equal weights.

    With ``lr: auto`` a typical change of log λ is s.

    Args:
        size: how many weights.
        start: first weights; equal ones where this is None.
        floor: smallest weight, less than 1/size; above 0, a weight that was small for long recovers quickly.
        settings: ``geometry``, ``regularizer``, ``domain`` and ``lr`` of a `ParameterGroup`.

    >>> OnSimplex(4).start()
    tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """

    def __init__(self, size: int, start: Start | None = None, floor: float = 0.0, **settings: Any) -> None:
        first = _values(1 / at_least("size", size, 2) if start is None else start, size)
        super().__init__(first, **{"geometry": NegativeEntropy(), "domain": Simplex(floor)} | settings)


class Interval(ParameterGroup):
    """Numbers between two bounds: Euclidean geometry on [low, high]^size, from the middle.

    With ``lr: auto`` a typical change is s times a tenth of the width.

    Args:
        low: smallest value.
        high: largest value.
        start: first value, or a list of first values; the middle where this is None.
        size: how many numbers, where ``start`` is one for all.
        settings: ``geometry``, ``regularizer``, ``domain`` and ``lr`` of a `ParameterGroup`.

    >>> Interval(0.0, 0.5).start()
    tensor([0.2500], dtype=torch.float64)
    """

    def __init__(
        self, low: float, high: float, start: Start | None = None, size: int | None = None, **settings: Any
    ) -> None:
        if not -math.inf < number("low", low) < number("high", high) < math.inf:
            raise ValueError(f"low must be smaller than high, both finite, got {low!r} and {high!r}")
        first = _values((low + high) / 2 if start is None else start, size)
        super().__init__(first, **{"geometry": Euclidean(), "domain": Box(low, high)} | settings)


class ParameterGroups(Configurable):
    """λ ``[lanes, d]`` as named parameter groups, one after the other.

    Bregman divergences add over groups, so the composite step is the groups' own steps, exactly.

    Args:
        groups: the groups by name.
        named: the same as keywords.

    >>> hyper = ParameterGroups(decay=Positive(0.5), sources=OnSimplex(2), smoothing=Interval(0.0, 0.3))
    >>> hyper.start(), list(hyper.coordinates())
    (tensor([[0.5000, 0.5000, 0.5000, 0.1500]]), ['decay', 'sources[0]', 'sources[1]', 'smoothing'])
    """

    def __init__(self, groups: Mapping[str, ParameterGroup] | None = None, **named: ParameterGroup) -> None:
        if groups is not None and not isinstance(groups, Mapping):
            raise ValueError(f"groups must be a mapping from names to parameter groups, got {groups!r}")
        both = {**(groups or {}), **named}
        if not both:
            raise ValueError("groups must have at least one parameter group, got none")
        for name, group in both.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"groups must have names of letters, digits and _, got {name!r}")
            if not isinstance(group, ParameterGroup):
                wanted = "a parameter group, such as Positive(0.1) or Interval(0.0, 1.0)"
                raise ValueError(f"{name} must be {wanted}, got {group!r}")
        self.named = both
        ends = [0, *accumulate(group.size for group in both.values())]
        self.size = ends[-1]
        self.slices = {name: slice(*ends[i : i + 2]) for i, name in enumerate(both)}

    def start(self, seed: int = 0, lanes: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """Return λ_1 ``[lanes, d]``, in torch's default dtype unless another is given."""
        dtype = dtype or torch.get_default_dtype()
        flat = torch.cat([group.start(seed).to(dtype) for group in self.named.values()])
        return flat.repeat(lanes, 1)

    def split(self, outer: Tensor) -> dict[str, Tensor]:
        """Return views ``[lanes, size]`` of λ by name; they can be differentiated through."""
        self.require_size(outer)
        return {name: outer[..., where] for name, where in self.slices.items()}

    def values(self, row: Tensor) -> dict[str, Tensor]:
        """Return one lane ``[d]`` by name, as losses of modules get it: a group of one number has no axis."""
        return {name: value.squeeze(-1) if value.shape[-1] == 1 else value for name, value in self.split(row).items()}

    def coordinates(self) -> dict[str, int]:
        """Return the index of each named coordinate of λ, without the weights of networks."""
        return {
            name if group.size == 1 else f"{name}[{i}]": self.slices[name].start + i
            for name, group in self.named.items()
            if group.has_named_coordinates
            for i in range(group.size)
        }

    def medians(self, outer: Tensor) -> dict[str, float]:
        """Return the median over lanes of each named coordinate, ``outer [lanes, d]``."""
        coordinates = self.coordinates()
        values = torch.stack([median(outer[:, i]) for i in coordinates.values()]).tolist() if coordinates else []
        return dict(zip(coordinates, values, strict=True))

    def require_size(self, outer: Tensor) -> None:
        """Refuse a λ of another size."""
        if outer.shape[-1] != self.size:
            sizes = ", ".join(f"{name} {group.size}" for name, group in self.named.items())
            raise ValueError(
                f"outer must have the {self.size} coordinates of its parameter groups ({sizes}), got {outer.shape[-1]}"
            )


def resolve_groups(
    groups: ParameterGroups | None,
    default: ParameterGroup,
    algorithm: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]] | None,
) -> list[ParameterGroup]:
    """Return the parameter groups that the outer step uses.

    A setting is taken from the user's override for the group, else from the algorithm (None leaves one open), else from
    the group itself. ``default`` is the one group of a λ without groups.
    """
    chosen = {key: value for key, value in algorithm.items() if value is not None}
    own = {name: {k: v for k, v in given.items() if v is not None} for name, given in (overrides or {}).items()}
    if groups is None and own:
        raise ValueError(f"algorithm.groups must be none for a problem without parameter groups, got {', '.join(own)}")
    if groups is None:
        return [default.replace(**chosen)]
    for name in own:
        one_of("algorithm.groups", name, groups.named)
    return [group.replace(n, groups.slices[n], **chosen | own.get(n, {})) for n, group in groups.named.items()]


def _values(start: Start, size: int | None) -> Tensor:
    """Return first values in double precision: each is rounded once, when the dtype is known."""
    if isinstance(start, (int, float)):
        count = 1 if size is None else at_least("size", size, 1)
        return torch.full((count,), number("start", start), dtype=torch.float64)
    values = torch.as_tensor(start, dtype=torch.float64).detach().clone()
    if values.ndim != 1 or not values.numel() or size not in (None, len(values)):
        wanted = "a number or a list of numbers" if size is None else f"a number or a list of {size}"
        raise ValueError(f"start must be {wanted}, got the shape {list(values.shape)}")
    return values
