"""All six algorithms on one drifting quadratic stream, where the truth is known."""

import math
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from obbo_lightning.algorithms import make_algorithm
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.hypergradients import Estimator, FixedPoint, StochasticNeumann
from obbo_lightning.core.inner import GradientDescent
from obbo_lightning.core.rounds import Round, online
from obbo_lightning.core.validation import at_least
from obbo_lightning.streams.quadratic import QuadraticStream

ADAPTIVE_LR = 0.01  # rules that normalise the gradient move every coordinate by about lr, whatever its scale


def fit_quadratic(rounds: int, window: int, condition_number: float, seed: int) -> None:
    """Play the stream with every algorithm and print a table of exact regret and cost."""
    at_least("window", window, 1)
    stream = QuadraticStream(condition_number, rounds, noise=0.1, seed=seed)
    algorithms = matched_algorithms(stream, window)
    console = Console()
    table = Table(title=f"{rounds} rounds, w = {window}, κ_g = {condition_number:g}, seed {seed}")
    for heading in (
        "algorithm",
        "exact\nregret",
        "‖∇F_T‖",
        "‖d_T−∇F_T‖",
        "gradients\na round",
        "products\na round",
        "s",
    ):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right")
    columns = (TextColumn("{task.description:6}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for name, algorithm in algorithms.items():
            bar = progress.add_task(name, total=rounds)
            began, last = time.perf_counter(), None
            for played in online(
                stream.problem, algorithm, stream, stream.initial_outer(), seed=seed, regret_window=window
            ):
                last = played
                progress.advance(bar)
            if last is not None:
                table.add_row(name, *_row(stream, last), f"{time.perf_counter() - began:.1f}")
    console.print(table)
    console.print("Exact regret is Σ_t ‖(1/w) Σ_{i<w} ∇F_{t−i}(λ_{t−i})‖² with the true ∇F.\nSmaller is better.")


def matched_algorithms(stream: QuadraticStream, window: int) -> dict[str, Algorithm]:
    """All six with the same K, η, w, domain and solver accuracy; K, s and m follow the paper's theorems."""
    problem = stream.problem
    contraction = 1 - float(
        problem.strong_convexity.min() / problem.smoothness(stream.initial_outer(), stream[0]).max()
    )
    # K = log(T)/log(1/(1 − ημ)) + 1 with η = 1/ℓ; m likewise with w in the place of T
    rate = -math.log(contraction) if contraction > 0 else math.inf
    steps, terms = (math.ceil(math.log(n) / rate) + 1 for n in (len(stream), window))
    inner = GradientDescent(steps=steps, lr=1.0)
    estimator: Estimator = FixedPoint(steps=steps)
    euclidean_lr = 1 / float(problem.outer_smoothness.max() * window)
    common = {"inner": inner, "hypergradient": estimator, "domain": stream.domain}
    stochastic = {
        "inner": GradientDescent(steps=steps, lr=1.0, batch_size=window),
        "hypergradient": StochasticNeumann(max_terms=terms, batch_size=window),
    }
    return {
        "obbo": make_algorithm("obbo", **common, lr=ADAPTIVE_LR, window=window),
        "sobbo": make_algorithm("sobbo", **{**common, **stochastic}, lr=ADAPTIVE_LR, window=window),
        "sobow": make_algorithm("sobow", **common, lr=euclidean_lr, window=window, discount=1.0),
        "oagd": make_algorithm("oagd", **common, lr=euclidean_lr, window=window),
        "adam": make_algorithm("adam", **common, lr=ADAPTIVE_LR),
        "sgdm": make_algorithm("sgdm", **common, lr=euclidean_lr),
    }


def _row(stream: QuadraticStream, last: Round) -> list[str]:
    gradient, _ = stream.problem.hypergradient(last.step.outer, stream[-1])
    regret, error = last.step.regret["exact"], last.hypergradient_error
    numbers = [float(torch.as_tensor(x).max()) for x in (regret, gradient.norm(dim=-1), error)]
    return [*(f"{x:.4g}" for x in numbers), *(str(last.calls[k]) for k in ("gradients", "products"))]
