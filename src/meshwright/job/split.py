"""How many sequences of the global batch each replica computes, and in which micro-batches.

A replica is one dp rank: the tensor and pipeline ranks that compute together. Replica ``r`` takes ``sequences[r]``
of the ``B`` sequences, and every replica runs the same number ``k`` of micro-batches, of unequal size:

    B = 8, shares 1:3, at most 4 a micro-batch:  k = 2      replica 0   [0] [4]
                                                            replica 1   [1 2 3] [5 6 7]

Equal counts because a sharded replica (ZeRO-2 and 3) gathers parameters and reduces gradients in every micro-batch
together with the others, and each of those exchanges waits for the slowest. Micro-batches of one size and unequal
counts would leave empty ones in which a fast replica goes on alone at the pace of the rest: for speeds 2:1 and 6:3
sequences, 3 rounds of the slow replica's time and 3 of the fast one's, against 3 rounds in which both finish together.

A micro-batch without a sequence (an empty replica, or fewer sequences than micro-batches) is one row of padding:
it takes part in every exchange and adds zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.job.job import Job
from meshwright.job.schedule_rules import micro_batch_rule


@dataclass(frozen=True)
class Split:
    """One division of a global batch.

    Attributes:
        sequences: of each replica; their sum is the global batch.
        micro_steps: micro-batches that every replica runs.
        unit: rows of a micro-batch are a multiple of it (so that tp divides its tokens).
        uniform: the micro-batches of a replica are padded to one shape, as a pipeline needs.
    """

    sequences: tuple[int, ...]
    micro_steps: int
    unit: int = 1
    uniform: bool = False

    def sizes(self, replica: int) -> tuple[int, ...]:
        """Sequences of each micro-batch of a replica: as even as whole units allow, the larger ones first."""
        count = self.sequences[replica]
        base, extra = divmod(-(-count // self.unit), self.micro_steps)
        rows = [(base + (step < extra)) * self.unit for step in range(self.micro_steps)]
        last = max((step for step, number in enumerate(rows) if number), default=0)
        rows[last] -= sum(rows) - count
        return tuple(rows)

    def rows(self, replica: int) -> tuple[int, ...]:
        """Rows of each micro-batch, padding included: what the replica computes."""
        padded = [self.unit * max(1, -(-size // self.unit)) for size in self.sizes(replica)]
        return (max(padded),) * self.micro_steps if self.uniform else tuple(padded)

    def rows_for(self, sequences: int) -> int:
        """Rows in all micro-batches, padding included, of a replica that takes so many sequences."""
        units = -(-sequences // self.unit)
        if self.uniform:
            return self.unit * self.micro_steps * max(1, -(-units // self.micro_steps))
        return self.unit * max(units, self.micro_steps)

    def positions(self, replica: int) -> list[range]:
        """Where in the global batch the sequences of each micro-batch stand.

        Micro-step after micro-step, and in each one replica after replica; so equal shares give each replica
        what it has without a split.
        """
        found, start = [], 0
        for sizes in zip(*(self.sizes(other) for other in range(len(self.sequences))), strict=True):
            before = start + sum(sizes[:replica])
            found.append(range(before, before + sizes[replica]))
            start += sum(sizes)
        return found


def row_unit(sequence_length: int, tp: int) -> int:
    """The fewest sequences whose tokens tp divides."""
    return tp // math.gcd(sequence_length, tp)


def micro_batch_limits(job: Job) -> tuple[int, ...]:
    """Most sequences of a micro-batch on each replica of a resolved job."""
    assert job.layout.micro_batch is not None
    return job.batch.micro_batch_limits or (job.layout.micro_batch,) * job.layout.dp


def runs(job: Job, micro_steps: int) -> bool:
    """Whether the job's schedule can run so many micro-batches."""
    layout = job.layout
    return micro_batch_rule(layout.schedule, layout.pp, layout.virtual_stages, micro_steps) is None


def split_into(job: Job, sequences: Sequence[int], micro_steps: int | None = None) -> Split:
    """The split in which the replicas of a resolved job take ``sequences``.

    Args:
        job: its layout, limits and schedule say how each replica's are cut.
        sequences: of each replica.
        micro_steps: absent: the fewest with which every micro-batch is within its limit and the schedule runs.
    """
    layout = job.layout
    unit = row_unit(job.data.sequence_length, layout.tp)
    if micro_steps is None:
        fewest = max(1, *(-(-count // limit) for count, limit in zip(sequences, micro_batch_limits(job), strict=True)))
        # Multiples of pp run in every schedule, from 2 pp on.
        micro_steps = next((k for k in range(fewest, fewest + 3 * layout.pp) if runs(job, k)), fewest)
    return Split(tuple(sequences), micro_steps, unit, uniform=layout.pp > 1)


def equal_sequences(global_size: int, replicas: int) -> tuple[int, ...]:
    """As equal as whole sequences allow."""
    base, extra = divmod(global_size, replicas)
    return tuple(base + (replica < extra) for replica in range(replicas))


def first_split(job: Job) -> Split | None:
    """The split a run of a resolved job starts with; None where all dp ranks have the same."""
    shares, size = job.batch.split, job.batch.global_size
    if shares is None:
        return None
    if shares == "auto":
        return split_into(job, equal_sequences(size, job.layout.dp))
    return split_into(job, [share * size // sum(shares) for share in shares])


def resumed_split(job: Job, sequences: Sequence[int] | None, first: Split | None) -> Split | None:
    """What a run goes on with: ``auto`` takes up the saved shares where they fit the job; else ``first``.

    Args:
        job: resolved.
        sequences: of each replica when the state was saved, if there were shares.
        first: what a new run would start with.
    """
    if job.batch.split != "auto" or sequences is None:
        return first
    fits = len(sequences) == job.layout.dp and sum(sequences) == job.batch.global_size
    return split_into(job, sequences) if fits else first


def for_other_replicas(job: Job) -> Job:
    """The job without what names its replicas one by one, to go on with another number of them.

    Shares by hand become ``auto``; every micro-batch keeps to the smallest limit there was.
    """
    batch, layout = job.batch, job.layout
    if batch.micro_batch_limits is not None:
        layout = layout.model_copy(update={"micro_batch": min(batch.micro_batch_limits)})
    split = None if batch.split is None else "auto"
    batch = batch.model_copy(update={"split": split, "micro_batch_limits": None})
    return job.model_copy(update={"batch": batch, "layout": layout})
