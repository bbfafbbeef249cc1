"""A round as a row of numbers, for tables and loggers."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from obbo_lightning.core.blocks import Blocks
from obbo_lightning.core.rounds import Round
from obbo_lightning.core.statistics import median

REGRETS = ("euclidean", "generalized", "exact")
NUMBERS = ("hypergradient_norm", "direction_norm", "generalized_norm", "residual", "hypergradient_error")
LATER = ("regret/geometry",)  # last: tables that an older version has begun are without
COUNTS = ("gradients", "products", "window_fill", "skipped")
Row = dict[str, float | int | None]


def row_of(played: Round, window_fill: int) -> Row:
    """Medians over lanes; None for what an algorithm or a problem does not have."""
    step = played.step
    per_lane: dict[str, Tensor | None] = {
        "loss": played.loss,
        "inner_loss": played.inner_loss,
        **played.scores,
        **{f"regret/{name}": values for name, values in step.regret.items()},
        "hypergradient_norm": step.hypergradient.norm(dim=-1),
        "direction_norm": step.direction.norm(dim=-1),
        "generalized_norm": None if step.generalized is None else step.generalized.norm(dim=-1),
        "residual": played.residual,
        "hypergradient_error": step.hypergradient_error,
        **step.numbers,
    }
    known = {name: values for name, values in per_lane.items() if values is not None}
    numbers = torch.stack([median(values) for values in known.values()]).tolist()  # one transfer
    row: Row = dict.fromkeys(per_lane)
    row |= dict(zip(known, numbers, strict=True))
    return row | {**played.calls, "window_fill": window_fill, "skipped": int(step.skipped.sum())}


def columns_of(metric: str, of_blocks: Sequence[str] = ()) -> list[str]:
    """The header of metrics.csv; ``of_blocks`` are those that only some outer variables have, see `more_columns`."""
    scores = [] if metric == "loss" else [metric]
    return [
        *("round", "loss", "inner_loss", *scores, f"test_{metric}", f"test_{metric}_se"),
        *(f"regret/{name}" for name in REGRETS),
        *(*NUMBERS, *COUNTS, *of_blocks, *LATER),
    ]


def more_columns(blocks: Blocks | None, optimizer: Optimizer) -> list[str]:
    """What a row has besides: numbers of each of several blocks, and α_t where it is auto."""
    several = [] if blocks is None else list(blocks.several)
    rates = optimizer.param_groups[0].get("auto", [])
    return [
        *(f"regret/{name}/{block}" for name in REGRETS for block in several),
        *(f"generalized_norm/{block}" for block in several),
        *(f"lr/{block}" if block else "lr" for block in rates),
    ]


def values_of(outer: Tensor, named: dict[str, int]) -> dict[str, float]:
    """λ by name; like all of a row the median over lanes."""
    values = torch.stack([median(outer[:, i]) for i in named.values()])
    return dict(zip(named, values.tolist(), strict=True))
