"""Comparisons from runs that are written here: rates, events, what is left out; cells that are stopped or fail."""

import io
import os
import signal
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from obbo_lightning import cli
from obbo_lightning.config.registry import find_component
from obbo_lightning.experiments import compare, slurm, worker
from obbo_lightning.experiments.comparison import put_first, read_comparison
from obbo_lightning.experiments.comparison_tables import comparison_tables
from obbo_lightning.experiments.grid import Cell
from obbo_lightning.experiments.market_comparison import EVENT_COLUMNS, read_market
from obbo_lightning.experiments.rates import has_rates, read_rates
from obbo_lightning.experiments.runs import Run, label_runs
from obbo_lightning.runs.directory import RunDirectory


def a_run(root, name="obbo", seed=0, rounds=4, stream="quadratic", metrics=None, data=None, **summary):
    directory = RunDirectory(root / f"{name}-{seed}-{rounds}-{len(list(root.iterdir()))}")
    directory.path.mkdir()
    columns = {"loss": 0.5, "test_loss": 1.0, "test_loss_se": 0.1, "regret/euclidean": 2.0, "regret/exact": 3.0}
    columns |= {"hypergradient_norm": 1.0, "residual": 0.0, "gradients": 3.0, "products": 1.0, **(metrics or {})}
    table = pl.DataFrame({"round": np.arange(1.0, rounds + 1), **{k: np.full(rounds, v) for k, v in columns.items()}})
    found = {"algorithm": name, "seed": seed, "rounds": rounds, "metric": "loss", "test_tasks": 4, "skipped": 0}
    found |= {"untrained_test_loss": 2.0, "test_loss": 1.0, "test_loss_se": 0.1, "gain": 1.0, "gain_se": 0.2, **summary}
    settings = {"algorithm": {"name": name, "lr": 0.1}, "seed": seed, "rounds": rounds}
    settings["data"] = {"name": stream, "condition_number": 10.0, **(data or {})}
    return Run(directory, settings, found, table, find_component("data", stream), name)


def test_rates_have_a_row_for_each_run_with_an_exact_regret(tmp_path):
    sizes = [(4, 10.0), (8, 10.0), (4, 50.0)]
    runs = [
        a_run(
            tmp_path, name, seed, rounds,
            metrics={"regret/exact": 100.0 * rounds + number + seed}, data={"condition_number": number},
        )
        for name in ("sobow", "obbo")
        for seed in (0, 1)
        for rounds, number in sizes
    ]  # fmt: skip
    assert has_rates(runs)
    assert not has_rates(runs[:1])
    bad = [
        a_run(tmp_path, "obbo", seed, 4, metrics={"regret/exact": v}) for seed, v in ((5, 0.0), (6, np.inf), (7, -1.0))
    ]
    rates, left_out = read_rates([*runs, *bad])
    assert [str(one).partition(": ")[2] for one in left_out] == [
        "its exact regret is 0.0", "its exact regret is inf", "its exact regret is -1.0",
    ]  # fmt: skip
    (table,) = rates._asdict().values()
    expected = {
        (name, seed, rounds, number, 100.0 * rounds + number + seed)
        for name in ("obbo", "sobow") for seed in (0, 1) for rounds, number in sizes
    }  # fmt: skip
    assert set(table.rows()) == expected
    assert rates.labels == ["obbo", "sobow"]
    with pytest.raises(ValueError, match=r"report needs an exact regret, and found none: .* its exact regret is 0\.0"):
        read_rates(bad[:1])


def test_each_seed_is_once_and_lengths_are_those_of_most(tmp_path):
    runs = [a_run(tmp_path, "obbo", seed, rounds) for seed, rounds in ((9, 3), (0, 4), (1, 4), (0, 4), (2, 4))]
    kept, left_out = label_runs(runs)
    assert [(run.settings["seed"], run.settings["rounds"]) for run in kept] == [(0, 4), (1, 4), (2, 4)]
    assert [one.path for one in left_out] == [runs[0].directory.path, runs[3].directory.path]
    assert left_out[0].reason == "3 rounds, where the other seeds of obbo have 4"
    assert left_out[1].reason == f"obbo with seed 0 is in {runs[1].directory.path} already"


