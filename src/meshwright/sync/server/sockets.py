"""Sockets that speak the protocol: listening, dialling, and the first two messages of every connection."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from meshwright.errors import InputError
from meshwright.sync.server.protocol import (
    INSTANCE,
    Message,
    ProtocolError,
    Refused,
    Run,
    decode,
    encode,
    hello,
    refusal,
)

LOOPBACK = "127.0.0.1"
HANDSHAKE_SECONDS = 10.0
"""Within which a connection must have been made and both sides have introduced themselves."""


def listen(host: str, port: int | None, key: str = "sync.server_port") -> socket.socket:
    """A listening socket; without a port, on a free one.

    Raises:
        InputError: the address cannot be had.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if port is None:
            raise InputError(
                f"sync.server_host: {host} cannot be listened on ({error.strerror}); give an address of this machine, "
                "or leave it out for 127.0.0.1"
            ) from None
        raise InputError(
            f"{key}: port {port} on {host} cannot be used ({error.strerror}); give another port, or none for a free one"
        ) from None
    return listener


def receiver(connection: socket.socket, seconds: float | None = None) -> Callable[[memoryview], None]:
    """What fills a buffer from a connection; raises ``EOFError`` at its end.

    With ``seconds``, all that is ever received must be there within them, or it raises ``TimeoutError``: a peer that
    sends a byte now and then does not stay.
    """
    deadline = None if seconds is None else time.monotonic() + seconds

    def receive(buffer: memoryview) -> None:
        view, filled = buffer.cast("B"), 0
        while filled < len(view):
            if deadline is not None:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                connection.settimeout(left)
            count = connection.recv_into(view[filled:])
            if count == 0:
                raise EOFError("the connection ended")
            filled += count

    return receive


def send(connection: socket.socket, message: Message) -> None:
    """Send one message whole."""
    for buffer in encode(message):
        connection.sendall(buffer)


def receive(connection: socket.socket) -> Message:
    """Receive one message whole."""
    return decode(receiver(connection))


def expect_answers(connection: socket.socket, seconds: float) -> None:
    """Let a connection end when the other host has answered nothing for so long: one that vanishes says no goodbye."""
    quarter = max(1, min(8192, round(seconds / 4)))  # the kernel takes whole seconds, up to 32767
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", quarter), ("TCP_KEEPINTVL", quarter), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", round(1000 * seconds)),  # while something that was sent has not arrived
    ):  # fmt: skip
        if hasattr(socket, name):  # of this system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def welcome(connection: socket.socket, run: Run, admit: Callable[[str, str], str | None]) -> str:
    """The listening side of the first two messages; the peer's name.

    Args:
        connection: of a stranger.
        run: the secret and the job.
        admit: takes a name and which process has it; why it is not let in, or None.

    Raises:
        Refused: the peer was not accepted; it has been told why, if it still listens.
        OSError, EOFError: it is gone, or said too little for too long.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    expect_answers(connection, run.given_up_after)
    try:
        message = decode(receiver(connection, HANDSHAKE_SECONDS), stranger=True)
        why = refusal(run, message) or admit(str(message["name"]), str(message["instance"]))
    except ProtocolError as error:
        why = str(error)
    if why is not None:
        with contextlib.suppress(OSError):
            send(connection, Message("refused", {"why": why}))
        raise Refused(why)
    send(connection, Message("accepted"))
    connection.settimeout(None)
    return str(message["name"])


def unreachable(address: tuple[str, int], error: OSError | EOFError) -> str:
    """The sentence on a coordinator that could not be dialled."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or "it did not answer"
    return (
        f"the coordinator at {address[0]}:{address[1]} cannot be reached ({reason}); is the run still going, "
        "and is the address the one in its servers.json?"
    )


def dial(
    address: tuple[str, int], run: Run, name: str, *, seconds: float = HANDSHAKE_SECONDS, instance: str = INSTANCE
) -> socket.socket:
    """The dialling side: an accepted connection.

    Raises:
        Refused: the other side would not have us; its sentence.
        ProtocolError: it speaks another protocol, or another version of ours.
        OSError: it cannot be reached.
        EOFError: it hung up.
    """
    connection = socket.create_connection(address, timeout=seconds)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        expect_answers(connection, run.given_up_after)
        send(connection, hello(run, name, instance))
        answer = receive(connection)
        if answer.kind != "accepted":
            raise Refused(f"{address[0]}:{address[1]} refused {answer.fields.get('why', 'without a reason')}")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection
