"""ZeRO: the dp ranks divide the optimizer state (1), the gradients too (2), the parameters too (3).

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020. With N
parameters in 16-bit training (2 bytes each; gradients, masters and both AdamW moments in float32) and s ranks
that share one copy:

    bytes per rank    parameters              gradients    masters and moments
    replicated        2 N                     4 N          12 N
    ZeRO-1            2 N                     4 N          12 N / s
    ZeRO-2            2 N, during a step      4 N / s      12 N / s
    ZeRO-3            2 (B + E), meanwhile    4 N / s      12 N / s      B: a block or two, E: what is in no block

    sent per rank and step of k micro-batches, in units of (s - 1) / s bytes
    ZeRO-1            gradients 4 N           parameters 2 N
    ZeRO-2            gradients 4 N k         parameters 2 N
    ZeRO-3            gradients 4 N k         parameters (4 N - 2 E) k; without pipeline (4 N - 2 E - 2 L) k, L: the
                                              last block, kept from its forward to its backward

In float32 the parameters of replicated and ZeRO-1 are the masters. Each FSDP2 group (ZeRO-2, 3) pads every
parameter to a multiple of s rows, each bucket (ZeRO-1) all of its parameters to a multiple of dp elements.

ZeRO-1 is ``BucketedDataParallel`` on ``Copies`` with shards: the buckets' reduce-scatter stops at the owner,
who updates its chunk and gathers it for all in ``publish``.

ZeRO-2 and 3 are torch's FSDP2 (``fully_shard``: Zhao et al., "PyTorch FSDP", VLDB 2023), one group a block and
one for the rest, over the shard ranks only. Ours are its two collectives:

* the gather is a direct exchange on Gloo, started one block ahead in both directions;
* the reduction adds into a float32 (float64) accumulator that lives as long as the model. FSDP2 believes the
  reduction over when it has only begun; nothing reads the accumulator before ``finish_gradients``.

Every micro-batch is reduced, because between them a rank keeps only its part of the gradients. With copies of
the shards (HSDP) the accumulators are summed across them once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from meshwright.comm.collectives import Handle, all_gather, all_to_all
from meshwright.comm.copies import Copies, Span
from meshwright.comm.operations import Operations, started
from meshwright.comm.phase import phase
from meshwright.parallel.bucket_trace import traced
from meshwright.parallel.buckets import accumulation_dtype, add_chain
from meshwright.parallel.flight import Flight
from meshwright.parallel.owned import BackwardPart, Owned
from meshwright.parallel.reducing import DirectReducer, Reducer


class _Gather(AllGather):
    """FSDP2's all-gather by direct exchange."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Handle | None:
        """Start (``async_op``) or do it."""
        return all_gather(output_tensor, input_tensor, group, asynchronous=async_op)


@dataclass(frozen=True)
class _Part:
    """This rank's rows of one parameter, and where their gradient stands in the group's accumulator."""

    name: str
    sharded: nn.Parameter
    """The DTensor parameter that FSDP2 registers on the module."""
    start: int
    """First element in the whole flattened physical parameter."""
    offset: int
    """First element in the accumulator."""
    master: Tensor


