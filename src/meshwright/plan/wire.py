"""What a rank puts on its link for one collective: the algorithms the program uses, by backend.

Group of P, n payload bytes (of an all-gather this rank's part). On CPU the collectives are direct exchanges:

    reduce_scatter, all_to_all   (P-1)/P n       NCCL the same
    all_gather                   (P-1) n         NCCL the same
    all_reduce                   (P-1) n         one round, while that is at most 512 KiB
                                 2 (P-1)/P n     above: Gloo's own, where the order of the sum does not matter
                                 n + (P-2) own   above, in rank order or a maximum: own is this rank's piece,
                                                 ceil(elements / P) of them, the last ones shorter
                                 NCCL: 2 (P-1)/P n; in rank order (P-1) n
    send                         n
"""

from __future__ import annotations

from typing import Literal

Backend = Literal["gloo", "nccl"]

ONE_ROUND = 512 * 1024
"""Bytes up to which an all-reduce on CPU sends everything to everybody."""


def reduce_scatter(payload: int, degree: int) -> int:
    """Also all-to-all: all but the own piece."""
    return (degree - 1) * payload // degree


def all_gather(payload: int, degree: int) -> int:
    """The own part to everybody."""
    return (degree - 1) * payload


def all_reduce(
    elements: int, element_bytes: int, degree: int, backend: Backend, *, index: int = 0, ordered: bool = False
) -> int:
    """See the module.

    Args:
        elements: of the tensor.
        element_bytes: of one.
        degree: ranks of the group.
        backend: whose algorithm.
        index: this rank's place in the group.
        ordered: in rank order, or a maximum, which Gloo's own would not take NaN through.
    """
    payload = elements * element_bytes
    ring = 2 * (degree - 1) * payload // degree
    if backend == "nccl":
        return (degree - 1) * payload if ordered else ring
    if (degree - 1) * payload <= ONE_ROUND:
        return (degree - 1) * payload
    if not ordered:
        return ring
    own = piece(elements, degree, index) * element_bytes
    return payload + (degree - 2) * own


def piece(elements: int, degree: int, index: int) -> int:
    """Elements of the piece of rank ``index`` when ``degree`` ranks cut them: rounded up, the last ones shorter."""
    size = -(-elements // degree)
    return max(0, min(size, elements - index * size))
