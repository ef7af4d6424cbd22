"""Replicas that train apart, inside the training step: their groups, tokens and meetings.

The dp ranks are ``replicas x ranks of a replica``. A replica divides its loss by its own valid tokens and updates by
its own gradients; what is reported counts every token of the global batch once, ``sum_r n_r loss_r / sum n``. All ranks
still agree on every step (stop, not finite) in one small message, so replicas run in lockstep and a step that is not
finite on one is applied on none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.comm.phase import phase
from meshwright.job.job import Job
from meshwright.job.validate_less_often import replica_count, replica_ranks
from meshwright.parallel.owned import DataParallel, Owned
from meshwright.sync.diloco import DiLoCo, Summing
from meshwright.sync.easgd import Easgd
from meshwright.sync.local import Level, LocalSgd
from meshwright.sync.memory import Memories
from meshwright.train.compressing import method_of
from meshwright.train.optimizer import Optimizer

ELASTICITY = 0.9
"""Of all replicas together, where the job says nothing: the paper's beta."""


class Strategy(Protocol):
    """What replicas do when they meet; see ``sync.local``, ``sync.easgd``, ``sync.diloco``."""

    def count(self, tokens: int) -> None:
        """This replica has trained on ``tokens`` valid tokens more."""

    def after(self, step: int, *, last: bool = False) -> bool:
        """Step ``step`` (from 1) has ended; meet if it is time. Whether parameters changed."""

    def model(self) -> list[Tensor]:
        """The model that the replicas stand for, in the order of the owned ranges."""

    def settle(self) -> None:
        """Take in what is on its way."""

    def state(self) -> dict[str, list[Tensor]]:
        """What all replicas share besides their parameters, in the order of the owned ranges."""

    def memory(self) -> list[Tensor]:
        """Long-lived tensors beside the parameters."""

    def counters(self) -> list[int]:
        """Tokens since the last meetings."""

    def restart(self) -> None:
        """Start from the parameters as they are, as the shared model."""

    def resume(self, counters: Sequence[int]) -> None:
        """Take back ``counters``."""


