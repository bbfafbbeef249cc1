"""Several comparisons on one page: who is where in each, and whom the errors do not tell from the first."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from obbo_lightning.core.statistics import clustered_error, mean_and_error
from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.experiments.comparison import Comparison
from obbo_lightning.experiments.drawing import Drawing, house_style, look_of, new_figure, save_drawing, set_title
from obbo_lightning.experiments.market_comparison import MarketComparison
from obbo_lightning.experiments.page import write_page
from obbo_lightning.experiments.report import Report, make_folder, read_any
from obbo_lightning.experiments.runs import sorted_labels
from obbo_lightning.experiments.tables import Table, write_table

CAPTION = (
    "A row a method, a column a comparison: score ± standard error, and the place. •: the first, and those whose "
    "difference to it is below twice its standard error, as if the two were independent: no difference was shown. The "
    "mean place is over the comparisons that a method is in; those in most of them come first."
)


class Score(NamedTuple):
    """A method's in one comparison; the error is None where there is one run only."""

    mean: float
    error: float | None


class Standing(NamedTuple):
    """One comparison.

    Attributes:
        name: of its folder.
        measure: what the scores are, with what is better.
        higher: whether more is better.
        scores: by method.
    """

    name: str
    measure: str
    higher: bool
    scores: dict[str, Score]

    @property
    def places(self) -> dict[str, int]:
        """1 is the best; equal scores share the better place, and what is not finite is last."""
        key = {m: math.inf if not math.isfinite(s.mean) else -s.mean if self.higher else s.mean for m, s in self._all}
        return {method: 1 + sum(other < value for other in key.values()) for method, value in key.items()}

    @property
    def not_told_apart(self) -> set[str]:
        """The first, and those that the errors do not tell from it."""
        first = min(self.places, key=self.places.__getitem__)
        best = self.scores[first]
        near = {first}
        for method, score in self._all:
            known = best.error is not None and score.error is not None
            if known and abs(score.mean - best.mean) < 2 * math.hypot(score.error or 0.0, best.error or 0.0):
                near.add(method)
        return near

    @property
    def _all(self) -> list[tuple[str, Score]]:
        return list(self.scores.items())


def write_leaderboard(paths: Sequence[Path], output: Path, title: str) -> Report:
    """Write leaderboard.html, its table and its figure.

    Args:
        paths: a folder for each comparison: of a report, or with finished runs below.
        output: where to write.
        title: of the page.
    """
    names = [path.resolve().parent.name if path.resolve().name == "report" else path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"leaderboard needs folders of different names, got {', '.join(names)}")
    standings = [standing(name, path) for name, path in zip(names, paths, strict=True)]
    table = leaderboard_table(standings)
    make_folder(output)
    with house_style():
        drawing = draw_standings(standings, title)
        written = [*write_table(table, output), *save_drawing(drawing, output)]
    facts = [(one.name, one.measure) for one in standings]
    page = write_page(output / "leaderboard.html", title, facts, [table], [drawing], [], command="leaderboard")
    return Report(page, [page, *written], [table], [])


def standing(name: str, path: Path) -> Standing:
    """Of one comparison: test scores where it has test tasks, else those of the stream."""
    found = read_any([path])
    if isinstance(found, MarketComparison):
        scores = {
            label: Score(
                float(found.column(label, "test_mse").mean()),
                clustered_error(found.column(label, "test_mse"), found.days),
            )
            for label in found.labels
        }
        return Standing(name, "forecast error (mse), by day; lower is better", False, scores)
    if not isinstance(found, Comparison):
        raise ValueError(f"leaderboard needs comparisons of methods, and {path} is one of rates")
    higher = found.better == "higher is better"
    tested = bool(found.runs["test_tasks"].max())
    where = f"{found.metric} on test tasks" if tested else f"{found.metric} on the stream, all rounds"
    return Standing(name, f"{where}; {found.better}", higher, {m: _score(found, m, tested) for m in found.labels})


def _score(found: Comparison, label: str, tested: bool) -> Score:
    if tested:
        values = found.runs.filter(pl.col("label") == label)["test"]
    else:
        mine = found.rounds.filter(pl.col("label") == label)
        values = mine.group_by("seed", maintain_order=True).agg(pl.col("score").mean())["score"]
    numbers = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
    mean, error = mean_and_error(numbers)
    return Score(float(mean), None if error is None or not math.isfinite(error) else float(error))


def leaderboard_table(standings: Sequence[Standing]) -> Table:
    """Those that are in most comparisons first, and among them by the mean place."""
    methods = sorted_labels(sorted({method for one in standings for method in one.scores}))
    means = {m: float(np.mean([one.places[m] for one in standings if m in one.scores])) for m in methods}
    rows = []
    counts = {m: sum(m in one.scores for one in standings) for m in methods}
    for method in sorted(methods, key=lambda m: (-counts[m], means[m])):
        cells, count = [_cell(one, method) for one in standings], counts[method]
        rows.append(
            [method, *cells, f"{means[method]:.1f} (in {count})" if count < len(standings) else f"{means[method]:.1f}"]
        )
    return Table("leaderboard", CAPTION, ["method", *(one.name for one in standings), "mean place"], rows)


def _cell(one: Standing, method: str) -> str:
    score = one.scores.get(method)
    if score is None:
        return ""
    if not math.isfinite(score.mean):
        return f"not finite ({one.places[method]})"
    error = "" if score.error is None else f" ± {score.error:.3f}"
    return f"{'• ' if method in one.not_told_apart else ''}{score.mean:.3f}{error} ({one.places[method]})"


def draw_standings(standings: Sequence[Standing], title: str) -> Drawing:
    """A panel a comparison, a line a method: the score and two standard errors to each side."""
    heights = [0.5 + 0.24 * len(one.scores) for one in standings]
    figure, panels = new_figure(0.5 + sum(heights), rows=len(standings), height_ratios=heights)
    for one, axes in zip(standings, panels, strict=True):
        methods = sorted(one.scores, key=one.places.__getitem__, reverse=True)
        for y, method in enumerate(methods):
            mean, error = one.scores[method]
            look = {**look_of(methods, method), "linestyle": "none", "label": None}
            if math.isfinite(mean):
                axes.errorbar(mean, y, xerr=None if error is None else 2 * error, capsize=2, elinewidth=1.2, **look)
        axes.set_yticks(range(len(methods)), [escape_mathtext(method) for method in methods], fontsize="small")
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.set_title(f"{escape_mathtext(one.name)}: {escape_mathtext(one.measure)}", fontsize="small")
    set_title(figure, title)
    return Drawing("leaderboard", "Each comparison's scores, the best above; bars are two standard errors.", figure)