def test_a_table_hides_nothing_and_measures_nothing_that_was_not(tmp_path):
    runs = [a_run(tmp_path, "obbo", s, test_loss=1.0 + s, gain=0.5) for s in (0, 1)]
    runs += [a_run(tmp_path, "adam", 0, test_loss=None, metrics={"regret/euclidean": np.inf}, test_tasks=0)]
    comparison = read_comparison(runs)
    final, paired = comparison_tables(comparison)
    assert final.rows[0] == [
        "obbo",
        "0.1",
        "4",
        "2",
        "2.0 ± 0.0",
        "0.500 ± 0.000",
        "1.500 ± 0.500",
        "0.500 ± 0.000",
        "4",
    ]
    assert final.rows[1] == ["adam", "0.1", "4", "1", "not finite", "0.500", "", "", "4"]
    assert paired.rows[0][:2] == ["adam", "1"]
    assert put_first("adam", ["sobow", "adam", "obbo"]) == ["adam", "obbo", "sobow"]
    with pytest.raises(ValueError, match=r"--reference must be one of obbo; adam, got 'x'"):
        comparison.facing("x")
    assert comparison.facing("adam").labels == ["adam", "obbo"]


def a_market(root, name="obbo", seed=0, tickers=("A", "B", "C"), naive=1.0, value=2.0, rounds=(100, 200)):
    run = a_run(root, name, seed, stream="market")
    numbers = {column: [value + i for i in range(len(tickers))] for column in EVENT_COLUMNS[2:]}
    numbers["naive_mse"] = [naive + i for i in range(len(tickers))]
    pl.DataFrame({"ticker": tickers, "timestamp": ["2021-01-04"] * len(tickers), **numbers}).write_csv(
        run.directory.events
    )
    regret = np.outer(rounds, np.arange(1, len(tickers) + 1)) * value
    np.savez(run.directory.lanes, rounds=np.array(rounds), regret=regret)
    return run


def test_events_are_means_over_the_seeds_that_all_have(tmp_path):
    runs = [a_market(tmp_path, "obbo", seed, value=2.0 + seed) for seed in (0, 1, 2)]
    runs += [a_market(tmp_path, "adam", seed, value=5.0 + seed) for seed in (1, 2)]
    runs += [a_market(tmp_path, "sgdm", 1, tickers=("A", "B", "D")), a_market(tmp_path, "oagd", 1)]
    runs[-1].directory.lanes.write_text("?")
    found, left_out = read_market(runs)
    reasons = {one.path.name.partition("-")[0]: one.reason for one in left_out}
    assert reasons["sgdm"] == "it has other events than the first run"
    assert reasons["oagd"].startswith("it is damaged: ")
    assert reasons["obbo"] == "not all algorithms have the seed 0"
    assert found.labels == ["obbo", "adam"]
    assert found.column("obbo", "test_mse").tolist() == [3.5, 4.5, 5.5]
    assert found.column("adam", "weight").tolist() == [6.5, 7.5, 8.5]
    middles = found.regret.filter(pl.col("label") == "obbo")
    assert middles["round"].to_list() == [100, 200]
    assert middles["median"].to_list() == [700.0, 1400.0]
    assert middles["mad"].to_list() == [350.0, 700.0]
    with pytest.raises(ValueError, match=r"needs a seed that all have, got \[0\] for obbo; \[1\] for adam"):
        read_market([a_market(tmp_path, "obbo", 0), a_market(tmp_path, "adam", 1)])
    with pytest.raises(ValueError, match=r"one seed where each has its own simulated prices, got \[0, 1\]"):
        read_market([a_market(tmp_path, "obbo", seed, naive=1.0 + seed) for seed in (0, 1)])
    with pytest.raises(ValueError, match=r"report needs finished runs, and found none: .* it is damaged"):
        read_market(runs[-1:])


def test_a_damaged_report_is_one_line(tmp_path, capsys):
    (tmp_path / "runs.csv").write_text("label,seed\nobbo,many\n")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} holds a damaged report: ComputeError" in capsys.readouterr().err


class Launcher:
    """Finishes the cells that it is told to, one a look."""

    def __init__(self, finishes, on_wait=lambda: None):
        self.finishes, self.on_wait, self.started, self.stopped = list(finishes), on_wait, None, 0

    def start(self, cells, runs):
        self.started = [cell.name for cell in cells]

    def busy(self):
        if self.finishes:
            self.finishes.pop(0).summary.write_text("{}")
        return bool(self.finishes)

    def wait(self, seconds):
        self.on_wait()

    def stop(self):
        self.stopped += 1
        return "they go on"

    def last_words(self, run):
        return f"words of {run.path.name}"


