"""Files and flags become one checked configuration."""

import inspect

import lightning as L
import pytest
import yaml
from small_runs import config_of

from obbo_lightning import OBBO, OnlineBilevelModule
from obbo_lightning.config import parse
from obbo_lightning.config.parse import (
    FIXED_TRAINER_ARGUMENTS,
    ConfigError,
    callback_entries,
    complete_config,
    component_class,
    find_config,
    help_text,
    merge,
    nested,
    overlay,
    parse_arguments,
    read_flags,
    read_yaml,
    section,
    shipped_configs,
)
from obbo_lightning.training.run import make_trainer

PLAIN = {"experiment": "x", "algorithm": {"name": "obbo"}, "data": {"name": "quadratic"}}


# Files


def test_shipped_configuration_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("quadratic") == shipped_configs() / "quadratic.yaml"
    assert find_config("fc100", "compare") == shipped_configs() / "compare" / "fc100.yaml"
    assert parse_arguments(["--config", "quadratic"])[0]["experiment"] == "quadratic"
    (tmp_path / "quadratic").write_text("experiment: mine\n")  # a file of that name comes first
    assert parse_arguments(["--config", "quadratic"])[0]["experiment"] == "mine"


@pytest.mark.parametrize("name", ["quadratics", "compare", "../default", "nowhere.yaml"])
def test_unknown_configuration_is_refused_with_the_shipped_names(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    names = "one of default, fc100, forgetting, imbalance, market, market_entropy, quadratic, regularization"
    with pytest.raises(ConfigError, match=f"{names}|no such file"):
        find_config(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe\x00", "is not a text file|is not valid YAML"),
        (b"- a\n- b", "must hold keys and values, got list"),
        (b"a: [", "is not valid YAML"),
        (b"a: &x [*x]", "contains itself"),
        (
            b"a: &a [1, 2, 3, 4, 5]\nb: &b [*a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: [*c, *c]\n",
            "must hold at most 500 values, aliases expanded, got more",
        ),
        (b"#" + b"x" * 200, "must have at most 199 bytes, got 201"),
    ],
)
def test_file_that_holds_no_configuration_is_refused(text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(parse, "MAX_VALUES", 500)
    monkeypatch.setattr(parse, "MAX_BYTES", 199)
    (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "small.yaml").write_text("a: &a [1, 2]\nb: [*a]\n")
    assert read_yaml(tmp_path / "small.yaml") == {"a": [1, 2], "b": [[1, 2]]}
    (tmp_path / "empty.yaml").touch()
    assert read_yaml(tmp_path / "empty.yaml") == {}


def test_component_in_a_file_is_found_beside_the_configuration_and_hashed(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    code = "from obbo_lightning.geometry import Euclidean\nclass Mine(Euclidean):\n    '''Mine.'''\n"
    (folder / "hashed_mine.py").write_text(code)
    (folder / "x.yaml").write_text("algorithm: {geometry: 'hashed_mine.py:Mine', clip: 1e-4}\n")
    monkeypatch.chdir(tmp_path)
    name = f"{folder / 'hashed_mine.py'}:Mine"
    assert read_yaml(folder / "x.yaml")["algorithm"] == {"geometry": name, "clip": 1e-4}
    config = config_of("--config", "project/x.yaml")
    assert config["algorithm"]["geometry"] == {"name": name}
    ((file, digest),) = config["component_files"].items()
    assert (file, len(digest)) == (str(folder / "hashed_mine.py"), 64)
    assert complete_config(config) == config
    (folder / "hashed_mine.py").write_text(code + "# another line\n")
    with pytest.warns(UserWarning, match=r"hashed_mine\.py has changed since this run began"):
        again = complete_config(config)
    assert again["component_files"] == config["component_files"]  # of the file that the run began with
    assert "component_files" not in config_of()


# Flags


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.e5", 1e5), ("2.5E+3", 2500.0), ("-1e2", -100.0), ("+1e2", 100.0), ("inf", float("inf")),
        ("-inf", float("-inf")), ("e5", "e5"), ("1e", "1e"), ("1e5x", "1e5x"), ("infinity", "infinity"), ("3", 3),
    ],
)  # fmt: skip
def test_yaml_value_is_a_number_where_it_looks_like_one(text, value):
    assert read_flags(["--data.x", text])[0] == {"data": {"x": value}}
    assert read_flags(["--data.x", f"[{text}, {{y: {text}}}]"])[0] == {"data": {"x": [value, {"y": value}]}}


