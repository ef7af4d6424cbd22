"""ZeRO-2 and ZeRO-3 under schedules that part the backward pass into input and weight gradients.

FSDP2 lives in autograd hooks: a hook on a module's output gathers its parameters, a hook on its input
takes the gradients, reduces them and frees the parameters. In a split backward pass the second hook runs at
the end of the *input* part, when no weight gradient exists yet, and the weight part runs no hook that could
be relied on. Left alone, gradients come out missing or wrong without a word. So here:

    input part    parameters whole and registered (autograd's graph must end in them); hooks neither reduce nor free
    weight part   the same; then this file does what the input hook would have done

Parameters must also not be freed by a forward pass in between, so the stage's modules keep them after forward
(``reshard_after_forward=False``): whole from the first forward of a step to its last weight part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule, fully_shard


@contextmanager
def input_part(module: FSDPModule) -> Iterator[None]:
    """Surround the input part of a backward pass through ``module``, the root of a sharded stage."""
    _hold(module)
    yield


@contextmanager
def weight_part(module: FSDPModule, *, reduce: bool) -> Iterator[None]:
    """Surround the weight part; afterwards gradients are accumulated, and with ``reduce`` reduced and parameters freed.

    Args:
        module: the root of a sharded stage.
        reduce: this was the stage's last gradient of the step (or every gradient is reduced at once).
    """
    _hold(module)
    yield
    _set(module, last=reduce)
    root = fully_shard.state(module)  # type: ignore[attr-defined]
    for state in reversed(root._state_ctx.all_states):
        for group in reversed(state._fsdp_param_groups):
            group.post_backward()
    root._root_post_backward_final_callback()


def _hold(module: FSDPModule) -> None:
    _set(module, last=False)
    for part in module.modules():  # type: ignore[attr-defined]
        if isinstance(part, FSDPModule):
            part.unshard()


def _set(module: FSDPModule, *, last: bool) -> None:
    module.set_is_last_backward(last)
    module.set_requires_gradient_sync(last)
    module.set_reshard_after_backward(last)
