"""Settings as a JSON schema, from the parsers that check them: keys, types and meanings of every part with a name.

A file may name parts of your own, whose keys nobody can know beforehand; so keys that are not known are left to the
checks of the command itself, and everything that is known has its type.
"""

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from obbo_lightning.parts import names_of, part
from obbo_lightning.settings.layers import PARTS
from obbo_lightning.settings.schema import add_run

Schema = dict[str, Any]
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object"}
# YAML 1.1 reads 1e-4 as a word; here it is the number that was meant.
NUMBER_AS_WORD = {"type": "string", "pattern": r"^[+-]?(\d+(\.\d*)?[eE][+-]?\d+|inf|nan)$"}


def flat_settings() -> dict[str, Schema]:
    """The schema of each dotted key: ``seed``, ``algorithm``, ``algorithm.window``."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    add_run(parser)
    found = dict(_arguments(parser))
    for path, kind in PARTS.items():
        found[path] = {
            "description": f"one of {', '.join(names_of(kind))}, or your own: package.module.Class, file.py:Class",
            "anyOf": [{"enum": names_of(kind)}, {"type": "string", "pattern": r"[.:]"}, {"type": ["object", "null"]}],
        }
        for name in names_of(kind):
            for key, schema in _of_part(path, name):
                found[key] = _either(found[key], schema) if key in found else schema
    return found


def nested_settings(flat: dict[str, Schema]) -> Schema:
    """The same as a mapping in a file: sections in sections."""
    top: Schema = {"type": "object", "properties": {}}
    for key, schema in sorted(flat.items()):
        where = top
        *sections, last = key.split(".")
        for section in sections:
            below = where["properties"].setdefault(section, {})
            below.setdefault("type", ["object", "string", "null"] if "anyOf" in below else "object")
            where = below
            where.setdefault("properties", {})
        where["properties"].setdefault(last, {}).update(schema)
    for path, kind in PARTS.items():
        where = top
        for section in path.split("."):
            where = where["properties"].setdefault(section, {})
        where.setdefault("properties", {})["name"] = {"type": "string", "examples": names_of(kind)}
    return top


def _of_part(path: str, name: str) -> Iterator[tuple[str, Schema]]:
    """The arguments of a part, without those that are parts themselves."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parts: set[str | int] = {p.rpartition(".")[2] for p in PARTS if p.startswith(f"{path}.")}
    try:
        parser.add_class_arguments(part(PARTS[path], name), path, skip=parts | {"seed"}, fail_untyped=False)
    except ValueError:  # a part that is not installed here, such as learn2learn's
        return
    yield from _arguments(parser)


def _arguments(parser: ArgumentParser) -> Iterator[tuple[str, Schema]]:
    for action in parser._actions:
        if action.dest and not action.dest.startswith("_") and hasattr(action, "_typehint"):
            meaning = {"description": str(action.help)} if action.help else {}
            yield action.dest, {**meaning, **_type(action._typehint)}


def _type(hint: Any) -> Schema:
    """The schema of a type; of one that JSON does not know, anything."""
    origin, within = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [_type(one) for one in within]
        return {} if {} in options else {"anyOf": options}
    if origin is Literal:
        return {"enum": list(within)}
    if hint is float:
        return {"anyOf": [{"type": "number"}, NUMBER_AS_WORD]}
    if origin in (list, tuple) or hint in (list, tuple):
        return {"type": "array"}
    plain = PLAIN.get(origin or hint)
    return {"type": plain} if plain else {}


def _either(one: Schema, other: Schema) -> Schema:
    """Of a key that several parts take."""
    if _bare(one) == _bare(other):
        return one
    if not _bare(one) or not _bare(other):
        return {"description": one.get("description", "")}
    return {"description": one.get("description", ""), "anyOf": [_bare(one), _bare(other)]}


def _bare(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "description"}
