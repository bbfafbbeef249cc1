"""`export`: what a run has learned, as files that other programs read."""

import argparse

from obbo_lightning.inference.model import LearnedClassifier, export_model
from obbo_lightning.runs.summary import PlainConsole


def run(arguments: argparse.Namespace) -> int:
    """Write the export, and print its files."""
    model = export_model(arguments.run, arguments.out, arguments.checkpoint, arguments.kind)
    console = PlainConsole()
    console.print(f"{arguments.out}: {model.title}", soft_wrap=True, highlight=False)
    for file in sorted(arguments.out.iterdir()):
        console.print(f"  {file.name}  {file.stat().st_size / 1000:.1f} kB", soft_wrap=True, highlight=False)
    if isinstance(model, LearnedClassifier):
        console.print(
            f"next: python -m obbo_lightning predict {arguments.out} --support DIR --query DIR", soft_wrap=True
        )
    elif "note" in model.metadata:
        console.print(f"λ has no names: {model.metadata['note']}", soft_wrap=True, highlight=False)
    return 0
