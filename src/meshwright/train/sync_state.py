"""What synchronisation must find again after a restart: residuals of compression, and replicas that train apart.

In a checkpoint these stand beside parameters and moments under the role ``sync``, which nothing else looks at:

    residual/dp1.tp0.pp0/copy/layers.0.mlp.up.weight@0,0      what rank 1 had not sent of a box of a parameter
    rest/dp1.tp0.pp0/...                                      the same of padding, which no parameter stands for
    basis/dp1.tp0.pp0/...                                     PowerSGD's
    outer/dp1.tp0.pp0/copy/layers.0.mlp.up.weight@0,0         what rank 1 had not sent of its outer gradient (DiLoCo)
    replica1/parameter/layers.0.mlp.up.weight                 what replica 1 had made of it, and its moments
    outer_momentum/layers.0.mlp.up.weight                     DiLoCo's

Under the same layout and [sync] every rank takes back its own, and the run goes on bit for bit. Under another one:

* residuals and velocities: what all ranks together had not sent is kept. The new ranks take equal shares of the sum, so
  ``sent + waiting`` is what it was. A run that goes on without compression drops them. Outer gradients are of another
  kind than gradients: neither takes over what was not sent of the other.
* 1-bit Adam's momentum is the optimizer's; PowerSGD starts from new bases.
* replicas all start from the shared model, with the moments of replica 0; outer momentum is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.boxes import inside, intersection
from meshwright.checkpoint.load import load, read_box, read_tensor
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.placed import PlacedTensor, Role, whole
from meshwright.checkpoint.world import World
from meshwright.parallel.owned import Owned
from meshwright.parallel.tied import tied_copies
from meshwright.sync.compressed import CompressedReducer
from meshwright.sync.memory import Memories, Memory
from meshwright.train.apart import Apart
from meshwright.train.placement import placements, segments_of
from meshwright.train.trainer import Trainer


@dataclass(frozen=True)
class _Box:
    """A part of a memory that stands for a box of a named parameter."""

    physical: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First element in the memory."""
    counted: bool = True
    """Its elements are in no other rank's memory of the same replica."""

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)

    @property
    def label(self) -> str:
        return f"{self.name}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class _Piece:
    """A range of a physical parameter in a buffer."""

    physical: str
    start: int
    """In the parameter."""
    count: int
    at: int
    """In the buffer."""
    counted: bool = True


Saved = dict[tuple[str, str], list[tuple[str, tuple[int, ...]]]]
"""By what it is and full name: keys and offsets of the boxes that ranks saved."""


