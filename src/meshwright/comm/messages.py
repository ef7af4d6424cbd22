"""One round of messages between some ranks of a group: each sends to whom it likes, and knows from whom it receives.

Through memory the ranks share where a mesh has opened it, as plain sends and receives otherwise. All ranks of the group
must start the same rounds in the same order, also those without any message of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.exchange import TAG
from meshwright.comm.shared_memory import Channel, channel_of, copy_bytes
from meshwright.comm.traffic import moved, nbytes, recording


class _InArena:
    """A round through shared memory, as something to wait for; ``places[r]`` takes rank r's message."""

    def __init__(self, channel: Channel, number: int, peers: list[int], places: Mapping[int, Tensor]) -> None:
        self._channel, self._number, self._peers, self._places = channel, number, peers, places

    def wait(self) -> None:
        """Return when all messages are there, and in their places where they have one."""
        self._channel.wait(self._number, self._peers)
        if not self._places and self._peers:
            return  # read where they are
        for peer, place in self._places.items():
            copy_bytes(place, self._channel.message(self._number, peer, torch.uint8))
        self._channel.release(self._number)


class _Works:
    """Sends and receives under way, none included, as one thing to wait for: every rank waits as often."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all have ended."""
        for work in self._works:
            work.wait()


def exchange(group: dist.ProcessGroup, outgoing: Mapping[int, Tensor], places: Mapping[int, Tensor]) -> Any:
    """Start sending ``outgoing[r]`` to rank r and receiving into ``places[r]`` from it; what to wait for.

    All flat and contiguous, with at least one element; leave them alone until then.
    """
    channel = channel_of(group)
    if channel is None:
        works = [group.recv([place], peer, TAG) for peer, place in places.items()]
        return _Works(works + [group.send([message], peer, TAG) for peer, message in outgoing.items()])
    moved(nbytes(outgoing.values()))
    return _InArena(channel, channel.send_to(outgoing), list(places), places)


def exchange_to_read(
    group: dist.ProcessGroup, outgoing: Mapping[int, Tensor], elements: Mapping[int, int], like: Tensor
) -> tuple[Any, Callable[[], dict[int, Tensor]], Callable[[], None]]:
    """The same where messages are read once: what to wait for, then the messages by rank, and what ends the reading.

    Args:
        group: the ranks.
        outgoing: by rank.
        elements: of each message that comes, by rank.
        like: of their dtype and device.
    """
    channel = channel_of(group)
    if channel is None or recording() or not elements:
        arrived = {peer: like.new_empty(count) for peer, count in elements.items()}
        return exchange(group, outgoing, arrived), lambda: arrived, lambda: None
    number = channel.send_to(outgoing)

    def messages() -> dict[int, Tensor]:
        return {peer: channel.message(number, peer, like.dtype) for peer in elements}

    return _InArena(channel, number, list(elements), {}), messages, lambda: channel.release(number)
