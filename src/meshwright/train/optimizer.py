"""SGD and AdamW on the flat ranges this rank owns: one implementation for every layout.

A sharded layout cuts parameters at arbitrary elements, so an element may sit in the vectorised body of a
kernel in one layout and in its scalar tail in another, where the compiler contracts the arithmetic
differently. ``_LANES`` elements at a time keep every element in the body: the result of an element is then
the same bits wherever the cuts are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from meshwright.parallel.owned import Owned

_LANES = 64


class Optimizer(Protocol):
    """What the step needs of an optimizer."""

    steps: int
    """Updates applied so far."""

    def step(self, learning_rate: float) -> None:
        """Update every owned master from its gradient."""

    def state(self) -> dict[str, list[Tensor]]:
        """The optimizer's tensors by role; entry ``i`` belongs to owned range ``i`` and has its size."""


State = Mapping[str, list[Tensor]]
"""As ``Optimizer.state`` gives it."""


class _Run:
    """Equal-sized views of several flat tensors: whole lanes in place, the remainders gathered in one padded buffer."""

    def __init__(self, owned: Sequence[Owned], moments: Sequence[Sequence[Tensor]]) -> None:
        self.owned = owned
        self.bodies: list[list[Tensor]] = [[] for _ in range(1 + len(moments))]
        self._tails: list[list[tuple[Tensor, int]]] = [[] for _ in range(1 + len(moments))]
        self._body_index: list[int] = []
        self._tail_index: list[int] = []
        row = 0
        for index, piece in enumerate(owned):
            length = piece.master.numel()
            whole = length - length % _LANES
            if whole:
                self._body_index.append(index)
            if length > whole:
                self._tail_index.append(index)
            for slot, tensor in enumerate([piece.master, *(moment[index] for moment in moments)]):
                if whole:
                    self.bodies[slot].append(tensor[:whole])
                if length > whole:
                    self._tails[slot].append((tensor[whole:], row))
            row += length > whole
        like = owned[0].master if owned else torch.empty(0)
        self._padded = [like.new_zeros((row, _LANES)) for _ in range(2 + len(moments))] if row else []

    def gradients(self) -> list[Tensor]:
        """The whole-lane part of each gradient, in the order of ``bodies``."""
        result = []
        for index in self._body_index:
            gradient = self.owned[index].gradient
            result.append(gradient[: gradient.numel() - gradient.numel() % _LANES])
        return result

    def lists(self) -> list[list[Tensor]]:
        """Values, gradients and moments as parallel lists, remainders included (call ``scatter`` afterwards)."""
        values, gradients, *moments = self.bodies[0], self.gradients(), *self.bodies[1:]
        result = [list(values), list(gradients), *[list(moment) for moment in moments]]
        if self._padded:
            self._gather()
            for slot, padded in enumerate(self._padded):
                result[slot].append(padded.view(-1))
        return result

    def _gather(self) -> None:
        for slot, tails in enumerate(self._tails):
            padded = self._padded[slot if slot == 0 else slot + 1]
            for tensor, row in tails:
                padded[row, : tensor.numel()] = tensor
        for row, index in enumerate(self._tail_index):
            gradient = self.owned[index].gradient
            remainder = gradient.numel() % _LANES
            self._padded[1][row, :remainder] = gradient[gradient.numel() - remainder :]

    def scatter(self) -> None:
        """Copy the padded remainders back to where they belong."""
        if not self._padded:
            return
        for slot, tails in enumerate(self._tails):
            padded = self._padded[slot if slot == 0 else slot + 1]
            for tensor, row in tails:
                tensor.copy_(padded[row, : tensor.numel()])


def _runs(owned: Sequence[Owned], moments: Sequence[Sequence[Tensor]], weight_decay: float) -> list[tuple[float, _Run]]:
    """What is updated alike, and its weight decay: matrices, and then the rest."""
    runs = []
    for decay in (True, False):
        chosen = [index for index, piece in enumerate(owned) if piece.decay is decay]
        if chosen:
            run = _Run([owned[i] for i in chosen], [[moment[i] for i in chosen] for moment in moments])
            runs.append((weight_decay if decay else 0.0, run))
    return runs


