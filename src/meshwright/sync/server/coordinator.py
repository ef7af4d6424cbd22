"""The coordinator: hands out samples, puts gradients in order, keeps the chains, and says when to save and to end.

It runs in the launcher, whose end is everybody's anyway, and holds no parameters. Every decision (which gradients
make update n, in which order, at which rate, clipped by what) is taken here once and sent to all shards, so that an
update is on all of them or on none. Accepting a gradient is the acknowledgement a worker gets: from then on the
gradient is in the order, and every shard has its part on every replica.

One update:  entries chosen -> ``measure``, ``squares`` to all heads (the global norm) -> ``apply`` to all chains.

No input or output here either: messages in, messages out, and what is to be written goes to a ``Sink``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.sync.server.membership import Address, Chain, Workers
from meshwright.sync.server.modes import Mode, Work
from meshwright.sync.server.plan import Plan
from meshwright.sync.server.protocol import GIVEN_UP, Message, ProtocolError, handler_of
from meshwright.sync.server.replica import Key, Out
from meshwright.sync.server.staleness import factor
from meshwright.sync.server.update import Sink, Update

_RESUME = "resume from the last checkpoint, and set sync.server_replicas to 2 or more to go on without"


class Coordinator:
    """See the module."""

    def __init__(self, plan: Plan, mode: Mode, sink: Sink) -> None:
        self.plan, self.mode, self.sink = plan, mode, sink
        self.chains = [Chain(shard) for shard in range(plan.shards)]
        self.workers = Workers()
        self.addresses: dict[str, Address] = {}
        self.ordered = plan.begin * plan.pushes
        """Number of the last update that was put in order."""
        self._awaited = plan.awaited
        self.limit = plan.begin
        self.finished = False
        self.failure: str | None = None
        self._stop: str | None = None
        self._queue: deque[Update] = deque()
        self._current: Update | None = None
        self._log: deque[tuple[int, Message]] = deque()
        """Updates that some chain has not acknowledged yet, to be sent again."""
        self._applied = [self.ordered] * plan.shards
        self._forget: list[Key] = []
        self._held: dict[tuple[int, int], tuple[Key, dict[str, Any]]] = {}
        self.started = False
        """All servers are up."""
        self._validating: dict[int, str | None] | None = None
        self._validated: dict[int, tuple[float, int]] = {}
        self._states: dict[int, Message] | None = None

    # Messages.

    def handle(self, sender: str, message: Message) -> Out:
        """What to send after this message.

        Raises:
            ProtocolError: the sender said what it may not.
        """
        handler = handler_of(self, "the coordinator", sender, message)
        if sender in self.workers and self.workers[sender].silent:
            self.workers[sender].silent = False
            self.sink.event("worker-returned", worker=sender)
        result: Out = handler(sender, message)
        return result

    def _on_beat(self, sender: str, message: Message) -> Out:
        return []

    def _on_register(self, sender: str, message: Message) -> Out:
        """A replica is up."""
        shard = int(message["shard"])
        if not 0 <= shard < self.plan.shards:
            raise ProtocolError(f"{sender}: there is no shard {shard}; this run has 0 to {self.plan.shards - 1}")
        if self.finished:
            return [(sender, Message("finish"))]  # started in another's place, and late
        self.addresses[sender] = (str(message["host"]), int(message["port"]))
        chain = self.chains[shard]
        chain.join(sender, equal=not self.started)
        if self.started:
            self.sink.event("server-joined", server=sender, shard=shard)
            return self._send_view(chain, [*chain.members])
        if any(len(each.members) < self.plan.replicas for each in self.chains):
            return []
        self.started = True
        self.sink.event("servers-ready", chains=[each.members for each in self.chains])
        views = [out for each in self.chains for out in self._send_view(each, each.members, equal=True)]
        return views + self._next_stretch()

    def _on_joined(self, sender: str, message: Message) -> Out:
        chain = self.chains[int(message["shard"])]
        if sender in chain.members and int(message["epoch"]) == chain.epoch:
            chain.ready.add(sender)
        return []

    def _on_suspect(self, sender: str, message: Message) -> Out:
        """A replica cannot reach its successor: the successor is out, whatever became of it."""
        chain = next((each for each in self.chains if sender in each.members), None)
        if chain is None or int(message["epoch"]) != chain.epoch:
            return []
        return self.lost(str(message["peer"]))

    def _on_view(self, sender: str, message: Message) -> Out:
        return [(sender, Message("stop") if self.failure is not None else Message("view-is", self._view_fields()))]

    def _on_join(self, sender: str, message: Message) -> Out:
        """A worker is there."""
        known = sender in self.workers
        self.workers.join(sender, int(message["index"]))
        if not known:
            self.sink.event("worker-joined", worker=sender, workers=len(self.workers))
        return [(sender, Message("welcome", self._view_fields()))]

    def _on_next(self, sender: str, message: Message) -> Out:
        """A worker asks for work; what it had before, if anything, it no longer does."""
        if sender not in self.workers:
            return [(sender, Message("refused", {"why": f"{sender} has not joined"}))]
        member = self.workers[sender]
        self._take_back(sender)
        member.waits = True
        return self._serve()

    def _on_leave(self, sender: str, message: Message) -> Out:
        return self._gone(sender, "worker-left")

    def _on_commit(self, sender: str, message: Message) -> Out:
        """A worker's gradient is on all replicas of all shards: accept it, or say that it came too late."""
        sequence = int(message["sequence"])
        if sender not in self.workers:
            return [(sender, Message("refused", {"why": f"{sender} has not joined"}))]
        member = self.workers[sender]
        if member.settled is not None and member.settled[0] == sequence:
            return [(sender, member.settled[1])]  # asked again: the same answer
        accepted = member.task is not None and member.task[0] == sequence
        answer = Message("accepted" if accepted else "dropped", {"sequence": sequence})
        member.settled = (sequence, answer)
        out: Out = [(sender, answer)]
        if not accepted or member.task is None:
            return out
        work = member.task[1]
        member.task = None
        self._held[work.clock, work.slot] = ((sender, sequence), dict(message.fields))
        for taken in self.mode.arrived(work):
            self._order(taken.works, taken.dropped)
        return out + self._advance() + self._serve()

    # Workers that go.

    def lost(self, peer: str) -> Out:
        """A connection ended: its owner is dead until it connects again. At the end everybody leaves."""
        if self.finished:
            return []
        if peer in self.workers:
            return self._gone(peer, "worker-lost")
        for chain in self.chains:
            if peer in chain.members:
                return self._without(chain, peer)
        return []

    def _gone(self, worker: str, kind: str) -> Out:
        self._take_back(worker)
        self.workers.leave(worker)
        self.sink.event(kind, worker=worker, workers=len(self.workers))
        return self._serve()

    def _take_back(self, worker: str) -> None:
        """What a worker was given is free again; its push, if it comes, comes to nothing."""
        member = self.workers[worker]
        if member.task is not None:
            sequence, work = member.task
            member.task = None
            self._forget.append((worker, sequence))
            self.mode.give_back(work)
        if self._validating is not None:
            for part, owner in self._validating.items():
                if owner == worker and part not in self._validated:
                    self._validating[part] = None

    def tick(self, now: float, heard: Mapping[str, float]) -> Out:
        """Time passes: who has not been heard of for too long is silent (workers) or out (replicas with others).

        A replica that is alone may come back; if it does not for ``GIVEN_UP`` times as long, the run ends.
        """
        out: Out = []
        if self.finished:
            return out
        for member in self.workers:
            if not member.silent and now - heard.get(member.name, now) > self.plan.timeout:
                member.silent = True
                self._take_back(member.name)
                self.sink.event("worker-silent", worker=member.name, seconds=self.plan.timeout)
        for chain in self.chains:
            for name in list(chain.members):
                silence = now - heard.get(name, now)
                if silence > self.plan.timeout and self.started and chain.ready - {name}:
                    out += self._without(chain, name)
                else:
                    self._wait_for(chain, name, silence)
        return out + self._serve()

    def _wait_for(self, chain: Chain, name: str, silence: float) -> None:
        """A replica that no other can stand in for has been silent for so long."""
        news = chain.note(name, silent=silence > self.plan.timeout)
        if news is not None:
            self.sink.event(news, server=name, shard=chain.shard)
        if silence > GIVEN_UP * self.plan.timeout and self.failure is None:
            self.fail(
                f"shard {chain.shard}: {name} has said nothing for {GIVEN_UP * self.plan.timeout:g} s and no other "
                f"server can go on in its place; {_RESUME}"
            )

    # Chains.

    def _without(self, chain: Chain, name: str) -> Out:
        """The chain goes on without a replica, in a new epoch."""
        everyone = [*chain.members]
        before = chain.head
        if not self.started:
            self.fail(f"{name} ended before training began")
            return []
        alive = chain.remove(name)
        self.sink.event("server-lost", server=name, shard=chain.shard, left=len(chain.members))
        if not alive:
            self.fail(f"shard {chain.shard} has no server left ({name} was the last); {_RESUME}")
            return []
        while chain.head not in chain.ready:
            chain.members.append(chain.members.pop(0))
        out = self._send_view(chain, everyone)
        if chain.head != before:
            self.sink.event("new-head", server=chain.head, shard=chain.shard, epoch=chain.epoch)
        # What the chain had not acknowledged may have died with the replica.
        out += [(chain.head, message) for number, message in self._log if number > self._applied[chain.shard]]
        return out + self._ask_again(chain)

    def _send_view(self, chain: Chain, to: Sequence[str], *, equal: bool = False) -> Out:
        chain.epoch += 1
        members = [[name, *self.addresses[name]] for name in chain.members]
        view = {"epoch": chain.epoch, "chain": members, "equal": equal}
        return [(name, Message("view", view)) for name in to]

    def _view_fields(self) -> dict[str, Any]:
        def members(chain: Chain) -> list[list[Any]]:
            return [[name, *self.addresses[name]] for name in chain.members if name in chain.ready]

        return {"chains": [members(chain) for chain in self.chains], "ready": self.started}

    def _ask_again(self, chain: Chain) -> Out:
        """What the old head was asked and may not have answered."""
        out: Out = []
        update = self._current
        if update is not None:
            if chain.shard not in update.peaks:
                out.append((chain.head, self._measure(update)))
            elif len(update.peaks) == len(self.chains) and chain.shard not in update.squares:
                out.append((chain.head, self._ask_squares(update)))
        if self._states is not None and chain.shard not in self._states:
            out.append((chain.head, self._ask_state()))
        return out

    # Updates.

    def _order(self, works: Sequence[Work], dropped: Sequence[Work]) -> None:
        """Pushes become the next update; late ones come to nothing."""
        held = [self._held.pop((work.clock, work.slot)) for work in works]
        for member in self.workers:
            if member.task is not None and member.task[1] in dropped:
                self._forget.append((member.name, member.task[0]))
                member.task = None
        self.ordered += 1
        self._queue.append(Update(self.ordered, [key for key, _ in held], tuple(works), [facts for _, facts in held]))

    def _advance(self) -> Out:
        """Begin the next update if none is under way."""
        if self._current is not None or not self._queue or self.failure is not None:
            return []
        self._current = self._queue.popleft()
        self._current.forget, self._forget = self._forget, []
        return [(chain.head, self._measure(self._current)) for chain in self.chains]

    def _measure(self, update: Update) -> Message:
        return Message("measure", {"number": update.number, "entries": update.entries})

    def _ask_squares(self, update: Update) -> Message:
        fields = {"number": update.number, "entries": update.entries, "peak": max(update.peaks.values())}
        return Message("squares", fields)

    def _on_measured(self, sender: str, message: Message) -> Out:
        update, shard = self._current, int(message["shard"])
        if update is None or message["number"] != update.number or sender != self.chains[shard].head:
            return []
        update.peaks[shard] = float(message["peak"])
        if len(update.peaks) < len(self.chains):
            return []
        return [(chain.head, self._ask_squares(update)) for chain in self.chains]

    def _on_squared(self, sender: str, message: Message) -> Out:
        update, shard = self._current, int(message["shard"])
        if update is None or message["number"] != update.number or sender != self.chains[shard].head:
            return []
        coarse, fine = message["parts"]
        update.squares[shard] = (float(coarse), float(fine))
        if len(update.squares) < len(self.chains):
            return []
        return self._decide(update)

    def _decide(self, update: Update) -> Out:
        """All is known of an update: its rate, its clipping, or that it is skipped; then on to the shards."""
        # Sums of the exact parts are exact too, so neither shards nor their order show in the norm.
        coarse = sum(part[0] for part in update.squares.values())
        fine = sum(part[1] for part in update.squares.values())
        whole = update.works[0].whole
        divisor = 1 if whole else max(1, update.valid)
        norm = math.sqrt(coarse + fine) / divisor if coarse + fine >= 0 else math.nan
        loss = update.loss / divisor
        step = (update.number - 1) // self.plan.pushes
        stale = max(update.staleness)
        update.norm = norm
        update.rate = self.plan.rate(step) * factor(self.plan.staleness, stale)
        if math.isfinite(norm) and math.isfinite(loss):
            limit = self.plan.clip_norm
            update.factor = (1.0 if limit is None or not norm > limit else limit / norm) / divisor
        elif self.plan.stop_on_nonfinite:
            self._stop = (
                f"update {update.number}: loss {loss} and gradient norm {norm} must be finite; "
                "it was not applied on any server"
            )
        self._current = None
        fields = {
            "number": update.number, "entries": update.entries, "forget": update.forget,
            "rate": update.rate, "factor": update.factor,
        }  # fmt: skip
        self._log.append((update.number, Message("apply", fields)))
        self.sink.update(update, loss)
        out = [(chain.head, Message("apply", dict(fields))) for chain in self.chains]
        if self._stop is not None and update.factor is None:
            self._break_off(step + 1)
        return out + self._advance() + self._at_barrier()

    def _break_off(self, step: int) -> None:
        """Stop with this many steps done: what was begun beyond them is not wanted. Asynchronous: they are ended."""
        if self.mode.break_off(step):
            for member in self.workers:
                if member.task is not None:
                    self._forget.append((member.name, member.task[0]))
                    member.task = None
            self._held.clear()
            self.limit = step
        else:
            self.stop(self._stop or "")

    def _on_applied(self, sender: str, message: Message) -> Out:
        shard = int(message["shard"])
        if sender != self.chains[shard].head:
            return []
        self._applied[shard] = max(self._applied[shard], int(message["number"]))
        while self._log and self._log[0][0] <= min(self._applied):
            self._log.popleft()
        return self._at_barrier()

    def _on_refused(self, sender: str, message: Message) -> Out:
        return []  # a head of an older view; the new one is asked when the view changes

    # Stretches of steps, and what happens between them.

    def stop(self, why: str) -> None:
        """End after the steps that have begun; the state is saved."""
        if self._stop is None or self._stop != why:
            self._stop = why
        self.limit = min(self.limit, max(self.mode.started, self.plan.begin))
        self.mode.allow(self.limit)

    def wish_to_stop(self, why: str) -> Out:
        """``stop``, from outside."""
        self.stop(why)
        return self._at_barrier()

    def _next_stretch(self) -> Out:
        done = self.ordered // self.plan.pushes
        self.limit = done if self._stop is not None else self.plan.barrier_after(done)
        self.mode.allow(self.limit)
        return self._serve() + self._at_barrier()

    def _at_barrier(self) -> Out:
        """If all steps of this stretch are done: validate, save, go on or end."""
        # The log is empty once every replica of every shard has applied everything.
        busy = self._current is not None or bool(self._queue) or bool(self._log)
        if busy or not self.started or self._states is not None or self._validating is not None or self.finished:
            return []
        step = self.ordered // self.plan.pushes
        if self.ordered < self.limit * self.plan.pushes or self.ordered % self.plan.pushes:
            return []
        if self._stop is None and step in self.plan.evaluate_at and step > self.plan.begin:
            self._validating = dict.fromkeys(range(self.plan.workers))
            self._validated = {}
            return self._serve()
        return self._save_or_go_on(step)

    def _save_or_go_on(self, step: int) -> Out:
        if step > self.plan.begin and (step in self.plan.save_at or self._is_last(step)):
            self._states = {}
            return [(chain.head, self._ask_state()) for chain in self.chains]
        return self._go_on(step)

    def _is_last(self, step: int) -> bool:
        return step == self.plan.steps or self._stop is not None

    def _go_on(self, step: int) -> Out:
        return self._finish() if self._is_last(step) else self._next_stretch()

    def _ask_state(self) -> Message:
        return Message("state", {"version": self.ordered})

    def _on_state_is(self, sender: str, message: Message) -> Out:
        head = self.chains[int(message["shard"])].head
        if self._states is None or message["version"] != self.ordered or sender != head:
            return []
        self._states[int(message["shard"])] = message
        if len(self._states) < len(self.chains):
            return []
        step, states = self.ordered // self.plan.pushes, self._states
        self._states = None
        tensors = [states[shard].tensors for shard in range(len(self.chains))]
        self.sink.save(step, tensors, int(states[0]["updates"]), self.mode.position)
        return self._go_on(step)

    def _on_validated(self, sender: str, message: Message) -> Out:
        """A worker's part of the validation set."""
        part = int(message["part"])
        if self._validating is None or self._validating.get(part) != sender:
            return []
        self._validated[part] = (float(message["loss"]), int(message["tokens"]))
        if len(self._validated) < len(self._validating):
            return []
        self._validating = None
        total = sum(self._validated[each][0] for each in sorted(self._validated))
        tokens = sum(self._validated[each][1] for each in sorted(self._validated))
        step = self.ordered // self.plan.pushes
        self.sink.evaluated(step, total / tokens if tokens else None)
        return self._save_or_go_on(step)

    def _serve(self) -> Out:
        """Give work to those that wait and may have some."""
        out: Out = []
        if self._awaited <= self.workers.homes:
            self._awaited = frozenset()
        if not self.started or self.failure is not None or (self._awaited and not self.finished):
            return out
        for member in sorted(self.workers, key=lambda each: each.index):
            if not member.waits or member.silent:
                continue
            answer = self._answer(member.name)
            if answer is not None:
                member.waits = False
                out.append((member.name, answer))
        return out

    def _answer(self, worker: str) -> Message | None:
        member = self.workers[worker]
        if self.finished:
            return Message("stop")
        if self._validating is not None:
            part = next((part for part, owner in self._validating.items() if owner is None), None)
            if part is None:
                return None
            self._validating[part] = worker
            fields = {"part": part, "parts": len(self._validating), "at_least": self.ordered}
            return Message("validate", {**fields, **self._view_fields()})
        work = self.mode.take(member.index, self.workers.homes)
        if work is None:
            return None
        member.sequence += 1
        member.task = (member.sequence, work)
        fields = {"sequence": member.sequence, "at_least": self.ordered, **work.as_fields()}
        return Message("work", {**fields, **self._view_fields()})

    def _finish(self) -> Out:
        self.finished = True
        self.sink.ended(self._stop)
        replicas = [name for chain in self.chains for name in chain.members]
        return self._serve() + [(name, Message("finish")) for name in replicas]

    def awaits(self, role: str) -> bool:
        """Whether training cannot begin without one of these (``"server"`` or ``"worker"``)."""
        return not self.started if role == "server" else bool(self._awaited)

    @property
    def deserted(self) -> bool:
        """No worker is connected, and training does not wait for one to come either."""
        return not len(self.workers) and not self._awaited

    def fail(self, why: str) -> None:
        """Give up; the launcher ends everybody and says why."""
        self.failure = self.failure or why
        self.sink.event("failed", reason=why)
