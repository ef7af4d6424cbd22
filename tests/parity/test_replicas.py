"""Silent corruption: under every layout that holds anything twice a flipped bit is seen, and its rank named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.job.job import load_job
from meshwright.prove.pool import RankPool
from meshwright.train.corrupt import CorruptState
from meshwright.train.loop import TrainingLoop
from tests.command_line import write_job

LAYOUTS = (
    "dp=2", "dp=3", "dp=4", "dp=3 zero=1", "dp=4 shard=2 zero=1", "dp=4 shard=2 zero=3", "dp=2 tp=2", "dp=2 pp=2",
)  # fmt: skip


WIDE = ("model.vocabulary=512", "model.hidden=64")
"""Enough parameters to be worth compressing."""
COMPRESSED = (
    ("dp=2", ("sync.compression=int8", *WIDE)),
    ("dp=4", ("sync.compression=sign", "sync.compression_level=slow", "sync.node_size=2", *WIDE)),
    ("dp=4 shard=2 zero=2", ("sync.compression=powersgd", "sync.compression_rank=2", *WIDE)),
    ("dp=3 zero=1", ("sync.compression=dgc", "optimizer.name=sgd", "optimizer.momentum=0.9", *WIDE)),
)


def flip_and_compare(
    job: str, layout: str, folder: str, flipped: int, published: bool, settings: tuple[str, ...] = ()
) -> tuple[str, list[int]]:
    """On a rank: train two steps, flip a bit of the largest exponent on one rank, and compare."""
    common = ("train.steps=2", "batch.global_size=12", "checkpoint.every=2")
    loaded = load_job(job, [*common, *settings], layout).resolve()
    with Mesh(loaded.layout) as mesh:
        loop = TrainingLoop(loaded, mesh, Path(folder), device=torch.device("cpu"), resume=False, quiet=True)
        loop.run()
        assert loop.replicas is not None
        loop.replicas.compare()  # nothing differs so far
        if mesh.rank == flipped:
            module = next(iter(loop.trainer.stages.values()))
            parameter = next(iter(module.parameters()))
            target = parameter if published else loop.trainer.owned[-1].master
            with torch.no_grad():
                bits = target.view(-1).view(torch.int32)
                bits[bits.numel() // 2] ^= 1 << 30
        try:
            loop.replicas.compare()
        except CorruptState as error:
            return str(error), error.blamed
    return "", []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_seen_and_its_rank_named(
    ranks: Callable[[int], RankPool], tmp_path: Path, layout: str
) -> None:
    job = write_job(tmp_path)
    size = load_job(job, [], layout).layout.ranks
    for flipped in (0, size - 1):
        folder = tmp_path / f"run-{flipped}"
        folder.mkdir()
        found = ranks(size).run(flip_and_compare, str(job), layout, str(folder), flipped, False)
        for said, blamed in found:
            assert blamed == [flipped]
            assert said.startswith(f"after step 2 rank {flipped} holds other bits of ")


def test_a_bit_of_what_zero_1_publishes(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for said, blamed in ranks(3).run(flip_and_compare, str(job), "dp=3 zero=1", str(tmp_path), 1, True):
        assert blamed == [1], said


@pytest.mark.parametrize(
    ("layout", "settings"), [COMPRESSED[0], *(pytest.param(*case, marks=pytest.mark.all) for case in COMPRESSED[1:])]
)
def test_replicas_of_compressed_gradients_are_alike(
    ranks: Callable[[int], RankPool], tmp_path: Path, layout: str, settings: tuple[str, ...]
) -> None:
    job = write_job(tmp_path)
    size = load_job(job, [], layout).layout.ranks
    for said, blamed in ranks(size).run(flip_and_compare, str(job), layout, str(tmp_path), 1, False, settings):
        assert blamed == [1], said
