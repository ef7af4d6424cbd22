"""Where metrics go besides ``metrics.jsonl``, and the memory figure beside each step."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import InputError


class TensorBoard:
    """Scalars of each record under their own names (needs the ``tensorboard`` extra)."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "observe.tensorboard = true needs the package tensorboard; pip install 'meshwright[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, **record: Any) -> None:
        """Numbers become scalars; the rest is left to ``metrics.jsonl``."""
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: the allocator's on CUDA, the process's resident set on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
