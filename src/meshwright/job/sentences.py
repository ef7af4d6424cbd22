"""What is wrong with a job file, one sentence a fault: where, the value, the rule, the legal values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

_PLURALS = {"integer": "whole numbers", "number": "numbers", "string": "strings", "boolean": "true or false"}


def sentences(error: ValidationError, schema: Mapping[str, Any]) -> list[str]:
    """One sentence for each key that ``error`` names, in the order of the file.

    Args:
        error: what pydantic found in the values of the job.
        schema: the JSON schema of the job, where the legal values stand.
    """
    found: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        keys, node = _known_part(fault["loc"], schema)
        where = ".".join(keys) or "job"
        found.setdefault(where, _sentence(where, keys, node, fault, schema))
    return list(found.values())


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in node:
        resolved: Mapping[str, Any] = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return resolved
    return node


def _known_part(loc: tuple[int | str, ...], schema: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """The keys of ``loc`` down to the first that is no table, and the schema there (empty: unknown key)."""
    keys: list[str] = []
    node: Mapping[str, Any] = schema
    for key in loc:
        if "properties" not in node:
            break
        keys.append(str(key))
        if key not in node["properties"]:
            return keys, {}
        node = _resolved(node["properties"][key], schema)
    return keys, node


def _sentence(
    where: str, keys: list[str], node: Mapping[str, Any], fault: Mapping[str, Any], schema: Mapping[str, Any]
) -> str:
    if fault["type"] == "missing" and len(keys) == len(fault["loc"]):
        return f"{where} is missing; give {legal(node)}"
    if fault["type"] == "extra_forbidden":
        return _unknown_key(keys, schema)
    value = fault["input"]
    if fault["type"] == "missing":  # an entry of a list
        inside: tuple[int | str, ...] = ()
    else:
        inside = fault["loc"][len(keys) :]
    if fault["type"] == "value_error":
        message = str(fault["ctx"]["error"])
        return message if message.startswith(f"{where}.") else f"{where}: {message}"
    if inside and isinstance(inside[-1], int):
        return f"{where}: {_shown(value)} at position {inside[-1]} is not allowed; it must be {legal(node)}"
    hint = ""
    choices = list(_choices(node))
    if isinstance(value, str) and (close := difflib.get_close_matches(value, choices, n=1)):
        hint = f" (did you mean {close[0]}?)"
    finite = " and finite" if fault["type"] == "finite_number" else ""
    return f"{where}: {_shown(value)} must be {legal(node)}{finite}{hint}"


def _unknown_key(keys: list[str], schema: Mapping[str, Any]) -> str:
    *parents, key = keys
    node = schema
    for parent in parents:
        node = _resolved(node["properties"][parent], schema)
    names = sorted(node["properties"])
    place = f"a key of [{'.'.join(parents)}]" if parents else "a section of a job"
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ";"
    kind = "keys" if parents else "sections"
    return f"{'.'.join(keys)} is not {place}{hint} {'L' if close else 'l'}egal {kind} are {', '.join(names)}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    return str(value)


def _choices(node: Mapping[str, Any]) -> Iterator[str]:
    for branch in node.get("anyOf", [node]):
        yield from (str(choice) for choice in branch.get("enum", []))


def _one_of(choices: list[Any]) -> str:
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _bounds(node: Mapping[str, Any]) -> str:
    low = [f"{word} {node[key]:g}" for key, word in _LOWER.items() if key in node]
    high = [f"{word} {node[key]:g}" for key, word in _UPPER.items() if key in node]
    return " and ".join(low + high)


_LOWER = {"minimum": "at least", "exclusiveMinimum": "above"}
_UPPER = {"maximum": "at most", "exclusiveMaximum": "below"}


def legal(node: Mapping[str, Any]) -> str:
    """The legal values of one key, in words, from its JSON schema."""
    if "anyOf" in node:
        branches = [branch for branch in node["anyOf"] if branch.get("type") != "null"]
        branches.sort(key=lambda branch: branch.get("type") == "array")  # "each ..." is of nothing that follows
        return " or ".join(dict.fromkeys(map(legal, branches)))
    if "enum" in node:
        return _one_of(node["enum"])
    if "const" in node:
        return str(node["const"])
    kind = node.get("type")
    if kind == "array":
        if "prefixItems" in node:
            return f"a list of {len(node['prefixItems'])} values, each {legal(node['prefixItems'][0])}"
        item = node["items"]
        words = f"each {legal(item)}" if "enum" in item or _bounds(item) else _PLURALS.get(item.get("type", ""), "")
        return f"a list of {words}" if not words.startswith("each") else f"a list, {words}"
    if kind in ("integer", "number"):
        if kind == "integer" and node.get("exclusiveMinimum") == 0:
            return "a whole number of at least 1"
        name = "a whole number" if kind == "integer" else "a number"
        return f"{name} {'of ' if 'minimum' in node else ''}{_bounds(node)}".rstrip()
    names = {"string": "a string", "boolean": "true or false", "object": "a table"}
    return names.get(str(kind), "another value")


def either(numbers: list[int]) -> str:
    """Legal values as a person says them: ``1, 2, 4 or 8``."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
