"""`schema`: what a kind of file may say, as a JSON schema for editors."""

import json
from typing import Any

from obbo_lightning.cli.flags import Flags
from obbo_lightning.experiments.grid import KEYS
from obbo_lightning.experiments.tune_request import KEYS as TUNED, STEPS
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
        "grid": {
            "description": "for each key the values to try; or a name, and for each of its values the settings that "
            "change together",
            "type": "object",
            "minProperties": 1,
            "properties": {key: _tried(schema) for key, schema in flat.items()},
            "additionalProperties": _tried({}),
        },
        "tune": _tuned(flat),
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


def _tuned(flat: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How each method is searched for."""
    whole = {"type": "integer", "minimum": 1}
    number = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": r"^\d+e-?\d+$"}]}
    ends = {"type": "object", "properties": {"low": number, "high": number}, "required": ["low", "high"]}
    several = {"type": "array", "minItems": 1, "uniqueItems": True}
    meanings: dict[str, dict[str, Any]] = {
        "search": {
            "description": "for each key an interval, in which logarithms are uniform, or a list of values",
            "type": "object",
            "properties": {key: {"anyOf": [several, {**ends, "additionalProperties": False}]} for key in flat},
            "oneOf": [{"required": [step]} for step in STEPS],
        },
        "rounds": {"description": "of a trial; those of the comparison otherwise", **whole},
        "budget": {
            "description": "of each method, all its trials together: rounds, or calls of gradients and products",
            "type": "object",
            "properties": {"rounds": whole, "calls": whole},
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        },
        "judge": {
            "description": "validation tasks, or the stream where there are none",
            "enum": ["validation", "stream"],
        },
        "tasks": {"description": "validation tasks", **whole},
        "seeds": {"description": "of the trials", **several, "items": {"type": "integer", "minimum": 0}},
        "sampler": {"enum": ["tpe", "random", "grid"]},
        "prune": {"enum": ["median", "none"]},
        "rungs": {"description": "rounds after which a trial may be given up", "type": "array", "items": whole},
        "at_once": {"description": "trials of a method that are chosen together", **whole},
        "seed": {"description": "of the search", "type": "integer", "minimum": 0},
        "settings": {"description": "what trials have and the comparison has not", **nested_settings(flat)},
    }
    return {
        "description": "how each method is tuned before the comparison (obbo tune)",
        "type": "object",
        "properties": {key: meanings[key] for key in TUNED},
        "required": ["search", "budget"],
        "additionalProperties": False,
    }
