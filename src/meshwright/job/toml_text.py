"""A job as TOML text: the few kinds of value that a job has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


def toml_value(value: object) -> str:
    """One value in TOML: a string, boolean, number, or list of them.

    Raises:
        TypeError: TOML has no such value here.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A TOML basic string is a JSON string, but for U+007F, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"no TOML value for {type(value).__name__}")


def toml_document(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Sections as TOML tables; keys whose value is None and empty sections are left out."""
    tables = []
    for name, section in sections.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in section.items() if value is not None]
        if lines:
            tables.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(tables) + "\n"
