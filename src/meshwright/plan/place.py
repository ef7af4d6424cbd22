"""What one rank holds and runs: its stages, their parameters in the order of the network, its micro-batches.

The predicted ledger follows from a ``Place`` by closed forms. What is said here of the program (which tensors stand in
which stage, fused how and split how over the tensor parallel ranks) is said a second time on purpose: nothing is
imported from it, so that a change on one side alone shows in ``meshwright check --ledger``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.errors import InputError
from meshwright.job.grid import Coordinates, coordinates, grid_shape
from meshwright.job.job import Job
from meshwright.job.layout import Layout, Recompute
from meshwright.job.memory import DTYPE_BYTES
from meshwright.job.model_spec import ModelSpec
from meshwright.job.schedule_rules import micro_steps


@dataclass(frozen=True)
class LocalTensor:
    """One parameter as a rank stores it: q, k, v fused into one, gate and up too; 1/tp of the rows or columns."""

    name: str
    """Inside its stage: ``layers.7.attention.qkv.weight``."""
    shape: tuple[int, ...]
    """Local; the padding of the vocabulary is in it."""
    layer: int | None
    """Global number of its layer; None: embedding, final norm, head."""
    tp_replicated: bool
    """Whole on every tensor parallel rank: norms, biases of row-split products, learned positions."""
    embedding: bool = False
    """It holds the embedding, or a second copy of it for a tied head."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: to matrices."""
        return len(self.shape) > 1


@dataclass(frozen=True, eq=False)
class StagePlace:
    """One pipeline stage on one rank; the same object on all ranks of a job that hold it."""

    number: int
    layers: range
    first: bool
    """The embedding is here."""
    last: bool
    """The final norm, the head and the loss are here."""
    tensors: tuple[LocalTensor, ...]
    """In the order of the network."""
    recompute: Recompute

    @cached_property
    def elements(self) -> int:
        """Parameters on this rank."""
        return sum(tensor.count for tensor in self.tensors)

    @cached_property
    def block(self) -> tuple[LocalTensor, ...]:
        """The tensors of its first layer; all layers are of the same shapes."""
        return tuple(tensor for tensor in self.tensors if self.layers and tensor.layer == self.layers[0])

    @cached_property
    def rest(self) -> tuple[LocalTensor, ...]:
        """The tensors outside of the layers."""
        return tuple(tensor for tensor in self.tensors if tensor.layer is None)


class Place:
    """One rank of a resolved job.

    Args:
        job: resolved.
        rank: global rank.

    Attributes:
        rank: global rank.
        coordinates: (pp, replicate, shard, tp).
        spec: the model.
        stages: its stages, in increasing order.
        micro_batches: forward passes of each stage in a step.
        rows: sequences of a micro-batch.
        sequence: tokens of a sequence.
        parameter_bytes: of one element in forward and backward.
        wide_bytes: of one element of masters, gradient sums and moments: float32 for 16-bit training.

    Raises:
        InputError: the job is not resolved, or the program could not run it.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._fill(_Shared(job), rank, coordinates(job.layout, rank))

    def _fill(self, shared: _Shared, rank: int, where: Coordinates) -> None:
        layout = shared.layout
        self.rank, self.coordinates = rank, where
        self.stages = shared.stages_of(where.pp)
        self.micro_batches, self.rows, self.sequence = shared.micro_batches, shared.rows, shared.sequence
        self.spec, self.tp, self.hidden = shared.spec, layout.tp, shared.spec.hidden
        self.parameter_bytes, self.wide_bytes = shared.parameter_bytes, shared.wide_bytes

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.sequence

    @property
    def local_tokens(self) -> int:
        """Of a micro-batch between the matrix products: 1/tp of them (sequence parallel)."""
        return self.tokens // self.tp

    @property
    def boundary(self) -> tuple[int, int]:
        """Shape of what one stage hands to the next, and of its gradient: ``[tokens/tp, hidden]``."""
        return (self.local_tokens, self.hidden)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a boundary tensor."""
        return self.local_tokens * self.hidden * self.parameter_bytes

    @property
    def tensors(self) -> Iterator[LocalTensor]:
        """All parameters of the rank, stage by stage."""
        for stage in self.stages:
            yield from stage.tensors


class _Shared:
    """What the ranks of a job have in common; the stages of each pipeline rank are built once."""

    def __init__(self, job: Job) -> None:
        self.layout, self.spec = job.layout, job.model_spec
        _check(job, self.spec)
        assert job.layout.micro_batch is not None
        self.rows, self.sequence = job.layout.micro_batch, job.data.sequence_length
        self.micro_batches = micro_steps(job.batch.global_size, self.rows, self.layout.dp)
        self.parameter_bytes = DTYPE_BYTES[job.precision.dtype]
        self.wide_bytes = max(self.parameter_bytes, 4)
        self._layers = self.layout.stage_layers(self.spec.layers)
        self._stages: dict[int, tuple[StagePlace, ...]] = {}

    def stages_of(self, pp: int) -> tuple[StagePlace, ...]:
        if pp not in self._stages:
            self._stages[pp] = tuple(self._stage(number) for number in self.layout.stages_of(pp))
        return self._stages[pp]

    def _stage(self, number: int) -> StagePlace:
        first, last = number == 0, number == self.layout.stage_count - 1
        layers = self._layers[number]
        tensors = tuple(stage_tensors(self.spec, layers, first=first, last=last, tp=self.layout.tp))
        return StagePlace(number, layers, first, last, tensors, self.layout.stage_recompute(number))


