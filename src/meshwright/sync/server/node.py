"""A process that others talk to: runs a coordinator or a replica, which know nothing of sockets, over TCP.

One thread reads each connection, one writes it; the machine itself runs under one lock, a message at a time, and what
it wants sent is queued under the same lock, so that messages to one peer leave in the order they were decided.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from meshwright.sync.server.protocol import BEAT, Message, ProtocolError, Run
from meshwright.sync.server.replica import Out
from meshwright.sync.server.sockets import HANDSHAKE_SECONDS, dial, receive, send, welcome

_EACH_REFUSAL = 20
"""So many refusals are reported one by one; then, as anybody can cause them, only every doubling of their number."""


class Machine(Protocol):
    """What a node runs."""

    addresses: dict[str, tuple[str, int]]
    finished: bool

    def handle(self, sender: str, message: Message) -> Out:
        """Take a message; what to send."""

    def lost(self, peer: str) -> Out:
        """A peer's connection ended; what to send."""


class _Link:
    """One connection: what is still to be written to it, and if the other end has called, which process it is."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.connection = connection
        self.peer = self.instance = ""
        self.outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def close(self) -> None:
        self.outgoing.put(None)
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()


class Node:
    """See the module.

    Args:
        machine: what answers.
        name: ours, for peers that we dial.
        run: the secret and the job that every peer must know.
        listener: where peers come in; closed with the node.
        report: told of refused and misbehaving peers, in a sentence.

    Attributes:
        heard: when each peer last said anything (monotonic seconds).
        payload, messages: bytes of tensors and number of messages by ("in" or "out", kind of message).
        busy_seconds: spent in the machine: a server's load.
    """

    def __init__(
        self, machine: Machine, name: str, run: Run, listener: socket.socket,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        self.machine, self.name, self.run, self.listener, self.report = machine, name, run, listener, report
        self.lock = threading.RLock()
        self.heard: dict[str, float] = {}
        self.payload: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[tuple[str, str]] = Counter()
        self.busy_seconds = 0.0
        self.done = threading.Event()
        self._links: dict[str, _Link] = {}
        self._closed = False
        self._refusals = 0
        self._start(self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """Where we listen."""
        host, port = self.listener.getsockname()[:2]
        return str(host), int(port)

    def knows(self, peer: str) -> bool:
        """Whether a process of this name is connected."""
        with self.lock:
            return peer in self._links

    def tell(self, peer: str, message: Message) -> None:
        """Send from outside of the machine."""
        with self.lock:
            self._dispatch([(peer, message)])

    def beat(self, peer: str) -> None:
        """Send a sign of life to a peer that is connected. The machine may be busy: it is not waited for."""
        link = self._links.get(peer)
        if link is not None:
            link.outgoing.put(Message("beat"))

    def act(self, action: Callable[[], Out]) -> None:
        """Run something of the machine's and send what it wants sent."""
        with self.lock:
            self._dispatch(action())

    def connect(self, peer: str, address: tuple[str, int]) -> None:
        """Dial a peer now.

        Raises:
            ProtocolError, OSError, EOFError: it cannot be had.
        """
        connection = dial(address, self.run, self.name)
        link = _Link()
        self._attach(peer, link, connection)
        self._start(self._write, peer, link)
        self._start(self._read, peer, link)

    def close(self) -> None:
        """Hang up on everybody; nobody is told that they are lost."""
        with self.lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for link in links:
            link.close()
        self.done.set()

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self._start(self._introduce, connection)

    def _introduce(self, connection: socket.socket) -> None:
        link = _Link(connection)
        try:
            peer = welcome(connection, self.run, lambda name, instance: self._admit(link, name, instance))
        except (ProtocolError, OSError, EOFError) as error:
            connection.close()
            self._refused(error)
            if link.peer:
                self._lose(link.peer, link)
            return
        self._start(self._write, peer, link)
        self._read(peer, link)

    def _refused(self, error: ProtocolError | OSError | EOFError) -> None:
        with self.lock:
            if self._closed:
                return
            self._refusals += 1
            number = self._refusals
        if number > _EACH_REFUSAL and number & (number - 1):
            return
        why = "it ended before it had introduced itself"
        if isinstance(error, TimeoutError):
            why = f"it did not introduce itself within {HANDSHAKE_SECONDS:g} s"
        counted = f" ({number} by now)" if number > _EACH_REFUSAL else ""
        self.report(f"refused a connection{counted}: {error if isinstance(error, ProtocolError) else why}")

    def _admit(self, link: _Link, peer: str, instance: str) -> str | None:
        """Let a peer in under its name unless another process that is connected has it; else the sentence."""
        name = peer.removesuffix(BEAT)
        with self.lock:
            links = [self._links[each] for each in (name, name + BEAT) if each in self._links]
            if name == self.name or any(each.instance not in ("", instance) for each in links):
                return f"{name}: another process of this run has this name; give another --name, or leave it out"
            link.peer, link.instance = peer, instance
            assert link.connection is not None
            self._attach(peer, link, link.connection)
        return None

    def _attach(self, peer: str, link: _Link, connection: socket.socket) -> None:
        with self.lock:
            link.connection = connection
            self.heard[peer.removesuffix(BEAT)] = time.monotonic()
            before = self._links.get(peer)
            self._links[peer] = link
        if before is not None and before is not link:
            before.close()

    def _read(self, peer: str, link: _Link) -> None:
        while (message := self._receive(peer, link)) is not None:
            self.heard[peer.removesuffix(BEAT)] = time.monotonic()
            # What the machine meets with on its own side, such as a full disk, is not the peer's fault.
            with self._lost_with(peer, link, ValueError), self.lock:
                if self._closed or self._links.get(peer) is not link:
                    return
                began = time.monotonic()
                self.payload["in", message.kind] += message.tensor_bytes
                self.messages["in", message.kind] += 1
                self._dispatch(self.machine.handle(peer.removesuffix(BEAT), message))
                self.busy_seconds += time.monotonic() - began

    def _receive(self, peer: str, link: _Link) -> Message | None:
        assert link.connection is not None
        message = None
        with self._lost_with(peer, link, OSError, EOFError, ValueError):
            message = receive(link.connection)
        return message

    def _write(self, peer: str, link: _Link) -> None:
        with self._lost_with(peer, link, OSError, EOFError, ValueError):
            if link.connection is None:
                connection = dial(self.machine.addresses[peer], self.run, self.name)
                self._attach(peer, link, connection)
                self._start(self._read, peer, link)
            assert link.connection is not None
            while (message := link.outgoing.get()) is not None:
                send(link.connection, message)

    @contextlib.contextmanager
    def _lost_with(self, peer: str, link: _Link, *errors: type[Exception]) -> Iterator[None]:
        """These errors end the connection, and with it the peer as far as this end knows; so do wrong messages."""
        try:
            yield
        except ProtocolError as error:
            self.report(f"{peer}: {error}")
            self._lose(peer, link)
        except errors:
            self._lose(peer, link)

    def _lose(self, peer: str, link: _Link) -> None:
        with self.lock:
            if self._closed or self._links.get(peer) is not link:
                return
            del self._links[peer]
            link.close()
            if not peer.endswith(BEAT):
                self._dispatch(self.machine.lost(peer))

    def _dispatch(self, out: Out) -> None:
        for peer, message in out:
            link = self._links.get(peer)
            if link is None:
                if peer not in self.machine.addresses or not self.dials(peer):
                    continue
                link = self._links[peer] = _Link()
                self._start(self._write, peer, link)
            self.payload["out", message.kind] += message.tensor_bytes
            link.outgoing.put(message)
        if self.machine.finished:
            self.done.set()

    def dials(self, peer: str) -> bool:
        """Whether we call this peer when we have something for it (otherwise it must have called us)."""
        return True


class PassiveNode(Node):
    """A node that never dials: a peer that has not called is not there."""

    def dials(self, peer: str) -> bool:
        """See ``Node.dials``."""
        return False


def beat(node: Node, peer: str, seconds: float) -> None:
    """Send a sign of life to ``peer`` every so often, as long as the node lives."""

    def beats() -> None:
        while not node.done.wait(seconds):
            node.beat(peer)

    threading.Thread(target=beats, daemon=True).start()


def watch(node: Node, tick: Callable[[float, Mapping[str, float]], Out], seconds: float) -> None:
    """Call a machine's ``tick`` every so often. A pause of this process itself counts against nobody."""

    def ticks() -> None:
        last = time.monotonic()
        while not node.done.wait(seconds):
            now = time.monotonic()
            if now - last > 3 * seconds:  # we were stopped, or starved: let the others speak first
                for peer in list(node.heard):
                    node.heard[peer] = max(node.heard[peer], now - seconds)
            last = now
            node.act(lambda now=now: tick(now, dict(node.heard)))  # type: ignore[misc]

    threading.Thread(target=ticks, daemon=True).start()
