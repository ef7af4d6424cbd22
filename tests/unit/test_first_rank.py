"""How a run begins is found out by the first rank, for all: elsewhere a launcher may know less of earlier attempts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from meshwright.comm.mesh import Mesh
from meshwright.errors import InputError
from meshwright.job.layout import Layout
from meshwright.prove.pool import RankPool
from meshwright.recovery.environment import Begin
from meshwright.train.worker import on_first_rank


def begun(found: Begin | None) -> Begin | str:
    """On a rank: how it begins, or why not; the first one's ``prepare`` finds ``found``."""

    def prepare() -> Begin:
        assert dist.get_rank() == 0, "the others are not asked"
        if found is None:
            raise InputError("--out: taken")
        return found

    with Mesh(Layout(dp=2)) as mesh:
        try:
            return on_first_rank(prepare, mesh)
        except InputError as error:
            return str(error)


@pytest.mark.parametrize("found", [Begin(True, True), Begin(False, True), Begin(False, False), None])
def test_every_rank_begins_as_the_first_one_found(ranks: Callable[[int], RankPool], found: Begin | None) -> None:
    assert ranks(2).run(begun, found) == [found if found is not None else "--out: taken"] * 2
