"""Imports: one way between packages, no cycles, nothing before it is needed, and the public names."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

import obbo_lightning
from pages.packages import PACKAGE, ROOT, module_imports, package_imports

# Lowest first: a package imports only packages before it, also inside functions.
ORDER = (
    *("escaping", "threads", "core"),
    *("geometry", "domains", "regularizers", "hypergradients", "solvers", "metrics"),
    *("networks", "problems", "algorithms", "streams", "testing"),
    *("config", "runs", "training", "inference", "experiments", "cli"),
)
NAMESPACES = ("geometry", "domains", "regularizers", "hypergradients", "solvers", "networks", "streams", "testing")


@pytest.mark.parametrize(("package", "imported"), package_imports().items())
def test_packages_import_only_lower_packages(package, imported):
    assert package in ORDER, f"{package} has no place in the order of packages"
    assert imported <= set(ORDER[: ORDER.index(package)])


def test_modules_do_not_import_each_other_in_a_cycle():
    graph = module_imports()
    assert "obbo_lightning.core.problem" in graph["obbo_lightning.problems.spline"]
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("package", ORDER[: ORDER.index("config")])
def test_packages_below_config_need_neither_lightning_nor_a_terminal(package):
    files = list((PACKAGE / package).rglob("*.py")) or [PACKAGE / f"{package}.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            tops = {name.partition(".")[0] for name in names}
            assert not tops & {"lightning", "wandb", "rich", "jsonargparse"}, file


def test_importing_the_package_imports_nothing_else():
    script = "import obbo_lightning, sys; print(sorted({'torch', 'lightning', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in NAMESPACES)])
def test_public_names_can_be_imported(module):
    namespace = importlib.import_module(f"obbo_lightning{module}")
    assert namespace.__all__
    for name in namespace.__all__:
        assert getattr(namespace, name) is not None, name
    if not module:
        assert 30 <= len(namespace.__all__) <= 45
        assert not {"part", "play", "load", "estimate", "evaluate", "register", "fit", "plot"} & set(namespace.__all__)


def test_public_classes_and_functions_have_an_example():
    namespaces = [importlib.import_module(f"obbo_lightning{name}") for name in ("", *(f".{n}" for n in NAMESPACES))]
    public = {getattr(namespace, name) for namespace in namespaces for name in namespace.__all__}
    packages = tuple(f"obbo_lightning.{name}." for name in ("core", "algorithms", "problems", "networks", "testing"))
    members = {member for member in public if str(getattr(member, "__module__", "")).startswith(packages)}
    members = {member for member in members if not inspect.isabstract(member)}
    assert len(members) > 60
    results = {"Round", "Hypergradient"}  # returned, never constructed by users
    assert {member.__name__ for member in members if ">>>" not in (member.__doc__ or "")} == results


def test_components_of_the_documents_can_be_imported():
    page = (ROOT / "docs" / "extending.md").read_text()
    table = re.search(r"\| \w+ \| choices \|.*?\n\n", page, flags=re.DOTALL)[0]
    names = set(re.findall(r"`([A-Z]\w+)`", table))
    assert {"FewShot", "SmoothingSpline", "Quadratic", "MAML", "ANIL", "OBBO"} <= names
    modules = [
        obbo_lightning,
        *(importlib.import_module(f"obbo_lightning.{name}") for name in (*NAMESPACES, "metrics")),
    ]
    assert names <= {name for module in modules for name in dir(module)}