class _Reduction(ReduceScatter):
    """The gradients of one FSDP2 group: what came from all ranks, added up in an accumulator.

    FSDP2 lays the group's parameters out as ``[shards, n]``: row ``s`` is the rows of all parameters that shard
    ``s`` keeps, each padded to the size of the first shard's. The accumulator is one such row.
    """

    def __init__(
        self, group: Any, number: int, module: nn.Module, copies: Copies, flight: Flight, reducer: Reducer, *,
        every_step: bool,
    ) -> None:  # fmt: skip
        self.copies, self._flight, self._every_step, self._reducer = copies, flight, every_step, reducer
        self.group = group
        """The FSDPParamGroup."""
        assert copies.shard is not None
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.parts: list[_Part] = []
        row = 0
        rows: list[tuple[str, int, tuple[int, ...]]] = []
        for parameter in group.fsdp_params:
            local = parameter.sharded_param.detach().to_local().view(-1)
            padded = parameter.padded_sharded_param_size.numel()
            start = min(copies.shard.rank() * padded, parameter._orig_size.numel())
            name = f"stage{number}:{names[id(parameter.sharded_param)]}"
            self.parts.append(_Part(name, parameter.sharded_param, start, row, local))
            rows.append((name, row, tuple(parameter.padded_sharded_param_size)))
            row += padded
        self._row = row
        self.name = self.parts[0].name
        """The first parameter in it: what the reducer knows the group by."""
        spans = [Span(name, shard * row + at, shape) for shard in range(copies.shards) for name, at, shape in rows]
        reducer.prepare(self.name, copies.shards * row, spans, copies)
        like = self.parts[0].master
        piece = -(-row // copies.copies)
        self._whole = like.new_zeros(copies.copies * piece)
        """The accumulator, padded to a multiple of the copies."""
        self._piece = like.new_zeros(piece) if every_step and copies.copies > 1 else None
        """Deterministic mode: the sum over all dp ranks of my piece of the accumulator."""
        self.fresh = True
        """Nothing of this step has been added yet."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input, then for the output, which is always the accumulator."""
        if int(size[0]) == self._row:
            return self._whole[: self._row]
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Start adding; ``finish_gradients`` ends it."""
        self.drop_gradients()  # FSDP2 would add to them; the accumulator does
        with phase("reduce"):
            self._flight.start(self, traced(self.name, input_tensor.nbytes, None, self._add(input_tensor)))

    def _add(self, contributions: Tensor) -> Operations:
        """Add what the ranks have for me to the accumulator."""
        assert self.copies.shard is not None
        row, fresh = self._whole[: self._row], self.fresh
        self.fresh = False
        if self._every_step:
            yield from self._add_chain(contributions, row, fresh)
            return
        arrived = row if fresh else torch.empty_like(row)
        yield from self._reducer.scatter(self.name, arrived, contributions, self.copies)
        if not fresh:
            row.add_(arrived)

    def _add_chain(self, contributions: Tensor, row: Tensor, fresh: bool) -> Operations:
        """The same in the order of the global batch: dp rank ``(copy, shard)`` after ``(copy, shard - 1)``."""
        shards, copies = self.copies.shards, self.copies.copies
        accumulator, outgoing = row, contributions
        if self._piece is not None:
            accumulator = self._piece
            padded = contributions.new_zeros((shards, self._whole.numel()))
            padded[:, : self._row] = contributions.view(shards, self._row)
            outgoing = padded.view(shards, copies, -1).transpose(0, 1).contiguous().view(-1)
        incoming = torch.empty_like(outgoing)
        yield started(all_to_all(incoming, outgoing, self.copies.dp, asynchronous=True))
        add_chain(accumulator, incoming.view(shards * copies, -1), fresh=fresh)

    @property
    def has_gradient(self) -> bool:
        """Whether an unreduced gradient stands in a gathered parameter."""
        return any(
            hasattr(parameter, "_unsharded_param")
            and (parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None)
            for parameter in self.group.fsdp_params
        )

    def drop_gradients(self) -> None:
        """Forget the views of the accumulator that FSDP2 left in ``grad``."""
        for part in self.parts:
            part.sharded.grad = None

    def across_copies(self) -> Operations:
        """At the end of a step: the same accumulator on all copies of this shard."""
        if self.fresh:
            self._whole.zero_()
            if self._piece is not None:
                self._piece.zero_()
            self.fresh = False
        if self.copies.copy is None:
            return
        if self._piece is None:
            yield from self._reducer.across(self.name, self._whole, self.copies)
            return
        piece = self._whole.view(self.copies.copies, -1)[self.copies.copy.rank()]
        piece.copy_(self._piece)
        yield started(all_gather(self._whole, piece, self.copies.copy, asynchronous=True))

    def gradient_buffers(self) -> list[Tensor]:
        """The accumulator and, in deterministic mode with copies, my piece of the sum over all ranks."""
        return [self._whole] if self._piece is None else [self._whole, self._piece]

    def owned(self, uncounted: frozenset[str], tp_replicated: frozenset[str]) -> Iterator[Owned]:
        """My rows of each parameter, in as many ranges as there are copies; each copy counts another one."""
        mine = 0 if self.copies.copy is None else self.copies.copy.rank()
        for part in self.parts:
            step = -(-part.master.numel() // self.copies.copies)
            for index in range(self.copies.copies):
                low, high = index * step, min((index + 1) * step, part.master.numel())
                if low < high:
                    yield Owned(
                        parameter=part.name,
                        start=part.start + low,
                        master=part.master[low:high],
                        gradient=self._whole[part.offset + low : part.offset + high],
                        decay=part.sharded.dim() > 1,
                        counted=index == mine and part.name not in uncounted,
                        tp_replicated=part.name in tp_replicated,
                    )


class ShardedDataParallel:
    """ZeRO-2 and ZeRO-3 on FSDP2.

    Args:
        stages: this rank's modules by stage number, initialised, in the master dtype; the blocks of
            each stand in its attribute ``layers``.
        copies: how the dp ranks divide the state; must have shards.
        mesh: one-dimensional, the shard ranks.
        dtype: of forward and backward.
        free_after_forward: ZeRO-3: gather a block for forward and again for backward, free it after each.
        keep_last_block: its backward follows its forward at once, so do not free it between them.
        split_backward: input and weight gradients are computed apart: parameters stay gathered until the
            end of the step (as in ZeRO-2), and gradients are reduced in ``collect``.
        deterministic: sum micro-batches in the order of the global batch.
        reducer: how a group is summed; absent: plainly. Deterministic mode has its own way.
        uncounted: parameters (with stage prefix) that this rank does not speak for.
        tp_replicated: parameters (with stage prefix) that are whole on every tp rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        copies: Copies,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        *,
        free_after_forward: bool,
        keep_last_block: bool = False,
        split_backward: bool = False,
        deterministic: bool = False,
        reducer: Reducer | None = None,
        uncounted: frozenset[str] = frozenset(),
        tp_replicated: frozenset[str] = frozenset(),
    ) -> None:
        devices = {parameter.device for module in stages.values() for parameter in module.parameters()}
        self._flight = Flight(next(iter(devices), torch.device("cpu")), own_stream=False)
        self.reducer: Reducer = DirectReducer() if reducer is None else reducer
        self._free_early = free_after_forward and not split_backward
        self._keep_last, self._split = keep_last_block, split_backward
        self._collected: set[int] = set()
        """Stages whose gradients have been taken in since their backward part began."""
        self._units: dict[int, list[FSDPModule]] = {}
        self._reductions: dict[int, list[_Reduction]] = {}
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=accumulation_dtype(dtype), cast_forward_inputs=False
        )
        for number, module in stages.items():
            # A stage may hold nothing at all; FSDP2 has no use for it.
            units: list[Any] = self._shard(module, mesh, policy) if any(True for _ in module.parameters()) else []
            self._units[number] = units
            self._reductions[number] = [
                self._take_over(group, number, module, copies, deterministic)
                for unit in units
                for group in unit._get_fsdp_state()._fsdp_param_groups
            ]
        self._owned = [
            piece
            for reductions in self._reductions.values()
            for reduction in reductions
            for piece in reduction.owned(uncounted, tp_replicated)
        ]

    def _shard(self, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> list[Any]:
        """Apply ``fully_shard`` to each block and to the rest of a stage; the blocks, then the root."""
        blocks: list[Any] = _blocks(module)
        for block in blocks:
            wanted_again = self._keep_last and block is blocks[-1]
            fully_shard(block, mesh=mesh, reshard_after_forward=self._free_early and not wanted_again, mp_policy=policy)
        root: Any = fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        root.set_reduce_scatter_unused_params(True)
        root.set_reshard_after_backward(self._free_early)
        root.set_requires_gradient_sync(not self._split)
        if mesh.device_type == "cpu":
            _look_ahead(root, blocks)
        return [*blocks, root]

    def _take_over(self, group: Any, number: int, module: nn.Module, copies: Copies, deterministic: bool) -> _Reduction:
        """Put our collectives into one FSDP2 parameter group; plain sums, no averages."""
        reduction = _Reduction(
            group, number, module, copies, self._flight, self.reducer, every_step=deterministic
        )
        group.gradient_divide_factor = 1.0
        group.force_sum_reduction_for_comms = True
        group._reduce_scatter_comm = reduction
        # The masters are views of the shards, so FSDP2 must not look whether to lay them out anew.
        group._reset_sharded_params = True
        if group.device.type == "cpu":
            group._all_gather_comm = _Gather()
        return reduction

    def owned(self) -> list[Owned]:
        """See ``DataParallel.owned``: in the order of the accumulators."""
        return self._owned

    def gradient_buffers(self) -> list[Tensor]:
        """See ``DataParallel.gradient_buffers``: the accumulators."""
        return [
            buffer
            for reductions in self._reductions.values()
            for reduction in reductions
            for buffer in reduction.gradient_buffers()
        ]

    def begin_step(self) -> None:
        """See ``DataParallel.begin_step``; nothing is zeroed, the first gradients of a step replace the last ones."""
        for reductions in self._reductions.values():
            for reduction in reductions:
                reduction.fresh = True

    def micro_batch(
        self, *, last: bool, stage: int | None = None, part: BackwardPart = "whole"
    ) -> AbstractContextManager[None]:
        """See ``DataParallel.micro_batch``."""
        if not self._split or part == "input":
            return nullcontext()
        return self._reducing_after(list(self._units) if stage is None else [stage])

    @contextmanager
    def _reducing_after(self, numbers: Sequence[int]) -> Iterator[None]:
        self._collected.difference_update(numbers)
        yield
        for number in numbers:
            if number not in self._collected:
                self._reduce_now(number)

    def collect(self, stage: int) -> None:
        """See ``DataParallel.collect``."""
        if any(reduction.has_gradient for reduction in self._reductions[stage]):
            self._reduce_now(stage)
            self._collected.add(stage)

    def _reduce_now(self, stage: int) -> None:
        """Reduce what stands in the gathered parameters' ``grad``, as FSDP2's own hook would have."""
        for reduction in reversed(self._reductions[stage]):
            group = reduction.group
            group.reduce_grads = True
            group.post_backward()
            group.reduce_grads = not self._split
            group._training_state = TrainingState.IDLE

    def finish_gradients(self) -> None:
        """See ``DataParallel.finish_gradients``; frees parameters that were kept until here (ZeRO-2)."""
        for stage in self._units:
            self.collect(stage)
        self._flight.settle_all()
        reductions = [reduction for each in self._reductions.values() for reduction in each]
        self._flight.start_together([(reduction, reduction.across_copies()) for reduction in reductions])
        self._flight.settle_all()
        self._free()
        for reduction in reductions:
            reduction.drop_gradients()

    def publish(self) -> None:
        """See ``DataParallel.publish``: the masters are the parameters; the next forward gathers them."""
        self._free()

    def _free(self) -> None:
        for units in self._units.values():
            for unit in units:
                unit.reshard()


def _blocks(module: nn.Module) -> list[nn.Module]:
    layers = getattr(module, "layers", None)
    return list(layers.children()) if isinstance(layers, nn.Module) else []


def _look_ahead(root: Any, blocks: Sequence[Any]) -> None:
    """Gather each block while the one before it computes, in both directions."""
    root._set_unshard_async_op(True)
    for this, following in zip([root, *blocks], blocks, strict=False):
        this.set_modules_to_forward_prefetch([following])
    order = [root, *reversed(blocks)]
    for this, following in pairwise(order):
        this.set_modules_to_backward_prefetch([following])
    if blocks:
        # Left to itself FSDP2 would gather what ran before the first block: in a stage without an embedding, a block of
        # another micro-batch, in vain. Itself is gathered already.
        blocks[0].set_modules_to_backward_prefetch([blocks[0]])