class SyncState:
    """The state of one trainer's synchronisation, as placed tensors and as scalars."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        mesh = trainer.mesh
        self._place = f"dp{mesh.coordinate('dp')}.tp{mesh.coordinate('tp')}.pp{mesh.coordinate('pp')}"
        self._boxes: dict[int, list[_Box]] = {}
        self._rests: dict[int, Tensor] = {}

    # -- saving -------------------------------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """What has to be the same for every rank to find its own."""
        job = self._trainer.job
        return {
            "layout": str(job.layout),
            "sync": job.sync.model_dump(mode="json"),
            "bucket_bytes": job.bucket_bytes,
        }

    def scalars(self) -> dict[str, Any]:
        """What comes back besides tensors."""
        return {"description": self.description()}

    @property
    def used(self) -> bool:
        """Whether there is anything to remember."""
        return self._trainer.compressing is not None or self._trainer.apart is not None

    def tensors(self, *, counted: bool = True) -> list[PlacedTensor]:
        """Everything of this rank, in a fixed order; ``counted``: of parameters what it speaks for in its replica."""
        apart = self._trainer.apart
        found = list(self._remembered())
        if apart is not None:
            found += self._of_replica(apart, counted)
            found.append(whole(f"tokens/{self._place}", torch.tensor(apart.strategy.counters() or [0]), "sync"))
        return found

    def _reducer(self) -> CompressedReducer | None:
        compressing = self._trainer.compressing
        return None if compressing is None else compressing.reducer

    def _memories(self) -> Memories:
        """Of compressed gradients, or of compressed outer gradients; no run has both."""
        reducer, apart = self._reducer(), self._trainer.apart
        return reducer.memories if reducer is not None else apart.memories if apart is not None else Memories()

    def _kind(self, memory: Memory) -> str:
        return memory.what if self._trainer.apart is None else "outer"

    def _remembered(self) -> Iterator[PlacedTensor]:
        for memory in self._memories():
            where = f"{self._place}/{memory.level}/"
            if memory.what == "basis":
                if memory.kept.numel():
                    yield whole(f"basis/{where}{memory.buffer}", memory.kept, "sync")
                continue
            for box in self._boxes_of(memory):
                if box.counted:
                    part = memory.kept[box.start : box.stop].view(box.sizes)
                    yield whole(f"{self._kind(memory)}/{where}{box.label}", part, "sync")
            if (rest := self._rest_of(memory)).numel():
                yield whole(self._rest_name(memory), memory.kept[rest], "sync")

    def _rest_name(self, memory: Memory) -> str:
        return f"rest/{self._place}/{memory.level}/{self._kind(memory)}/{memory.buffer}"

    def _of_replica(self, apart: Apart, counted: bool) -> Iterator[PlacedTensor]:
        moments = self._trainer.optimizer.state()
        shared = apart.strategy.state() if apart.replica == 0 or not counted else {}
        for index, piece in enumerate(self._trainer.owned):
            if counted and not piece.counted:
                continue
            mine = {"parameter": piece.master, **{role: tensors[index] for role, tensors in moments.items()}}
            for role, tensor in mine.items():
                yield from self._placed(piece, tensor, f"replica{apart.replica}/{role}")
            for role, tensors in shared.items():
                yield from self._placed(piece, tensors[index], role)

    def _placed(self, piece: Owned, flat: Tensor, prefix: str) -> Iterator[PlacedTensor]:
        for place in placements(piece, segments_of(self._trainer.stages, piece.parameter)):
            name, part = f"{prefix}/{place.name}", flat[place.start : place.stop]
            yield PlacedTensor(name, place.shape, place.offsets, place.sizes, part, "sync")

    def _boxes_of(self, memory: Memory) -> list[_Box]:
        """The named boxes that a memory stands for; padding is in none."""
        if id(memory) not in self._boxes:
            self._boxes[id(memory)] = list(self._find_boxes(memory))
        return self._boxes[id(memory)]

    def _find_boxes(self, memory: Memory) -> Iterator[_Box]:
        for each in self._pieces(memory.buffer):
            low, high = max(each.at, memory.start), min(each.at + each.count, memory.start + memory.kept.numel())
            if low >= high:
                continue
            part, start = memory.kept[low - memory.start : high - memory.start], each.start + low - each.at
            piece = Owned(each.physical, start, part, part, False, False, False)
            for place in placements(piece, segments_of(self._trainer.stages, each.physical)):
                first = low - memory.start + place.start
                yield _Box(each.physical, place.name, place.offsets, place.sizes, first, each.counted)

    def _pieces(self, buffer: str) -> Iterator[_Piece]:
        """What is in a buffer of gradients, or in a fragment of outer ones."""
        reducer, apart, at = self._reducer(), self._trainer.apart, 0
        if apart is not None:
            for owned in apart.fragments[buffer]:
                yield _Piece(owned.parameter, owned.start, owned.count, at, owned.counted)
                at += owned.count
            return
        assert reducer is not None
        seen: dict[str, int] = {}
        for span in reducer.spans[buffer]:
            size = math.prod(span.shape)
            before = seen.get(span.name, 0)  # a parameter comes in as many parts as it has shards
            seen[span.name] = before + size
            yield _Piece(span.name, before, size, span.start)

    def _rest_of(self, memory: Memory) -> Tensor:
        """Indices of the elements that are in no box, or in one that another rank of the replica speaks for."""
        if id(memory) not in self._rests:
            covered = torch.zeros(memory.kept.numel(), dtype=torch.bool)
            for box in self._boxes_of(memory):
                covered[box.start : box.stop] |= box.counted
            self._rests[id(memory)] = (~covered).nonzero().view(-1).to(memory.kept.device)
        return self._rests[id(memory)]

    # -- restoring ----------------------------------------------------------------------------------

    def restore(self, path: Path, manifest: Manifest, world: World) -> None:
        """Take back what a checkpoint holds, after parameters and moments have been loaded."""
        saved = manifest.state.get("sync") or {}
        if self._trainer.apart is not None:
            self._trainer.apart.strategy.restart()
        if saved.get("description") == self.description():
            self._restore_own(path, world)
        elif self.used:
            self._share_out(manifest)

    def _restore_own(self, path: Path, world: World) -> None:
        if not self.used:
            return
        wanted = self.tensors(counted=False)
        roles: tuple[Role, ...] = ("sync",)
        load(path, wanted, roles=roles, world=world)
        by_name = {box.name: box.tensor for box in wanted}
        for memory in self._memories():
            if memory.what != "basis" and (rest := self._rest_of(memory)).numel():
                memory.kept[rest] = by_name[self._rest_name(memory)]
        if (apart := self._trainer.apart) is not None:
            apart.strategy.resume(by_name[f"tokens/{self._place}"].tolist())

    def _share_out(self, manifest: Manifest) -> None:
        """Under another layout or [sync]; see the module."""
        apart, saved = self._trainer.apart, _index(manifest)
        for memory in self._memories():
            if memory.what in ("residual", "velocity") and memory.level != "back":
                self._take_share(manifest, saved, memory)
            elif memory.what == "momentum":
                self._take_momentum(memory)
        if apart is not None:
            self._take_outer_momentum(manifest, apart)

    def _take_share(self, manifest: Manifest, saved: Saved, memory: Memory) -> None:
        """An equal share of what all ranks together held, of this memory's first level."""
        if memory.level == "copy" and self._memories().find(memory.buffer, "shard", "residual"):
            return  # the first of two sums takes all of it
        reducer, apart = self._reducer(), self._trainer.apart
        ranks = reducer.sharers(memory.level) if reducer is not None else apart.replicas if apart is not None else 1
        for box in self._boxes_of(memory):
            if reducer is None or self._speaks_for(box):  # of outer gradients every copy has the same residual
                total = _total(manifest, saved.get((self._kind(memory), box.name), ()), box)
                memory.kept[box.start : box.stop] = total.to(memory.kept).view(-1) / ranks

    def _speaks_for(self, box: _Box) -> bool:
        """Whether this rank, of those that hold parts of one gradient, takes the residual of it."""
        trainer, layout = self._trainer, self._trainer.job.layout
        tied_again = {tied_copies(layout)[1]} if trainer.job.model_spec.tied and layout.stage_count > 1 else set()
        module = trainer.stages[int(box.physical.partition(":")[0].removeprefix("stage"))]
        whole_on_tp = box.physical.partition(":")[2] in getattr(module, "tp_replicated", ())
        return not (whole_on_tp and trainer.mesh.coordinate("tp")) and box.physical not in tied_again

    def _take_momentum(self, memory: Memory) -> None:
        """1-bit Adam's momentum, or this rank's piece of it, from the optimizer's, which is whole on every rank."""
        trainer, reducer = self._trainer, self._reducer()
        assert reducer is not None
        moments = trainer.optimizer.state().get("exp_avg", [])
        starts = {span.name: span.start for span in reducer.spans[memory.buffer]}
        for piece, moment in zip(trainer.owned, moments, strict=True):
            if piece.parameter in starts:
                at = starts[piece.parameter] + piece.start - memory.start
                low, high = max(at, 0), min(at + piece.count, memory.kept.numel())
                if low < high:
                    memory.kept[low:high] = moment[low - at : high - at]

    def _take_outer_momentum(self, manifest: Manifest, apart: Apart) -> None:
        for role, tensors in apart.strategy.state().items():
            for piece, tensor in zip(self._trainer.owned, tensors, strict=True):
                for box in self._placed(piece, tensor, role):
                    if box.key in manifest.tensors:
                        box.boxed.copy_(read_box(manifest, box.name, box.offsets, box.sizes, "sync"))


def _index(manifest: Manifest) -> Saved:
    """The boxes of residuals, velocities and outer residuals in a checkpoint."""
    found: Saved = {}
    for key in manifest.tensors:
        if not key.startswith(("sync/residual/", "sync/velocity/", "sync/outer/")):
            continue
        _, what, _place, _level, label = key.split("/", 4)
        name, _, offsets = label.rpartition("@")
        entry = (key.removeprefix("sync/"), tuple(int(text) for text in offsets.split(",") if text))
        found.setdefault((what, name), []).append(entry)
    return found


def _total(manifest: Manifest, saved: Sequence[tuple[str, tuple[int, ...]]], wanted: _Box) -> Tensor:
    """The sum over ranks, and over all sums, of what a checkpoint holds of one box of a parameter."""
    total = torch.zeros(wanted.sizes, dtype=torch.float64)
    for name, offsets in saved:
        shared = intersection((offsets, manifest.tensors[f"sync/{name}"].shape), (wanted.offsets, wanted.sizes))
        if shared is not None:
            values = read_tensor(manifest, name, "sync")[inside(shared, offsets)]
            total[inside(shared, wanted.offsets)] += values.double()
    return total
