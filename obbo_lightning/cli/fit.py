"""`fit`: play a stream."""

from pathlib import Path

from obbo_lightning.parts import short_name
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.layers import read_layers
from obbo_lightning.settings.schema import complete, help_parser


def run(arguments: list[str]) -> int:
    """From the command line to a run directory."""
    settings, switches = read_layers(arguments)
    if switches & {"help", "h"}:
        help_parser(settings).print_help()
        return 0
    settings = complete(settings)
    if "print_config" in switches:
        import yaml

        print(yaml.safe_dump(settings, sort_keys=False), end="")
        return 0
    return _play(settings)


def _play(settings: Settings) -> int:
    from obbo_lightning.runs.directory import RunDirectory
    from obbo_lightning.training.ranks import is_first
    from obbo_lightning.training.run import build, play_to_exit_code, warn_in_lines

    warn_in_lines()
    try:
        parts = build(settings)  # refuses what is impossible before anything is written
    except KeyboardInterrupt:  # a stream may wait for its first task
        return 130
    directory = RunDirectory(Path(settings["output"]))  # rank 0 names it for all
    if is_first():
        algorithm = short_name(settings["algorithm"]["name"])
        directory = RunDirectory.create(settings["output"], settings["experiment"], algorithm)
    return play_to_exit_code(settings, directory, None, parts)
