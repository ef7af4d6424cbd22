"""The short form of a layout, ``dp=2 tp=2 pp=2 zero=1``: read with a caret under what is wrong, and written."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, NoReturn, get_args

from meshwright.errors import InputError
from meshwright.job.layout import Layout, Recompute, Schedule

_COUNTS = ("dp", "shard", "tp", "pp", "cp", "ep", "virtual", "micro_batch")
_ORDER = (
    "dp", "shard", "tp", "pp", "cp", "ep", "zero", "schedule", "virtual", "stages", "micro_batch", "recompute",
    "placement",
)  # fmt: skip
_ALWAYS_WRITTEN_WITH_PP = "schedule"
LAYOUT_KEYS: tuple[str, ...] = _ORDER
"""Every key of the short form, in the order in which it is written."""


class _Wrong(Exception):
    """What is wrong with one value: a sentence's end, and where in the value."""

    def __init__(self, sentence: str, offset: int = 0) -> None:
        super().__init__(sentence)
        self.sentence, self.offset = sentence, offset


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
        raise _Wrong(f"is not a whole number of at least {least}")
    return int(text)


def _choice(text: str, legal: tuple[str, ...]) -> str:
    if text not in legal:
        raise _Wrong(f"is not one of {', '.join(legal)}{_did_you_mean(text, legal)}")
    return text


def _zero(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise _Wrong("is not a ZeRO stage; use 0, 1, 2 or 3")
    return int(text)


def _each(text: str, read: Callable[[str], Any]) -> tuple[Any, ...]:
    values, offset = [], 0
    for part in text.split(","):
        try:
            values.append(read(part))
        except _Wrong as wrong:
            raise _Wrong(f"has {part!r} in it, which {wrong.sentence}", offset) from None
        offset += len(part) + 1
    return tuple(values)


def _recompute(text: str) -> str | tuple[str, ...]:
    legal = get_args(Recompute)
    return _each(text, lambda part: _choice(part, legal)) if "," in text else _choice(text, legal)


def _reader(key: str) -> Callable[[str], Any]:
    if key in _COUNTS:
        return lambda text: _whole(text, 1)
    readers: dict[str, Callable[[str], Any]] = {
        "zero": _zero,
        "schedule": lambda text: _choice(text, get_args(Schedule)),
        "stages": lambda text: _each(text, lambda part: _whole(part, 0)),
        "placement": lambda text: _each(text, lambda part: _whole(part, 0)),
        "recompute": _recompute,
    }
    return readers[key]


def _did_you_mean(text: str, legal: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(text, legal, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _refuse(text: str, position: int, sentence: str) -> NoReturn:
    raise InputError(f"layout: {sentence}\n  {text}\n  {' ' * position}^")


def is_auto(text: str) -> bool:
    """Whether ``text`` leaves the whole layout to the planner."""
    return text.strip() == "auto"


def parse_layout_values(text: str) -> dict[str, Any]:
    """The keys that ``text`` gives and their values, not completed by defaults.

    Raises:
        InputError: one sentence, then the text with a caret under what is wrong.
    """
    text = text.expandtabs(1).replace("\n", " ")
    if is_auto(text):
        _refuse(text, text.index("auto"), "auto stands for a whole layout, to be planned; give the degrees here")
    values: dict[str, Any] = {}
    for word in re.finditer(r"\S+", text):
        start, (key, equals, value) = word.start(), word.group().partition("=")
        if not equals:
            _refuse(text, start, f"{key!r} is not of the form key=value; legal keys are {', '.join(_ORDER)}")
        if key not in _ORDER:
            _refuse(
                text, start, f"{key!r} is not a key{_did_you_mean(key, _ORDER)}; legal keys are {', '.join(_ORDER)}"
            )
        if key in values:
            _refuse(text, start, f"{key} is given twice; give it once")
        try:
            values[key] = _reader(key)(value)
        except _Wrong as wrong:
            shown = f"{key}={value}" if value else f"{key}= without a value"
            _refuse(text, start + len(key) + 1 + wrong.offset, f"{shown} {wrong.sentence}")
    return values


def parse_layout(text: str) -> Layout:
    """Read the short form, for example ``dp=2 tp=2 pp=2 zero=1 schedule=1f1b stages=3,3,2``.

    Raises:
        InputError: one sentence, then the text with a caret under what is wrong.
    """
    return Layout(**parse_layout_values(text))


def format_layout(layout: Layout) -> str:
    """Write the short form: the degrees above 1 and whatever else differs from the default.

    ``parse_layout(format_layout(layout)) == layout`` for every layout.
    """
    words = []
    for key in _ORDER:
        value = getattr(layout, key)
        if value == Layout.model_fields[key].default and not (key == _ALWAYS_WRITTEN_WITH_PP and layout.pp > 1):
            continue
        words.append(f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return " ".join(words) or "dp=1"
