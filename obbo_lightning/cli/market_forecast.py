"""`predict` for a market run: the next bars of its events."""

from pathlib import Path

import numpy as np
from rich.table import Table

from obbo_lightning.cli.flags import Flags
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.serving.forecast import Forecast, forecast
from obbo_lightning.serving.forecast_files import write_forecast


def run(arguments: list[str]) -> int:
    """Two CSV files, a figure, and a small table."""
    from obbo_lightning.training.run import warn_in_lines

    asked = Flags("predict", "market").parse_args(arguments)
    warn_in_lines()
    output = asked.output or Path(asked.directory) / "forecast.csv"
    found = forecast(asked.directory, asked.prices, asked.events, asked.columns, asked.bars, asked.checkpoint)
    written = write_forecast(found, output)
    console = PlainConsole()
    console.print(_table(found))
    console.print("beyond the last bar the spline is constant, and so is its forecast", highlight=False)
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False)
    return 0


def _table(found: Forecast) -> Table:
    events, bars = found.events, int(found.curves["step"].to_numpy().max())
    table = Table(title=f"forecast of {bars} bars after {len(events)} events", show_header=False)
    low, middle, high = np.quantile(events["weight"].to_numpy(), (0, 0.5, 1))
    table.add_row("λ: smallest, median, largest", f"{low:.3g}, {middle:.3g}, {high:.3g}")
    judged = events.drop_nulls("mse")
    if judged.is_empty():
        table.add_row("bars that are known already", "none: there is nothing to judge by yet")
        return table
    table.add_row("bars that are known already", f"{events['bars_known'].sum()} of {bars * len(events)}")
    for name, column in (("spline", "mse"), ("last value", "last_value_mse")):
        errors = judged[column].to_numpy()
        table.add_row(f"{name}: mse, standardised", f"mean {errors.mean():.4f}, median {np.median(errors):.4f}")
    better = int((judged["mse"] < judged["last_value_mse"]).sum())
    worse = int((judged["mse"] > judged["last_value_mse"]).sum())
    table.add_row("events where the spline is better / worse", f"{better} / {worse}")
    return table
