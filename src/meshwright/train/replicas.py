"""Silent corruption: what replicas hold is compared bit by bit, and whoever differs is named.

Ranks that hold copies of the same masters (all dp ranks, or the replicas of a shard), and with ZeRO-1 of the same
published parameters, have equal bits after every step: each adds the same sums in the same order. So a digest a
tensor, exchanged, shows a flipped bit. Of three or more, the fewer are wrong; of two, the one whose values have moved
further from the last checkpoint, or, without one, holds the largest value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from meshwright.checkpoint.folder import latest
from meshwright.checkpoint.load import read_box
from meshwright.checkpoint.manifest import read_manifest
from meshwright.comm.collectives import all_gather, all_gather_json
from meshwright.errors import CheckpointError
from meshwright.train.corrupt import CorruptState
from meshwright.train.placement import placements, segments_of
from meshwright.train.saving import Saver

_NAMES_SHOWN = 4


@dataclass(frozen=True)
class _Copies:
    """Tensors that the ranks of a group hold equally."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    tensors: dict[str, list[Tensor]]
    """By parameter: what this rank holds of it, in pieces. Where they are cut differs from rank to rank."""


class Replicas:
    """Compares what the ranks of one trainer hold. All ranks call each method together."""

    def __init__(self, saver: Saver) -> None:
        self.saver, trainer = saver, saver.trainer
        self._mesh = trainer.mesh
        self._copies: list[_Copies] = []
        layout = trainer.job.layout
        sharded = layout.zero > 0 and layout.shard_degree > 1
        axis = "replicate" if sharded else "dp"
        if self._mesh.degree(axis) > 1:
            pieces = sorted(trainer.owned, key=lambda piece: (piece.parameter, piece.start))
            self._add(axis, [(piece.parameter, piece.master) for piece in pieces])
        if sharded and layout.zero == 1 and self._mesh.degree("dp") > 1:
            published = [
                (f"stage{stage}:{name}", parameter)
                for stage, module in trainer.stages.items()
                for name, parameter in module.named_parameters()
            ]
            self._add("dp", published)
        self.good_step = trainer.step_number

    def _add(self, axis: str, named: Sequence[tuple[str, Tensor]]) -> None:
        tensors: dict[str, list[Tensor]] = {}
        for name, tensor in named:
            tensors.setdefault(name, []).append(tensor)
        self._copies.append(_Copies(self._mesh.group(axis), self._mesh.ranks(axis), tensors))

    @property
    def any(self) -> bool:
        """Whether a rank holds anything twice; the same on all ranks."""
        return bool(self._copies)

    def compare(self) -> None:
        """Compare all copies.

        Raises:
            CorruptState: some differ.
        """
        step = self.saver.trainer.step_number
        found = [each for copies in self._copies for each in self._differences(copies)]
        gathered = all_gather_json(found, self._mesh.group("world"))
        unequal: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
        for differences in gathered:
            for name, ranks, digests in differences:
                unequal.setdefault((name, tuple(ranks)), dict(zip(ranks, digests, strict=True)))
        if not unequal:
            self.good_step = step
            return
        wrong, tied = _fewer(unequal)
        if tied:
            wrong += self._further_away(tied)
        ranks = sorted({rank for _, rank in wrong})
        names = sorted({name.partition(":")[2] for name, _ in wrong})
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > 4 else "")
        plural = "ranks hold" if len(ranks) > 1 else "rank holds"
        raise CorruptState(
            f"after step {step} {plural.partition(' ')[0]} {', '.join(map(str, ranks))} {plural.partition(' ')[2]} "
            f"other bits of {shown} than the replicas; all were equal after step {self.good_step}",
            ranks,
            self.good_step,
        )

    def _differences(self, copies: _Copies) -> list[tuple[str, tuple[int, ...], list[int]]]:
        mine = torch.tensor([digest(pieces) for pieces in copies.tensors.values()], dtype=torch.int64)
        mine = mine.to(self._mesh.device)
        all_ = mine.new_empty(len(copies.ranks) * mine.numel())
        all_gather(all_, mine, copies.group)
        rows = all_.view(len(copies.ranks), -1).cpu()
        unequal = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
        names = list(copies.tensors)
        return [(names[index], copies.ranks, rows[:, index].tolist()) for index in unequal]

    def _further_away(self, tied: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, int]]:
        mine = {
            name: self._distance(name) for name, ranks in tied if self._mesh.rank in ranks
        }  # fmt: skip
        gathered: list[dict[str, float]] = all_gather_json(mine, self._mesh.group("world"))
        wrong = []
        for name, ranks in tied:
            distances = {rank: gathered[rank].get(name, 0.0) for rank in ranks}
            wrong.append((name, max(distances, key=lambda rank: (distances[rank], rank))))
        return wrong

    @torch.no_grad()
    def _distance(self, name: str) -> float:
        """How far this rank's copy is from the last checkpoint at most; without one, from zero."""
        manifest = None
        path = latest(self.saver.folder)
        if path is not None:
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                manifest = None
        furthest = 0.0
        for piece in self.saver.trainer.owned:
            if piece.parameter != name:
                continue
            for place in placements(piece, segments_of(self.saver.trainer.stages, piece.parameter)):
                values: Any = place.view(piece.master).double().cpu()
                if manifest is not None:
                    values = values - read_box(manifest, place.name, place.offsets, place.sizes).double()
                distance = float(values.abs().max())
                furthest = max(furthest, math.inf if math.isnan(distance) else distance)
        return min(furthest, 1e300)  # JSON has no infinity


def _fewer(
    unequal: dict[tuple[str, tuple[int, ...]], dict[int, int]],
) -> tuple[list[tuple[str, int]], list[tuple[str, tuple[int, ...]]]]:
    """Who is in the minority, by tensor; and the tensors that have no majority."""
    wrong, tied = [], []
    for (name, ranks), digests in unequal.items():
        counts = Counter(digests.values()).most_common()
        if counts[0][1] > counts[1][1]:
            wrong += [(name, rank) for rank, value in digests.items() if value != counts[0][0]]
        else:
            tied.append((name, ranks))
    return wrong, tied


def digest(pieces: Sequence[Tensor]) -> int:
    """64 bits of XXH3 over the bytes of all pieces, one after the other, as a signed number."""
    whole = xxhash.xxh3_64()
    for piece in pieces:
        whole.update(piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    value = whole.intdigest()
    return value - (1 << 64) if value >= 1 << 63 else value
