"""The forward and backward pass of one micro-batch in one stage, with the parameters' comings and goings."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from meshwright.plan.extents import Extents
from meshwright.plan.layer_walk import LayerWalk
from meshwright.plan.place import StagePlace
from meshwright.plan.reductions import BucketFlight, GroupFlight
from meshwright.plan.state import Group
from meshwright.plan.tape import Stretch, Tape

_State = tuple[bool, bool, bool, int]


@dataclass
class StageWalk:
    """One stage of a rank; ``tape`` is the whole step's."""

    x: Extents
    stage: StagePlace
    tape: Tape
    follows: bool
    """The stage before stands on the same rank, so its output is this one's input."""
    alone: bool
    """There is no pipeline: backward follows forward at once, and the graph lives on until the next one is there."""
    block: Group | None = None
    """ZeRO-2 and 3: the group of a layer."""
    rest: Group | None = None
    """And of what stands outside the layers."""
    flight: GroupFlight | None = None
    frees: bool = False
    """Parameters are freed after each use (ZeRO-3)."""
    waiting: set[int] = field(default_factory=set)
    """Micro-batches whose input part has run and whose weight part has not."""
    owning: set[int] = field(default_factory=set)
    """Those whose input is the output of the stage before and held here alone."""
    _rest_there: bool = False
    _blocks_there: bool = False
    _fresh: bool = True
    _known: dict[Hashable, tuple[Stretch, _State]] = field(default_factory=dict)
    """Passes that have run: what they did to the levels, and to the parameters that come and go."""

    def _repeat(self, name: Hashable, run: Callable[[], None]) -> None:
        """Run a pass, or play again what it did when everything was as it is now."""
        key = (name, self._state)
        if key not in self._known:
            step, self.tape = self.tape, Tape()
            run()
            self._known[key] = (self.tape.stretch(), self._state)
            self.tape = step
        stretch, (self._rest_there, self._blocks_there, self._fresh, older) = self._known[key]
        self.tape.play(stretch)
        if self.flight:
            self.flight.older = older

    @property
    def _state(self) -> _State:
        return (self._rest_there, self._blocks_there, self._fresh, self.flight.older if self.flight else 0)

    def _walk(self) -> LayerWalk:
        return LayerWalk(self.x, self.tape, gathered=self.flight is not None)

    def _window(self, layer: int) -> int | None:
        spec = self.x.spec
        return spec.sliding_window if layer >= spec.window_from_layer else None

    @property
    def _masks(self) -> int:
        """Bytes of the masks that the layers share."""
        windows = {self._window(layer) for layer in self.stage.layers}
        return int(self.x.mask * sum(self.x.has_mask(window) for window in windows))

    @property
    def _mask_stays(self) -> bool:
        """Attention that is written out adds its mask and saves nothing of it; what recomputes holds on to it."""
        return self.x.spec.attention_dropout == 0 or self.stage.recompute != "none"

    def _mask_ends(self, index: int) -> bool:
        """Whether a whole backward pass ends a mask with this layer; what recomputes keeps it to the end."""
        windows = [self._window(layer) for layer in self.stage.layers[: index + 1]]
        last = windows[index] not in windows[:index]
        return last and self._mask_stays and self.stage.recompute == "none" and self.x.has_mask(windows[index])

    @property
    def _tables(self) -> int:
        return int(self.x.tables)

    # -- forward --------------------------------------------------------------------------------------

    def forward(self, *, again: bool) -> None:
        """``again``: another micro-batch's graph is still there (without a pipeline)."""
        self._repeat(("forward", again), lambda: self._forward(again=again))

    def _forward(self, *, again: bool) -> None:
        tape, walk, layers = self.tape, self._walk(), len(self.stage.layers)
        self._gather_rest()
        gathers = self.block is not None and not self._blocks_there
        if gathers and layers:
            self._start_block()
        if self.stage.first:
            walk.embedding()
        masks = self._prepare()
        for index in range(layers):
            if gathers:
                self._arrive_block()
                if index + 1 < layers:
                    self._start_block()
            walk.layer(self.stage.recompute)
            if self.frees and not (self.alone and index + 1 == layers):
                self._free_block()
        self._blocks_there = not self.frees
        if self.stage.last:
            walk.head()
        if not self._mask_stays:
            tape.drop(masks)
        if again:
            tape.free(self._tables)

    def _prepare(self) -> int:
        """Rotation tables and masks, which the layers share; bytes of the masks."""
        tape, x, masks = self.tape, self.x, self._masks
        tape.touch(x.tables // 2)
        tape.keep(x.tables)
        if masks:
            seen = (x.rows if x.masked else 1) * x.sequence * x.sequence
            tape.touch(2 * seen)
            (tape.keep if self._mask_stays else tape.use)(masks)
            tape.touch(2 * seen)
        return masks

    # -- backward -------------------------------------------------------------------------------------

    def backward(self, buckets: BucketFlight | None = None) -> None:
        """The whole backward pass; ``buckets``: start their reductions as they fill."""
        if buckets is None:
            self._repeat("backward", self._backward)
        else:
            self._backward(buckets)

    def _backward(self, buckets: BucketFlight | None = None) -> None:
        x, walk, stage = self.x, self._walk(), self.stage
        walk.buckets = buckets
        tied = stage.first and stage.last and x.spec.tied
        layers = len(stage.layers)
        self._gather_rest()
        if self.frees and not self.alone and layers:
            self._start_block()
        if stage.last:
            walk.head_backward(tied=tied)
        else:
            walk.borrowed = True
        for index in reversed(range(layers)):
            if self.frees and not (self.alone and index + 1 == layers):
                self._arrive_block()
            if self.frees and index:
                self._start_block()
            rest, walk.pending = walk.pending, 0
            window = self._window(stage.layers[index])
            walk.layer_backward(stage.recompute, x.mask if x.has_mask(window) else 0)
            if self._mask_ends(index):
                self.tape.free(x.mask)
            self._reduce_block(walk)
            walk.pending += rest
        if stage.first:
            walk.embedding_backward(tied=tied)
        self._reduce_rest(walk)
        self._fresh = False
        self._end_backward(walk)

    def _end_backward(self, walk: LayerWalk) -> None:
        """What the whole micro-batch held: masks, tables, input and output of the stage."""
        tape, x, stage = self.tape, self.x, self.stage
        if self._mask_stays and stage.recompute != "none":
            tape.free(self._masks)
        if not self.alone:
            tape.free(self._tables)
        if stage.last:
            tape.drop(x.wide)
        else:
            tape.free(x.own)
            tape.drop(0 if walk.borrowed else x.own)
        if not stage.first:
            # The first norm freed the input as if it had been made here; its gradient is sent.
            self._drop_input()
            tape.drop(0 if self.follows else x.own)

    def _drop_input(self) -> None:
        """The input goes, which the first norm counted among this stage's activations."""
        self.tape.kept += self.x.own
        if not self.follows:
            self.tape.drop(self.x.own)

    # -- parameters that come and go ------------------------------------------------------------------

    def _gather_rest(self) -> None:
        if self.flight and self.rest and not self._rest_there:
            self.flight.start(self.rest, self.tape)
            self.flight.arrive(self.rest, self.tape)
            self._rest_there = True

    def _start_block(self) -> None:
        if self.flight and self.block:
            self.flight.start(self.block, self.tape)

    def _arrive_block(self) -> None:
        if self.flight and self.block:
            self.flight.arrive(self.block, self.tape)

    def _free_block(self) -> None:
        if self.flight and self.block:
            self.tape.drop(self.flight.gathered(self.block))

    def _reduce_block(self, walk: LayerWalk) -> None:
        if self.flight and self.block:
            if self.frees:
                self._free_block()
            self.flight.reduce(self.block, walk.pending, self.tape, fresh=self._fresh)
            walk.pending = 0

    def _reduce_rest(self, walk: LayerWalk) -> None:
        if self.flight and self.rest:
            if self.frees:
                self.tape.drop(self.flight.gathered(self.rest))
                self._rest_there = False
            self.flight.reduce(self.rest, walk.pending, self.tape, fresh=self._fresh)
            walk.pending = 0

    # -- backward in two parts ------------------------------------------------------------------------

    def input_backward(self, micro_batch: int, after: StageWalk | None) -> None:
        """Gradients of activations alone: everything saved stays for the weight part, and what that starts from.

        ``after``: the stage after this one, if it stands on the same rank.
        """
        self._repeat("input", self._input_backward)
        if after is not None and micro_batch in after.waiting:
            after.owning.add(micro_batch)
        elif not self.stage.last:
            self.tape.free(self.x.own)
        self.waiting.add(micro_batch)

    def _input_backward(self) -> None:
        tape, x, stage = self.tape, self.x, self.stage
        walk = LayerWalk(x, tape, part="input")
        if stage.last:
            walk.head_backward(tied=False)
        for layer in reversed(stage.layers):
            window = self._window(layer)
            walk.layer_backward(stage.recompute, x.mask if x.has_mask(window) else 0)
        if stage.last:
            tape.free(walk.loss_numbers)
            tape.drop(x.wide)

    def weight_backward(self, micro_batch: int, buckets: BucketFlight | None = None) -> None:
        """Gradients of weights, from the input on: all of the stage's are there together at the end."""
        tape, x, stage = self.tape, self.x, self.stage
        walk = LayerWalk(x, tape, gathered=True)
        left = 0
        for index in range(len(stage.layers)):
            left += self._saved_by_layer - walk.layer_weights(stage.recompute, first=index == 0)
        if stage.last:
            walk.norm_weights(x.own if stage.layers else 0)
            walk.product_weights(x.columns * x.spec.hidden * x.element, 0, 0, x.own)
            left += x.logits
        tape.free(left)
        self.waiting.discard(micro_batch)
        if micro_batch in self.owning:
            self.owning.discard(micro_batch)
        else:
            # Its input was counted among its activations, but is a buffer or the output of the stage before.
            tape.kept += x.own
        if self._mask_stays:
            tape.free(self._masks)
        tape.free(self._tables)
        if not self.follows:
            # The input goes, and with it its gradient.
            tape.drop(x.own, x.own)
        self._collect(buckets)

    def _collect(self, buckets: BucketFlight | None) -> None:
        """Take in the weight gradients of the stage."""
        tape, stage, element = self.tape, self.stage, self.x.element
        if self.flight is None:
            for tensor in reversed(stage.tensors):
                if buckets is not None:
                    buckets.came(tensor.count * element, tape)
                tape.drop(tensor.count * element)
            return
        for group, times in ((self.rest, 1), (self.block, len(stage.layers))):
            for _ in range(times if group else 0):
                assert group is not None
                pending = sum(tensor.count for tensor in group.tensors) * element
                self.flight.reduce(group, pending, tape, fresh=self._fresh)
        self._fresh = False

    @property
    def _saved_by_layer(self) -> int:
        probe = Tape()
        LayerWalk(self.x, probe).layer(self.stage.recompute)
        return probe.kept
