"""`test`: a run's outer variable on test tasks."""

from obbo_lightning.cli.judge import judge


def run(arguments: list[str]) -> int:
    """Adapt to each of them, and report."""
    return judge("test", arguments)
