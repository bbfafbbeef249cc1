"""What the outer step of a block is made with, once an algorithm and the block have both said what they want."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from obbo_lightning.core.auto_step import SCALE
from obbo_lightning.core.blocks import Block, Blocks, LearningRate, learning_rate
from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import Euclidean, Geometry, require_support
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer
from obbo_lightning.core.validation import instance_of, positive
from obbo_lightning.parts import part

LR = 1e-4  # α, where nobody says another
KINDS = {"geometry": Geometry, "regularizer": ElasticNet, "domain": Domain}


@dataclass(frozen=True)
class BlockStep:
    """The step of some coordinates of λ.

    Attributes:
        lr: α, or ``auto``.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        scale: s, where ``lr`` is ``auto``.
        name: of the block; empty where λ has none.
        where: which coordinates they are.
    """

    lr: LearningRate
    geometry: Geometry
    regularizer: ElasticNet
    domain: Domain
    scale: float = SCALE
    name: str = ""
    where: slice = field(default_factory=lambda: slice(None))

    def __post_init__(self) -> None:
        prefix = f"algorithm.blocks.{self.name}." if self.name else ""
        learning_rate(f"{prefix}lr", self.lr)
        positive(f"{prefix}scale", self.scale)
        for kind, base in KINDS.items():
            instance_of(f"{prefix}{kind}", getattr(self, kind), base)
        require_support(self.geometry, self.regularizer, self.domain, prefix)

    @property
    def rate(self) -> float:
        """What multiplies the step: α, or s."""
        return self.scale if self.lr == "auto" else self.lr

    @property
    def factor(self) -> float:
        """The same beside the group's ``lr``, which has it already where λ has no blocks."""
        return self.rate if self.name else 1.0


@dataclass(frozen=True)
class Wishes:
    """What an algorithm says of the outer step; what it leaves open is a block's own, or the usual.

    Attributes:
        lr: α, or ``auto``.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        scale: s, where α is ``auto``.
        blocks: the same for some blocks, by name and then by these words; a part is an object, its name, or its
            settings with the name among them.
        usual: φ_t of a λ without blocks, where ``geometry`` is open.
        decided: which of these words the algorithm does not leave to blocks.
    """

    lr: LearningRate | None = None
    geometry: Geometry | None = None
    regularizer: ElasticNet | None = None
    domain: Domain | None = None
    scale: float = SCALE
    blocks: Mapping[str, Mapping[str, Any]] | None = None
    usual: Geometry = field(default_factory=Euclidean)
    decided: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        learning_rate("lr", LR if self.lr is None else self.lr)
        positive("scale", self.scale)
        for kind, base in KINDS.items():
            if getattr(self, kind) is not None:
                instance_of(kind, getattr(self, kind), base)
        if self.domain is not None:  # without one, a geometry may be meant for the domains of blocks
            self._alone()
        for name, settings in (self.blocks or {}).items():
            _made(name, settings, self.decided)

    def steps(self, blocks: Blocks | None) -> list[BlockStep]:
        """The steps of all blocks; refuses what does not fit them."""
        if blocks is None:
            if self.blocks:
                given = ", ".join(self.blocks)
                raise ValueError(f"algorithm.blocks must be none for a problem that has no blocks, got {given}")
            return [self._alone()]
        for name in self.blocks or {}:
            if name not in blocks.named:
                raise ValueError(f"algorithm.blocks must be of {', '.join(blocks.named)}, got {name!r}")
        return [self._step(name, block, blocks.slices[name]) for name, block in blocks.named.items()]

    def _alone(self) -> BlockStep:
        """The step of a λ without blocks."""
        return BlockStep(
            LR if self.lr is None else self.lr,
            self.geometry or self.usual,
            self.regularizer or NoRegularizer(),
            self.domain or RealSpace(),
            self.scale,
        )

    def _step(self, name: str, block: Block, where: slice) -> BlockStep:
        own = _made(name, (self.blocks or {}).get(name) or {}, self.decided)
        chosen = {
            key: next(v for v in (own.get(key), getattr(self, key), getattr(block, key)) if v is not None)
            for key in ("lr", *KINDS)
        }
        return BlockStep(**chosen, scale=own.get("scale", self.scale), name=name, where=where)


def _made(name: str, settings: Mapping[str, Any], decided: tuple[str, ...]) -> dict[str, Any]:
    """The settings of one block, with its parts made."""
    allowed = [key for key in ("lr", "scale", *KINDS) if key not in decided]
    if not isinstance(settings, Mapping):
        raise ValueError(f"algorithm.blocks.{name} must be keys and values, got {settings!r}")
    for key in settings:
        if key not in allowed:
            raise ValueError(f"algorithm.blocks.{name} must be of {', '.join(allowed)}, got {key!r}")
    return {
        key: _part(f"algorithm.blocks.{name}.{key}", key, value) if key in KINDS else value
        for key, value in settings.items()
        if value is not None
    }


def _part(where: str, kind: str, value: Any) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value
    given = dict(value)
    if "name" not in given:
        raise ValueError(f"{where}.name must be given, got none")
    made = part(kind, given.pop("name"), where)
    try:
        return made(**given)
    except (TypeError, ValueError) as refusal:
        raise ValueError(f"{where} must be possible, got {value!r}: {refusal}") from None
