"""Parts by name: ours, plug-ins', and yours from modules and files, by one function."""

import sys
from pathlib import Path

import pytest
import torch
from toy import Proximal

from obbo_lightning import OBBO, Algorithm, register_component
from obbo_lightning.config import registry
from obbo_lightning.config.registry import component_names, find_component
from obbo_lightning.config.serialization import from_config, to_config
from obbo_lightning.geometry import Euclidean

MINE = """
from obbo_lightning import OBBO
from obbo_lightning.geometry import Euclidean
import beside

class Mine(OBBO):
    '''Mine.'''
    def __init__(self, lr: float = beside.LR):
        super().__init__(lr=lr, geometry=Euclidean())

class NotAPart:
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A module and a file beside it, and everything as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and "pytest-" not in p])  # other tests' folders
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("LR = 0.25\n")
    for name in ("mine", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    monkeypatch.setattr(registry, "KINDS", {k: v._replace(names=dict(v.names)) for k, v in registry.KINDS.items()})
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("mine", "beside") or name.startswith("obbo_part_"):
            del sys.modules[name]


@pytest.mark.parametrize("kind", sorted(registry.KINDS))
def test_every_registered_name_is_a_part_of_its_kind(kind):
    for name in component_names(kind):
        cls = find_component(kind, name)
        assert find_component(kind, f"{cls.__module__}.{cls.__qualname__}") is cls


def test_a_file_and_a_dotted_name_give_the_class(folder):
    by_file = find_component("algorithm", "mine.py:Mine")
    assert by_file().init_args == {}
    assert issubclass(by_file, OBBO)
    assert find_component("algorithm", str(folder / "mine.py") + ":Mine") is by_file  # loaded once
    assert find_component("algorithm", "mine.Mine").__name__ == "Mine"


def test_a_registered_class_is_found_by_its_word_and_its_kind_is_what_it_extends(folder):
    made = register_component("mine")(find_component("algorithm", "mine.py:Mine"))
    assert find_component("algorithm", "mine") is made
    assert "mine" in component_names("algorithm")
    assert "mine" not in component_names("geometry")
    register_component("mine")(made)  # a module that is read twice
    with pytest.raises(ValueError, match="algorithm name must be new, got 'mine', which is"):
        register_component("mine")(OBBO)
    with pytest.raises(ValueError, match="a part must extend one of Algorithm, InnerSolver"):
        register_component("nothing")(int)


def test_an_installed_plug_in_is_found_through_its_entry_point(folder, monkeypatch):
    information = folder / "plugin-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[obbo_lightning.algorithm]\nplugged = mine:Mine\n")
    monkeypatch.syspath_prepend(str(folder))
    assert "plugged" in component_names("algorithm")
    assert find_component("algorithm", "plugged").__name__ == "Mine"


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("geometry", "euclidian", "geometry must be one of adaptive_diagonal, euclidean, .*did you mean 'euclidean'?"),
        ("algorithm", "mine.py:Mien", "there is no Mien in it; did you mean 'Mine'?"),
        ("algorithm", "nowhere.py:Mine", "algorithm must be a class in a file that exists, got 'nowhere.py:Mine'"),
        ("geometry", "mine.py:Mine", "geometry must extend Geometry, got 'mine.py:Mine', which does not"),
        ("algorithm", "mine.NotAPart", "algorithm must extend Algorithm, got 'mine.NotAPart', which does not"),
        ("algorithm", "mine.py", "algorithm must name a class in the file, mine.py:Class, got 'mine.py'"),
        ("inner", "obbo_lightning.InnerSolver", "inner must have the methods __call__, step_size, got"),
        ("data", "no.such.Thing", "data 'no.such.Thing' cannot be loaded: ModuleNotFoundError: No module named 'no'"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(folder, kind, name, said):
    with pytest.raises(ValueError, match=said) as refusal:
        find_component(kind, name)
    assert "\n" not in str(refusal.value)


def test_a_file_that_raises_is_named_and_can_be_mended(folder):
    (folder / "broken.py").write_text("x = 1 / 0\n")
    with pytest.raises(ValueError, match=r"algorithm 'broken.py:Mine' cannot be loaded: ZeroDivisionError"):
        find_component("algorithm", "broken.py:Mine")
    (folder / "broken.py").write_text(MINE)
    assert find_component("algorithm", "broken.py:Mine").__name__ == "Mine"


def test_a_name_in_a_file_is_found_beside_the_settings_that_name_it(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert registry.placed("mine.py:Mine", folder) == f"{folder / 'mine.py'}:Mine"
    assert registry.placed("obbo", folder) == "obbo"
    assert Path(registry.placed("other.py:X", folder).partition(":")[0]).is_absolute()


def test_a_part_is_made_again_from_what_it_was_made_with(folder):
    mine = find_component("algorithm", "mine.py:Mine")(lr=0.5)
    recipe = to_config(mine)
    assert recipe == {"part": f"{folder / 'mine.py'}:Mine", "with": {"lr": 0.5}}
    again = from_config(recipe)
    assert type(again) is type(mine)
    assert again.optimizer.lr == 0.5
    problem = from_config(to_config(Proximal(proximity=0.7)))
    assert problem.proximity == 0.7


def test_a_recipe_holds_tensors_dtypes_and_lists():
    from obbo_lightning.streams.quadratic import QuadraticTasks

    problem = QuadraticTasks(lanes=2).problem
    again = from_config(to_config(problem))
    assert torch.equal(again.inner_matrix, problem.inner_matrix)
    assert from_config(to_config([torch.float64, {"a": (1, 2)}])) == [torch.float64, {"a": [1, 2]}]
    with pytest.raises(ValueError, match="Linear cannot be written down as plain values"):
        to_config(torch.nn.Linear(1, 1))


def test_parts_are_copied_and_compared_as_before():
    import copy
    import inspect
    import pickle

    geometry = Euclidean()
    assert type(copy.deepcopy(geometry)) is Euclidean
    algorithm = pickle.loads(pickle.dumps(OBBO(lr=0.3)))
    assert algorithm.init_args == {"lr": 0.3}
    assert list(inspect.signature(OBBO).parameters)[:2] == ["lr", "window"]
    assert inspect.signature(Euclidean).parameters == {}
    with pytest.raises(TypeError, match="windw"):
        OBBO(windw=3)
    assert issubclass(OBBO, Algorithm)


def test_modules_of_the_same_name_beside_two_files_are_two_modules(tmp_path, monkeypatch):
    """One process may play parts of several folders, one after the other."""
    monkeypatch.chdir(tmp_path)
    for folder, lr in (("a", 0.25), ("b", 0.5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(MINE)
        (tmp_path / folder / "beside.py").write_text(f"LR = {lr}\nclass Other: pass\n")
    made = {folder: find_component("algorithm", f"{folder}/mine.py:Mine")() for folder in ("a", "b", "a")}
    rates = {folder: algorithm.optimizer.lr for folder, algorithm in made.items()}
    assert rates == {"a": 0.25, "b": 0.5}
    assert "beside" not in sys.modules
    assert sys.path[0] != str(tmp_path / "b")  # nobody else's imports are answered from there first


def test_what_a_part_imports_when_it_is_called_is_found_beside_it(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "late_mine.py").write_text(
        "from obbo_lightning import Euclidean\n"
        "class Late(Euclidean):\n"
        "    def answer(self):\n"
        "        import late_beside\n"
        "        return late_beside.ANSWER\n"
    )
    (tmp_path / "late_beside.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find_component("geometry", f"{tmp_path / 'late_mine.py'}:Late")().answer() == 42


def test_a_class_that_was_imported_beside_a_part_is_the_part_of_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.py").write_text(
        "from obbo_lightning import Euclidean, register\n@register_component('once_beside')\nclass First(Euclidean): pass\n"
    )
    (tmp_path / "second.py").write_text("from first import First\nclass Second(First): pass\n")
    monkeypatch.setattr(registry, "KINDS", {k: v._replace(names=dict(v.names)) for k, v in registry.KINDS.items()})
    second = find_component("geometry", "second.py:Second")
    first = find_component("geometry", "first.py:First")
    assert second.__mro__[1] is first
    assert find_component("geometry", "once_beside") is first
    assert registry.name_of(first) == f"{tmp_path / 'first.py'}:First"
    assert type(from_config(to_config(first()))) is first


def test_a_file_that_changed_is_loaded_anew(folder):
    before = find_component("algorithm", "mine.py:Mine")
    (folder / "mine.py").write_text(MINE.replace("beside.LR", "0.75"))
    assert find_component("algorithm", "mine.py:Mine") is not before
    assert find_component("algorithm", "mine.py:Mine")().optimizer.lr == 0.75


def test_a_recipe_writes_down_defaults_and_positional_arguments():
    from functools import partial

    from obbo_lightning import FewShot
    from obbo_lightning.networks import CNN4

    assert to_config(OBBO(lr=0.5))["with"]["window"] == 10
    again = from_config(to_config(FewShot(partial(CNN4, 3, filters=2, image_size=16))))
    assert again.initial_outer(0).shape == FewShot(partial(CNN4, 3, filters=2, image_size=16)).initial_outer(0).shape
    with pytest.raises(ValueError, match="what the function maker makes cannot be written down; a class could be"):
        to_config(maker)


def maker():
    return torch.nn.Linear(1, 1)
