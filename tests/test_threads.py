import os
import subprocess
import sys

from obbo_lightning.threads import BOUNDS, bound_spinning


def test_spinning_is_bounded_where_nobody_has_said_otherwise(monkeypatch):
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    bound_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["KMP_BLOCKTIME"] == BOUNDS["KMP_BLOCKTIME"]


def test_the_command_line_bounds_it_before_torch_is_loaded():
    """Watched from inside: when torch is first imported, the variables are there."""
    script = """
import sys, os
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("bound", os.environ.get("GOMP_SPINCOUNT"))
sys.meta_path.insert(0, Watch())
from obbo_lightning.cli import main
main(["fit", "--seedd", "3"])
"""
    clean = {k: v for k, v in os.environ.items() if k not in BOUNDS}
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"bound {BOUNDS['GOMP_SPINCOUNT']}"
