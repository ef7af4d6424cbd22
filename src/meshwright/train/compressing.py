"""The compression a job asks for, built, and what the training step owes it."""

from __future__ import annotations

import torch

from meshwright.comm.copies import Copies
from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.job.nodes import compressed_node_size
from meshwright.job.validate_less_often import momentum_in_compression
from meshwright.parallel.owned import DataParallel
from meshwright.sync.codec import Codec
from meshwright.sync.compress_adam import OneBitMomentum
from meshwright.sync.compress_blocks import BlockScaled
from meshwright.sync.compress_cast import Cast
from meshwright.sync.compress_dgc import DeepGradientCompression
from meshwright.sync.compress_powersgd import PowerSgd
from meshwright.sync.compress_qsgd import Qsgd
from meshwright.sync.compress_sign import Sign
from meshwright.sync.compressed import ClippingReducer, CompressedReducer, GroupSum
from meshwright.sync.memory import Memories
from meshwright.sync.two_stage import TwoStage
from meshwright.train.optimizer import AdamW, Optimizer


def codec_of(job: Job) -> Codec | None:
    """The codec a job names; None for compressions of another kind."""
    sync = job.sync
    match sync.compression:
        case "fp16" | "bf16":
            return Cast(sync.compression)
        case "int8" | "fp8":
            return BlockScaled(sync.compression_block, sync.compression)
        case "sign":
            return Sign(sync.compression_block)
        case "qsgd":
            return Qsgd(sync.compression_block, sync.compression_bits)
        case _:
            return None


def method_of(job: Job, memories: Memories) -> GroupSum:
    """How one buffer of gradients, or of outer ones, is summed over one group."""
    sync, seed = job.sync, job.train.seed
    codec = codec_of(job)
    if codec is not None:
        return TwoStage(codec, memories, feedback=sync.compression != "qsgd", seed=seed)
    if sync.compression == "powersgd":
        return PowerSgd(memories, rank=sync.compression_rank, least_saving=sync.compression_least_saving, seed=seed)
    if sync.compression == "dgc":
        return DeepGradientCompression(
            memories,
            sparsity=sync.compression_sparsity,
            momentum=correction_momentum(job),
            masking=sync.momentum_masking,
            warmup_steps=sync.compression_warmup_steps,
        )
    assert sync.compression in ("one-bit-adam", "zero-one-adam")
    return OneBitMomentum(
        memories,
        kind=sync.compression,
        beta=job.optimizer.betas[0],
        block=sync.compression_block,
        warmup_steps=sync.compression_warmup_steps,
    )


def correction_momentum(job: Job) -> float:
    """Momentum that the compressor applies in the optimizer's stead (deep gradient compression with SGD)."""
    return job.optimizer.momentum if momentum_in_compression(job) and job.optimizer.name == "sgd" else 0.0


def optimizer_momentum(job: Job) -> float:
    """Momentum that is left to the optimizer."""
    return 0.0 if momentum_in_compression(job) else job.optimizer.momentum


def make_compressed(job: Job, mesh: Mesh) -> CompressedReducer:
    """The reducer of a job that compresses its gradients."""
    memories = Memories()
    # These know themselves what a warm-up is; for the others it is whole gradients.
    own_warmup = job.sync.compression in ("dgc", "one-bit-adam", "zero-one-adam")
    method = method_of(job, memories)
    dtype = torch.float64 if job.precision.dtype == "float64" else torch.float32
    only_slow, limit = job.sync.compression_level == "slow", job.optimizer.clip_norm
    nodes = _nodes(job, mesh)
    if clips_locally(job) and limit is not None:
        return ClippingReducer(
            method, memories, dtype=dtype, device=mesh.device, only_slow=only_slow, nodes=nodes, limit=limit
        )
    return CompressedReducer(
        method,
        memories,
        dtype=dtype,
        device=mesh.device,
        only_slow=only_slow,
        nodes=nodes,
        warmup_steps=0 if own_warmup else job.sync.compression_warmup_steps,
    )


def _nodes(job: Job, mesh: Mesh) -> Copies | None:
    """The dp ranks by node, where replicated ranks compress between nodes alone."""
    size = compressed_node_size(job)
    if size is None:
        return None
    mesh.divide_by_node(size)
    return Copies(dp=mesh.group("dp"), shard=mesh.group("intra"), copy=mesh.group("inter"))


def clips_locally(job: Job) -> bool:
    """Whether ``optimizer.clip_norm`` limits each rank's gradients before compression, and not their sum."""
    return job.sync.compression == "dgc" and job.optimizer.clip_norm is not None


def make_compressing(job: Job, data_parallel: DataParallel, optimizer: Optimizer) -> Compressing | None:
    """What the step must do for the compressor; None where nothing is compressed."""
    reducer = getattr(data_parallel, "reducer", None)
    return Compressing(job, reducer, optimizer) if isinstance(reducer, CompressedReducer) else None


class Compressing:
    """What a training step does for its compressor, before and after."""

    def __init__(self, job: Job, reducer: CompressedReducer, optimizer: Optimizer) -> None:
        self.reducer, self._optimizer = reducer, optimizer
        self.clips_locally = clips_locally(job)

    def begin(self, step: int) -> None:
        """Step ``step`` (from 0) starts."""
        self.reducer.begin(step)
        method = self.reducer.method
        if isinstance(method, OneBitMomentum) and isinstance(self._optimizer, AdamW):
            self._optimizer.frozen_variance = not method.full

    def settle(self, applied: bool) -> None:
        """The step was applied on all ranks, or on none."""
        self.reducer.settle(applied)
