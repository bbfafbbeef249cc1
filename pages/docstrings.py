"""An extension of griffe, which reads docstrings for the site: examples become blocks of code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.DOTALL | re.MULTILINE)


class Examples(griffe.Extension):
    """Our docstrings have their examples (``>>>``) without a heading; Markdown would take them for quotations."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each of them."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """A docstring whose examples stand in fences."""
    return EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", docstring)
