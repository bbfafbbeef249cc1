"""A run that is killed, or whose disk is full, at any of its file operations continues to the same results."""

import builtins
import errno
import io
import os
import re
from pathlib import Path

import pytest
from small_runs import TINY, call, read_results

from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.table import RoundTable
from obbo_lightning.training import run as runs

RUN = ["--data", "small_runs.EveryFile", *TINY, "--rounds", "4"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Disk:
    """Counts operations on the files in a folder, and kills the process at the n-th.

    Args:
        folder: whose files count.
        last: n.
        full: raise "No space left on device" once instead.
    """

    def __init__(self, folder, last=10**9, full=False):
        self.folder, self.last, self.full, self.done = str(folder), last, full, []

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        places = [(os, name) for name in ("open", "replace", "unlink", "mkdir", "fsync", "pwrite", "ftruncate")]
        for owner, name in (*places, (builtins, "open"), (io, "open")):
            self.patch.setattr(owner, name, self.watched(getattr(owner, name), name))
        self.patch.setattr(RoundTable, "_write", self.torn(RoundTable._write))
        return self

    def __exit__(self, *error):
        self.patch.undo()

    def watched(self, function, name):
        def call(first, *given, **named):
            if isinstance(first, (str, os.PathLike)) and not os.fspath(first).startswith(self.folder):
                return function(first, *given, **named)
            mode = given[0] if given else named.get("mode", "r")
            if name != "open" or not (isinstance(mode, str) and mode.startswith("r")):
                self.operate(f"{name} {first}")
            return function(first, *given, **named)

        return call

    def torn(self, write):
        def call(table, row):
            try:
                self.operate(f"row of {table.path.name}")
            except BaseException:
                table._file.write("9,0.12")  # half of it
                table._file.flush()
                raise
            write(table, row)

        return call

    def operate(self, what):
        self.done.append(what)
        if self.full and len(self.done) == self.last:
            raise OSError(errno.ENOSPC, "No space left on device", what)
        if not self.full and len(self.done) >= self.last:
            raise Killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of an undisturbed run, and its number of operations."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "draw_figures", lambda *arguments: [])
        with Disk(folder) as disk:
            code, error, _ = call("fit", *RUN, "--output", folder)
        assert code == 0, error
        (run,) = folder.glob("*/*")
        assert len(disk.done) > 60
        yield read_results(RunDirectory(run)), len(disk.done)


def outcome(folder, undisturbed, last, full):
    """Return None where the run continues to its results, otherwise what went wrong."""
    with Disk(folder, last, full) as disk:
        try:
            code, error, _ = call("fit", *RUN, "--output", folder)
        except Killed:
            code, error = -9, ""
    what = f"{'full' if full else 'killed'} at {last}, {disk.done[-1]}: "
    if full and not (code in (0, 1, 2) and (code == 0 or error.count("\n") == 1)):
        return f"{what} exit code {code}: {error}"
    if code == 1 and not re.search("No space left on device.* continue with: python -m obbo_lightning resume", error):
        return f"{what} {error}"
    for run in map(RunDirectory, folder.glob("*/*")):
        if not run.config.exists():  # it has not started
            continue
        if not run.finished:
            code, error, _ = call("resume", run.path, "--trust")
            if code != 0:
                return f"{what} resume ends with {code}: {error}"
        if read_results(run) != undisturbed:
            return f"{what} other results"
        if list(run.path.rglob(".*.part")):
            return f"{what} something is left"
    return None


@pytest.mark.parametrize("full", [False, True], ids=["killed", "full"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "every"])
def test_nothing_is_lost_at_file_operations(full, every, tmp_path, undisturbed):
    results, count = undisturbed
    found = []
    for last in range(1, count + 1) if every else range(7 + full, count, count // 5):
        (tmp_path / str(last)).mkdir()
        found.append(outcome(tmp_path / str(last), results, last, full))
    assert not [one for one in found if one]


@pytest.mark.nightly
def test_nothing_is_lost_when_a_run_is_killed_twice(tmp_path, undisturbed):
    results, count = undisturbed
    for first in range(count // 4, count, count // 7):
        folder = tmp_path / str(first)
        folder.mkdir()
        with Disk(folder, first), pytest.raises(Killed):
            call("fit", *RUN, "--output", folder)
        (path,) = folder.glob("*/*")
        with Disk(Path(path), 20), pytest.raises(Killed):
            call("resume", path, "--trust")
        code, error, _ = call("resume", path, "--trust")
        assert code == 0, error
        assert read_results(RunDirectory(path)) == results
