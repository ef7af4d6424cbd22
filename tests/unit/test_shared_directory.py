"""A run directory that some hosts do not see is refused at the start, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.train.saving import require_shared


class FirstOfTwo:
    """The first rank's side of a world of two; the other answers what it is told to."""

    rank, size = 0, 2

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]

    def scatter(self, values: Sequence[Any]) -> Any:
        return values[0]

    def broadcast(self, value: Any) -> Any:
        return value


def test_a_directory_that_all_see(tmp_path: Path) -> None:
    require_shared(tmp_path, FirstOfTwo(None))
    assert not list(tmp_path.iterdir()), "the mark is left"


def test_a_directory_of_one_host_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--out: .* on node-7 is not the directory that the first rank has; give one"):
        require_shared(tmp_path, FirstOfTwo("node-7"))
    assert not list(tmp_path.iterdir())
