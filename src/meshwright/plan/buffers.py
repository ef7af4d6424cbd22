"""Activations, temporary bytes and the peak of one rank in a steady step, by walking its schedule on a tape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.job.job import Job
from meshwright.job.layout import SPLIT_BACKWARD_SCHEDULES
from meshwright.plan.extents import DEVICE_LOSS_CHUNK, LOSS_CHUNK, Extents
from meshwright.plan.place import Place, StagePlace
from meshwright.plan.receives import receives
from meshwright.plan.reductions import BucketFlight, Flight, GroupFlight, gather_staging, scatter_staging
from meshwright.plan.stage_walk import StageWalk
from meshwright.plan.state import Bucket, Division, Group, buckets, division, lane_bytes, packed, stage_groups, units
from meshwright.plan.tape import Tape
from meshwright.schedule.table import table

ONE_ROUND = 512 * 1024
"""Up to this many bytes sent, an all-reduce is one round."""


@dataclass(frozen=True)
class Held:
    """Bytes beside parameters, gradients and optimizer state."""

    activations: int
    """The most at one moment."""
    temporary: int
    """The most at one moment."""
    at_peak: tuple[int, int]
    """Activations and temporary bytes at the moment their sum is highest."""

    def more(self, size: int) -> Held:
        """With so many temporary bytes more, from beginning to end."""
        return Held(self.activations, self.temporary + size, (self.at_peak[0], self.at_peak[1] + size))


def held(job: Job, place: Place) -> Held:
    """What a rank of a resolved job holds beside its state."""
    return held_in_step(job, place).more(lane_bytes(job, place))


def held_in_step(job: Job, place: Place) -> Held:
    """The same without the rows of the optimizer (``state.lane_bytes``): equal on all ranks of a pipeline rank."""
    step = _Step(job, place)
    step.run()
    tape = step.tape
    return Held(int(tape.most_kept), int(tape.most_used), (int(tape.peak[0]), int(tape.peak[1])))


class _Step:
    """One training step of one rank."""

    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.place, self.layout = job, place, job.layout
        self.divided = division(job, place)
        self.tape = Tape(used=_batches(job, place) + _numbers(job, place))
        self.splits = self.layout.pp > 1 and self.layout.schedule in SPLIT_BACKWARD_SCHEDULES
        self.group_flight = (
            GroupFlight(self.divided, place.parameter_bytes, place.wide_bytes) if self.divided.grouped else None
        )
        self.stages = {stage.number: self._stage(stage) for stage in place.stages}
        self.bucket_flight = Flight()

    def _stage(self, stage: StagePlace) -> StageWalk:
        place, job = self.place, self.job
        here = {each.number for each in place.stages}
        x = Extents(
            place.spec, place.rows, place.sequence, place.tp, place.parameter_bytes, masked=job.data.document_mask,
            loss_chunk=DEVICE_LOSS_CHUNK if job.cluster.device == "cuda" else LOSS_CHUNK,
        )  # fmt: skip
        block, rest = self._groups(stage)
        return StageWalk(
            x, stage, self.tape,
            follows=stage.number - 1 in here, alone=self.layout.pp == 1,
            block=block, rest=rest, flight=self.group_flight, frees=self.layout.zero == 3 and not self.splits
            and self.divided.grouped,
        )  # fmt: skip

    def _groups(self, stage: StagePlace) -> tuple[Group | None, Group | None]:
        if self.group_flight is None:
            return None, None
        found = stage_groups(stage, self.divided)
        block = found[0] if stage.layers else None
        rest = found[-1] if stage.rest else None
        return block, rest

    def run(self) -> None:
        """From the first forward pass to the optimizer."""
        if self.layout.pp == 1:
            self._alone()
        elif self.layout.delayed:
            self._overlapping()
        else:
            self._pipeline()
        self._finish()

    # -- passes ---------------------------------------------------------------------------------------

    def _alone(self) -> None:
        walk = self.stages[0]
        for index in range(self.place.micro_batches):
            walk.forward(again=index > 0)
            self._backward(walk, last=index == self.place.micro_batches - 1)

    def _backward(self, walk: StageWalk, *, last: bool) -> None:
        flight = None
        if self.group_flight is None and self.divided.degree > 1 and (last or self.divided.every_step):
            flight = self._flight(walk.stage)
        walk.backward(flight)
        if flight is not None:
            flight.start_rest(self.tape)

    def _flight(self, stage: StagePlace) -> BucketFlight:
        if self.divided.every_step:
            self.bucket_flight.settle(self.tape)
        mine = _stage_buckets(self.job, self.place, self.divided, stage)
        return BucketFlight(mine, self.place.parameter_bytes, self.place.wide_bytes, self.bucket_flight)

    def _pipeline(self) -> None:
        layout, place, tape = self.layout, self.place, self.tape
        sizes = (layout.schedule, layout.pp, layout.virtual_stages, place.micro_batches)
        pp, boundary = place.coordinates.pp, place.boundary_bytes
        posted = receives(*sizes)[pp]
        left = dict.fromkeys(self.stages, place.micro_batches)
        for done, (kind, number, micro_batch) in enumerate(table(*sizes).rows[pp]):
            tape.use(boundary * len(posted[done]))
            walk = self.stages[number]
            split = self.splits and not self._whole(walk.stage)
            if kind == "F":
                walk.forward(again=False)
            elif kind == "B" or (kind == "I" and not split) or (kind == "W" and split and number == 0):
                left[number] -= 1
                self._backward(walk, last=left[number] == 0)
            elif kind == "I" and number > 0:
                walk.input_backward(micro_batch, self.stages.get(number + 1))
            elif kind == "W" and split:
                left[number] -= 1
                self._weights(walk, micro_batch, last=left[number] == 0)

    def _overlapping(self) -> None:
        """A steady step where steps overlap: it begins with micro-batches of the one before in flight."""
        layout, place, tape = self.layout, self.place, self.tape
        pp, count, boundary = place.coordinates.pp, place.micro_batches, place.boundary_bytes
        posted = receives(layout.schedule, layout.pp, 1, count)[pp]
        walk, ahead = self.stages[pp], layout.pp - 1 - pp
        for _ in range(ahead):
            tape.use(boundary if pp else 0)
            walk.forward(again=False)
        tape.restart()
        for micro_batch in range(count):
            tape.use(boundary * len(posted[2 * micro_batch]))
            walk.forward(again=False)
            tape.use(boundary * len(posted[2 * micro_batch + 1]))
            self._backward(walk, last=micro_batch == (ahead - 1) % count)

    def _weights(self, walk: StageWalk, micro_batch: int, *, last: bool) -> None:
        flight = None
        if self.group_flight is None and self.divided.degree > 1 and (last or self.divided.every_step):
            flight = self._flight(walk.stage)
        walk.weight_backward(micro_batch, flight)
        if flight is not None:
            flight.start_rest(self.tape)

    def _whole(self, stage: StagePlace) -> bool:
        """Whether backward runs in one piece: a stage that recomputes parameters would do so for each part."""
        return stage.recompute == "full" or (stage.recompute == "selective" and self.place.spec.qk_norm)

    # -- after backward -------------------------------------------------------------------------------

    def _finish(self) -> None:
        tape, divided = self.tape, self.divided
        self.bucket_flight.settle(tape)
        if self.group_flight is not None:
            self.group_flight.settle(tape)
            if divided.copies > 1:
                tape.touch(sum(self._across_copies()))
        self._sum_replicated()
        self._sum_tied()
        if self.layout.dp > 1 and divided.shards > 1 and not divided.grouped:
            flat = buckets(self.job, self.place, divided)
            tape.touch(max(gather_staging(bucket.size * self.place.parameter_bytes) for bucket in flat))
        if self.job.train.deterministic:
            most = max((piece.count for unit in units(self.job, self.place) for piece in unit.ranges()), default=0)
            tape.touch(3 * 8 * most)

    def _across_copies(self) -> Iterator[int]:
        divided, wide = self.divided, self.place.wide_bytes
        for unit in units(self.job, self.place):
            if isinstance(unit, Group):
                yield unit.times * scatter_staging(unit.piece * divided.copies * wide, divided.copies)

    def _sum_replicated(self) -> None:
        """Gradients of parameters that stand whole on every tensor parallel rank, added up at once."""
        tp, wide = self.layout.tp, self.place.wide_bytes
        if tp == 1:
            return
        flat = wide * sum(
            unit.times * sum(piece.count for piece in unit.ranges() if piece.tensor.tp_replicated)
            for unit in units(self.job, self.place)
        )
        if (tp - 1) * flat <= ONE_ROUND:
            self.tape.touch(flat, tp * flat, tp * flat)
        else:
            self.tape.touch(flat, flat // tp * (tp - 1))

    def _sum_tied(self) -> None:
        """Gradients of a tied embedding whose two copies stand on two ranks, range by range."""
        stages = self.place.stages
        here = [stage for stage in stages if stage.first or stage.last]
        if not self.place.spec.tied or self.layout.pp == 1 or len(here) != 1:
            return
        ranges = [piece for unit in units(self.job, self.place) for piece in unit.ranges()]
        most = max((piece.count for piece in ranges if piece.tensor.embedding), default=0) * self.place.wide_bytes
        if most <= ONE_ROUND:
            self.tape.touch(2 * most, 2 * most)


def _batches(job: Job, place: Place) -> int:
    """The step's micro-batches: tokens, labels, positions (documents, if masked) and example numbers, 64 bits each."""
    fields = 4 if job.data.document_mask else 3
    under_way = job.layout.pp - 1 - place.coordinates.pp if job.layout.delayed else 0
    return (place.micro_batches + under_way) * 8 * (fields * place.tokens + place.rows)


def _numbers(job: Job, place: Place) -> int:
    """Single numbers made on the host: what the ranks agree on, and the optimizer's step counts."""
    agreed = 3 if job.train.deterministic else 2
    decays = {piece.tensor.decay for unit in units(job, place) for piece in unit.ranges()}
    return 8 * agreed + (4 * len(decays) if job.optimizer.name == "adamw" else 0)


def _stage_buckets(job: Job, place: Place, divided: Division, stage: StagePlace) -> list[Bucket]:
    """The buckets of one stage in the order in which they start."""
    limit = job.bucket_bytes // place.wide_bytes
    apart = place.spec.tied and job.layout.stage_count > 1
    return [Bucket(tensors, divided, 1) for tensors in packed(stage.tensors, limit, apart)]
