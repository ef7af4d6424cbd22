"""The standard set of layouts a proof runs over, at proof size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from meshwright.job.layout_text import parse_layout
from meshwright.job.model_spec import ModelSpec

PROOF_LAYERS, PROOF_HIDDEN, PROOF_SEQUENCE, PROOF_VOCABULARY, PROOF_HEADS = 8, 64, 64, 97, 4
# Those that train what one device trains; 2bw is held against one device that takes its gradients one update late.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Case:
    """One layout at proof size, and what of the model and the data it sets itself."""

    label: str
    layout: Layout
    kv_heads: int = 2
    tied: bool = False
    masked: bool = True
    global_size: int = 8


def proof_spec(spec: ModelSpec, case: Case) -> ModelSpec:
    """The job's family at 8 layers and hidden size 64; vocabulary 97 divides by no degree."""
    changed = {
        "name": f"{spec.name} at proof size",
        "layers": PROOF_LAYERS,
        "hidden": PROOF_HIDDEN,
        "heads": PROOF_HEADS,
        "kv_heads": case.kv_heads if spec.kv_heads != spec.heads else PROOF_HEADS,
        "head_size": PROOF_HIDDEN // PROOF_HEADS,
        "ffn_hidden": 160,
        "vocabulary": PROOF_VOCABULARY,
        "max_positions": max(PROOF_SEQUENCE, 128),
        "tied": case.tied,
        "sliding_window": None if spec.sliding_window is None else PROOF_SEQUENCE // 4,
        "window_from_layer": min(spec.window_from_layer, PROOF_LAYERS // 2),
    }
    return ModelSpec.model_validate({**spec.model_dump(), **changed})


def layout_cases(max_ranks: int = 8) -> list[Case]:
    """Every kind of layout: each axis alone, in pairs, and all three; each schedule; each zero stage."""
    cases = [*_data_parallel(), *_tensor_and_pipeline(), *_products(), *_batches_and_models()]
    return [case for case in cases if case.layout.ranks <= max_ranks]


def self_test_cases(max_ranks: int = 4) -> list[Case]:
    """One case of each kind of layout, for planted errors."""
    texts = [
        "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=4 shard=2 zero=3", "tp=2",
        *[f"pp=2 schedule={schedule} micro_batch=1" for schedule in (*SCHEDULES, "2bw")],
        "dp=2 tp=2", "dp=2 pp=2 zero=1 micro_batch=1", "tp=2 pp=2 micro_batch=1", "dp=2 tp=2 pp=2 zero=2 micro_batch=1",
    ]  # fmt: skip
    return [case for text in texts if (case := _case(text, micro_batch=2)).layout.ranks <= max_ranks]


def _case(
    text: str, *, label: str | None = None, micro_batch: int = 1, kv_heads: int = 2, tied: bool = False,
    masked: bool = True, global_size: int = 8,
) -> Case:  # fmt: skip
    layout = parse_layout(text)
    if layout.micro_batch is None:
        layout = layout.model_copy(update={"micro_batch": micro_batch})
    return Case(label or text, layout, kv_heads, tied, masked, global_size)


def _data_parallel() -> Iterator[Case]:
    for dp in (2, 4):
        for zero in range(4):
            yield _case(f"dp={dp} zero={zero}", micro_batch=8 // dp)
    for zero in (1, 2, 3):
        yield _case(f"dp=4 shard=2 zero={zero}", micro_batch=1)


def _tensor_and_pipeline() -> Iterator[Case]:
    yield _case("tp=2", micro_batch=4)
    yield _case("tp=4", micro_batch=4, kv_heads=4)
    for pp in (2, 4):
        for schedule in SCHEDULES:
            yield _case(f"pp={pp} schedule={schedule}")
        yield _case(f"pp={pp} schedule=2bw", label=f"pp={pp}, every gradient one update late (2bw)")
    yield _case("pp=2 stages=5,3", label="pp=2, uneven stages 5,3")
    yield _case("pp=4 stages=1,3,3,1", label="pp=4, uneven stages 1,3,3,1")
    yield _case("pp=2 schedule=interleaved stages=3,1,2,2", label="pp=2, interleaved, uneven stages 3,1,2,2")


def _products() -> Iterator[Case]:
    for zero in range(4):
        yield _case(f"dp=2 tp=2 zero={zero}", micro_batch=2)
        yield _case(f"dp=2 pp=2 zero={zero}")
        yield _case(f"dp=2 tp=2 pp=2 zero={zero}")
    for schedule in sorted(SPLIT_BACKWARD_SCHEDULES):
        yield _case(f"dp=2 pp=2 zero=2 schedule={schedule}")
    yield _case("tp=2 pp=2")
    yield _case("tp=2 pp=2 schedule=zbv")
    yield _case("tp=2 pp=2 schedule=zero-bubble")
    yield _case("tp=4 pp=2", kv_heads=4)
    yield _case("tp=2 pp=2 schedule=2bw")
    yield _case("dp=2 pp=2 schedule=2bw zero=1")
    yield _case("dp=2 pp=4 schedule=interleaved zero=1 virtual=2")
    yield _case("dp=2 tp=2 placement=3,1,2,0", label="dp=2 tp=2, ranks placed 3,1,2,0", micro_batch=2)


def _batches_and_models() -> Iterator[Case]:
    for micro_batch, count in ((4, 1), (2, 2), (1, 4)):
        yield _case(f"dp=2 zero=2 micro_batch={micro_batch}", label=f"dp=2 zero=2, {count} micro-batches")
        yield _case(f"dp=2 micro_batch={micro_batch}", label=f"dp=2, {count} micro-batches")
    yield _case("dp=2", label="dp=2, global batch 7", micro_batch=2, global_size=7)
    yield _case("dp=4 zero=3", label="dp=4 zero=3, global batch 6", global_size=6)
    yield _case("dp=2 tp=2", label="dp=2 tp=2, every label valid", micro_batch=2, masked=False)
    yield _case("pp=2", label="pp=2, tied", tied=True)
    yield _case("pp=2 schedule=dualpipev", label="pp=2 dualpipev, tied", tied=True)
    yield _case("dp=2 tp=2 pp=2 zero=1", label="dp=2 tp=2 pp=2 zero=1, tied", tied=True)
    yield _case("dp=2 pp=2 zero=3", label="dp=2 pp=2 zero=3, tied", tied=True)
    yield _case("dp=2 zero=3", label="dp=2 zero=3, tied", micro_batch=2, tied=True)
    yield _case("tp=2", label="tp=2, tied", micro_batch=4, tied=True)
    yield _case("tp=2 pp=2 recompute=full", label="tp=2 pp=2, full recompute")
    yield _case("dp=2 zero=3 recompute=selective", label="dp=2 zero=3, selective recompute", micro_batch=2)
