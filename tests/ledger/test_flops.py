"""FLOPs by hand, whatever kernel runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from meshwright.comm.flops import attention_flops
from meshwright.comm.phase import phase
from meshwright.comm.record import TrafficRecorder
from meshwright.ledger.ledger import Computes
from meshwright.model.narrow_attention import narrow_attention

BATCH, HEADS, KV_HEADS, SEQUENCE, SIZE = 2, 4, 2, 24, 16
FORWARD = 4 * BATCH * HEADS * SIZE * SEQUENCE * SEQUENCE // 2


def recorder() -> TrafficRecorder:
    return TrafficRecorder(lambda _group: "x")


def heads(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, count, SEQUENCE, SIZE, dtype=dtype, requires_grad=True)


def test_matrix_products():
    left, right = torch.ones(3, 5, requires_grad=True), torch.ones(5, 7, requires_grad=True)
    bias = torch.ones(7, requires_grad=True)
    with recorder() as recorded:
        with phase("forward"):
            loss = F.linear(left, right.t(), bias).sum() + (left @ right).sum()
            loss = loss + torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 6)).sum()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            torch.addmm(torch.ones(3, 7), left.detach(), right.detach())
    product = 2 * 3 * 5 * 7
    # Both products have two gradients each; what the optimizer multiplies counts as forward.
    assert recorded.computes == Computes(forward=3 * product + 2 * 2 * 3 * 4 * 6, backward=4 * product)


def attend(kernel: str, dtype: torch.dtype, kv_heads: int, mask: Tensor | None) -> Computes:
    q, k, v = heads(HEADS, dtype), heads(kv_heads, dtype), heads(kv_heads, dtype)
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    with recorder() as recorded:
        with phase("forward"):
            if kernel == "narrow":
                out = narrow_attention(q, k, v, mask)
            else:
                with sdpa_kernel(backends[kernel]):
                    out = F.scaled_dot_product_attention(
                        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=kv_heads != HEADS
                    )
        with phase("backward"):
            out.sum().backward()
    return recorded.computes


MASK = torch.zeros(SEQUENCE, SEQUENCE).masked_fill_(torch.ones(SEQUENCE, SEQUENCE).tril() == 0, float("-inf"))


@pytest.mark.parametrize("mask", [None, MASK], ids=["causal", "mask"])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
@pytest.mark.parametrize("kernel", ["flash", "math", "narrow"])
def test_attention_is_causal_attention_by_any_kernel(kernel, kv_heads, mask):
    dtype = torch.bfloat16 if kernel == "narrow" else torch.float32
    if mask is not None:
        mask = mask.to(dtype)
    expected = Computes(forward=FORWARD, backward=2 * FORWARD, recompute=FORWARD // 2)
    assert attend(kernel, dtype, kv_heads, mask) == expected
    assert (expected.model, expected.hardware) == (3 * FORWARD, 3 * FORWARD + FORWARD // 2)


def test_attention_written_out_counts_its_products():
    q, k, v = (heads(HEADS) for _ in range(3))
    with recorder() as recorded:
        with phase("forward"):
            out = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        with phase("backward"):
            out.sum().backward()
    assert recorded.computes == Computes(forward=2 * FORWARD, backward=4 * FORWARD)


class Attention(nn.Module):
    """Like the model's: ``window`` says how far a token sees, the mask holds it."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_windows_of_different_layers(kernel, recompute):
    """Layers that see 5, all and 9 tokens; recomputation calls the insides of a layer without its module."""
    windows = (5, None, 9)
    layers = [Attention(window) for window in windows]
    masks = [MASK.clone() for _ in windows]
    x = heads(HEADS)
    hidden = x
    with recorder() as recorded, sdpa_kernel(kernel):
        with phase("forward"):
            for layer, mask in zip(layers, masks, strict=True):
                if recompute:
                    layer.forward = _again(layer.forward)  # type: ignore[method-assign]
                hidden = layer(hidden, hidden, hidden, mask)
        with phase("backward"):
            hidden.sum().backward()
    pairs = 4 * BATCH * HEADS * SIZE
    forward = sum(pairs * SEQUENCE * w - pairs * w * w // 2 for w in (5, 9)) + FORWARD
    again = forward if recompute else 0
    assert recorded.computes == Computes(forward=forward, backward=2 * forward, recompute=again + forward // 2)


def _again(forward):
    def run(*arguments: Tensor) -> Tensor:
        contexts = torch.enable_grad(), phase("recompute")
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=lambda: contexts)

    return run


def test_recomputed_layers_are_hardware_flops_only():
    layer = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.ones(6, 8, requires_grad=True)
    with recorder() as recorded:
        with phase("forward"):
            out = _again(layer.forward)(x)
        with phase("backward"):
            out.sum().backward()
    product = 2 * 6 * 8 * 32
    # The last product's result is needed by nobody: recomputation stops before it.
    assert recorded.computes == Computes(forward=2 * product, backward=4 * product, recompute=product)
    assert recorded.computes.model == 6 * product


def test_formula():
    assert attention_flops(1, 1, 10, 10, 1) == 4 * 50
    assert attention_flops(1, 1, 10, 10, 1, window=10) == 4 * 50
    assert attention_flops(1, 1, 10, 10, 1, window=4) == 4 * (40 - 8)
    assert attention_flops(3, 2, 10, 10, 7, window=4) == 42 * attention_flops(1, 1, 10, 10, 1, window=4)


def test_fake_tensors_count_the_same():
    with torch._subclasses.FakeTensorMode():
        fake = attend("flash", torch.float32, HEADS, None)
    assert fake == attend("flash", torch.float32, HEADS, None)
