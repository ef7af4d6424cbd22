"""A machine whose ranks are processes on shared processor cores: what ``meshwright calibrate`` measures of it.

There a step is not only matrix products: every element that streams through norms and activation functions, every
layer that Python walks through, every parameter whose gradient is added up costs time of its own, and ranks beyond
the number of cores wait for each other's turns.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PassSeconds(_Part):
    """Seconds of one pass (forward or backward) of one micro-batch, beside matrix products and attention."""

    element: _NonNegative = 0.0
    """Of each element that norms, residuals, rotations and activation functions read or write in forward."""
    layer: _NonNegative = 0.0
    """Of each layer: Python, dispatch, autograd."""
    logit: _NonNegative = 0.0
    """Of each logit of the loss."""
    parameter: _NonNegative = 0.0
    """Of each parameter: it is read, and in backward its gradient added up."""
    micro_batch: _NonNegative = 0.0
    """Of each micro-batch."""


class Host(_Part):
    """The cores of a node, and the program's own costs on one of them."""

    cores: PositiveInt
    """Of a node; ranks take turns where there are fewer."""
    forward: PassSeconds = PassSeconds()
    backward: PassSeconds = PassSeconds()
    update: _NonNegative = 0.0
    """Of each parameter that a rank updates: norm, clipping, optimizer."""
    step: _NonNegative = 0.0
    """Of each step."""
    unit: _NonNegative = 0.0
    """Of each group of parameters that ZeRO-2 or 3 gathers or reduces, each time: hooks."""
    sharded: _NonNegative = 0.0
    """Of each parameter in it: copies."""
    tensor: _NonNegative = 0.0
    """Of each collective along tp, beside the collective: products in two parts, buffers, Python."""
