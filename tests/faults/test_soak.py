"""Memory and open files of a long run stay constant."""

import os
from pathlib import Path

import lightning as L
import pytest
from small_runs import call

ROUNDS = 20_000
PAGE = os.sysconf("SC_PAGE_SIZE")


class RecordResources(L.Callback):
    """Records memory and open files ten times."""

    seen: list[tuple[int, int]] = []  # noqa: RUF012 (of the class, which the Trainer instantiates)

    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step % (ROUNDS // 10) == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            self.seen.append((resident, len(os.listdir("/proc/self/fd"))))


@pytest.mark.nightly
def test_memory_and_open_files_stay_constant(tmp_path, no_figures):
    flags = ["--config", "quadratic", "--rounds", ROUNDS, "--evaluation.tasks", "1", "--evaluation.every", "1000"]
    flags += ["--trainer.callbacks", f"[{__file__}:RecordResources]", "--trainer.enable_progress_bar", "false"]
    code, error, _ = call("fit", *flags, "--output", tmp_path)
    assert code == 0, error
    memory, files = zip(*RecordResources.seen, strict=True)
    assert len(memory) == 10
    assert len(set(files[2:])) == 1
    assert max(memory[2:]) - memory[2] < 10e6  # bytes; a leak of one number per round is 0.2 MB
