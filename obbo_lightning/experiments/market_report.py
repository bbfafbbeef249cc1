"""The market experiment's tables and figures: the paper's tables 1 to 3 and its figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from scipy.stats import binomtest

from obbo_lightning.experiments.comparison import label_runs, read_settings, sorted_labels
from obbo_lightning.experiments.comparison_figures import look_of
from obbo_lightning.experiments.figures import save_figure
from obbo_lightning.problems.spline import SmoothingSpline
from obbo_lightning.streams.market import MarketStream
from obbo_lightning.training.run_directory import RunDirectory

EVENT_COLUMNS = ("ticker", "timestamp", "naive_mse", "weight", "regret", "gradient_norm", "test_mse")


class MarketComparison(NamedTuple):
    """What several runs gave on the same events.

    Attributes:
        events: a row an event of a run.
        regret: median and median absolute deviation over events, every 100 rounds of a run.
    """

    events: pl.DataFrame
    regret: pl.DataFrame

    @property
    def labels(self) -> list[str]:
        """Algorithms (and what tells two of the same apart), the paper's first; the first is what others face."""
        return self.events["label"].unique(maintain_order=True).to_list()

    def facing(self, reference: str | None) -> "MarketComparison":
        """With ``reference`` first."""
        labels = sorted_labels(self.labels)
        if reference is not None:
            if reference not in labels:
                raise ValueError(f"--reference must be one of {'; '.join(labels)}, got {reference!r}")
            labels = [reference, *(label for label in labels if label != reference)]
        events, regret = ({k[0]: t for k, t in table.partition_by("label", as_dict=True).items()} for table in self)
        return MarketComparison(pl.concat([events[x] for x in labels]), pl.concat([regret[x] for x in labels]))


def read_market(runs: Sequence[RunDirectory]) -> MarketComparison:
    """From finished run directories; an event's numbers are means over seeds."""
    settings = [read_settings(run) for run in runs]
    labels = label_runs(runs, settings)
    seeds = {
        label: {s["seed"] for s, other in zip(settings, labels, strict=True) if other == label} for label in labels
    }
    first = seeds[labels[0]]
    for label, found in seeds.items():
        if found != first:
            raise ValueError(
                f"report needs the same seeds for all, got {sorted(found)} for {label}, not {sorted(first)}"
            )
    if len(first) > 1 and settings[0]["data"].get("prices") is None:
        raise ValueError(f"report needs one seed of simulated prices: each simulates others, got {sorted(first)}")
    tables: dict[str, list[pl.DataFrame]] = {}
    curves: dict[str, list[np.ndarray]] = {}
    rounds: dict[str, np.ndarray] = {}
    for run, label in zip(runs, labels, strict=True):
        try:
            table = pl.read_csv(run.events, try_parse_dates=True, schema_overrides={"ticker": pl.String})
            tables.setdefault(label, []).append(table.select(pl.lit(label).alias("label"), *EVENT_COLUMNS))
            with np.load(run.lanes) as lanes:
                rounds[label] = lanes["rounds"]
                curves.setdefault(label, []).append(lanes["regret"])
        except (OSError, ValueError, KeyError, pl.exceptions.PolarsError) as damage:
            raise ValueError(f"{run.path} cannot be reported: {type(damage).__name__} {damage}") from None
        if not table.select("ticker", "timestamp").equals(tables[labels[0]][0].select("ticker", "timestamp")):
            raise ValueError(
                f"report needs runs on the same events, got other ones in {run.path} than in {runs[0].path}"
            )
    keys = ("label", "ticker", "timestamp")
    events = [pl.concat(found).group_by(keys, maintain_order=True).mean() for found in tables.values()]
    middles = [_middle(label, rounds[label], np.mean(found, axis=0)) for label, found in curves.items()]
    return MarketComparison(pl.concat(events), pl.concat(middles)).facing(None)


def _middle(label: str, rounds: np.ndarray, curves: np.ndarray) -> pl.DataFrame:
    median = np.median(curves, axis=1)
    deviation = np.median(np.abs(curves - median[:, None]), axis=1)
    return pl.DataFrame({"label": label, "round": rounds, "median": median, "mad": deviation})


