"""The drawing of the rooms, from the imports in the code: python -m pages.rooms writes docs/assets/rooms.svg.

An arrow leads from a room to one that it imports; where a way over other rooms leads there as well, it is left out.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "obbo_lightning"
PLACE = ROOT / "docs" / "assets" / "rooms.svg"
WIDTH, BOX, ROW = 720, (104, 34), 74
STYLE = """
    .paper { fill: #fbfbfa; stroke: #d8d8d4 } .box { fill: #fff; stroke: #0072B2; stroke-width: 1.5 }
    text { fill: #262626; font: 14px system-ui, sans-serif; text-anchor: middle }
    path { fill: none; stroke: #9a9a95; stroke-width: 1.4; marker-end: url(#head) }
    .head { fill: #9a9a95; stroke: none }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #22242b; stroke: #3a3d47 } .box { fill: #2b2e37; stroke: #6db8ea } text { fill: #ececec }
      path { stroke: #8a8e9c } .head { fill: #8a8e9c }
    }
"""


def imports() -> dict[str, set[str]]:
    """Which rooms each room imports, anywhere in its files."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        rooms = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms |= {name.split(".")[1] for name in names if name.startswith("obbo_lightning.")} - {room}
    return found


def reachable(graph: dict[str, set[str]], room: str) -> set[str]:
    """Every room that a room needs, over others, too."""
    return set().union(graph[room], *(reachable(graph, below) for below in graph[room]))


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same without what follows from the rest."""
    return {
        room: {to for to in below if not any(to in reachable(graph, other) for other in below - {to})}
        for room, below in graph.items()
    }


def heights(graph: dict[str, set[str]]) -> dict[str, int]:
    """How many rooms stand below one another under each room."""
    found: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in found:
            found[room] = 1 + max((height(below) for below in graph[room]), default=-1)
        return found[room]

    for room in graph:
        height(room)
    return found


def drawing() -> str:
    """The rooms in rows, each above what it imports."""
    graph = imports()
    height = heights(graph)
    rows = [sorted(room for room in graph if height[room] == h) for h in range(max(height.values()), -1, -1)]
    places = {
        room: (WIDTH * (i + 1) / (len(row) + 1), 24 + ROW * r + BOX[1] / 2)
        for r, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    lines = [_arrow(places[room], places[to]) for room, below in sorted(reduced(graph).items()) for to in sorted(below)]
    for room, (x, y) in places.items():
        left, top = x - BOX[0] / 2, y - BOX[1] / 2
        lines.append(f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>')
        lines.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{room}</text>')
    tall = 24 + ROW * len(rows) - ROW + BOX[1] + 24
    head = '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" role="img">',
            "<title>The rooms of obbo_lightning; arrows lead to what a room imports</title>",
            f"<style>{STYLE}</style>",
            head + '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{tall - 2}" rx="10"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From the lower edge of a box to the upper edge of another; over more than one row it bends around the middle."""
    (x1, y1), (x2, y2) = (start[0], start[1] + BOX[1] / 2), (end[0], end[1] - BOX[1] / 2)
    aside = 0.0 if y2 - y1 < ROW else min(260.0, 45 * (y2 - y1) / ROW + 60) * (1 if x2 >= WIDTH / 2 else -1)
    return (
        f'<path d="M{x1:.0f} {y1:.0f}C{x1 + aside:.0f} {y1 + (y2 - y1) * 0.4:.0f} '
        f'{x2 + aside:.0f} {y2 - (y2 - y1) * 0.4:.0f} {x2:.0f} {y2:.0f}"/>'
    )


if __name__ == "__main__":
    PLACE.write_text(drawing())
