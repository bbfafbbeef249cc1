"""Loggers, tried for real; W&B offline, its file read back."""

import os
import struct
import subprocess
import sys
import time

import pytest

from obbo_lightning import cli

pytestmark = [
    pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

RUN = ["--rounds", "6", "--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "2",
       "--evaluation.every", "3", "--trainer.accelerator", "cpu"]  # fmt: skip


def all_records(path):
    """Those of a run that was finished: W&B's own process writes the last ones a little after `finish` returns."""
    for _ in range(100):
        found = list(records(path))
        if any(one.WhichOneof("record_type") == "exit" for one in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def records(path):
    """The protobuf records of a .wandb file: a LevelDB log of 32 KiB blocks after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
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


def test_wandb_offline_keeps_everything_and_says_how_to_sync(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tags = ["--wandb.project", "mine", "--wandb.group", "trial", "--wandb.tags", "[a, b]"]
    assert cli.main(["fit", *RUN, "--logger", "wandb", *tags]) == 0
    printed = capsys.readouterr().out.replace("\n", "")
    assert "wandb sync" in printed
    (file,) = tmp_path.glob("runs/default/*/wandb/offline-run-*/*.wandb")
    found = all_records(file)
    (run,) = [r.run for r in found if r.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.run_group, list(run.tags)) == ("mine", "trial", ["a", "b"])
    rows, tests = [], []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            (rows if "loss" in items else tests).append(items)
    assert [int(float(row["round"])) for row in rows] == [1, 2, 3, 4, 5, 6]
    expected = {"accuracy", "regret/euclidean", "hypergradient_norm", "residual", "window_fill", "seconds"}
    assert [int(float(row["oracle_calls"])) for row in rows] == [11, 22, 33, 44, 55, 66]  # K = 5, 2 outer, J - 1 = 4
    assert expected <= rows[0].keys()
    tests = [row for row in tests if "test_accuracy" in row]
    assert [(int(float(row["round"])), int(float(row["oracle_calls"]))) for row in tests] == [(3, 33), (6, 66)]
    defined = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric
        for r in found
        if r.WhichOneof("record_type") == "metric"
    }
    assert "round" in defined
    assert "round" in defined.values()
    assert any(r.WhichOneof("record_type") == "artifact" for r in found)
    assert (tmp_path / "runs").exists()
    assert list(tmp_path.glob("runs/default/*/metrics.csv"))


@pytest.mark.slow
def test_without_a_login_wandb_goes_on_offline(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "obbo_lightning", "fit", *RUN, "--logger", "wandb"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stdout.replace("\n", "")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("runs/default/*/wandb/offline-run-*/*.wandb"))


def test_tensorboard_gets_every_round(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", *RUN, "--logger", "tensorboard"]) == 0
    (directory,) = tmp_path.glob("runs/default/*/tensorboard")
    events = EventAccumulator(str(directory))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events.Scalars("test_accuracy")] == [3, 6]
