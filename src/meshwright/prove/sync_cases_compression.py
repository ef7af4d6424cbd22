"""Cases of ``--matrix sync``: every compressor at the setting at which it loses nothing, in every kind of layout.

fp16, bf16          whole gradients for as long as the run lasts (a 16-bit float always rounds)
int8 ... qsgd       one element a block
powersgd            rank of the largest matrix, every matrix
dgc                 every element travels; momentum in the compressor, without masking: momentum SGD
one-bit-adam        whole gradients alone; then one element a block, which only v, frozen, keeps from being Adam
zero-one-adam       its first 16 steps are whole gradients
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.prove.sync_proof import SyncProof

_FULL_RANK = {"compression": "powersgd", "compression_rank": 400, "compression_least_saving": 0.0}
_ALL_ELEMENTS = {"compression": "dgc", "compression_sparsity": 0.0}
_UNCLIPPED = {"clip_norm": None}
_NODES = {"compression_level": "slow", "node_size": 2}


def compression_cases() -> Iterator[SyncProof]:
    """All of them."""
    for kind in ("int8", "fp8", "sign", "qsgd"):
        sync = {"compression": kind, "compression_block": 1}
        for layout in ("dp=2 micro_batch=2", "dp=2 zero=1 micro_batch=4", "dp=2 zero=2 micro_batch=2"):
            yield SyncProof(f"{kind}, block 1, {layout}", layout, sync)
    one = {"compression": "int8", "compression_block": 1}
    for layout in (
        "dp=2 zero=3 micro_batch=2",
        "dp=4 shard=2 zero=1 micro_batch=2",
        "dp=4 shard=2 zero=3 micro_batch=2",
        "dp=2 tp=2 micro_batch=2",
        "dp=2 pp=2 zero=1 micro_batch=1",
        "dp=2 pp=2 zero=2 schedule=zbv micro_batch=1",
    ):
        yield SyncProof(f"int8, block 1, {layout}", layout, one, "adamw")
    slow = {**one, "compression_level": "slow"}
    for zero in (1, 2, 3):
        layout = f"dp=4 shard=2 zero={zero} micro_batch=1"
        yield SyncProof(f"int8, block 1, slow level alone, {layout}", layout, slow)
    for layout, node_size in (("dp=4 micro_batch=1", 2), ("dp=4 tp=2 micro_batch=1", 4)):
        nodes = {**one, **_NODES, "node_size": node_size}
        for optimizer in ("sgd", "adamw"):
            label = f"int8, block 1, between nodes of {node_size} alone, {layout}, {optimizer}"
            yield SyncProof(label, layout, nodes, optimizer)
    for kind in ("fp16", "bf16"):
        sync = {"compression": kind, "compression_warmup_steps": 1000}
        yield SyncProof(f"{kind}, warm-up alone, dp=2", "dp=2 micro_batch=4", sync)
    for layout in ("dp=2 micro_batch=4", "dp=2 zero=1 micro_batch=2", "dp=2 zero=3 micro_batch=2"):
        yield SyncProof(f"powersgd, full rank, {layout}", layout, _FULL_RANK)
    yield SyncProof("powersgd, full rank, dp=4 shard=2 zero=2", "dp=4 shard=2 zero=2 micro_batch=2", _FULL_RANK)
    for layout in ("dp=2 micro_batch=4", "dp=4 shard=2 zero=1 micro_batch=2", "dp=2 zero=2 micro_batch=2"):
        label = f"dgc, all elements, {layout}"
        yield SyncProof(label, layout, _ALL_ELEMENTS, "adamw")
        unmasked = {**_ALL_ELEMENTS, "momentum_masking": False}
        yield SyncProof(f"{label}, with momentum", layout, unmasked, settings=_UNCLIPPED, gradients=False)
    pieces = {**_ALL_ELEMENTS, "momentum_masking": False, **_NODES}
    label = "dgc, all elements, between nodes of 2 alone, dp=4, with momentum"
    yield SyncProof(label, "dp=4 micro_batch=1", pieces, settings=_UNCLIPPED, gradients=False)
    warm = {"compression": "one-bit-adam", "compression_warmup_steps": 1000}
    yield SyncProof("one-bit-adam, warm-up alone, dp=2", "dp=2 micro_batch=4", warm, "adamw")
    yield SyncProof("one-bit-adam, warm-up alone, dp=2 tp=2", "dp=2 tp=2 micro_batch=4", warm, "adamw")
    label = "one-bit-adam, warm-up alone, between nodes of 2 alone, dp=4"
    yield SyncProof(label, "dp=4 micro_batch=1", {**warm, **_NODES}, "adamw")
    refresh = {"compression": "zero-one-adam"}
    yield SyncProof("zero-one-adam, whole rounds alone, dp=2", "dp=2 micro_batch=4", refresh, "adamw")
