"""Several processes that share a round: what each computes, and that two equal one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DDPStrategy
from processes import Forked, wait_for
from small_runs import TINY, read_table
from toy import SIX, Nonlinear
from two_processes import DecayModule, RecordingTuner, tuning_rows

from obbo_lightning import cli
from obbo_lightning.config.parse import flatten
from obbo_lightning.core.memory import InnerState, TaskEntry
from obbo_lightning.training.distributed import Processes, local_processes, lost_rank, require_strategy

pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
HERE = Path(__file__).parent
CPU = torch.device("cpu")


def make_processes(rank, lanes=1, tasks=1, other=0.0):
    """Return those of one of two ranks; ``other`` is what the other one has in a reduction."""
    reduced = {"sum": torch.add, "max": torch.maximum}
    strategy = SimpleNamespace(reduce=lambda values, reduce_op: reduced[reduce_op](values, torch.tensor(other)))
    return Processes(SimpleNamespace(global_rank=rank, world_size=2, strategy=strategy), lanes, tasks)


@pytest.fixture
def gathered(monkeypatch):
    """Answers of ``all_gather_object``: what both ranks have, one per call."""
    answers = []

    def gather(found, value):
        found[:] = answers.pop(0)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return answers


@pytest.mark.parametrize(("own", "other"), [(15, 0.0), (0, 15.0), (2, 15.0)])
def test_the_signal_of_one_rank_is_that_of_all_and_two_are_not_added(own, other):
    assert make_processes(0, tasks=2, other=other).largest(own, CPU) == 15


def test_every_rank_has_its_own_tasks_or_its_own_lanes():
    by_tasks, by_lanes = make_processes(1, tasks=4), make_processes(1, lanes=5)
    assert by_tasks.select(["a", "b", "c", "d"]) == ["c", "d"]
    rounds = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    assert make_processes(0, tasks=4).select_entries(rounds) == [["a", "b"], ["e", "f"]]
    assert by_tasks.select_entries(rounds) == [["c", "d"], ["g", "h"]]
    assert (by_tasks.shard.first, by_tasks.shard.tasks, by_tasks.shard.lanes) == (2, 4, None)
    assert (by_lanes.shard.first, by_lanes.shard.tasks, by_lanes.shard.lanes) == (0, 1, slice(2, 5))
    # the mean over all four tasks is the sum of the contributions of both ranks
    values = [torch.tensor([float(v)]) for v in (1, 2, 3, 6)]
    parts = [make_processes(r, tasks=4).shard.mean(values[2 * r : 2 * r + 2], 1) for r in range(2)]
    assert float(sum(parts)) == 3.0


def test_past_tasks_and_inner_states_are_gathered_in_the_order_of_the_tasks(gathered):
    task = {"x": torch.zeros(1)}
    entries = [TaskEntry(task, InnerState(torch.full((1, 2), float(n)))) for n in range(4)]
    gathered += [[[entries[:2]], [entries[2:]]]] * 2
    processes = make_processes(1, tasks=4)
    (found,) = processes.gather_entries([entries[2:]])
    states = processes.gather_states([entry.state for entry in entries[2:]])
    for both in ([entry.state for entry in found], states):
        assert [float(state.inner[0, 0]) for state in both] == [0.0, 1.0, 2.0, 3.0]


def test_the_lanes_of_inner_states_are_joined_from_the_ranks_that_compute_them(gathered):
    lanes, task = torch.arange(1.0, 6.0).unsqueeze(-1), {"x": torch.zeros(1)}
    first, second = lanes.clone(), lanes.clone()
    first[2:], second[:2] = 0, 0  # each has zeros where the other computes
    parts = [TaskEntry(task, InnerState(part, linear_solution=10 * part)) for part in (first, second)]
    gathered += [[[parts[:1]], [parts[1:]]]] * 2
    (state,) = make_processes(0, lanes=5).gather_states([parts[0].state])
    ((entry,),) = make_processes(0, lanes=5).gather_entries([parts[:1]])
    assert entry.task is task
    for joined in (state, entry.state):
        assert joined.inner.equal(lanes)
        assert joined.linear_solution.equal(10 * lanes)
        assert joined.solver_state is None


def test_a_single_process_asks_no_other():
    alone = Processes(SimpleNamespace(global_rank=0, world_size=1, strategy=None), 3, 1)
    state = InnerState(torch.zeros(3, 1))
    assert alone.gather_states([state]) == [state]
    assert alone.gather_entries([[TaskEntry({}, state)]]) == [[TaskEntry({}, state)]]
    assert alone.largest(15, CPU) == 15
    assert (alone.shard.all_reduce, alone.shard.lanes) == (None, None)


class Divisible(Nonlinear):
    def select_lanes(self, task, lanes):
        return self, task


@pytest.mark.parametrize(
    ("ranks", "lanes", "tasks", "problem", "refused"),
    [
        (1, 1, 3, Nonlinear, False),
        (2, 2, 1, Divisible, False),  # a lane for each
        (2, 5, 1, Divisible, False),
        (3, 2, 1, Divisible, True),
        (2, 1, 1, Divisible, True),
        (2, 2, 1, Nonlinear, True),
        (2, 1, 2, Nonlinear, False),
        (2, 1, 4, Nonlinear, False),
        (2, 8, 3, Divisible, True),
    ],
)
def test_processes_share_tasks_or_lanes(ranks, lanes, tasks, problem, refused):
    message = f"tasks_per_round must be a multiple of the {ranks} processes, got {tasks}"
    trainer = SimpleNamespace(strategy=DDPStrategy(), world_size=ranks)
    with pytest.raises(ValueError, match=message) if refused else contextlib.nullcontext():
        require_strategy(trainer, problem(), lanes, tasks)


def test_other_strategies_are_refused_also_for_one_process():
    trainer = SimpleNamespace(strategy=SimpleNamespace(), world_size=1)
    with pytest.raises(ValueError, match=r"trainer\.strategy must be auto or ddp, got SimpleNamespace"):
        require_strategy(trainer, Divisible(), 4, 2)


def test_processes_of_this_machine_are_those_of_the_trainer_or_of_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [local_processes(d) for d in (2, "3", [0, 1, 5], "auto", -1, 0, [])] == [2, 3, 3, 1, 1, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_processes(1) == local_processes("auto") == 4


@pytest.mark.parametrize(
    ("message", "initialized", "lost"),
    [
        ("[gloo] x", True, True),
        ("Connection reset by peer", True, True),
        ("a defect", True, False),
        ("[gloo] x", False, False),
    ],
)
def test_a_lost_process_is_told_from_a_defect(message, initialized, lost, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: initialized)
    assert lost_rank(RuntimeError(message)) is lost


# Runs.

SMALL = ["--rounds", "12", "--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "3"]
SMALL += ["--evaluation.every", "6", "--checkpoint.every", "5", "--tasks_per_round", "2"]
SMALL += ["--algorithm.inner.steps", "2"]
DOUBLE = ["--trainer.accelerator", "cpu", "--trainer.precision", "64", "--trainer.enable_progress_bar", "false"]
MARKET = ["--config", "market", "--rounds", "12", "--data.subset", "30", "--data.subsets", "12", "--data.horizon", "10"]
MARKET += ["--evaluation.every", "6"]
JOBS = {name: ["--algorithm", name, *SMALL] for name in SIX}
JOBS |= {f"market_{name}": [*MARKET, "--algorithm", name] for name in ("obbo", "oagd", "sobbo")}
QUADRATIC = ["--config", "quadratic", "--rounds", "12", "--evaluation.tasks", "3", "--algorithm.inner.steps", "5"]
JOBS["quadratic_previous"] = [*QUADRATIC, "--tasks_per_round", "4", "--algorithm", "oagd", "--algorithm.window", "3"]
JOBS["quadratic_previous"] += ["--algorithm.hypergradient.steps", "5"]
JOBS["nan"] = [*QUADRATIC, "--data", "two_processes.NotFinite", "--tasks_per_round", "2", "--on_nonfinite", "skip"]
JOBS["groups"] = ["--data", f"{HERE.parent / 'small_runs.py'}:EveryFile", *TINY, "--rounds", "12"]
JOBS["groups"] += ["--tasks_per_round", "2"]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def only_run(folder):
    (run,) = folder.glob("*/*")
    return run


def rows_of(run):
    lines = (run / "metrics.csv").read_text().splitlines()[1:]
    return [[float(x) if x else 0.0 for x in line.split(",")] for line in lines]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--algorithm.hypergradient", "conjugate_gradient"],
        ["--algorithm.hypergradient", "unrolled"],
        ["--algorithm", "sobbo", "--algorithm.inner.batch_size", "5"],  # which samples: never together
    ],
    ids=["fixed_point", "conjugate_gradient", "unrolled", "sobbo"],
)
def test_few_shot_tasks_that_are_solved_together_give_the_run_of_a_loop(flags, tmp_path, no_figures):
    flags = ["fit", *SMALL, *DOUBLE, *flags, "--rounds", "3", "--problem.learn_proximity", "true"]
    for several in ("loop", "vmap"):
        assert cli.main([*flags, "--several_tasks", several, "--output", str(tmp_path / several)]) == 0
    loop, vmap = (rows_of(only_run(tmp_path / several)) for several in ("loop", "vmap"))
    assert vmap == (loop if "sobbo" in flags else [pytest.approx(row, rel=1e-10, abs=1e-10) for row in loop])


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """Every job in one process, and in two that torchrun starts."""
    root = tmp_path_factory.mktemp("processes")
    jobs = [["fit", *f, *DOUBLE, "--trainer.devices", "2", "--output", str(root / "two" / n)] for n, f in JOBS.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / "two_processes.py"), str(root), json.dumps(jobs)]
    two = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obbo_lightning.training.run.draw_figures", lambda *arguments: [])
        for name, flags in JOBS.items():
            assert cli.main(["fit", *flags, *DOUBLE, "--output", str(root / "one" / name)]) == 0
    _, error = two.communicate(timeout=400)
    assert two.returncode == 0, error[-3000:]
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_compute_what_one_does(one_and_two, name):
    one, two = (only_run(one_and_two / kind / name) for kind in ("one", "two"))
    assert len(rows_of(one)) == 12
    for row, other in zip(rows_of(one), rows_of(two), strict=True):
        assert other == pytest.approx(row, rel=1e-12, abs=1e-12, nan_ok=True)
    summaries = [dict(flatten(json.loads((run / "summary.json").read_text()))) for run in (one, two)]
    assert summaries[0].keys() == summaries[1].keys()
    for key, value in summaries[0].items():
        if key != "seconds":
            expected = pytest.approx(value, rel=1e-12) if isinstance(value, (float, list)) else value
            assert summaries[1][key] == expected, key
    assert ("tuning.weight.gain" in summaries[0]) == (name == "groups")
    # rank 0 alone has made a run directory
    assert {"config.yaml", "metrics.csv", "summary.json", "checkpoints"} <= {path.name for path in two.iterdir()}


@pytest.mark.slow
def test_a_task_that_is_not_finite_on_one_rank_is_skipped_by_both(one_and_two):
    """That both have the same λ afterwards is in the numbers of the later rounds, which equal those of one process."""
    rows = read_table(only_run(one_and_two / "two" / "nan") / "metrics.csv")
    assert [int(row["skipped"]) for row in rows] == [0, 1, *[0] * 10]


@pytest.mark.slow
def test_ranks_that_tune_average_their_hypergradients(one_and_two):
    one, two = (json.loads((one_and_two / f"tuned-{rank}.json").read_text()) for rank in range(2))
    assert one == two
    rows = tuning_rows()
    parts = [tuple(v[rank::2][:4] for v in rows) for rank in range(2)]
    alone = []
    for part in parts:
        module = DecayModule()
        optimizer = module.configure_optimizers()
        alone.append(RecordingTuner().step(module, part, tuple(v[:4] for v in rows), optimizer))
    assert one["hypergradients"][0] == pytest.approx(float(sum(a.hypergradient for a in alone)) / 2, rel=1e-5)
    assert alone[0].hypergradient != alone[1].hypergradient
    assert one["decay"] != 0.1


def wait_for_checkpoint(folder):
    """Return the directory of a run as soon as it has a checkpoint."""
    wait_for(lambda: any(folder.glob("*/*/checkpoints/*.ckpt")))
    return only_run(folder)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_it_resumes_exactly_with_any_number_of_ranks(tmp_path, no_figures):
    flags = [*SMALL, *DOUBLE, "--algorithm", "oagd", "--rounds", "30", "--algorithm.window", "2"]
    command = [sys.executable, "-m", "obbo_lightning", "fit", *flags, "--trainer.devices", "2"]
    command += ["--output", str(tmp_path / "killed")]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **silent) as process:
        run = wait_for_checkpoint(tmp_path / "killed")
        (other,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(other), signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "another process of this run is gone; continue with: python -m obbo_lightning resume" in error
    assert not (run / "summary.json").exists()
    assert cli.main(["resume", str(run), "--devices", "1"]) == 0
    assert cli.main(["fit", *flags, "--output", str(tmp_path / "whole")]) == 0
    assert (run / "metrics.csv").read_bytes() == (only_run(tmp_path / "whole") / "metrics.csv").read_bytes()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def fork_rank(rank, port, folder, *arguments):
    """Start one of two ranks with the environment of torchrun."""
    folder.mkdir()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_zero_only, "rank", rank)
        for name, value in {**ranks, **address}.items():
            patch.setenv(name, str(value))
        return Forked(folder, *arguments)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_round(tmp_path):
    flags = ["fit", *SMALL, *DOUBLE, "--rounds", "1000", "--trainer.devices", "2", "--output", str(tmp_path / "runs")]
    port = free_port()
    first, second = (fork_rank(rank, port, tmp_path / str(rank), *flags) for rank in range(2))
    run = wait_for_checkpoint(tmp_path / "runs")
    second.send_signal(signal.SIGTERM)
    assert (first.wait(), second.wait()) == (143, 0)
    error = first.output()
    assert "stopped by SIGTERM after round" in error
    rounds = int(error.split("after round ")[1].split(";")[0])
    assert len(rows_of(run)) == rounds
    assert (run / "checkpoints" / f"round-{rounds:08d}.ckpt").is_file()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here")
def test_a_gpu_computes_what_the_cpu_computes(tmp_path):
    """Two tasks per round: a loop on the CPU, together on the GPU, float64."""
    for device in ("cpu", "cuda"):
        flags = [*SMALL, *DOUBLE, "--trainer.accelerator", device, "--output", str(tmp_path / device)]
        assert cli.main(["fit", *flags]) == 0
    for row, other in zip(*(rows_of(only_run(tmp_path / device)) for device in ("cpu", "cuda")), strict=True):
        assert other == pytest.approx(row, rel=1e-6, abs=1e-8)
