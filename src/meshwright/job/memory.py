"""Bytes of parameters, gradients and optimizer state that each pipeline rank must hold at least."""

from __future__ import annotations

import math

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.model_spec import ModelSpec

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""

_SPLIT_ROWS = ("attention.q.", "attention.k.", "attention.v.", ".gate.", ".up.")
_SPLIT_COLUMNS = ("attention.output.weight", ".down.weight")


def local_elements(name: str, shape: tuple[int, ...], tp: int) -> int:
    """Elements of one parameter on a tensor-parallel rank (the fullest, padding of the vocabulary counted)."""
    if name in ("embedding.weight", "head.weight"):
        return -(-shape[0] // tp) * shape[1]
    split = any(part in name for part in _SPLIT_ROWS) or name.endswith(_SPLIT_COLUMNS)
    return math.prod(shape) // (tp if split else 1)


def pipeline_rank_elements(spec: ModelSpec, layout: Layout) -> list[int]:
    """Parameters on one rank of each pipeline rank, before sharding over dp.

    A tied model whose first and last stage are apart holds the embedding in both.
    """
    stages = layout.stage_layers(spec.layers)
    elements = []
    for stage, layers in enumerate(stages):
        parameters = [parameter for layer in layers for parameter in spec.layer_parameters(layer)]
        if stage == 0:
            parameters += spec.embedding_parameters()
        if stage == len(stages) - 1:
            parameters += spec.head_parameters()
            if spec.tied and len(stages) > 1:
                parameters.append(("embedding.weight", (spec.vocabulary, spec.hidden)))
        elements.append(sum(local_elements(name, shape, layout.tp) for name, shape in parameters))
    return [sum(elements[stage] for stage in layout.stages_of(rank)) for rank in range(layout.pp)]


def model_state_bytes(job: Job) -> list[int]:
    """Bytes of parameters, gradients and optimizer state on one rank of each pipeline rank.

    ZeRO (Rajbhandari et al., SC20): stage 1 shards the optimizer state, 2 also gradients, 3 also
    parameters. 16-bit types keep float32 masters and gradients. Where steps overlap all but the moments is there
    twice (zero=0 and 1).
    """
    layout, optimizer = job.layout, job.optimizer
    parameter = DTYPE_BYTES[job.precision.dtype]
    wide = max(parameter, 4)
    moments = 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)
    versions = layout.versions
    state = moments * wide + (versions * wide if parameter < wide else 0)
    totals = []
    for elements in pipeline_rank_elements(job.model_spec, layout):
        shard = -(-elements // layout.shard_degree)
        totals.append(
            versions * parameter * (shard if layout.zero >= 3 else elements)
            + versions * wide * (shard if layout.zero >= 2 else elements)
            + state * (shard if layout.zero >= 1 else elements)
        )
    return totals


def check_memory(job: Job, bytes_available: int, where: str = "cluster.memory_per_rank_bytes") -> None:
    """Refuse a job whose model state alone is more than a rank has.

    Args:
        job: with the layout that will run.
        bytes_available: for one rank.
        where: who says how many bytes there are, for the message.

    Raises:
        InputError: the bytes needed and there.
    """
    problem = memory_problem(job, bytes_available, where)
    if problem:
        raise InputError(problem)


def memory_problem(job: Job, bytes_available: int, where: str) -> str | None:
    """The sentence of :func:`check_memory`, or None when the state fits."""
    needed = model_state_bytes(job)
    most = max(needed)
    if most <= bytes_available:
        return None
    place = f"a rank of pipeline rank {needed.index(most)}" if len(needed) > 1 else "each rank"
    return (
        f"{where}: {bytes_available:,} bytes a rank, but parameters, gradients and optimizer state of {place} are "
        f"{most:,} bytes under layout {job.layout}, before activations; use more ranks (tp, pp), a higher zero with "
        "more dp, or a smaller model"
    )
