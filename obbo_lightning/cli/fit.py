"""`fit`: run an online stream."""

from pathlib import Path

from obbo_lightning.config.files import Config
from obbo_lightning.config.layers import parse_arguments
from obbo_lightning.config.registry import short_name
from obbo_lightning.config.schema import complete_config, help_parser


def run(arguments: list[str]) -> int:
    """Run what the command line asks for, in a new run directory."""
    config, switches = parse_arguments(arguments)
    if switches & {"help", "h"}:
        help_parser(config).print_help()
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
