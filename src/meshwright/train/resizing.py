"""``split = "auto"``: the replicas' shares of the batch follow the speed they show, while the run goes on.

    every step      each rank's time without waiting -> one small exchange -> the slowest rank of each replica
    now and then    a line fitted to each replica's times -> the best shares -> taken up if the step gains 5 %

All ranks see the same times and compute the same answer from them, so all change at the same step or none does.
Which samples a step has does not depend on the shares, so nothing of the update does either.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.comm.record import phase
from meshwright.comm.timeline import Timeline
from meshwright.job.grid import GRID_AXES, coordinates, grid_shape
from meshwright.job.job import Job
from meshwright.job.split import Split, first_split, micro_batch_limits, runs, split_into
from meshwright.sync.batch_sizing import Line, Sample, fastest_possible, fit, share_out

WINDOW = 12
"""Steps of a replica that its line is fitted to."""
FEWEST = 3
"""Steps measured under a division before the next is looked for."""
LEAST_GAIN = 0.05
"""A new division must be predicted to shorten the step by this much."""
SURPRISE = 0.15
"""The last steps differ by more from equal ones before: the device has another speed now, so older ones say nothing."""
ROUNDS = 6
"""Numbers of micro-batches that are looked at, from the fewest that the limits allow to what the speeds ask for."""


@dataclass(frozen=True)
class Change:
    """Another division of the batch, and what it is predicted to gain."""

    before: tuple[int, ...]
    after: Split
    seconds_before: float
    seconds_after: float


class Sizer:
    """Decides on the shares from the times of the replicas; the same on every rank that is told the same times.

    Args:
        job: resolved.
        split: what the next step is divided by.
    """

    def __init__(self, job: Job, split: Split) -> None:
        self.job, self.split = job, split
        self._limits = micro_batch_limits(job)
        self._samples: list[deque[Sample]] = [deque(maxlen=WINDOW) for _ in split.sequences]
        self._overheads = [0.0] * len(split.sequences)
        """The start of a micro-batch in rows, as last found."""
        self._since_change = 0
        self._skip = 2
        """Steps that are not measured: the first ones of a run are slower."""

    def after_step(self, seconds: Sequence[float]) -> Change | None:
        """Take in one step of all replicas (seconds without waiting); the change to make now, if any.

        A step in which some replica's time is not known (not above zero) does not count.
        """
        if min(seconds) <= 0:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._since_change += 1
        for replica, own in enumerate(seconds):
            self._take(replica, own)
        if self._since_change % FEWEST:
            return None
        lines = [fit(each, overhead) for each, overhead in zip(self._samples, self._overheads, strict=True)]
        self._overheads = [line.overhead for line in lines]
        change = self._propose(lines)
        if change is not None:
            self.split, self._since_change, self._skip = change.after, 0, 1
        return change

    def _take(self, replica: int, own: float) -> None:
        """Add a step; forget the older ones where the last few show another speed."""
        samples = self._samples[replica]
        samples.append(Sample(self.split.micro_steps, sum(self.split.rows(replica)), own))
        last = list(samples)[-FEWEST:]
        before = [one.seconds for one in list(samples)[:-FEWEST] if one.same_work(last[-1])]
        if not before or not all(one.same_work(last[-1]) for one in last):
            return
        found, expected = statistics.median(one.seconds for one in last), statistics.median(before)
        if abs(found - expected) > SURPRISE * expected:
            samples.clear()
            samples.extend(last)

    def _propose(self, lines: Sequence[Line]) -> Change | None:
        now = self._seconds(self.split, lines)
        fewest = -(-self.job.batch.global_size // sum(self._limits))
        # Most times end here: nothing could gain enough.
        if now <= fastest_possible(self.job.batch.global_size, fewest, lines) * (1.0 + LEAST_GAIN):
            return None
        splits = [self._best_of(micro_steps, lines) for micro_steps in self._rounds(fewest, lines)]
        best = min(splits, key=lambda split: self._seconds(split, lines))
        seconds = self._seconds(best, lines)
        if now <= seconds * (1.0 + LEAST_GAIN):
            return None
        return Change(self.split.sequences, best, now, seconds)

    def _rounds(self, fewest: int, lines: Sequence[Line]) -> list[int]:
        """Numbers of micro-batches to look at: the more, the less the limits bind, but each has its start."""
        total = self.job.batch.global_size
        rows = share_out(total, [_times(line, self.split) for line in lines], [total] * len(lines))
        most = split_into(self.job, rows).micro_steps
        legal = [
            count for count in range(fewest, max(most, fewest + 2 * self.job.layout.pp) + 1) if runs(self.job, count)
        ]
        step = -(-len(legal) // ROUNDS)
        return [*legal[::step], legal[-1]]

    def _best_of(self, micro_steps: int, lines: Sequence[Line]) -> Split:
        """The best division into so many micro-batches."""
        total = self.job.batch.global_size
        any_split = replace(self.split, micro_steps=micro_steps)
        times = [_times(line, any_split) for line in lines]
        sequences = share_out(total, times, [min(total, limit * micro_steps) for limit in self._limits])
        return split_into(self.job, sequences, micro_steps)

    def _seconds(self, split: Split, lines: Sequence[Line]) -> float:
        return max(_times(line, split)(count) for line, count in zip(lines, split.sequences, strict=True))


def _times(line: Line, split: Split) -> Callable[[int], float]:
    """Seconds of a replica's step by its number of sequences."""
    return lambda sequences: line.seconds(split.micro_steps, split.rows_for(sequences))


class Resizing:
    """Measures this rank's steps, and tells when the shares change. All ranks call each method together.

    Args:
        job: resolved, with ``batch.split = "auto"``.
        mesh: its ranks.
        split: what the next step is divided by; absent: equal shares.
    """

    def __init__(self, job: Job, mesh: Mesh, split: Split | None = None) -> None:
        first = split or first_split(job)
        assert first is not None
        self.sizer = Sizer(job, first)
        self.own_seconds = 0.0
        """This rank's time in the step that just ended, without waiting for others; 0: not measured."""
        self._mesh = mesh
        self._replica_of = [_replica(job, rank) for rank in range(job.layout.ranks)]

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Surround a training step that nothing else measures."""
        cuda = self._mesh.device_type == "cuda"
        timeline = Timeline(self._mesh.axis_of, torch.cuda.synchronize if cuda else None)
        timeline.start()
        try:
            yield
        finally:
            timeline.stop()
        waited = sum(seconds for (kind, _), seconds in timeline.seconds.items() if kind in ("communication", "bubble"))
        self.own_seconds = timeline.wall - waited

    def after_step(self) -> Change | None:
        """Tell the others how long this rank took; the change that all make before the next step, if any."""
        seconds = torch.zeros(len(self._replica_of), dtype=torch.float64, device=self._mesh.device)
        seconds[self._mesh.coordinate("world")] = self.own_seconds
        self.own_seconds = 0.0
        with phase("metrics"):
            all_reduce(seconds, self._mesh.group("world"))
        slowest = [0.0] * len(self.sizer.split.sequences)
        known = seconds.tolist()
        if min(known) > 0:
            for replica, own in zip(self._replica_of, known, strict=True):
                slowest[replica] = max(slowest[replica], own)
        return self.sizer.after_step(slowest)


def _replica(job: Job, rank: int) -> int:
    """The dp coordinate of a rank."""
    where = coordinates(job.layout, rank)
    return where.replicate * grid_shape(job.layout)[GRID_AXES.index("shard")] + where.shard
