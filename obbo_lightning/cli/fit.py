"""`fit`: run an online stream."""

import argparse
from pathlib import Path

from obbo_lightning.config.parse import Config, complete_config, help_text, parse_arguments, trainer_help
from obbo_lightning.config.registry import short_name

USAGE = """usage: obbo fit [--config FILE ...] [--KEY VALUE ...] [--print_config] [--help] [--trainer.help]

Run an online stream. Files (--config: a YAML file, or the name of a shipped one) and flags have the same keys; flags
win over files, later files over earlier ones. --algorithm sobow chooses a component by its name, and
--data package.module.Class or --problem.network path/to/file.py:Class your own. Below: the keys of the chosen
components with their values. --print_config prints the complete configuration; --trainer.help shows the arguments of
Lightning's Trainer.
example: obbo fit --config quadratic --algorithm sobow --algorithm.window 25 --seed 3
"""


def run(arguments: argparse.Namespace) -> int:
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
        import yaml

        print(yaml.safe_dump(config, sort_keys=False), end="")
        return 0
    return _fit(config)


def _fit(config: Config) -> int:
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
