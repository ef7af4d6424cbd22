"""What the job's [sync] asks for, built: the reducer that data parallelism sums gradients with."""

from __future__ import annotations

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.parallel.reducing import DirectReducer, Reducer


def make_reducer(job: Job, mesh: Mesh) -> Reducer:
    """How gradients are summed over the dp ranks."""
    return DirectReducer()
