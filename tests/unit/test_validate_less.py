"""What of compression and of replicas that train apart is refused, and in which words."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.job.job import load_job

DGC = ("sync.compression=dgc",)
SLOW = "sync.compression_level=slow"
LOCAL = ("sync.strategy=local",)
RING = "sync.algorithm=ring"


def refusal(layout: str, *settings: str) -> str:
    """Why the quick-start job is refused under a layout and with settings."""
    with pytest.raises(InputError) as caught:
        load_job("examples/quickstart.toml", settings, layout).resolve()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "settings", "words"),
    [
        ("tp=2", DGC, "dgc has nothing to send with dp=1 (the 2 ranks are of tp and pp); use none, or dp of"),
        ("dp=2", (*DGC, "train.deterministic=true"), "promises bits that do not; use compression=none"),
        ("dp=2", (*DGC, "precision.dtype=float16"), "use bfloat16 or float32"),
        ("dp=2", (*DGC, "sync.algorithm=ring"), "use algorithm=auto"),
        ("dp=2", (*DGC, "model.hidden=32", "model.layers=1", "model.vocabulary=256", "model.ffn_hidden=64",
                  "model.heads=2", "model.kv_heads=2", "model.head_size=16"), "saves nothing on the"),
        ("dp=2", (*DGC, SLOW), "dp=2 makes no two such nodes under layout dp=2 micro_batch=4; use a dp such as 4"),
        ("dp=4 zero=1", (*DGC, SLOW), "has one copy; use a shard between 1 and dp, zero=0 with sync.node_size"),
        ("dp=4", (*DGC, SLOW), "sync.node_size is missing, but sync.compression_level=slow with replicated state must "
                               "know which ranks share a node; give the ranks of a node, 2"),
        ("dp=8 tp=2", (*DGC, SLOW, "sync.node_size=6"), "6 puts unequal numbers of dp ranks in a node under layout"),
        ("dp=8 tp=2", (*DGC, SLOW, "sync.node_size=2"), "2 puts one of the dp ranks in a node"),
        ("dp=8 tp=2", (*DGC, SLOW, "sync.node_size=99"), "99 puts all 8 dp ranks in a node"),
        ("dp=8 tp=2", (*DGC, SLOW, "sync.node_size=5"), "needs several nodes of as many each, at least 2; use 4 or 8"),
        ("dp=4 shard=2 zero=1", (*DGC, SLOW, "sync.node_size=2"), "where shard=2 says which ranks sum whole; leave it"),
        ("dp=4", ("sync.compression=powersgd", SLOW, "sync.node_size=2"), "powersgd needs whole matrices, but"),
        ("dp=4", (*DGC, "sync.node_size=2"), "sync.node_size: 2 is not used by sync.algorithm=auto; leave it out"),
        ("dp=4 tp=2 placement=0,0,1,2,3,4,5,6", (*DGC, SLOW), "does not name each rank once"),
        ("dp=2", (*DGC, "sync.compression_bits=8"), "sync.compression_bits: 8 is not used by sync.compression=dgc"),
        ("dp=2", ("sync.compression_sparsity=0.5",), "is not used by sync.compression=none"),
        ("dp=2", ("sync.compression_warmup_steps=5",), "sync.compression_warmup_steps: 5 needs a compression, but"),
        ("dp=2", (SLOW,), "sync.compression_level: slow needs a compression, but"),
        ("dp=2 tp=2", DGC, "dgc clips on each rank before it chooses (optimizer.clip_norm=1)"),
        ("dp=2", ("sync.compression=one-bit-adam",), "has no gradient for optimizer.clip_norm=1 to limit"),
        ("dp=2", ("sync.compression=one-bit-adam",), "give at least 1 step of whole gradients"),
        ("dp=2 zero=1", ("sync.compression=zero-one-adam",), "use zero=0, or compression=sign"),
        ("dp=2", ("sync.compression=zero-one-adam", "optimizer.name=sgd"), "optimizer.name=sgd; use adamw"),
        ("dp=2", ("sync.compression=powersgd", "sync.compression_rank=900"), "use at most"),
        ("dp=4 shard=2 zero=1", ("sync.compression=powersgd",), "use zero=0, 2 or 3, or shard=4"),
        ("dp=2", ("sync.compression=gzip",), "none, fp16, bf16"),
        ("tp=2", LOCAL, "needs at least 2 replicas"),
        ("dp=2 zero=1", LOCAL, "with zero of at least 1 a shard below dp"),
        ("dp=4 shard=2", (), "shard=2 below dp=4 needs sharded state, but zero=0"),
        ("dp=2", (*LOCAL, "train.deterministic=true"), "use strategy=all-reduce, or deterministic=false"),
        ("dp=2", (*LOCAL, "sync.algorithm=ring"), "use algorithm=auto"),
        ("dp=2", (*LOCAL, "sync.compression=int8"), "use compression=none, or strategy=diloco"),
        ("dp=2", (*LOCAL, "sync.period=0"), "sync.period: 0 must be a whole number of at least 1"),
        ("dp=2", (*LOCAL, "sync.outer_lr=1.0"), "sync.outer_lr: 1.0 is not used by sync.strategy=local"),
        ("dp=4", (*LOCAL, "sync.group_size=2"), "sync.group_period is missing"),
        ("dp=4", (*LOCAL, "sync.group_size=3", "sync.group_period=2"), "use 2"),
        ("dp=4", (*LOCAL, "sync.group_size=2", "sync.group_period=3"), "use 1, 2, 4 or 8"),
        ("dp=4", (*LOCAL, "sync.period=1", "sync.group_size=2", "sync.group_period=1"), "use a period of at least 2"),
        ("dp=2", (*LOCAL, "sync.period=151"), "sync.period: 151 is above train.steps=150"),
        ("dp=2", ("sync.strategy=diloco", "train.steps=10"), "sync.period: 16 is above train.steps=10"),
        ("dp=2", (*LOCAL, "sync.synchronous_steps=150"), "use at most 149, or strategy=all-reduce"),
        ("dp=2", (*LOCAL, "sync.average=state", "optimizer.name=sgd"), "which sgd without momentum does not have"),
        ("dp=1", LOCAL, "needs at least 2 replicas, but dp=1 with zero=0 and shard=none is one"),
        ("dp=2", (*DGC, "sync.momentum_masking=false"), "is of a momentum that adamw leaves to itself or does not"),
        ("dp=2", (*DGC, "sync.compression_warmup_steps=150"), "so dgc would never be in force; use at most 149"),
        ("dp=2", ("sync.strategy=diloco", *DGC, "sync.compression_warmup_steps=3"), "warmup_steps: 3 is not used by"),
        ("dp=2", ("sync.strategy=diloco", "sync.outer_lr=0"), "sync.outer_lr: 0 must be a number above 0"),
        ("dp=2", ("sync.strategy=diloco", "sync.outer_lr=inf"), "must be a number above 0 and finite"),
        ("dp=2", ("sync.algorithm=direct", "sync.chunk_bytes=512"), "512 is not used by sync.algorithm=direct"),
        ("dp=2", (*DGC, "sync.chunk_bytes=512"), "sync.chunk_bytes: 512 is not used by sync.compression=dgc"),
        ("dp=2", (*LOCAL, "sync.chunk_bytes=512"), "sync.chunk_bytes: 512 is not used by sync.strategy=local"),
        ("dp=2", ("sync.strategy=server", "sync.bucket_bytes=512"), "is not used by sync.strategy=server"),
        ("dp=2 zero=2", ("sync.bucket_bytes=512",), "sync.bucket_bytes: 512 is not used with zero=2, which sums"),
        ("dp=2 zero=3", ("sync.bucket_bytes=auto",), "sync.bucket_bytes: auto is not used with zero=3"),
        ("dp=2 zero=1", (RING, "sync.chunk_bytes=512"), "sync.chunk_bytes: 512 cuts all-reduces, but with zero=1 over"),
        ("dp=2", ("sync.strategy=easgd", "sync.elasticity=0.6"), "use at most 0.5"),
        ("dp=2", ("sync.strategy=diloco", "sync.compression=powersgd"), "is not made for outer gradients"),
        ("dp=2", ("sync.strategy=diloco", "sync.compression=dgc", "sync.momentum_masking=false"), "leave it out"),
        ("dp=2 tp=2", ("sync.strategy=diloco", "sync.compression=dgc"), "use fp16, bf16 or none"),
        ("dp=2 tp=2", ("sync.strategy=diloco", "sync.compression=int8"), "use fp16, bf16 or none"),
        ("dp=2", ("sync.strategy=diloco", "sync.fragments=3"), "does not divide sync.period=16"),
        ("dp=2", ("sync.strategy=diloco", "sync.fragments=4", "sync.overlap=4"), "use at most 3"),
    ],
)  # fmt: skip
def test_refusals(layout: str, settings: tuple[str, ...], words: str) -> None:
    assert words in refusal(layout, *settings)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp=2", DGC),
        ("dp=2 zero=3", ("sync.compression=powersgd",)),
        ("dp=4 shard=2 zero=2", ("sync.compression=sign", SLOW)),
        ("dp=8 tp=2", ("sync.compression=sign", SLOW, "sync.node_size=8")),
        ("dp=4 shard=1 zero=1", (*DGC, SLOW, "sync.node_size=2")),
        ("dp=4 shard=2", LOCAL),
        ("dp=4 shard=2 zero=1", (RING, "sync.chunk_bytes=512", "sync.bucket_bytes=512")),
        ("dp=4 shard=1 zero=2", (RING, "sync.chunk_bytes=512", "sync.bucket_bytes=512")),
        ("dp=2", (*DGC, "recovery.digest_every=5")),
        ("dp=4", (*LOCAL, "sync.group_size=2", "sync.group_period=4")),
        ("dp=4 shard=2 zero=3", ("sync.strategy=diloco", "sync.fragments=4", "sync.overlap=3")),
    ],
)
def test_what_goes_together(layout: str, settings: tuple[str, ...]) -> None:
    assert load_job("examples/quickstart.toml", settings, layout).resolve().layout.dp >= 2
