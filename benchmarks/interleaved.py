"""Timing on a noisy machine: alternate the variants and compare medians."""

import time
from collections.abc import Callable
from statistics import median


def medians(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each action; all run in turn, ``repeats`` times after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: median(found) for name, found in seconds.items()}


def report(title: str, rows: list[tuple[str, float, float | None]]) -> None:
    """Print a Markdown table of ratios and their upper bounds."""
    print(f"| {title} | measured | at most |\n|---|---|---|")
    for name, value, bound in rows:
        print(f"| {name} | {value:.4g} | {'' if bound is None else f'{bound:.4g}'} |")
