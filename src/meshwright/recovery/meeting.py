"""Ranks that somebody else started find each other, and only each other, in a store that may be older than they are.

torchrun keeps one store for all its attempts, its agents start their ranks again each by itself, and a host may come
back while the others wait: a store has addresses of processes that are gone. So the ranks meet first, in rounds:

    rank 0    opens round n            all are here: calls them by token      all have answered: begins
    rank r              here, token of r                          answers its token           goes on

A token is of one process. Whoever died since it came does not answer, and rank 0 opens the next round; those who wait
see it and come to that one. What a round agrees on is kept under its own prefix, where nothing was before.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from meshwright.errors import MeshwrightError, first_line
from meshwright.recovery.causes import lost_a_peer
from meshwright.recovery.incident import ranks_in_words

_ROUND = "meshwright/round"
_ANSWER_SECONDS = 10.0
"""That a living rank may take to answer: it only waits to be called."""
_LOOK_SECONDS = 1.0
"""After which a rank that waits to be called looks whether there is a newer round."""

_PAUSE_SECONDS = 0.3
"""At most, between two looks into the store."""


class NotAllCame(MeshwrightError):
    """Some ranks, or the store where they meet, were not there in time."""


def join(backend: str, timeout: timedelta) -> None:
    """``init_process_group`` with the ranks that torch's variables (``RANK``, ...) speak of, and with no others.

    Raises:
        NotAllCame: some did not come in time, or were lost meanwhile.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        common, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        store = meet(common, rank, size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or lost_a_peer(str(error))):
            raise
        at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise NotAllCame(
            f"rank {rank} of {size} could not join the others, who meet at {at}, within {timeout.total_seconds():g} s "
            f"(recovery.collective_after): {first_line(error)}"
        ) from error


def meet(store: Store, rank: int, size: int, timeout: timedelta, clock: Callable[[], float] = time.monotonic) -> Store:
    """Meet the other ranks; the part of the store that only these processes use.

    Args:
        store: reached by all of them.
        rank: this one, of ``size``.
        size: how many must come.
        timeout: how long to wait for them.
        clock: seconds.

    Raises:
        NotAllCame: they did not come in time; the message names those that rank 0 missed.
    """
    meeting = _Meeting(store, rank, size, clock() + timeout.total_seconds(), timeout, clock)
    return meeting.lead() if rank == 0 else meeting.follow()


class _Meeting:
    def __init__(
        self, store: Store, rank: int, size: int, deadline: float, timeout: timedelta, clock: Callable[[], float]
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.token = secrets.token_hex(8)
        self._deadline, self._timeout, self._clock = deadline, timeout, clock

    def lead(self) -> Store:
        """Rank 0: open rounds until one has everybody."""
        while True:
            number = self.store.add(_ROUND, 1)
            here = [_key(number, "here", str(rank)) for rank in range(1, self.size)]
            if not self._come(here, self._left()):
                missing = [rank for rank, key in enumerate(here, 1) if not self.store.check([key])]
                raise self._late(f"{ranks_in_words(missing)} to start" if missing else "the others to answer")
            tokens = [self.store.get(key).decode() for key in here]
            self.store.set(_key(number, "called"), json.dumps(tokens))
            answers = [_key(number, "answer", token) for token in tokens]
            if self._come(answers, min(_ANSWER_SECONDS, self._left())):
                self.store.set(_key(number, "begin"), self.token)
                return self._agreed(number, self.token)

    def follow(self) -> Store:
        """Any other rank: come to the newest round until one begins with this process."""
        number = 0
        while True:
            if (newest := self.store.add(_ROUND, 0)) != number:
                number = newest
                self.store.set(_key(number, "here", str(self.rank)), self.token)
            if self._begins(number):
                return self._agreed(number, self.store.get(_key(number, "begin")).decode())
            if self._clock() > self._deadline:
                raise self._late("rank 0 and the others to start")

    def _begins(self, number: int) -> bool:
        """Whether round ``number`` has called this very process, and begins."""
        look = min(_LOOK_SECONDS, max(self._left(), 0.01))
        if not number:
            time.sleep(0.05)
            return False
        if not self._come([_key(number, "called")], look):
            return False
        if json.loads(self.store.get(_key(number, "called")))[self.rank - 1] != self.token:
            time.sleep(_PAUSE_SECONDS)  # it called one that was here before: it will not begin
            return False
        self.store.set(_key(number, "answer", self.token), "")
        return self._come([_key(number, "begin")], look)

    def _agreed(self, number: int, leader: str) -> Store:
        return PrefixStore(f"meshwright/{number}-{leader}", self.store)

    def _come(self, keys: list[str], seconds: float) -> bool:
        """Whether all these keys are there within ``seconds``.

        By looking, not by the store's own wait: that warns on the terminal whenever it ends without them.
        """
        until, pause = self._clock() + seconds, 0.01
        while keys and not self.store.check(keys):
            if self._clock() > until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE_SECONDS)
        return True

    def _left(self) -> float:
        return self._deadline - self._clock()

    def _late(self, what: str) -> NotAllCame:
        return NotAllCame(
            f"rank {self.rank} of {self.size} waited {self._timeout.total_seconds():g} s "
            f"(recovery.collective_after) for {what}; nothing was changed"
        )


def _key(number: int, *parts: str) -> str:
    return "/".join([_ROUND, str(number), *parts])
