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

from typing import Literal, NamedTuple

Backend = Literal["gloo", "nccl"]

ONE_ROUND = 512 * 1024
"""Bytes up to which an all-reduce on CPU sends everything to everybody."""


class Wired(NamedTuple):
    """Bytes on the link, and the rule that says so."""

    bytes: int
    rule: str

    def times(self, messages: int) -> Wired:
        """The same message several times."""
        return Wired(messages * self.bytes, self.rule)


def send(payload: int) -> Wired:
    """To one other rank."""
    return Wired(payload, "the payload")


def reduce_scatter(payload: int, degree: int) -> Wired:
    """Also all-to-all: all but the own piece."""
    return Wired((degree - 1) * payload // degree, f"{degree - 1}/{degree} of the payload")


def all_gather(payload: int, degree: int) -> Wired:
    """The own part to everybody."""
    return Wired((degree - 1) * payload, f"{degree - 1} x the payload")


def all_reduce(
    elements: int, element_bytes: int, degree: int, backend: Backend, *, index: int = 0, ordered: bool = False
) -> Wired:
    """See the module.

    Args:
        elements: of the tensor.
        element_bytes: of one.
        degree: ranks of the group.
        backend: whose algorithm.
        index: this rank's place in the group.
        ordered: in rank order, or a maximum on Gloo, whose own would lose NaN.
    """
    payload, others = elements * element_bytes, degree - 1
    small = backend == "gloo" and others * payload <= ONE_ROUND
    if small or (backend == "nccl" and ordered):
        return Wired(others * payload, f"{others} x the payload: one round")
    if not ordered:
        return Wired(2 * others * payload // degree, f"2 x {others}/{degree} of the payload")
    own = piece(elements, degree, index) * element_bytes
    rule = f"the payload + {degree - 2} x this rank's piece of it, {own:,} bytes: two rounds in rank order"
    return Wired(payload + (degree - 2) * own, rule)


def piece(elements: int, degree: int, index: int) -> int:
    """Elements of the piece of rank ``index`` when ``degree`` ranks cut them: rounded up, the last ones shorter."""
    size = -(-elements // degree)
    return max(0, min(size, elements - index * size))
