"""Small data and small runs for the tests of serving."""

import numpy as np
from PIL import Image

from obbo_lightning import cli

FAST = ["--rounds", "3", "--evaluation.tasks", "3", "--algorithm.inner.steps", "2", "--trainer.accelerator", "cpu"]


def bars(count, stripes, rng, size=(24, 20)):
    """Grey images that differ in how many stripes there are."""
    rows = np.arange(size[0])[:, None] / size[0]
    for _ in range(count):
        wave = 127 + 100 * np.sin(2 * np.pi * (stripes * rows + rng.random()))
        yield (wave + rng.normal(0, 15, size)).clip(0, 255).astype(np.uint8)


def write_classes(root, stripes, each, seed=0):
    rng = np.random.default_rng(seed)
    for number in stripes:
        (root / f"stripes{number}").mkdir(parents=True)
        for i, image in enumerate(bars(each, number, rng)):
            Image.fromarray(image).save(root / f"stripes{number}" / f"{i}.png")
    return root


def played(folder, *flags):
    """The directory of a run that was played with these flags."""
    assert cli.main(["fit", *FAST, *flags, "--output", str(folder / "runs")]) == 0
    (path,) = (folder / "runs").glob("*/*")
    return path


def write_table(path, classes, each, columns=("a", "b", "label"), seed=0):
    rng = np.random.default_rng(seed)
    lines = [",".join(columns)]
    for number in classes:
        for _ in range(each):
            row = {"a": 100 + 10 * number + rng.normal(), "b": rng.normal() - number, "label": f"c{number}", "id": "x"}
            lines.append(",".join(str(row[name]) for name in columns))
    path.write_text("\n".join(lines) + "\n")
    return path
