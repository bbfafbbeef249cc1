"""Number of threads of a process, and the bound on how long OpenMP spins."""

import os
import subprocess
import sys

import pytest
import torch

from obbo_lightning import threads
from obbo_lightning.threads import BOUNDS, bound_spinning, take_threads


def test_spinning_is_bounded_unless_the_environment_sets_a_bound(monkeypatch):
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    bound_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["KMP_BLOCKTIME"] == BOUNDS["KMP_BLOCKTIME"]


def test_the_command_line_bounds_spinning_before_it_imports_torch():
    script = """
import sys, os
class PrintBound:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("bound", os.environ.get("GOMP_SPINCOUNT"))
sys.meta_path.insert(0, PrintBound())
from obbo_lightning.cli import main
main(["fit", "--seedd", "3"])
"""
    clean = {k: v for k, v in os.environ.items() if k not in BOUNDS}
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"bound {BOUNDS['GOMP_SPINCOUNT']}"


@pytest.fixture
def torch_threads(monkeypatch):
    """Restore the number of threads after the test."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("initial", "cores", "processes", "expected"),
    [(8, 16, 1, 8), (8, 3, 1, 3), (8, 16, 2, 4), (8, 5, 2, 2), (2, 2, 7, 1)],
)
def test_auto_is_the_share_of_the_cores_of_each_process(
    initial, cores, processes, expected, torch_threads, monkeypatch
):
    monkeypatch.setattr(threads, "_initial_torch_threads", lambda: initial)
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert threads.share_of_cores(processes) == expected
    assert take_threads("auto", processes) == torch.get_num_threads() == expected


def test_the_number_of_the_environment_is_not_divided(torch_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "_initial_torch_threads", lambda: 3)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    assert take_threads("auto", processes=2) == 3


def test_auto_does_not_depend_on_a_number_that_was_set_before(torch_threads):
    usual = take_threads("auto")
    assert take_threads(usual + 2) == torch.get_num_threads() == usual + 2
    assert take_threads("auto") == usual


@pytest.mark.parametrize("asked", [0, -1, "two", True, 1.5])
def test_impossible_numbers_are_refused(asked):
    with pytest.raises(ValueError, match="threads must be auto, or an integer of at least 1"):
        take_threads(asked)


@pytest.mark.parametrize(
    ("files", "line", "quota"),
    [
        ({"a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, "0::/a/b", 1.5),
        ({"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, "0::/a/b", 2.0),
        ({"a/cpu.max": "max 100000"}, "0::/a", None),
        ({}, "4:cpu,cpuacct:/x", None),
    ],
)
def test_a_control_group_limits_the_cores(files, line, quota, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    (tmp_path / "own").write_text(line + "\n")
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    monkeypatch.setattr(threads, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert threads.usable_cores() == (12 if quota is None else int(quota))
    assert min(threads._quotas(), default=None) == quota
