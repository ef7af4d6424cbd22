"""Random small jobs: shapes, layouts, precisions, optimizers, schedules in any mixture that can be trained."""

from __future__ import annotations

import random
from typing import Any, get_args

from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout import LOOPED_SCHEDULES, Schedule


def random_job(seed: int) -> Job:
    """The first legal job that the seed draws; all of its numbers small."""
    draw = random.Random(seed)
    while True:
        try:
            return job_from_values(_values(draw)).resolve()
        except InputError:
            continue


def random_rank(job: Job, seed: int) -> int:
    """One of its ranks."""
    return random.Random(seed).randrange(job.layout.ranks)


def _values(draw: random.Random) -> dict[str, Any]:
    tp, pp, dp = draw.choice((1, 1, 2, 3, 4)), draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3, 4, 6, 8))
    adamw = draw.random() < 0.6
    return {
        "model": _model(draw, tp, pp),
        "data": {"train": ["unused.txt"], "sequence_length": draw.choice((4, 8, 12))},
        "batch": {"global_size": draw.choice((4, 8, 12, 16, 24))},
        "optimizer": {"name": "adamw"} if adamw else {"name": "sgd", "momentum": draw.choice((0.0, 0.9))},
        "train": {"deterministic": draw.random() < 0.3},
        "precision": {"dtype": draw.choice(("float64", "float32", "bfloat16", "float16"))},
        "memory": {"bucket_bytes": draw.choice((1 << 8, 1 << 11, 1 << 13, 1 << 16, 1 << 22))},
        "layout": _layout(draw, tp, pp, dp),
    }


def _layout(draw: random.Random, tp: int, pp: int, dp: int) -> str:
    zero = draw.randrange(4)
    words = [f"dp={dp} tp={tp} pp={pp} zero={zero} micro_batch={draw.choice((1, 2, 3, 4))}"]
    words.append(f"recompute={draw.choice(('none', 'none', 'selective', 'full'))}")
    if zero:
        words.append(f"shard={draw.choice([degree for degree in range(1, dp + 1) if dp % degree == 0])}")
    if pp > 1:
        schedule = draw.choice(get_args(Schedule))
        words.append(f"schedule={schedule}")
        if schedule in LOOPED_SCHEDULES:
            words.append(f"virtual={draw.choice((1, 2))}")
    return " ".join(words)


def _model(draw: random.Random, tp: int, pp: int) -> dict[str, Any]:
    kv_heads = tp * draw.choice((1, 2))

    def now_and_then() -> bool:
        return draw.random() < 0.5

    return {
        "vocabulary": draw.randint(5, 300),
        "hidden": 8 * draw.randint(1, 9),
        "head_size": 2 * draw.randint(1, 8),
        "layers": draw.randint(2, 4) if pp == 1 else draw.randint(2 * pp, 2 * pp + 1),
        "heads": kv_heads * draw.choice((1, 2)),
        "kv_heads": kv_heads,
        "ffn_hidden": tp * draw.randint(1, 40),
        "max_positions": 64,
        "positions": draw.choice(("learned", "rope")),
        "norm": draw.choice(("layernorm", "rmsnorm")),
        "gated": now_and_then(),
        "qkv_bias": now_and_then(),
        "output_bias": now_and_then(),
        "mlp_bias": now_and_then(),
        "qk_norm": draw.random() < 0.3,
        "tied": now_and_then(),
        "dropout": draw.choice((0.0, 0.0, 0.1)),
        "attention_dropout": draw.choice((0.0, 0.0, 0.1)),
    }