@pytest.mark.parametrize(
    ("words", "config"),
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
        (["--data.path", "a", "--data.path", "b"], {"data": {"path": "b"}}),
        (["--algorithm", "obbo", "--algorithm", "sobow"], {"algorithm": "sobow"}),
        (["--wandb.name", "train.py:run"], {"wandb": {"name": "train.py:run"}}),
    ],
)
def test_flags_are_configuration_keys(words, config):
    flags = read_flags(["--config", "a.yaml", *words, "--config=b.yaml", "--print_config"])
    assert flags == (config, ["a.yaml", "b.yaml"], {"print_config"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed"], "--seed needs a value, got none"),
        (["--seed", "--rounds", "3"], "--seed needs a value, got none"),
        (["--seed="], "--seed needs a value, got ''"),
        (["seed", "3"], "flags begin with --, got 'seed'"),
        (["-s", "3"], "flags begin with --, got '-s'"),
        (["--seed", "[1"], r"--seed '\[1' is not valid YAML"),
    ],
)
def test_words_that_are_no_flags_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        read_flags(words)


# Layers

BASE = {
    "algorithm": {"name": "obbo", "lr": 0.1, "window": 7, "geometry": "euclidean", "inner": {"steps": 3}},
    "data": {"name": "synthetic", "ways": 3},
    "problem": {"network": {"filters": 4}},
}


def test_later_layers_win_and_per_algorithm_is_between_files_and_flags():
    base = {"algorithm": {"name": "obbo", "lr": 0.1, "window": 7}, "data": {"name": "quadratic"}, "rounds": 5}
    file = {"algorithm": {"lr": 0.2, "window": 8}, "per_algorithm": {"obbo": {"lr": 0.3}, "adam": {"lr": 0.4}}}
    found = merge([base, file], {"algorithm": {"window": 9}})
    assert (found["algorithm"]["lr"], found["algorithm"]["window"], found["rounds"]) == (0.3, 9, 5)
    assert "per_algorithm" not in found
    assert merge([base, file], {"algorithm": {"lr": 0.5}})["algorithm"]["lr"] == 0.5
    assert merge([base, file], {"algorithm": "adam"})["algorithm"] == {"name": "adam", "lr": 0.4}
    assert merge([base, file, {"per_algorithm": {"obbo": {"window": 3}}}], {})["algorithm"]["window"] == 3
    with pytest.raises(ConfigError, match=r"per_algorithm\.adam must be of what adam takes: .*; got 'window'"):
        merge([base, {"per_algorithm": {"adam": {"window": 1}}}], {})
    with pytest.raises(ValueError, match=r"algorithm must be one of .* did you mean 'sobow'"):
        merge([base, {"per_algorithm": {"sobwo": {"lr": 1}}}], {})


@pytest.mark.parametrize("key", ["trainer", "evaluation", "per_algorithm", "algorithm"])
def test_section_must_be_keys_and_values(key):
    wanted = "a name, or keys and values" if key == "algorithm" else "keys and values"
    with pytest.raises(ConfigError, match=f"{key} must be {wanted}, got 3"):
        merge([{key: 3}], {})


def test_component_that_is_exchanged_keeps_the_arguments_that_both_take():
    assert overlay(BASE, {"algorithm": "adam"})["algorithm"] == {"name": "adam", "lr": 0.1, "inner": {"steps": 3}}
    assert overlay(BASE, {"algorithm": "sobow"})["algorithm"]["window"] == 7
    base = {"algorithm": {"name": "obbo", "geometry": {"name": "adaptive_diagonal", "rho": 0.5, "decay": 0.7}}}
    changed = overlay(base, {"algorithm": {"geometry": {"decay": 0.8}}})["algorithm"]["geometry"]
    assert changed == {"name": "adaptive_diagonal", "rho": 0.5, "decay": 0.8}
    assert overlay(base, {"algorithm": {"geometry": "euclidean"}})["algorithm"]["geometry"] == {"name": "euclidean"}
    assert overlay(base, {"algorithm": {"geometry": "adaptive_diagonal"}}) == base
    assert overlay({"algorithm": "obbo"}, {"algorithm": {"lr": 1}}) == {"algorithm": {"name": "obbo", "lr": 1}}
    assert overlay({"a": {"b": 1}}, {"a": None}) == {"a": None}