def statistics(comparison: MarketComparison) -> pl.DataFrame:
    """Mean, standard error, median and median absolute deviation of the forecast error; median regret; and OBBO's wins.

    ``wins`` counts the events on which the first algorithm of the table has the smaller error, ties left out; ``p`` is
    the two-sided sign test.
    """
    labels = comparison.labels
    reference = _column(comparison, labels[0], "test_mse")
    rows = []
    for label in labels:
        errors = _column(comparison, label, "test_mse")
        smaller, larger = int((reference < errors).sum()), int((reference > errors).sum())
        rows.append(
            {
                "label": label,
                "events": len(errors),
                "mean": float(errors.mean()),
                "se": float(errors.std(ddof=1) / len(errors) ** 0.5),
                "median": float(np.median(errors)),
                "mad": float(np.median(np.abs(errors - np.median(errors)))),
                "regret": float(np.median(_column(comparison, label, "regret"))),
                "gradient_norm": float(np.median(_column(comparison, label, "gradient_norm"))),
                "wins": smaller,
                "losses": larger,
                "p": float(binomtest(smaller, smaller + larger).pvalue) if smaller + larger else None,
            }
        )
    return pl.DataFrame(rows)


def market_markdown(comparison: MarketComparison) -> str:
    """Tables 1 to 3 of the paper in one."""
    table = statistics(comparison)
    first = table["label"][0]
    lines = [
        f"| algorithm | mean | standard error | median | median abs. deviation | median regret | "
        f"median gradient norm at T | {first} better / worse | sign test p |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table.iter_rows(named=True):
        cells = [row["label"], *(f"{row[name]:.4f}" for name in ("mean", "se", "median", "mad"))]
        cells += [f"{row['regret']:.3f}", f"{row['gradient_norm']:.4f}"]
        cells += ["", ""] if row["label"] == first else [f"{row['wins']} / {row['losses']}", _probability(row["p"])]
        lines.append("| " + " | ".join(cells) + " |")
    naive = comparison.events.filter(pl.col("label") == first)["naive_mse"].to_numpy()
    error = naive.std(ddof=1) / len(naive) ** 0.5
    middle = np.median(naive)
    cells = [
        "last value",
        f"{naive.mean():.4f}",
        f"{error:.4f}",
        f"{middle:.4f}",
        f"{np.median(abs(naive - middle)):.4f}",
    ]
    return "\n".join([*lines, "| " + " | ".join([*cells, "", "", "", ""]) + " |"]) + "\n"


def draw_market(comparison: MarketComparison, directory: Path, title: str) -> list[Path]:
    """Median regret with deviation bars; gradient norms and forecast errors of the first against the others."""
    return [
        _draw_regret(comparison, directory / "regret.png", title),
        _draw_scatter(comparison, "gradient_norm", "gradient norm at t = T", directory / "gradient_norms.png", title),
        _draw_scatter(comparison, "test_mse", "forecast mean squared error", directory / "forecast_errors.png", title),
    ]


def _draw_regret(comparison: MarketComparison, path: Path, title: str) -> Path:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    labels = comparison.labels
    for i, label in enumerate(labels):
        curve = comparison.regret.filter(pl.col("label") == label)
        rounds = np.concatenate([[0], curve["round"].to_numpy()])
        median, deviation = (np.concatenate([[0], curve[name].to_numpy()]) for name in ("median", "mad"))
        colour, style = look_of(labels, label)
        apart = (i - (len(labels) - 1) / 2) * rounds[-1] / 150  # bars must not hide each other
        axes.errorbar(rounds + apart, median, yerr=deviation, fmt=style, color=colour, capsize=2, label=label)
    axes.set(xlabel="round t", ylabel="median cumulative local regret", ylim=(0, None))
    axes.set_title(f"{title}\nbars: median absolute deviation over events", fontsize="medium", loc="left")
    axes.legend(frameon=False, ncols=2, fontsize="small")
    return save_figure(figure, axes, path)


def _draw_scatter(comparison: MarketComparison, column: str, name: str, path: Path, title: str) -> Path:
    first, *others = comparison.labels
    columns = min(4, max(1, len(others)))
    rows = -(-max(1, len(others)) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.6 * columns + 0.6, 2.6 * rows + 0.8), layout="constrained", squeeze=False
    )
    mine = _column(comparison, first, column)
    smallest = max(1e-9, float(min(mine.min(), *(_column(comparison, o, column).min() for o in others), 1.0)))
    for axes, other in zip(grid.flat, others, strict=False):
        theirs = _column(comparison, other, column)
        largest = float(max(mine.max(), theirs.max()))
        axes.plot([smallest, largest], [smallest, largest], color="#444444", linewidth=1)
        axes.loglog(
            theirs.clip(smallest),
            mine.clip(smallest),
            ".",
            color=look_of(comparison.labels, other)[0],
            markersize=3,
            alpha=0.5,
        )
        axes.set_xlabel(other, fontsize="small")
        axes.set_title(f"smaller {np.sum(mine < theirs)}, larger {np.sum(mine > theirs)}", fontsize="small")
        _plain(axes)
    for axes in list(grid.flat)[len(others) :]:
        axes.set_visible(False)
    figure.supylabel(first, fontsize="small")
    figure.suptitle(f"{title}: {name} of {first} against the others, one point an event", fontsize="medium")
    return save_figure(figure, grid.flat[0], path)


