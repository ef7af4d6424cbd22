"""Seconds of collectives as a cluster file has them measured, for arrays of sizes and groups."""

from __future__ import annotations

import numpy as np

from meshwright.job.cluster import ClusterSpec, Level, Measured
from meshwright.plan.arrays import Floats, Ints
from meshwright.plan.shape import Value


class MeasuredCollectives:
    """The measured entries of a cluster, by operation and level.

    Between the measured sizes of a message seconds are interpolated, beyond the largest they grow with the bytes;
    without points they are ``alpha + beta * bytes``. Of the entries the one nearest in group size is taken, then the
    one nearest in number of groups.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._entries: dict[tuple[str, Level], list[Measured]] = {}
        for entry in cluster.collectives:
            self._entries.setdefault((entry.operation, entry.level), []).append(entry)

    def has(self, level: Level) -> bool:
        """Whether anything was measured at this level."""
        return any(found == level for _, found in self._entries)

    def seconds(self, operation: str, level: Level, size: Ints, groups: Floats | Ints, payload: Value) -> Floats:
        """Of one call by ``groups`` groups of ``size`` ranks at once; 0 for a group of one.

        Args:
            operation: as ``job.cluster.Operation``.
            level: of the links it crosses.
            size: ranks of a group.
            groups: at work at the same time.
            payload: bytes each rank hands to the operation.
        """
        size, groups, payload = np.broadcast_arrays(size, groups, np.asarray(payload, float))
        entries = self._entries.get((operation, level), [])
        if not entries:
            return np.zeros(size.shape)
        which = _nearest(entries, size, groups)
        result = np.zeros(size.shape)
        for index, entry in enumerate(entries):
            mine = (which == index) & (size > 1)
            if np.any(mine):
                result[mine] = _of(entry, payload[mine]) * _rounds(size[mine], entry.ranks)
        return result


def _nearest(entries: list[Measured], size: Ints, groups: Floats | Ints) -> Ints:
    distances = [
        1000.0 * np.abs(np.log(size / entry.ranks)) + np.abs(np.log(groups / entry.groups)) for entry in entries
    ]
    return np.asarray(np.argmin(np.stack(distances), axis=0))


def _rounds(size: Ints, measured: int) -> Floats:
    """A group larger than any measured talks to more peers."""
    return np.asarray(np.maximum(1.0, (size - 1) / max(1, measured - 1)))


def _of(entry: Measured, payload: Floats) -> Floats:
    straight = entry.alpha + entry.beta * payload
    if len(entry.points) < 2:
        return straight
    sizes, seconds = np.array(entry.points).T
    inside = np.interp(payload, sizes, seconds)
    return np.asarray(np.where(payload > sizes[-1], seconds[-1] * payload / sizes[-1], inside))
