"""Saving while training goes on: the state is copied to host buffers, and a thread writes them.

Training stands still for the copy only. The buffers are made once and used again, so memory does not grow; one
checkpoint is written at a time, and a second has to wait for it. The thread talks to the other ranks over a process
group of its own, so its messages never mix with those of training. Copying, checksums and writing run outside
the interpreter's lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.placed import PlacedTensor
from meshwright.checkpoint.world import GroupWorld
from meshwright.errors import SaveError
from meshwright.train.saving import Saver


@dataclass(frozen=True)
class Written:
    """A checkpoint that is finished."""

    step: int
    seconds: float
    """From its copy until it was committed, verified, and older ones removed."""


class BackgroundSaver:
    """Writes a saver's checkpoints in a thread. All ranks make it, and begin each checkpoint, together."""

    def __init__(self, saver: Saver) -> None:
        self.saver = saver
        self._group = dist.new_group(backend="gloo", timeout=saver.trainer.mesh.timeout)
        self._world = GroupWorld(self._group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._buffers: list[torch.Tensor] = []
        self._running: Future[Written] | None = None

    def begin(self) -> None:
        """Copy the state after the current step, and start writing it. The one before must have been taken."""
        assert self._running is None
        began = time.monotonic()
        boxes = self._snapshot()
        step, state = self.saver.trainer.step_number, self.saver.scalars()
        self._running = self._thread.submit(self._write, step, boxes, state, began)

    @torch.no_grad()
    def _snapshot(self) -> list[PlacedTensor]:
        boxes = self.saver.counted_tensors()
        if not self._buffers:
            pinned = self.saver.trainer.device.type == "cuda"
            self._buffers = [torch.empty(box.tensor.shape, dtype=box.tensor.dtype, pin_memory=pinned) for box in boxes]
        for buffer, box in zip(self._buffers, boxes, strict=True):
            buffer.copy_(box.tensor, non_blocking=True)
        if self.saver.trainer.device.type == "cuda":
            torch.cuda.current_stream(self.saver.trainer.device).synchronize()
        return [replace(box, tensor=buffer) for buffer, box in zip(self._buffers, boxes, strict=True)]

    def _write(self, step: int, boxes: list[PlacedTensor], state: Mapping[str, Any], began: float) -> Written:
        self.saver.write(step, boxes, state, self._world)
        return Written(step, time.monotonic() - began)

    def take(self, *, wait: bool) -> Written | SaveError | None:
        """How the checkpoint that was begun ended, once; None when there is none, or it is not finished.

        Args:
            wait: until it is. Then all ranks get the same; otherwise some get it some steps before others.
        """
        running = self._running
        if running is None or not (wait or running.done()):
            return None
        self._running = None
        try:
            written = running.result()
        except SaveError as error:
            return error
        self.saver.saved_step = written.step
        return written

    def close(self) -> None:
        """End the thread and leave its process group."""
        self._thread.shutdown(wait=True)
        dist.destroy_process_group(self._group)
