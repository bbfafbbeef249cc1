"""Which tests notice a wrong line: a copy of the project, a map from lines to tests, and forks of one warm process."""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest

FAST = "not slow and not nightly and not gpu and not slurm"
LEFT_OUT = (
    ".git",
    ".venv",
    ".mutations",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    "runs",
    "build",
    "dist",
    "wandb",
)
# Imported before the first fork, so that no mutant waits for them; nothing of the project, which each child reads anew.
HEAVY = (
    *("torch", "lightning.pytorch", "torchmetrics", "torchvision", "numba", "scipy.stats", "scipy.optimize", "polars"),
    *("matplotlib.pyplot", "hypothesis", "jsonargparse", "yaml", "jinja2", "rich.progress", "tensorboard"),
    *("docstring_parser", "hypothesis.strategies", "torch._dynamo"),
)


@dataclass
class Seen:
    """One test: how long it takes, whether it passes, and the lines of each file that it runs (bit n is line n)."""

    seconds: float = 0.0
    passed: bool = True
    lines: dict[str, int] = field(default_factory=dict)

    def runs(self, file: str, line: int | None = None) -> bool:
        """Whether it runs this line, or any line of the file."""
        return bool(self.lines.get(file, 0) if line is None else self.lines.get(file, 0) >> line & 1)


