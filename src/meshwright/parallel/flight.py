"""Sequences of collectives that travel while the backward pass computes."""

from __future__ import annotations

import torch

from meshwright.comm.collectives import Handle
from meshwright.comm.operations import Operations


class Flight:
    """Sequences under way, carried on in the same order on every rank.

    Ranks match messages by the order in which they are posted, so *when* a sequence goes on must not depend on
    who is faster: each start carries every older sequence on by one operation, and ``settle_all`` the rest.

    On a CUDA device a whole sequence is queued at once and the device keeps the order, so nothing is carried on.

    Args:
        device: where the tensors live.
        own_stream: on CUDA, queue on a stream of its own; otherwise on the stream of the caller.
    """

    def __init__(self, device: torch.device, *, own_stream: bool = True) -> None:
        self._queues = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._queues and own_stream else None  # type: ignore[no-untyped-call]
        self._under_way: list[tuple[object, Operations, Handle]] = []

    def start(self, owner: object, sequence: Operations) -> None:
        """Begin a sequence; ``owner`` is what ``settle`` knows it by."""
        if not self._queues:
            older, self._under_way = self._under_way, []
            self._begin(owner, sequence)
            newest, self._under_way = self._under_way, []
            self._carry_on(older)
            self._under_way.extend(newest)
        elif self._stream is None:
            _queue(sequence)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _queue(sequence)

    def start_together(self, owners_and_sequences: list[tuple[object, Operations]]) -> None:
        """Begin several sequences at once, without carrying any on."""
        for owner, sequence in owners_and_sequences:
            if self._queues:
                self.start(owner, sequence)
            else:
                self._begin(owner, sequence)

    def settle(self, owner: object) -> None:
        """Return when the sequences of ``owner`` have ended (on CUDA: order later work after them)."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        elif any(other is owner for other, _, _ in self._under_way):
            self.settle_all()

    def settle_all(self) -> None:
        """Return when every sequence has ended (on CUDA: order later work after them)."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        while self._under_way:
            older, self._under_way = self._under_way, []
            self._carry_on(older)

    def _begin(self, owner: object, sequence: Operations) -> None:
        handle = next(sequence, None)
        if handle is not None:
            self._under_way.append((owner, sequence, handle))

    def _carry_on(self, older: list[tuple[object, Operations, Handle]]) -> None:
        for owner, sequence, handle in older:
            handle.wait()
            self._begin(owner, sequence)


def _queue(sequence: Operations) -> None:
    for handle in sequence:
        handle.wait()
