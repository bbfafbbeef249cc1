"""`export`: what a run has learned, as files that other programs read."""

from obbo_lightning.cli.flags import Flags
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.serving.export import export
from obbo_lightning.serving.parcel import title_of


def run(arguments: list[str]) -> int:
    """A folder with safetensors and JSON, and what else was asked for."""
    asked = Flags("export").parse_args(arguments)
    parcel = export(asked.run, asked.out, asked.checkpoint, asked.kind)
    console = PlainConsole()
    console.print(f"{asked.out}: {title_of(parcel)}", soft_wrap=True, highlight=False)
    for file in sorted(asked.out.iterdir()):
        console.print(f"  {file.name}  {file.stat().st_size / 1000:.1f} kB", soft_wrap=True, highlight=False)
    if parcel.few_shot:
        console.print(f"next: python -m obbo_lightning predict {asked.out} --support DIR --query DIR", soft_wrap=True)
    elif parcel.about.get("note"):
        console.print(f"λ has no names: {parcel.about['note']}", soft_wrap=True, highlight=False)
    return 0
