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
    master_bytes: float = 4.0
    """Of the wide copy that is updated; 0 where forward reads that copy itself."""
    moment_bytes: float = 8.0
    """Of the optimizer's moments."""
    sharded_gradients_from: int = 2
    """The lowest ZeRO stage that keeps only a part of the gradients."""
    wire_bytes: float = 4.0
    """Of one gradient on the wire."""
    gather_bytes: float = 2.0
    """Of one parameter on the wire."""
    full_working_copy: bool = True
    """With ZeRO-2 each rank keeps all 16-bit parameters; else only the wide ones it owns and what is gathered."""
    wire_tp_bytes: float = 2.0
    """Of one activation element between tensor-parallel ranks."""

    selective_part: float | None = None
    """What selective recomputation does again, as a part of a layer's forward; None: the attention core alone."""
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
    layer_seconds: float = 0.0
    """Of every layer, micro-batch, and forward, recomputation and twice backward together (a quarter each): time in
    which the device waits for the host, as with synchronous kernel launches."""
    micro_batch_seconds: float = 0.0
    """Of every micro-batch: the host's work outside the layers."""

    layer_output_kept: float = 0.0
    """Selective recomputation of whole products: bytes a token and layer keeps, in hidden sizes; 0: by the core."""
    logit_bytes: float = 12.0
    """Of one logit at the loss: the 16-bit logits, float32 ones, and their gradient."""
    head_gradient_bytes: float = 2.0
    """Of one element of the head's weight gradient while it is made, when the logits are gone."""
    slowdown: float = 1.0
    """Everything takes so many times as long: a fault of the machine that its source names."""
    head_gradient_beside_logits: bool = False
    """It is made while the gradient of the logits still stands."""
    backward_passing: float = 0.0
    """How many times a layer's gradients of activations come and go beside what is kept, at the peak."""
    layers_gathered: float = 2.0
    """Layers whose parameters ZeRO-3 holds at once: the one at work, and the next one on its way."""
    gradients_under_way: float = 1.0
    """Copies of a layer's gradients, as on the wire, that a reduction keeps while it runs."""
    wait_per_doubling: float = 0.0
    """Part of the computation lost to the slowest rank, for each doubling of the nodes."""

    context_bytes: float = 0.0
    """The runtime's own: context, collective buffers, workspaces."""
    slack: float = 0.0
    """Part of the activations that the allocator holds beyond what is asked of it."""


OURS = Rules(
    name="meshwright",
    elementwise=1.5,
    overlap_gradients=0.9,
    overlap_gathers=0.9,
    reduce_each_micro_batch=True,
    logit_bytes=2.0,
    head_gradient_bytes=2.0,
    head_gradient_beside_logits=True,
    backward_passing=1.0,
    layers_gathered=1.0,
    gradients_under_way=2.0,
)
"""meshwright's own program; ``plan/predict.py`` holds the exact form for one layout.

On GPUs its streams and overlap are taken as other programs of eager PyTorch kernels were measured to have them
(``bench/published_constants.json``: FSDP runs fit 1.5 and 0.8 to 0.96).
"""
