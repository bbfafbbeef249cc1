"""A long run: what it holds in memory, and which files it has open, stay what they are."""

import os
from pathlib import Path

import lightning as L
import pytest
from small_runs import call

ROUNDS = 20_000
PAGE = os.sysconf("SC_PAGE_SIZE")


class Watched(L.Callback):
    """Looks at the process ten times."""

    seen: list[tuple[int, int]] = []  # noqa: RUF012 of the class, which the trainer makes an object of

    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step % (ROUNDS // 10) == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            self.seen.append((resident, len(os.listdir("/proc/self/fd"))))


@pytest.mark.nightly
def test_memory_and_open_files_are_flat(tmp_path, monkeypatch):
    monkeypatch.setattr("obbo_lightning.training.run.draw_figures", lambda *given: [])
    flags = ["--config", "quadratic", "--rounds", ROUNDS, "--evaluation.tasks", "1", "--evaluation.every", "1000"]
    flags += ["--trainer.callbacks", "[test_soak.Watched]", "--trainer.enable_progress_bar", "false"]
    code, said, _ = call("fit", *flags, "--output", tmp_path)
    assert code == 0, said
    memory, files = zip(*Watched.seen, strict=True)
    assert len(memory) == 10
    assert len(set(files[2:])) == 1
    assert max(memory[2:]) - memory[2] < 10e6  # bytes; a leak of one float a round and lane is 0.2 MB
