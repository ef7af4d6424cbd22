"""Where the wall time of a step goes: exclusive nested spans that sum to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def blocked(group: dist.ProcessGroup, operation: str) -> Iterator[None]:
    """Time spent waiting for a collective; recorded when a timeline is active."""
    yield
