"""Console that escapes untrusted strings."""

from typing import Any

from rich.console import Console
from rich.text import Text

from obbo_lightning.escaping import escape_terminal


class PlainConsole(Console):
    """Rich console without markup: ``[red]`` in a name and escape sequences are shown as text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a string; Rich calls this for everything it prints, cells and titles of tables included."""
        return super().render_str(escape_terminal(text), **{**options, "markup": False, "emoji": False})
