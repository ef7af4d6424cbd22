"""How many threads a rank computes with."""

from __future__ import annotations

import os

from meshwright.errors import InputError

_VARIABLE = "OMP_NUM_THREADS"


def threads_per_rank(ranks: int) -> int:
    """Computing threads for each of ``ranks`` processes: the cores we may use, shared out, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def threads(default: int = 1) -> int:
    """What OMP_NUM_THREADS says, of a list (one for each level of nesting) the first; without it ``default``.

    Raises:
        InputError: it is no number of threads.
    """
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return default
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise InputError(
            f"{_VARIABLE}={text} is no number of threads; use a whole number of at least 1, or unset it for {default}"
        )
    return int(first)
