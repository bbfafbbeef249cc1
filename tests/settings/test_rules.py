"""Words and files to settings: every rule in a table."""

from pathlib import Path

import pytest
import yaml

from obbo_lightning import OBBO
from obbo_lightning.config.build import _refusing_with_prefix, build_algorithm, build_problem, build_stream
from obbo_lightning.config.files import ConfigError, as_written, read_yaml
from obbo_lightning.config.flags import read_flags
from obbo_lightning.config.layers import component_class, merge, overlay, parse_arguments, section
from obbo_lightning.config.schema import _leaves, _plain, check, complete_config
from obbo_lightning.config.trainer import SET_BY_THE_RUN, callback_entries


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.e5", 1e5), ("2.5E+3", 2500.0), ("-1e2", -100.0), ("+1e2", 100.0), ("inf", float("inf")),
        ("-inf", float("-inf")), ("e5", "e5"), ("1e", "1e"), ("1e5x", "1e5x"), ("infinity", "infinity"),
    ],
)  # fmt: skip
def test_a_word_is_a_number_where_it_looks_like_one(text, value):
    assert as_written(text) == value
    assert as_written([text, {"x": text}]) == [value, {"x": value}]
    for key in ("wandb", "experiment", "output", "compare"):
        assert as_written({key: text, "x": text}) == {key: text, "x": value}
    assert as_written("nan") != as_written("nan")
    assert as_written(3) == 3


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--seed", "3"], {"seed": 3}),
        (["--seed=3"], {"seed": 3}),
        (["--data.path", "-"], {"data": {"path": "-"}}),
        (["--data.path=a=b"], {"data": {"path": "a=b"}}),
        (["--algorithm", "obbo", "--algorithm.lr", "1e-3"], {"algorithm": {"name": "obbo", "lr": 1e-3}}),
        (["--algorithm.lr", "1", "--algorithm", "obbo"], {"algorithm": {"lr": 1, "name": "obbo"}}),
        (["--algorithm.lr", "1", "--algorithm.lr", "2"], {"algorithm": {"lr": 2}}),
        (
            ["--algorithm.inner.steps", "1", "--algorithm.inner", "x"],
            {"algorithm": {"inner": {"steps": 1, "name": "x"}}},
        ),
        (["--trainer.callbacks", "[A, B]"], {"trainer": {"callbacks": ["A", "B"]}}),
        (["--algorithm.lr", "-1"], {"algorithm": {"lr": -1}}),
        (["--experiment", "1e3"], {"experiment": "1e3"}),
    ],
)
def test_flags_are_settings(words, settings):
    found = read_flags(["--config", "a.yaml", *words, "--config=b.yaml", "--print_config"])
    assert found == (settings, ["a.yaml", "b.yaml"], {"print_config"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed"], "--seed needs a value, got none"),
        (["--seed", "--rounds", "3"], "--seed needs a value, got none"),
        (["--seed="], "--seed needs a value, got ''"),
        (["seed", "3"], "flags begin with --, got 'seed'"),
        (["-s", "3"], "flags begin with --, got '-s'"),
        (["--seed", "[1"], r"--seed must be a YAML value, got '\[1'"),
    ],
)
def test_words_that_are_no_flags_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        read_flags(words)


DEFAULT = {"algorithm": {"name": "obbo", "lr": 0.1, "window": 7}, "data": {"name": "quadratic"}, "rounds": 5}


def test_later_layers_win_and_what_is_for_one_algorithm_is_between_files_and_flags():
    file = {"algorithm": {"lr": 0.2, "window": 8}, "per_algorithm": {"obbo": {"lr": 0.3}, "adam": {"lr": 0.4}}}
    found = merge([DEFAULT, file], {"algorithm": {"window": 9}})
    assert (found["algorithm"]["lr"], found["algorithm"]["window"], found["rounds"]) == (0.3, 9, 5)
    assert merge([DEFAULT, file], {"algorithm": {"lr": 0.5}})["algorithm"]["lr"] == 0.5
    assert merge([DEFAULT, file], {"algorithm": "adam"})["algorithm"] == {"name": "adam", "lr": 0.4}
    assert merge([DEFAULT, file, {"per_algorithm": {"obbo": {"window": 3}}}], {})["algorithm"]["window"] == 3
    with pytest.raises(ConfigError, match=r"per_algorithm\.adam must be of what adam takes: .*; got 'window'"):
        merge([DEFAULT, {"per_algorithm": {"adam": {"window": 1}}}], {})
    for key in ("trainer", "evaluation", "per_algorithm"):
        with pytest.raises(ConfigError, match=f"{key} must be keys and values, got 3"):
            merge([DEFAULT, {key: 3}], {})
    with pytest.raises(ConfigError, match="algorithm must be a name, or keys and values, got 3"):
        merge([DEFAULT], {"algorithm": 3})


def test_a_part_that_gets_another_name_keeps_what_the_other_takes_and_its_own_stays():
    base = {"algorithm": {"name": "obbo", "geometry": {"name": "adaptive_diagonal", "rho": 0.5, "decay": 0.7}}}
    assert overlay(base, {"algorithm": {"geometry": {"decay": 0.8}}})["algorithm"]["geometry"] == {
        "name": "adaptive_diagonal", "rho": 0.5, "decay": 0.8,
    }  # fmt: skip
    assert overlay(base, {"algorithm": {"geometry": "euclidean"}})["algorithm"]["geometry"] == {"name": "euclidean"}
    same = overlay(base, {"algorithm": {"geometry": "adaptive_diagonal"}})
    assert same == base
    assert overlay({"algorithm": "obbo"}, {"algorithm": {"lr": 1}}) == {"algorithm": {"name": "obbo", "lr": 1}}
    assert overlay({"a": {"b": 1}}, {"a": None}) == {"a": None}
    assert section({"algorithm": {"inner": "x"}}, "algorithm.inner") == {"name": "x"}
    assert section({}, "algorithm.inner") == {}
    assert component_class({"algorithm": "obbo"}, "algorithm") is OBBO


