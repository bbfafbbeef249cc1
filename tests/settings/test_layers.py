"""Which layer wins, with layers that are written here."""

import inspect
from pathlib import Path

import pytest
from jsonargparse import Namespace

from obbo_lightning import OnlineBilevelModule
from obbo_lightning.config import build as building
from obbo_lightning.config.build import build_algorithm, build_stream
from obbo_lightning.config.parse import (
    ConfigError,
    _plain,
    as_written,
    complete_config,
    has_groups,
    merge,
    nested,
    overlay,
    read_flags,
    with_chosen_trainer,
)

BASE = {
    "algorithm": {"name": "obbo", "lr": 0.1, "window": 7, "geometry": "euclidean", "inner": {"steps": 3}},
    "data": {"name": "synthetic", "ways": 3},
    "problem": {"network": {"filters": 4}},
    "per_algorithm": {"sobow": {"lr": 0.2, "discount": 0.5}},
}


def test_what_is_for_one_algorithm_is_above_the_files_and_below_the_flags():
    assert merge([BASE], {"algorithm": "sobow"})["algorithm"]["lr"] == 0.2
    given = merge([BASE], {"algorithm": {"name": "sobow", "lr": 0.3}})["algorithm"]
    assert (given["lr"], given["discount"]) == (0.3, 0.5)
    assert merge([BASE], {})["algorithm"]["lr"] == 0.1
    assert "per_algorithm" not in merge([BASE], {})


def test_an_algorithm_that_is_exchanged_keeps_what_the_other_takes():
    assert overlay(BASE, {"algorithm": "adam"})["algorithm"] == {"name": "adam", "lr": 0.1, "inner": {"steps": 3}}
    assert overlay(BASE, {"algorithm": "sobow"})["algorithm"]["window"] == 7


def test_another_problem_does_not_inherit_settings():
    assert "problem" not in overlay(BASE, {"data": "market"})
    assert overlay(BASE, {"data": {"name": "synthetic", "ways": 4}})["problem"] == {"network": {"filters": 4}}


def test_a_name_may_come_after_its_settings():
    expected = {"algorithm": {"window": 5, "name": "sobow"}, "seed": 1}
    assert nested({"algorithm.window": 5, "algorithm": "sobow", "seed": 1}) == expected
    assert read_flags(["--algorithm.window", "5", "--algorithm", "sobow", "--seed=1"]).settings == expected


def test_numbers_are_numbers_wherever_they_stand():
    found = as_written({"a": ["1e-4", {"b": "-2e3"}], "c": "1e", "wandb": {"name": "1e5"}})
    assert found == {"a": [1e-4, {"b": -2000.0}], "c": "1e", "wandb": {"name": "1e5"}}


def test_what_no_file_says_is_what_the_library_does():
    """Settings of an older version may lack a key."""
    settings = complete_config({"experiment": "old", "algorithm": {"name": "obbo"}, "data": {"name": "quadratic"}})
    usual = inspect.signature(OnlineBilevelModule).parameters
    for name in ("seed", "regret_window", "on_nonfinite", "tasks_per_round", "several_tasks"):
        assert settings[name] == usual[name].default, name
    assert settings["regret_window"] == 10


def test_data_are_made_with_the_seed_of_the_run():
    settings = complete_config(
        {"experiment": "new", "algorithm": {"name": "obbo"}, "data": {"name": "quadratic"}, "seed": 5}
    )
    assert build_stream(settings).train.seed == 5


def test_what_was_said_for_a_variable_with_blocks_stays_and_what_was_said_for_one_without_does_not():
    base = {"data": "forgetting", "algorithm": {"name": "obbo", "lr": 0.1, "geometry": "burg"}}
    kept = overlay(overlay({}, base), {"seed": 1, "algorithm": {"window": 3}})["algorithm"]
    assert (kept["lr"], kept["geometry"], kept["window"]) == (0.1, {"name": "burg"}, 3)
    assert set(overlay(BASE, {"data": "forgetting"})["algorithm"]) == {"name", "window", "inner"}


