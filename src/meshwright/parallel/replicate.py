"""Replicated data parallel (ZeRO-0): every dp rank holds the whole state and updates all of it.

    rank 0   forward  backward  [bucket 0 full] . . . [bucket 1 full] . . . [bucket 2 full]
                                 \\ exchange, add, gather \\                    \\ ...          update all
    rank 1   forward  backward  [bucket 0 full] . . . [bucket 1 full] . . . [bucket 2 full]

Per step and rank, with ``n`` bytes of gradients: one reduce-scatter and one all-gather a bucket, each of which
sends ``(dp-1)/dp n`` bytes; gradients of earlier micro-batches stay local. The class serves ZeRO-1 too
(``parallel.shard``): there the buckets are cut into chunks, and ``publish`` gathers what the owners updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.comm.copies import Copies, Span
from meshwright.comm.phase import phase
from meshwright.parallel.bucket_trace import now, traced
from meshwright.parallel.buckets import DEFAULT_BUCKET_BYTES, Bucket, accumulation_dtype, pack
from meshwright.parallel.flight import Flight
from meshwright.parallel.owned import BackwardPart, Owned
from meshwright.parallel.reducing import DirectReducer, Reducer, WaitingReducer


class _Stage:
    """The buckets of one stage's module; they start their reduction in list order."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.started = 0
        """How many have started, of this step or (deterministic mode) this micro-step."""
        self.under_way = False
        """A micro-step has begun and not ended (deterministic mode)."""


