"""Small data sets, small runs, and what tests read from their files."""

import contextlib
import csv
import hashlib
import io
import json
import traceback
import warnings
from functools import partial

import numpy as np
import polars as pl
import torch
import yaml
from PIL import Image

from obbo_lightning import OBBO, ExactCheckpoints, FewShot, ParameterGroups, Positive, Problem, Stream, Tasks, cli
from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.config.serialization import to_config
from obbo_lightning.networks import MLP
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import decisive_keys, list_checkpoints, read_provenance
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams.stream import Metric

# Options of a Trainer that prints and writes nothing.
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"accelerator": "cpu", "max_epochs": 1}
FAST = ["--rounds", "3", "--evaluation.tasks", "3", "--algorithm.inner.steps", "2", "--trainer.accelerator", "cpu"]
VECTORS = {"kind": "examples", "shape": [2], "label": "label", "columns": None, "mean": [0, 0], "deviation": [1, 1]}


def striped_images(count, stripes, rng, size=(24, 20)):
    """Yield grey images; classes differ in the number of stripes."""
    rows = np.arange(size[0])[:, None] / size[0]
    for _ in range(count):
        wave = 127 + 100 * np.sin(2 * np.pi * (stripes * rows + rng.random()))
        yield (wave + rng.normal(0, 15, size)).clip(0, 255).astype(np.uint8)


def write_image_classes(root, stripes, each, seed=0):
    """Write a folder of images for each number of stripes."""
    rng = np.random.default_rng(seed)
    for number in stripes:
        (root / f"stripes{number}").mkdir(parents=True)
        for i, image in enumerate(striped_images(each, number, rng)):
            Image.fromarray(image).save(root / f"stripes{number}" / f"{i}.png")
    return root


def write_labelled_table(path, classes, each, columns=("a", "b", "label"), seed=0):
    """Write a CSV file whose classes differ in the means of two features."""
    rng = np.random.default_rng(seed)
    lines = [",".join(columns)]
    for number in classes:
        for _ in range(each):
            row = {"a": 100 + 10 * number + rng.normal(), "b": rng.normal() - number, "label": f"c{number}", "id": "x"}
            lines.append(",".join(str(row[name]) for name in columns))
    path.write_text("\n".join(lines) + "\n")
    return path


def fit(folder, *flags):
    """Return the directory of a short run with these flags."""
    assert cli.main(["fit", *FAST, *map(str, flags), "--output", str(folder / "runs")]) == 0
    (path,) = (folder / "runs").glob("*/*")
    return path


def fit_images(folder, path):
    """Return the directory of a short run on a folder of image classes."""
    size = ["--data.image_size", 16, "--data.ways", 2, "--data.shots", 3, "--data.queries", 3]
    return fit(folder, "--data", "images", "--data.path", path, *size, "--problem.network.filters", 4)


def fit_vectors(folder, *flags):
    """Return the directory of a short run on a table of vectors, which is gone afterwards."""
    file = write_labelled_table(folder / "train.csv", classes=range(10), each=8)
    path = fit(folder, "--data", "examples", "--data.path", file, "--data.ways", 2, "--data.shots", 3, *flags)
    file.unlink()
    return path


def save_few_shot_checkpoint(path, seed=5, batch_size=None, inputs=VECTORS, **options):
    """Save a checkpoint as a run does, of an MLP for two classes of two features; return its problem and λ."""
    problem = FewShot(partial(MLP, ways=2, shape=[2], widths=[4]), proximity=0.3, **options)
    algorithm = OBBO(inner=GradientDescent(steps=3, lr=0.2, batch_size=batch_size))
    outer = problem.initial_outer(seed)
    if problem.learn_proximity:
        outer[:, -1] = np.log(0.7)
    recipe = {"seed": seed, "problem": to_config(problem), "algorithm": to_config(algorithm)}
    torch.save({"global_step": 7, "module": recipe, "state_dict": {"outer": outer}, "inputs": inputs}, path)
    return problem, outer


# Six rounds of `EveryFile` that cost next to nothing.
TINY = ["--rounds", "6", "--evaluation.tasks", "1", "--evaluation.every", "3", "--checkpoint.every", "2"]
TINY += ["--algorithm.inner.steps", "1", "--algorithm.hypergradient.steps", "1", "--algorithm.inner.start", "previous"]
TINY += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


class Shrinkage(Problem):
    """g = ‖β − x‖² + λ ‖β‖², f = ‖β − y‖²; λ is a parameter group of one number."""

    groups = ParameterGroups(weight=Positive(0.5, upper=10.0))

    def inner_loss(self, outer, inner, task, sample=None):
        return (inner - task["x"]).square().sum(-1) + outer[:, 0] * inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner - task["y"]).square().sum(-1)

    def initial_inner(self, outer, task):
        return torch.zeros_like(task["x"])

    def scores(self, outer, inner, task):
        return {"mse": (inner - task["y"]).square().mean(-1)}


