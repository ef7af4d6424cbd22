"""The traced ledger: the program on fake tensors does what it does on real ones."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.comm.mesh import Mesh
from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values
from meshwright.ledger.compare import Tolerances, compare
from meshwright.plan.predict import predict
from meshwright.prove.ledgers import measure
from meshwright.prove.no_values import NoValues
from meshwright.prove.pool import RankPool
from meshwright.prove.trace import _alone_as, _batches, trace
from meshwright.train.measured import instruments_for
from meshwright.train.trainer import Trainer
from tests.small_jobs import small_job

Ranks = Callable[[int], RankPool]
FLOAT32 = {"precision": {"dtype": "float32"}, "optimizer": {"name": "adamw"}}
BFLOAT16 = {"precision": {"dtype": "bfloat16"}, "optimizer": {"name": "adamw"}}
MASKED = {"data": {"document_mask": True}}
TIED = {"model": {"tied": True}}

CASES = [
    ("dp=1 micro_batch=4", BFLOAT16 | MASKED),
    ("dp=2 micro_batch=2", FLOAT32 | {"train": {"deterministic": True}}),
    ("dp=2 tp=2 zero=3 micro_batch=2 recompute=full", BFLOAT16),
    ("pp=2 schedule=zbv micro_batch=2", FLOAT32 | TIED),
]
MORE = [
    ("dp=1 micro_batch=4 recompute=selective", FLOAT32),
    ("dp=2 zero=1 micro_batch=2", BFLOAT16),
    ("dp=4 shard=2 zero=2 micro_batch=1", FLOAT32 | MASKED),
    ("tp=2 micro_batch=4", {"precision": {"dtype": "float16"}, "optimizer": {"name": "sgd", "momentum": 0.0}}),
    ("dp=2 pp=2 zero=3 micro_batch=1", FLOAT32 | TIED),
    ("tp=2 pp=2 schedule=interleaved micro_batch=2", FLOAT32),
]


@pytest.mark.parametrize(("layout", "sections"), CASES + [pytest.param(*case, marks=pytest.mark.all) for case in MORE])
def test_it_equals_the_measured_one(ranks: Ranks, layout: str, sections: dict[str, dict[str, object]]) -> None:
    job = small_job(layout, **sections)
    measured, traced = measure(ranks(job.layout.ranks), job), trace(job, range(job.layout.ranks))
    found = compare([traced, measured], Tolerances())
    assert len({difference.rank for difference in found}) == job.layout.ranks
    assert [f"rank {one.rank} {one.quantity}: {one.values}" for one in found if not one.agrees] == []


@pytest.mark.parametrize(
    "layout",
    ["dp=2 micro_batch=2", "dp=4 shard=2 zero=3 tp=2 micro_batch=2", "pp=2 schedule=zero-bubble micro_batch=1"],
)
def test_steps_are_alike(layout: str) -> None:
    """The second step, the third and the traced one; in traffic and FLOPs the first too, so nothing is sent apart."""
    job = small_job(layout, **FLOAT32)
    steps = []
    with _alone_as(1, job.layout.ranks), Mesh(job.layout) as mesh, FakeTensorMode():
        trainer = Trainer(job, mesh, abstract=True)
        for _ in range(3):
            instruments = instruments_for(trainer)
            with NoValues(), instruments.counting():
                trainer.step(_batches(job, job.batch.global_size // job.layout.micro_batch // job.layout.dp))
            steps.append(instruments.entry())
    assert steps[1] == steps[2] == trace(job, [1]).ranks[0]
    assert (steps[0].sends, steps[0].computes) == (steps[1].sends, steps[1].computes)


def test_the_program_for_cuda_is_the_one_predicted() -> None:
    """Its loss works on more logits at a time, so that both must know of it."""
    sections = BFLOAT16 | {"cluster": {"device": "cuda"}, "model": {"vocabulary": 5000}}
    job = small_job("dp=1 micro_batch=4", **sections)
    traced, predicted = trace(job, [0]).ranks[0], predict(job).ranks[0]
    assert predicted.stores == traced.stores
    on_cpu = small_job("dp=1 micro_batch=4", **BFLOAT16 | {"model": {"vocabulary": 5000}})
    assert traced.stores.temporary > trace(on_cpu, [0]).ranks[0].stores.temporary


def test_it_leaves_nothing_behind() -> None:
    job = small_job("dp=2 zero=3 micro_batch=2")
    assert trace(job, [1, 0, 1]).ranks[0] == trace(job, [1]).ranks[0]
    assert not dist.is_initialized()
    assert type(torch.empty(1)) is torch.Tensor and torch.get_default_dtype() is torch.float32
    with pytest.raises(InputError, match="rank: 2 is not a rank of layout"):
        trace(job, [2])


def llama_405b(layout: str) -> Job:
    """Llama 3 405B on 16,384 ranks with the global batch of its report: 2,048 sequences of 8,192 tokens."""
    return job_from_values(
        {
            "model": {"preset": "llama3-405b"},
            "data": {"train": ["unused.txt"], "sequence_length": 8192},
            "batch": {"global_size": 2048},
            "precision": {"dtype": "bfloat16"},
            "layout": f"tp=8 pp=16 dp=128 micro_batch=1 {layout}",
        }
    ).resolve()


@pytest.mark.all
@pytest.mark.parametrize("rank", [0, 8200, 16383])
def test_any_of_16384_ranks_of_a_405b_model(rank: int) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    entry = trace(llama_405b("zero=1"), [rank]).ranks[0]
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"rank {rank}: {wall:.1f} s, {cpu:.1f} s of processor, {resident / 2**30:.2f} GiB resident")
    assert entry.place["pp"] == {0: 0, 8200: 8, 16383: 15}[rank]
    assert entry.stores.parameters > 2 * 405e9 / 128 * 0.9
    assert cpu <= 30.0 and resident <= 2 * 2**30