NEEDED = ["experiment", "seed", "rounds", "tasks_per_round", "several_tasks", "output", "logger", "regret_window"]
NEEDED += ["on_nonfinite", "workers", "threads", "evaluation.every", "evaluation.tasks", "evaluation.baselines"]
NEEDED += ["checkpoint.every", "evaluation.split"]


@pytest.mark.parametrize("key", NEEDED)
def test_what_every_run_has_must_have_a_value(key):
    *folders, last = key.split(".")
    layer = {last: None}
    for folder in reversed(folders):
        layer = {folder: layer}
    settings = overlay(parse_arguments(["--config", "quadratic"])[0], layer)
    with pytest.raises(ValueError, match=rf"{key} must have a value, got null"):
        check(settings)


def test_every_key_that_a_run_reads_has_a_value_when_it_is_complete():
    for words in ([], ["--config", "quadratic"], ["--config", "market"]):
        settings = complete_config(parse_arguments(words)[0])
        for key in NEEDED:
            folder, _, last = key.rpartition(".")
            assert (section(settings, folder) if folder else settings)[last] is not None, key
        assert complete_config(settings) == settings
        assert yaml.safe_load(yaml.safe_dump(settings)) == settings


@pytest.mark.parametrize("experiment", ["a/b", "..", "a..b", "", "x" * 101, "a b"])
def test_an_experiment_is_a_plain_folder_name(experiment):
    settings = parse_arguments(["--config", "quadratic"])[0]
    with pytest.raises(ConfigError, match="experiment must be a plain folder name, got"):
        check({**settings, "experiment": experiment})
    check({**settings, "experiment": "a-b.c_1"})


@pytest.mark.parametrize(("key", "instead"), SET_BY_THE_RUN.items())
def test_what_the_run_decides_of_the_trainer_is_refused_with_what_to_do(key, instead):
    settings = parse_arguments(["--config", "quadratic"])[0]
    value = {"gradient_clip_algorithm": "norm", "inference_mode": False, "use_distributed_sampler": False}.get(key, 3)
    with pytest.raises(ConfigError) as refusal:
        check(overlay(settings, {"trainer": {key: value}}))
    assert str(refusal.value) == f"trainer.{key} cannot be set for an online run, got {value!r}: {instead}"


def test_parts_are_made_with_the_settings_of_the_run():
    words = ["--algorithm.lr", "0.3", "--algorithm.window", "4", "--algorithm.inner.steps", "9", "--seed", "8"]
    settings = complete_config(parse_arguments([*words, "--data.ways", "3", "--problem.network.filters", "2"])[0])
    algorithm, stream = build_algorithm(settings), build_stream(settings)
    assert (algorithm.inner.steps, stream.train.seed, stream.train.ways) == (9, (8, "train"), 3)
    problem = build_problem(settings, stream)
    assert problem.network.template.linear.out_features == 3
    assert problem.network.template.blocks[0][0].out_channels == 2
    with pytest.raises(ValueError, match="algorithm must be one of"):
        build_algorithm({**settings, "algorithm": {"name": "none"}})


def raising(error):
    def make():
        raise error

    return make


class Own:
    """Somebody's."""


@pytest.mark.parametrize(
    ("path", "cls", "error", "said"),
    [
        ("algorithm.inner", OBBO, ValueError("inner.steps must be 1"), "algorithm.inner.steps must be 1"),
        ("algorithm", OBBO, ValueError("algorithm.lr must be 1"), "algorithm.lr must be 1"),
        ("algorithm", OBBO, ValueError("algorithm must be 1"), "algorithm must be 1"),
        ("data", OBBO, ValueError("a.csv is damaged"), "a.csv is damaged"),
        ("data", Own, ValueError("a.csv is damaged"), "data Own: a.csv is damaged"),
        ("data", Own, KeyError("x"), "data Own cannot be made: KeyError: 'x'"),
    ],
)
def test_a_refusal_names_the_key_as_it_was_written(path, cls, error, said):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is compared as it is
        _refusing_with_prefix(path, cls, raising(error))
    assert str(refusal.value) == said
    with pytest.raises(KeyError):
        _refusing_with_prefix("data", OBBO, raising(KeyError("x")))


def test_files_that_are_no_settings_are_refused(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"is not a text file|is not valid YAML"):
        read_yaml(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").touch()
    assert read_yaml(tmp_path / "empty.yaml") == {}
    assert _plain({"a": (Path("x"), [1])}) == {"a": ["x", [1]]}
    leaves = dict(_leaves({"a": {"b": 1, "c": {}}, "problem": None, "trainer": {"plugins": {"x": 1}}, "d": None}))
    assert leaves == {"a.b": 1, "d": None}
    assert callback_entries({}) == []
    assert callback_entries({"trainer": {"callbacks": [{"class_path": "A", "init_args": {"n": 3}}, "B"]}}) == [
        {"name": "A", "n": 3},
        {"name": "B"},
    ]
