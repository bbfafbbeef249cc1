"""A round as a row of numbers, for tables and loggers."""

import torch
from torch import Tensor

from obbo_lightning.core.rounds import Round
from obbo_lightning.core.statistics import median

REGRETS = ("euclidean", "generalized", "exact")
NUMBERS = ("hypergradient_norm", "direction_norm", "generalized_norm", "residual", "hypergradient_error")
COUNTS = ("gradients", "products", "window_fill", "skipped")
Row = dict[str, float | int | None]


def row_of(played: Round, window_fill: int) -> Row:
    """Medians over lanes; None for what an algorithm or a problem does not have."""
    step = played.step
    per_lane: dict[str, Tensor | None] = {
        "loss": played.loss,
        "inner_loss": played.inner_loss,
        **played.scores,
        **{f"regret/{name}": step.regret[name] for name in REGRETS},
        "hypergradient_norm": step.hypergradient.norm(dim=-1),
        "direction_norm": step.direction.norm(dim=-1),
        "generalized_norm": None if step.generalized is None else step.generalized.norm(dim=-1),
        "residual": played.residual,
        "hypergradient_error": step.hypergradient_error,
    }
    known = {name: values for name, values in per_lane.items() if values is not None}
    numbers = torch.stack([median(values) for values in known.values()]).tolist()  # one transfer
    row: Row = dict.fromkeys(per_lane)
    row |= dict(zip(known, numbers, strict=True))
    return row | {**played.calls, "window_fill": window_fill, "skipped": int(step.skipped.sum())}


def columns_of(metric: str) -> list[str]:
    """The header of metrics.csv."""
    scores = [] if metric == "loss" else [metric]
    return [
        *("round", "loss", "inner_loss", *scores, f"test_{metric}", f"test_{metric}_se"),
        *(f"regret/{name}" for name in REGRETS),
        *(*NUMBERS, *COUNTS),
    ]
