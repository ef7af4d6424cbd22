"""Temporary bytes of the data parallel exchanges while backward runs: buckets, or groups of ZeRO-2 and 3."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.plan.state import Bucket, Division, Group
from meshwright.plan.tape import Tape
from meshwright.plan.walk import SMALL_EXCHANGE


def scatter_staging(whole: int, ranks: int) -> int:
    """Buffers of a reduce-scatter of ``whole`` bytes over ``ranks``, beside its input and output."""
    if ranks == 1:
        return 0
    return whole if whole <= SMALL_EXCHANGE else whole // ranks * (ranks - 1)


def gather_staging(whole: int) -> int:
    """Buffers of an all-gather into ``whole`` bytes, for the moment in which it starts."""
    return whole if whole <= SMALL_EXCHANGE else 0


class Flight:
    """Sequences of operations under way; each is the buffers of its operations, and has at least one."""

    def __init__(self) -> None:
        self._under_way: list[list[int]] = []

    def start(self, operations: list[int], tape: Tape) -> None:
        """Begin a sequence, then carry every older one on by one operation."""
        older, self._under_way = self._under_way, []
        if operations:
            tape.use(operations[0])
            self._under_way.append(operations)
        self._carry_on(older, tape)

    def settle(self, tape: Tape) -> None:
        """End everything."""
        while self._under_way:
            older, self._under_way = self._under_way, []
            self._carry_on(older, tape)

    def _carry_on(self, older: list[list[int]], tape: Tape) -> None:
        for each in older:
            tape.drop(each[0])
            if each[1:]:
                tape.use(each[1])
                self._under_way.append(each[1:])


class BucketFlight:
    """The buckets of one stage in its last backward pass (in deterministic mode: in every one).

    A bucket starts when the last of its gradients is there.
    """

    def __init__(self, buckets: Sequence[Bucket], element: int, wide: int, flight: Flight) -> None:
        self._ends: list[int] = []
        self._operations: list[list[int]] = []
        self._element, self._came, self._started, self._flight = element, 0, 0, flight
        filled = 0
        for bucket in buckets:
            for _ in range(bucket.times):
                filled += bucket.filled
                self._ends.append(filled)
                self._operations.append(_operations(bucket, wide))

    def came(self, gradient: int, tape: Tape) -> None:
        """A weight gradient of so many bytes is in its bucket."""
        self._came += gradient // self._element
        while self._started < len(self._ends) and self._ends[self._started] <= self._came:
            self._start(tape)

    def start_rest(self, tape: Tape) -> None:
        """Start what has not."""
        while self._started < len(self._ends):
            self._start(tape)

    def _start(self, tape: Tape) -> None:
        self._flight.start(self._operations[self._started], tape)
        self._started += 1


def _operations(bucket: Bucket, wide: int) -> list[int]:
    """Buffers of each operation of a bucket's sequence."""
    divided = bucket.division
    if divided.degree == 1:
        return []
    if divided.every_step:
        both = divided.shards > 1 and divided.copies > 1
        return [bucket.size * wide * (2 if both else 1)]
    operations = []
    if divided.shards > 1:
        operations.append(scatter_staging(bucket.size * wide, divided.shards))
    if divided.copies > 1:
        operations.append(scatter_staging(bucket.chunk * wide, divided.copies))
        operations.append(0)
    return operations


class GroupFlight:
    """The groups of ZeRO-2 and 3: each is gathered for use, and reduced after its backward."""

    def __init__(self, divided: Division, element: int, wide: int) -> None:
        self._divided, self._element, self._wide = divided, element, wide
        self.older = 0
        """Buffers of the reduction under way."""

    def gathered(self, group: Group) -> int:
        """Bytes of a group's whole parameters."""
        return group.size * self._element

    def start(self, group: Group, tape: Tape) -> None:
        """Begin to gather into a buffer; 16-bit shards are converted on the way."""
        size = self.gathered(group)
        flat = size // self._divided.shards if self._element < self._wide else 0
        tape.use(flat, size)
        tape.touch(gather_staging(size))
        tape.drop(flat)

    def arrive(self, group: Group, tape: Tape) -> None:
        """Copy from the buffer to the parameters."""
        tape.use(self.gathered(group))
        tape.drop(self.gathered(group))

    def reduce(self, group: Group, pending: int, tape: Tape, *, fresh: bool) -> None:
        """Start the reduction of ``pending`` bytes of weight gradients; the one before ends then."""
        whole = group.size * self._wide
        tape.use(whole)
        last = min(pending, group.tensors[-1].count * self._element)
        tape.drop(pending - last)
        arrived = 0 if fresh or self._divided.every_step else group.row * self._wide
        staging = whole if self._divided.every_step else scatter_staging(whole, self._divided.shards)
        tape.use(arrived, staging)
        tape.drop(self.older, last)
        self.older = whole + arrived + staging

    def settle(self, tape: Tape) -> None:
        """End what is under way."""
        tape.drop(self.older)
        self.older = 0
