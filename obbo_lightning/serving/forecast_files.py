"""A forecast on paper: two CSV files and a figure."""

from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from obbo_lightning.experiments.drawing import COLOURS, INK, Drawing, finish, house_style, new_figure, save_drawing
from obbo_lightning.foreign_text import cells, drawn
from obbo_lightning.runs.directory import write_atomically
from obbo_lightning.serving.forecast import Forecast

SHOWN = 6
OBSERVED, SPLINE, LAST = "#888888", COLOURS["obbo"], "#D55E00"


def write_forecast(found: Forecast, path: Path) -> list[Path]:
    """``NAME.csv``, ``NAME_events.csv``, ``NAME.png`` and ``NAME.svg``."""
    if path.suffix.lower() != ".csv" or path.is_dir():
        raise ValueError(f"output must be a CSV file, like forecast.csv, got {str(path)!r}")
    files = {path: found.curves, path.with_name(f"{path.stem}_events.csv"): found.events}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, table in files.items():
            write_atomically(file, cells(table).write_csv(datetime_format="%Y-%m-%d %H:%M:%S"))
        with house_style():
            return [*files, *save_drawing(draw_forecast(found, path.stem), path.parent)]
    except OSError as error:
        raise ValueError(f"output must be a file that can be written, got {str(path)!r}: {error.strerror}") from None


def draw_forecast(found: Forecast, name: str = "forecast", shown: int = SHOWN) -> Drawing:
    """A few events, from the smallest λ to the largest: observed, fitted, and forecast in both ways."""
    order = found.events["weight"].arg_sort().to_numpy()
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(shown, len(order))).round().astype(int))]
    columns = min(2, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, panels = new_figure(1.2 + 1.75 * rows, rows=rows, columns=columns)
    for axes, event in zip(panels, found.events[chosen].iter_rows(named=True), strict=False):
        mine = (pl.col("ticker") == event["ticker"]) & (pl.col("event") == event["event"])
        _draw_event(axes, found.curves.filter(mine), event)
    for axes in panels[len(chosen) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(chosen) - columns) : len(chosen)]:
        axes.set_xlabel("bars after the event", fontsize="small")
    figure.supylabel("price", fontsize="small")
    caption = "From the smallest λ to the largest. Beyond the last bar the spline is constant. Dotted: the event."
    which = "all" if len(chosen) == len(order) else f"{len(chosen)} of {len(order)}"
    known = int(found.events[chosen]["bars_known"].arg_max() or 0)  # its legend has all that is drawn
    judged = "; RMSE: spline / last value" if found.events["bars_known"].sum() else ""
    return finish(figure, panels[known], name, caption, f"Forecast, {which} events by their λ{judged}")


def _draw_event(axes: Axes, curve: pl.DataFrame, event: dict[str, object]) -> None:
    bars = int(curve["step"].to_numpy()[-1])
    seen = curve.filter(pl.col("step") > -max(30, bars))  # as much of the past as of the future
    step, past = seen["step"].to_numpy(), seen["step"].to_numpy() <= 0
    names = ("actual", "fitted", "forecast", "last_value")
    actual, fitted, ahead, last = (seen[name].fill_null(np.nan).to_numpy() for name in names)
    axes.plot(step[past], actual[past], ".", color=OBSERVED, markersize=2.5, label="observed")
    axes.plot(step, fitted, color=SPLINE, linewidth=1, label="fitted")
    axes.plot(step, ahead, color=SPLINE, linewidth=2, label="spline's forecast")
    axes.plot(step, last, color=LAST, linewidth=1.2, linestyle="--", label="last value")
    if event["bars_known"]:
        axes.plot(step[~past], actual[~past], ".", color=INK, markersize=2.5, label="actual")
    axes.axvline(0, color=INK, linewidth=1, linestyle=":")
    errors = "" if event["rmse"] is None else f", {event['rmse']:.3g} / {event['last_value_rmse']:.3g}"
    ticker = drawn(str(event["ticker"]))
    axes.set_title(f"{ticker} {event['event']:%Y-%m-%d}\nλ = {event['weight']:.2g}{errors}", fontsize="small")
    axes.tick_params(labelsize="x-small")
