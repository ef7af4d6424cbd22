"""Two checkpoints side by side: which tensors differ, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.manifest import Entry, Manifest, read_manifest


@dataclass(frozen=True)
class Difference:
    """How two tensors of one shape and type differ."""

    elements: int
    """Whose bits differ."""
    of: int
    largest: float
    """max |a - b|; infinite when an element is finite on one side only."""
    relative: float
    """That, divided by max |a|."""


@dataclass
class Comparison:
    """What differs between checkpoints ``a`` and ``b``; all empty when nothing does."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, Difference] = field(default_factory=dict)
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Entries of step, layout, model, optimizer and state, such as ``state.cursor``."""
    equal: int = 0
    """Tensors equal to the last bit."""

    @property
    def same_tensors(self) -> bool:
        """Whether both hold the same tensors, bit for bit."""
        return not (self.only_a or self.only_b or self.shapes or self.dtypes or self.values)

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {**asdict(self), "same_tensors": self.same_tensors}


def compare_checkpoints(a: Path, b: Path) -> Comparison:
    """Compare two checkpoints, whatever the layouts that wrote them; one tensor of each is in memory at a time.

    Slices that are cut alike are compared by their checksums; the others are read and checked.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    left, right = read_manifest(a), read_manifest(b)
    result = Comparison(
        only_a=sorted(left.tensors.keys() - right.tensors.keys()),
        only_b=sorted(right.tensors.keys() - left.tensors.keys()),
        facts=_facts(left, right),
    )
    for key in sorted(left.tensors.keys() & right.tensors.keys()):
        one, two = left.tensors[key], right.tensors[key]
        if one.shape != two.shape:
            result.shapes[key] = list(one.shape), list(two.shape)
        if one.dtype != two.dtype:
            result.dtypes[key] = one.dtype, two.dtype
        if one.shape != two.shape or one.dtype != two.dtype:
            continue
        if _sums(one) == _sums(two):
            result.equal += 1
            continue
        role, _, name = key.partition("/")
        found = difference(read_tensor(left, name, role), read_tensor(right, name, role))  # type: ignore[arg-type]
        if found.elements:
            result.values[key] = found
        else:
            result.equal += 1
    return result


def _sums(entry: Entry) -> dict[Any, str]:
    return {piece.box: piece.checksum for piece in entry.slices}


def difference(a: Tensor, b: Tensor) -> Difference:
    """How two tensors of one shape and type differ; equal bits are equal, also of NaN."""
    flat_a, flat_b = a.contiguous().view(-1), b.contiguous().view(-1)
    bits = (flat_a.view(torch.uint8) != flat_b.view(torch.uint8)).view(flat_a.numel(), -1).any(1)
    where = bits.nonzero().view(-1)
    x, y = flat_a[where].double(), flat_b[where].double()
    gap = torch.nan_to_num((x - y).abs(), nan=float("inf"))
    largest = float(gap.max()) if gap.numel() else 0.0
    peak = float(torch.nan_to_num(flat_a.double().abs(), nan=0.0, posinf=0.0).max()) if flat_a.numel() else 0.0
    relative = largest / peak if peak else (0.0 if largest == 0 else float("inf"))
    return Difference(int(where.numel()), flat_a.numel(), largest, relative)


def _facts(left: Manifest, right: Manifest) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("step", "layout"):
        one, two = getattr(left, name), getattr(right, name)
        if one != two:
            found[name] = one, two
    for section in ("model", "optimizer", "state"):
        a: Mapping[str, Any] = getattr(left, section)
        b: Mapping[str, Any] = getattr(right, section)
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                found[f"{section}.{key}"] = a.get(key), b.get(key)
    return found
