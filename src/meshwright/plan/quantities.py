"""Quantities as people write them: ``3.1 h``, ``300e9`` tokens, ``2.10 USD`` an hour; each refused in one sentence."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshwright.errors import InputError

_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_DURATION = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*")
_PRICE = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*")

HOUR = _SECONDS["h"]
DAY = _SECONDS["d"]


@dataclass(frozen=True)
class Price:
    """Money for one device and one hour."""

    amount: float
    currency: str
    """Three capital letters (ISO 4217), as ``USD``."""

    def __post_init__(self) -> None:
        at_least_zero("price", self.amount, f"{self.currency} a device-hour")
        if not re.fullmatch(r"[A-Z]{3}", self.currency):
            raise InputError(
                f"price: {self.amount:g} {self.currency!r} names no currency; write three capital letters, as 2.10 USD"
            )

    def __str__(self) -> str:
        return f"{self.amount:g} {self.currency} a device-hour"


def parse_price(text: str, where: str = "--price") -> Price:
    """``2.10 USD``: for one device and one hour.

    Raises:
        InputError: no such text; a price without a currency means nothing.
    """
    match = _PRICE.fullmatch(text)
    if match is None:
        raise InputError(f"{where}: {text!r} is no price; write an amount and a currency, as 2.10 USD (a device-hour)")
    if not match[2]:
        raise InputError(f"{where}: {text!r} has no currency; write it behind the amount, as {match[1]} USD")
    return Price(float(match[1]), match[2].upper())


def parse_duration(text: str, where: str) -> float:
    """``30 s``, ``5min``, ``3.09h``, ``2 d`` in seconds.

    Raises:
        InputError: no number, no unit, or below zero.
    """
    match = _DURATION.fullmatch(text)
    if match is None or match[2] not in _SECONDS:
        raise InputError(f"{where}: {text!r} is no time; write a number and one of {', '.join(_SECONDS)}, as 3.1h")
    return at_least_zero(where, float(match[1]) * _SECONDS[match[2]], "seconds")


def above_zero(where: str, value: float, unit: str = "") -> float:
    """``value``, when it is finite and above zero.

    Raises:
        InputError: it is not.
    """
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{where}: {value:g}{unit and ' ' + unit} is not a finite number above 0")
    return value


def at_least_zero(where: str, value: float, unit: str = "") -> float:
    """``value``, when it is finite and not below zero.

    Raises:
        InputError: it is not.
    """
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{where}: {value:g}{unit and ' ' + unit} is not a finite number of at least 0")
    return value


def show_duration(seconds: float) -> str:
    """The same in the unit that reads best: ``3.09 h``."""
    for unit, size in (("d", DAY), ("h", HOUR), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size or (unit in ("min", "s") and seconds >= size):
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"
