"""The measured ledger of whole training steps against hand formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.job.model_spec import ModelSpec
from meshwright.ledger.ledger import Ledger
from meshwright.prove.pool import RankPool
from meshwright.train.measured import LedgerRecorder
from meshwright.train.trainer import Trainer
from tests.small_jobs import my_batches, small_job

Ranks = Callable[[int], RankPool]
ADAMW = {"optimizer": {"name": "adamw"}, "precision": {"dtype": "float32"}}


def measure(job: Job) -> str:
    """On a rank: four steps, the third counted, the fourth timed."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        recorder = LedgerRecorder(trainer, None, first_step=3)
        for step in range(4):
            with recorder.around(step):
                with recorder.span("data"):
                    batches = my_batches(job, mesh, step)
                trainer.step(batches)
        assert recorder.ledger is not None
        return recorder.ledger.to_json()


def ledger_of(ranks: Ranks, job: Job) -> Ledger:
    return Ledger.from_json(ranks(job.layout.ranks).run(measure, job)[0])


def physical_shapes(spec: ModelSpec, layer: int | None) -> list[tuple[int, ...]]:
    """Shapes of one FSDP group: a layer (q, k, v and gate, up fused along the rows), or what is outside the layers."""
    if layer is None:
        return [shape for _, shape in [*spec.embedding_parameters(), *spec.head_parameters()]]
    shapes = dict(spec.layer_parameters(layer))
    fused = {
        "attention.q": "qkv",
        "attention.k": "qkv",
        "attention.v": "qkv",
        "mlp.gate": "gate_up",
        "mlp.up": "gate_up",
    }
    rows: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        key = fused.get(name.split(".", 2)[2].rpartition(".")[0], name)
        rows[key] = (rows[key][0] + shape[0], *shape[1:]) if key in rows else shape
    return list(rows.values())


def test_zero_3_on_four_ranks_by_hand(ranks: Ranks) -> None:
    """Bytes of state per rank and bytes sent per step, from the shapes alone."""
    job = small_job("dp=4 zero=3 micro_batch=2", **ADAMW)
    ledger = ledger_of(ranks, job)
    spec = job.model_spec
    groups = [physical_shapes(spec, layer) for layer in (*range(spec.layers), None)]
    # FSDP2 gives each rank ceil(rows / 4) rows of every parameter; the rows that are missing at the end are padding.
    padded = [sum(-(-shape[0] // 4) * math.prod(shape[1:]) * 4 for shape in group) for group in groups]
    for entry in ledger.ranks:
        assert entry.stores.parameters == sum(padded)
        assert entry.stores.gradients == sum(padded)
        mine = sum(
            max(0, min(-(-shape[0] // 4), shape[0] - entry.rank * -(-shape[0] // 4))) * math.prod(shape[1:]) * 4
            for group in groups
            for shape in group
        )
        assert entry.stores.optimizer == 2 * mine
    assert sum(entry.stores.optimizer for entry in ledger.ranks) == 2 * 4 * spec.parameter_count
    for entry in ledger.ranks:
        sends = {(s.axis, s.operation, s.phase): (s.payload, s.messages) for s in entry.sends}
        assert sends["shard", "all_gather", "forward"] == (sum(padded), len(groups))
        # Backward gathers the layers again, but not the last one and what stands outside, which were kept.
        assert sends["shard", "all_gather", "backward"] == (sum(padded[:-2]), spec.layers - 1)
        assert sends["shard", "reduce_scatter", "reduce"] == (4 * sum(padded), len(groups))
        wire = sum(s.wire for s in entry.sends if s.axis == "shard")
        assert wire == 3 * (sum(padded) + sum(padded[:-2]) + sum(padded))


def test_replicated_state_by_hand(ranks: Ranks) -> None:
    """All of it on each rank: 4 bytes a value for parameters and gradients, 8 for moments; dp reduces once a step."""
    job = small_job("dp=2 micro_batch=2", **ADAMW)
    count = job.model_spec.parameter_count
    for entry in ledger_of(ranks, job).ranks:
        assert entry.stores.optimizer == 8 * count
        assert 0 <= entry.stores.parameters - 4 * count < 4 * 2 * 10, "buckets are padded to a multiple of dp"
        assert entry.stores.gradients == entry.stores.parameters
        reduced = [s for s in entry.sends if (s.operation, s.phase) == ("reduce_scatter", "reduce")]
        assert sum(s.payload for s in reduced) == entry.stores.gradients, "two micro-batches, one reduction"


@pytest.mark.parametrize(
    "layout",
    ["dp=2", "dp=2 zero=3", "tp=2 micro_batch=4", "pp=2 micro_batch=1", "dp=2 tp=2", "pp=2 schedule=zbv micro_batch=1"],
)
def test_flops_by_hand_and_parts_that_sum_to_the_wall(ranks: Ranks, layout: str) -> None:
    job = small_job(layout, **ADAMW)
    ledger = ledger_of(ranks, job)
    spec, tokens = job.model_spec, job.batch.global_size * job.data.sequence_length
    matrices = sum(math.prod(shape) for name, shape in spec.parameters() if len(shape) == 2 and "embedding" not in name)
    padding = (-spec.vocabulary % job.layout.tp) * spec.hidden
    pairs = job.data.sequence_length**2 / 2
    attention = 4 * job.batch.global_size * spec.heads * spec.head_size * pairs * spec.layers
    forward = sum(entry.computes.forward for entry in ledger.ranks)
    assert forward == 2 * tokens * (matrices + padding) + attention
    assert sum(entry.computes.backward for entry in ledger.ranks) == 2 * forward
    for entry in ledger.ranks:
        spends = entry.spends
        assert spends is not None
        assert spends.sum == pytest.approx(spends.wall, rel=0.02)
        assert spends.compute["forward"] > 0


def test_recomputation_is_counted_apart(ranks: Ranks) -> None:
    plain = ledger_of(ranks, small_job("dp=1 micro_batch=8", **ADAMW)).ranks[0]
    again = ledger_of(ranks, small_job("dp=1 micro_batch=8 recompute=full", **ADAMW)).ranks[0]
    assert again.computes.model == plain.computes.model
    assert again.computes.recompute > plain.computes.recompute
    assert again.stores.activations < plain.stores.activations
