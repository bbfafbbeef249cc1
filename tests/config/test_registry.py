"""Components by name: ours, those of entry points, and own ones from modules and files."""

import sys

import pytest

from obbo_lightning import OBBO, register_component
from obbo_lightning.config import registry
from obbo_lightning.config.registry import (
    UntrustedError,
    absolute_name,
    component_names,
    find_component,
    import_class,
    qualified_name,
    require_trusted,
    require_trusted_values,
    untrusted_source,
)
from obbo_lightning.core.configurable import Configurable

MINE = """
from obbo_lightning import OBBO
from obbo_lightning.geometry import Euclidean
import beside_registry_mine

class Mine(OBBO):
    '''Mine.'''
    def __init__(self, lr: float = beside_registry_mine.LR):
        super().__init__(lr=lr, geometry=Euclidean())

class NoComponent:
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A file with an own component and one beside it; names, modules and the search path are restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and "pytest-" not in p])  # other tests' folders
    (tmp_path / "registry_mine.py").write_text(MINE)
    (tmp_path / "beside_registry_mine.py").write_text("LR = 0.25\n")
    monkeypatch.setattr(registry, "KINDS", {k: v._replace(names=dict(v.names)) for k, v in registry.KINDS.items()})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if "registry_mine" in name:
            del sys.modules[name]


@pytest.mark.parametrize("kind", sorted(registry.KINDS))
def test_registered_names_are_components_of_their_kind(kind):
    for name in component_names(kind):
        cls = find_component(kind, name)
        assert find_component(kind, qualified_name(cls)) is cls
    for dotted in registry.KINDS[kind].unnamed:
        assert issubclass(import_class(dotted, kind), Configurable)


def test_every_component_of_the_package_is_registered():
    """Checkpoints hold dotted names, and an unregistered one could not be read without trust."""
    for kind in registry.KINDS:
        for name in component_names(kind):
            find_component(kind, name)
    known = {c if isinstance(c, str) else qualified_name(c) for k in registry.KINDS.values() for c in k.names.values()}
    known |= {dotted for kind in registry.KINDS.values() for dotted in kind.unnamed}

    def below(cls):
        for one in cls.__subclasses__():
            yield one
            yield from below(one)

    abstract = {"Algorithm", "BregmanAlgorithm", "OuterStepAlgorithm", "ProjectedAlgorithm", "Domain", "Entropy"}
    abstract |= {"FixedGeometry", "Geometry", "Estimator", "InnerSolver", "IterativeSolver"}
    abstract |= {"StatefulSolver", "Problem", "Stream", "FewShotStream", "StoredFewShotStream", "LabelledStream"}
    ours = {cls for cls in below(Configurable) if cls.__module__.startswith("obbo_lightning.")}
    assert {qualified_name(cls) for cls in ours if cls.__name__ not in abstract} <= known


def test_file_and_dotted_name_give_the_same_class(folder):
    mine = find_component("algorithm", "registry_mine.py:Mine")
    assert issubclass(mine, OBBO)
    assert mine().lr == 0.25
    assert find_component("algorithm", str(folder / "registry_mine.py") + ":Mine") is mine  # loaded once
    assert find_component("algorithm", "registry_mine.Mine") is mine
    assert qualified_name(mine) == f"{folder / 'registry_mine.py'}:Mine"


def test_registered_class_is_found_by_its_name_and_its_kind_follows_from_its_base(folder):
    mine = register_component("mine")(find_component("algorithm", "registry_mine.py:Mine"))
    assert find_component("algorithm", "mine") is mine
    assert "mine" in component_names("algorithm")
    assert "mine" not in component_names("geometry")
    register_component("mine")(mine)  # a module that is read twice
    with pytest.raises(ValueError, match="algorithm name must be new, got 'mine', which is"):
        register_component("mine")(OBBO)
    with pytest.raises(ValueError, match="a component must extend one of Algorithm, InnerSolver"):
        register_component("nothing")(int)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("geometry", "euclidian", "geometry must be one of adaptive_diagonal, euclidean, .*did you mean 'euclidean'?"),
        ("algorithm", "OBBO", "did you mean 'obbo'?"),
        ("algorithm", "registry_mine.py:Mien", "there is no Mien in it; did you mean 'Mine'?"),
        ("algorithm", "nowhere.py:Mine", "algorithm must be a class in a file that exists, got 'nowhere.py:Mine'"),
        ("geometry", "registry_mine.py:Mine", "geometry must extend Geometry, got 'registry_mine.py:Mine', which does"),
        ("algorithm", "registry_mine.NoComponent", "algorithm must extend Algorithm, got 'registry_mine.NoComponent'"),
        ("algorithm", "mine.py", "algorithm must name a class in the file, mine.py:Class, got 'mine.py'"),
        ("inner", "obbo_lightning.solvers.InnerSolver", "inner must have the methods __call__, got"),
        ("data", "no.such.Thing", "data 'no.such.Thing' cannot be loaded: ModuleNotFoundError: No module named 'no'"),
    ],
)
def test_wrong_name_is_refused_in_one_line(folder, kind, name, message):
    with pytest.raises(ValueError, match=message) as refusal:
        find_component(kind, name)
    assert "\n" not in str(refusal.value)


def test_file_is_loaded_again_after_it_has_changed(folder):
    file = folder / "registry_mine.py"
    file.write_text("x = 1 / 0\n")
    with pytest.raises(ValueError, match=r"algorithm 'registry_mine.py:Mine' cannot be loaded: ZeroDivisionError"):
        find_component("algorithm", "registry_mine.py:Mine")
    file.write_text(MINE)
    before = find_component("algorithm", "registry_mine.py:Mine")
    file.write_text(MINE.replace("beside_registry_mine.LR", "0.75"))
    after = find_component("algorithm", "registry_mine.py:Mine")
    assert (before().lr, after().lr) == (0.25, 0.75)


def test_file_with_the_name_of_another_module_is_loaded_beside_it(folder):
    import statistics

    (folder / "statistics.py").write_text(MINE)
    assert find_component("algorithm", "statistics.py:Mine")().lr == 0.25
    assert sys.modules["statistics"] is statistics
    (folder / "other").mkdir()
    (folder / "other" / "registry_mine.py").write_text(MINE.replace("beside_registry_mine.LR", "0.5"))
    first = find_component("algorithm", "registry_mine.py:Mine")
    second = find_component("algorithm", "other/registry_mine.py:Mine")
    assert (first().lr, second().lr) == (0.25, 0.5)


def test_file_is_found_and_imports_its_neighbours_from_another_folder(folder, tmp_path_factory, monkeypatch):
    (folder / "late_registry_mine.py").write_text(
        "from obbo_lightning import register_component\n"
        "from registry_mine import Mine\n"
        "@register_component('late_registry_mine')\n"
        "class Late(Mine):\n"
        "    def answer(self):\n"
        "        import later_registry_mine\n"
        "        return later_registry_mine.ANSWER\n"
    )
    (folder / "later_registry_mine.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    late = find_component("algorithm", f"{folder / 'late_registry_mine.py'}:Late")
    assert late().answer() == 42
    assert find_component("algorithm", "late_registry_mine") is late
    assert find_component("algorithm", f"{folder / 'registry_mine.py'}:Mine") is late.__mro__[1]
    assert absolute_name("registry_mine.py:Mine", folder) == f"{folder / 'registry_mine.py'}:Mine"
    assert absolute_name("obbo", folder) == "obbo"
    assert absolute_name("other.py:X", folder).startswith("/")


# Names that are read from a run, a checkpoint or an export


@pytest.mark.parametrize(
    "name",
    [
        "registry_mine.py:Mine",
        "registry_mine.Mine",
        "venv.__main__.X",
        "antigravity.X",
        "torchmetrics.functional.image.lpips._LPIPS",
        "obbo_lightning.__main__.X",
        "obbo_lightning.core.geometry.Euclidean",  # of another kind
        "obbo_lightning.core.algorithm.ABC",
    ],
)
def test_untrusted_name_is_refused_before_anything_is_imported(folder, name, monkeypatch):
    (folder / "registry_mine.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    with untrusted_source("trust=True"):
        with pytest.raises(UntrustedError, match="neither a registered component nor an entry point"):
            find_component("algorithm", name)
        assert set(sys.modules) == before


def test_entry_point_is_found_by_its_name_and_needs_no_trust_where_it_is_installed(folder, monkeypatch):
    information = folder / "plugin-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[obbo_lightning.algorithm]\nplugged = registry_mine:Mine\n")
    monkeypatch.syspath_prepend(str(folder))
    assert "plugged" in component_names("algorithm")
    assert find_component("algorithm", "plugged").__name__ == "Mine"
    with untrusted_source("trust it"):
        assert find_component("algorithm", "obbo") is find_component("algorithm", "obbo_lightning.algorithms.obbo.OBBO")
        with pytest.raises(ValueError, match="algorithm must be one of"):  # lies about, not installed by pip
            find_component("algorithm", "plugged")
        monkeypatch.setattr(registry.site, "getsitepackages", lambda: [str(folder)])
        assert find_component("algorithm", "plugged").__name__ == "Mine"
        require_trusted("registry_mine.Mine", "algorithm", "algorithm")
    with untrusted_source("trust it"), untrusted_source(None):
        assert find_component("algorithm", "registry_mine.py:Mine")


@pytest.mark.parametrize(
    ("trainer", "refused"),
    [
        ({"callbacks": [{"name": "Timer", "duration": "00:00:01:00"}], "strategy": "ddp", "devices": 2}, False),
        ({"callbacks": [{"name": "ModelCheckpoint", "dirpath": "run/mine", "filename": "best"}]}, False),
        ({"callbacks": [{"class_path": "lightning.pytorch.callbacks.Timer"}]}, False),
        ({"callbacks": [{"name": "ModelCheckpoint", "dirpath": "elsewhere"}]}, True),
        ({"callbacks": [{"name": "ModelCheckpoint", "dirpath": "/elsewhere"}]}, True),
        ({"callbacks": [{"name": "ModelCheckpoint", "filename": "../../best"}]}, True),
        ({"default_root_dir": "/elsewhere"}, True),
        ({"plugins": [{"class_path": "mine.Mine"}]}, True),
        ({"profiler": "mine.Mine"}, True),
    ],
)
def test_trainer_of_a_run_names_registered_callbacks_and_writes_into_the_run(trainer, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    require_trusted_values(trainer, "trainer", tmp_path / "run")
    with untrusted_source("trust it"):
        if refused:
            with pytest.raises(UntrustedError, match="trust it"):
                require_trusted_values(trainer, "trainer", tmp_path / "run")
        else:
            require_trusted_values(trainer, "trainer", tmp_path / "run")
