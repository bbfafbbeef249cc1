"""Runs whose files were changed by hand, and that are to be what they say: their manifest is written again."""

import hashlib

import torch

from obbo_lightning.runs.checkpoints import list_checkpoints
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import decisive, read_provenance, write_provenance
from obbo_lightning.training.checkpoints import ExactCheckpoints


def as_if_played(path):
    """A run that was played so."""
    run = RunDirectory(path)
    config, known, tables = read_config(run), read_provenance(run), {}
    for name in known.tables:
        *lines, last = (path / name).read_text().splitlines(keepends=True)
        tables[name] = {"rows": len(lines), "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(), "last": last}
    closing = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in known.closing}
    manifest = known._replace(settings=decisive(config), planned=config["rounds"], tables=tables, closing=closing)
    write_provenance(run, manifest)
    for file in list_checkpoints(run.checkpoints):
        as_if_saved(file, decisive(config))


def as_if_saved(file, settings, **more):
    """A checkpoint of a run with these settings."""
    content = torch.load(file, weights_only=True)
    content["manifest"] |= {"settings": settings, **more}
    ExactCheckpoints().save_checkpoint(content, file)