def refuse_shares(job: Job) -> None:
    """Refuse a job whose replicas have unequal batches by hand; ``auto`` starts with equal ones, which are predicted.

    Raises:
        InputError: why.
    """
    if isinstance(job.batch.split, tuple):
        raise InputError(
            f"batch.split: {','.join(map(str, job.batch.split))} makes the replicas unequal, but the ledger is "
            "predicted for equal ones; leave it out (--set batch.split=[]), or read the measured ledger of a run"
        )


def _check(job: Job, spec: ModelSpec) -> None:
    layout = job.layout
    if layout.micro_batch is None:
        raise InputError("layout: micro_batch is not chosen yet; resolve the job before its ledger is predicted")
    for name, degree in (("cp", layout.cp), ("ep", layout.ep)):
        if degree > 1:
            raise InputError(f"layout: {name}={degree} cannot be trained yet, so its ledger is not predicted; use 1")
    refuse_shares(job)
    if spec.experts:
        raise InputError(
            f"model: experts={spec.experts} cannot be trained yet, so no ledger is predicted; use a dense model"
        )


def every_place(job: Job) -> Iterator[Place]:
    """The place of every rank, in grid order; what they have in common is built once."""
    shared = _Shared(job)
    for rank, where in _ranks_and_coordinates(job.layout):
        yield _place(shared, rank, where)


def places(job: Job, ranks: Sequence[int]) -> Iterator[Place]:
    """The places of some ranks; what they have in common is built once."""
    shared = _Shared(job)
    for rank in ranks:
        yield _place(shared, rank, coordinates(job.layout, rank))


def _place(shared: _Shared, rank: int, where: Coordinates) -> Place:
    place = Place.__new__(Place)
    place._fill(shared, rank, where)
    return place


def _ranks_and_coordinates(layout: Layout) -> Iterator[tuple[int, Coordinates]]:
    """Every global rank and where it stands, in grid order."""
    shape = grid_shape(layout)
    for position in range(math.prod(shape)):
        rest, where = position, []
        for extent in reversed(shape):
            rest, index = divmod(rest, extent)
            where.append(index)
        rank = position if layout.placement is None else layout.placement[position]
        yield rank, Coordinates(*reversed(where))


def is_sharded(layout: Layout) -> bool:
    """Whether the ranks of the shard axis divide state among themselves."""
    return layout.zero > 0 and layout.shard_degree > 1


def stage_tensors(spec: ModelSpec, layers: range, *, first: bool, last: bool, tp: int) -> Iterator[LocalTensor]:
    """The parameters of a stage on one tensor parallel rank, in the order of the network."""
    vocabulary = -(-spec.vocabulary // tp)
    if first:
        yield LocalTensor("embedding.weight", (vocabulary, spec.hidden), None, False, embedding=True)
        if spec.positions == "learned":
            yield LocalTensor("position_embedding.weight", (spec.max_positions, spec.hidden), None, True)
    for layer in layers:
        yield from _layer_tensors(spec, layer, tp)
    if last:
        yield from _norm("final_norm", spec.hidden, None, bias=spec.norm == "layernorm")
        if not (spec.tied and first):
            yield LocalTensor("head.weight", (vocabulary, spec.hidden), None, False, embedding=spec.tied)


def _layer_tensors(spec: ModelSpec, layer: int, tp: int) -> Iterator[LocalTensor]:
    hidden, inner = spec.hidden, spec.ffn_hidden // tp
    heads, kv_heads = spec.heads // tp, spec.kv_heads // tp
    prefix = f"layers.{layer}."
    layernorm = spec.norm == "layernorm"

    def column(name: str, rows: int, bias: bool) -> Iterator[LocalTensor]:
        yield LocalTensor(f"{prefix}{name}.weight", (rows, hidden), layer, False)
        if bias:
            yield LocalTensor(f"{prefix}{name}.bias", (rows,), layer, False)

    def row(name: str, columns: int, bias: bool) -> Iterator[LocalTensor]:
        yield LocalTensor(f"{prefix}{name}.weight", (hidden, columns), layer, False)
        if bias:
            yield LocalTensor(f"{prefix}{name}.bias", (hidden,), layer, True)

    yield from _norm(f"{prefix}attention_norm", hidden, layer, bias=layernorm)
    yield from column("attention.qkv", (heads + 2 * kv_heads) * spec.head_size, spec.qkv_bias)
    if spec.qk_norm:
        yield from _norm(f"{prefix}attention.q_norm", spec.head_size, layer, bias=False)
        yield from _norm(f"{prefix}attention.k_norm", spec.head_size, layer, bias=False)
    yield from row("attention.output", heads * spec.head_size, spec.output_bias)
    yield from _norm(f"{prefix}mlp_norm", hidden, layer, bias=layernorm)
    yield from column("mlp.gate_up" if spec.gated else "mlp.up", (1 + spec.gated) * inner, spec.mlp_bias)
    yield from row("mlp.down", inner, spec.mlp_bias)


def _norm(name: str, size: int, layer: int | None, *, bias: bool) -> Iterator[LocalTensor]:
    yield LocalTensor(f"{name}.weight", (size,), layer, True)
    if bias:
        yield LocalTensor(f"{name}.bias", (size,), layer, True)
