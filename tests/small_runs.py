"""Small data sets, and small runs and checkpoints of few-shot problems."""

from functools import partial

import numpy as np
import torch
from PIL import Image

from obbo_lightning import OBBO, FewShot, cli
from obbo_lightning.config.serialization import to_config
from obbo_lightning.networks import MLP
from obbo_lightning.solvers import GradientDescent

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
