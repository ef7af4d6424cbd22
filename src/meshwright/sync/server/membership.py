"""Who takes part: the chains of replicas by shard, and the workers that join, fall silent, return and leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.sync.server.modes import Work
from meshwright.sync.server.protocol import Message

Address = tuple[str, int]


@dataclass
class Chain:
    """The replicas of one shard, head first; each change is a new epoch.

    A replica that joins stands last and is *ready* once it has taken over its predecessor's state; until then it
    cannot stand in for anyone.
    """

    shard: int
    epoch: int = 0
    members: list[str] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    """Not heard of for too long, but nobody can stand in for them."""

    @property
    def head(self) -> str:
        """Who takes operations."""
        return self.members[0]

    def join(self, name: str, *, equal: bool = False) -> None:
        """Append a replica; ``equal``: it starts with the same state as the others."""
        self.members.append(name)
        if equal or len(self.members) == 1:
            self.ready.add(name)

    def note(self, name: str, *, silent: bool) -> str | None:
        """Whether a replica is silent, though it stays; the event if that is new."""
        if silent == (name in self.silent):
            return None
        self.silent ^= {name}
        return "server-silent" if silent else "server-returned"

    def remove(self, name: str) -> bool:
        """Take a replica out, and those behind whom nobody ready stands; whether any that is ready is left."""
        self.members.remove(name)
        self.ready.discard(name)
        self.silent.discard(name)
        return bool(self.ready)


@dataclass
class Member:
    """One worker.

    Attributes:
        index: its home among the slots.
        silent: not heard of for too long; its work was given to others. It returns by saying anything.
        task: what it computes, and the sequence number of its push.
        waits: it has asked for work.
        settled: the last sequence that was decided, and the answer it got.
    """

    name: str
    index: int
    silent: bool = False
    task: tuple[int, Work] | None = None
    waits: bool = False
    sequence: int = 0
    settled: tuple[int, Message] | None = None


class Workers:
    """The workers by name. No two live ones have the same; one that comes when another has gone counts on from it."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._sequences: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def join(self, name: str, index: int) -> Member:
        """A new worker, or one that has connected again."""
        if name not in self._members:
            # Servers take a sequence number that is settled for a push they have seen.
            self._members[name] = Member(name, index, sequence=self._sequences.get(name, 0))
        return self._members[name]

    def leave(self, name: str) -> Member | None:
        """It is gone; what it was."""
        member = self._members.pop(name, None)
        if member is not None:
            self._sequences[name] = member.sequence
        return member

    @property
    def homes(self) -> set[int]:
        """Indices of the workers that can be counted on."""
        return {member.index for member in self._members.values() if not member.silent}
