"""Draw the packages of obbo_lightning and their imports: python -m pages.packages writes docs/assets/packages.svg.

An arrow points from a package to one that it imports. Arrows that follow from other arrows are left out, and so are the
modules that only give public names to what is in core.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "obbo_lightning"
FIGURE = ROOT / "docs" / "assets" / "packages.svg"
PUBLIC_NAMES = ("domains", "geometry", "hypergradients", "regularizers", "solvers")
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


def module_imports() -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports, also inside functions."""
    files = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: {one for one in _imported(path, set(files)) if one != name} for name, path in files.items()}


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, known: set[str]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {member if member in known else str(node.module) for member in members}
    return {name for name in names if name in known and "." in name}


def package_imports() -> dict[str, set[str]]:
    """Return the packages (and single modules at the top) that each package imports."""
    found: dict[str, set[str]] = {}
    for name, imported in module_imports().items():
        package = name.split(".")[1] if "." in name else "__init__"
        if not package.startswith("__"):
            found.setdefault(package, set()).update({one.split(".")[1] for one in imported} - {package})
    return found


def reachable(graph: dict[str, set[str]], package: str) -> set[str]:
    """Return every package that a package imports, also through others."""
    return set().union(graph[package], *(reachable(graph, below) for below in graph[package]))


def reduce_arrows(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the arrows that follow from other arrows."""
    return {
        package: {to for to in below if not any(to in reachable(graph, other) for other in below - {to})}
        for package, below in graph.items()
    }


def row_numbers(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the row of each package: one above the highest that it imports, 0 for those that import none."""
    rows: dict[str, int] = {}

    def row(package: str) -> int:
        if package not in rows:
            rows[package] = 1 + max((row(below) for below in graph[package]), default=-1)
        return rows[package]

    for package in graph:
        row(package)
    return rows


def draw() -> str:
    """Return the figure as SVG: each package above those that it imports."""
    graph = {package: below for package, below in package_imports().items() if package not in PUBLIC_NAMES}
    number = row_numbers(graph)
    rows = [sorted(package for package in graph if number[package] == n) for n in range(max(number.values()), -1, -1)]
    places = {
        package: (WIDTH * (i + 1) / (len(row) + 1), 24 + ROW * r + BOX[1] / 2)
        for r, row in enumerate(rows)
        for i, package in enumerate(row)
    }
    arrows = sorted((package, to) for package, below in reduce_arrows(graph).items() for to in below)
    lines = [_arrow(places[package], places[to]) for package, to in arrows]
    for package, (x, y) in places.items():
        left, top = x - BOX[0] / 2, y - BOX[1] / 2
        lines.append(f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>')
        lines.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{package}</text>')
    height = 24 + ROW * len(rows) - ROW + BOX[1] + 24
    head = '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>Packages of obbo_lightning; arrows point to what a package imports</title>",
            f"<style>{STYLE}</style>",
            head + '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return an arrow from the lower edge of a box to the upper edge of another, bent where it passes other rows."""
    (x1, y1), (x2, y2) = (start[0], start[1] + BOX[1] / 2), (end[0], end[1] - BOX[1] / 2)
    aside = 0.0 if y2 - y1 < ROW else min(260.0, 45 * (y2 - y1) / ROW + 60) * (1 if x2 >= WIDTH / 2 else -1)
    return (
        f'<path d="M{x1:.0f} {y1:.0f}C{x1 + aside:.0f} {y1 + (y2 - y1) * 0.4:.0f} '
        f'{x2 + aside:.0f} {y2 - (y2 - y1) * 0.4:.0f} {x2:.0f} {y2:.0f}"/>'
    )


if __name__ == "__main__":
    FIGURE.write_text(draw())
