"""Ranks of one machine are not to be reached from another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.prove.pool import RankPool

_LISTENING = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def listening() -> list[str]:
    """The addresses at which this process listens, as the kernel writes them."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    lines = [line.split() for table in ("tcp", "tcp6") for line in _lines(Path("/proc/self/net") / table)]
    return [line[1].partition(":")[0] for line in lines if line[3] == _LISTENING and f"socket:[{line[9]}]" in own]


def _lines(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:] if table.exists() else []


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables")
def test_nobody_else_reaches_the_ranks_of_a_pool(ranks: Callable[[int], RankPool]) -> None:
    addresses = ranks(2).run(listening)
    assert addresses[0], "rank 0 holds the store"
    assert {address for each in addresses for address in each} <= set(_LOOPBACK)
