"""`resume`: go on with runs, where they were stopped or behind their end."""

from pathlib import Path
from typing import Any

from obbo_lightning.cli.flags import Flags


def run(arguments: list[str]) -> int:
    """One run, or several one after the other."""
    from obbo_lightning.config.flags import read_flags
    from obbo_lightning.training.resume import resume

    rest, data = _apart(arguments)
    asked = Flags("resume").parse_args(rest)
    more = {"rounds": asked.rounds, "data": read_flags(data).settings.get("data")}
    if len(asked.directories) == 1:
        return resume(asked.directories[0], asked.checkpoint, asked.devices, **more)
    if asked.checkpoint or asked.devices:
        raise ValueError("--checkpoint and --devices are for one RUN_DIR, got several")
    return max(_resume_caught(directory, more) for directory in asked.directories)


def _apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """This command's own flags, and those that set data; what else decides a result stays what it was."""
    rest: list[str] = []
    data: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        key, equals, _ = word.removeprefix("--").partition("=")
        if not (word.startswith("--") and (key == "data" or "." in key)):
            rest.append(word)
            continue
        if key.partition(".")[0] != "data":
            raise ValueError(
                f"resume takes --rounds, --data.KEY, --checkpoint and --devices, got --{key}: what else decides the "
                "results of a run stays as it is"
            )
        data += [word] if equals or not words else [word, words.pop(0)]
    return rest, data


def _resume_caught(directory: Path, more: dict[str, Any]) -> int:
    """One of several: its failure is not the others'; a signal ends all of them."""
    from obbo_lightning.cli.mistakes import refuse_error
    from obbo_lightning.training.resume import resume

    print(f"run {directory}", flush=True)  # whose words follow
    try:
        code = resume(directory, **more)
    except Exception as error:
        return refuse_error(error, debug=False)
    if code >= 128:
        raise SystemExit(code)
    return code
