"""The manifest of a run, kept while it is played: in its directory, and in every checkpoint."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from obbo_lightning.runs.directory import RunDirectory, summary_text
from obbo_lightning.runs.manifest import NOTHING, Manifest, first_manifest, read_manifest, write_manifest
from obbo_lightning.runs.table import RoundTable
from obbo_lightning.settings.files import Settings


class Keeper(Checkpoint):
    """Says what the run's tables hold whenever it is saved.

    A checkpoint callback, which Lightning calls after the others: all tables are on disk before their hashes are.

    Args:
        run: where to write.
        tables: those that a resumed run continues exactly; they are open when the first round is played.
    """

    def __init__(self, run: RunDirectory, tables: Callable[[], Sequence[RoundTable]]) -> None:
        self.run, self.tables = run, tables
        self.manifest: Manifest | None = None
        self.planned = 0

    def begin(self, settings: Settings) -> None:
        """Before config.yaml says so: with what the run is played from now on. Both stay true if it ends in between."""
        before, now = read_manifest(self.run), first_manifest(settings)
        self.planned = now.planned
        if before is not None:
            was = before.settings
            keys = [key for key in {**was, **now.settings} if was.get(key, was) != now.settings.get(key, now)]
            changed = {key: was.get(key, NOTHING) for key in keys}
            planned = min(before.planned, now.planned)
            now = now._replace(rounds=before.rounds, planned=planned, tables=before.tables, before=changed)
        self._keep(now)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From an older checkpoint than the newest: tables were cut behind it."""
        if self.manifest is not None and self.manifest.rounds != trainer.global_step:
            self._keep(self.manifest._replace(rounds=trainer.global_step, tables={}))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whoever asked for a checkpoint."""
        if self.manifest is not None:
            marks = {table.path.name: table.mark() for table in self.tables()}
            self._keep(
                self.manifest._replace(rounds=trainer.global_step, planned=self.planned, tables=marks, before={})
            )
            checkpoint["manifest"] = self.manifest.as_dict()

    def conclude(self, summary: dict[str, Any]) -> None:
        """Before the summary is written: what the files of a finished run are."""
        if self.manifest is not None:
            files = [self.run.baselines, self.run.tests, self.run.events, self.run.lanes]
            contents = {file.name: file.read_bytes() for file in files if file.is_file()}
            contents[self.run.summary.name] = summary_text(summary).encode()
            marks = {table.path.name: table.mark() for table in self.tables()}
            closing = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
            self._keep(self.manifest._replace(tables=marks, closing=closing))

    def _keep(self, manifest: Manifest) -> None:
        self.manifest = manifest
        write_manifest(self.run, manifest)
