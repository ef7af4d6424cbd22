"""A parameter server in one process: real coordinator, replicas and workers, messages delivered in a drawn order.

Every message goes through ``Rehearsal``; messages of one sender to one receiver keep their order, everything else may
overtake. A process can be killed before any given delivery: of what it had sent, each peer gets a beginning, and
hears of the end at some later moment. A process can be frozen, be taken for dead meanwhile, and go on later. Proofs
and tests use it: the state machines are those that run over TCP.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from meshwright.sync.server.client import UNANSWERED, Compute, CoordinatorLost, Pause, Worker
from meshwright.sync.server.coordinator import Coordinator
from meshwright.sync.server.cursor import Position
from meshwright.sync.server.modes import Mode
from meshwright.sync.server.plan import Plan
from meshwright.sync.server.protocol import Message
from meshwright.sync.server.replica import COORDINATOR, Replica
from meshwright.sync.server.store import Store
from meshwright.sync.server.update import Update


class Notes:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.losses: list[tuple[int, float]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.saved: dict[int, list[list[Tensor]]] = {}
        self.validated: dict[int, float | None] = {}
        self.end: list[str | None] = []
        self.position: Position | None = None

    def event(self, kind: str, **facts: Any) -> None:
        """See ``Sink.event``."""
        self.events.append((kind, facts))

    def update(self, update: Update, loss: float) -> None:
        """See ``Sink.update``."""
        self.updates.append(update)
        self.losses.append((update.number, loss))

    def evaluated(self, step: int, loss: float | None) -> None:
        """See ``Sink.evaluated``."""
        self.validated[step] = loss

    def save(self, step: int, shards: Sequence[Sequence[Tensor]], updates: int, position: Position) -> None:
        """See ``Sink.save``."""
        self.saved[step] = [[tensor.clone() for tensor in tensors] for tensors in shards]
        self.position = position

    def ended(self, why: str | None) -> None:
        """See ``Sink.ended``."""
        self.end.append(why)


class Rehearsal:
    """Processes by name, and the messages between them.

    Args:
        plan, mode: of the job.
        store: makes the store of a shard's replica.
        compute: makes the model of a worker.
        seed: of the order of deliveries; None: in the order they were sent, but gradients are committed one at a
            time, when all else is done: workers take turns, and staleness is constant.

    Attributes:
        before_delivery: called with the number of messages delivered so far, before each.
        frozen: processes that neither send nor receive.
    """

    def __init__(
        self, plan: Plan, mode: Mode, store: Callable[[int], Store], compute: Callable[[], Compute], *,
        seed: int | None = 0,
    ) -> None:  # fmt: skip
        self.random = None if seed is None else random.Random(seed)
        self.plan, self.compute, self.store = plan, compute, store
        self.notes = Notes()
        self.coordinator = Coordinator(plan, mode, self.notes)
        self.queues: dict[tuple[str, str], deque[tuple[int, Message | None]]] = {}
        self._posted = 0
        self.delivered = 0
        self.replicas: dict[str, Replica] = {}
        self.workers: dict[str, Worker] = {}
        self.dialogues: dict[str, Any] = {}
        self.calls: dict[str, dict[str, deque[int]]] = {}
        self.answers: dict[str, list[Message | None]] = {}
        self.frozen: set[str] = set()
        self.before_delivery: Callable[[int], None] = lambda number: None
        for shard in range(plan.shards):
            for replica in range(plan.replicas):
                self.add_server(f"server-{shard}.{replica}", shard)
        for index in range(plan.workers):
            self.add_worker(f"worker-{index}", index)

    def add_server(self, name: str, shard: int) -> None:
        """Start a replica; later on it joins at the end of its chain."""
        begin = self.plan.begin * self.plan.pushes
        self.replicas[name] = Replica(name, shard, self.store(shard), version=begin)
        self.post(name, COORDINATOR, Message("register", {"shard": shard, "host": "here", "port": 1}))

    def add_worker(self, name: str, index: int) -> None:
        """Start a worker."""
        self.workers[name] = Worker(name, index, self.compute())
        self.dialogues[name] = self.workers[name].run()
        self._go_on(name, None)

    def post(self, sender: str, receiver: str, message: Message | None) -> None:
        """Put a message on its way; None: the sender's connection ends."""
        self._posted += 1
        self.queues.setdefault((sender, receiver), deque()).append((self._posted, message))

    def _exists(self, name: str) -> bool:
        return name == COORDINATOR or name in self.replicas or name in self.dialogues

    def _go_on(self, name: str, answers: list[Message | None] | None) -> None:
        """Run a worker to its next calls."""
        try:
            calls = self.dialogues[name].send(answers)
            while isinstance(calls, Pause):
                calls = self.dialogues[name].send([])
        except (StopIteration, CoordinatorLost):
            del self.dialogues[name]
            return
        self.answers[name] = [None] * len(calls)
        self.calls[name] = {}
        for number, (to, message) in enumerate(calls):
            if message.kind in UNANSWERED:
                self.post(name, to, message)
                continue
            self.calls[name].setdefault(to, deque()).append(number)
            # As over a socket: what is sent no longer changes with the sender's buffers.
            message = Message(message.kind, message.fields, [tensor.clone() for tensor in message.tensors])
            if self._exists(to):
                self.post(name, to, message)
            else:
                self.post(to, name, None)
        if not self.calls[name]:
            self._go_on(name, self.answers[name])

    def kill(self, name: str) -> None:
        """It is gone; of what it had sent, each peer gets a beginning, then hears of the end."""
        self.replicas.pop(name, None)
        self.dialogues.pop(name, None)
        peers = {COORDINATOR, *self.replicas, *self.dialogues} - {name}
        for peer in sorted(peers):
            queue = self.queues.setdefault((name, peer), deque())
            for _ in range(self.random.randint(0, len(queue)) if self.random else 0):
                queue.pop()
            self._posted += 1
            queue.append((self._posted, None))
            self.queues.pop((peer, name), None)

    def step(self) -> bool:
        """Deliver one message; whether there was any."""
        ready = [
            pair for pair, queue in sorted(self.queues.items())
            if queue and pair[0] not in self.frozen and pair[1] not in self.frozen
        ]  # fmt: skip
        if not ready:
            return False
        self.before_delivery(self.delivered)
        ready = [pair for pair in ready if self.queues.get(pair)]
        if not ready:
            return True
        sender, receiver = self.random.choice(ready) if self.random else min(ready, key=self._turn)
        _, message = self.queues[sender, receiver].popleft()
        self.delivered += 1
        if not self._exists(receiver):
            if message is not None:
                self.post(receiver, sender, None)
        elif receiver == COORDINATOR:
            out = self.coordinator.lost(sender) if message is None else self.coordinator.handle(sender, message)
            self._send(COORDINATOR, out)
        elif receiver in self.replicas:
            replica = self.replicas[receiver]
            self._send(receiver, replica.lost(sender) if message is None else replica.handle(sender, message))
            if replica.finished and replica.deposed:
                self.kill(receiver)
        else:
            self._to_worker(receiver, sender, message)
        return True

    def _turn(self, pair: tuple[str, str]) -> tuple[bool, int]:
        number, message = self.queues[pair][0]
        return message is not None and message.kind == "commit", number

    def _send(self, sender: str, out: Sequence[tuple[str, Message]]) -> None:
        for to, message in out:
            self.post(sender, to, message)

    def _to_worker(self, name: str, sender: str, message: Message | None) -> None:
        waiting = self.calls[name]
        if message is None:
            waiting.pop(sender, None)
        elif sender in waiting:
            self.answers[name][waiting[sender].popleft()] = message
            if not waiting[sender]:
                del waiting[sender]
        if not waiting and (message is None or name in self.dialogues):
            self._go_on(name, self.answers[name])

    def tick(self, silent: Sequence[str]) -> None:
        """So much time passes that these processes, not having been heard of, are taken for dead."""
        late = self.plan.timeout + 1.0
        self._send(COORDINATOR, self.coordinator.tick(late, dict.fromkeys(silent, 0.0)))

    def run(self, most: int = 200_000) -> Notes:
        """Until nothing is left to deliver.

        Raises:
            RuntimeError: it goes on for more than ``most`` messages, or stands still before all is done.
        """
        while self.step():
            if self.delivered > most:
                raise RuntimeError(f"no end after {most} messages")
        if self.coordinator.failure is None and not self.notes.end:
            raise RuntimeError(f"it stands still after {self.delivered} messages")
        return self.notes
