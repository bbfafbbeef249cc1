"""The terminal, on which words that others chose are text."""

from typing import Any

from rich.console import Console
from rich.text import Text

from obbo_lightning.foreign_text import visible


class PlainConsole(Console):
    """Rich without markup: ``[red]`` in a name is shown as it stands, and so are escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string comes through here: what is printed, and the cells and titles of tables."""
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False})
