"""`tune`: a comparison whose methods are tuned first, each with the same budget."""

from obbo_lightning.cli.compare import run_comparison


def run(arguments: list[str]) -> int:
    """Tune each method, then run the comparison untuned and tuned."""
    return run_comparison("tune", arguments)
