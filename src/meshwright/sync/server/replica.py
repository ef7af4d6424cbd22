"""One replica of one shard: stores pushes, applies updates in order, and passes both down its chain.

    coordinator, workers --> head --> ... --> tail
                               <-- ... <--  acknowledgements

Chain replication (van Renesse and Schneider, OSDI 2004): an operation is done locally, then passed to the successor,
and acknowledged to whoever asked for it only when the successor has. Every operation is idempotent: a push is known
by (worker, sequence), an update by its number; so after a failure anything may be sent again. Views carry an epoch:
a replica refuses what comes from an older one, and one that is refused knows that it is out and acknowledges nothing
any more (fencing). An update's number and content are decided before any replica sees it, so any replica may answer
reads of an update it has applied.

The class does no input or output: a message in, messages out. It runs the same in a process and in a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshwright.sync.server.protocol import Message, ProtocolError, handler_of
from meshwright.sync.server.store import Store

COORDINATOR = "coordinator"
Key = tuple[str, int]
"""A push: worker, sequence."""
Out = list[tuple[str, Message]]
"""Messages to send: to whom, what."""
_Operation = tuple[Any, ...]


class Replica:
    """One replica of ``shard``.

    Attributes:
        version: number of the last update applied; updates count on from where the run began.
        deposed: the chain goes on without this replica.
        orphaned: the coordinator is gone.
        finished: there is nothing more to do, for one reason or another.
        most_waiting: the most bytes of pushes that were held at once.
    """

    def __init__(self, name: str, shard: int, store: Store, *, version: int = 0) -> None:
        self.name, self.shard, self.store, self.version = name, shard, store, version
        self.epoch = 0
        self.chain: list[str] = []
        self.addresses: dict[str, tuple[str, int]] = {}
        self.deposed = False
        self.orphaned = False
        self.finished = False
        self.most_waiting = 0
        self.pending: dict[Key, list[Tensor]] = {}
        self._floors: dict[str, int] = {}
        """By worker: the highest sequence that is applied or forgotten; pushes up to it are settled."""
        self._waiting: dict[_Operation, set[str]] = {}
        """Operations on their way down the chain, and whom to tell."""
        self._readers: list[tuple[int, str]] = []
        self._installing: set[_Operation] = set()
        self._cut_off: str | None = None
        """The successor whose connection ended: what was on its way to it may never arrive."""
        self._whole = False
        """This replica began with the others, or has taken over its predecessor's state."""
        self._values: tuple[int, list[Tensor]] | None = None
        self._summed: tuple[int, float] | None = None
        """The update whose pushes the store has added up, and the largest element of the sum."""

    def handle(self, sender: str, message: Message) -> Out:
        """What to send after this message.

        Raises:
            ProtocolError: the sender said what it may not.
        """
        result: Out = handler_of(self, "a server", sender, message)(sender, message)
        return result

    def lost(self, peer: str) -> Out:
        """A connection ended: a successor's is told to the coordinator, who says how to go on; without it, we end."""
        if peer == COORDINATOR:
            self.finished = self.orphaned = True
        if peer == self._successor:
            self._cut_off = peer
            return self._suspect()
        self._readers = [(version, reader) for version, reader in self._readers if reader != peer]
        return []

    def _suspect(self) -> Out:
        return [(COORDINATOR, Message("suspect", {"peer": self._cut_off, "epoch": self.epoch}))]

    @property
    def _head(self) -> bool:
        return bool(self.chain) and self.chain[0] == self.name and not self.deposed

    @property
    def _successor(self) -> str | None:
        if self.name not in self.chain:
            return None
        place = self.chain.index(self.name) + 1
        return self.chain[place] if place < len(self.chain) else None

    @property
    def _predecessor(self) -> str | None:
        place = self.chain.index(self.name) if self.name in self.chain else 0
        return self.chain[place - 1] if place else None

    # Operations that change the state: done here, passed on, acknowledged.

    def _on_push(self, sender: str, message: Message) -> Out:
        refused = self._not_mine(sender, message)
        if refused:
            return refused
        key = (str(message["worker"]), int(message["sequence"]))
        if key[1] > self._floors.get(key[0], -1) and key not in self.pending:
            self.pending[key] = list(message.tensors)
            waiting = sum(part.numel() * part.element_size() for parts in self.pending.values() for part in parts)
            self.most_waiting = max(self.most_waiting, waiting)
        return self._pass_on(("stored", *key), sender, message)

    def _on_apply(self, sender: str, message: Message) -> Out:
        refused = self._not_mine(sender, message)
        if refused:
            return refused
        number = int(message["number"])
        if number > self.version + 1:
            raise ProtocolError(f"update {number} came to {self.name} after update {self.version}")
        answers: Out = []
        if number == self.version + 1:
            self._apply(message)
            answers = self._answer_readers()
        return answers + self._pass_on(("applied", number), sender, message)

    def _apply(self, message: Message) -> None:
        entries = _keys(message)
        if message["factor"] is not None:
            self._sum(int(message["number"]), entries)
            self.store.update(float(message["rate"]), float(message["factor"]))
        self.version, self._summed = int(message["number"]), None
        for worker, sequence in [*entries, *message["forget"]]:
            self.pending.pop((worker, sequence), None)
            self._floors[worker] = max(self._floors.get(worker, -1), sequence)

    def _sum(self, number: int, entries: Sequence[Key]) -> float:
        """Let the store hold the sum of these pushes, which update ``number`` is made of; its largest element."""
        missing = [key for key in entries if key not in self.pending]
        if missing:
            raise ProtocolError(f"{self.name} has no push {missing[0]}, which update {number} is made of")
        if self._summed is None or self._summed[0] != number:
            self._summed = (number, self.store.add_up([self.pending[key] for key in entries]))
        return self._summed[1]

    def _pass_on(self, operation: _Operation, sender: str, message: Message) -> Out:
        self._waiting.setdefault(operation, set()).add(sender)
        if self._successor is None:
            return self._acknowledge(operation)
        hop = Message(message.kind, {**message.fields, "epoch": self.epoch, "hop": True}, message.tensors)
        return [(self._successor, hop)]

    def _acknowledge(self, operation: _Operation) -> Out:
        kind, *rest = operation
        names = {"stored": ("worker", "sequence"), "applied": ("number",), "installed": ("epoch",)}[kind]
        fields = {"shard": self.shard, **dict(zip(names, rest, strict=True))}
        return [(asker, Message(kind, fields)) for asker in sorted(self._waiting.pop(operation, ()))]

    def _on_stored(self, sender: str, message: Message) -> Out:
        return self._from_successor(sender, ("stored", str(message["worker"]), int(message["sequence"])))

    def _on_applied(self, sender: str, message: Message) -> Out:
        return self._from_successor(sender, ("applied", int(message["number"])))

    def _on_installed(self, sender: str, message: Message) -> Out:
        if sender != self._successor:
            return []
        epoch = int(message["epoch"])
        answers: Out = []
        # What was on its way when the state was copied is in the copy.
        covered, self._installing = self._installing, set()
        covered |= {each for each in self._waiting if each[0] == "installed" and each[1] <= epoch}
        for operation in sorted(covered, key=str):
            answers += self._acknowledge(operation)
        return answers

    def _from_successor(self, sender: str, operation: _Operation) -> Out:
        return self._acknowledge(operation) if sender == self._successor and not self.deposed else []

    def _not_mine(self, sender: str, message: Message) -> Out:
        """A refusal, where this replica is not the one to do it."""
        if message.fields.get("hop"):
            return self._fence(sender, message)
        if not self._head:
            return [(sender, Message("refused", {"why": f"{self.name} is not the head of shard {self.shard}"}))]
        return []

    def _fence(self, sender: str, message: Message) -> Out:
        """A refusal of what an older chain sends; the same predecessor may still lack the newest view."""
        if self.deposed or (int(message["epoch"]) < self.epoch and self._predecessor != sender):
            return [(sender, Message("fenced", {"epoch": self.epoch, "chain": self.chain}))]
        return []

    # Reads and measurements: they change nothing.

    def _on_pull(self, sender: str, message: Message) -> Out:
        if self.deposed:
            return [(sender, Message("refused", {"why": f"{self.name} is out of shard {self.shard}"}))]
        # One read a peer: one that asks again has given up on what it asked before.
        self._readers = [(version, reader) for version, reader in self._readers if reader != sender]
        self._readers.append((int(message["at_least"]), sender))
        return self._answer_readers()

    def _answer_readers(self) -> Out:
        ready = [reader for version, reader in self._readers if version <= self.version]
        self._readers = [(version, reader) for version, reader in self._readers if version > self.version]
        if not ready:
            return []
        if self._values is None or self._values[0] != self.version:
            self._values = (self.version, self.store.values())
        fields = {"shard": self.shard, "version": self.version}
        return [(reader, Message("values", dict(fields), self._values[1])) for reader in ready]

    def _on_measure(self, sender: str, message: Message) -> Out:
        refused = self._not_mine(sender, message)
        if refused:
            return refused
        peak = self._sum(int(message["number"]), _keys(message))
        return [(sender, Message("measured", {"shard": self.shard, "number": message["number"], "peak": peak}))]

    def _on_squares(self, sender: str, message: Message) -> Out:
        refused = self._not_mine(sender, message)
        if refused:
            return refused
        self._sum(int(message["number"]), _keys(message))  # a new head has not
        parts = self.store.squares(float(message["peak"]))
        return [(sender, Message("squared", {"shard": self.shard, "number": message["number"], "parts": parts}))]

    def _on_state(self, sender: str, message: Message) -> Out:
        if self.version != int(message["version"]) or self.deposed:
            return [(sender, Message("refused", {"why": f"{self.name} stands at update {self.version}"}))]
        fields = {"shard": self.shard, "version": self.version, "updates": self.store.updates}
        return [(sender, Message("state-is", fields, [tensor.clone() for tensor in self.store.state()]))]

    # Membership.

    def _on_view(self, sender: str, message: Message) -> Out:
        """The coordinator's word on who is in the chain, in which order."""
        if sender != COORDINATOR or int(message["epoch"]) <= self.epoch:
            return []
        before = self._successor
        self._adopt(message)
        if self.name not in self.chain:
            return self._step_down()
        if message.fields.get("equal"):
            self._whole = True
            return []
        # What it said in an older epoch may have come too late to count.
        answers: Out = [(COORDINATOR, self._joined())] if self._whole else []
        if self._cut_off is not None and self._successor == self._cut_off:
            return answers + self._suspect()
        self._cut_off = None
        if self._successor is None:
            self._installing.clear()
            return answers + [out for each in sorted(self._waiting, key=str) for out in self._acknowledge(each)]
        if self._successor == before or not self._whole:  # once it is whole, it passes that on
            return answers
        return answers + self._install(("installed", self.epoch))

    def _adopt(self, message: Message) -> None:
        self.epoch = int(message["epoch"])
        self.chain = [str(name) for name, _, _ in message["chain"]]
        self.addresses |= {str(name): (str(host), int(port)) for name, host, port in message["chain"]}

    def _install(self, operation: _Operation) -> Out:
        """Make the successor what this replica is."""
        assert self._successor is not None
        self._installing = set(self._waiting) - {operation}
        keys = list(self.pending)
        state = list(self.store.state())
        fields = {
            "epoch": self.epoch,
            "chain": [[name, *self.addresses[name]] for name in self.chain],
            "version": self.version,
            "updates": self.store.updates,
            "floors": self._floors,
            "pending": [[worker, sequence, len(self.pending[worker, sequence])] for worker, sequence in keys],
            "state": len(state),
        }
        tensors = [tensor.clone() for tensor in state] + [part for key in keys for part in self.pending[key]]
        return [(self._successor, Message("install", fields, tensors))]

    def _on_install(self, sender: str, message: Message) -> Out:
        fenced = self._fence(sender, message)
        if fenced:
            return fenced
        epoch = int(message["epoch"])
        if epoch > self.epoch:
            self._adopt(message)
        tensors, at = list(message.tensors), int(message["state"])
        self.store.restore(tensors[:at], int(message["updates"]))
        self.version = int(message["version"])
        self._floors = {str(worker): int(floor) for worker, floor in message["floors"].items()}
        self.pending = {}
        for worker, sequence, count in message["pending"]:
            self.pending[str(worker), int(sequence)] = tensors[at : at + count]
            at += count
        self._values, self._whole = None, True
        answers = [*self._answer_readers(), (COORDINATOR, self._joined())]
        operation = ("installed", epoch)
        self._waiting.setdefault(operation, set()).add(sender)
        return answers + (self._acknowledge(operation) if self._successor is None else self._install(operation))

    def _joined(self) -> Message:
        return Message("joined", {"shard": self.shard, "epoch": self.epoch, "version": self.version})

    def _on_fenced(self, sender: str, message: Message) -> Out:
        # One that is still in the newer chain will hear of it from the coordinator.
        out = int(message["epoch"]) > self.epoch and self.name not in message["chain"]
        return self._step_down() if out else []

    def _step_down(self) -> Out:
        """Others go on without this replica: it acknowledges nothing any more."""
        self.deposed = self.finished = True
        self._waiting.clear()
        readers, self._readers = self._readers, []
        why = f"{self.name} is out of shard {self.shard}"
        return [(reader, Message("refused", {"why": why})) for _, reader in readers]

    def _on_finish(self, sender: str, message: Message) -> Out:
        self.finished = sender == COORDINATOR or self.finished
        return []

    def _on_refused(self, sender: str, message: Message) -> Out:
        return []


def _keys(message: Message) -> list[Key]:
    return [(str(worker), int(sequence)) for worker, sequence in message["entries"]]