def test_an_own_algorithm_has_its_own_defaults_and_an_own_problem_no_settings_of_few_shot_adaptation(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_layers.py").write_text(
        "from obbo_lightning import OBBO, Stream\n"
        "from obbo_lightning.problems.forgetting import Forgetting\n"
        "class Own(OBBO):\n    pass\n"
        "class Other(Stream):\n    problem_type = Forgetting\n"
    )
    default = {**BASE, "algorithm": {**BASE["algorithm"], "hypergradient": {"steps": 2}}}
    own = merge([default], {"algorithm": "mine_for_layers.py:Own"})["algorithm"]
    assert own == {"name": "mine_for_layers.py:Own"}
    said = merge([default, {"algorithm": {"window": 9}}], {"algorithm": "mine_for_layers.py:Own"})["algorithm"]
    assert said == {"name": "mine_for_layers.py:Own", "window": 9}
    other = merge([default], {"data": "mine_for_layers.py:Other"})["algorithm"]
    assert set(other) == {"name", "window"}
    assert merge([default], {})["algorithm"]["inner"] == {"steps": 3}
    given = merge([default, {"algorithm": {"inner": {"steps": 7}}}], {"data": "mine_for_layers.py:Other"})
    assert given["algorithm"]["inner"] == {"steps": 7}


def test_settings_are_plain_whatever_the_parser_leaves_in_lists():
    left = {"trainer": {"callbacks": [Namespace(class_path="a.B", init_args=Namespace(x=(1, Path("c"))))]}}
    assert _plain(left) == {"trainer": {"callbacks": [{"class_path": "a.B", "init_args": {"x": [1, "c"]}}]}}


def test_a_problem_with_blocks_that_a_layer_names_drops_what_was_said_for_one_without():
    base = {"data": {"name": "quadratic"}, "algorithm": {"name": "obbo", "lr": 0.1, "window": 3}}
    assert has_groups({"data": "quadratic", "problem": "obbo_lightning.problems.forgetting.Forgetting"})
    found = overlay(base, {"problem": {"name": "obbo_lightning.problems.forgetting.Forgetting"}})
    assert found["algorithm"] == {"name": "obbo", "window": 3}


def test_a_part_that_is_none_is_none_and_those_inside_are_made_first(monkeypatch):
    monkeypatch.setattr(building, "_existing", lambda settings, path: lambda **given: (path, given))
    asked = {"name": "obbo", "lr": 2, "geometry": None, "inner": {"name": "x", "steps": 3}}
    inner = ("algorithm.inner", {"steps": 3})
    assert build_algorithm({"algorithm": asked}) == ("algorithm", {"lr": 2, "geometry": None, "inner": inner})


def test_of_the_trainer_what_was_chosen_is_kept_and_what_is_usual_is_not():
    given = {"devices": 2, "max_epochs": None, "unheard_of": 3}
    assert with_chosen_trainer({"seed": 1, "trainer": given}) == {
        "seed": 1, "trainer": {"devices": 2, "unheard_of": 3},
    }  # fmt: skip


PLAIN = {"experiment": "x", "algorithm": {"name": "obbo"}, "data": {"name": "quadratic"}}


def test_what_a_part_needs_must_be_given_and_a_mapping_is_one_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needs_for_layers.py").write_text(
        "from obbo_lightning import OBBO\n"
        "class Own(OBBO):\n"
        "    def __init__(self, needed, table: dict | None = None):\n"
        "        super().__init__()\n"
    )
    own = {"name": "needs_for_layers.py:Own", "table": {"a": {"b": 1}}}
    with pytest.raises(ConfigError, match=r"algorithm\.needed must be given, got none"):
        complete_config({**PLAIN, "algorithm": own})
    found = complete_config({**PLAIN, "algorithm": {**own, "needed": 3}})["algorithm"]
    assert (found["needed"], found["table"]) == (3, {"a": {"b": 1}})


@pytest.mark.parametrize("part", ["algorithm", "data"])
def test_a_part_that_every_run_has_must_have_a_name(part):
    with pytest.raises(ConfigError, match=rf"{part}\.name must have a value, got null"):
        complete_config({**PLAIN, part: {"name": None}})
