"""Connections between the processes of a parameter server: errors, signs of life, and hosts that vanish."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from meshwright.sync.server.node import Node, PassiveNode, beat
from meshwright.sync.server.protocol import Message
from meshwright.sync.server.replica import COORDINATOR
from meshwright.sync.server.sockets import dial, listen, send
from tests.unit.server_nodes import RUN, Echo, until


@pytest.fixture
def center() -> Iterator[tuple[Echo, PassiveNode]]:
    machine = Echo()
    node = PassiveNode(machine, COORDINATOR, RUN, listen("127.0.0.1", None))
    yield machine, node
    node.close()


def test_an_error_of_the_machine_s_own_is_not_taken_for_the_peer_s(
    center: tuple[Echo, PassiveNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, node = center
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def full(sender: str, message: Message) -> list[tuple[str, Message]]:
        raise OSError("no space left") if message.kind == "write" else ValueError("no number")

    monkeypatch.setattr(machine, "handle", full)
    one, two = dial(node.address, RUN, "one"), dial(node.address, RUN, "two")
    send(one, Message("write"))
    send(two, Message("nonsense"))
    until(lambda: machine.gone)
    assert machine.gone == ["two"] and node.knows("one")
    one.close()
    two.close()


def test_a_server_gives_signs_of_life_in_the_middle_of_an_update(
    center: tuple[Echo, PassiveNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, coordinator = center
    busy, done = threading.Event(), threading.Event()

    def update(sender: str, message: Message) -> list[tuple[str, Message]]:
        busy.set()
        done.wait(10)
        return []

    machine = Echo()
    monkeypatch.setattr(machine, "handle", update)
    server = Node(machine, "server-0.1", RUN, listen("127.0.0.1", None))
    server.connect(COORDINATOR, coordinator.address)
    beat(server, COORDINATOR, 0.01)
    coordinator.tell("server-0.1", Message("apply"))
    busy.wait(10)
    before = len(seen.seen)
    until(lambda: len(seen.seen) > before + 3)
    done.set()
    server.close()
