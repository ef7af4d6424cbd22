"""What tests of server nodes over real sockets share."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.sync.server.protocol import Message, Run

RUN = Run("secret", "job-1")


class Echo:
    """Answers everything with itself."""

    def __init__(self) -> None:
        self.addresses: dict[str, tuple[str, int]] = {}
        self.finished = False
        self.seen: list[tuple[str, str]] = []
        self.gone: list[str] = []

    def handle(self, sender: str, message: Message) -> list[tuple[str, Message]]:
        self.seen.append((sender, message.kind))
        return [(sender, message)]

    def lost(self, peer: str) -> list[tuple[str, Message]]:
        self.gone.append(peer)
        return []


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
