"""What several algorithms learned over the rounds, where the coordinates of λ have names."""

from collections.abc import Sequence

import polars as pl

from obbo_lightning.escaping import escape_mathtext, unescape_table
from obbo_lightning.experiments.drawing import Drawing, new_figure, set_title
from obbo_lightning.experiments.runs import DAMAGE, Run
from obbo_lightning.runs.figures import NAMED, draw_group, group_coordinates
from obbo_lightning.runs.table import read_rounds

WEIGHT_COLUMNS = {"label": pl.String, "seed": pl.Int64, "round": pl.Int64, "name": pl.String, "value": pl.Float64}
MOMENTS = 250  # of each run: more than a figure has dots


def read_weights(runs: Sequence[Run]) -> pl.DataFrame:
    """Of each label its first seed: a mean over seeds would mix what each of them followed."""
    first: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.summary["seed"]):
        first.setdefault(run.label, run)
    return pl.concat([pl.DataFrame(schema=WEIGHT_COLUMNS), *map(_weights, first.values())])


def _weights(run: Run) -> pl.DataFrame:
    try:
        outer = unescape_table(read_rounds(run.directory.outer))
        kept = outer.gather_every(-(-len(outer) // MOMENTS))
        long = kept.unpivot(index="round", variable_name="name", value_name="value")
        facts = {"label": pl.lit(run.label), "seed": pl.lit(run.summary["seed"])}
        return long.with_columns(**facts).select(pl.col(name).cast(kind) for name, kind in WEIGHT_COLUMNS.items())
    except DAMAGE:  # there is none, where λ has no names
        return pl.DataFrame(schema=WEIGHT_COLUMNS)


def draw_all_weights(weights: pl.DataFrame, labels: Sequence[str], title: str) -> list[Drawing]:
    """A figure a block, a row an algorithm."""
    names = weights["name"].unique(maintain_order=True).to_list()
    return [_draw(weights, labels, block, names, title) for block, names in group_coordinates(names).items()]


def _draw(weights: pl.DataFrame, labels: Sequence[str], block: str, names: list[str], title: str) -> Drawing:
    mine = weights.filter(pl.col("name").is_in(names))
    played = [label for label in labels if label in set(mine["label"])]
    legend = 0 if len(names) == 1 else len(names) if len(names) <= NAMED else 2
    figure, rows = new_figure(1.0 + 0.95 * len(played) + 0.17 * -(-legend // 4), rows=len(played), sharex=True)
    for label, axes in zip(played, rows, strict=True):
        part = mine.filter(pl.col("label") == label)
        draw_group(axes, part.pivot(on="name", index="round", values="value").sort("round").select("round", *names))
        axes.set_ylabel(escape_mathtext(label).replace(", ", "\n"), rotation=0, ha="right", va="center")
    rows[-1].set_xlabel("round t")
    if legend:
        figure.legend(*rows[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    set_title(figure, title)
    caption = (
        f"What was learned: {block} over the rounds, a row an algorithm, of its first seed ({mine['seed'][0]}). "
        "Numbers that sum to one are shown as shares, the first one below."
    )
    return Drawing(f"learned_{block}", caption, figure)
