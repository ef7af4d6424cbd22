"""DiLoCo: replicas train apart for many steps with their own optimizer; an outer optimizer moves the shared model.

Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023. From the shared model t:

    D = sum_r w_r (t - x_r)                      the outer gradient; w_r by tokens (``sync.meeting``)
    b <- m b + D                                 outer momentum
    t <- t - lr (D + m b)    (Nesterov)          then every x_r <- t

With ``lr = 1, m = 0`` this is local SGD. Streaming DiLoCo (Douillard et al., 2025) cuts the model into F fragments
that meet in turn, each once a period: fragment f's sum starts ``overlap`` steps before step ``(f + 1) period / F`` of
each period and is taken in at that step, so that it travels while the replicas compute; they then go on from

    x_r <- (1 - k) t + k x_r                     k: ``keep_local``

At the end of a period nothing is on its way. Outer gradients may travel compressed, with their error fed back; of their
largest elements alone (``dgc``), often without outer momentum: SparseLoCo (Sarfi et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.operations import Operations
from meshwright.sync.meeting import Exchange, Flat, plain_sum, weight_of

Summing = Callable[[str, Tensor, dist.ProcessGroup], Operations]
"""Sums a buffer, known by a name, over a group in place."""


def outer_step(shared: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float) -> None:
    """Move the shared model and its momentum buffer, in place, by an outer gradient (used up)."""
    buffer.mul_(momentum).add_(gradient)
    shared.sub_(gradient.add_(buffer, alpha=momentum), alpha=lr)


@dataclass
class _Fragment:
    """Parameters that meet together."""

    name: str
    flat: Flat
    shared: Tensor
    buffer: Tensor
    send_at: int
    """Steps into a period (from 1 to the period) after which its sum starts."""
    take_at: int
    """Steps into a period after which the sum is taken in."""
    tokens: int = 0
    early: bool = False
    """Its sum was taken in before its time, for a checkpoint; not again in this period."""
    under_way: tuple[Exchange, Tensor] | None = None


class DiLoCo:
    """Outer optimization of what replicas bring.

    Args:
        fragments: this replica's parameters, by fragment; one fragment is plain DiLoCo.
        group: the replicas.
        period: steps between two meetings of one fragment.
        lr: of the outer step.
        momentum: of the outer step.
        overlap: steps that a sum may travel; less than ``period / fragments``.
        keep_local: what a replica keeps of its own parameters.
        summing: how outer gradients are summed; absent: plainly.
    """

    def __init__(
        self,
        fragments: Sequence[Sequence[Tensor]],
        group: dist.ProcessGroup,
        period: int,
        *,
        lr: float,
        momentum: float,
        overlap: int = 0,
        keep_local: float = 0.0,
        summing: Summing | None = None,
    ) -> None:
        self._group, self._period, self._lr, self._momentum = group, period, lr, momentum
        self._keep_local = keep_local
        self._summing: Summing = summing or (lambda name, values, group: plain_sum(values, group))
        self._fragments = []
        for index, values in enumerate(fragments):
            flat = Flat(values, group.size())
            shared = flat.gather()
            take_at = (index + 1) * period // len(fragments)
            fragment = _Fragment(str(index), flat, shared, torch.zeros_like(shared), take_at - overlap, take_at)
            self._fragments.append(fragment)

    def count(self, tokens: int) -> None:
        """This replica has trained on ``tokens`` valid tokens more."""
        for fragment in self._fragments:
            fragment.tokens += tokens

    def after(self, step: int, *, last: bool = False) -> bool:
        """Step ``step`` (from 1) has ended; meet if it is time (or the ``last``). Whether a fragment was taken in."""
        into = (step - 1) % self._period + 1
        met = False
        for fragment in self._fragments:
            if fragment.flat.count == 0:
                continue
            if into == fragment.send_at:
                self._send(fragment)
            if (into == fragment.take_at and not fragment.early) or last:
                self._take(fragment)
                met = True
            if into == fragment.take_at:
                fragment.early = False
        return met

    def _send(self, fragment: _Fragment) -> None:
        gradient = fragment.flat.gather().neg_().add_(fragment.shared)
        gradient.mul_(weight_of(fragment.tokens, self._group, gradient.device))
        fragment.tokens = 0
        fragment.under_way = Exchange(self._summing(fragment.name, gradient, self._group)), gradient

    def _take(self, fragment: _Fragment) -> None:
        if fragment.under_way is None:
            self._send(fragment)
        assert fragment.under_way is not None
        exchange, gradient = fragment.under_way
        exchange.finish()
        fragment.under_way = None
        outer_step(fragment.shared, gradient, fragment.buffer, lr=self._lr, momentum=self._momentum)
        if self._keep_local:
            fragment.flat.put(fragment.flat.gather().lerp_(fragment.shared, 1.0 - self._keep_local))
        else:
            fragment.flat.put(fragment.shared)

    def model(self) -> list[Tensor]:
        """The shared model."""
        return [part for fragment in self._fragments for part in fragment.flat.parts(fragment.shared)]

    def settle(self) -> None:
        """Take in what is on its way, early: a checkpoint holds nothing that travels."""
        for fragment in self._fragments:
            if fragment.under_way is not None:
                self._take(fragment)
                fragment.early = True

    def restart(self) -> None:
        """The shared model starts from the replica's parameters, without momentum."""
        for fragment in self._fragments:
            fragment.shared.copy_(fragment.flat.gather())
            fragment.buffer.zero_()
            fragment.tokens, fragment.under_way, fragment.early = 0, None, False

    def state(self) -> dict[str, list[Tensor]]:
        """The outer momentum (the shared model is what a checkpoint calls the parameters)."""
        return {"outer_momentum": [part for each in self._fragments for part in each.flat.parts(each.buffer)]}

    def memory(self) -> list[Tensor]:
        """Long-lived tensors beside the parameters."""
        return [tensor for each in self._fragments for tensor in (each.shared, each.buffer)]

    def counters(self) -> list[int]:
        """Of each fragment: tokens since its last meeting, and whether that came before its time."""
        return [number for each in self._fragments for number in (each.tokens, int(each.early))]

    def resume(self, counters: Sequence[int]) -> None:
        """Take back ``counters`` and ``state``."""
        for fragment, tokens, early in zip(self._fragments, counters[::2], counters[1::2], strict=True):
            fragment.tokens, fragment.early = tokens, bool(early)
