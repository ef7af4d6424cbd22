"""What one rank reaches in matrix products, attention and streaming, as the program calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from meshwright.model.narrow_attention import narrow_attention
from meshwright.prove.stopwatch import Timing, interleaved

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

GEMMS: tuple[tuple[int, int, int], ...] = (
    (64, 128, 128), (64, 256, 768), (256, 64, 64), (256, 128, 384), (256, 256, 256), (256, 256, 1024),
    (256, 1024, 256), (512, 384, 384), (512, 128, 2048), (1024, 256, 768), (1024, 512, 512), (128, 1024, 512),
)  # fmt: skip
"""``[m, k] x [k, n]``: from a sliver of a small model to a layer of a middling one."""
LARGE_GEMMS: tuple[tuple[int, int, int], ...] = (
    (2048, 1024, 1024), (2048, 4096, 1024), (2048, 1024, 4096), (4096, 4096, 4096), (8192, 4096, 4096),
    (2048, 8192, 8192), (8192, 8192, 1024), (512, 4096, 4096),
)  # fmt: skip
"""On CUDA."""
ATTENTIONS: tuple[tuple[int, int, int, int], ...] = ((1, 4, 64, 32), (1, 4, 256, 64), (2, 2, 256, 32), (1, 8, 512, 64))
"""Batch, heads, sequence, head size."""
LARGE_ATTENTIONS: tuple[tuple[int, int, int, int], ...] = ((1, 16, 1024, 128), (1, 16, 2048, 128), (1, 16, 4096, 128))
_STREAM_ELEMENTS = 1 << 22
"""Of a float32 array that no cache of a rank holds: 16 MiB."""


@dataclass(frozen=True)
class Kernels:
    """Seconds of one call, by what was called."""

    gemm: dict[str, dict[tuple[int, int, int], Timing]]
    """By type and shape."""
    attention_forward: dict[str, dict[tuple[int, int, int, int], Timing]]
    attention_both: dict[str, dict[tuple[int, int, int, int], Timing]]
    """Forward and backward together."""
    stream: Timing
    """``a + b`` into ``c``: three arrays of ``stream_bytes / 3``."""
    stream_bytes: int
    dispatch: Timing
    """An operation on one element: what calling costs."""


def measure_kernels(seconds: float, dtypes: tuple[str, ...] = ("float32", "bfloat16"), cuda: bool = False) -> Kernels:
    """Time all of it; runs on a rank, with as many threads as the process has.

    Args:
        seconds: in all, about.
        dtypes: of products and attention.
        cuda: on this process's current device, with shapes to its size.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    cases: dict[tuple[str, object, object], Callable[[], object]] = {}
    for name in dtypes:
        for shape in LARGE_GEMMS if cuda else GEMMS:
            cases["gemm", name, shape] = _gemm(shape, DTYPES[name], device)
        for heads in LARGE_ATTENTIONS if cuda else ATTENTIONS:
            cases["forward", name, heads] = _attention(heads, DTYPES[name], device, backward=False)
            cases["both", name, heads] = _attention(heads, DTYPES[name], device, backward=True)
    elements = _STREAM_ELEMENTS * (32 if cuda else 1)
    a, b, c = (torch.ones(elements, device=device) for _ in range(3))
    cases["stream", "", ()] = lambda: torch.add(a, b, out=c)
    one = torch.ones(1, device=device)
    cases["dispatch", "", ()] = lambda: one + one
    found = interleaved(cases, seconds, device=device)

    def of(kind: str, dtype: str) -> dict[object, Timing]:
        return {shape: timing for (k, d, shape), timing in found.items() if (k, d) == (kind, dtype)}

    return Kernels(
        gemm={name: of("gemm", name) for name in dtypes},  # type: ignore[misc]
        attention_forward={name: of("forward", name) for name in dtypes},  # type: ignore[misc]
        attention_both={name: of("both", name) for name in dtypes},  # type: ignore[misc]
        stream=found["stream", "", ()],
        stream_bytes=3 * 4 * elements,
        dispatch=found["dispatch", "", ()],
    )


def _gemm(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    m, k, n = shape
    x, weight = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    return lambda: x @ weight.t()


def _attention(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, backward: bool
) -> Callable[[], object]:
    batch, heads, sequence, size = shape
    # Tokens before heads in memory, as the fused projection leaves them.
    q, k, v = (
        torch.randn(batch, sequence, heads, size, device=device).to(dtype).transpose(1, 2).requires_grad_(backward)
        for _ in range(3)
    )
    narrow = device.type == "cpu" and dtype.itemsize == 2

    def forward() -> torch.Tensor:
        return narrow_attention(q, k, v, None) if narrow else F.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not backward:
        return forward
    gradient = torch.ones(batch, heads, sequence, size, device=device, dtype=dtype)
    return lambda: torch.autograd.grad(forward(), (q, k, v), gradient)
