"""One pipeline stage on torch's pipeline runtime: what it computes, receives, sends and tells data parallelism.

Torch's ``PipelineStage`` keeps the books of micro-batches in flight. Changed here:

* a micro-batch reaches every stage as an object (positions, documents, labels), not as chunks of tensors;
* shapes are static, so nothing is inferred, voted on or sent before the first step (and fake tensors run);
* messages are sent, received and waited for here: buffers live from their receive to their last use and sends are
  waited for in time, so a rank holds boundary tensors for the micro-batches in flight, not for all of the step's;
* each part of a backward pass is announced to :class:`DataParallel`, which alone knows about sharding: the
  runtime never sees an ``FSDPModule``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode

from meshwright.comm.phase import phase
from meshwright.comm.position import in_micro_batch
from meshwright.comm.timeline import blocked
from meshwright.model.backward_part import backward_part
from meshwright.parallel.owned import BackwardPart, DataParallel


class StageProgram(nn.Module):
    """What a stage computes of one micro-batch: its output ``[tokens/t, hidden]``, or on the last stage the loss."""

    def __init__(self, module: nn.Module, last: bool) -> None:
        super().__init__()
        self.module, self.last = module, last

    def forward(self, hidden: Tensor | None = None, *, batch: Any, divisor: float) -> Tensor:
        """``hidden`` is None on the first stage."""
        output: Tensor = self.module(hidden, batch, divisor) if self.last else self.module(hidden, batch)
        return output


class Stage(PipelineStage):
    """See the module's words.

    Args:
        program: the stage's computation.
        index: stage number of ``count``.
        group: the pipeline ranks of this column, in stage order.
        hidden: a meta tensor shaped like the activations between stages.
        micro_batches: how many a step has.
        split: False for stages that take their weight gradients together with their input gradients although
            the schedule parts the two: a stage that recomputes itself would have to do so for each part.
    """

    def __init__(
        self,
        program: StageProgram,
        index: int,
        count: int,
        group: dist.ProcessGroup,
        hidden: Tensor,
        micro_batches: int,
        device: torch.device,
        data_parallel: DataParallel,
        *,
        split: bool,
    ) -> None:
        super().__init__(
            program,
            index,
            count,
            torch.device("meta"),  # shapes alone; buffers come with their receives
            input_args=() if index == 0 else (hidden,),
            output_args=(hidden,),
            group=group,
        )
        self._data_parallel, self._split = data_parallel, split
        self._gradients_of = 0
        self._pipeline = group
        self._sends: dict[str, deque[dist.Work]] = {"forward": deque(), "backward": deque()}
        self._receives: dict[tuple[str, int], dist.Work] = {}
        self._inference_mode = InferenceMode.STATIC
        self.has_backward = True
        self._prepare_forward_infra(micro_batches, (), has_backward=True)
        self._prepare_backward_infra(micro_batches)
        for index in range(micro_batches):
            self._drop_buffers(index)
        self.device = device

    def begin_step(self) -> None:
        """Forget the last step."""
        self.clear_runtime_states()
        self._gradients_of = 0

    def end_step(self) -> None:
        """Wait until the neighbours have taken everything."""
        for direction in self._sends:
            self._wait_sends(direction, 0)

    # -- the wire ---------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Begin to receive a micro-batch's input; nothing is left for the runtime to do."""
        self._receive("forward", fwd_chunk_id, self.args_recv_info[fwd_chunk_id])
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Begin to receive the gradient of a micro-batch's output."""
        if not self.is_last:
            self._receive("backward", bwd_chunk_id, self.grad_recv_info[bwd_chunk_id])
        return []

    def _receive(self, direction: str, micro_batch: int, receives: tuple[Any, ...]) -> None:
        for receive in receives:
            meta = receive.tensor_meta
            receive.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            source = self.stage_index_to_group_rank[receive.source]
            with phase(direction):
                work = dist.irecv(receive.buffer, group=self.group, group_src=source)
            if work is not None:
                self._receives[direction, micro_batch] = work

    def _wait_receive(self, direction: str, micro_batch: int) -> None:
        work = self._receives.pop((direction, micro_batch), None)
        if work is not None:
            with blocked(self._pipeline, "receive"):
                work.wait()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a micro-batch's output on; nothing is left for the runtime to do."""
        self._send(super().get_fwd_send_ops(fwd_chunk_id), "forward")
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of a micro-batch's input back; nothing is left for the runtime to do."""
        # The receiver has at most a pipeline's depth of these outstanding, so this wait finds the oldest taken.
        self._wait_sends("backward", self.num_stages)
        self._send(super().get_bwd_send_ops(bwd_chunk_id), "backward")
        return []

    def _send(self, operations: list[dist.P2POp], direction: str) -> None:
        with phase(direction):
            for operation in operations:
                work = dist.isend(operation.tensor.contiguous(), group=self.group, group_dst=operation.group_peer)
                if work is not None:
                    self._sends[direction].append(work)

    def _wait_sends(self, direction: str, leave: int) -> None:
        sends = self._sends[direction]
        while len(sends) > leave:
            with blocked(self._pipeline, "send"):
                sends.popleft().wait()

    # -- forward and backward ------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """The forward pass of one micro-batch."""
        in_micro_batch(fwd_chunk_id)
        self._wait_receive("forward", fwd_chunk_id)
        with phase("forward"):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of one micro-batch, or its input part."""
        in_micro_batch(bwd_chunk_id)
        self._wait_receive("backward", bwd_chunk_id)
        whole = full_backward or not self._split
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward=whole)
        self._release(bwd_chunk_id)
        if whole and not full_backward:
            self.dw_runner[bwd_chunk_id] = _nothing
        elif not whole and not self.is_first:
            # The weight part starts from the saved places in the graph: let go of the rest.
            _, groups, _, _ = self.backward_state[bwd_chunk_id]
            self.backward_state[bwd_chunk_id] = ((), groups, (), None)

    def _drop_buffers(self, micro_batch: int) -> None:
        for receive in (*self.args_recv_info[micro_batch], *self.grad_recv_info[micro_batch]):
            receive.buffer = None

    def _release(self, micro_batch: int) -> None:
        self._drop_buffers(micro_batch)
        # Its gradient came back, so its output has arrived.
        if not self.is_last and self._sends["forward"]:
            self._wait_sends("forward", len(self._sends["forward"]) - 1)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weight part of the backward pass of one micro-batch."""
        if self._split:
            super().backward_weight_one_chunk(bwd_chunk_id)
        else:
            self.dw_runner.pop(bwd_chunk_id)()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run one part (``full``, ``input`` or ``weight``), announced to data parallelism."""
        with self._announced(_PARTS[backward_type]):
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs)
            if backward_type == "weight":
                self._data_parallel.collect(self.stage_index)
            return result

    @contextmanager
    def _announced(self, part: BackwardPart) -> Iterator[None]:
        if part != "input":
            self._gradients_of += 1
        last = part != "input" and self._gradients_of == self.chunks
        with (
            self._data_parallel.micro_batch(last=last, stage=self.stage_index, part=part),
            backward_part(inputs=part != "weight", weights=part != "input"),
            phase("backward"),
        ):
            yield


_PARTS: dict[str, BackwardPart] = {"full": "whole", "input": "input", "weight": "weight"}


def _nothing() -> None:
    """The weight part of a stage that is not split: already done."""