class Apart:
    """This rank's replica among the others.

    Args:
        job: with a strategy under which replicas train apart.
        mesh: the ranks.
        owned: what this rank updates.
        optimizer: of the replica.
        data_parallel: of the replica.
    """

    def __init__(
        self, job: Job, mesh: Mesh, owned: Sequence[Owned], optimizer: Optimizer, data_parallel: DataParallel
    ) -> None:
        self._job, self._data_parallel = job, data_parallel
        self.replicas = replica_count(job.layout)
        self.replica = mesh.coordinate("dp") // replica_ranks(job.layout)
        alone = replica_ranks(job.layout) == 1
        self.group = mesh.group("dp") if alone else mesh.group("replicate")
        self._owned = list(owned)
        self._masters = [piece.master for piece in owned]
        self._near: dist.ProcessGroup | None = None
        self.memories = Memories()
        """Residuals of compressed outer gradients, by fragment."""
        self.fragments: dict[str, list[Owned]] = {}
        """What meets together; consecutive ranges."""
        self.strategy = self._strategy(owned, optimizer, mesh)

    def _strategy(self, owned: Sequence[Owned], optimizer: Optimizer, mesh: Mesh) -> Strategy:
        sync = self._job.sync
        if sync.strategy == "easgd":
            strength = sync.elasticity if sync.elasticity is not None else ELASTICITY / self.replicas
            return Easgd(self._masters, self.group, sync.period, strength)
        if sync.strategy == "diloco":
            fragments, pieces = cut(self._masters, sync.fragments), iter(owned)
            self.fragments = {str(index): [next(pieces) for _ in each] for index, each in enumerate(fragments)}
            return DiLoCo(
                fragments,
                self.group,
                sync.period,
                lr=sync.outer_lr,
                momentum=sync.outer_momentum,
                overlap=sync.overlap,
                keep_local=sync.keep_local,
                summing=self._compressed_sum(fragments),
            )
        moments = [tensor for tensors in optimizer.state().values() for tensor in tensors]
        levels = [Level(self.group, sync.period)]
        if sync.group_size is not None and sync.group_period is not None:
            self._near = _near_group(mesh, self.group, sync.group_size)
            levels.insert(0, Level(self._near, sync.group_period))
        return LocalSgd(self._masters, levels, moments if sync.average == "state" else ())

    def _compressed_sum(self, fragments: list[list[Tensor]]) -> Summing | None:
        if self._job.sync.compression == "none" or not self._masters:
            return None
        summing = method_of(self._job, self.memories)
        for index, values in enumerate(fragments):
            count = sum(value.numel() for value in values)
            like = self._masters[0].new_empty(count + -count % self.replicas)
            summing.prepare(str(index), "copy", 0, like, self.group, ())
        return lambda name, values, group: summing.sum(name, "copy", values, group)

    def synchronous(self, step: int) -> bool:
        """Whether step ``step`` (from 0) still sums gradients over all replicas (post-local SGD)."""
        return step < self._job.sync.synchronous_steps

    def sum_gradients(self, share: float) -> None:
        """Make every owned gradient that of the global batch; ``share``: of its valid tokens in this replica's."""
        gradients = [piece.gradient for piece in self._owned]
        if not gradients:
            return
        flat = torch.cat(gradients).mul_(share)
        all_reduce(flat, self.group, ordered=True)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(part)

    def after(self, step: int, tokens: int) -> None:
        """Step ``step`` (from 1) has ended; ``tokens`` valid ones of this replica, none if it was skipped.

        Meet if it is time: meetings go by steps, so one in which nothing was learned neither moves a meeting nor leaves
        a sum on its way.
        Parameters are not published yet: those of a meeting take the place of the step's own.
        """
        if self.synchronous(step - 1):
            return
        self.strategy.count(tokens)
        with phase("publish"):
            self.strategy.after(step, last=step == self._job.train.steps)
            self.memories.settle(True)

    def memory(self) -> list[Tensor]:
        """Long-lived tensors beside the replica's own state."""
        residuals = [tensor for memory in self.memories for tensor in (memory.kept, memory.spare)]
        return [*residuals, *self.strategy.memory()]

    def settle(self) -> None:
        """Take in what is on its way: a checkpoint holds nothing that travels."""
        if not self._job.sync.overlap:
            return
        self.strategy.settle()
        # The second stage of a compressed sum has only now found out what it leaves behind.
        self.memories.settle(True)
        # All ranks of a replica together, also one that owns nothing of what was on its way.
        self._data_parallel.publish()

    def model(self) -> list[Tensor]:
        """The model that the replicas stand for, by owned range."""
        return [value.view_as(master) for value, master in zip(self.strategy.model(), self._masters, strict=True)]

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Inside, the parameters are those of the model that the replicas stand for."""
        model = self.model()
        mine = [master.clone() for master in self._masters]
        self._put(model)
        try:
            yield
        finally:
            self._put(mine)

    def _put(self, values: Sequence[Tensor]) -> None:
        for master, value in zip(self._masters, values, strict=True):
            master.copy_(value.view_as(master))
        self._data_parallel.publish()

    def close(self) -> None:
        """Destroy the groups this made."""
        if self._near is not None:
            dist.destroy_process_group(self._near)
            self._near = None


def cut(values: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Consecutive values in ``count`` lists of about as many elements."""
    total = sum(value.numel() for value in values)
    lists: list[list[Tensor]] = [[] for _ in range(count)]
    before = 0
    for value in values:
        middle = before + value.numel() // 2
        lists[min(count - 1, middle * count // max(total, 1))].append(value)
        before += value.numel()
    return lists


def _near_group(mesh: Mesh, group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """The ``size`` consecutive members of ``group`` that this rank is one of; every rank of the world calls it."""
    members = dist.get_process_group_ranks(group)
    start = group.rank() // size * size
    mine = members[start : start + size]
    near: dist.ProcessGroup = dist.new_group(
        mine, timeout=mesh.timeout, use_local_synchronization=True, group_desc="meshwright near"
    )
    return near
