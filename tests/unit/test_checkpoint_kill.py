"""SIGKILL at every file operation of a save: what is found afterwards is this step or the one before, to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated_ranks import FailingDisk, ThreadWorld, on_ranks

from meshwright.checkpoint.folder import latest, left_overs, step_of, steps
from meshwright.checkpoint.placed import PlacedTensor
from meshwright.checkpoint.save import save
from meshwright.checkpoint.verify import verify
from meshwright.prove.pool import RankFailure, RankPool
from meshwright.train.saving import Saver
from tests.small_jobs import my_batches, small_job, train_and_save


class KillingDisk(FailingDisk):
    """At operation number ``fail_at``, half done, the process gets SIGKILL."""

    def _fail(self, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def store(folder: Path, step: int, size: int, disk: FailingDisk) -> None:
    import torch

    def run(world: ThreadWorld) -> None:
        part = torch.full((64 // size, 8), float(step))
        box = PlacedTensor("w", (64, 8), (world.rank * 64 // size, 0), (64 // size, 8), part)
        save(folder, step, [box], keep=1, world=world, disk=disk)

    on_ranks(size, run)


def killed_in_a_child(folder: Path, size: int, point: int) -> int:
    """Save step 2 in a process of its own that dies at operation ``point``; how it ended, as ``waitpid`` says."""
    child = os.fork()
    if child == 0:
        try:
            store(folder, 2, size, KillingDisk(point))
        finally:
            os._exit(7)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("size", [1, 2])
def test_sigkill_at_every_operation_of_a_save(tmp_path: Path, size: int) -> None:
    counting = FailingDisk()
    store(tmp_path / "count", 1, size, FailingDisk())
    store(tmp_path / "count", 2, size, counting)
    assert {"create", "write", "sync_file", "sync_folder", "rename", "remove"} <= set(counting.operations)
    outcomes = []
    for point in range(len(counting.operations)):
        folder = tmp_path / f"at-{point}"
        store(folder, 1, size, FailingDisk())
        assert os.WTERMSIG(killed_in_a_child(folder, size, point)) == signal.SIGKILL
        last = latest(folder)
        assert last is not None
        assert verify(last).step == step_of(last)
        outcomes.append(step_of(last))
        store(folder, 3, size, FailingDisk())
        assert steps(folder) == [3] and not left_overs(folder)
    # Whether rank 1 has begun when rank 0 dies is chance; that a later death never loses more is not.
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}


# --- a whole run: killed in the save, resumed from what is there -----------------------------------


def train_and_die(job_layout: str, folder: str, rank: int, point: int) -> list[str]:
    """On a rank: three steps, a save after each; in the last, ``rank`` is killed at operation ``point``.

    Returns the operations of that save.
    """
    from meshwright.comm.mesh import Mesh
    from meshwright.train.trainer import Trainer

    job = small_job(job_layout)
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        saver = Saver(trainer, None, Path(folder))
        for step in range(3):
            trainer.step(my_batches(job, mesh, step))
            saver.disk = KillingDisk(point) if step == 2 and mesh.coordinate("world") == rank else FailingDisk()
            saver.save()
    return saver.disk.operations


@pytest.mark.all
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=2"])
def test_a_run_killed_in_any_operation_of_a_save_goes_on_as_if_it_had_not_been(
    ranks: Callable[[int], RankPool], tmp_path: Path, layout: str
) -> None:
    job = small_job(layout)
    size = job.layout.ranks
    whole = ranks(size).run(train_and_save, job, str(tmp_path / "whole"), 0, 5, [])[0]
    operations = ranks(size).run(train_and_die, layout, str(tmp_path / "count"), -1, 0)
    reached = set()
    for rank, names in enumerate(operations):
        writes = [point for point, name in enumerate(names) if name == "write"]  # one a slice: all are tried above
        tried = {writes[0], writes[len(writes) // 2], writes[-1]}
        for point in [point for point, name in enumerate(names) if name != "write" or point in tried]:
            folder = tmp_path / f"{rank}-{point}"
            with pytest.raises(RankFailure, match=f"rank {rank}"):
                ranks(size).run(train_and_die, layout, str(folder), rank, point)
            last = latest(folder / "checkpoints")
            assert last is not None
            reached.add(step_of(last))
            rest = ranks(size).run(train_and_save, job, str(folder), step_of(last), 5, [])[0]
            assert rest == whole[step_of(last) :], (rank, point)
    assert reached == {2, 3}
