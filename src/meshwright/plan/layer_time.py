"""Seconds of one transformer layer on one rank, without communication.

Forward is the sum of its matrix products by the device's curve, attention by its own, what streams through memory,
and the kernels' own time; the host's work to issue them is a floor below it. Backward has two products for each of
forward's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.job.efficiency import Efficiency
from meshwright.plan.arrays import Bools, Floats, Ints
from meshwright.plan.rules import Rules
from meshwright.plan.shape import Shape, Value

_KERNELS_FORWARD = 22.0
"""Kernels of one layer's forward in a plain network: 4 to 6 products, 3 or 4 of attention, norms, copies, residuals."""
_KERNELS_BACKWARD = 40.0

_PLAIN_CORES = 4.0
"""Times that plain cores are slower than tensor cores in 16 bits (A100: 78 and 312 TFLOP/s)."""


@dataclass(frozen=True)
class Machine:
    """The rates that times depend on: of one device, or arrays over the layouts."""

    peak: Value
    """FLOP/s of matrix products."""
    attention_peak: Value
    bandwidth: Value
    """Bytes/s that streams reach."""
    gemm: Value
    area_half: Value
    depth_half: Value
    attention_forward: Value
    attention_backward: Value
    length_half: Value
    launch: Value
    dispatch: Value
    element: float
    """Bytes of one activation element."""

    @classmethod
    def of(cls, peak: float, bandwidth: float, efficiency: Efficiency, dtype: str, element: float) -> Machine:
        """Of one device."""
        curve = efficiency.gemm.get(dtype) or next(iter(efficiency.gemm.values()))
        return cls(
            peak=peak,
            attention_peak=peak,
            bandwidth=bandwidth * efficiency.memory,
            gemm=curve.efficiency,
            area_half=curve.area_half,
            depth_half=curve.depth_half,
            attention_forward=efficiency.attention.forward,
            attention_backward=efficiency.attention.backward,
            length_half=efficiency.attention.length_half,
            launch=efficiency.launch,
            dispatch=efficiency.dispatch,
            element=element,
        )

    def product(self, m: Value, k: Value, n: Value) -> Value:
        """Seconds of ``[m, k] x [k, n]``, without its launch; see ``job/efficiency.py``."""
        return 2 * (m * n + self.area_half) * (k + self.depth_half) / (self.peak * self.gemm)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch on one rank, without communication."""

    forward: Floats
    backward: Floats
    core: Floats
    """Forward of the attention core alone: what selective recomputation does again."""
    host_forward: Floats
    """What the host needs to issue the forward: a floor."""
    host_backward: Floats


def layer_time(shape: Shape, tp: Ints, micro_batch: Ints, sequence_parallel: Floats, machine: Machine,
               rules: Rules) -> LayerTime:  # fmt: skip
    """One transformer layer."""
    rows: Floats = np.asarray(micro_batch * shape.sequence, np.float64)
    query, key_value = shape.query / tp, shape.key_value / tp
    hidden, ffn = shape.hidden, shape.ffn / tp
    products = ((hidden, query + 2 * key_value), (query, hidden), (hidden, ffn * (1 + shape.gated)), (ffn, hidden))
    forward, backward = np.asarray(0.0), np.asarray(0.0)
    for k, n in products:
        forward = forward + machine.product(rows, k, n)
        backward = backward + machine.product(rows, n, k) + machine.product(k, rows, n)
    core, core_backward = attention_time(shape, tp, micro_batch, machine, rules)
    local = np.where(sequence_parallel > 0, 1 / tp, 1.0)
    elements = stream_elements(shape, rules, hidden * local, query, key_value, ffn) * rows
    stream = rules.elementwise * elements * machine.element / machine.bandwidth
    apart = 0.0 if rules.fused_attention else 6.0 * ~softmax_in_one_kernel(shape, tp, micro_batch, rules)
    kernels_f = rules.kernels * (_KERNELS_FORWARD + apart)
    kernels_b = rules.kernels * (_KERNELS_BACKWARD + apart)
    return LayerTime(
        forward=forward + core + stream + kernels_f * machine.launch + rules.layer_seconds / 4,
        backward=backward + core_backward + 1.8 * stream + kernels_b * machine.launch + rules.layer_seconds / 2,
        core=core,
        host_forward=np.asarray(kernels_f * machine.dispatch),
        host_backward=np.asarray(kernels_b * machine.dispatch),
    )


def stream_elements(shape: Shape, rules: Rules, hidden: Value, query: Value, key_value: Value, ffn: Value) -> Value:
    """Elements a token's forward reads and writes outside products and attention cores.

    Two norms read and write (4), two residual additions read two and write one (6), with dropout also its mask and
    result (2 x 3); rotations or biases of q, k and v read and write (2); the activation function reads its one or
    two inputs and writes (2 or 3).
    """
    residual = 10 + 6 * float(rules.dropout)
    return residual * hidden + 2 * (query + 2 * key_value) + (2 + shape.gated) * ffn


def softmax_in_one_kernel(shape: Shape, tp: Ints, micro_batch: Ints, rules: Rules) -> Bools:
    """Megatron's fused softmax takes whole groups of four score matrices, up to 2,048 keys (4,096 later)."""
    whole = np.mod(micro_batch * shape.heads / tp, 4) == 0
    return np.asarray(rules.fused_softmax & whole & (shape.sequence <= 4096))


def attention_time(shape: Shape, tp: Ints, micro_batch: Ints, machine: Machine, rules: Rules) -> tuple[Floats, Floats]:
    """Forward and backward of the attention core.

    Fused: a fraction of the peak on causal FLOPs. Otherwise two batched products over whole score matrices and
    passes over the scores: scale, mask and softmax in one kernel read and write them (2), apart they do so
    three times (6); dropout adds 2.5; backward 1.5 times as much.
    """
    if rules.fused_attention:
        flops = shape.attention_flops() * micro_batch / tp
        short = 1 + machine.length_half / shape.sequence
        forward = flops * short / (machine.attention_peak * machine.attention_forward)
        return forward, 2.5 * flops * short / (machine.attention_peak * machine.attention_backward)
    batches = micro_batch * shape.heads / tp
    sequence, width = shape.sequence, shape.head_size
    # Tensor cores take 16-bit operands whose rows are multiples of 8 elements; others run on the plain cores.
    plain = np.where(np.mod(width, 8) > 0, _PLAIN_CORES, 1.0)
    scores = plain * machine.product(batches * sequence, width, sequence)
    context = plain * machine.product(batches * sequence, sequence, width)
    one_kernel = softmax_in_one_kernel(shape, tp, micro_batch, rules)
    passes = np.where(one_kernel, 2.0, 6.0) + 2.5 * float(rules.dropout) + 2
    stream = passes * batches * sequence**2 * machine.element / machine.bandwidth
    return scores + context + stream, 2 * (scores + context) + 1.5 * stream
