"""The measured ledger: one step recorded for what it sends, holds and computes, one timed; gathered on every rank.

Two steps, because a recorded step runs slower than it is. Both must be steady ones (the third or later):
first steps set up buckets, pipelines and gather buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collectives import all_gather_json
from meshwright.comm.mesh import Mesh
from meshwright.comm.record import TrafficRecorder
from meshwright.comm.timeline import Timeline
from meshwright.ledger.ledger import Category, Ledger, RankLedger, Spends


class Instruments:
    """Measures a training step on this rank; every rank of the mesh must use them alike.

    ::

        instruments.register(parameters, "parameters")
        with instruments.counting():    # a steady step
            trainer.step(batches)
        with instruments.timing():      # the next one
            trainer.step(batches)
        ledger = instruments.gather(step=4)
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.backend = "nccl" if mesh.device_type == "cuda" else "gloo"
        self.recorder: TrafficRecorder | None = None
        self.timeline: Timeline | None = None
        self._registered: list[tuple[list[Tensor], Category]] = []
        self._allocator_peak: int | None = None

    def register(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what long-lived tensors are for; their whole storages count, and of views of one the first category."""
        self._registered.append((list(tensors), category))

    @contextmanager
    def counting(self) -> Iterator[TrafficRecorder]:
        """Record the step inside: traffic, storages, FLOPs."""
        on_device = self.mesh.device_type == "cuda"
        recorder = TrafficRecorder(self.mesh.axis_of, self.backend)
        for tensors, category in self._registered:
            recorder.register(tensors, category)
        if on_device:
            torch.cuda.reset_peak_memory_stats()
        with recorder:
            yield recorder
        if on_device:
            self._allocator_peak = torch.cuda.max_memory_allocated()
        self.recorder = recorder

    @contextmanager
    def timing(self) -> Iterator[Timeline]:
        """Time the step inside."""
        timeline = Timeline(self.mesh.axis_of, torch.cuda.synchronize if self.mesh.device_type == "cuda" else None)
        timeline.start()
        try:
            yield timeline
        finally:
            timeline.stop()
        self.timeline = timeline

    def entry(self) -> RankLedger:
        """This rank's part, its spends not yet parted into transfer and waiting."""
        place = {axis: self.mesh.coordinate(axis) for axis in ("pp", "replicate", "shard", "tp")}
        entry = RankLedger(rank=self.mesh.rank, place=place)
        if self.recorder is not None:
            stores = self.recorder.stores.model_copy(update={"allocator_peak": self._allocator_peak})
            update = {"stores": stores, "computes": self.recorder.computes, "sends": self.recorder.sends}
            entry = entry.model_copy(update=update)
        if self.timeline is not None:
            entry = entry.model_copy(update={"spends": spends_of(self.timeline)})
        return entry

    def gather(self, step: int | None = None) -> Ledger:
        """The ledger of all ranks, on every rank. Its own traffic is not in it."""
        timeline = self.timeline
        message = {
            "entry": self.entry().model_dump(),
            "waits": {} if timeline is None else dict(timeline.waits),
            "receives": [] if timeline is None else timeline.receives,
            "groups": {axis: list(self.mesh.ranks(axis)) for axis in self.mesh.axes},
        }
        replies = all_gather_json(message, self.mesh.group("world"))
        entries = [RankLedger.model_validate(reply["entry"]) for reply in replies]
        groups = [reply["groups"] for reply in replies]
        waiting = waiting_for_the_slowest([reply["waits"] for reply in replies], groups)
        transfers = receive_transfers([reply["receives"] for reply in replies], groups)
        ranks = tuple(map(_parted, entries, waiting, transfers))
        layout = self.mesh.layout
        return Ledger(
            source="measured", layout=str(layout), world=layout.ranks, step=step, backend=self.backend, ranks=ranks
        )


def spends_of(timeline: Timeline) -> Spends:
    """A finished timeline as spends, waits still whole: in ``communication`` and ``bubble``."""
    parts: dict[str, Any] = {"compute": {}, "communication": {}, "other": 0.0}
    for (kind, detail), seconds in timeline.seconds.items():
        if (kind, detail) == ("compute", "none") or kind == "other":
            parts["other"] += seconds
        elif kind in ("compute", "communication"):
            parts[kind][detail] = seconds
        else:
            parts[kind] = seconds
    return Spends(wall=timeline.wall, buckets=tuple(timeline.buckets), **parts)


def waiting_for_the_slowest(
    waits: list[dict[str, list[float]]], groups: list[dict[str, list[int]]]
) -> list[dict[str, float]]:
    """By rank and axis: the seconds of its waits that were not transfer.

    The ranks of a group block in the same operations in the same order. The last to arrive blocks
    shortest, for the transfer alone; what another rank blocks longer, it waited for that one.

    Args:
        waits: by rank: by axis, how long each operation blocked.
        groups: by rank: by axis, the ranks of its group.
    """
    result: list[dict[str, float]] = []
    for mine, my_groups in zip(waits, groups, strict=True):
        waiting = {}
        for axis, seconds in mine.items():
            peers = [waits[peer].get(axis, []) for peer in my_groups.get(axis, [])]
            if peers and all(len(other) == len(seconds) for other in peers):
                waiting[axis] = sum(seconds) - sum(map(min, zip(*peers, strict=True)))
        result.append(waiting)
    return result


def receive_transfers(receives: list[list[float]], groups: list[dict[str, list[int]]]) -> list[float]:
    """By rank: the seconds of its pipeline receives that were transfer, not waiting for the neighbour's result.

    All boundary tensors of a pipeline are of one size; the quickest receive of the column shows what the
    transfer takes when the result is already there.
    """
    result = []
    for mine, my_groups in zip(receives, groups, strict=True):
        column = [seconds for peer in my_groups["pp"] for seconds in receives[peer]]
        result.append(len(mine) * min(column, default=0.0))
    return result


def _parted(entry: RankLedger, waiting: dict[str, float], transfer: float) -> RankLedger:
    """``entry`` with waiting taken out of communication, and the transfer of receives out of the bubble."""
    spends = entry.spends
    if spends is None:
        return entry
    communication = {axis: seconds - waiting.get(axis, 0.0) for axis, seconds in spends.communication.items()}
    if spends.bubble:
        communication["pp"] = communication.get("pp", 0.0) + transfer
    changed = {"communication": communication, "waiting": sum(waiting.values()), "bubble": spends.bubble - transfer}
    return entry.model_copy(update={"spends": spends.model_copy(update=changed)})
