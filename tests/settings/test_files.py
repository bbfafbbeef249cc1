import pytest

from obbo_lightning.config import files
from obbo_lightning.config.parse import (
    ConfigError,
    complete_config,
    find_config,
    merge,
    parse_arguments,
    read_flags,
    read_yaml,
    shipped,
)

MINE = """
from obbo_lightning.geometry import Euclidean
class Mine(Euclidean):
    '''Mine.'''
"""


def test_a_shipped_configuration_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("quadratic") == shipped() / "quadratic.yaml"
    assert find_config("fc100", "compare") == shipped() / "compare" / "fc100.yaml"
    assert parse_arguments(["--config", "quadratic"])[0]["experiment"] == "quadratic"


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quadratic").write_text("experiment: mine\n")
    assert parse_arguments(["--config", "quadratic"])[0]["experiment"] == "mine"


@pytest.mark.parametrize("name", ["quadratics", "compare", "../default", "nowhere.yaml"])
def test_what_is_neither_is_refused_with_the_names_there_are(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    names = "one of default, fc100, forgetting, imbalance, market, market_entropy, quadratic, regularization"
    with pytest.raises(ConfigError, match=f"{names}|no such file"):
        find_config(name)


def test_a_part_in_a_file_is_found_beside_the_settings_file_and_remembered_by_its_hash(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "x.yaml").write_text("algorithm: {geometry: 'mine.py:Mine', clip: 1e-4}\n")
    monkeypatch.chdir(tmp_path)
    layer = read_yaml(folder / "x.yaml")
    assert layer["algorithm"] == {"geometry": f"{folder / 'mine.py'}:Mine", "clip": 1e-4}
    settings = complete_config(parse_arguments(["--config", "project/x.yaml"])[0])
    assert settings["algorithm"]["geometry"] == {"name": f"{folder / 'mine.py'}:Mine"}
    (file, digest), *rest = settings["sources"].items()
    assert (file, len(digest), rest) == (str(folder / "mine.py"), 64, [])
    assert complete_config(settings) == settings
    (folder / "mine.py").write_text(MINE + "# another line\n")
    with pytest.warns(UserWarning, match=r"mine\.py has changed since this run began"):
        again = complete_config(settings)
    assert again["sources"] == settings["sources"]  # of the file that the run began with


def test_ordinary_runs_have_no_sources():
    assert "sources" not in complete_config(parse_arguments([])[0])


def test_another_stream_brings_its_own_problem_and_network():
    assert "problem" not in merge([parse_arguments([])[0]], {"data": "quadratic"})
    changed = complete_config(parse_arguments(["--data", "examples", "--data.path", "x.npz"])[0])
    assert "widths" in changed["problem"]["network"]  # the MLP's, which takes any shape
    kept = complete_config(parse_arguments(["--data", "fc100"])[0])
    assert kept["problem"]["network"]["filters"] == 32


def test_long_files_and_values_that_grow_by_aliases_are_refused_before_they_are_used(tmp_path, monkeypatch):
    (tmp_path / "x.yaml").write_text("a: &a [1, 2, 3]\nb: [*a, *a]\n")
    assert read_yaml(tmp_path / "x.yaml")["b"] == [[1, 2, 3], [1, 2, 3]]
    monkeypatch.setattr(files, "MOST_VALUES", 10)
    with pytest.raises(ConfigError, match=r"x\.yaml must hold at most 10 values, aliases written out, got more"):
        read_yaml(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="--a must hold at most 10 values, aliases written out, got more"):
        read_flags(["--a", "[&a [1, 2, 3], *a, *a]"])
    monkeypatch.setattr(files, "LONGEST", 20)
    with pytest.raises(ConfigError, match=r"x\.yaml must have at most 20 bytes, got 28"):
        read_yaml(tmp_path / "x.yaml")
