"""How a program trains: what it keeps, what it moves, what it hides. Ours, and those of published measurements.

The planner's formulas are the same for every program; what differs between them is here, one value a field, with
where it is known from. ``OURS`` is what meshwright runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """One program. Bytes are per parameter or per element, passes per element of an activation."""

    name: str

    parameter_bytes: float = 2.0
    """Of the copy that forward and backward read."""
    gradient_bytes: float = 4.0
    """Of the buffer that gradients are summed in."""
    state_bytes: float = 12.0
    """Masters and moments."""
    wire_bytes: float = 4.0
    """Of one gradient on the wire."""
    gather_bytes: float = 2.0
    """Of one parameter on the wire."""
    full_working_copy: bool = True
    """With ZeRO-1 and 2 each rank keeps all 16-bit parameters; else (FSDP-like) only the gathered ones."""
    wire_tp_bytes: float = 2.0
    """Of one activation element between tensor-parallel ranks."""

    fused_attention: bool = True
    fused_softmax: bool = False
    """Without fused attention: scale, mask and softmax in one kernel."""
    dropout: bool = False
    """Residual and attention dropout are computed (and their masks kept)."""
    elementwise: float = 1.0
    """Traffic of norms, activation functions, residuals and copies, over that of one kernel an operation; fusion makes
    it smaller."""
    kernels: float = 1.0
    """Kernels of a layer, over those of the plain network; fusion makes it smaller."""
    logit_passes: float = 5.0
    """Float32 passes over the logits in forward and backward of the loss."""

    overlap_gradients: float = 1.0
    """Part of the gradient reduction that runs under backward where backward is long enough."""
    overlap_gathers: float = 1.0
    """The same of ZeRO-3's gathers, under the computation of a neighbouring layer."""
    overlap_tensor: float = 0.0
    """The same of tensor-parallel collectives."""
    overlap_pipeline: float = 0.0
    """The same of transfers between pipeline stages."""
    sliced_transfers: bool = True
    """A stage's output crosses nodes once, in slices of the tp ranks; otherwise each of them sends all of it."""
    reduce_each_micro_batch: bool = False
    """ZeRO-2 and 3 reduce gradients after each micro-batch, not only after the last."""
    optimizer_bytes: float = 34.0
    """Memory traffic of clipping and the update, per parameter it updates."""
    step_seconds: float = 0.0
    """Of every step: data, logging, the optimizer's host work."""
    micro_batch_seconds: float = 0.0
    """Of every micro-batch: the host's work outside the layers."""

    context_bytes: float = 0.0
    """The runtime's own: context, collective buffers, workspaces."""
    slack: float = 0.0
    """Part of the activations that the allocator cannot use (fragments)."""


OURS = Rules(name="meshwright", reduce_each_micro_batch=True, elementwise=1.0)
"""meshwright's own program; ``plan/predict.py`` holds the exact form for one layout."""