class EveryFile(Stream):
    """Stream whose runs have every file that a run can have.

    It has two lanes with names, validation and test tasks, baselines, digests of its sources and a skipped event.

    Args:
        drift: of the tasks.
        seed: of everything.
    """

    metric = Metric("mse")
    problem_type = Shrinkage

    def __init__(self, drift: float = 1.0, seed: int = 0):
        self.drift, self.seed = drift, seed
        self.train, self.validation, self.test = (Tasks(self.make_task(n), 100) for n in (0, 1000, 2000))
        self.lanes = pl.DataFrame({"ticker": ["=A", "B"], "timestamp": ["2026-01-02"] * 2, "naive_mse": [1.0, 2.0]})
        self.skipped = [{"ticker": "=C", "reason": "too short"}]

    def make_task(self, first):
        def make(t):
            generator = torch.Generator().manual_seed(10_000 * self.seed + first + t)
            x, y = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
            return {"x": x + self.drift, "y": y + self.drift / 2}

        return make

    def start(self, problem, seed):
        return torch.full((2, 1), 0.5, dtype=torch.float64)

    def baselines(self, problem, algorithm, rounds):
        return {"zero": [float(self.train[t]["y"].square().mean()) for t in range(rounds)]}

    def source_digests(self):
        return {"drift": str(self.drift), "seed": str(self.seed)}


# A comparison of six runs on synthetic prices.
SMALL_GRID = {
    "compare": "small",
    "base": "market",
    "settings": {
        "rounds": 20,
        "data": {"subset": 30, "subsets": 20, "horizon": 10},
        "checkpoint": {"every": 5},
        "evaluation": {"every": 10},
    },
    "grid": {"algorithm": ["obbo", "adam"], "algorithm.window": [1, 3], "data.start": [0.1, 0.5]},
}


def write_grid(folder, **changes):
    """Write the file of a comparison, `SMALL_GRID` with changes, and return its path."""
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({**SMALL_GRID, **changes}, sort_keys=False))
    return path


def config_of(*flags):
    """Return the complete configuration that `fit` makes of these flags."""
    return complete_config(parse_arguments(list(map(str, flags)))[0])


def call(*arguments):
    """Return exit code, standard error and standard output of a command; a traceback where it raises."""
    error, out = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")
        try:
            code = cli.main([str(word) for word in arguments])
        except Exception:
            return 1, traceback.format_exc(), ""
    return code, error.getvalue(), out.getvalue()


def read_table(path):
    """Return the rows of a CSV file."""
    return list(csv.DictReader(path.read_text().splitlines()))


def read_summary(run):
    """Return the summary of a finished run without its duration."""
    return {key: value for key, value in json.loads(run.summary.read_text()).items() if key != "seconds"}


def read_results(run):
    """Return the results of a finished run without durations; ``free`` depends on when it was evaluated."""
    rows = read_table(run.metrics)
    rounds = [{name: value for name, value in row.items() if not name.startswith("test_")} for row in rows[:6]]
    tables = {file.name: file.read_text().splitlines()[:7] for file in (run.outer, run.fingerprints) if file.exists()}
    closing = [file.read_bytes() for file in (run.metrics, run.baselines, run.events) if file.exists()]
    with contextlib.suppress(OSError), np.load(run.lanes) as lanes:
        closing.append({name: lanes[name].tolist() for name in lanes.files})
    newest = torch.load(list_checkpoints(run.checkpoints)[-1], weights_only=True)
    free = [*closing, read_summary(run), newest["state_dict"]["outer"].tolist()]
    return {**tables, "rounds": rounds, "free": free}


def rewrite_provenance(path):
    """Let an edited run be consistent: write provenance and checkpoints as if it had been run so."""
    run = RunDirectory(path)
    config, known, tables = read_config(run), read_provenance(run), {}
    for name in known.tables:
        *lines, last = (path / name).read_text().splitlines(keepends=True)
        tables[name] = {"rows": len(lines), "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(), "last": last}
    closing = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in known.closing}
    keys = decisive_keys(config)
    known._replace(config=keys, planned=config["rounds"], tables=tables, closing=closing).write(run)
    for file in list_checkpoints(run.checkpoints):
        edit_saved_provenance(file, config=keys)


def edit_saved_provenance(file, **changes):
    """Change the copy of the provenance in a checkpoint."""
    content = torch.load(file, weights_only=True)
    content["provenance"] |= changes
    ExactCheckpoints().save_checkpoint(content, file)
