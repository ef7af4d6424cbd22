"""The loss: one denominator, ignored labels, padded vocabulary, split vocabulary, narrow types."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.cross_entropy import cross_entropy_sum
from meshwright.model.partition import Partition

TOKENS, HIDDEN, VOCABULARY = 700, 12, 97


def problem(dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    labels[::7] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def reference(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x.detach().double(), weight.detach().double()).requires_grad_()
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / 123.0
    loss.backward()
    return loss.detach(), logits.grad @ weight.detach().double(), logits.grad.T @ x.detach().double()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("vocabulary", [1, 2, VOCABULARY, 3000])
def test_value_and_gradients(dtype: torch.dtype, bound: float, vocabulary: int) -> None:
    x, weight, labels = problem(dtype, vocabulary)
    loss = Partition().loss(x, weight, labels, 123.0)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    expected = reference(x, weight, labels)
    for found, wanted in zip((loss, x.grad, weight.grad), expected, strict=True):
        assert (found.double() - wanted).abs().max() <= bound * max(float(wanted.abs().max()), 1e-2)
    assert (x.grad[::7] == 0).all()


def test_the_chunk_changes_no_bit() -> None:
    """What is worked on at a time depends on the device, and must not show."""
    found = []
    for elements in (1, 5 * VOCABULARY, 1 << 25):
        x, weight, labels = problem(torch.bfloat16)
        partition = Partition()
        partition.loss_chunk = elements
        loss = partition.loss(x, weight, labels, 123.0)
        loss.backward()
        found.append((loss.detach(), x.grad, weight.grad))
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))


def test_divisor_may_be_a_tensor_and_the_gradient_scales() -> None:
    x, weight, labels = problem()
    (Partition().loss(x, weight, labels, torch.tensor(123.0, dtype=torch.float64)) * 1024.0).backward()
    expected = reference(x, weight, labels)
    assert (x.grad / 1024 - expected[1]).abs().max() < 1e-14


def test_float16_gradients_survive_scaling() -> None:
    x, weight, labels = problem(torch.float16)
    scale = 2.0**16
    (Partition().loss(x, weight, labels, 1e6) * scale).backward()
    expected = reference(x, weight, labels)[1] * 123 / 1e6 * scale
    assert (x.grad.double() - expected).abs().max() <= 3e-3 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_confident_tokens_keep_their_gradient(dtype: torch.dtype) -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    cross_entropy_sum(logits.clone(), torch.tensor([0]), 1.0).backward()
    p = torch.softmax(logits.detach().double(), 1)
    expected = p - torch.tensor([[1.0, 0.0, 0.0]])
    assert ((logits.grad - expected) / expected).abs().max() < 0.01


def test_all_labels_ignored_is_zero_and_has_zero_gradients() -> None:
    x, weight, labels = problem()
    loss = Partition().loss(x, weight, torch.full_like(labels, -100), 1.0)
    loss.backward()
    assert loss == 0 and (x.grad == 0).all() and (weight.grad == 0).all()


@pytest.mark.parametrize("fill", [0.0, 50.0])
def test_padded_vocabulary_rows_never_win(fill: float) -> None:
    x, weight, labels = problem()
    expected = reference(x, weight, labels)
    padded = torch.cat([weight.detach(), torch.full((3, HIDDEN), fill, dtype=torch.float64)]).requires_grad_()
    partition = Partition()
    partition.vocabulary = VOCABULARY
    loss = partition.loss(x, padded, labels, 123.0)
    loss.backward()
    assert abs(loss - expected[0]) < 1e-13
    assert (x.grad - expected[1]).abs().max() < 1e-13
    assert (padded.grad[:VOCABULARY] - expected[2]).abs().max() < 1e-13
    assert (padded.grad[VOCABULARY:] == 0).all()
    logits = partition.logits(x, padded)
    assert logits.shape == (TOKENS, VOCABULARY)
    assert (logits - Partition().logits(x, weight)).abs().max() < 1e-13


def test_two_micro_batches_of_unequal_length_are_one_batch() -> None:
    x, weight, _ = problem()
    labels = torch.full((TOKENS,), -100)
    labels[:10], labels[350:450] = 3, 5  # 10 and 100 counted tokens
    whole = Partition().loss(x, weight, labels, 110)
    whole.backward()
    expected = weight.grad.clone()
    weight.grad = None
    total = 0.0
    for part in (slice(0, 350), slice(350, TOKENS)):
        loss = Partition().loss(x[part].detach(), weight, labels[part], 110)
        loss.backward()
        total += loss.item()
    assert abs(total - whole.item()) < 1e-14
    assert (weight.grad - expected).abs().max() < 1e-15


def test_bits_do_not_depend_on_the_rows_beside() -> None:
    x, weight, labels = problem(torch.float32)
    logits = F.linear(x, weight).detach()
    whole, part = logits.clone().requires_grad_(), logits[100:200].clone().requires_grad_()
    cross_entropy_sum(whole.clone(), labels, 7.0).backward()
    cross_entropy_sum(part.clone(), labels[100:200], 7.0).backward()
    assert torch.equal(whole.grad[100:200], part.grad)


def test_split_vocabulary_is_the_whole() -> None:
    """Each rank's columns, with the two reductions done by hand over all of them."""
    x, weight, labels = problem()
    logits = F.linear(x, weight).detach()
    chunk = 25  # 97 = 25 + 25 + 25 + 22; the last rank has three padding columns
    padded = F.pad(logits, (0, 3), value=7.0)
    pieces = [padded[:, start : start + chunk].clone().requires_grad_() for start in range(0, 100, chunk)]
    largest = logits.amax(1)
    sums = torch.stack([(logits - largest[:, None]).exp().sum(1), torch.zeros(TOKENS, dtype=torch.float64)])
    safe = labels.clamp(min=0)
    sums[1] = logits.gather(1, safe[:, None])[:, 0] - largest
    loss = torch.tensor(0.0)
    for rank, piece in enumerate(pieces):
        loss = cross_entropy_sum(
            piece.clone(), labels, 123.0, vocabulary=VOCABULARY, first_row=rank * chunk,
            reduce_max=lambda local: largest, reduce_sum=lambda local: sums,
        )  # fmt: skip
        loss.backward()
    expected, _, expected_weight = reference(x, weight, labels)
    assert abs(loss - expected) < 1e-13
    gradient = torch.cat([piece.grad for piece in pieces], 1)
    assert (gradient[:, VOCABULARY:] == 0).all()
    assert (gradient[:, :VOCABULARY].T @ x.detach() - expected_weight).abs().max() < 1e-13


def test_the_loss_buffer_cannot_be_used_twice() -> None:
    x, weight, labels = problem()
    loss = Partition().loss(x, weight, labels, 1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()
