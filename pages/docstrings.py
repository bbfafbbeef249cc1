"""Extension of griffe, which reads docstrings for the site: show examples as code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.DOTALL | re.MULTILINE)


class Examples(griffe.Extension):
    """Put code fences around examples (``>>>``), which Markdown would otherwise show as quotations."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put code fences around the examples of a docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
