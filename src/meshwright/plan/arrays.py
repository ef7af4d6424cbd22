"""Many layouts of one training step at once: the work, the layouts as columns, and what each costs.

``Work`` is what has to be done, whatever the layout. ``Layouts`` holds one array a field, entry ``i`` of all of
them being layout ``i``; ``Evaluation`` holds the answers in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.job.grid import GRID_AXES
from meshwright.job.job import Job
from meshwright.job.layout import Layout, Recompute, Schedule
from meshwright.job.model_spec import ModelSpec
from meshwright.job.sync_section import SyncSection

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SCHEDULES: tuple[Schedule, ...] = (
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev", "2bw",
)  # fmt: skip
"""``Layouts.schedule`` counts in this order."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""``Layouts.recompute`` counts in this order."""
ORDERS: tuple[tuple[str, str, str, str], ...] = (
    ("tp", "shard", "replicate", "pp"),
    ("tp", "pp", "shard", "replicate"),
    ("shard", "tp", "replicate", "pp"),
    ("shard", "replicate", "tp", "pp"),
    ("pp", "tp", "shard", "replicate"),
    ("tp", "replicate", "shard", "pp"),
)
"""``Layouts.order``: which axis runs fastest over the devices of a node, fastest first; 0 is the ranks' own order."""

Dtype = Literal["bfloat16", "float16", "float32", "float64"]


