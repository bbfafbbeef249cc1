"""Flags of the commands that are not runs: argparse that refuses in one line."""

import argparse
from typing import NoReturn


class Flags(argparse.ArgumentParser):
    """A command's own flags; `--help` is the program's."""

    def __init__(self, command: str) -> None:
        super().__init__(command, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """One line, like every refusal."""
        raise ValueError(f"{self.prog}: {message}")