def test_name_may_come_after_its_arguments():
    expected = {"algorithm": {"window": 5, "name": "sobow"}, "seed": 1}
    assert nested({"algorithm.window": 5, "algorithm": "sobow", "seed": 1}) == expected
    assert section({"algorithm": {"inner": "x"}}, "algorithm.inner") == {"name": "x"}
    assert section({}, "algorithm.inner") == {}
    assert component_class({"algorithm": "obbo"}, "algorithm") is OBBO


def test_embedded_default_applies_to_few_shot_tasks_and_our_algorithms_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_layers.py").write_text("from obbo_lightning import OBBO\nclass Own(OBBO):\n    '''Own.'''\n")
    default = config_of()
    assert config_of("--data", "fc100")["algorithm"] == default["algorithm"]
    assert config_of("--data", "fc100")["problem"]["network"]["filters"] == 32
    vectors = config_of("--data", "examples", "--data.path", "x.npz")
    assert vectors["problem"]["network"]["widths"] == [64, 64]  # an MLP, which takes any shape
    other = config_of("--data", "quadratic")
    assert (other["rounds"], other["on_nonfinite"], other["algorithm"]["inner"]["steps"]) == (100, "raise", 20)
    sobow = config_of("--algorithm", "sobow", "--algorithm.window", "4")["algorithm"]
    assert (sobow["window"], sobow["discount"], sobow["inner"]["steps"]) == (4, 1.0, 5)
    assert "geometry" not in sobow
    sobbo = config_of("--algorithm", "sobbo")["algorithm"]
    assert (sobbo["hypergradient"]["name"], sobbo["inner"]["batch_size"]) == ("stochastic_neumann", 20)
    own = config_of("--algorithm", "mine_for_layers.py:Own")["algorithm"]
    assert (own["lr"], own["inner"]["steps"]) == (None, 20)


# Types and defaults


def test_completed_configuration_has_every_default_and_stays_as_it_is():
    for words in ([], ["--config", "quadratic"], ["--config", "market"], ["--config", "forgetting"]):
        config = config_of(*words)
        assert complete_config(config) == config
        assert yaml.safe_load(yaml.safe_dump(config)) == config
        assert config["algorithm"]["inner"]["name"]
        assert config["trainer"] == {"accelerator": "auto", "devices": 1}


def test_defaults_are_those_of_the_module():
    config = complete_config(PLAIN)
    parameters = inspect.signature(OnlineBilevelModule).parameters
    for name in ("seed", "regret_window", "on_nonfinite", "tasks_per_round", "several_tasks"):
        assert config[name] == parameters[name].default, name


@pytest.mark.parametrize(
    "key", ["seed", "rounds", "threads", "evaluation.every", "evaluation.split", "algorithm.window"]
)
def test_key_with_a_default_must_have_a_value(key):
    with pytest.raises(ConfigError, match=rf"^{key} must have a value, got null"):
        complete_config(overlay(PLAIN, nested({key: None})))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rounds", "ten", "rounds must be an integer, got 'ten'"),
        ("rounds", [3], "rounds must be an integer, got [3]"),
        ("rounds", True, "rounds must be an integer, got True"),
        ("threads", "all", "threads must be an integer or auto, got 'all'"),
        ("logger", "mlflow", "logger must be csv or wandb or tensorboard, got 'mlflow'"),
        ("evaluation.baselines", "perhaps", "evaluation.baselines must be true or false, got 'perhaps'"),
        ("algorithm.lr", "fast", "algorithm.lr must be a number or auto or null, got 'fast'"),
        ("algorithm.inner.steps", 2.5, "algorithm.inner.steps must be an integer, got 2.5"),
        ("experiment", 3, "experiment must be text, got 3"),
        ("experiment", "a/b", "experiment must be a plain folder name, got 'a/b'"),
        ("experiment", "a..b", "experiment must be a plain folder name, got 'a..b'"),
        ("experiment", "", "experiment must be a plain folder name, got ''"),
        ("algorithm.windw", 3, "unknown key 'algorithm.windw' (value 3); did you mean 'algorithm.window'?"),
        ("round", 3, "unknown key 'round' (value 3); did you mean 'rounds'?"),
        ("algoritm", "obbo", "unknown key 'algoritm' (value 'obbo'); did you mean 'algorithm'?"),
        ("algorithm.steps", 3, "unknown key 'algorithm.steps' (value 3); did you mean 'algorithm.inner.steps'?"),
        ("data.path", "x", "(data is quadratic; --data NAME chooses another)"),
        ("wandb.colour", "x", "unknown key 'wandb.colour' (value 'x'); wandb takes project, name, group, tags"),
        ("trainer.max_epoch", 3, "unknown key 'trainer.max_epoch' (value 3); did you mean 'trainer.max_epochs'?"),
        ("trainer.devices", [[1]], "trainer.devices must be"),
        ("algorithm", {"name": 3}, "algorithm must be a name, got 3"),
        ("data", {"name": None}, "data.name must have a value, got null"),
    ],
)  # fmt: skip
def test_mistake_names_the_key_the_rule_and_the_value(key, value, message):
    with pytest.raises(ConfigError) as refusal:
        complete_config(overlay(PLAIN, nested({key: value})))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_argument_that_follows_from_the_tasks_cannot_be_set():
    with pytest.raises(ConfigError, match=r"problem\.network\.ways cannot be set, got 3: it follows from the tasks"):
        config_of("--problem.network.ways", "3")


