"""What a rank does in the bench of unequal batches: apart from it, so that the processes of a pool can import it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.comm.collectives import barrier
from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.job.split import Split, equal_sequences, split_into
from meshwright.prove.proof_data import ProofSamples, proof_batches
from meshwright.train.resizing import Resizing
from meshwright.train.trainer import Trainer


def pin(core: int) -> None:
    """Put every thread of this process on one core: also the transport's, which were there before."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


class Contest:
    """One rank that trains in blocks of steps, with equal or with automatic shares."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.job, self.mesh = job, mesh
        self.trainer, self.resizing = Trainer(job, mesh), Resizing(job, mesh)
        self.equal = split_into(job, equal_sequences(job.batch.global_size, job.layout.dp))
        self._samples = ProofSamples(job.model_spec.vocabulary, job.data.sequence_length, seed=1, masked=False)

    def steps(self, count: int, *, auto: bool) -> list[dict[str, Any]]:
        """Seconds and shares of each step."""
        return [self._step(self.resizing.sizer.split if auto else self.equal, auto) for _ in range(count)]

    def _step(self, split: Split, auto: bool) -> dict[str, Any]:
        job, mesh = self.job, self.mesh
        batches = proof_batches(
            self._samples,
            self.trainer.step_number,
            global_size=job.batch.global_size,
            micro_batch=job.layout.micro_batch or 1,
            dp_rank=mesh.coordinate("dp"),
            dp=mesh.degree("dp"),
            split=split,
        )
        barrier(mesh.group("world"))
        began = time.perf_counter()
        with self.resizing.around_step():
            self.trainer.step(batches)
        if auto:
            self.resizing.after_step()
        barrier(mesh.group("world"))
        return {"seconds": time.perf_counter() - began, "sequences": list(split.sequences)}


def contest(job: Job, cores: Sequence[Sequence[int]], settle: int, rounds: int, block: int, after: int) -> Any:
    """On every rank: settle, blocks of equal and automatic shares in turn, then the same ranks on other cores.

    Args:
        job: ``dp`` ranks with ``batch.split = "auto"``.
        cores: of each rank, before the change and after it.
        settle: automatic steps before anything is compared.
        rounds: pairs of blocks.
        block: steps of one.
        after: automatic steps after the change.
    """
    with Mesh(job.layout) as mesh:
        pin(cores[0][mesh.rank])
        one = Contest(job, mesh)
        found: dict[str, Any] = {"settling": one.steps(settle, auto=True), "equal": [], "auto": []}
        for _ in range(rounds):
            found["equal"].append(one.steps(block, auto=False))
            found["auto"].append(one.steps(block, auto=True))
        barrier(mesh.group("world"))
        pin(cores[1][mesh.rank])
        found["changed"] = one.steps(after, auto=True)
        found["changed_equal"] = one.steps(block, auto=False)
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), set(cores[0]) | set(cores[1]))
    return found
