"""Activation recomputation: forget what backward needs, and compute it again when it does.

    policy       kept per layer and token, besides the block's input       computed again
    none         everything                                                nothing
    selective    all but the insides of the attention core                 rotation, scores, softmax (no parameters,
                                                                           few FLOPs, most of the memory)
    full         nothing                                                   the whole layer: a third more FLOPs

Chen et al. 2016; the selective policy is Korthikanti et al. 2022. By ``torch.utils.checkpoint`` without reentrant
autograd. Exact to the last bit: the same operators run again, and dropout draws from counters, not from a generator,
so no random state is kept. With tensor parallelism the recomputed layer communicates again, on all ranks alike. With
FSDP2 the wrapped part lies inside the sharded module, so its parameters are whole when backward recomputes.

A schedule that splits backward would recompute a layer once for the input part and once more for each parameter of
the weight part; where a recomputed part holds parameters the pipeline takes both parts together instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.comm.phase import phase
from meshwright.job.layout import Recompute
from meshwright.model.attention import AttentionCore
from meshwright.model.transformer import Block, StageModel

_WRAPPED: dict[Recompute, type[nn.Module] | None] = {"none": None, "selective": AttentionCore, "full": Block}


def apply_recompute(stage_model: StageModel, policy: Recompute) -> None:
    """Make ``stage_model`` recompute its attention cores (``selective``) or its layers (``full``) in backward.

    Parameter names, values and results stay as they are. Call it before ``fully_shard``, once.
    """
    wrapped = _WRAPPED[policy]
    if wrapped is None:
        return
    for module in stage_model.modules():
        if isinstance(module, wrapped):
            # On the instance: a wrapper module would change the names of the parameters below it.
            module.forward = partial(_recomputed, module.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(
        forward, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts, **options
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward and around the second: the second is recorded as ``recompute``."""
    return nullcontext(), phase("recompute")
