"""What a worker does: ask for work, pull parameters, compute, push its gradient everywhere, have it accepted.

``Worker.run`` is a generator: it yields the calls to make at once and is sent their answers (None where a peer is
gone), so that the same code runs over sockets and in a simulation, message by message.

A push is sent until every shard has stored it on all its replicas, to whoever is the head by the newest view; only
then is it committed, under the same sequence number however often that takes. So a gradient counts once or not at
all: a worker that dies half way leaves parts that no update will name.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from meshwright.sync.server.membership import Address
from meshwright.sync.server.modes import Work
from meshwright.sync.server.protocol import Message, ProtocolError
from meshwright.sync.server.replica import COORDINATOR

Calls = list[tuple[str, Message]]
Answers = list[Message | None]
RETRY_SECONDS = 0.1
UNANSWERED = frozenset({"validated", "leave"})
"""What a worker says without waiting for an answer."""


@dataclass(frozen=True)
class Gradient:
    """What a worker computed: the parts of each shard, and the loss and valid tokens behind them.

    ``losses`` has one entry a micro-batch, in the gradient's own scale: divided like it.
    """

    parts: Sequence[Sequence[Tensor]]
    losses: Sequence[float]
    valid: int


class Compute(Protocol):
    """The model on a worker."""

    def load(self, shards: Sequence[Sequence[Tensor]]) -> None:
        """Take over parameters, by shard."""

    def gradient(self, work: Work) -> Gradient:
        """Forward and backward over the samples of ``work``."""

    def validate(self, part: int, parts: int) -> tuple[float, int]:
        """Summed loss and valid tokens of every ``parts``-th batch of the validation set, from ``part`` on."""


@dataclass(frozen=True)
class Pause:
    """Yielded instead of calls: wait a little, then go on."""

    seconds: float = RETRY_SECONDS


Dialogue = Generator[Calls | Pause, Answers, Any]


def fits(request: Message, answer: Message) -> bool:
    """Whether this is the answer to that request, and not to one that was given up on a connection before."""
    if answer.kind == "stored":
        return request.kind == "push" and answer["sequence"] == request["sequence"]
    if answer.kind == "values":
        return request.kind == "pull" and int(answer["version"]) >= int(request["at_least"])
    return True


class CoordinatorLost(ProtocolError):
    """The coordinator is gone, and with it the run."""


class Worker:
    """One worker.

    Args:
        name: never used before in this run.
        index: its home among the slots.
        compute: its model.
    """

    def __init__(self, name: str, index: int, compute: Compute) -> None:
        self.name, self.index, self.compute = name, index, compute
        self.chains: list[list[str]] = []
        self.addresses: dict[str, Address] = {}
        self.accepted = self.dropped = 0
        self.leaving = False
        """Set from outside: give back what is handed out next, and go."""

    def run(self) -> Dialogue:
        """Work until the coordinator says stop."""
        welcome = yield from self._ask(Message("join", {"index": self.index}))
        self._look(welcome)
        while True:
            task = yield from self._ask(Message("next"))
            if task.kind == "stop":
                return
            if self.leaving:
                yield [(COORDINATOR, Message("leave"))]
                return
            self._look(task)
            if task.kind == "work":
                yield from self._train(task)
            elif task.kind == "validate":
                yield from self._validate(task)
            else:
                raise ProtocolError(f"the coordinator answered {task.kind!r}: {task.fields.get('why', '')}")

    def _train(self, task: Message) -> Dialogue:
        work = Work(**{name: task[name] for name in Work.__dataclass_fields__})
        versions = yield from self._pull(int(task["at_least"]))
        gradient = self.compute.gradient(work)
        sequence = int(task["sequence"])
        pushes = [
            Message("push", {"worker": self.name, "sequence": sequence, "shard": shard}, parts)
            for shard, parts in enumerate(gradient.parts)
        ]
        yield from self._each_shard(pushes, "stored", head=True)
        facts = {
            "sequence": sequence, "version": min(versions), "versions": versions,
            "losses": list(gradient.losses), "valid": gradient.valid, "first": work.first,
        }  # fmt: skip
        answer = yield from self._ask(Message("commit", facts))
        self.accepted += answer.kind == "accepted"
        self.dropped += answer.kind == "dropped"

    def _validate(self, task: Message) -> Dialogue:
        yield from self._pull(int(task["at_least"]))
        loss, tokens = self.compute.validate(int(task["part"]), int(task["parts"]))
        yield [(COORDINATOR, Message("validated", {"part": task["part"], "loss": loss, "tokens": tokens}))]

    def _pull(self, at_least: int) -> Dialogue:
        """Load parameters that hold at least this update; which update each shard stood at."""
        requests = [Message("pull", {"at_least": at_least}) for _ in self.chains]
        answers = yield from self._each_shard(requests, "values", head=False)
        self.compute.load([answer.tensors for answer in answers])
        return [int(answer["version"]) for answer in answers]

    def _each_shard(self, requests: Sequence[Message], kind: str, *, head: bool) -> Dialogue:
        """Ask every shard until it has answered with ``kind``; a failed one again, under the newest view."""
        answers: dict[int, Message] = {}
        while len(answers) < len(requests):
            open_ = [shard for shard in range(len(requests)) if shard not in answers]
            got = yield [(self._replica(shard, head), requests[shard]) for shard in open_]
            answers |= {
                shard: answer for shard, answer in zip(open_, got, strict=True) if answer and answer.kind == kind
            }
            if len(answers) < len(requests):
                yield Pause()
                view = yield from self._ask(Message("view"))
                if view.kind == "stop":
                    raise CoordinatorLost("the run has failed; the launcher says why")
                self._look(view)
        return [answers[shard] for shard in range(len(requests))]

    def _replica(self, shard: int, head: bool) -> str:
        """The head, or for reads the replica that this worker's index falls on."""
        chain = self.chains[shard]
        return chain[0] if head else chain[-1 - self.index % len(chain)]

    def _ask(self, message: Message) -> Dialogue:
        answer = (yield [(COORDINATOR, message)])[0]
        if answer is None:
            raise CoordinatorLost("the coordinator cannot be reached any more; the run has ended")
        if answer.kind == "refused":
            why = answer.fields.get("why", "without a reason")
            raise ProtocolError(f"the coordinator refused {message.kind!r}: {why}")
        return answer

    def _look(self, message: Message) -> None:
        """Take over the chains that a message names."""
        if not message["ready"]:
            return
        self.chains = [[str(name) for name, _, _ in chain] for chain in message["chains"]]
        for chain in message["chains"]:
            self.addresses |= {str(name): (str(host), int(port)) for name, host, port in chain}
