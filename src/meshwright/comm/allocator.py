"""Keep memory that was freed: large blocks are asked for again every step.

glibc gives blocks above 32 MiB (and a free top of the heap above 64 MiB) back to the kernel at once; the
next step then pays for every page anew, which for an exchange buffer costs as much as the exchange.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make the C library keep freed blocks up to 1 GiB for reuse; whether it can (glibc on Linux).

    The process then stays as large as it once was. Call it before the first large allocation.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # glibc refuses an mmap threshold above half of its largest heap; a refusal leaves its own rule in force.
    kept = mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
