"""Several tasks a round, and several processes that share them."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from toy import SIX
from two_ranks import Tuned, Watched, batches_to_tune_on

from obbo_lightning import OAGD, OBBO, SOBBO, cli
from obbo_lightning.core.distributed import Shard, lanes_of_rank
from obbo_lightning.core.hypergradients import ConjugateGradient, FixedPoint, StochasticNeumann, Unrolled
from obbo_lightning.core.inner_solvers import GradientDescent
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import estimate, online, play
from obbo_lightning.geometry import AdaptiveDiagonal, Euclidean
from obbo_lightning.networks import CNN4
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.few_shot.synthetic import SyntheticStream
from obbo_lightning.streams.quadratic import QuadraticTasks

pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
F64 = torch.float64
HERE = Path(__file__).parent
SMALL = ["--rounds", "12", "--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "3"]
SMALL += [
    "--evaluation.every",
    "6",
    "--checkpoint.every",
    "5",
    "--tasks_per_round",
    "2",
    "--algorithm.inner.steps",
    "2",
]
CPU = ["--trainer.accelerator", "cpu", "--trainer.precision", "64", "--trainer.enable_progress_bar", "false"]
MARKET = ["--config", str(HERE.parents[1] / "configs" / "market.yaml"), "--rounds", "12", "--data.subset", "30"]
MARKET += ["--data.subsets", "12", "--data.horizon", "10", "--evaluation.every", "6"]
JOBS = {name: ["--algorithm", name, *SMALL] for name in SIX}
JOBS |= {f"market_{name}": [*MARKET, "--algorithm", name] for name in ("obbo", "oagd", "sobbo")}
JOBS["quadratic_previous"] = ["--config", str(HERE.parents[1] / "configs" / "quadratic.yaml"), "--rounds", "12"]
JOBS["quadratic_previous"] += ["--tasks_per_round", "4", "--evaluation.tasks", "3", "--algorithm", "oagd"]
JOBS["quadratic_previous"] += ["--algorithm.window", "3", "--algorithm.inner.steps", "5"]
JOBS["quadratic_previous"] += ["--algorithm.hypergradient.steps", "5"]


def tasks_of(count, dtype=F64):
    stream = SyntheticStream(image_size=16)
    return [{k: v.to(dtype) if v.is_floating_point() else v for k, v in stream.train[t].items()} for t in range(count)]


def test_the_hypergradient_of_a_round_is_the_mean_over_its_tasks():
    stream = QuadraticTasks(rounds=3, inner_dim=4, outer_dim=2)
    algorithm = OBBO(lr=0.1, window=1, geometry=Euclidean(), inner=GradientDescent(steps=5, lr=0.5))
    outer = stream.initial_outer() + 1
    (played,) = online(stream.problem, algorithm, [[stream[0], stream[1], stream[2]]], outer)
    alone = [
        estimate(stream.problem, algorithm, outer, stream[t], InnerState(), Key(0, 0)).hypergradient for t in range(3)
    ]
    assert torch.allclose(played.hypergradient, torch.stack(alone).mean(0), rtol=1e-14)
    assert torch.allclose(played.outer, outer - 0.1 * torch.stack(alone).mean(0), rtol=1e-14)
    assert len(played.states) == 3
    assert played.evaluations["gradients"] == 3 * (5 + 1 + 1)  # inner steps, outer gradient, the graph of the products


def test_every_task_of_a_round_goes_on_from_its_own_warm_start():
    stream = QuadraticTasks(rounds=8, inner_dim=4, outer_dim=2)
    algorithm = OAGD(window=2, lr=1e-9, inner=GradientDescent(steps=1, lr=0.5))  # λ stays
    rounds = [[stream[2 * t], stream[2 * t + 1]] for t in range(3)]
    *_, together = online(stream.problem, algorithm, rounds, stream.initial_outer())
    for slot in range(2):
        *_, alone = online(stream.problem, algorithm, [r[slot] for r in rounds], stream.initial_outer())
        assert torch.allclose(together.states[slot].inner, alone.states[0].inner, rtol=1e-6)


@pytest.mark.parametrize(
    "hypergradient", [FixedPoint(4, lr=0.02), ConjugateGradient(3), Unrolled()], ids=lambda h: type(h).__name__
)
def test_side_by_side_equals_the_loop(hypergradient):
    """torch.func.vmap over tasks against one after the other, float64."""
    problem, tasks = FewShot(partial(CNN4, image_size=16, filters=4), learn_proximity=True), tasks_of(3)
    algorithm = OBBO(inner=GradientDescent(steps=3, lr=0.05, start="outer"), hypergradient=hypergradient)
    found = []
    for together in (False, True):
        outer = torch.nn.Parameter(problem.initial_outer(0).to(F64))
        step = OuterStep(outer, algorithm)
        warms = [InnerState() for _ in tasks]
        for t in range(2):
            played = play(problem, algorithm, step, tasks, warms, Key(0, t), Shard(vmap=together))
            warms = played.states
        found.append(played)
    loop, vmap = found
    assert torch.allclose(loop.hypergradient, vmap.hypergradient, rtol=1e-10, atol=1e-12)
    assert torch.allclose(loop.outer, vmap.outer, rtol=1e-10, atol=1e-10)
    assert torch.allclose(loop.loss, vmap.loss, rtol=1e-10)
    assert torch.allclose(loop.inner_loss, vmap.inner_loss, rtol=1e-10)
    assert loop.scores["accuracy"] == vmap.scores["accuracy"]
    assert loop.evaluations == vmap.evaluations


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here")
def test_a_gpu_gives_what_the_cpu_gives(tmp_path):
    """Two tasks a round: a loop on the CPU, side by side on the GPU, float64."""
    for device in ("cpu", "cuda"):
        flags = [*SMALL, *CPU, "--trainer.accelerator", device, "--output", str(tmp_path / device)]
        assert cli.main(["fit", *flags]) == 0
    one, two = ((only(tmp_path / device) / "metrics.csv").read_text().splitlines() for device in ("cpu", "cuda"))
    for row, other in zip(one[1:], two[1:], strict=True):
        numbers = [[float(x) if x else 0.0 for x in line.split(",")] for line in (row, other)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-6, abs=1e-8)


def test_what_samples_is_never_solved_side_by_side():
    assert OBBO(inner=GradientDescent(), geometry=AdaptiveDiagonal()).supports_vmap
    assert not SOBBO().supports_vmap
    assert not OBBO(inner=GradientDescent(batch_size=3)).supports_vmap
    assert not OBBO(hypergradient=StochasticNeumann(3, 1.0)).supports_vmap
    tasks = tasks_of(2)
    problem = FewShot(partial(CNN4, image_size=16, filters=2))
    algorithm = SOBBO(
        inner=GradientDescent(steps=1, lr=0.05, start="outer", batch_size=5),
        hypergradient=StochasticNeumann(2, 10.0, batch_size=5),
    )
    outcomes = []
    for together in (False, True):
        step, share = (
            OuterStep(torch.nn.Parameter(problem.initial_outer(0).to(F64)), algorithm),
            Shard(vmap=together),
        )
        outcomes.append(play(problem, algorithm, step, tasks, [InnerState(), InnerState()], Key(), share).outer)
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("algorithm", [OBBO(lr=0.1, window=3), OAGD(lr=0.01, window=3), SOBBO(lr=0.1, window=3)],
                         ids=["obbo", "oagd", "sobbo"])  # fmt: skip
def test_lanes_that_are_divided_give_the_same_sum(algorithm):
    """Two shares of the lanes, computed one after the other, against all lanes at once: bit for bit."""
    stream = QuadraticTasks(rounds=4, lanes=5, inner_dim=4, outer_dim=2, noise=0.1)
    whole = list(online(stream.problem, algorithm, [stream[t] for t in range(4)], stream.initial_outer()))
    parts = [lanes_of_rank(rank, 2, 5) for rank in range(2)]
    outer, warms = stream.initial_outer(), [InnerState(), InnerState()]
    outers = [torch.nn.Parameter(outer.clone()) for _ in parts]
    kept: list[list[torch.Tensor]] = [[], []]

    def recorder(rank):
        return lambda values: kept[rank].append(values.clone()) or values

    def replayer(sums):
        return lambda values: sums.pop(0)

    steps = [OuterStep(o, algorithm) for o in outers]
    for t in range(4):
        states = [step.state_dict() for step in steps]
        befores = [o.detach().clone() for o in outers]
        kept = [[], []]
        for rank, step in enumerate(steps):  # first what each would send …
            share = Shard(first=0, tasks=1, lanes=parts[rank], total=recorder(rank))
            play(stream.problem, algorithm, step, stream[t], warms[rank], Key(0, t), share)
        sums = [a + b for a, b in zip(*kept, strict=True)]
        for rank, step in enumerate(steps):  # … then the round again, with the sum
            step.load_state_dict(states[rank])
            outers[rank].data.copy_(befores[rank])
            share = Shard(first=0, tasks=1, lanes=parts[rank], total=replayer(list(sums)))
            played = play(stream.problem, algorithm, step, stream[t], warms[rank], Key(0, t), share)
            warms[rank] = played.states[0]
            assert torch.equal(played.outer, whole[t].outer)
            assert torch.equal(played.loss, whole[t].loss)
            assert torch.equal(played.regret["exact"], whole[t].regret["exact"])
            assert played.evaluations == whole[t].evaluations
            mine = warms[rank].inner[parts[rank]]
            assert torch.equal(mine, whole[t].states[0].inner[parts[rank]])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.devices", "2"], "tasks_per_round must be a multiple of the 2 processes, got 1"),
        (["--trainer.devices", "2", "--tasks_per_round", "3"], "tasks_per_round must be a multiple of the 2 processes"),
        (["--tasks_per_round", "0"], "tasks_per_round must be an integer of at least 1, got 0"),
        (["--tasks_per_round", "4", "--rounds", "20000"], "rounds must be at most the stream's 20000 tasks, 4 a round"),
        (["--several_tasks", "both"], "several_tasks"),
        (["--trainer.devices", "2", "--trainer.strategy", "ddp_spawn", "--tasks_per_round", "2"], "must be ddp"),
        (["--trainer.devices", "2", "--trainer.strategy", "fsdp", "--tasks_per_round", "2"], "trainer"),
    ],
)
def test_processes_that_cannot_share_are_refused_in_one_line(flags, message, capsys, tmp_path):
    assert cli.main(["fit", *CPU, *flags, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}


@pytest.fixture(scope="module")
def alone_and_together(tmp_path_factory):
    """Every job in one process, and in two that torchrun starts."""
    root = tmp_path_factory.mktemp("ranks")
    for name, flags in JOBS.items():
        assert cli.main(["fit", *flags, *CPU, "--output", str(root / "alone" / name)]) == 0
    shared = [
        ["fit", *f, *CPU, "--trainer.devices", "2", "--output", str(root / "together" / n)] for n, f in JOBS.items()
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / "two_ranks.py"), str(root), json.dumps(shared)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def only(folder):
    (run,) = folder.glob("*/*")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_do_what_one_does(alone_and_together, name):
    """float64, gloo, 12 rounds: metrics.csv byte for byte, and with it losses, scores, regrets and calls."""
    one, two = (only(alone_and_together / kind / name) for kind in ("alone", "together"))
    mine, theirs = ((run / "metrics.csv").read_text().splitlines() for run in (one, two))
    assert len(mine) == 13
    if mine != theirs:
        for row, other in zip(mine[1:], theirs[1:], strict=True):
            numbers = [[float(x) if x else 0.0 for x in line.split(",")] for line in (row, other)]
            assert numbers[1] == pytest.approx(numbers[0], rel=1e-12, abs=1e-12)
    one, two = (json.loads((run / "summary.json").read_text()) for run in (one, two))
    assert one.keys() == two.keys()
    for key in one.keys() - {"seconds"}:
        assert two[key] == (pytest.approx(one[key], rel=1e-12) if isinstance(one[key], float) else one[key]), key


@pytest.mark.slow
def test_rank_0_alone_makes_a_run_directory(alone_and_together):
    for name in JOBS:
        run = only(alone_and_together / "together" / name)
        assert {"config.yaml", "metrics.csv", "summary.json", "checkpoints"} <= {p.name for p in run.iterdir()}


@pytest.mark.slow
def test_what_is_not_a_number_on_one_rank_is_skipped_by_both(alone_and_together):
    one, two = (json.loads((alone_and_together / f"nan-{rank}.json").read_text()) for rank in range(2))
    assert one == two
    assert [played["skipped"] for played in one] == [[False], [True], [False], [False]]


@pytest.mark.slow
def test_ranks_that_tune_average_their_hypergradients(alone_and_together):
    one, two = (json.loads((alone_and_together / f"tuned-{rank}.json").read_text()) for rank in range(2))
    assert one == two
    rows = batches_to_tune_on()
    parts = [tuple(v[rank::2][:4] for v in rows) for rank in range(2)]
    alone = [Watched().step(Tuned(), part, tuple(v[:4] for v in rows)) for part in parts]
    assert one["hypergradients"][0] == pytest.approx(float(sum(a.hypergradient for a in alone)) / 2, rel=1e-5)
    assert alone[0].hypergradient != alone[1].hypergradient
    assert one["decay"] != 0.1


def wait_for_rounds(folder, rounds, process):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        found = list(folder.glob("*/*/checkpoints/*.ckpt"))
        if found and max(int(p.stem.split("-")[1]) for p in found) >= rounds:
            return found[0].parents[1]
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of round {rounds}: {process.poll()}")


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in listed.split()]


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_it_resumes_exactly_with_any_number_of_ranks(tmp_path):
    flags = ["--algorithm", "oagd", *SMALL, *CPU, "--rounds", "40", "--algorithm.window", "2"]
    command = [sys.executable, "-m", "obbo_lightning", "fit", *flags, "--trainer.devices", "2"]
    process = subprocess.Popen([*command, "--output", str(tmp_path / "killed")], env=environment(), text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    run = wait_for_rounds(tmp_path / "killed", 5, process)
    (other,) = children(process.pid)
    os.kill(other, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "another process of this run is gone; go on with: python -m obbo_lightning resume" in error
    assert not (run / "summary.json").exists()
    assert cli.main(["resume", str(run), "--devices", "1"]) == 0
    assert cli.main(["fit", *flags, "--output", str(tmp_path / "whole")]) == 0
    assert (run / "metrics.csv").read_bytes() == (only(tmp_path / "whole") / "metrics.csv").read_bytes()


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_round(tmp_path):
    flags = [*SMALL, *CPU, "--rounds", "100", "--trainer.devices", "2", "--output", str(tmp_path / "runs")]
    process = subprocess.Popen([sys.executable, "-m", "obbo_lightning", "fit", *flags], env=environment(), text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    run = wait_for_rounds(tmp_path / "runs", 5, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopped by SIGTERM after round" in error
    rounds = int(error.split("after round ")[1].split(";")[0])
    assert len((run / "metrics.csv").read_text().splitlines()) == rounds + 1
    assert (run / "checkpoints" / f"round-{rounds:08d}.ckpt").is_file()


def test_all_algorithms_are_among_the_jobs():
    names = {flags[flags.index("--algorithm") + 1] for flags in JOBS.values()}
    assert names == {"obbo", "sobbo", "sobow", "oagd", "adam", "sgdm"}
