"""Where each number of a predicted ledger comes from: the formula, with the rank's own numbers in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.job.job import Job
from meshwright.plan.flops import flops, head_flops, layer_flops, window_of
from meshwright.plan.place import Place, StagePlace
from meshwright.plan.predict import backend_of, predict
from meshwright.plan.state import gradient_bytes, optimizer_bytes, parameter_bytes
from meshwright.plan.traffic import traffic


class Explained(NamedTuple):
    """One number. Those of one quantity add up to its entry in the ledger."""

    quantity: str
    """As ``ledger.compare`` names it: ``stores: parameters``, ``sends: tp all_gather forward: payload``."""
    formula: str
    value: int


def explain(job: Job, rank: int) -> list[Explained]:
    """Every number of one rank's predicted ledger, with its formula.

    Args:
        job: resolved.
        rank: of its layout.
    """
    place = Place(job, rank)
    return [*_stored(job, place), *_computed(job, place), *_sent(job, place)]


def _stored(job: Job, place: Place) -> Iterator[Explained]:
    for name, amounts in (
        ("parameters", parameter_bytes(job, place)),
        ("gradients", gradient_bytes(job, place)),
        ("optimizer", optimizer_bytes(job, place)),
    ):
        for amount in amounts:
            yield Explained(f"stores: {name}", f"{amount.quantity}: {amount.formula}", amount.value)
    stores = predict(job, [place.rank]).ranks[0].stores
    highest = "the highest moment of the step, followed from operation to operation"
    yield Explained("stores: activations", highest, stores.activations)
    yield Explained("stores: temporary", highest, stores.temporary)
    parts = " + ".join(f"{size:,} {name}" for name, size in stores.at_peak.items())
    yield Explained("stores: peak", f"{highest}: {parts}", stores.peak)


def _computed(job: Job, place: Place) -> Iterator[Explained]:
    for stage in place.stages:
        for formula, value in _products(place, stage):
            text = f"stage {stage.number}: {formula} x {place.micro_batches} micro-batches"
            yield Explained("computes: forward", text, value * place.micro_batches)
    computes = flops(job, place)
    yield Explained("computes: backward", "twice forward", computes.backward)
    policies = ", ".join(dict.fromkeys(stage.recompute for stage in place.stages))
    text = f"half an attention forward for each fused attention backward, and recompute={policies}"
    yield Explained("computes: recompute", text, computes.recompute)


def _products(place: Place, stage: StagePlace) -> Iterator[tuple[str, int]]:
    """The matrix products and the attention of one micro-batch in one stage, and their FLOPs."""
    spec, tp, count = place.spec, place.tp, len(stage.layers)
    windows = [window_of(spec, layer) for layer in stage.layers]
    layers = [
        layer_flops(spec, place.rows, place.sequence, tp, window if window and window < place.sequence else None)
        for window in windows
    ]
    rows = f"2 x {place.tokens} tokens x {place.hidden} hidden"
    if layers:
        heads, kv_heads, inner = spec.heads // tp, spec.kv_heads // tp, spec.ffn_hidden // tp
        first = layers[0]
        qkv, mixed, up = (heads + 2 * kv_heads) * spec.head_size, heads * spec.head_size, inner * (1 + spec.gated)
        yield f"qkv: {rows} x {qkv} x {count} layers", count * first.qkv
        yield f"output: {rows} x {mixed} x {count} layers", count * first.output
        yield f"{'gate and up' if spec.gated else 'up'}: {rows} x {up} x {count} layers", count * first.up
        yield f"down: {rows} x {inner} x {count} layers", count * first.down
        text = f"attention: 4 x {place.rows} sequences x {mixed} x pairs of {place.sequence} tokens x {count} layers"
        yield text, sum(layer.attention for layer in layers)
    if stage.last:
        vocabulary = -(-spec.vocabulary // tp)
        yield f"head: {rows} x {vocabulary} vocabulary rows", head_flops(spec, place.tokens, tp)


def _sent(job: Job, place: Place) -> Iterator[Explained]:
    for sent in traffic(job, place, backend_of(job)):
        key = f"sends: {sent.axis} {sent.operation} {sent.phase}"
        yield Explained(f"{key}: payload", sent.formula, sent.payload)
        yield Explained(f"{key}: wire", sent.wired.rule, sent.wired.bytes)
        yield Explained(f"{key}: messages", f"{sent.messages} x", sent.messages)
