"""A worker's side over sockets: makes the calls that ``client.Worker`` yields, and keeps saying that it lives."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter

from meshwright.errors import MeshwrightError
from meshwright.sync.server.client import UNANSWERED, Answers, Calls, Pause, Worker, fits
from meshwright.sync.server.membership import Address
from meshwright.sync.server.protocol import BEAT, Message, ProtocolError, Refused, Run
from meshwright.sync.server.replica import COORDINATOR
from meshwright.sync.server.sockets import dial, receive, send, unreachable


class WorkerLink:
    """Runs one worker until the coordinator says stop.

    Args:
        worker: what it does.
        coordinator: where the coordinator listens.
        run: the secret and the job.
        timeout: seconds a server may take to answer before it is asked again under the newest view.

    Attributes:
        payload: bytes of tensors by ("in" or "out", kind of message).
        by_shard: messages by (kind, shard); after a failure only the shard that had not answered is asked again.
    """

    def __init__(self, worker: Worker, coordinator: Address, run: Run, timeout: float) -> None:
        self.worker, self.run, self.timeout = worker, run, timeout
        self.payload: Counter[tuple[str, str]] = Counter()
        self.by_shard: Counter[tuple[str, int | None]] = Counter()
        self._coordinator = coordinator
        self._connections: dict[str, socket.socket] = {}
        self._pause = threading.Event()

    def work(self) -> None:
        """See the class.

        Raises:
            Refused: the coordinator would not have us.
            ProtocolError: it is gone.
            MeshwrightError: it cannot be reached.
        """
        self._connections[COORDINATOR] = self._dial_coordinator(self.worker.name)
        self._beat()
        dialogue = self.worker.run()
        answers: Answers | None = None
        try:
            while True:
                calls = dialogue.send(answers)  # type: ignore[arg-type]
                if isinstance(calls, Pause):
                    self._pause.wait(calls.seconds)
                    answers = []
                else:
                    answers = self._call(calls)
        except StopIteration:
            return
        finally:
            self._pause.set()
            for connection in self._connections.values():
                connection.close()

    def _dial_coordinator(self, name: str) -> socket.socket:
        try:
            return dial(self._coordinator, self.run, name)
        except ProtocolError:
            raise
        except (OSError, EOFError) as error:
            raise MeshwrightError(unreachable(self._coordinator, error)) from None

    def _call(self, calls: Calls) -> Answers:
        """Send everything, then take every answer; a peer that fails is hung up on and answers None."""
        answers: Answers = [None] * len(calls)
        sent = []
        for number, (peer, message) in enumerate(calls):
            try:
                send(self._connection(peer), message)
                self.payload["out", message.kind] += message.tensor_bytes
                self.by_shard[message.kind, message.fields.get("shard")] += 1
                sent.append((number, peer, message))
            except Refused:
                raise
            except (OSError, EOFError, ProtocolError):
                self._hang_up(peer)
        for number, peer, message in sent:
            if message.kind in UNANSWERED or peer not in self._connections:
                continue
            try:
                answers[number] = self._answer(peer, message)
            except (OSError, EOFError, ProtocolError):
                self._hang_up(peer)
        return answers

    def _answer(self, peer: str, request: Message) -> Message:
        connection = self._connections[peer]
        connection.settimeout(None if peer == COORDINATOR else self.timeout)
        answer = receive(connection)
        if not fits(request, answer):
            raise ProtocolError(f"{peer} answered {request.kind!r} with an older {answer.kind!r}")
        self.payload["in", answer.kind] += answer.tensor_bytes
        self.by_shard[answer.kind, answer.fields.get("shard")] += 1
        return answer

    def _connection(self, peer: str) -> socket.socket:
        if peer not in self._connections:
            if peer == COORDINATOR:
                raise EOFError("the coordinator hung up")
            address = self.worker.addresses[peer]
            connection = dial(address, self.run, self.worker.name, seconds=self.timeout)
            connection.settimeout(self.timeout)  # also of sending: a stopped server takes nothing in
            self._connections[peer] = connection
        return self._connections[peer]

    def _hang_up(self, peer: str) -> None:
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.close()

    def _beat(self) -> None:
        """Signs of life on a connection of their own, so that long computations do not look like death.

        Who waits for an answer of the coordinator says nothing, and so does not notice that it is gone; this does.
        """
        waiting = self._connections[COORDINATOR]
        connection = self._dial_coordinator(self.worker.name + BEAT)

        def beats() -> None:
            with connection:
                while not self._pause.wait(self.timeout / 4):
                    try:
                        send(connection, Message("beat"))
                    except OSError:
                        with contextlib.suppress(OSError):
                            waiting.shutdown(socket.SHUT_RDWR)
                        return

        threading.Thread(target=beats, daemon=True).start()
