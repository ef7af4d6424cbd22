"""Which part of the training step is running: the label under which traffic, time and FLOPs are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.comm.position import in_phase
from meshwright.comm.timeline import active_timeline

# One training thread a process. A plain global, not a context variable: autograd's own threads (CUDA) see it too.
_current = "none"

_OWN_KIND = ("data", "checkpoint")
"""Phases that are parts of the step's time by themselves; the others are computation."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Label everything inside with ``name``; the innermost label counts.

    The names in use: ``data``, ``batch``, ``forward``, ``recompute``, ``backward``, ``reduce``,
    ``optimizer``, ``publish``, ``metrics``, ``evaluate``, ``checkpoint``, ``setup``. The active
    timeline charges time by them, and the rank's position says which it is in.
    """
    global _current
    previous, _current = _current, name
    in_phase(name)
    timeline, whole = active_timeline(), False
    try:
        if timeline is None:
            yield
        else:
            with timeline.span(name) if name in _OWN_KIND else timeline.span("compute", name):
                yield
        whole = True
    finally:
        _current = previous
        if whole:  # after an error the position still says where it happened, for whoever asks why
            in_phase(previous)


def current_phase() -> str:
    """The label in force: the innermost ``phase``; inside autograd's backward ``forward`` reads ``backward``."""
    if _current in ("forward", "none") and in_backward():
        return "backward"
    return _current


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
