"""What a rank says that lost another, where no launcher of ours watches it: whom it waited for, in what, how long."""

from __future__ import annotations

import mmap
import os
import time

from meshwright.comm import position
from meshwright.errors import MeshwrightError, first_line
from meshwright.recovery.incident import ranks_in_words, where


class PeersLost(MeshwrightError):
    """A collective ended because another rank is gone, or did not come in time."""


def keep_position() -> mmap.mmap:
    """From now on this process keeps where it is, in memory of its own."""
    memory = mmap.mmap(-1, position.SIZE)
    position.attach(memory, os.getpid())
    position.in_phase("setup")
    return memory


def peers_lost(memory: mmap.mmap, rank: int, size: int, bound: float, error: BaseException) -> PeersLost:
    """The sentence for ``error``, which ended what this rank waited in.

    Args:
        memory: of ``keep_position``.
        rank: this one, of ``size``.
        size: of the world.
        bound: ``recovery.collective_after``.
        error: what the transport said.
    """
    here = position.read(memory)
    others = [member for member in here.members if member != rank] if here.waiting else []
    whom = ranks_in_words(others) if others else "another rank"
    waited = time.monotonic() - here.changed
    return PeersLost(
        f"rank {rank} of {size} lost {whom} after waiting {waited:.1f} s (recovery.collective_after = {bound:g} s), "
        f"{where(here)}: {first_line(error)}"
    )
