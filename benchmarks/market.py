"""Measure the cost of the market experiment against banded and dense solvers of its splines.

python -m benchmarks.market [--data.prices FILE --data.events FILE]
440 lanes (those of the files, or random walks), 560 training sites, float64.
"""

import argparse
import resource
import tempfile
import time
from statistics import median

import numpy as np
import torch
from scipy.linalg import cho_solve_banded, cholesky_banded

from benchmarks.interleaved import medians, report
from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.core.problem import Task
from obbo_lightning.problems.spline import SmoothingSpline, spline_task
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.training.run import fit, keep_freed_memory

LANES, SUBSET, ROUNDS = 440, 700, 600


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.prices", dest="prices")
    parser.add_argument("--data.events", dest="events")
    parser.add_argument("--turns", type=int, default=3, help="runs of `fit` of each kind")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    walks = torch.randn(SUBSET, LANES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumsum(0)
    task = spline_task(walks.T, training=torch.arange(SUBSET) % 5 != 2, standardise=True)
    solvers(task)
    if asked.prices:
        whole(asked.prices, asked.events or "auto", task, asked.turns)


def solvers(task: Task) -> None:
    """Compare the fit and derivative of all lanes with a loop of banded and of dense solves."""
    weight = torch.full((LANES, 1), 0.1, dtype=torch.float64)
    spline = SmoothingSpline()
    found = medians(
        {"ours": lambda: spline.hypergradient(weight, task), "banded": lambda: banded_loop(task, 0.1)}, repeats=21
    )
    began = time.perf_counter()
    dense = dense_solves(task, 0.1)
    dense_seconds = time.perf_counter() - began
    ours = spline.hypergradient(weight, task)[0][:, 0].numpy()
    assert np.allclose(banded_loop(task, 0.1), ours, rtol=1e-9)
    assert np.allclose(dense, ours, rtol=1e-9)
    report_at_least(
        f"one round of {LANES} lanes: {1000 * found['ours']:.2f} ms",
        [
            ("a loop over lanes with SciPy's banded Cholesky", found["banded"] / found["ours"], 15),
            ("dense solves", dense_seconds / found["ours"], 500),
        ],
    )


def whole(prices: str, events: str, task: Task, turns: int) -> None:
    """Compare `fit` (without imports, with reading the files) with the banded loop alone, and OAGD with OBBO."""
    seconds: dict[str, list[float]] = {"obbo": [], "oagd": [], "banded": []}
    for _ in range(turns):
        for name in ("obbo", "oagd"):
            flags = ["--config", "configs/market.yaml", "--algorithm", name]
            flags += ["--data.prices", prices, "--data.events", events]
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                settings = complete_config(parse_arguments(flags)[0])
                fit(settings, RunDirectory.create(folder, "cost", name), quiet=True)
                seconds[name].append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(20):
            banded_loop(task, 0.1)
        seconds["banded"].append((time.perf_counter() - began) * ROUNDS / 20)
    middle = {name: median(found) for name, found in seconds.items()}
    print()
    report_at_least(
        f"`fit` of {ROUNDS} rounds: {middle['obbo']:.1f} s",
        [("the banded loop alone", middle["banded"] / middle["obbo"], 5)],
    )
    print()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    report("ratios", [("OAGD (w = 25) against OBBO", middle["oagd"] / middle["obbo"], 30), ("memory, GB", memory, 2.0)])


def banded_loop(task: Task, weight: float) -> np.ndarray:
    """Return F' of every lane, by one banded solve per lane."""
    stiffness = 1 / np.diff(task["sites"].numpy())
    count = len(stiffness) + 1
    bands = np.zeros((2, count))
    bands[1] = 1
    bands[1, :-1] += weight * stiffness
    bands[1, 1:] += weight * stiffness
    bands[0, 1:] = -weight * stiffness
    slopes = []
    for values, held in zip(task["values"].numpy(), task["validation_values"].numpy(), strict=True):
        factor = cholesky_banded(bands, check_finite=False)
        solution = cho_solve_banded((factor, False), values, check_finite=False)
        force = np.diff(solution) * stiffness
        bent = np.concatenate([[0], force]) - np.concatenate([force, [0]])
        derivative = -cho_solve_banded((factor, False), bent, check_finite=False)
        slopes.append(slope(task, solution, derivative, held))
    return np.array(slopes)


def dense_solves(task: Task, weight: float) -> np.ndarray:
    """Return F' of every lane, by dense linear algebra."""
    differences = np.diff(np.eye(len(task["sites"])), axis=0)
    stiffness = differences.T @ np.diag(1 / np.diff(task["sites"].numpy())) @ differences
    slopes = []
    for values, held in zip(task["values"].numpy(), task["validation_values"].numpy(), strict=True):
        matrix = np.eye(len(stiffness)) + weight * stiffness
        solution = np.linalg.solve(matrix, values)
        slopes.append(slope(task, solution, -np.linalg.solve(matrix, stiffness @ solution), held))
    return np.array(slopes)


def slope(task: Task, solution: np.ndarray, derivative: np.ndarray, held: np.ndarray) -> float:
    """Return F' of one lane."""
    sites, asked = task["sites"].numpy(), task["validation_sites"].numpy()
    residual = np.interp(asked, sites, solution) - held
    return float(2 * residual @ np.interp(asked, sites, derivative))


def report_at_least(title: str, rows: list[tuple[str, float, float]]) -> None:
    """Print a Markdown table of how many times slower each alternative is, and the lower bounds."""
    print(f"| {title} | times slower | at least |\n|---|---|---|")
    for name, value, bound in rows:
        print(f"| {name} | {value:.3g} | {bound:g} |")


if __name__ == "__main__":
    main()
