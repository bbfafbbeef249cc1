"""What was run, in words: what decides a result stands beside it, also where a report is made again from its files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from obbo_lightning.config.registry import short_name
from obbo_lightning.escaping import escape_table, unescape_table
from obbo_lightning.experiments.runs import Run
from obbo_lightning.experiments.tables import Table

CAPTION = "What decides the results, with the paper's letters; empty where an algorithm has no such setting."
Facts = Sequence[tuple[str, str]]
# Of an algorithm: the paper's letters, and where settings have them.
DECISIVE = {
    "outer step α": "lr",
    "scale of auto": "scale",
    "window w": "window",
    "geometry": "geometry.name",
    "ρ": "geometry.rho",
    "bias correction": "geometry.bias_correction",
    "inner solver": "inner.name",
    "inner steps K": "inner.steps",
    "inner step η": "inner.lr",
    "samples s": "inner.batch_size",
    "hypergradient": "hypergradient.name",
    "iterations J": "hypergradient.steps",
    "terms m": "hypergradient.max_terms",
    "clip": "clip",
}


def facts_of(labels: Sequence[str], runs: Sequence[Run], repeated: int = 0) -> Facts:
    """What all runs share, in a few words; ``repeated``: how many more were the same as one of them."""
    settings = [run.settings for run in runs]
    shared = {k: v for k, v in settings[0]["data"].items() if all(s["data"].get(k) == v for s in settings)}
    places = {k for k in runs[0].stream.may_differ if isinstance(shared.get(k), str)}
    data = [f"{k} = {_without_folder(v)}" for k, v in shared.items() if v is not None and k not in places]
    facts = [
        ("algorithms", "; ".join(labels)),
        ("experiment", ", ".join(sorted({str(s.get("experiment")) for s in settings}))),
        ("data", ", ".join(word.removeprefix("name = ") for word in data)),
        ("problem", "; ".join(dict.fromkeys(_words(s.get("problem")) for s in settings))),
        ("runs", str(len(runs))),
        ("not counted", f"{repeated} whose seed changed nothing: no errors over seeds" if repeated else ""),
        ("rounds T", _several([s["rounds"] for s in settings])),
        ("seeds", _several([s["seed"] for s in settings])),
        ("regret window w_R", _several([s["regret_window"] for s in settings])),
        ("test tasks", _several([s.get("evaluation", {}).get("tasks") for s in settings])),
    ]
    return [(name, value) for name, value in facts if value]


def settings_table(runs: Sequence[Run]) -> Table:
    """What decides each algorithm's result; a column is there where one of them has that setting."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        label = run.label or short_name(run.settings["algorithm"]["name"])
        by_label.setdefault(label, []).append(run.settings["algorithm"])
    rows = {
        label: [_several([_at(one, key) for one in found]) for key in DECISIVE.values()]
        for label, found in by_label.items()
    }
    used = [i for i in range(len(DECISIVE)) if any(row[i] not in ("", "False") for row in rows.values())]
    names = list(DECISIVE)
    columns = ["algorithm", *(names[i] for i in used)]
    return Table("settings", CAPTION, columns, [[label, *(row[i] for i in used)] for label, row in rows.items()])


def write_facts(facts: Facts, directory: Path) -> Path:
    """``facts.csv``, for a report that is made again."""
    path = directory / "facts.csv"
    escape_table(pl.DataFrame(facts, schema={"name": pl.String, "value": pl.String}, orient="row")).write_csv(path)
    return path


def read_facts(labels: Sequence[str], directory: Path) -> tuple[Facts, Table | None]:
    """Of an earlier report, whose version may not have kept them."""
    facts: list[tuple[str, str]] = [("algorithms", "; ".join(labels))]
    if (directory / "facts.csv").is_file():
        table = unescape_table(pl.read_csv(directory / "facts.csv", infer_schema=False))
        facts += [(name, value) for name, value in table.rows() if name not in ("algorithms", "made from")]
    facts.append(("made from", "the CSV files of an earlier report"))
    if not (directory / "settings.csv").is_file():
        return facts, None
    found = unescape_table(pl.read_csv(directory / "settings.csv", infer_schema=False)).fill_null("")
    return facts, Table("settings", CAPTION, found.columns, [list(row) for row in found.rows()])


def _at(settings: dict[str, Any], path: str) -> Any:
    if path == "scale" and settings.get("lr") != "auto":  # it scales nothing else
        return None
    value: Any = settings
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return short_name(value) if path.endswith("name") and value else value


def _several(values: Sequence[Any]) -> str:
    """Each once, in order; of many numbers the first and the last.

    >>> _several([0.5, 0.5]), _several([3, 1, 2]), _several([None, 2]), _several([50, 100, 200, 400, 800, 1600])
    ('0.5', '1, 2, 3', '2', '50 to 1600')
    """
    known = list(dict.fromkeys(value for value in values if value is not None and not isinstance(value, dict)))
    numbers = all(isinstance(value, (int, float)) for value in known)
    known = sorted(known) if numbers else known
    shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in known]
    return f"{shown[0]} to {shown[-1]}" if numbers and len(shown) > 5 else ", ".join(shown)


def _words(problem: Any) -> str:
    if not isinstance(problem, dict):
        return ""
    words = []
    for key, value in problem.items():
        if isinstance(value, dict):
            words.append(f"{key} {_words(value)}")
        elif value is not None:
            words.append(short_name(value) if key == "name" else f"{key} = {_without_folder(value)}")
    return ", ".join(words)


def _without_folder(value: Any) -> Any:
    """Whose machine it was is nobody's business."""
    return Path(value).name if isinstance(value, str) and "/" in value else value
