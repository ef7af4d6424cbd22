"""One layer, the embedding and the head, forward and backward, on a tape."""

from __future__ import annotations

from meshwright.job.layout import Recompute
from meshwright.plan.walk import Walk


class LayerWalk(Walk):
    """Whole modules of the network.

    Backward starts with the gradient of its output (used), ends with that of its input (used), and frees the input
    of its first norm: each module frees what stands before it.
    """

    # -- one layer ------------------------------------------------------------------------------------

    def layer(self, policy: Recompute) -> None:
        """Forward; its input is kept by whoever made it, its output is kept."""
        if policy == "full":
            with self.tape.forgetting(0):
                self._inside(policy)
            self.tape.keep(self.x.own)
        else:
            self._inside(policy)

    def _inside(self, policy: Recompute) -> None:
        tape, x = self.tape, self.x
        before = tape.used
        self._attention(policy)
        self.row()
        if not self._saves_product(policy):
            tape.drop(x.qkv)
        self.dropout()
        if not tape.saving:
            tape.used = before + x.own
        tape.keep(x.own)
        tape.drop(x.own)
        before = tape.used
        self._mlp()
        self.row()
        self.dropout()
        if not tape.saving:
            tape.used = before + x.own
        tape.keep(x.own)
        tape.drop(x.own)

    def _saves_product(self, policy: Recompute) -> bool:
        return self.tape.saving and (self.product_kept or policy == "selective")

    def _attention(self, policy: Recompute) -> None:
        """Up to the input of the output projection."""
        tape, x = self.tape, self.x
        self.norm(x.own_tokens, x.spec.hidden)
        self.column(x.qkv, kept=self._saves_product(policy))
        if policy == "none":
            self.attention_core()
        else:
            saving = tape.saving
            with tape.forgetting(x.q):
                self.attention_core()
            if saving:
                tape.drop(x.q)
                tape.keep(x.q)

    def _mlp(self) -> None:
        """Up to the input of the down projection."""
        tape, x = self.tape, self.x
        self.norm(x.own_tokens, x.spec.hidden)
        self.column(x.up, kept=True)
        two = x.spec.gated and x.spec.activation != "silu"
        tape.keep(x.ffn, *([x.ffn] if two else []))
        if not tape.saving:
            tape.drop(x.up, x.ffn if two else 0)

    def layer_backward(self, policy: Recompute, mask: int) -> None:
        """Backward; ``mask``: bytes of the attention mask of this layer, 0 for none."""
        if policy == "full":
            self._again()
        self._mlp_backward()
        self._attention_backward(policy, mask)

    def _again(self) -> None:
        """The layer once more, up to the last thing that is saved."""
        tape, x = self.tape, self.x
        self._attention("none")
        self.row()
        if not self.product_kept:
            tape.drop(x.qkv)
        self.dropout()
        tape.keep(x.own)
        tape.drop(x.own)
        self._mlp()
        if x.spec.dropout > 0:
            self.row()
            self.draw(x.own_tokens, x.spec.hidden)
            tape.drop(x.own)

    def _mlp_backward(self) -> None:
        x, spec = self.x, self.x.spec
        dropped = self.dropout_backward()
        size = spec.hidden * x.element
        self.row_backward(x.inner * size, size if spec.mlp_bias else 0, x.ffn, x.ffn, drop=dropped)
        self._activation_backward()
        rows = x.inner * (2 if spec.gated else 1)
        self.column_backward(rows * size, rows * x.element if spec.mlp_bias else 0, x.up, x.own)
        self.norm_backward(x.own_tokens, spec.hidden, x.own, drop=x.own)
        self._add_gradients()

    def _activation_backward(self) -> None:
        tape, x, spec = self.tape, self.x, self.x.spec
        if not spec.gated:
            tape.use(x.ffn)
            tape.drop(x.ffn)
        elif spec.activation == "silu":
            tape.use(x.up)
            tape.touch(x.ffn)
            tape.touch(x.ffn)
            tape.drop(x.ffn)
        else:
            tape.use(x.ffn, x.ffn)
            tape.drop(x.ffn)
            self.free(x.ffn)
            tape.touch(x.ffn)
            tape.use(x.up)
            tape.drop(x.ffn, x.ffn)
        self.free(x.up)

    def _own_output(self, policy: Recompute) -> bool:
        """Whether the output projection alone saves its input; otherwise fused attention does too."""
        return policy == "selective" or self.x.spec.attention_dropout > 0

    def _attention_backward(self, policy: Recompute, mask: int) -> None:
        tape, x, spec = self.tape, self.x, self.x.spec
        dropped = self.dropout_backward()
        size, width = spec.hidden * x.element, x.heads * spec.head_size
        own_output = self._own_output(policy)
        self.row_backward(
            width * size, size if spec.output_bias else 0, x.q, x.q if own_output else 0, drop=dropped
        )  # fmt: skip
        before = tape.kept
        if policy == "selective":
            self.attention_core(again=True)
        self.attention_core_backward(mask)
        if policy == "selective" and self.part == "input":
            # What was computed again goes at once; only what forward saved waits for the weight part.
            tape.kept = before
        elif policy == "selective" and not self.product_kept:
            self.free(x.qkv)
        columns = (x.heads + 2 * x.kv_heads) * spec.head_size
        self.column_backward(columns * size, columns * x.element if spec.qkv_bias else 0, x.qkv, x.own)
        self.norm_backward(x.own_tokens, spec.hidden, x.own, drop=x.own)
        self._add_gradients()

    def _add_gradients(self) -> None:
        tape, own = self.tape, self.x.own
        tape.use(own)
        tape.drop(own)
        if self.x.spec.dropout > 0 and self.part == "input":
            tape.drop(own)
        elif not self.borrowed:
            self.spend(own)
        self.borrowed = False

    def layer_weights(self, policy: Recompute, *, first: bool) -> int:
        """The weight part of a split backward pass, from the input on; ``first``: of the stage, whose input stays.

        Returns:
            Bytes of activations that go with the graph, at the end.
        """
        x, spec, before = self.x, self.x.spec, self.tape.kept
        size, width = spec.hidden * x.element, x.heads * spec.head_size
        columns, rows = (x.heads + 2 * x.kv_heads) * spec.head_size, x.inner * (2 if spec.gated else 1)
        self.norm_weights(0 if first else x.own)
        self.product_weights(columns * size, columns * x.element if spec.qkv_bias else 0, x.qkv, x.own)
        # Split over ranks, a row-split product's input is saved by a node of its own, which goes with the graph.
        alone = x.tp == 1 and self._own_output(policy)
        self.product_weights(width * size, size if spec.output_bias else 0, x.own, x.q if alone else 0)
        self.norm_weights(x.own)
        self.product_weights(rows * size, rows * x.element if spec.mlp_bias else 0, x.up, x.own)
        self.product_weights(x.inner * size, size if spec.mlp_bias else 0, x.own, x.ffn if x.tp == 1 else 0)
        return int(before - self.tape.kept)

    # -- embedding ------------------------------------------------------------------------------------

    def embedding(self) -> None:
        """Forward; its result is kept."""
        tape, x, spec = self.tape, self.x, self.x.spec
        if x.tp > 1:
            tape.keep(8 * x.tokens)
            tape.use(x.tokens, 8 * x.tokens, x.whole)
            tape.drop(8 * x.tokens)
        tape.use(x.own)
        if x.tp > 1:
            tape.drop(self.sum_over_ranks(x.whole, x.own), x.whole, x.tokens)
        if spec.positions == "learned":
            tape.use(x.own, x.own)
            tape.drop(x.own, x.own)
        if spec.dropout > 0:
            self.draw(x.own_tokens, spec.hidden)
        else:
            tape.drop(x.own)
        tape.keep(x.own)
        if spec.dropout > 0:
            tape.drop(x.own)

    def embedding_backward(self, *, tied: bool) -> None:
        """``tied``: the gradient of the head waits for this one."""
        tape, x, spec = self.tape, self.x, self.x.spec
        tape.drop(self.dropout_backward())
        if spec.positions == "learned":
            positions = spec.max_positions * spec.hidden * x.element
            self.gradient(positions)
            self.taken(positions)
        weight = x.columns * spec.hidden * x.element
        wide = x.columns * spec.hidden * x.wide
        if x.tp > 1:
            self.gather(x.whole)
            tape.use(x.whole * 2 if x.narrow else 0, wide if x.narrow else 0)
        self.gradient(weight)
        if x.tp > 1:
            tape.drop(x.whole, x.whole * 2 if x.narrow else 0, wide if x.narrow else 0)
            self.free(8 * x.tokens)
        tape.drop(x.own)
        if tied:
            self.gradient(weight)
            tape.drop(weight, weight)
        self.taken(weight)

    # -- head -----------------------------------------------------------------------------------------

    def head(self) -> None:
        """Final norm, logits and loss."""
        tape, x = self.tape, self.x
        self.norm(x.own_tokens, x.spec.hidden)
        self.column(x.logits, kept=True)
        tape.keep(x.tokens)
        tape.use(8 * x.tokens)
        tape.touch(2 * x.tokens)
        tape.keep(x.tokens, 8 * x.tokens)
        tape.drop(8 * x.tokens)
        tape.use(2 * x.row)
        tape.keep(x.row)
        tape.touch(x.row + self._loss_chunk())
        if x.tp > 1:
            tape.touch(x.row, 2 * x.tp * x.row, 2 * x.tp * x.row)
        tape.keep(2 * x.row)
        tape.touch(2 * x.row)
        tape.drop(2 * x.row)
        tape.keep(x.wide)

    def _loss_chunk(self) -> int:
        x = self.x
        rows = min(x.tokens, max(1, x.loss_chunk // max(1, x.columns)))
        return rows * x.columns * x.wide if x.narrow else 0

    @property
    def loss_numbers(self) -> int:
        """What the loss saves beside the logits: labels, two masks and three sums a token."""
        return int(10 * self.x.tokens + 3 * self.x.row)

    def head_backward(self, *, tied: bool) -> None:
        """The loss stays; a one to start from is used. ``tied``: the weight's gradient waits for the embedding's."""
        tape, x, spec = self.tape, self.x, self.x.spec
        tape.use(x.wide)
        tape.use(2 * x.row)
        tape.touch(self._loss_chunk())
        tape.touch(2 * x.row, 8 * x.tokens, 2 * x.row)
        tape.drop(2 * x.row)
        self.free(self.loss_numbers)
        weight = x.columns * spec.hidden * x.element
        if tied:
            gathered, self.gathered = self.gathered, True
            self.column_backward(weight, 0, 0, x.logits + x.own)
            self.gathered, self.pending = gathered, self.pending - weight
        else:
            self.column_backward(weight, 0, 0, x.logits + x.own)
        self.norm_backward(x.own_tokens, spec.hidden, x.own, drop=x.own)
