"""A run of `fit` against one that is written out here in NumPy: nothing of the package but the tasks is used."""

import csv
import json

import numpy as np
import pytest

from obbo_lightning import Tasks, cli
from obbo_lightning.streams.quadratic import QuadraticStream

SEED, ROUNDS, WINDOW, REGRET_WINDOW, TASKS = 3, 12, 3, 4, 2
FLAGS = ["fit", "--config", "quadratic", "--seed", str(SEED), "--rounds", str(ROUNDS), "--tasks_per_round", str(TASKS)]
FLAGS += ["--regret_window", str(REGRET_WINDOW), "--algorithm.window", str(WINDOW), "--evaluation.tasks", "5"]
FLAGS += ["--evaluation.every", "5"]
# name: its flags, weights of the window's hypergradients from the newest on, steps K of the inner solver
METHODS = {
    "obbo": (["--algorithm.geometry", "euclidean", "--algorithm.lr", "0.002"], [1.0, 1.0, 1.0], 4),
    "sobow": (["--algorithm.discount", "0.5", "--algorithm.lr", "0.002"], [1.0, 0.5, 0.25], 1),
}


def matrices(data):
    problem = data.train.problem
    return problem.inner_matrix[0].numpy(), problem.coupling[0].numpy(), problem.ridge


def play(name):
    """λ_T, and a row a round: mean loss before learning, Euclidean regret; float64."""
    _, weights, steps = METHODS[name]
    data = QuadraticStream(noise=0.1, seed=SEED)
    a, b, ridge = matrices(data)
    outer, inners = np.zeros(4), [np.zeros(8) for _ in range(TASKS)]
    past, regret, rows = [], 0.0, []
    for t in range(ROUNDS):
        gradients, losses = [], []
        for j in range(TASKS):
            task = {key: value[0].numpy() for key, value in data.train[t * TASKS + j].items()}
            beta = inners[j]
            for _ in range(steps):
                beta = beta - 0.9 * (a @ beta - b @ outer - task["b"])
            inners[j] = beta
            by_inner = beta - task["c"]
            losses.append(0.5 * by_inner @ by_inner + 0.5 * ridge * outer @ outer)
            # the exact solution of A v = ∇_β f; ∇²_λβ g · v = −Bᵀ v
            gradients.append(ridge * outer + b.T @ np.linalg.solve(a, by_inner))
        past.insert(0, np.mean(gradients, axis=0))
        direction = sum(w * d for w, d in zip(weights, past, strict=False)) / sum(weights)
        mean = np.sum(past[:REGRET_WINDOW], axis=0) / REGRET_WINDOW
        regret += mean @ mean
        rows.append((np.mean(losses), regret))
        outer = outer - 0.002 * direction
    return outer, rows


def judged(outer, data):
    """F on the test tasks, whose inner problem is solved exactly."""
    a, b, ridge = matrices(data)
    found = []
    for i in range(5):
        task = {key: value[0].numpy() for key, value in data.test[i].items()}
        gap = np.linalg.solve(a, b @ outer + task["b"]) - task["c"]
        found.append(0.5 * gap @ gap + 0.5 * ridge * outer @ outer)
    return np.array(found)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_what_its_definition_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags, _, steps = METHODS[name]
    solve = ["--algorithm.hypergradient", "conjugate_gradient", "--algorithm.hypergradient.steps", "20"]
    inner = ["--algorithm.inner.steps", str(steps), "--algorithm.inner.lr", "0.9", "--algorithm.domain", "real"]
    poison = Tasks(lambda t: pytest.fail("a run looked at a validation task"), 5)
    monkeypatch.setattr(QuadraticStream, "validation", property(lambda self: poison, lambda self, tasks: None))
    assert cli.main([*FLAGS, "--algorithm", name, *flags, *solve, *inner]) == 0
    (run,) = (tmp_path / "runs" / "quadratic").iterdir()
    found = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    outer, rows = play(name)
    for row, (loss, regret) in zip(found, rows, strict=True):
        assert float(row["loss"]) == pytest.approx(loss, rel=1e-10)
        assert float(row["regret/euclidean"]) == pytest.approx(regret, rel=1e-10)
    summary = json.loads((run / "summary.json").read_text())
    data = QuadraticStream(noise=0.1, seed=SEED)
    untrained, trained = judged(np.zeros(4), data), judged(outer, data)
    gain = untrained - trained  # of a loss: lower is better
    assert summary["untrained_test_loss"] == pytest.approx(untrained.mean(), rel=1e-10)
    assert summary["test_loss"] == pytest.approx(trained.mean(), rel=1e-10)
    assert summary["test_loss_se"] == pytest.approx(trained.std(ddof=1) / 5**0.5, rel=1e-8)
    assert summary["gain"] == pytest.approx(gain.mean(), rel=1e-10)
    assert summary["gain"] > 0
    assert summary["gain_se"] == pytest.approx(gain.std(ddof=1) / 5**0.5, rel=1e-6)
    assert not summary["higher_is_better"]


def test_the_runs_seed_decides_tasks_start_and_draws(tmp_path, monkeypatch):
    """Of few-shot runs λ_1 and the tasks, of SOBBO also the samples."""
    monkeypatch.chdir(tmp_path)
    tiny = ["fit", "--rounds", "3", "--evaluation.tasks", "1", "--data.image_size", "16"]
    tiny += ["--problem.network.filters", "2"]
    tiny += ["--algorithm.inner.steps", "1", "--on_nonfinite", "skip"]
    losses = {}
    for seed in ("0", "3", "3"):
        assert cli.main([*tiny, "--seed", seed, "--output", f"out{seed}"]) == 0
        run = sorted((tmp_path / f"out{seed}" / "default").iterdir())[-1]
        losses.setdefault(seed, []).append((run / "metrics.csv").read_bytes())
    assert losses["3"][0] == losses["3"][1] != losses["0"][0]
    noisy = ["fit", "--config", "quadratic", "--algorithm", "sobbo", "--rounds", "3", "--evaluation.tasks", "1"]
    played = []
    for seed in (0, 1):
        # the same tasks for both: what is left of the seed are the draws
        monkeypatch.setattr(QuadraticStream, "__init__", pinned(QuadraticStream.__init__))
        assert cli.main([*noisy, "--seed", str(seed), "--output", f"draws{seed}"]) == 0
        (run,) = (tmp_path / f"draws{seed}" / "quadratic").iterdir()
        played.append(list(csv.DictReader((run / "metrics.csv").read_text().splitlines())))
    assert played[0][0]["test_loss"] == played[1][0]["test_loss"] == ""
    assert played[0][0]["hypergradient_norm"] != played[1][0]["hypergradient_norm"]


def test_the_start_follows_the_seed():
    from functools import partial

    from obbo_lightning import FewShot
    from obbo_lightning.config.parse import complete_config, parse_arguments
    from obbo_lightning.networks import CNN4
    from obbo_lightning.training.run import build

    small = ["--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "1", "--seed"]
    starts = {
        seed: build(complete_config(parse_arguments([*small, str(seed)])[0])).module.outer.detach() for seed in (0, 3)
    }
    problem = FewShot(partial(CNN4, filters=2, image_size=16))
    for seed, start in starts.items():
        assert start.equal(problem.initial_outer(seed))
    assert not starts[0].equal(starts[3])


def pinned(init):
    """The stream of seed 7, whatever the run's is."""

    def made(self, *args, seed=0, **settings):
        init(self, *args, **{**settings, "seed": 7})

    made.__signature__ = __import__("inspect").signature(init)
    return made