class Project:
    """A copy of a project in which lines may be wrong.

    Args:
        root: the project; it is only read.
        copy: where its copy goes.
        package: what is measured, a folder of the project.
        tests: where tests are, folders of the project.
    """

    def __init__(self, root: Path, copy: Path, package: str, tests: Collection[str] = ("tests",)) -> None:
        def left_out(folder: str, names: list[str]) -> list[str]:
            return [n for n in names if n == "__pycache__" or (Path(folder) == root and n in LEFT_OUT)]

        shutil.copytree(root, copy, ignore=left_out)
        self.root, self.copy, self.package, self.tests = root, copy, package, tests

    def digest(self, *files: Path) -> str:
        """Of the contents of these files."""
        found = hashlib.blake2b(digest_size=8)
        for file in sorted(files):
            found.update(file.read_bytes())
        return found.hexdigest()

    def map(self, known: Path, jobs: int = 1) -> dict[str, Seen]:
        """Every fast test by its name, with what it runs: from ``known`` where that is still true, else measured.

        What is measured is written to ``known`` file by file: whoever is stopped goes on from there.
        """
        old = json.loads(known.read_text()) if known.exists() else {}
        code = self.digest(*(self.root / self.package).rglob("*.py"))
        paths = [path for folder in self.tests for path in sorted((self.root / folder).rglob("test_*.py"))]
        digests = {path.relative_to(self.root).as_posix(): self.digest(path) for path in paths} | {self.package: code}
        kept = old.get("tests", {}) if old.get("code") == code else {}
        tests = {name: kept[name] for name in digests if kept.get(name, {}).get("digest") == digests[name]}
        for name, found in self._measure([name for name in digests if name not in tests], jobs):
            tests[name] = {"digest": digests[name], "tests": found}
            known.write_text(json.dumps({"code": code, "tests": tests}))
        return {
            test: Seen(seen["seconds"], seen["passed"], {f: int(bits, 16) for f, bits in seen["lines"].items()})
            for one in tests.values()
            for test, seen in one["tests"].items()
        }

    def _measure(self, names: list[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the tests of each file or folder run, as they are done; each is measured in a process of its own."""
        waiting, running = list(names), dict[int, tuple[str, Path]]()
        while waiting or running:
            while waiting and len(running) < jobs:
                name, path = waiting.pop(0), self.copy / f"measured-{len(waiting)}.json"
                running[self._fork(partial(self._measured, name, path))] = name, path
            for child in [child for child in running if os.waitpid(child, os.WNOHANG)[0]]:
                name, path = running.pop(child)
                if not path.exists():
                    raise RuntimeError(f"{name} could not be measured: {(self.copy / f'log-{child}.txt').read_text()}")
                yield name, json.loads(path.read_text())
            time.sleep(0.02)

    def _measured(self, name: str, path: Path) -> int:
        observer = Observer(self.copy, self.package)
        code = self._pytest([name], observer)
        path.write_text(json.dumps(observer.found()))
        return code

    def play(self, file: str, text: str, tests: Collection[str], seconds: float) -> str | None:
        """Which of these tests notices that ``file`` has this text; None if none does."""
        target, said = self.copy / file, self.copy / "noticed.txt"
        right = target.read_text()
        said.unlink(missing_ok=True)
        target.write_text(text)
        try:
            files = sorted({test.partition("::")[0] for test in tests})
            child = self._fork(partial(self._pytest, files, Watcher(tests, said)))
            code = wait(child, seconds)
        finally:
            target.write_text(right)
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        return said.read_text() if said.exists() else "timeout" if code is None else f"exit code {code}"

    def _pytest(self, names: list[str], plugin: object) -> int:
        words = ["-o", "addopts=", "--doctest-modules", "-q", "-p", "no:cacheprovider", "-m", FAST]
        # hypothesis was imported before pytest could rewrite its assertions
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        if isinstance(plugin, Watcher):
            words.append("-x")
        return pytest.main([*words, *names], plugins=[plugin])

    def _fork(self, action: Callable[[], int]) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = 70
        try:
            os.setsid()
            os.chdir(self.copy)
            sys.path.insert(0, str(self.copy))
            os.environ["PYTHONPATH"] = str(self.copy)
            log = os.open(self.copy / f"log-{os.getpid()}.txt", os.O_CREAT | os.O_WRONLY)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(log, number)
                setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (for as long as the child lives)
            code = int(action())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


class Watcher:
    """Runs the chosen tests only, those of one file together, and writes down the first that fails."""

    def __init__(self, tests: Collection[str], said: Path) -> None:
        self.place = {test: n for n, test in enumerate(tests)}
        self.said = said

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """In the order of the choice, as far as files go."""
        chosen = [item for item in items if item.nodeid in self.place]
        first: dict[str, int] = {}
        for item in chosen:
            name = item.nodeid.partition("::")[0]
            first[name] = min(first.get(name, len(self.place)), self.place[item.nodeid])
        items[:] = sorted(chosen, key=lambda item: first[item.nodeid.partition("::")[0]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The name of a test that fails."""
        if report.failed:
            self.said.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """The name of a file that cannot even be imported."""
        if report.failed:
            self.said.write_text(report.nodeid)


class Observer:
    """Which lines each test runs, by `coverage`."""

    def __init__(self, copy: Path, package: str) -> None:
        self.copy, self.package = copy, package
        self.seen: dict[str, Seen] = {}
        self.coverage = coverage.Coverage(data_file=None, source=[str(copy / package)], config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test, its fixtures included."""
        self.coverage.switch_context(item.nodeid)
        self.seen[item.nodeid] = Seen()
        began = time.perf_counter()
        done = yield
        self.seen[item.nodeid].seconds = round(time.perf_counter() - began, 4)
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails without a wrong line notices nothing."""
        if not report.passed:
            self.seen[report.nodeid].passed = False

    def found(self) -> dict[str, Any]:
        """As it goes into the map."""
        self.coverage.stop()
        data = self.coverage.get_data()
        for file in data.measured_files():
            name = Path(file).relative_to(self.copy).as_posix()
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    if test in self.seen:
                        lines = self.seen[test].lines
                        lines[name] = lines.get(name, 0) | 1 << line
        return {
            test: {**vars(seen), "lines": {file: hex(bits) for file, bits in seen.lines.items()}}
            for test, seen in self.seen.items()
        }


def wait(child: int, seconds: float) -> int | None:
    """The exit code of a child; None if it took too long and was ended, with all that it had started."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def warm_up() -> None:
    """Import what is heavy; one thread each, because a fork keeps none of the others."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
