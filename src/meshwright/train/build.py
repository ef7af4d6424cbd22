"""A job and a mesh become this rank's part of the distributed model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.job.validate_less_often import apart
from meshwright.model.cross_entropy import DEVICE_CHUNK_ELEMENTS
from meshwright.model.initialise import initialise
from meshwright.model.partition import Partition
from meshwright.model.transformer import StageModel
from meshwright.parallel.data_parallel import make_data_parallel
from meshwright.parallel.owned import DataParallel, Owned
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.tensor import TensorPartition, reduce_replicated_gradients
from meshwright.parallel.tied import combine_tied_gradients
from meshwright.train.gradient_norms import WatchedReducer, watches_norms
from meshwright.train.initial_weights import load_weights
from meshwright.train.synchronise import make_reducer

COMPUTE_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class Built:
    """This rank's stages by stage number, how their gradients are combined, and the pipeline if there is one."""

    stages: dict[int, StageModel]
    data_parallel: DataParallel
    pipeline: PipelineExecutor | None
    after_reduction: list[Callable[[list[Owned]], None]] = field(default_factory=list)
    watched: WatchedReducer | None = None


def build_stages(job: Job, mesh: Mesh, device: torch.device, *, abstract: bool = False) -> dict[int, StageModel]:
    """This rank's stage modules with initialised parameters in the master dtype."""
    layout, spec = job.layout, job.model_spec
    partition = TensorPartition(mesh) if layout.tp > 1 else Partition()
    if device.type == "cuda" or job.cluster.device == "cuda":  # a trace for CUDA runs on fake CPU tensors
        partition.loss_chunk = DEVICE_CHUNK_ELEMENTS
    dtype = COMPUTE_DTYPES[job.precision.dtype]
    master_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    layers = layout.stage_layers(spec.layers)
    stages = {}
    for stage in layout.stages_of(mesh.coordinate("pp")):
        with device, _default_dtype(master_dtype):
            module = StageModel(spec, layers[stage], stage == 0, stage == layout.stage_count - 1, partition)
        if not abstract:
            _fill(module, job)
        apply_recompute(module, layout.stage_recompute(stage))
        if job.train.compile:
            for block in module.layers.values():
                block.compile()
        stages[stage] = module
    return stages


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fill(module: StageModel, job: Job) -> None:
    """Starting values: from a Hugging Face folder or a checkpoint, or from the seed."""
    if job.model.init_from is not None:
        load_weights(module, Path(job.model.init_from))
    else:
        initialise(module, job.train.seed)


def build(job: Job, mesh: Mesh, device: torch.device, *, abstract: bool = False) -> Built:
    """Everything one rank needs to run a step."""
    layout = job.layout
    stages = build_stages(job, mesh, device, abstract=abstract)
    dtype = COMPUTE_DTYPES[job.precision.dtype]
    reducer = make_reducer(job, mesh)
    watched = WatchedReducer(reducer) if watches_norms(job) else None
    data_parallel = make_data_parallel(
        stages,
        layout=layout,
        mesh=mesh,
        dtype=dtype,
        bucket_bytes=job.bucket_bytes,
        deterministic=job.train.deterministic,
        tied_apart=job.model_spec.tied and layout.stage_count > 1,
        reducer=watched or reducer,
        apart=apart(job),
    )
    after: list[Callable[[list[Owned]], None]] = []
    if layout.tp > 1:
        after.append(lambda owned: reduce_replicated_gradients(owned, mesh))
    if job.model_spec.tied and layout.stage_count > 1:
        after.append(lambda owned: combine_tied_gradients(owned, mesh, layout))
    pipeline = None
    if layout.stage_count > 1:
        pipeline = PipelineExecutor(stages, data_parallel, mesh, layout, job.model_spec, dtype, device)
    return Built(stages, data_parallel, pipeline, after, watched)
