"""What `validate` and `test` share: a run's λ, judged on tasks that nothing is learned from."""

import json

from rich.table import Table

from obbo_lightning.cli.flags import Flags
from obbo_lightning.config.schema import complete_config
from obbo_lightning.escaping import PlainConsole
from obbo_lightning.runs.directory import RunDirectory, read_config, write_atomically
from obbo_lightning.runs.provenance import usable_checkpoint
from obbo_lightning.runs.summary import replace_nonfinite
from obbo_lightning.training.run import build, format_warnings, make_trainer


def judge(command: str, arguments: list[str]) -> int:
    """Print a small table, and keep what validation tasks said; ``command`` is the Trainer's method."""
    asked = Flags(command).parse_args(arguments)
    format_warnings()
    run = RunDirectory.newest(asked.directory)
    chosen = usable_checkpoint(run, asked.checkpoint)
    settings = complete_config(read_config(run))
    if asked.tasks is not None:
        settings["evaluation"]["tasks"] = asked.tasks
    settings["evaluation"]["split"] = "test" if command == "test" else "none"  # what `validate` needs is there anyway
    settings["trainer"]["devices"] = 1  # one process judges as well as several
    module, data, stream, _ = build(settings)
    if not len(data.validation if command == "validate" else data.test):
        raise ValueError(f"{command} needs tasks to judge on, and {type(stream).__name__} has none")
    trainer = make_trainer(settings, evaluating=True)
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
        write_atomically(run.validation, json.dumps(replace_nonfinite(kept), indent=2) + "\n")
    return 0
