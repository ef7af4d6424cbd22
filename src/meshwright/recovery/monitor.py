"""Which rank holds up the others, told from where each is: stopped, hung, out of step.

A rank that waits in a collective is not to blame as long as somebody it waits for does something else. So looked for is

    stopped   the kernel has it stopped (SIGSTOP, a debugger); one that goes on in time is left alone
    hung      not waiting for anybody, and no sign of life
    desync    all wait, some in another operation than the rest of their group, or one behind it
    lost      all wait in the same operation of a group, and it does not end

Death is seen by whoever started the rank, and slowness by ``stragglers``: neither needs a time limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.comm.position import ONE_SIDED, Position

Kind = Literal["dead", "stopped", "hung", "desync", "lost", "corrupt", "slow"]
_SETUP_PHASES = frozenset(("setup", "checkpoint", "end"))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds; see ``[recovery]``."""

    stopped: float
    hang: float
    setup: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank, as it is now."""

    position: Position
    stopped: bool = False
    """The kernel's state of the process."""
    process_state: str = ""
    """Its letter in /proc: R, S, D, T."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Who is to blame, and since when."""

    kind: Kind
    ranks: tuple[int, ...]
    seconds: float
    """For how long it has been so."""
    waiters: tuple[int, ...] = ()
    detail: str = ""


def waiters_for(ranks: Iterable[int], positions: Mapping[int, Position]) -> tuple[int, ...]:
    """Who waits for one of ``ranks``, at first hand or through others, in rank order."""
    blamed, held = set(ranks), set(ranks)
    grown = True
    while grown:
        grown = False
        for rank, position in positions.items():
            if rank not in held and position.waiting and held & set(late_in(rank, positions)):
                held.add(rank)
                grown = True
    return tuple(sorted(held - blamed))


def late_in(rank: int, positions: Mapping[int, Position]) -> tuple[int, ...]:
    """The members of the group in which ``rank`` waits that have not come to its operation."""
    position = positions[rank]
    if not position.waiting:
        return ()
    late = []
    for member in position.members:
        other = positions.get(member)
        if member == rank or other is None:
            continue
        if position.operation in ONE_SIDED:
            late.append(member)
            continue
        started = other.started_in(position.members, position.axis)
        if started is None or started < position.sequence:
            late.append(member)
    return tuple(late)


@dataclass
class Monitor:
    """Looks at all ranks again and again; remembers since when each is stopped.

    Args:
        limits: how long is too long.
    """

    limits: Limits
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _thawed: dict[int, float] = field(default_factory=dict)

    def look(self, now: float, seen: Mapping[int, Seen]) -> Finding | None:
        """What is wrong now, if anything is.

        Args:
            now: seconds of the clock of the positions.
            seen: the ranks that are alive.
        """
        return self._stopped(now, seen) or self._hung(now, seen) or self._stuck(now, seen)

    def _stopped(self, now: float, seen: Mapping[int, Seen]) -> Finding | None:
        for rank, one in seen.items():
            if one.stopped:
                self._stopped_since.setdefault(rank, now)
            elif rank in self._stopped_since:
                del self._stopped_since[rank]
                self._thawed[rank] = now  # it could not beat meanwhile
        for rank in [rank for rank in self._stopped_since if rank not in seen]:
            del self._stopped_since[rank]
        late = {rank: now - since for rank, since in self._stopped_since.items() if now - since >= self.limits.stopped}
        if not late:
            return None
        ranks = tuple(sorted(late))
        return Finding(kind="stopped", ranks=ranks, seconds=max(late.values()), waiters=self._waiters(ranks, seen))

    def _idle(self, now: float, rank: int, one: Seen) -> float:
        return now - max(one.position.changed, self._thawed.get(rank, 0.0))

    def _limit(self, position: Position) -> float:
        begins = position.step == 0 or position.phase in _SETUP_PHASES
        return self.limits.setup if begins else self.limits.hang

    def _hung(self, now: float, seen: Mapping[int, Seen]) -> Finding | None:
        hung = {}
        for rank, one in seen.items():
            if one.position.process == 0 or one.position.waiting or rank in self._stopped_since:
                continue
            idle = self._idle(now, rank, one)
            if idle >= self._limit(one.position):
                hung[rank] = idle
        if not hung:
            return None
        # At a start all may look so, because one holds up the rest without their saying that they wait.
        least = min(seen[rank].position.beats for rank in hung)
        ranks = tuple(sorted(rank for rank in hung if seen[rank].position.beats == least))
        states = sorted({seen[rank].process_state for rank in ranks} - {""})
        detail = {"R": "it computes", "D": "it waits for a disk or a device", "S": "it sleeps"}
        return Finding(
            kind="hung", ranks=ranks, seconds=max(hung[rank] for rank in ranks), waiters=self._waiters(ranks, seen),
            detail=", ".join(detail.get(state, f"process state {state}") for state in states),
        )  # fmt: skip

    def _stuck(self, now: float, seen: Mapping[int, Seen]) -> Finding | None:
        """All ranks wait for each other: nobody will come."""
        if self._stopped_since or not seen or not all(one.position.waiting for one in seen.values()):
            return None
        idle = min(self._idle(now, rank, one) for rank, one in seen.items())
        limit = max(self._limit(one.position) for one in seen.values())
        if idle < limit:
            return None
        positions = {rank: one.position for rank, one in seen.items()}
        late = Counter(member for rank in positions for member in late_in(rank, positions))
        behind = {
            rank: votes for rank, votes in late.items() if positions[rank].operation not in ONE_SIDED
        } or dict(late)  # fmt: skip
        apart = self._apart(positions)
        if apart:
            ranks, detail = apart
        elif behind:
            most = max(behind.values())
            ranks = tuple(sorted(rank for rank, votes in behind.items() if votes == most))
            detail = "it is in another operation than those who wait for it"
        else:
            return Finding(
                kind="lost", ranks=tuple(sorted(seen)), seconds=idle,
                detail="all have come to the same operation, and it does not end",
            )  # fmt: skip
        return Finding(kind="desync", ranks=ranks, seconds=idle, waiters=self._waiters(ranks, seen), detail=detail)

    @staticmethod
    def _apart(positions: Mapping[int, Position]) -> tuple[tuple[int, ...], str] | None:
        """Members of one group that give one number to different operations: the fewer are to blame."""
        groups: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[str, str]]] = {}
        for rank, position in positions.items():
            if position.operation not in ONE_SIDED:
                key = position.axis, position.members, position.sequence
                groups.setdefault(key, {})[rank] = position.operation, position.phase
        for (axis, _, sequence), said in groups.items():
            counts = Counter(said.values()).most_common()
            if len(counts) < 2:
                continue
            usual, votes = counts[0]
            ranks = tuple(sorted(rank for rank, what in said.items() if what != usual))
            if votes == counts[1][1]:  # no majority: the one that is further has left something out
                ranks = tuple(sorted(max(said, key=lambda rank: positions[rank].beats) for _ in range(1)))
                usual = next(what for rank, what in said.items() if rank not in ranks)
            mine = said[ranks[0]]
            return ranks, (
                f"its operation {sequence} of {axis} is {mine[0]} in {mine[1]}, where the others are in "
                f"{usual[0]} in {usual[1]}"
            )
        return None

    @staticmethod
    def _waiters(ranks: Iterable[int], seen: Mapping[int, Seen]) -> tuple[int, ...]:
        return waiters_for(ranks, {rank: one.position for rank, one in seen.items()})


def process_state(pid: int) -> str:
    """The letter of a process's state in /proc; empty when it is not there."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as status:
            return status.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
