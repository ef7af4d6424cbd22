"""What is held, by hand: activations, what recomputation holds, buffers emptied in place, what was there before."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.comm.phase import phase
from meshwright.comm.record import TrafficRecorder
from meshwright.ledger.ledger import Stores

ROWS, WIDTH, INNER = 50, 40, 120


def recorder() -> TrafficRecorder:
    return TrafficRecorder(lambda _group: "x")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, INNER, bias=False)
        self.outer = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.silu(self.inner(x)))


def again(layer: Layer, x: Tensor) -> Tensor:
    contexts = torch.enable_grad(), phase("recompute")
    return checkpoint(layer, x, use_reentrant=False, context_fn=lambda: contexts)


def step(layers: int, *, recompute: bool = False, gradients: bool = True) -> Stores:
    modules = [Layer() for _ in range(layers)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    if gradients:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    x = torch.ones(ROWS, WIDTH)
    recorded = recorder()
    recorded.register(parameters, "parameters")
    recorded.register([parameter.grad for parameter in parameters if parameter.grad is not None], "gradients")
    with recorded:
        with phase("forward"):
            hidden = x
            for module in modules:
                hidden = again(module, hidden) if recompute else module(hidden)
            loss = hidden.sum()
        del hidden
        with phase("backward"):
            loss.backward()
    return recorded.stores


LAYER_STATE = 2 * WIDTH * INNER * 4
HIDDEN, INSIDE = ROWS * WIDTH * 4, ROWS * INNER * 4


@pytest.mark.parametrize("layers", [1, 3])
def test_activations_are_what_forward_leaves_for_backward(layers):
    stores = step(layers)
    assert stores.parameters == layers * LAYER_STATE
    assert stores.gradients == layers * LAYER_STATE
    assert stores.optimizer == 0
    # Of each layer: both sides of the nonlinearity; its input, which is the output of the one before; the loss.
    # The first input is not the step's own: it was there before.
    assert stores.activations == layers * 2 * INSIDE + (layers - 1) * HIDDEN + 4
    assert sum(stores.at_peak.values()) == stores.peak
    assert stores.peak > stores.state + stores.activations


def test_recomputation_holds_one_layer_at_a_time():
    # A layer's input each, the loss, and while one layer is computed again, its insides.
    assert step(3, recompute=True).activations == 2 * HIDDEN + 2 * INSIDE + 4
    assert step(6, recompute=True).activations == 5 * HIDDEN + 2 * INSIDE + 4
    assert step(6).activations == 6 * 2 * INSIDE + 5 * HIDDEN + 4


def test_gradients_that_appear_in_backward_and_stay():
    assert step(2, gradients=False).gradients == 2 * LAYER_STATE


def test_fake_tensors_hold_the_same():
    real = [step(3), step(3, recompute=True), step(2, gradients=False)]
    with torch._subclasses.FakeTensorMode():
        fake = [step(3), step(3, recompute=True), step(2, gradients=False)]
    assert fake == real


def test_whole_storages_once():
    """Views share a storage; padding behind them counts."""
    flat = torch.zeros(1000)
    recorded = recorder()
    recorded.register([flat[:10], flat[500:600]], "parameters")
    recorded.register([flat[20:30]], "gradients")
    with recorded, phase("forward"):
        flat[:10].add_(1)
    assert (recorded.stores.parameters, recorded.stores.gradients) == (4000, 0)
    assert recorded.stores.peak == 4000


def test_storages_emptied_and_filled_in_place():
    gathered = torch.zeros(1000)
    gathered.untyped_storage().resize_(0)
    known = torch.zeros(500)
    known.untyped_storage().resize_(0)
    recorded = recorder()
    recorded.register([known], "parameters")
    with recorded:
        gathered.untyped_storage().resize_(4000)
        gathered.untyped_storage().resize_(0)
        known.untyped_storage().resize_(2000)
        gathered.untyped_storage().resize_(4000)
    assert recorded.stores.temporary == 4000
    assert recorded.stores.parameters == 2000
    assert recorded.stores.peak == 6000
    assert recorded.stores.at_peak["parameters"] == 2000
    assert torch.UntypedStorage.resize_.__qualname__ != "_watched_resize.<locals>.resize_"


def test_what_was_there_before_the_step_is_not_made_by_it():
    scratch, total = torch.zeros(100), torch.zeros(100)
    with recorder() as recorded, phase("forward"):
        scratch.mul_(2)
        view = scratch[5:]
        torch.add(scratch, 1, out=total)
    assert recorded.stores.activations == 0
    assert recorded.stores.temporary == 800
    del view


def test_what_the_optimizer_makes_and_keeps():
    with recorder() as recorded, phase("optimizer"):
        moment = torch.zeros(64)
        moment.add_(torch.ones(64))
    assert (recorded.stores.optimizer, recorded.stores.temporary) == (256, 256)


def test_collection_of_cycles_waits_for_the_end():
    assert gc.isenabled()
    with recorder():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), recorder():
        _ = 1 / 0
    assert gc.isenabled()
