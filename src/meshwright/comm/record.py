"""Recording a step: one mode that sees its traffic, its storages and its FLOPs.

The same mode runs on real tensors (the measured ledger) and on fake ones (the traced ledger): it looks
at shapes, never at values.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.flops import Flops, attention_calls, windows_of_modules
from meshwright.comm.phase import current_phase, phase
from meshwright.comm.storages import Storages
from meshwright.comm.timeline import Timeline, active_timeline, blocked, span
from meshwright.comm.traffic import NAMESPACES, Traffic, activate
from meshwright.ledger.ledger import Category, Computes, Send, Stores

__all__ = ["Timeline", "TrafficRecorder", "active_timeline", "blocked", "current_phase", "phase", "span"]


class TrafficRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is sent, held and computed inside ``with recorder:``.

    Collection of reference cycles is put off until the end, so that what is held does not depend on
    when it happens to run. Compiled blocks run uncompiled inside: a mode cannot look into them.

    Args:
        axis_of: names the mesh axis of a group (``Mesh.axis_of``).
        backend: whose wire bytes: ``"gloo"`` or ``"nccl"``.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against the compiler around every operation: nothing is compiled inside."""
        return False

    def __init__(self, axis_of: Callable[[dist.ProcessGroup], str], backend: str = "gloo") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic(axis_of, backend)
        self.storages = Storages()
        self.flops = Flops()
        self._open: ExitStack | None = None

    def register(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Enter long-lived state (the whole storages of ``tensors``) before the step; the first category stays."""
        self.storages.register(tensors, category)

    def restart(self) -> None:
        """Count from here: what was seen before was of a step that the next one overlaps."""
        gc.collect()
        self.traffic.counts.clear()
        self.traffic.transport.clear()
        self.flops.restart()
        self.storages.restart()

    def __enter__(self) -> TrafficRecorder:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_uncollected())
            stack.enter_context(_watched_resize(self.storages))
            stack.enter_context(windows_of_modules(self.flops))
            stack.enter_context(attention_calls(self.flops))
            activate(self.traffic)
            stack.callback(activate, None)
            stack.callback(self.storages.stop)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._open is not None:
            self._open.close()
            self._open = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and take note of it."""
        if any(issubclass(kind, DTensor) for kind in types):
            # Let it take itself apart: its local operations and collectives come by here one by one.
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # A fake tensor is asked for its device.
            return func(*args, **kwargs)
        self.storages.see_arguments(args)
        if kwargs:
            self.storages.see_arguments(kwargs.values())
        if func.namespace in NAMESPACES:
            self.traffic.see(func, args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if current_phase() != "reduce":  # what a compressor multiplies is no work of the model
            self.flops.see(func, args, kwargs, result)
        self.storages.see(result, current_phase())
        return result

    @property
    def sends(self) -> tuple[Send, ...]:
        """What was sent."""
        return self.traffic.sends()

    @property
    def stores(self) -> Stores:
        """What was held."""
        return self.storages.stores()

    @property
    def computes(self) -> Computes:
        """What was computed."""
        return self.flops.computes()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection inside; a full one before."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _watched_resize(storages: Storages) -> Iterator[None]:
    """Tell ``storages`` of every ``UntypedStorage.resize_``: FSDP2 frees and fills its parameters by it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        storages.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
