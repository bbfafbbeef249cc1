"""W&B and TensorBoard: real runs whose files are read back, and W&B's options without W&B."""

import os
import struct
import time
from types import SimpleNamespace
from unittest.mock import Mock, PropertyMock, call

import pytest
from small_runs import TINY, read_summary, read_table

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.training import loggers

pytestmark = [
    pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

RUN = ["--rounds", "6", "--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "2",
       "--evaluation.every", "3", "--trainer.accelerator", "cpu"]  # fmt: skip


def read_wandb(path):
    """Return the records of a finished run; W&B's process writes the last ones a little after `finish` returns."""
    for _ in range(100):
        records = list(parse_wandb(path.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def parse_wandb(data):
    """Yield the protobuf records of a .wandb file: a LevelDB log of 32 KiB blocks after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_without_a_login_has_every_round_offline_and_prints_how_to_upload(
    tmp_path, monkeypatch, capsys, no_figures
):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    options = ["--wandb.project", "mine", "--wandb.group", "trial", "--wandb.tags", "[a, b]"]
    assert cli.main(["fit", *RUN, "--logger", "wandb", *options]) == 0
    printed = capsys.readouterr()
    assert "wandb sync" in printed.out.replace("\n", "")
    assert "Traceback" not in printed.err
    (file,) = tmp_path.glob("runs/default/*/wandb/offline-run-*/*.wandb")
    records = {}
    for record in read_wandb(file):
        kind = record.WhichOneof("record_type")
        records.setdefault(kind, []).append(getattr(record, kind))
    run = records["run"][0]
    assert (run.project, run.run_group, list(run.tags)) == ("mine", "trial", ["a", "b"])
    history = [{i.key or "/".join(i.nested_key): i.value_json for i in one.item} for one in records["history"]]
    rows = [row for row in history if "loss" in row]
    assert [int(float(row["round"])) for row in rows] == [1, 2, 3, 4, 5, 6]
    expected = {"accuracy", "regret/euclidean", "hypergradient_norm", "residual", "window_fill", "seconds"}
    assert expected <= rows[0].keys()
    assert [int(float(row["evaluations"])) for row in rows] == [11, 22, 33, 44, 55, 66]  # K = 5, 2 outer, J - 1 = 4
    assert [int(float(row["round"])) for row in rows if "test_accuracy" in row] == [3, 6]
    metrics = {one.name or one.glob_name: one.step_metric for one in records["metric"]}
    assert "round" in metrics
    assert "round" in metrics.values()
    assert records["artifact"]
    assert list(tmp_path.glob("runs/default/*/metrics.csv"))


def test_tensorboard_has_every_round(tmp_path, monkeypatch, no_figures):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", *RUN, "--logger", "tensorboard"]) == 0
    (directory,) = tmp_path.glob("runs/default/*/tensorboard")
    events = EventAccumulator(str(directory))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events.Scalars("test_accuracy")] == [3, 6]


def test_tensorboard_has_learned_values_automatic_steps_and_gains(tmp_path, monkeypatch, no_figures):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--data", "small_runs.EveryFile", *TINY, "--logger", "tensorboard"]) == 0
    (directory,) = tmp_path.glob("runs/default/*/tensorboard")
    events = EventAccumulator(str(directory))
    events.Reload()
    for name in ("hyper/weight", "lr/weight", "scale/weight", "agreement/weight", "held_out_gain/weight"):
        assert [e.step for e in events.Scalars(name)] == [1, 2, 3, 4, 5, 6], name
    run = RunDirectory(directory.parent)
    values = [float(row["weight"]) for row in read_table(run.outer)]
    assert [e.value for e in events.Scalars("hyper/weight")] == pytest.approx(values)
    tuned = read_summary(run)["tuning"]["weight"]
    assert [(e.step, e.value) for e in events.Scalars("tuner/gain/weight")] == [(6, pytest.approx(tuned["gain"]))]


def make_config(**wandb):
    options = {"project": None, "name": None, "group": None, "tags": [], **wandb}
    parts = {"algorithm": {"name": "mine.py:Own"}, "data": {"name": "market"}}
    return {"wandb": options, "logger": "wandb", "experiment": "e", **parts}


@pytest.mark.parametrize(
    ("asked", "variable", "project"),
    [("mine", "theirs", "mine"), (None, "theirs", "theirs"), (None, "", "obbo_lightning")],
)
def test_a_wandb_run_has_names_from_the_run_and_keeps_its_identity(asked, variable, project, tmp_path, monkeypatch):
    logger = Mock()
    monkeypatch.setattr(loggers, "WandbLogger", logger)
    monkeypatch.setattr(loggers, "has_login", lambda: False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", variable)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "of another run")  # without a sweep it is not this run's
    config, run = make_config(project=asked), RunDirectory(tmp_path)
    for _ in range(2):
        loggers.make_logger(config, run, None)
    first, second = (one.kwargs for one in logger.call_args_list)
    assert first["id"] == second["id"] == (tmp_path / "wandb-id").read_text() != "of another run"
    assert [first[name] for name in ("project", "name", "group")] == [project, tmp_path.name, "e"]
    assert first["tags"] == ["Own", "market"]
    assert (first["config"], first["save_dir"], first["resume"]) == (config, tmp_path, "allow")
    defined = logger.return_value.experiment.define_metric.call_args_list
    assert defined == [call("round"), call("*", step_metric="round")] * 2
    assert loggers.make_logger({"logger": "csv"}, run, None) is None
    loggers.make_logger(make_config(project="p", name="n", group="g", tags=["t"]), run, None)
    assert [logger.call_args.kwargs[name] for name in ("project", "name", "group", "tags")] == ["p", "n", "g", ["t"]]


@pytest.mark.parametrize(
    ("trouble", "modes"), [("no login", ["offline"]), ("refused", ["online", "offline"]), ("none", ["online"])]
)
def test_wandb_that_cannot_be_used_is_offline_at_once(trouble, modes, tmp_path, monkeypatch):
    import wandb

    class Refused:
        experiment = PropertyMock(side_effect=wandb.errors.CommError("a bad key"))

    def logger(**options):
        asked.append((os.environ.get("WANDB_MODE"), options["settings"].init_timeout))
        return Refused() if trouble == "refused" and os.environ["WANDB_MODE"] != "offline" else Mock()

    asked, printed = [], []
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_API_KEY", "" if trouble == "no login" else "x" * 40)
    monkeypatch.setattr(loggers, "WandbLogger", logger)
    loggers.make_logger(make_config(), RunDirectory(tmp_path), SimpleNamespace(print=printed.append))
    assert all(patience <= 10 for mode, patience in asked if mode == "online")
    assert [mode for mode, _ in asked] == modes
    assert printed == (["W&B cannot be reached (CommError): logging offline"] if trouble == "refused" else [])


@pytest.mark.parametrize(
    ("key", "netrc", "login"),
    [
        ("x", None, True),
        ("", None, False),
        ("", "machine api.wandb.ai login user password x\n", True),
        ("", "machine example.org login user password x\n", False),
        ("", "nonsense\n", False),
    ],
)
def test_a_login_is_a_key_or_a_line_about_wandb_in_netrc(key, netrc, login, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if netrc:
        (tmp_path / "netrc").write_text(netrc)
    assert loggers.has_login() is login


def test_figures_and_tables_are_uploaded_and_an_offline_run_prints_how(tmp_path, monkeypatch):
    import wandb

    run, console, artifact = RunDirectory(tmp_path), Mock(), Mock()
    monkeypatch.setattr(wandb, "Artifact", artifact)
    monkeypatch.setattr(wandb, "Image", os.path.basename)
    monkeypatch.setattr(loggers, "WandbLogger", Mock)
    run.figures.mkdir()
    for name in ("b.png", "a.png", "a.pdf"):
        (run.figures / name).touch()
    loggers.finish_logger(None, run, console)
    assert (artifact.mock_calls, console.mock_calls) == ([], [])
    for offline in (False, True):
        experiment = Mock(id="7", dir="/w/run-7/files", settings=SimpleNamespace(_offline=offline))
        artifact.reset_mock()
        loggers.finish_logger(Mock(experiment=experiment), run, console)
        artifact.assert_called_once_with("run-7", type="run")
        added = [os.path.basename(one.args[0]) for one in artifact.return_value.add_file.call_args_list]
        assert added == ["config.yaml", "metrics.csv", "summary.json", "a.png", "b.png"]
        figures = {"a": "a.png", "b": "b.png"}
        assert experiment.mock_calls == [call.log_artifact(artifact.return_value), call.log(figures), call.finish()]
    console.print.assert_called_once_with("W&B was offline; upload with: wandb sync /w/run-7", soft_wrap=True)
