"""Which gradients the running backward pass is for: zero-bubble schedules take them in two parts.

Autograd runs a ``Function``'s backward whole in either part, and its ``needs_input_grad`` says
``True`` for both kinds of input. A function that holds a parameter therefore asks here, and leaves out
(with its collective) what the other part will compute, or has computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Wants:
    """What the running backward pass is for; both outside of split schedules."""

    inputs: bool = True
    """Gradients of activations."""
    weights: bool = True
    """Gradients of parameters."""


wants = Wants()
"""Plain state, not a context variable: autograd's own threads (CUDA) read it too."""


@contextmanager
def backward_part(*, inputs: bool, weights: bool) -> Iterator[None]:
    """Run one part of a backward pass."""
    before = wants.inputs, wants.weights
    wants.inputs, wants.weights = inputs, weights
    try:
        yield
    finally:
        wants.inputs, wants.weights = before
