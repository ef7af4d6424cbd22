"""Which part of the training step is running: the label under which traffic, time and FLOPs are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# One training thread a process. A plain global, not a context variable: autograd's own threads (CUDA) see it too.
_current = "none"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Label everything inside with ``name``; the innermost label counts.

    The names in use: ``data``, ``batch``, ``forward``, ``recompute``, ``backward``, ``reduce``,
    ``optimizer``, ``publish``, ``metrics``, ``setup``.
    """
    global _current
    previous, _current = _current, name
    try:
        yield
    finally:
        _current = previous


def current_phase() -> str:
    """The label in force: the innermost ``phase``; inside autograd's backward ``forward`` reads ``backward``.

    So a pipeline schedule, which mixes forward and backward micro-batches, needs one label only.
    """
    if _current in ("forward", "none") and in_backward():
        return "backward"
    return _current


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
