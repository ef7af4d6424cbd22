"""One layer, embedding and head of the program, operation by operation: what each keeps and what it uses meanwhile.

Forward and backward are walked in the order in which the program allocates and frees; the numbers are those of
``extents``. The rules of every operation are said here a second time (nothing of the program is imported), so that a
change of the program shows in ``meshwright check --ledger``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from meshwright.plan.extents import Extents
from meshwright.plan.tape import Tape


class BucketFlight(Protocol):
    """What starts reductions while gradients come."""

    def came(self, gradient: int, tape: Tape) -> None:
        """A weight gradient of so many bytes is in its bucket."""


SMALL_EXCHANGE = 256 * 1024
"""Up to this many bytes an exchange is one all-to-all with staging."""
_MASK_CHUNK = 1 << 17
"""Elements of a dropout mask that are drawn at a time."""
_SUM_BLOCK = 1 << 16
"""Elements that are added at a time when 16-bit parts of more than two ranks are summed."""


@dataclass
class Walk:
    """Plays the program's operations on a tape.

    ``gathered``: weight gradients stay (ZeRO-2 and 3); otherwise each is added to its bucket and dropped at once.
    """

    x: Extents
    tape: Tape = field(default_factory=Tape)
    gathered: bool = False
    pending: int = 0
    """Bytes of weight gradients that stay."""
    buckets: BucketFlight | None = None
    """Start their reductions as they fill."""
    borrowed: bool = False
    """The incoming gradient is a buffer of the pipeline: the first to be done with it leaves it there."""
    part: Literal["whole", "input"] = "whole"
    """``input``: a backward pass without weight gradients, which leaves everything that is saved."""

    # -- pieces ---------------------------------------------------------------------------------------

    def gradient(self, *sizes: int) -> None:
        """Weight gradients (bytes) are made."""
        if self.part == "whole":
            self.tape.use(*sizes)

    def taken(self, *sizes: int) -> None:
        """They are in their bucket, or stay."""
        if self.part == "input":
            return
        if self.gathered:
            self.pending += sum(sizes)
            return
        for size in sizes:
            if self.buckets is not None:
                self.buckets.came(size, self.tape)
            self.tape.drop(size)

    def spend(self, *sizes: int) -> None:
        """A gradient that a product's or norm's weights start from has been used; a split pass keeps it for them."""
        if self.part == "whole":
            self.tape.drop(*sizes)

    def free(self, *sizes: int) -> None:
        """Give back what forward saved."""
        if self.part == "whole":
            self.tape.free(*sizes)

    def sum_over_ranks(self, whole: int, own: int) -> int:
        """Buffers that a reduce-scatter uses beside its input and output."""
        x, tape = self.x, self.tape
        staging = whole if whole <= SMALL_EXCHANGE else (x.tp - 1) * own
        tape.use(staging)
        if x.tp > 2 and x.narrow:
            tape.touch(min(own // x.element, _SUM_BLOCK) * 4)
        return staging

    def gather(self, whole: int) -> None:
        """Gather over the tensor parallel ranks into ``whole`` bytes."""
        self.tape.use(whole)
        if whole <= SMALL_EXCHANGE:
            self.tape.touch(whole)

    def column(self, result: int, *, kept: bool) -> None:
        """A column-split product of ``result`` bytes from this rank's tokens."""
        x, tape = self.x, self.tape
        if x.tp > 1:
            self.gather(x.whole)
        (tape.keep if kept else tape.use)(result)
        if x.tp > 1:
            tape.drop(x.whole)

    def row(self) -> None:
        """A row-split product; its result is this rank's tokens."""
        x, tape = self.x, self.tape
        if x.tp == 1:
            tape.use(x.own)
            return
        tape.use(x.whole, x.own)
        staging = self.sum_over_ranks(x.whole, x.own)
        tape.drop(staging, x.whole)

    def column_backward(self, weight: int, bias: int, out: int, free: int) -> None:
        """Of ``column``: the gradient of ``out`` bytes goes, this rank's tokens' comes, ``free`` saved bytes go."""
        x, tape = self.x, self.tape
        if x.tp == 1:
            self._linear_backward(x.own, weight, bias)
            self.spend(out)
            self.free(free)
            self.taken(weight, bias)
            return
        gathered = 0
        if self.part == "whole":
            self.gather(x.whole)
            gathered = x.whole
        tape.use(x.whole, x.own)
        staging = self.sum_over_ranks(x.whole, x.own)
        small = x.whole <= SMALL_EXCHANGE
        if small:
            tape.drop(x.whole)
        self.gradient(bias, weight)
        tape.drop(staging, gathered)
        self.spend(out)
        if not small:
            tape.drop(x.whole)
        self.free(free)
        self.taken(weight, bias)

    def row_backward(self, weight: int, bias: int, inputs: int, free: int, *, drop: int = 0) -> None:
        """Of ``row``: the gradient of its ``inputs`` bytes comes; ``drop`` bytes of incoming gradient go."""
        x, tape = self.x, self.tape
        if x.tp == 1:
            self._linear_backward(inputs, weight, bias)
        else:
            self.gather(x.whole)
            tape.use(inputs)
            self.gradient(weight, bias)
            tape.drop(x.whole)
        self.spend(drop)
        self.free(free)
        self.taken(weight, bias)

    def _linear_backward(self, inputs: int, weight: int, bias: int) -> None:
        if bias:
            self.tape.use(inputs)
            self.gradient(weight, bias)
        else:
            self.gradient(weight)
            self.tape.use(inputs)

    # -- norms ----------------------------------------------------------------------------------------

    def norm(self, rows: int, size: int) -> None:
        """Of ``rows`` vectors of ``size`` elements, with saved statistics."""
        x, tape = self.x, self.tape
        result = rows * size * x.element
        if x.spec.norm == "layernorm" and size == x.spec.hidden:
            tape.keep(result, 2 * rows * x.element)
        else:
            self._rms_norm(rows, size, kept=True)

    def _rms_norm(self, rows: int, size: int, *, kept: bool) -> None:
        x, tape = self.x, self.tape
        wide = rows * size * x.wide if x.narrow else 0
        tape.use(wide)
        tape.keep(rows * x.wide)
        tape.use(wide)
        (tape.keep if kept else tape.use)(rows * size * x.element)
        tape.drop(wide, wide)

    def norm_backward(self, rows: int, size: int, free: int, *, drop: int) -> None:
        """The gradient of ``drop`` bytes goes, one of the input comes; ``free`` bytes of saved input go."""
        x, tape = self.x, self.tape
        result, weight = rows * size * x.element, size * x.element
        if x.spec.norm == "layernorm" and size == x.spec.hidden:
            tape.use(result)
            self.gradient(2 * weight)
            self.spend(drop)
            self.free(free, 2 * rows * x.element)
            self.taken(2 * weight)
            return
        column, wide = rows * x.wide, rows * size * x.wide
        if x.narrow:
            tape.use(wide, wide, size * x.wide, wide)
            if self.part == "whole":
                tape.use(size * x.wide)
                self.gradient(weight)
                tape.drop(size * x.wide)
        else:
            tape.use(wide)
            self.gradient(weight)
        tape.use(column)
        tape.touch(column)
        if x.narrow:
            tape.use(result)
            tape.drop(3 * wide, size * x.wide)
        tape.drop(column)
        self.spend(drop)
        self.free(free, column)
        self.taken(weight)

    # -- dropout --------------------------------------------------------------------------------------

    def draw(self, rows: int, width: int) -> None:
        """A dropout mask of ``rows * width`` bytes, kept; random words are drawn in chunks of 64-bit integers."""
        tape = self.tape
        tape.use(3 * 8 * rows)
        step = max(1, _MASK_CHUNK // max(1, width))
        chunk, blocks = min(rows, step), (width + 3) // 4 + 1
        most = max(11 * blocks, 5 * blocks + 2 * width)
        if rows > step:
            tape.touch(chunk * width, 8 * chunk * (2 + most))
            tape.use(rows * width)
            tape.keep(rows * width)
            tape.drop(rows * width)
        else:
            tape.touch(8 * chunk * (2 + most))
            tape.keep(rows * width)
        tape.drop(3 * 8 * rows)

    def dropout(self) -> None:
        """Of the residual branch, whose result is used, and replaced."""
        x = self.x
        if x.spec.dropout > 0:
            self.draw(x.own_tokens, x.spec.hidden)
            self.tape.use(x.own)
            self.tape.drop(x.own)

    def dropout_backward(self) -> int:
        """The bytes of the branch's own gradient, which goes once it is used; 0 without dropout."""
        x = self.x
        if x.spec.dropout == 0:
            return 0
        self.tape.use(x.own)
        self.free(x.own_tokens * x.spec.hidden)
        return int(x.own)

    # -- attention ------------------------------------------------------------------------------------

    @property
    def product_kept(self) -> bool:
        """Whether the fused product itself is what is saved, or seen by a view that is."""
        spec = self.x.spec
        if spec.qk_norm:
            return bool(min(self.x.heads, self.x.kv_heads) == 1)
        return spec.positions != "rope" and spec.attention_dropout == 0

    def attention_core(self, *, again: bool = False) -> None:
        """From the fused product to the input of the output projection, which is kept.

        ``again``: once more in backward, which stops as soon as everything is saved.
        """
        x, tape, spec = self.x, self.tape, self.x.spec
        rotated = spec.positions == "rope"
        copied = 0
        if spec.qk_norm:
            self._head_norms()
            copied = x.qkv
        if rotated:
            (tape.use if spec.attention_dropout > 0 else tape.keep)(x.qkv)
            if x.narrow:
                wide = (x.qkv - x.kv) * 2
                tape.touch(wide, wide)
        elif copied and spec.attention_dropout == 0:
            tape.drop(copied)
            tape.keep(copied)
            copied = 0
        if spec.attention_dropout > 0:
            self._written_out(rotated=rotated, again=again)
        else:
            tape.keep(x.q, x.lse)
        tape.drop(copied)

    def _written_out(self, *, rotated: bool, again: bool) -> None:
        x, tape = self.x, self.tape
        scores = x.pairs * x.element
        tape.keep(x.q, x.q)
        tape.use(x.q)
        tape.keep(x.q)
        tape.use(scores)
        tape.drop(x.q)
        if not x.masked:
            tape.keep(x.sequence * x.sequence)
        tape.use(scores)
        tape.drop(scores)
        if not tape.saving:
            # Nothing holds on to the operand and the causal mask.
            tape.drop(x.q, 0 if x.masked else x.sequence * x.sequence)
        if x.narrow:
            tape.use(x.pairs * x.wide)
        tape.keep(x.pairs * x.wide)
        if x.narrow:
            tape.drop(x.pairs * x.wide)
            tape.use(scores)
            tape.drop(0 if tape.saving else x.pairs * x.wide)
        self.draw(x.tokens * x.heads, x.sequence)
        tape.keep(scores)
        if not again:
            tape.use(x.q)
        tape.drop(scores, scores if x.narrow else 0)
        if not again:
            tape.keep(x.q)
            tape.drop(x.q)
        tape.drop(x.qkv if rotated else 0)

    def _head_norms(self) -> None:
        """Of q and k, which are copied out of the fused product unless they are one head, and put together again."""
        x, tape = self.x, self.tape
        for part, heads in ((x.q, x.heads), (x.kv, x.kv_heads)):
            if heads > 1:
                tape.keep(part)
            self._rms_norm(x.tokens * heads, x.spec.head_size, kept=False)
        tape.use(x.qkv)
        tape.drop(x.q, x.kv)

    def attention_core_backward(self, mask: int) -> None:
        """The gradient of the core's result goes, that of the fused product comes."""
        x, tape, spec = self.x, self.tape, self.x.spec
        if spec.attention_dropout > 0:
            self._written_out_backward()
        else:
            self._fused_backward(mask)
        tape.use(x.qkv)
        if spec.positions == "rope" and x.narrow:
            for part in (x.q, x.kv):
                tape.touch(2 * part, 2 * part)
        tape.drop(x.qkv)
        # One of the two is left: the gradient of the fused product.
        if spec.qk_norm:
            self._head_norms_backward()

    def _fused_backward(self, mask: int) -> None:
        x, tape = self.x, self.tape
        if x.narrow:
            widened = 2 * (2 * x.q + x.q + 2 * x.kv)
            tape.use(2 * mask, widened, 2 * x.qkv)
            tape.drop(widened)
            tape.use(x.qkv)
            tape.drop(2 * mask, 2 * x.qkv)
        else:
            tape.use(x.qkv)
        tape.drop(x.q)
        self.free(x.qkv, x.lse, x.q)

    def _written_out_backward(self) -> None:
        x, tape = self.x, self.tape
        scores, wide = x.pairs * x.element, x.pairs * x.wide
        tape.use(x.q)
        tape.drop(x.q)
        tape.use(x.q, scores)
        tape.drop(x.q)
        self.free(x.q, scores)
        tape.use(scores)
        tape.drop(scores)
        self.free(x.pairs)
        if x.narrow:
            tape.use(wide)
            tape.drop(scores)
        tape.use(wide)
        tape.drop(wide)
        self.free(wide)
        tape.use(scores)
        tape.drop(wide)
        if not x.masked:
            self.free(x.sequence * x.sequence)
        tape.use(x.q, x.q)
        tape.drop(scores)
        self.free(x.q, x.q)
        tape.touch(x.q)
        # What is left are gradients of q, k and v, the latter two summed over the heads that share them.
        tape.drop(3 * x.q)
        tape.use(x.qkv)

    def _head_norms_backward(self) -> None:
        x, tape = self.x, self.tape
        for part, heads in ((x.kv, x.kv_heads), (x.q, x.heads)):
            copy = part if heads > 1 else 0
            tape.use(copy)
            self.norm_backward(x.tokens * heads, x.spec.head_size, copy, drop=copy)
        if self.product_kept:
            self.free(x.qkv)
        tape.use(x.qkv)
        tape.drop(x.q, x.kv, x.qkv)

    # -- the weight part of a split backward pass ------------------------------------------------------

    def norm_weights(self, free: int) -> None:
        """Of a norm of the residual stream."""
        x, tape, size = self.x, self.tape, self.x.spec.hidden
        weight, wide = size * x.element, x.own_tokens * size * x.wide
        layernorm = x.spec.norm == "layernorm"
        if layernorm:
            self.gradient(2 * weight)
        elif x.narrow:
            tape.use(wide, wide, size * x.wide, wide, size * x.wide)
            self.gradient(weight)
            tape.drop(3 * wide, 2 * size * x.wide)
        else:
            tape.use(wide)
            self.gradient(weight)
            tape.drop(wide)
        tape.drop(x.own)
        tape.free(free, 2 * x.own_tokens * x.element if layernorm else x.own_row)
        self.taken((2 if layernorm else 1) * weight)

    def product_weights(self, weight: int, bias: int, gradient: int, free: int) -> None:
        """Of a product, from the ``gradient`` bytes that the input part has left; tensor parallel ranks gather."""
        x, tape = self.x, self.tape
        if x.tp > 1:
            self.gather(x.whole)
        self.gradient(weight, bias)
        if x.tp > 1:
            tape.drop(x.whole)
        tape.free(free)
        tape.drop(gradient)
        self.taken(weight, bias)
