"""How the work is split over ranks: the degrees, the pipeline schedule, recomputation, placement."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

Schedule = Literal["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev", "2bw"]
Recompute = Literal["none", "selective", "full"]
_Counts = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]
_Policies = Annotated[tuple[Recompute, ...], Field(strict=False)]

LOOPED_SCHEDULES: frozenset[str] = frozenset({"interleaved", "looped-bfs", "zero-bubble"})
"""Stage ``s`` is on pipeline rank ``s % pp``; any number of virtual stages."""
V_SCHEDULES: frozenset[str] = frozenset({"zbv", "dualpipev"})
"""Two virtual stages, folded back: stage ``s`` and stage ``2 * pp - 1 - s`` share a rank."""
SPLIT_BACKWARD_SCHEDULES: frozenset[str] = frozenset({"zero-bubble", "zbv", "dualpipev"})
"""Schedules that run input and weight gradients apart."""
DELAYED_SCHEDULES: frozenset[str] = frozenset({"2bw"})
"""Schedules that do not end with the step: gradients are taken at the parameters of one update before."""


class Layout(BaseModel):
    """One way to spread a job. Ranks = ``pp * dp * tp``; ``dp = replicas * shard``.

    The rank grid is ``[pp, replicate, shard, tp]`` in row-major order; ``placement`` lists which
    global rank stands at each grid position (identity when absent).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dp: PositiveInt = 1
    """Data-parallel ranks: each computes other sequences of the global batch."""
    shard: PositiveInt | None = None
    """How many of the dp ranks share one copy of the sharded state; absent: all of them."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the dp ranks share out: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    tp: PositiveInt = 1
    """Ranks that split every matrix, with sequence parallel between the matrices."""
    pp: PositiveInt = 1
    """Ranks that hold consecutive layers."""
    cp: PositiveInt = 1
    """Ranks that split a sequence; not built yet, so 1."""
    ep: PositiveInt = 1
    """Ranks that share out experts; not built yet, so 1."""
    schedule: Schedule = "1f1b"
    """In which order a pipeline rank runs forward and backward of micro-batches."""
    virtual: PositiveInt | None = None
    """Stages per pipeline rank; absent: 1, or 2 for the looped and V schedules."""
    micro_batch: PositiveInt | None = None
    """Sequences per micro-batch and dp rank; absent: chosen by ``Job.resolve``."""
    recompute: Recompute | _Policies = "none"
    """One policy, or one per pipeline stage."""
    stages: _Counts | None = None
    """Layers of each pipeline stage, in stage order; absent: as even as possible."""
    placement: _Counts | None = None
    """Which global rank stands at each grid position, in row-major order; absent: their own order."""

    @property
    def ranks(self) -> int:
        """How many ranks (devices) the layout takes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shard_degree(self) -> int:
        """Ranks over which sharded state (zero >= 1) is spread."""
        return self.dp if self.shard is None else self.shard

    @property
    def replicas(self) -> int:
        """Copies of the sharded state: ``dp / shard``."""
        return self.dp // self.shard_degree

    @property
    def virtual_stages(self) -> int:
        """Stages on each pipeline rank."""
        if self.virtual is not None:
            return self.virtual
        if self.pp > 1 and (self.schedule in LOOPED_SCHEDULES or self.schedule in V_SCHEDULES):
            return 2
        return 1

    @property
    def delayed(self) -> bool:
        """Whether steps overlap, so that every gradient is one update late."""
        return self.pp > 1 and self.schedule in DELAYED_SCHEDULES

    @property
    def versions(self) -> int:
        """How often a rank holds its parameters and their gradients: twice where steps overlap."""
        return 2 if self.delayed else 1

    @property
    def stage_count(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.virtual_stages if self.pp > 1 else 1

    def stage_layers(self, layers: int) -> tuple[range, ...]:
        """Which layers each stage holds, in stage order; earlier stages take the remainder.

        Every layer of ``range(layers)`` is in exactly one stage.
        """
        if self.stages is not None:
            counts: tuple[int, ...] = self.stages
        else:
            base, extra = divmod(layers, self.stage_count)
            counts = tuple(base + (stage < extra) for stage in range(self.stage_count))
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stage numbers that pipeline rank ``pp_rank`` holds, in increasing order."""
        if self.pp > 1 and self.schedule in V_SCHEDULES:
            return (pp_rank, 2 * self.pp - 1 - pp_rank)
        return tuple(range(pp_rank, self.stage_count, self.pp))

    def stage_recompute(self, stage: int) -> Recompute:
        """The recompute policy of one stage."""
        return self.recompute if isinstance(self.recompute, str) else self.recompute[stage]

    def __str__(self) -> str:
        """The short form that ``--layout`` reads back: ``dp=2 tp=2 pp=2 zero=1``."""
        from meshwright.job.layout_text import format_layout

        return format_layout(self)
