"""Take out each protection of docs/reliability.md and check that a test fails: ``python -m benchmarks.protections``.

Every entry of protections.yaml replaces a line of the package by one without the protection and names the tests that
must notice. Entries run in a copy of the working tree; ``--only TEXT`` selects entries by file or name.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
COPIED = ("obbo_lightning", "tests", "configs", "examples", "docs", "pyproject.toml", "README.md")


def is_noticed(entry: dict[str, str], copy: Path) -> bool:
    """Return whether the tests of an entry fail without its protection."""
    file = copy / entry["file"]
    original = file.read_text()
    file.write_text(original.replace(entry["before"], entry["after"]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *entry["tests"].split()]
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # for processes that the tests start
    try:
        tests = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=120)
        # Some failed, or pytest was interrupted or killed by a signal; above 2: there were no tests to run.
        return tests.returncode in (1, 2) or tests.returncode < 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(original)


def main() -> int:
    """Print each protection that no test notices; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a file or a name")
    only = parser.parse_args().only
    entries = yaml.safe_load((ROOT / "benchmarks" / "protections.yaml").read_text())
    entries = [entry for entry in entries if only in f"{entry['file']} {entry['name']}"]
    missed, stale = [], [one for one in entries if (ROOT / one["file"]).read_text().count(one["before"]) != 1]
    if stale:
        raise ValueError(f"lines must occur once in their files, got otherwise for {[one['name'] for one in stale]}")
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        for number, entry in enumerate(entries, 1):
            noticed = is_noticed(entry, Path(folder))
            missed += [] if noticed else [entry]
            print(f"{number}/{len(entries)} {'noticed' if noticed else 'MISSED '} {entry['name']}", flush=True)
    print(f"{len(entries) - len(missed)} of {len(entries)} protections are noticed by a test")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
