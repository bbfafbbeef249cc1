"""`validate` and `test`: evaluate a run on tasks that it does not learn from."""

import argparse
import json

from rich.table import Table

from obbo_lightning.config.parse import complete_config
from obbo_lightning.runs.directory import RunDirectory, read_config, write_atomically
from obbo_lightning.runs.provenance import usable_checkpoint
from obbo_lightning.runs.summary import PlainConsole, replace_nonfinite
from obbo_lightning.training.run import build, format_warnings, make_trainer


def run(arguments: argparse.Namespace) -> int:
    """Print a table of scores; ``validate`` writes them to validation.json as well."""
    command = arguments.command  # also a method of the Trainer
    format_warnings()
    directory = RunDirectory.newest(arguments.directory)
    checkpoint = usable_checkpoint(directory, arguments.checkpoint)
    config = complete_config(read_config(directory))
    if arguments.tasks is not None:
        config["evaluation"]["tasks"] = arguments.tasks
    config["evaluation"]["split"] = "test" if command == "test" else "none"  # validation tasks are there in any case
    config["trainer"]["devices"] = 1
    module, data, stream, _ = build(config)
    split = "test" if command == "test" else "validation"
    tasks = getattr(data, split)
    if not len(tasks):
        raise ValueError(f"{command} needs {split} tasks, and {type(stream).__name__} has none")
    trainer = make_trainer(config, evaluating=True)
    (scores,) = getattr(trainer, command)(module, data, ckpt_path=checkpoint, verbose=False)
    count = min(config["evaluation"]["tasks"], len(tasks))
    table = Table(title=f"{command} on {count} tasks, {checkpoint.stem}", show_header=False)
    for name in (name for name in scores if not name.endswith("_se")):
        error = scores.get(f"{name}_se")
        table.add_row(name, f"{scores[name]:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    PlainConsole().print(table)
    if command == "validate":
        plain = {name.rpartition("/")[2]: value for name, value in scores.items()}
        content = replace_nonfinite({"checkpoint": checkpoint.name, "tasks": count, **plain})
        write_atomically(directory.validation, json.dumps(content, indent=2) + "\n")
    return 0
