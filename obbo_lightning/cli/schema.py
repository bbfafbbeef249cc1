"""`schema`: what a kind of file may say, as a JSON schema for editors."""

import json
from typing import Any

from obbo_lightning.cli.flags import Flags
from obbo_lightning.experiments.grid import KEYS
from obbo_lightning.settings.json_schema import flat_settings, nested_settings

SCALAR = {"type": ["string", "number", "boolean", "null"]}


def run(arguments: list[str]) -> int:
    """Print it."""
    asked = Flags("schema").parse_args(arguments)
    if asked.kind != "compare":
        raise ValueError(f"schema must be of one of compare, got {asked.kind!r}")
    print(json.dumps(comparison_schema(), indent=1, ensure_ascii=False))
    return 0


def comparison_schema() -> dict[str, Any]:
    """Of comparison files: the keys that `compare` takes, settings, and for each of them values to try."""
    flat = flat_settings()
    meanings: dict[str, dict[str, Any]] = {
        "compare": {
            "description": "the folder of the runs, below runs/compare",
            "type": "string",
            "pattern": r"^[\w.-]{1,100}$",
        },
        "base": {
            "description": "a configuration file beside this one, a shipped one's name, or a list of them",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        },
        "settings": {"description": "what all runs have above the base", **nested_settings(flat)},
        "tune": {"description": "how each method is tuned before, by the command of that name", "type": "object"},
        "grid": {
            "description": "for each key the values to try; or a name, and for each of its values the settings that "
            "change together",
            "type": "object",
            "minProperties": 1,
            "properties": {key: _tried(schema) for key, schema in flat.items()},
            "additionalProperties": _tried({}),
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A comparison: obbo compare --config FILE",
        "type": "object",
        "properties": {key: meanings[key] for key in KEYS},
        "required": ["compare", "grid"],
        "additionalProperties": False,
    }


def _tried(schema: dict[str, Any]) -> dict[str, Any]:
    """Values of a key: a list, one alone, or settings by name."""
    named = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "object"}}
    one = {key: value for key, value in schema.items() if key != "description"}
    several = {"type": "array", "minItems": 1, "items": one}
    return {"description": schema.get("description", ""), "anyOf": [several, named, {"allOf": [one, SCALAR]}]}
