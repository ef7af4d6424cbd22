"""What the program itself costs on one core: whole training steps of small models, by phase.

Matrix products and attention are known by themselves (``calibrate_kernels``); what a step takes beyond them is
streaming, Python, gradients and the update, and shapes that differ in all of these tell them apart
(``calibrate_fit``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_gather, barrier, reduce_scatter
from meshwright.comm.mesh import Mesh
from meshwright.comm.timeline import Timeline
from meshwright.data.batch import Batch
from meshwright.job.job import Job, job_from_values
from meshwright.prove.stopwatch import core_clock
from meshwright.train.trainer import Trainer


@dataclass(frozen=True)
class Shape:
    """One small model and how its step is cut."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocabulary: int
    sequence: int
    micro_batch: int
    micro_batches: int
    gpt: bool = False
    """GPT-2's layers instead of Llama's."""
    zero: int = 0
    dtype: str = "float32"


SHAPES: tuple[Shape, ...] = (
    Shape(64, 1, 2, 128, 256, 32, 1, 1),
    Shape(64, 6, 2, 128, 256, 32, 1, 2),
    Shape(64, 4, 4, 192, 256, 128, 4, 1),
    Shape(128, 3, 4, 512, 512, 128, 2, 2),
    Shape(256, 2, 4, 512, 256, 64, 1, 2),
    Shape(256, 2, 8, 768, 1024, 256, 2, 1),
    Shape(384, 3, 6, 1024, 512, 128, 1, 1),
    Shape(128, 1, 2, 256, 8192, 128, 1, 2),
    Shape(192, 1, 3, 512, 4096, 256, 1, 1),
    Shape(512, 2, 8, 1024, 1024, 64, 1, 1),
    Shape(512, 4, 8, 1536, 512, 16, 1, 2),
    Shape(96, 3, 3, 256, 256, 128, 8, 1),
    Shape(160, 2, 5, 512, 1024, 256, 4, 1),
    Shape(128, 3, 4, 512, 512, 128, 2, 1, gpt=True),
    Shape(256, 2, 4, 1024, 1024, 128, 2, 1, gpt=True),
)
"""Every term of the time model dominates in one of them."""