class BucketedDataParallel:
    """Data parallelism on flat buckets: replicated, ZeRO-1, and any number of copies of its shards.

    Args:
        stages: this rank's modules by stage number, with initialised parameters in the master dtype.
            Their parameters become views of the buckets.
        copies: how the dp ranks divide the state.
        dtype: of forward and backward.
        bucket_bytes: gradient bytes of a bucket.
        deterministic: sum micro-batches in the order of the global batch.
        reducer: how a bucket is summed; absent: plainly. Deterministic mode has its own way.
        alone: parameters (with stage prefix) that get a bucket of their own, so that two stages shard
            their copies of it alike.
        uncounted: parameters (with stage prefix) that this rank does not speak for.
        tp_replicated: parameters (with stage prefix) that are whole on every tp rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        copies: Copies,
        dtype: torch.dtype,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deterministic: bool = False,
        reducer: Reducer | None = None,
        alone: frozenset[str] = frozenset(),
        uncounted: frozenset[str] = frozenset(),
        tp_replicated: frozenset[str] = frozenset(),
    ) -> None:
        self._every_step = deterministic and copies.degree > 1
        """Exchange after every micro-step instead of only the last."""
        self.reducer: Reducer = DirectReducer() if reducer is None else reducer
        self._stages: dict[int, _Stage] = {}
        self._ending: set[int] = set()
        limit = bucket_bytes // accumulation_dtype(dtype).itemsize
        for number, module in stages.items():
            named = [(f"stage{number}:{name}", parameter) for name, parameter in module.named_parameters()]
            groups = pack(reversed(named), limit, alone)
            stage = _Stage([Bucket(group, copies, dtype, every_step=self._every_step) for group in groups])
            self._stages[number] = stage
            for bucket in stage.buckets:
                spans = [Span(slot.name, slot.start, tuple(slot.parameter.shape)) for slot in bucket.slots]
                self.reducer.prepare(bucket.name, bucket.size, spans, copies)
            self._watch(number, stage)
        self.buckets = [bucket for stage in self._stages.values() for bucket in stage.buckets]
        self._flight = Flight(self.buckets[0].working.device if self.buckets else torch.device("cpu"))
        self._owned = [
            piece
            for bucket in self.buckets
            for piece in bucket.owned(lambda name: name not in uncounted, tp_replicated.__contains__)
        ]

    def _watch(self, number: int, stage: _Stage) -> None:
        for position, bucket in enumerate(stage.buckets):
            for index, slot in enumerate(bucket.slots):
                hook = partial(self._came, number, position, index)
                slot.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def owned(self) -> list[Owned]:
        """See ``DataParallel.owned``: bucket by bucket, so neighbours in the list are neighbours in memory."""
        return self._owned

    def gradient_buffers(self) -> list[Tensor]:
        """See ``DataParallel.gradient_buffers``."""
        return [buffer for bucket in self.buckets for buffer in bucket.gradient_buffers()]

    def begin_step(self) -> None:
        """See ``DataParallel.begin_step``; nothing is zeroed, the first gradient of each parameter is copied."""
        self._ending.clear()
        for stage in self._stages.values():
            stage.started, stage.under_way = 0, False
            for bucket in stage.buckets:
                bucket.forget()
                bucket.forget_sums()

    def micro_batch(
        self, *, last: bool, stage: int | None = None, part: BackwardPart = "whole"
    ) -> AbstractContextManager[None]:
        """See ``DataParallel.micro_batch``."""
        if part == "input":
            return nullcontext()
        return self._micro_batch(list(self._stages) if stage is None else [stage], last)

    @contextmanager
    def _micro_batch(self, numbers: Sequence[int], last: bool) -> Iterator[None]:
        for number in numbers:
            stage = self._stages[number]
            stage.under_way = True
            if last and not isinstance(self.reducer, WaitingReducer):
                self._ending.add(number)
            if not self._every_step:
                for bucket in stage.buckets:
                    bucket.expect_all()
        yield
        for number in numbers:
            self.collect(number)
            stage = self._stages[number]
            if stage.under_way and (number in self._ending or self._every_step):
                self._start_rest(stage)

    def collect(self, stage: int) -> None:
        """See ``DataParallel.collect``."""
        for position, bucket in enumerate(self._stages[stage].buckets):
            for index, slot in enumerate(bucket.slots):
                if slot.parameter.grad is not None:
                    self._came(stage, position, index, slot.parameter)

    def _came(self, number: int, position: int, index: int, parameter: Tensor) -> None:
        """A gradient stands in ``parameter.grad``: the hook of every parameter."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        stage = self._stages[number]
        bucket = stage.buckets[position]
        if position < stage.started:
            if not self._every_step:
                raise RuntimeError(f"gradient of {bucket.slots[index].name} came after its bucket had been reduced")
            self._start_rest(stage)
        elif self._every_step and bucket.filled[index]:
            self._start_rest(stage)
        if self._every_step:
            stage.under_way = True
            self._flight.settle(bucket)
        bucket.take(index, gradient)
        if not bucket.missing:
            bucket.ready = now()
        if self._every_step or number in self._ending:
            while stage.started < len(stage.buckets) and not stage.buckets[stage.started].missing:
                self._start_next(stage)

    def _start_next(self, stage: _Stage) -> None:
        bucket = stage.buckets[stage.started]
        stage.started += 1
        with phase("reduce"):
            bucket.fill_up()
            if self._every_step:
                sequence = bucket.exchange()
            else:
                sequence = self.reducer.reduce(bucket.name, bucket.gradient, bucket.copies)
            self._flight.start(bucket, traced(bucket.name, bucket.gradient.nbytes, bucket.ready, sequence))
        if self._every_step:
            bucket.forget()
            if stage.started == len(stage.buckets):
                stage.started, stage.under_way = 0, False

    def _start_rest(self, stage: _Stage) -> None:
        for _ in range(len(stage.buckets) - stage.started):
            if self._every_step:
                self._flight.settle(stage.buckets[stage.started])
            self._start_next(stage)

    def finish_gradients(self) -> None:
        """See ``DataParallel.finish_gradients``."""
        for number in self._stages:
            self.collect(number)
        if isinstance(self.reducer, WaitingReducer):
            for bucket in self.buckets:
                bucket.fill_up()
            self.reducer.ready([bucket.gradient for bucket in self.buckets])
        for stage in self._stages.values():
            if stage.under_way or not self._every_step:
                self._start_rest(stage)
        self._flight.settle_all()
        if self._every_step:
            self._flight.start_together([(bucket, bucket.gather_pieces()) for bucket in self.buckets])
            self._flight.settle_all()

    def publish(self) -> None:
        """See ``DataParallel.publish``."""
        self._flight.start_together([(bucket, bucket.publish()) for bucket in self.buckets])
        self._flight.settle_all()
