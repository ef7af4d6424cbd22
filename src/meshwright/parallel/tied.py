"""Tied embeddings across a pipeline: two copies that stay one parameter.

The first stage looks tokens up in the embedding, the last multiplies by it. Each has a copy, and each
gets a part of the gradient:

    stage 0        embedding.weight   g_lookup  \\
                                                  g = g_lookup + g_head on both sides, the same bits
    last stage     head.weight        g_head    /

Both start from the same values, both are updated with g by the same arithmetic on the same ranges, so they
stay equal to the last bit; the norm counts the first copy alone. The sum comes after the reduction over
data-parallel ranks, on the ranges each rank owns, so it costs one exchange of this rank's part of one matrix.
"""

from __future__ import annotations

import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.job.layout import Layout
from meshwright.parallel.owned import Owned


def tied_copies(layout: Layout) -> tuple[str, str]:
    """Names (as in ``Owned.parameter``) of the two copies: the first stage's, which the norm counts, and the last's."""
    return "stage0:embedding.weight", f"stage{layout.stage_count - 1}:head.weight"


def combine_tied_gradients(owned: list[Owned], mesh: Mesh, layout: Layout) -> None:
    """Give both copies of a tied embedding the sum of their gradients.

    Call it on every rank after ``DataParallel.finish_gradients``. Both copies must be divided into the same ranges
    over the dp ranks.

    Raises:
        RuntimeError: this rank holds both copies and their ranges differ.
    """
    first_name, last_name = tied_copies(layout)
    first = [piece for piece in owned if piece.parameter == first_name]
    last = [piece for piece in owned if piece.parameter == last_name]
    if first and last:
        if [(piece.start, piece.count) for piece in first] != [(piece.start, piece.count) for piece in last]:
            raise RuntimeError(f"{first_name} and {last_name} are not divided alike over the data-parallel ranks")
        for one, other in zip(first, last, strict=True):
            one.gradient.add_(other.gradient)
            other.gradient.copy_(one.gradient)
    elif mesh.embedding_group is not None:
        for piece in first or last:
            all_reduce(piece.gradient, mesh.embedding_group)


def tied_difference(owned: list[Owned], mesh: Mesh, layout: Layout) -> float:
    """Largest difference between the two copies' masters on this column of ranks: 0.0, or something is broken."""
    first_name, last_name = tied_copies(layout)
    first = [piece.master for piece in owned if piece.parameter == first_name]
    last = [piece.master for piece in owned if piece.parameter == last_name]
    if not (first and last):
        group = mesh.embedding_group
        if group is None or not (first or last):
            return 0.0
        mine = torch.cat(first or last).double()
        other = mine.clone() if first else -mine
        all_reduce(other, group)
        return float(other.abs().max())
    return max(float((one - other).abs().max()) for one, other in zip(first, last, strict=True))
