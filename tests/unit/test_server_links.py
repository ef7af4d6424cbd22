"""Connections between the processes of a parameter server: errors, signs of life, and hosts that vanish."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from meshwright.sync.server.client import CoordinatorLost, Worker
from meshwright.sync.server.node import Node, PassiveNode, beat
from meshwright.sync.server.protocol import BEAT, Message, Run
from meshwright.sync.server.replica import COORDINATOR
from meshwright.sync.server.sockets import dial, listen, send
from meshwright.sync.server.worker_link import WorkerLink
from tests.unit.server_nodes import RUN, Echo, until
from tests.unit.simulated_servers import Computing


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


def test_a_connection_to_a_host_that_vanishes_ends_on_either_side(center: tuple[Echo, PassiveNode]) -> None:
    _, node = center
    for timeout in (RUN.timeout, 0.5, 86400.0):
        node.run = Run(RUN.token, RUN.job, timeout)
        with dial(node.address, node.run, f"worker-{timeout:g}") as mine:
            until(lambda timeout=timeout: node.knows(f"worker-{timeout:g}"))  # type: ignore[misc]
            for end in (mine, node._links[f"worker-{timeout:g}"].connection):
                assert end is not None and end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000 * timeout
                times = [end.getsockopt(socket.IPPROTO_TCP, name) for name in (
                    socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT,
                )]  # fmt: skip
                assert times[0] + times[1] * times[2] <= max(6 * timeout, 4)


def test_a_worker_that_waits_for_a_coordinator_that_is_gone_ends(
    center: tuple[Echo, PassiveNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, node = center

    def says_nothing_more(sender: str, message: Message) -> list[tuple[str, Message]]:
        machine.seen.append((sender, message.kind))
        return [(sender, Message("welcome", {"ready": False}))] if message.kind == "join" else []

    monkeypatch.setattr(machine, "handle", says_nothing_more)
    link = WorkerLink(Worker("worker-0", 0, Computing()), node.address, RUN, 0.04)
    ended: list[BaseException] = []

    def work() -> None:
        try:
            link.work()
        except CoordinatorLost as lost:
            ended.append(lost)

    threading.Thread(target=work, daemon=True).start()
    until(lambda: ("worker-0", "next") in machine.seen and node.knows("worker-0" + BEAT))
    node._links["worker-0" + BEAT].close()
    until(lambda: ended)
    assert "the coordinator cannot be reached any more" in str(ended[0])
