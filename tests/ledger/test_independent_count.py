"""Whole training steps under every kind of layout: the recorder against the transport's own books, to the byte."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

from meshwright.comm.mesh import Mesh
from meshwright.comm.record import TrafficRecorder
from meshwright.job.job import Job
from meshwright.train.trainer import Trainer
from tests.ledger import recording_group
from tests.ledger.test_recorder import books
from tests.small_jobs import my_batches, small_job

LAYOUTS = (
    "dp=2 micro_batch=2",
    "dp=2 zero=1 micro_batch=2",
    "dp=2 zero=2 micro_batch=2",
    "dp=2 zero=3 micro_batch=2",
    "tp=2 micro_batch=4",
    "pp=2 micro_batch=2",
    "pp=2 schedule=zbv micro_batch=2",
    "dp=4 shard=2 zero=3 micro_batch=2",
    "dp=2 tp=2 zero=1 micro_batch=2",
    "dp=2 pp=2 zero=2 micro_batch=2",
)


def step_on_recording_groups(job: Job) -> tuple[dict[str, int], dict[str, int], int]:
    world = recording_group.recording_group()
    original = dist.new_group
    dist.new_group = partial(original, backend=recording_group.BACKEND)
    try:
        mesh = Mesh(job.layout, world_group=world)
    finally:
        dist.new_group = original
    with mesh:
        trainer = Trainer(job, mesh)
        recorder = TrafficRecorder(mesh.axis_of)
        for step in range(3):
            batches = my_batches(job, mesh, step)
            if step < 2:
                trainer.step(batches)
                continue
            recording_group.counts.clear()
            with recorder:
                trainer.step(batches)
        counted = dict(recording_group.counts)
        wire = sum(send.wire for send in recorder.sends)
        assert all(send.axis in mesh.axes for send in recorder.sends), recorder.sends
    dist.barrier()
    dist.destroy_process_group(world)
    return books(recorder), counted, wire


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_steps(ranks, layout):
    job = small_job(layout)
    for recorded, counted, wire in ranks(job.layout.ranks).run(step_on_recording_groups, job):
        assert recorded == counted
        assert wire > 10_000
