"""Which kind of data parallelism a layout asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.comm.copies import Copies
from meshwright.comm.mesh import Mesh
from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.parallel.buckets import DEFAULT_BUCKET_BYTES
from meshwright.parallel.owned import DataParallel
from meshwright.parallel.reducing import Reducer
from meshwright.parallel.replicate import BucketedDataParallel
from meshwright.parallel.shard import ShardedDataParallel


def make_data_parallel(
    stages: Mapping[int, nn.Module],
    *,
    layout: Layout,
    mesh: Mesh,
    dtype: torch.dtype,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    deterministic: bool = False,
    tied_apart: bool = False,
    reducer: Reducer | None = None,
    apart: bool = False,
) -> DataParallel:
    """Spread this rank's modules over the dp ranks.

    Args:
        stages: the modules by stage number, their parameters initialised, in the master dtype (float32,
            or float64 when that is the dtype). Blocks of a stage stand in its attribute ``layers``.
        layout: ``zero``, ``dp`` and ``shard`` say how; with one rank to shard over, nothing is sharded.
        mesh: the dp groups.
        dtype: of forward and backward.
        bucket_bytes: gradient bytes of a bucket (zero 0 and 1).
        deterministic: sum the micro-batches in the order of the global batch, so that dp changes no bit.
        tied_apart: the first and the last stage each hold a copy of a tied embedding; the last stage's
            is not counted.
        reducer: how gradients are summed over the dp ranks; absent: plainly.
        apart: replicas (``shard`` ranks each, or with zero=0 and no ``shard`` single ranks) exchange no gradients.
    """
    sharded = layout.zero > 0 and layout.shard_degree > 1
    copies = _copies_of_replica(layout, mesh, sharded) if apart else _copies(layout, mesh, sharded)
    whole = {
        f"stage{number}:{name}" for number, module in stages.items() for name in getattr(module, "tp_replicated", ())
    }
    uncounted = set(whole) if mesh.coordinate("tp") > 0 else set()
    alone = set()
    if tied_apart:
        alone = {f"stage{number}:{name}" for number, module in stages.items() for name in _tied_names(module)}
        uncounted |= {name for name in alone if not name.startswith("stage0:")}
    if sharded and layout.zero >= 2:
        return ShardedDataParallel(
            stages,
            copies,
            mesh.device_mesh("shard"),
            dtype,
            free_after_forward=layout.zero == 3,
            keep_last_block=layout.pp == 1,
            split_backward=layout.pp > 1 and layout.schedule in SPLIT_BACKWARD_SCHEDULES,
            deterministic=deterministic,
            reducer=reducer,
            uncounted=frozenset(uncounted),
            tp_replicated=frozenset(whole),
        )
    return BucketedDataParallel(
        stages,
        copies,
        dtype,
        bucket_bytes=bucket_bytes,
        deterministic=deterministic,
        reducer=reducer,
        alone=frozenset(alone),
        uncounted=frozenset(uncounted),
        tp_replicated=frozenset(whole),
    )


def _copies(layout: Layout, mesh: Mesh, sharded: bool) -> Copies:
    degree = layout.shard_degree if sharded else 1
    return Copies(
        dp=mesh.group("dp"),
        shard=mesh.group("shard") if sharded else None,
        copy=None if degree == layout.dp else mesh.group("replicate") if sharded else mesh.group("dp"),
    )


def _copies_of_replica(layout: Layout, mesh: Mesh, sharded: bool) -> Copies:
    """Of one replica alone."""
    if sharded:
        return Copies(mesh.group("shard"), mesh.group("shard"), None)
    if layout.shard is not None and layout.shard > 1:
        return Copies(mesh.group("shard"), None, mesh.group("shard"))
    return Copies(mesh.group("replicate"), None, None)


def _tied_names(module: nn.Module) -> list[str]:
    """The physical parameters that hold (a copy of) the embedding."""
    segments = getattr(module, "segments", {})
    return [name for name, boxes in segments.items() if any(box.name == "embedding.weight" for box in boxes)]
