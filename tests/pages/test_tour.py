"""The notebook runs from its first cell to its last."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

NOTEBOOK = json.loads((Path(__file__).parents[2] / "docs" / "tour.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of Lightning's own loader
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tour"}
    for cell in CELLS:
        lines = cell.splitlines()
        if lines[-1].startswith("obbo.plot"):  # what a notebook shows
            shown = eval("\n".join(lines), names)
            assert isinstance(shown, Figure)
            shown.savefig("shown.png")
        else:
            exec(compile("\n".join(line for line in lines if not line.startswith("%")), "tour.ipynb", "exec"), names)
    plt.close("all")
    # A step that multiplies gets there, one that adds has hardly begun.
    adds, multiplies = names["paths"]["adds"], names["paths"]["multiplies"]
    assert multiplies[-1] > 10 * adds[-1]


def test_the_notebook_is_committed_without_outputs():
    assert len(CELLS) > 8
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in NOTEBOOK["cells"])
