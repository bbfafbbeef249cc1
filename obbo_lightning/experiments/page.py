"""A report as one self-contained HTML page."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader

from obbo_lightning.experiments.drawing import INK, Drawing
from obbo_lightning.experiments.tables import Table

# On a page the figures follow the reader's theme; on paper they are always light.
DARK = "@media screen and (prefers-color-scheme: dark) { svg { color: #e4e4e1 } }"
THEME = f"<style>svg {{ color: {INK} }} {DARK}</style>"


class _Embedded(NamedTuple):
    name: str
    caption: str
    source: str
    width: int
    height: int


def write_page(
    path: Path,
    title: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    drawings: Sequence[Drawing],
    left_out: Sequence[str],
    settings: Table | None = None,
    command: str = "report",
) -> Path:
    """Tables and figures; each drawing's SVG file must lie beside the page already."""
    from obbo_lightning import __version__

    template = Environment(loader=PackageLoader("obbo_lightning.experiments", "."), autoescape=True).get_template(
        "page.html"
    )
    figures = [_embed(drawing, path.parent / f"{drawing.name}.svg") for drawing in drawings]
    page = template.render(
        title=title,
        facts=facts,
        tables=tables,
        figures=figures,
        left_out=left_out,
        settings=settings,
        version=__version__,
        command=command,
    )
    path.write_text(page + "\n", encoding="utf-8")
    return path


def _embed(drawing: Drawing, svg: Path) -> _Embedded:
    text = svg.read_text(encoding="utf-8")
    start = text.index("<svg")
    head = text.index(">", start) + 1
    themed = text[start:head] + THEME + text[head:].replace(INK, "currentColor")
    source = "data:image/svg+xml;base64," + base64.b64encode(themed.encode()).decode()
    width, height = (round(96 * inches) for inches in drawing.figure.get_size_inches())
    return _Embedded(drawing.name, drawing.caption, source, width, height)
