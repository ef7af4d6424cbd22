"""A layout against one device: the same job, the same start, the same data; then every difference."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

PARAMETER_BOUNDS = {
    ("float64", "sgd"): 1e-10,
    ("float64", "adamw"): 1e-10,
    ("float32", "sgd"): 1e-5,
    ("float32", "adamw"): 1e-4,
}
"""Largest relative difference by (dtype, optimizer); AdamW with eps of at least 1e-6."""


@dataclass
class Trace:
    """What a run of a few steps left behind, by full parameter name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    parameters: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Parity:
    """The verdict on one layout, one optimizer, one dtype."""

    label: str
    layout: str
    ranks: int
    dtype: str
    optimizer: str
    clipped: bool
    steps: int
    max_relative_parameter_difference: float
    max_relative_gradient_difference: float
    max_relative_loss_difference: float
    worst: str
    passed: bool

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


def parameter_difference(found: Arrays, expected: Arrays, scale: float) -> tuple[float, str]:
    """Largest ``max|p - p_ref| / max(max|p_ref|, scale)`` over the tensors, and which tensor; scale = lr * steps."""
    return _largest(found, expected, lambda reference: max(float(numpy.abs(reference).max()), scale))


def gradient_difference(found: Arrays, expected: Arrays) -> tuple[float, str]:
    """Largest ``max|g - g_ref| / max(max|g_ref|, 1e-6 * global norm)`` over the tensors, and which tensor."""
    norm = float(numpy.sqrt(sum(float((g.astype(numpy.float64) ** 2).sum()) for g in expected.values())))
    return _largest(found, expected, lambda reference: max(float(numpy.abs(reference).max()), 1e-6 * norm))


def _largest(found: Arrays, expected: Arrays, scale: Any) -> tuple[float, str]:
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        return float("inf"), f"present on one side only: {', '.join(odd[:4])}"
    worst, where = 0.0, ""
    for name, reference in expected.items():
        if found[name].shape != reference.shape:
            return float("inf"), name
        difference = float(numpy.abs(found[name].astype(numpy.float64) - reference.astype(numpy.float64)).max())
        divisor = scale(reference)
        relative = difference / divisor if divisor > 0 else (0.0 if difference == 0 else float("inf"))
        if not relative <= worst:  # also true for NaN
            worst, where = (relative if relative == relative else float("inf")), name
    return worst, where


def compare(
    found: Trace, expected: Trace, *, label: str, layout: str, ranks: int, dtype: str, optimizer: str,
    clipped: bool, learning_rate: float, bound: float, gradient_steps: int | None = None,
) -> Parity:  # fmt: skip
    """Hold a run against the oracle's.

    Gradients are compared at every SGD step and at the first AdamW step (later AdamW gradients are taken
    at parameters that already differ by rounding), or at ``gradient_steps`` steps.
    """
    steps = len(expected.losses)
    parameter, where = parameter_difference(found.parameters, expected.parameters, learning_rate * steps)
    worst = f"parameter {where}"
    gradient = 0.0
    for step in range((steps if optimizer == "sgd" else 1) if gradient_steps is None else gradient_steps):
        difference, name = gradient_difference(found.gradients[step], expected.gradients[step])
        if difference > gradient:
            gradient, where = difference, f"gradient {name} at step {step + 1}"
            if gradient > parameter:
                worst = where
    losses = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found.losses, expected.losses, strict=True)]
    loss = max(math.inf if math.isnan(difference) else difference for difference in losses)
    passed = all(value <= bound for value in (parameter, gradient, loss))
    return Parity(
        label, layout, ranks, dtype, optimizer, clipped, steps, parameter, gradient, loss, worst, passed
    )


def assemble(parts: list[list[tuple[str, tuple[int, ...], tuple[int, ...], NDArray[Any]]]]) -> Arrays:
    """Whole named tensors from boxes ``(name, shape, offsets, values)`` of all ranks.

    Raises:
        ValueError: a hole, or two copies of an element that are not the same bits.
    """
    whole: Arrays = {}
    seen: dict[str, NDArray[numpy.bool_]] = {}
    for boxes in parts:
        for name, shape, offsets, values in boxes:
            if name not in whole:
                whole[name] = numpy.zeros(shape, values.dtype)
                seen[name] = numpy.zeros(shape, bool)
            where = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            mask = seen[name][where]
            if mask.any() and not numpy.array_equal(whole[name][where][mask], values[mask], equal_nan=True):
                raise ValueError(f"two ranks hold different bits of {name}")
            whole[name][where] = values
            seen[name][where] = True
    for name, mask in seen.items():
        if not mask.all():
            raise ValueError(f"{int((~mask).sum())} elements of {name} are on no rank")
    return whole


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy on the host; bfloat16 becomes float32 (exact)."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return numpy.array(tensor.numpy(), copy=True)
