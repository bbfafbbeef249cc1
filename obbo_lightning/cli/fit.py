"""`fit` and `resume`: run an online stream, or continue a run."""

import argparse
from pathlib import Path

import yaml

from obbo_lightning.config.parse import complete_config, help_text, parse_arguments, read_flags, trainer_help
from obbo_lightning.config.registry import short_name

USAGE = """usage: obbo fit [--config FILE ...] [--KEY VALUE ...] [--print_config] [--help] [--trainer.help]

Run an online stream. Files (--config: a YAML file, or the name of a shipped one) and flags have the same keys; flags
win over files, later files over earlier ones. --algorithm sobow chooses a component by its name, and
--data package.module.Class or --problem.network path/to/file.py:Class your own. Below: the keys of the chosen
components with their values. --print_config prints the complete configuration; --trainer.help shows the arguments of
Lightning's Trainer.
example: obbo fit --config quadratic --algorithm sobow --algorithm.window 25 --seed 3
"""


def fit(arguments: argparse.Namespace) -> int:
    """Run what the command line asks for, in a new run directory."""
    config, switches = parse_arguments(arguments.overrides)
    if "trainer.help" in switches:
        print(trainer_help(), end="")
        return 0
    if switches & {"help", "h"}:
        print(f"{USAGE}\n{help_text(config)}")
        return 0
    config = complete_config(config)
    if "print_config" in switches:
        print(yaml.safe_dump(config, sort_keys=False), end="")
        return 0
    # Imported here, because help and mistakes must not wait for Lightning.
    from obbo_lightning.runs.directory import RunDirectory
    from obbo_lightning.training.distributed import is_rank_zero
    from obbo_lightning.training.run import build, fit_to_exit_code, format_warnings

    format_warnings()
    try:
        components = build(config)  # refuses what is impossible before anything is written
    except KeyboardInterrupt:  # a stream may wait for its first task
        return 130
    directory = RunDirectory(Path(config["output"]))  # other ranks get the path from rank 0
    if is_rank_zero():
        algorithm = short_name(config["algorithm"]["name"])
        directory = RunDirectory.create(config["output"], config["experiment"], algorithm)
    try:
        return fit_to_exit_code(config, directory, components)
    finally:
        directory.discard()


def resume(arguments: argparse.Namespace) -> int:
    """Continue a run where it was stopped, or beyond its end."""
    flags, files, switches = read_flags(arguments.overrides)
    for key in (*flags, *switches, *(["config"] if files else [])):
        if key != "data":
            raise ValueError(
                f"resume takes --rounds, --data.KEY, --checkpoint and --devices, got --{key}: the other settings of a "
                "run decide its results and stay"
            )
    from obbo_lightning.training.resume import resume as resume_run

    options = arguments.checkpoint, arguments.devices, arguments.rounds
    return resume_run(arguments.directory, *options, flags.get("data"))