@dataclass(frozen=True)
class Work:
    """One training step of one model, whatever the layout."""

    spec: ModelSpec
    sequence: int
    """Tokens of a sequence."""
    global_batch: int
    """Sequences of a step."""
    dtype: Dtype = "bfloat16"
    """Of forward and backward; 16-bit types keep float32 masters and gradients."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: float = 0.0
    """sgd only; above 0 there is one buffer of it."""
    bucket_bytes: int = 25 * 2**20
    """Gradients are reduced in buckets of this size, in bytes."""
    fused_attention: bool = True
    """Attention never stores its scores."""
    sync: SyncSection = field(default_factory=SyncSection)
    """How the data parallel ranks agree."""
    cpu: bool = False
    """Ranks are processes on CPU, whatever the cluster."""

    @classmethod
    def of(cls, job: Job) -> Work:
        """What ``job`` asks of a step."""
        return cls(
            spec=job.model_spec,
            sequence=job.data.sequence_length,
            global_batch=job.batch.global_size,
            dtype=job.precision.dtype,
            optimizer=job.optimizer.name,
            momentum=job.optimizer.momentum,
            bucket_bytes=job.bucket_bytes,
            sync=job.sync,
            cpu=job.cluster.device == "cpu",
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence

    def parts(self, dp: int) -> int:
        """Into how many equal parts a batch is cut: one a rank, but where servers wait for fewer pushes."""
        return max(1, dp - (self.sync.backup_workers if self.sync.strategy == "server" else 0))


@dataclass(frozen=True)
class Layouts:
    """Columns of equal length. Ranks = ``dp * tp * pp``; ``shard`` of the ``dp`` ranks share one copy."""

    dp: Ints
    shard: Ints
    zero: Ints
    tp: Ints
    pp: Ints
    virtual: Ints
    """Stages on each pipeline rank; 1 where ``pp`` is 1."""
    micro_batch: Ints
    """Sequences."""
    micro_batches: Ints
    """Micro-batches that each data-parallel rank runs in a step."""
    schedule: Ints
    """Index into ``SCHEDULES``."""
    recompute: Ints
    """Index into ``RECOMPUTES``."""
    last_fewer: Ints
    """Layers that the last stage gives up to the middle ones; see ``stage_counts``."""
    order: Ints
    """Index into ``ORDERS``."""
    sequence_parallel: Bools
    """Norms and dropout split over the tp ranks, too; always so in meshwright's own program."""

    def __len__(self) -> int:
        return int(self.dp.shape[0])

    @classmethod
    def make(cls, **columns: Any) -> Layouts:
        """Columns from arrays or single values, which are repeated; what is left out is 1, or the plain choice.

        ``shard`` left out is ``dp``; ``micro_batches`` has no default.
        """
        unknown = set(columns) - set(cls.names())
        if unknown:
            raise TypeError(f"no such columns: {sorted(unknown)}")
        given = {name: np.asarray(value) for name, value in columns.items()}
        given.setdefault("shard", given.get("dp", np.asarray(1)))
        plain = _PLAIN | given
        length = np.broadcast_shapes(*(column.shape for column in plain.values()), (1,))
        kinds = {name: np.bool_ if name == "sequence_parallel" else np.int64 for name in plain}
        return cls(**{name: np.array(np.broadcast_to(plain[name], length), kinds[name]) for name in cls.names()})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(each.name for each in fields(cls))

    def take(self, which: NDArray[Any] | slice) -> Layouts:
        """The layouts that a mask, an array of indices or a slice names."""
        return Layouts(**{name: getattr(self, name)[which] for name in self.names()})

    def with_columns(self, **columns: Any) -> Layouts:
        """The same layouts with some columns replaced."""
        shaped = {name: np.array(np.broadcast_to(value, self.dp.shape)) for name, value in columns.items()}
        return replace(self, **shaped)

    @classmethod
    def join(cls, parts: Sequence[Layouts]) -> Layouts:
        """One after the other."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.names()})

    @property
    def ranks(self) -> Ints:
        """Devices each layout takes."""
        return self.dp * self.tp * self.pp

    @property
    def replicas(self) -> Ints:
        """Copies of the sharded state."""
        return self.dp // self.shard

    @property
    def stage_total(self) -> Ints:
        """Pipeline stages."""
        return self.pp * self.virtual


_PLAIN: dict[str, NDArray[Any]] = {
    **{name: np.asarray(1) for name in ("dp", "tp", "pp", "virtual", "micro_batch")},
    **{name: np.asarray(0) for name in ("zero", "recompute", "last_fewer", "order")},
    "schedule": np.asarray(SCHEDULES.index("1f1b")),
    "sequence_parallel": np.asarray(True),
}


def stage_counts(layers: int, stages: int, last_fewer: int = 0) -> tuple[int, ...]:
    """Layers of each stage.

    Without ``last_fewer`` as even as possible, earlier stages taking the remainder. With it the last stage holds
    that many fewer than ``layers // stages``; the others share the rest, the stages after the first taking the
    remainder, since the first also holds the embedding.
    """
    base, extra = divmod(layers, stages)
    if last_fewer == 0 or stages == 1:
        return tuple(base + (stage < extra) for stage in range(stages))
    base_others, extra = divmod(layers - (base - last_fewer), stages - 1)
    return (base_others, *(base_others + (stage <= extra) for stage in range(1, stages - 1)), base - last_fewer)


def axis_strides(layouts: Layouts) -> dict[str, Ints]:
    """How far apart in devices two neighbours along each axis stand: ``tp``, ``shard``, ``replicate``, ``pp``."""
    extents = {"tp": layouts.tp, "shard": layouts.shard, "replicate": layouts.replicas, "pp": layouts.pp}
    strides = {}
    for axis, extent in extents.items():
        stride = np.ones_like(extent)
        for other, size in extents.items():
            faster = np.array([order.index(other) < order.index(axis) for order in ORDERS])
            stride = stride * np.where(faster[layouts.order], size, 1)
        strides[axis] = stride
    return strides


def placement(layout: Layout, order: int) -> tuple[int, ...] | None:
    """``Layout.placement`` of an axis order: which device stands at each position of the rank grid."""
    if order == 0:
        return None
    extents = {"tp": layout.tp, "shard": layout.shard_degree, "replicate": layout.replicas, "pp": layout.pp}
    stride, strides = 1, {}
    for axis in ORDERS[order]:
        strides[axis] = stride
        stride *= extents[axis]
    devices = np.zeros(tuple(extents[axis] for axis in GRID_AXES), np.int64)
    for position, axis in enumerate(GRID_AXES):
        shape = [1] * len(GRID_AXES)
        shape[position] = extents[axis]
        devices = devices + (np.arange(extents[axis]) * strides[axis]).reshape(shape)
    flat = tuple(int(device) for device in devices.ravel())
    return None if flat == tuple(range(len(flat))) else flat


def to_layout(layouts: Layouts, index: int, layers: int) -> Layout:
    """Layout ``index`` as a job file writes it; ``layers`` is the model's, for uneven stages."""
    row = {name: int(getattr(layouts, name)[index]) for name in layouts.names()}
    pipeline = row["pp"] > 1
    values: dict[str, Any] = {name: row[name] for name in ("dp", "zero", "tp", "pp", "micro_batch")}
    values["recompute"] = RECOMPUTES[row["recompute"]]
    if row["zero"] and row["shard"] != row["dp"]:
        values["shard"] = row["shard"]
    if pipeline:
        values |= {"schedule": SCHEDULES[row["schedule"]], "virtual": row["virtual"]}
        if row["last_fewer"]:
            values["stages"] = stage_counts(layers, row["pp"] * row["virtual"], row["last_fewer"])
    layout = Layout(**values)
    places = placement(layout, row["order"])
    return layout if places is None else layout.model_copy(update={"placement": places})