class AdamW:
    """AdamW (Loshchilov and Hutter 2019): decoupled weight decay, applied to matrices only."""

    def __init__(
        self,
        owned: Sequence[Owned],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        shared: State | None = None,
    ) -> None:
        self.steps = 0
        self.variance_steps = 0
        """Updates that moved the second moments, which is all of them unless some were frozen."""
        self.frozen_variance = False
        """The next update leaves the second moments as they are (1-bit Adam)."""
        self._betas, self._eps = betas, eps
        self._first = shared["exp_avg"] if shared else [torch.zeros_like(piece.master) for piece in owned]
        self._second = shared["exp_avg_sq"] if shared else [torch.zeros_like(piece.master) for piece in owned]
        self._runs = _runs(owned, [self._first, self._second], weight_decay)

    def step(self, learning_rate: float) -> None:
        """One update; bias correction counts from 1."""
        self.steps += 1
        self.variance_steps += not self.frozen_variance
        if self.variance_steps < self.steps:
            self._apart_step(learning_rate)
            return
        for weight_decay, run in self._runs:
            values, gradients, first, second = run.lists()
            count = torch.tensor(float(self.steps), device=values[0].device)
            torch._fused_adamw_(
                values, gradients, first, second, [], [count] * len(values),
                lr=learning_rate, beta1=self._betas[0], beta2=self._betas[1], weight_decay=weight_decay,
                eps=self._eps, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
            )  # fmt: skip
            run.scatter()

    def _apart_step(self, learning_rate: float) -> None:
        """The same where not every update moves the second moments; their bias correction counts those that do."""
        beta1, beta2 = self._betas
        rate = learning_rate / (1.0 - beta1**self.steps)
        correction = math.sqrt(1.0 - beta2**self.variance_steps)
        for weight_decay, run in self._runs:
            values, gradients, first, second = run.lists()
            if weight_decay:
                torch._foreach_mul_(values, 1.0 - learning_rate * weight_decay)
            torch._foreach_lerp_(first, gradients, 1.0 - beta1)
            if not self.frozen_variance:
                torch._foreach_mul_(second, beta2)
                torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
            roots = torch._foreach_sqrt(second)
            torch._foreach_div_(roots, correction)
            torch._foreach_add_(roots, self._eps)
            torch._foreach_addcdiv_(values, first, roots, value=-rate)
            run.scatter()

    def state(self) -> dict[str, list[Tensor]]:
        """First and second moments."""
        return {"exp_avg": self._first, "exp_avg_sq": self._second}


class SGD:
    """Gradient descent with optional momentum ``buffer = momentum * buffer + gradient`` and decoupled weight decay."""

    def __init__(
        self, owned: Sequence[Owned], *, momentum: float, weight_decay: float, shared: State | None = None
    ) -> None:
        self.steps = 0
        self._momentum = momentum
        self._buffers: list[Tensor] = []
        if momentum:
            self._buffers = shared["momentum"] if shared else [torch.zeros_like(piece.master) for piece in owned]
        self._runs = _runs(owned, [self._buffers] if momentum else [], weight_decay)

    def step(self, learning_rate: float) -> None:
        """One update."""
        self.steps += 1
        for weight_decay, run in self._runs:
            values, gradients, *moments = run.lists()
            if weight_decay:
                torch._foreach_mul_(values, 1.0 - learning_rate * weight_decay)
            if moments:
                torch._foreach_mul_(moments[0], self._momentum)
                torch._foreach_add_(moments[0], gradients)
                gradients = moments[0]
            torch._foreach_add_(values, gradients, alpha=-learning_rate)
            run.scatter()

    def state(self) -> dict[str, list[Tensor]]:
        """The momentum buffers, if any."""
        return {"momentum": self._buffers} if self._momentum else {}


def variance_steps(state: Mapping[str, Any]) -> int:
    """Updates that moved AdamW's second moments, from the state in a checkpoint: all, where it says nothing of them."""
    older = state.get("sync") or {}  # where it stood before: only while synchronisation had something to remember
    return int(state.get("variance_steps", older.get("variance_steps", state["optimizer_steps"])))


def make_optimizer(
    owned: Sequence[Owned],
    *,
    name: Literal["sgd", "adamw"],
    betas: tuple[float, float],
    eps: float,
    momentum: float,
    weight_decay: float,
    shared: State | None = None,
) -> AdamW | SGD:
    """The optimizer a job names; ``shared``: with the tensors of another one, over ranges of the same sizes."""
    if name == "adamw":
        return AdamW(owned, betas=betas, eps=eps, weight_decay=weight_decay, shared=shared)
    return SGD(owned, momentum=momentum, weight_decay=weight_decay, shared=shared)
