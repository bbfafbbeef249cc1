"""`predict`: what a run has learned, on data of yours."""

from obbo_lightning.cli import market_forecast


def run(arguments: list[str]) -> int:
    """A market run forecasts the next bars."""
    return market_forecast.run(arguments)
