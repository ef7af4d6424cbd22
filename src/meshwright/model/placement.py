"""Which logical parameters a stage of one tensor parallel rank stores, and where: the segments of ``StageModel``.

Output rows of q, k, v, gate and up, input columns of the output and down projections, and vocabulary rows are split
in contiguous chunks over the ranks; everything else is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from meshwright.job.model_spec import ModelSpec
from meshwright.model.segments import Segment

_FUSED = {
    "attention.q": "attention.qkv",
    "attention.k": "attention.qkv",
    "attention.v": "attention.qkv",
    "mlp.gate": "mlp.gate_up",
    "mlp.up": "mlp.gate_up",
}
_ROW_SPLIT = ("attention.output.weight", "mlp.down.weight")


def vocabulary_rows(spec: ModelSpec, degree: int) -> int:
    """Vocabulary rows each rank stores, padding included: ``ceil(vocabulary / degree)``."""
    return -(-spec.vocabulary // degree)


def place_parameters(
    spec: ModelSpec, layers: Sequence[int], first: bool, last: bool, degree: int, index: int
) -> tuple[dict[str, tuple[Segment, ...]], frozenset[str]]:
    """The segments of each physical parameter, and which physical parameters are whole on every rank.

    Args:
        spec: the model.
        layers: global indices of the stage's layers.
        first: whether the embedding is here.
        last: whether the final norm and the head are here.
        degree: tensor parallel ranks.
        index: this rank's place among them.

    Returns:
        ``StageModel.segments`` and ``StageModel.tp_replicated``.
    """
    placed: dict[str, list[Segment]] = {}
    replicated: set[str] = set()

    def add(fqn: str, name: str, shape: tuple[int, ...], axis: int | None) -> None:
        offsets, sizes = _box(shape, axis, degree, index)
        pieces = placed.setdefault(fqn, [])
        start = sum(prod(piece.sizes) for piece in pieces)
        pieces.append(Segment(name, shape, offsets, sizes, start))
        if axis is None:
            replicated.add(fqn)

    if first:
        for name, shape in spec.embedding_parameters():
            add(name, name, shape, 0 if name == "embedding.weight" else None)
    for layer in layers:
        for name, shape in spec.layer_parameters(layer):
            prefix, short = f"layers.{layer}.", name.removeprefix(f"layers.{layer}.")
            module, _, leaf = short.rpartition(".")
            fused = _FUSED.get(module, module) if spec.gated or module != "mlp.up" else module
            axis = 0 if module in _FUSED else 1 if short in _ROW_SPLIT else None
            add(f"{prefix}{fused}.{leaf}", name, shape, axis)
    if last:
        for name, shape in spec.head_parameters():
            add(name, name, shape, 0 if name == "head.weight" else None)
        if spec.tied and not first:
            add("head.weight", "embedding.weight", (spec.vocabulary, spec.hidden), 0)
    return {fqn: tuple(pieces) for fqn, pieces in placed.items()}, frozenset(replicated)


def _box(shape: tuple[int, ...], axis: int | None, degree: int, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of chunk ``index`` along ``axis``; the last chunks of an uneven split are shorter."""
    if axis is None:
        return (0,) * len(shape), shape
    chunk = -(-shape[axis] // degree)
    low, high = min(index * chunk, shape[axis]), min((index + 1) * chunk, shape[axis])
    offsets = tuple(low if dimension == axis else 0 for dimension in range(len(shape)))
    sizes = tuple(high - low if dimension == axis else extent for dimension, extent in enumerate(shape))
    return offsets, sizes