def test_own_component_needs_its_required_arguments_and_takes_mappings(tmp_path, monkeypatch):
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


# The Trainer


@pytest.mark.parametrize(("key", "instead"), FIXED_TRAINER_ARGUMENTS.items())
def test_trainer_argument_that_the_run_sets_is_refused_with_its_replacement(key, instead):
    value = {"gradient_clip_algorithm": "norm", "inference_mode": False, "use_distributed_sampler": False}.get(key, 3)
    with pytest.raises(ConfigError) as refusal:
        complete_config(overlay(PLAIN, {"trainer": {key: value}}))
    assert str(refusal.value) == f"trainer.{key} cannot be set for an online run, got {value!r}: {instead}"


@pytest.mark.parametrize(
    "callbacks",
    [
        "{name: Timer, duration: '00:00:01:00'}",
        "[{name: lightning.pytorch.callbacks.Timer, duration: '00:00:01:00'}]",
    ],
)
def test_callback_is_written_like_any_component(callbacks):
    config = config_of("--trainer.callbacks", callbacks)
    (entry,) = callback_entries(config["trainer"])
    assert entry["duration"] == "00:00:01:00"
    (timer,) = [c for c in make_trainer(config).callbacks if isinstance(c, L.pytorch.callbacks.Timer)]
    assert timer.time_remaining() == 60.0


def test_own_callback_comes_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_callback.py").write_text(
        "import lightning as L\n"
        "class Mine(L.Callback):\n"
        "    def __init__(self, every: int = 3):\n"
        "        self.every = every\n"
    )
    config = config_of("--trainer.callbacks", "[{name: 'own_callback.py:Mine', every: 7}]")
    assert callback_entries(config["trainer"])[0]["name"] == f"{tmp_path / 'own_callback.py'}:Mine"
    assert list(config["component_files"]) == [str(tmp_path / "own_callback.py")]
    (mine,) = [c for c in make_trainer(config).callbacks if type(c).__name__ == "Mine"]
    assert mine.every == 7


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ("Timr", "trainer.callbacks must be one of .*did you mean 'Timer'"),
        ("{name: Timer, duratoin: 3}", "unknown key 'trainer.callbacks.duratoin' .*did you mean .*duration"),
        ("{name: EarlyStopping, monitor: loss, patience: often}", "trainer.callbacks.patience must be an integer, got"),
        ("{name: EarlyStopping}", "trainer.callbacks.monitor"),
        ("{name: obbo_lightning.OBBO}", "trainer.callbacks must extend Callback"),
        ("3", "trainer.callbacks must be names, each with its arguments, got 3"),
        ("{duration: 3}", "trainer.callbacks must be names, each with its arguments, got"),
    ],
)
def test_mistake_in_a_callback_is_one_line(callbacks, message):
    with pytest.raises(ValueError, match=message) as refusal:
        config_of("--trainer.callbacks", callbacks)
    assert "\n" not in str(refusal.value)


# Help


def test_help_has_one_line_per_flag_with_value_and_meaning():
    lines = help_text(parse_arguments(["--algorithm", "sobow", "--rounds", "77", "--data", "images"])[0]).splitlines()
    assert len(lines) < 75
    found = {line.split()[0]: line for line in lines if line}
    assert found["--rounds"].split(maxsplit=2)[1:] == ["77", "T, number of rounds"]
    assert "w, window length" in found["--algorithm.window"]
    assert "one of obbo, sobbo, sobow" in found["--algorithm"]
    assert {"--algorithm.discount", "--algorithm.inner.steps", "--data.order"} <= set(found)
    assert "--data.path" in found  # also without a path, which a run needs
    assert "--algorithm.geometry.rho" not in found
    assert not any(line.startswith("  --trainer") for line in lines)