def cells(tmp_path, finished=()):
    found, runs = [], []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        runs.append(RunDirectory(tmp_path / name))
        found.append(Cell(name, {"rounds": 10}))
        if name in finished:
            runs[-1].summary.write_text("{}")
    return found, runs


def test_only_unfinished_cells_are_played_and_those_that_stay_so_have_failed(tmp_path):
    found, runs = cells(tmp_path, ["a"])
    runs[2].timings.write_text("round\n1\n2\n3\n")
    launcher = Launcher([runs[1]])
    assert compare._played(runs, dict.fromkeys([run.path for run in runs], 10)) == 13
    failed = compare.run_cells(found, runs, launcher, Console(quiet=True))
    assert launcher.started == ["b", "c"]
    assert failed == [("c", "words of c")]
    assert launcher.stopped == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_told_to_the_launcher_and_handlers_are_given_back(signum, tmp_path, monkeypatch, capsys):
    found, runs = cells(tmp_path)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    launcher = Launcher(runs, lambda: signal.raise_signal(signum))
    with pytest.raises(compare.Interrupted, match=f"stopped by {signum.name}; they go on") as stop:
        compare.run_cells(found, runs, launcher, Console(quiet=True))
    assert stop.value.signum == signum
    assert launcher.stopped >= 1
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    (tmp_path / "grid.yaml").write_text("compare: g\nbase: quadratic\ngrid: {seed: [0]}\n")

    def interrupted(*arguments):
        raise compare.Interrupted(signum, "they go on")

    monkeypatch.setattr(compare, "run_cells", interrupted)
    flags = ["--config", str(tmp_path / "grid.yaml"), "--output", str(tmp_path)]
    assert cli.main(["compare", *flags]) == 128 + signum
    assert capsys.readouterr().err == f"obbo: stopped by {signum.name}; they go on\n"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (0, 0, ""),
        (143, 143, ""),
        (ValueError("rounds  must\nbe 1"), 2, "obbo: rounds must be 1\n"),
        (SystemExit(130), 130, ""),
        (SystemExit("words"), 1, ""),
        (SystemExit(None), 0, ""),
        (RuntimeError("a defect"), 1, "RuntimeError: a defect\n"),
    ],
)
def test_a_worker_returns_the_code_of_a_cell_and_all_words_go_to_its_log(end, code, said, tmp_path, monkeypatch, capfd):
    def resume(directory):
        print("playing", directory.name, flush=True)
        os.write(2, b"from below\n")
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr("obbo_lightning.training.resume.resume", resume)
    with capfd.disabled():
        assert worker.play(tmp_path) == code
        assert worker.play(tmp_path) == code
    log = (tmp_path / worker.LOG).read_text()
    assert log.count(f"playing {tmp_path.name}") == log.count("from below") == 2
    assert said in log


def test_when_nobody_asks_any_more_a_worker_saves_what_it_plays(monkeypatch):
    sent, asked = [], SimpleQueue()
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    worker._read_requests(io.StringIO("one\ntwo\n"), asked)
    assert [asked.get() for _ in range(3)] == ["one", "two", ""]
    assert sent == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.parametrize(
    ("code", "up", "queued"), [(0, False, 0), (143, True, 1), (143, False, 0), (1, False, 0), (1, True, 0)]
)
def test_a_job_whose_time_is_up_is_queued_again_and_one_that_failed_says_so(code, up, queued, tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    again = []
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR2, lambda *arguments: again.append(arguments))

    def play(directory):
        if up:
            signal.signal(signal.SIGTERM, lambda *arguments: None)  # as the recorder does
            signal.raise_signal(signal.SIGUSR2)
        return code

    monkeypatch.setattr(slurm, "play", play)
    monkeypatch.setattr(submitit, "JobEnvironment", lambda: SimpleNamespace(job_id="12_3"))
    monkeypatch.setenv("SLURM_NTASKS", "4")
    try:
        job = slurm.PlayCell(tmp_path)
        if code:
            with pytest.raises(SystemExit) as end:
                job()
            assert end.value.code == code
        else:
            job()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert len(again) == queued
    assert "SLURM_NTASKS" not in os.environ
    assert (tmp_path / slurm.LOG).read_text() == "Slurm job 12_3\n"
    assert job.checkpoint().function is job
    with pytest.raises(SystemExit) as end:
        slurm._stop(15, None)
    assert end.value.code == 143
