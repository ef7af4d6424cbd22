"""What the job's [sync] asks for, built: the reducer that data parallelism sums gradients with."""

from __future__ import annotations

import torch.distributed as dist

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.job.validate_less_often import apart
from meshwright.parallel.reducing import DirectReducer, Reducer
from meshwright.sync.all_reduce import Algorithm, make_algorithm
from meshwright.sync.reducer import AlgorithmReducer
from meshwright.train.compressing import make_compressed


def make_reducer(job: Job, mesh: Mesh) -> Reducer:
    """How gradients are summed over the dp ranks."""
    if job.sync.compression != "none" and not apart(job):
        return make_compressed(job, mesh)
    sync = job.sync
    if sync.algorithm in ("auto", "direct"):
        return DirectReducer()

    def algorithm_of(group: dist.ProcessGroup) -> Algorithm:
        nodes = None
        if sync.node_size is not None:
            nodes = [rank // sync.node_size for rank in mesh.ranks(mesh.axis_of(group))]
        return make_algorithm(sync.algorithm, nodes, sync.chunk_bytes)

    return AlgorithmReducer(algorithm_of)