@dataclass(frozen=True)
class Phases:
    """Median seconds of one step on one core."""

    shape: Shape
    forward: float
    backward: float
    optimizer: float
    """The update; clipping, norm and agreement are in ``other``."""
    other: float
    spread: float
    """Quartiles of the whole step, over its median."""

    @property
    def step(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.optimizer + self.other


SHARDED: tuple[Shape, ...] = (
    Shape(64, 8, 2, 128, 256, 32, 1, 1),
    Shape(64, 8, 2, 128, 256, 32, 1, 3),
    Shape(512, 2, 8, 1536, 512, 32, 1, 1),
    Shape(512, 3, 8, 1024, 2048, 16, 1, 2),
    Shape(256, 4, 4, 768, 512, 32, 1, 2),
)
"""Little to compute, so that what ZeRO-3 adds shows."""


SPLIT: tuple[Shape, ...] = (
    Shape(64, 8, 2, 128, 256, 32, 1, 1),
    Shape(128, 4, 4, 384, 512, 128, 2, 1),
    Shape(256, 3, 4, 768, 512, 128, 1, 1),
)
"""For tensor parallelism on two ranks."""


def program_job(shape: Shape, layout: dict[str, Any] | None = None) -> Job:
    """The shape as a job; ``layout`` absent: one rank."""
    family = (
        {"positions": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated": False, "tied": True}
        if shape.gpt
        else {}
    )
    return job_from_values(
        {
            "model": {
                "vocabulary": shape.vocabulary,
                "hidden": shape.hidden,
                "layers": shape.layers,
                "heads": shape.heads,
                "ffn_hidden": shape.ffn,
                "max_positions": shape.sequence,
                **family,
            },
            "data": {"sequence_length": shape.sequence, "train": "made up as we go"},
            "batch": {"global_size": shape.micro_batch * shape.micro_batches * (layout or {}).get("dp", 1)},
            "optimizer": {"name": "adamw", "clip_norm": 1.0},
            "precision": {"dtype": shape.dtype},
            "layout": {"micro_batch": shape.micro_batch, **(layout or {})},
            "cluster": {"device": "cpu"},
        }
    ).resolve()


def made_up_batches(job: Job, dp_rank: int, dp: int) -> list[Batch]:
    """This rank's micro-batches of random tokens."""
    rows, sequence = job.layout.micro_batch or 1, job.data.sequence_length
    size = job.batch.global_size
    ids = torch.randint(0, job.model_spec.vocabulary, (size, sequence + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(sequence).expand(rows, sequence)
    return [
        Batch(
            tokens=ids[start : start + rows, :-1].contiguous(),
            labels=ids[start : start + rows, 1:].contiguous(),
            positions=positions,
            documents=None,
            examples=torch.arange(start, start + rows),
        )
        for start in range(dp_rank * rows, size, dp * rows)
    ]


def measure_program(shapes: tuple[Shape, ...], rounds: int) -> list[Phases]:
    """Steps of every shape, interleaved, by phase; runs on a rank that is alone in its group."""
    runs = []
    for shape in shapes:
        job = program_job(shape)
        mesh = Mesh(job.layout)
        runs.append((shape, mesh, Trainer(job, mesh), made_up_batches(job, 0, 1)))
    samples: list[list[dict[str, float]]] = [[] for _ in runs]
    for turn in range(rounds + 2):
        for index, (_, mesh, trainer, batches) in enumerate(runs):
            parts = _one_step(mesh, trainer, batches)
            if turn >= 2:
                samples[index].append(parts)
    for _, mesh, _, _ in runs:
        mesh.close()
    return [_phases(shape, parts) for (shape, *_), parts in zip(runs, samples, strict=True)]


def _one_step(mesh: Mesh, trainer: Trainer, batches: list[Batch]) -> dict[str, float]:
    timeline = Timeline(mesh.axis_of, clock=core_clock)
    timeline.start()
    trainer.step(batches)
    timeline.stop()
    parts = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "other": 0.0}
    for (kind, detail), seconds in timeline.seconds.items():
        parts[detail if kind == "compute" and detail in parts else "other"] += seconds
    return parts


def _phases(shape: Shape, parts: list[dict[str, float]]) -> Phases:
    steps = [sum(one.values()) for one in parts]
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
    medians = {name: statistics.median(one[name] for one in parts) for name in parts[0]}
    return Phases(shape, **medians, spread=(high - low) / middle)


def step_times(job: Job, steps: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Runs on every rank of a job's layout: seconds of each step on made-up tokens, after two that set things up."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        batches = made_up_batches(job, mesh.coordinate("dp"), mesh.degree("dp"))
        times = []
        for _ in range(2 + steps):
            barrier(mesh.group("world"))
            began = clock()
            trainer.step(batches)
            times.append(clock() - began)
    return times[2:]


@dataclass(frozen=True)
class Sharding:
    """What sharding adds to one step of a shape, seconds of this rank's core."""

    shape: Shape
    extra: float


def measure_sharding(shapes: tuple[Shape, ...], rounds: int) -> list[Sharding]:
    """ZeRO-3 against plain replicas; every rank of the group must call it.

    What a rank's own thread computes is counted, so hooks and copies, not the transfers on the transport's threads.
    """
    result = []
    for shape in shapes:
        seconds: dict[int, list[float]] = {0: [], 3: []}
        for _ in range(rounds):
            for zero, samples in seconds.items():
                job = program_job(shape, {"dp": dist.get_world_size(), "zero": zero})
                samples += step_times(job, 3, core_clock)
        extra = statistics.median(seconds[3]) - statistics.median(seconds[0])
        result.append(Sharding(shape, max(0.0, extra)))
    return result


@dataclass(frozen=True)
class Split:
    """One step of a shape under ``tp=2``, seconds of this rank's core, its collectives taken off."""

    shape: Shape
    seconds: float
    collectives: int
    """How many it called."""


def measure_split(shapes: tuple[Shape, ...], rounds: int) -> list[Split]:
    """Tensor parallelism on the two ranks of the group; every one of them must call it."""
    result = []
    for shape in shapes:
        job = program_job(shape, {"tp": 2})
        steps = [statistics.median(step_times(job, 3, core_clock)) for _ in range(rounds)]
        gathers, scatters = 6 * shape.layers + 3, 4 * shape.layers + 2
        elements = shape.micro_batch * shape.sequence * shape.hidden
        with Mesh(job.layout) as mesh:
            gather, scatter = _collective_seconds(mesh, elements)
        alone = shape.micro_batches * (gathers * gather + scatters * scatter)
        calls = shape.micro_batches * (gathers + scatters)
        result.append(Split(shape, max(0.0, statistics.median(steps) - alone), calls))
    return result


def _collective_seconds(mesh: Mesh, elements: int) -> tuple[float, float]:
    """Of this rank's core: one all-gather and one reduce-scatter of a float32 activation along tp."""
    group = mesh.group("tp")
    whole, part = torch.zeros(elements), torch.zeros(elements // group.size())
    calls: tuple[Callable[[], object], ...] = (
        lambda: all_gather(whole, part, group),
        lambda: reduce_scatter(part, whole, group),
    )
    seconds = []
    for call in calls:
        samples = []
        for _ in range(20):
            began = core_clock()
            call()
            samples.append(core_clock() - began)
        seconds.append(statistics.median(samples))
    return seconds[0], seconds[1]
