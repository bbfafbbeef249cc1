"""The house: imports point one way, files are small, and nothing is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "obbo_lightning"
# A room may import those that stand before it, and itself.
ROOMS = (
    *("threads", "foreign_text", "parts", "core", "metrics", "networks", "problems", "algorithms", "streams", "checks"),
    *("settings", "runs", "training", "experiments", "plots", "serving", "cli"),
)
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def all_imports(path):
    """What a file imports anywhere in it, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported(path):
    return {name.split(".")[1] for name in all_imports(path) if name.startswith("obbo_lightning.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    assert room in ROOMS, f"{room} has no place in the order of rooms"
    allowed = ROOMS[: ROOMS.index(room) + 1]
    assert imported(path) <= set(allowed)


def test_the_pure_rooms_know_nothing_of_lightning():
    pure = ROOMS[: ROOMS.index("settings")]
    files = [path for path in FILES if room_of(path) in pure]
    assert len(files) > 40
    for path in files:
        modules = {name.split(".")[0] for name in all_imports(path)}
        assert not modules & {"lightning", "wandb", "rich", "jsonargparse"}, path


def test_no_file_and_no_function_is_long():
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno <= 45, f"{path}: {node.name}"


def test_importing_the_package_imports_nothing():
    script = "import obbo_lightning, sys; print(sorted({'torch', 'lightning', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_that_is_exported_is_there():
    import obbo_lightning

    assert len(obbo_lightning.__all__) > 60
    for name in obbo_lightning.__all__:
        assert getattr(obbo_lightning, name).__name__ == name if name != "Task" else True


def test_the_table_of_parts_can_be_imported():
    import re

    import obbo_lightning

    page = (PACKAGE.parent / "docs" / "extending.md").read_text()
    table = page[page.index("| part | choices |") :].partition("\n\n")[0]
    names = set(re.findall(r"`([A-Z]\w+)`", table))
    assert {"FewShot", "SmoothingSpline", "Quadratic", "MAML", "ANIL", "OBBO"} <= names
    for name in names:
        assert hasattr(obbo_lightning, name), name
