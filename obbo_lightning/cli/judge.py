"""What `validate` and `test` share: a run's λ, judged on tasks that nothing is learned from."""

import json

from rich.table import Table

from obbo_lightning.cli.flags import Flags
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.earlier import read_settings
from obbo_lightning.runs.manifest import checkpoint_to_use
from obbo_lightning.runs.summary import without_nonfinite
from obbo_lightning.settings.schema import complete
from obbo_lightning.training.run import build, warn_in_lines
from obbo_lightning.training.trainer import make_trainer


def judge(command: str, arguments: list[str]) -> int:
    """Print a small table, and keep what validation tasks said; ``command`` is the Trainer's method."""
    asked = Flags(command).parse_args(arguments)
    warn_in_lines()
    run = RunDirectory.newest(asked.directory)
    chosen = checkpoint_to_use(run, asked.checkpoint)
    settings = complete(read_settings(run))
    if asked.tasks is not None:
        settings["evaluation"]["tasks"] = asked.tasks
    settings["evaluation"]["split"] = "test" if command == "test" else "none"  # what `validate` needs is there anyway
    settings["trainer"]["devices"] = 1  # one process judges as well as several
    module, data, stream = build(settings)
    if not len(data.validation if command == "validate" else data.test):
        raise ValueError(f"{command} needs tasks to judge on, and {type(stream).__name__} has none")
    trainer = make_trainer(settings, judging=True)
    (found,) = getattr(trainer, command)(module, data, ckpt_path=chosen, verbose=False)
    judged = min(settings["evaluation"]["tasks"], len(data.validation if command == "validate" else data.test))
    table = Table(title=f"{command} on {judged} tasks, {chosen.stem}", show_header=False)
    for name in (n for n in found if not n.endswith("_se")):
        error = found.get(f"{name}_se")
        table.add_row(name, f"{found[name]:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    PlainConsole().print(table)
    if command == "validate":
        said = {name.rpartition("/")[2]: value for name, value in found.items()}
        kept = {"checkpoint": chosen.name, "tasks": judged, **said}
        write_atomically(run.validation, json.dumps(without_nonfinite(kept), indent=2) + "\n")
    return 0
