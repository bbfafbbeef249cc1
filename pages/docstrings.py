"""Extension of griffe, which reads docstrings for the site: examples become blocks of code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.DOTALL | re.MULTILINE)


class Examples(griffe.Extension):
    """Fences around examples (``>>>``), which have no heading and would be quotations in Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each example of a docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
