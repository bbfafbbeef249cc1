"""`tune`: a comparison whose methods are tuned before, each with the same budget."""

from obbo_lightning.cli.compare import play_comparison


def run(arguments: list[str]) -> int:
    """Search, then play with what was found."""
    return play_comparison("tune", arguments)
