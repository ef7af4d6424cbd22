"""What fake tensors lack, answered in one place: values that are read, messages, and the result of writing.

A trace follows the program, and the program now and then asks a tensor for its value (``item``, ``tolist``, a truth
value). ``NoValues`` states an answer, always the same: ``1.0``, ``1``, ``False``. So the tokens of a batch count as one
valid token, losses and gradients are finite, no norm is above a clipping limit of 1, no rank wants to stop, and float16
does not overflow: the step that training takes nearly always. Nothing else in the program depends on a value.

The rest saves time. Sends and receives of one kind are answered with one finished piece of work, and writing into a
tensor that keeps its shape changes nothing that a fake tensor has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten, _c10d = torch.ops.aten, torch.ops.c10d

_DEVICE = torch.ops.prim.device.default
"""Every look at ``tensor.device`` is an operation on fake tensors, half of all that there are."""
_MESSAGES = (_c10d.send.default, _c10d.recv_.default)
_WRITES = (_aten.copy_.default, _aten.add_.Tensor, _aten.mul_.Tensor)
_WRITES_OUT = (_aten.add.out, _aten.maximum.out, _aten.minimum.out)


class NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it inside a ``FakeTensorMode``; see the module."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against the compiler around every operation: nothing is compiled here."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._finished: dict[Any, Any] = {}
        """By operation: the work object of its first call."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer one operation, or pass it on to the fake tensors."""
        kwargs = kwargs or {}
        if func in _MESSAGES:
            if func not in self._finished:
                self._finished[func] = func(*args, **kwargs)
            return self._finished[func]
        if args and isinstance(args[0], FakeTensor):
            if func is _aten._local_scalar_dense.default:
                return _stated(args[0].dtype)
            if func is _DEVICE:
                return args[0].fake_device
            if func in _WRITES:
                return args[0]
            if func in _WRITES_OUT and kwargs["out"].shape == args[0].shape:
                return kwargs["out"]
        return func(*args, **kwargs)


def _stated(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1