def from_layouts(layouts: Sequence[Layout], work: Work) -> Layouts:
    """Columns of layouts as job files write them.

    Stage boundaries other than those of ``stage_counts``, a recompute policy by stage and a placement that is no
    axis order have no column: ``ValueError``.
    """
    return Layouts.join([_from_layout(layout, work) for layout in layouts])


def _from_layout(layout: Layout, work: Work) -> Layouts:
    if not isinstance(layout.recompute, str):
        raise ValueError(f"layout {layout}: recompute differs by stage")
    micro_batch = layout.micro_batch or 1
    share = -(-work.global_batch // work.parts(layout.dp))
    return Layouts.make(
        dp=layout.dp,
        shard=layout.shard_degree,
        zero=layout.zero,
        tp=layout.tp,
        pp=layout.pp,
        virtual=layout.virtual_stages,
        micro_batch=micro_batch,
        micro_batches=-(-share // micro_batch),
        schedule=SCHEDULES.index(layout.schedule),
        recompute=RECOMPUTES.index(layout.recompute),
        last_fewer=_last_fewer(layout, work.spec.layers),
        order=_order(layout),
    )


def _last_fewer(layout: Layout, layers: int) -> int:
    counts = tuple(len(stage) for stage in layout.stage_layers(layers))
    for fewer in range(layers // len(counts) + 1):
        if stage_counts(layers, len(counts), fewer) == counts:
            return fewer
    raise ValueError(f"layout {layout}: stages {counts} are neither even nor even but for a shorter last one")


def _order(layout: Layout) -> int:
    wanted = layout.placement
    if wanted is None or wanted == tuple(range(len(wanted))):
        return 0
    for order in range(1, len(ORDERS)):
        if placement(layout, order) == wanted:
            return order
    raise ValueError(f"layout {layout}: the placement is no order of the axes")


@dataclass(frozen=True)
class Evaluation:
    """What each layout costs; arrays of one length. Bytes, seconds, FLOPs of one device, by the ledger's conventions.

    Memory is that of the fullest rank at its fullest moment; times are of the slowest pipeline rank.
    """

    memory: Mapping[str, Floats]
    """Bytes at the peak by category: parameters, gradients, optimizer, activations, temporary."""
    peak: Floats
    """Bytes: the categories together, with what the runtime itself takes."""
    fullest: Ints
    """The pipeline rank that holds most."""
    fits: Bools
    """``peak`` is at most what a device has."""
    step_time: Floats
    """Seconds; the parts sum to it."""
    time: Mapping[str, Floats]
    """Seconds by part: forward, backward, recompute, optimizer, tp, shard, replicate, pp (exposed communication by
    axis), bubble, waiting (for the slowest rank), other."""
    tokens_per_s: Floats
    """Of all devices."""
    mfu: Floats
    """Model FLOPs over what the device could do at its dense peak in the step time."""
    model_flops: Floats
    """Of one device: the mean over all ranks."""
    binding: Ints
    """Index into ``BINDINGS``: what takes most of the step beyond the matrix products, or memory."""
    extra: Mapping[str, Floats] = field(default_factory=dict)
    """Other figures, such as the memory of each pipeline rank."""

    def __len__(self) -> int:
        return int(self.peak.shape[0])


BINDINGS: tuple[str, ...] = (
    "memory", "compute", "tensor-parallel communication", "shard communication", "replicate communication",
    "pipeline transfers", "pipeline bubble", "optimizer", "waiting", "overhead",
)  # fmt: skip
"""``Evaluation.binding`` counts in this order."""
