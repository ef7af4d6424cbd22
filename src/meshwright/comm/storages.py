"""What is held: every live storage of a step by category, and what the highest moment was made of.

A storage is seen when an operation first returns it and gone when its memory is (a finalizer), also when
``UntypedStorage.resize_`` empties or fills it, as FSDP2 does. Saved-tensor hooks would miss what
recomputation holds; an allocator would not know what anything is for.

Categories follow from the phase a storage was made in and how long it lives:

    made in forward, recompute    activations  if alive when that phase ends, else temporary
    made in backward              gradients    if alive at the end of the step, else temporary
    made in optimizer             optimizer    if alive at the end of the step, else temporary
    anything else                 temporary
    there before the step         what it was registered as, filled or emptied as it may be; else temporary
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.ledger.ledger import CATEGORIES, Category, Stores

_LASTING: dict[str, Category] = {"backward": "gradients", "optimizer": "optimizer"}
_KEPT_FOR_BACKWARD = ("forward", "recompute")
_THERE_BEFORE = ("setup", "before")


class _Held:
    """One storage, from its first sight to its end."""

    __slots__ = ("category", "fixed", "nbytes", "origin")

    def __init__(self, nbytes: int, category: Category, origin: str, fixed: bool) -> None:
        self.nbytes, self.category, self.origin, self.fixed = nbytes, category, origin, fixed


class Storages:
    """Follows storages between ``start`` and ``stop``; ``register`` long-lived ones before."""

    def __init__(self) -> None:
        self._live: dict[int, _Held] = {}
        self._before: list[tuple[_Held, int]] = []
        """What the step began with, and its bytes then."""
        self._events: list[tuple[_Held, int]] = []
        self._phase = "none"
        self._overlapping = False
        """Another step is under way at the beginning and at the end."""

    def register(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Enter the whole storages of long-lived ``tensors`` under ``category``; known ones stay what they are."""
        for tensor in tensors:
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._enter(tensor.untyped_storage(), category, "setup", fixed=True)

    def restart(self) -> None:
        """The step begins only now: what is there is there from the beginning, as what it is.

        All that lasts has been registered then; what else is there at the end belongs to the next step.
        """
        self.see((), "none")
        self._before = [(held, held.nbytes) for held in self._live.values()]
        self._events = []
        self._overlapping = True

    def stop(self) -> None:
        """End the step: what is still there and was made in backward or by the optimizer is meant to last."""
        self.see((), "none")
        if self._overlapping:
            return
        for held in self._live.values():
            if not held.fixed and held.origin in _LASTING:
                held.category = _LASTING[held.origin]

    def see_arguments(self, arguments: Iterable[Any]) -> None:
        """Take note of what an operation is given: a storage not known yet was there before the step."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                if argument.layout is torch.strided and argument.untyped_storage()._cdata not in self._live:
                    self._enter(argument.untyped_storage(), "temporary", "before", fixed=True)
            elif isinstance(argument, tuple | list):
                self.see_arguments(argument)

    def see(self, results: Any, phase: str) -> None:
        """Take note of what an operation returned."""
        if phase != self._phase:
            if self._phase in _KEPT_FOR_BACKWARD:
                self._promote()
            self._phase = phase
        if isinstance(results, Tensor):
            self._see_one(results, phase)
        elif isinstance(results, tuple | list):
            for result in results:
                if isinstance(result, Tensor):
                    self._see_one(result, phase)

    def _see_one(self, tensor: Tensor, phase: str) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._enter(storage, "temporary", phase, fixed=False)

    def _enter(self, storage: torch.UntypedStorage, category: Category, origin: str, *, fixed: bool) -> None:
        key = storage._cdata
        if key in self._live:
            return
        held = _Held(storage.nbytes(), category, origin, fixed)
        self._live[key] = held
        if origin in _THERE_BEFORE:
            self._before.append((held, held.nbytes))
        else:
            self._events.append((held, held.nbytes))
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        held = self._live.pop(key, None)
        if held is not None and held.nbytes:
            self._events.append((held, -held.nbytes))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was given another size in place."""
        held = self._live.get(storage._cdata)
        if held is None:
            # Made before the step and empty until now: a gather buffer.
            self._enter(storage, "temporary", "resize", fixed=True)
        elif (change := storage.nbytes() - held.nbytes) != 0:
            held.nbytes += change
            self._events.append((held, change))

    def _promote(self) -> None:
        """A forward ended: what of it is alive is there for the backward."""
        for held in self._live.values():
            if not held.fixed and held.origin in _KEPT_FOR_BACKWARD:
                held.category = "activations"

    def stores(self) -> Stores:
        """The step's highest moments."""
        now = dict.fromkeys(CATEGORIES, 0)
        highest = dict(now)
        peak, at_peak = 0, dict(now)
        for held, change in (*self._before, *self._events):
            now[held.category] += change
            highest[held.category] = max(highest[held.category], now[held.category])
            if (total := sum(now.values())) > peak:
                peak, at_peak = total, dict(now)
        return Stores(**highest, peak=peak, at_peak=at_peak)
