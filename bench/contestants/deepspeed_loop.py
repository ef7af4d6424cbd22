"""DeepSpeed: ZeRO 0 and 3 on its CPU accelerator, with the same AdamW as the others."""

from __future__ import annotations

import torch.distributed as dist

from bench.contestants import Step
from bench.contestants.torch_loops import adamw
from bench.plain_llama import PlainLlama, token_loss
from bench.workload import Workload


def build(work: Workload, variant: str) -> Step:
    """``variant`` is the ZeRO stage."""
    import deepspeed

    ranks = dist.get_world_size()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module = PlainLlama(work)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw(work, module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": work.batch // ranks,
            "train_batch_size": work.batch,
            "gradient_clipping": 0.0,  # its default is 1.0; nobody else clips here
            "zero_optimization": {"stage": int(variant)},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": work.dtype == "bfloat16"},
            "steps_per_print": 10**9,
        },
    )

    def step(number: int) -> float:
        tokens, labels = work.share(number, dist.get_rank(), ranks)
        loss = token_loss(engine(tokens), labels)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step