def draw_event(runs: Sequence[RunDirectory], ticker: str, day: str, directory: Path) -> list[Path]:
    """One event: three of its subsets, and every run's forecast."""
    from obbo_lightning.configuration import build_part

    settings = [read_settings(run) for run in runs]
    stream = build_part(settings[0], "data", seed=settings[0]["seed"])
    chosen = stream.lanes.with_row_index("lane").filter(
        (pl.col("ticker") == ticker) & (pl.col("timestamp").dt.strftime("%Y-%m-%d") == day)
    )
    if chosen.is_empty():
        raise ValueError(f"--event must be one of the {len(stream.lanes)} events, got {ticker} {day}")
    lane = int(chosen["lane"][0])
    labels = label_runs(runs, settings)
    weights = {label: float(pl.read_csv(run.events)["weight"][lane]) for run, label in zip(runs, labels, strict=True)}
    return [
        _draw_subsets(stream, lane, directory / f"{ticker}_subsets.png", f"{ticker}, event on {day}"),
        _draw_forecasts(stream, lane, weights, directory / f"{ticker}_forecasts.png", f"{ticker}, event on {day}"),
    ]


def _draw_subsets(stream: MarketStream, lane: int, path: Path, title: str) -> Path:
    figure, row = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
    for axes, t in zip(row, (0, len(stream.train) // 2, len(stream.train) - 1), strict=True):
        task = stream.train[t]
        axes.plot(t + task["sites"], task["values"][lane], ".", color="#0072B2", markersize=2, label="training")
        axes.plot(
            t + task["validation_sites"],
            task["validation_values"][lane],
            ".",
            color="#D55E00",
            markersize=3,
            label="validation",
        )
        axes.set(xlabel="observation", title=f"round {t}")
        _plain(axes)
    row[0].set_ylabel("standardised log price")
    row[0].legend(frameon=False, markerscale=3)
    figure.suptitle(title, fontsize="medium")
    return save_figure(figure, row[0], path)


def _draw_forecasts(stream: MarketStream, lane: int, weights: dict[str, float], path: Path, title: str) -> Path:
    test, problem = stream.test[0], SmoothingSpline()
    one = {name: values[lane : lane + 1] if values.ndim == 2 else values for name, values in test.items()}
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    seen = one["sites"] >= one["sites"][-1] - 150
    axes.plot(one["sites"][seen], one["values"][0][seen], ".", color="#999999", markersize=3, label="seen")
    axes.plot(
        one["validation_sites"], one["validation_values"][0], ".", color="#444444", markersize=3, label="held out"
    )
    labels = sorted_labels(list(weights))
    for label in labels:
        weight = torch.full((1, 1), weights[label], dtype=one["values"].dtype)
        inner = problem.solution(weight, one)
        ahead = problem.predict(inner, one)
        error = float((ahead - one["validation_values"]).square().mean())
        colour, style = look_of(labels, label)
        sites = torch.cat([one["sites"][seen], one["validation_sites"]])
        axes.plot(
            sites,
            torch.cat([inner[0][seen], ahead[0]]),
            style,
            color=colour,
            linewidth=1.2,
            label=f"{label}: λ = {weights[label]:.3g}, MSE {error:.3f}",
        )
    axes.axvline(float(one["sites"][-1]), color="#444444", linewidth=1, linestyle=":")
    axes.set(xlabel="observation of the last subset; dotted: the event", ylabel="standardised log price", title=title)
    axes.legend(frameon=False, fontsize="x-small")
    return save_figure(figure, axes, path)


def _column(comparison: MarketComparison, label: str, name: str) -> np.ndarray:
    return comparison.events.filter(pl.col("label") == label)[name].to_numpy()


def _probability(p: float | None) -> str:
    return "" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize="small")
