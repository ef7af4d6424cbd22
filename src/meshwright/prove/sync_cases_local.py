"""Cases of ``--matrix sync``: replicas that meet after every step are one device; outer steps of 1 are local SGD."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.prove.check import OptimizerName
from meshwright.prove.sync_proof import SameRun, SyncProof

_BOTH: tuple[OptimizerName, ...] = ("sgd", "adamw")
_PLAIN = {"momentum": 0.0, "clip_norm": None}
_UNCLIPPED = {"clip_norm": None}
_LAYOUTS = (
    "dp=2 micro_batch=4",
    "dp=2 micro_batch=2",
    "dp=4 shard=2 micro_batch=2",
    "dp=4 shard=2 zero=1 micro_batch=2",
    "dp=4 shard=2 zero=2 micro_batch=1",
    "dp=4 shard=2 zero=3 micro_batch=2",
    "dp=2 tp=2 micro_batch=2",
    "dp=2 pp=2 micro_batch=1",
)


def local_cases() -> Iterator[SyncProof | SameRun]:
    """All of them."""
    each = {"strategy": "local", "period": 1}
    outer = {"strategy": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}
    for layout in _LAYOUTS:
        label = f"local SGD, period 1, {layout}"
        yield SyncProof(label, layout, each, settings=_PLAIN, gradients=False)
    yield SyncProof(
        "local SGD, period 1, momentum averaged, dp=2", "dp=2 micro_batch=4", {**each, "average": "state"},
        settings=_UNCLIPPED, gradients=False,
    )  # fmt: skip
    yield SyncProof(
        "local SGD, period 1, global batch 7, dp=2", "dp=2 micro_batch=2", each, settings=_PLAIN, gradients=False,
        global_size=7,
    )  # fmt: skip
    yield SyncProof("DiLoCo, period 1, outer step 1, dp=2", "dp=2 micro_batch=4", {**outer, "period": 1},
                    settings=_PLAIN, gradients=False)  # fmt: skip
    synchronous = {"strategy": "local", "period": 4, "synchronous_steps": 1000}
    for optimizer in _BOTH:
        yield SyncProof(
            f"post-local SGD, still synchronous, {optimizer}, dp=4 shard=2 zero=2", "dp=4 shard=2 zero=2 micro_batch=2",
            synchronous, optimizer, gradients=False,
        )  # fmt: skip
    for layout in ("dp=2 micro_batch=2", "dp=4 shard=2 zero=3 micro_batch=2", "dp=2 tp=2 micro_batch=2"):
        for optimizer in _BOTH:
            proof = SyncProof(
                f"DiLoCo, outer step 1 = local SGD, period 5, {optimizer}, {layout}", layout, {**outer, "period": 5},
                optimizer, gradients=False,
            )  # fmt: skip
            yield SameRun(proof, {"strategy": "local", "period": 5})
