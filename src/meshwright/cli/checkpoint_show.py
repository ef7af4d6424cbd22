"""What the commands of ``meshwright checkpoint`` say to a person, line by line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.checkpoint.compare import Comparison
    from meshwright.checkpoint.retention import Pruned

_MOST = 20
"""Names listed before the rest is counted."""


def finite(value: Any) -> Any:
    """The value with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def checkpoint_lines(facts: Mapping[str, Any], tensors: bool) -> list[str]:
    """One checkpoint: what it is, what it holds, and its files."""
    lines = [
        f"{facts['path']}: step {facts['step']}, {facts['bytes']:,} bytes, format version {facts['version']}"
        + (", pinned" if facts["pinned"] else ""),
        f"  saved      {_time(facts['saved'])}",
        f"  layout     {facts['layout']}",
        f"  model      {facts['model'].get('name', 'unnamed')}",
        f"  optimizer  {facts['optimizer'].get('name', 'unnamed')}",
        f"  state      {_pairs(facts['state'])}",
        f"  versions   {_pairs(facts['versions'])}",
    ]
    if facts["referenced_bytes"]:
        lines.append(
            f"  written    {facts['written_bytes']:,} bytes; {facts['referenced_bytes']:,} referenced in files of "
            f"earlier checkpoints, which hold {facts['unused_bytes']:,} more that it does not use"
        )
    for role, held in facts["roles"].items():
        lines.append(f"  {role:<10} {held['tensors']} tensors, {held['elements']:,} elements, {held['bytes']:,} bytes")
    lines += [f"  {name}  {size:,} bytes" for name, size in facts["files"].items()]
    if tensors:
        lines += [f"  {key}  {each['dtype']} {each['shape']}" for key, each in facts["tensors"].items()]
    return lines


def run_lines(facts: Mapping[str, Any]) -> list[str]:
    """The checkpoints of a run, one a line."""
    lines = [facts["folder"]]
    for each in facts["checkpoints"]:
        if not each["complete"]:
            lines.append(f"  step {each['step']:>8}  does not count: {each['problem']}")
            continue
        pinned = "  pinned" if each["pinned"] else ""
        lines.append(
            f"  step {each['step']:>8}  {each['bytes']:>15,} bytes  {_time(each['saved'])}  {each['layout']}{pinned}"
        )
    shared = sum(each["bytes"] for each in facts["checkpoints"] if each["complete"]) - facts["bytes_on_disk"]
    if shared > 0:
        lines.append(f"  {facts['bytes_on_disk']:,} bytes on disk; {shared:,} more if each had files of its own")
    return lines + [f"  {name}: not a checkpoint" for name in facts["left_overs"]]


def verified_lines(result: Mapping[str, Any]) -> list[str]:
    """One verified checkpoint, or everything that is wrong with it."""
    if not result["passed"]:
        return list(result["problems"])
    return [
        f"{result['path']}: step {result['step']}, {result['tensors']} tensors, {result['bytes']:,} bytes, "
        f"all as written ({result['seconds']:.1f} s)"
    ]


def difference_lines(found: Comparison) -> list[str]:
    """Every difference between two checkpoints, tensors with the largest first."""
    lines = [f"{name}: {one} in A, {two} in B" for name, (one, two) in found.facts.items()]
    lines += _listed("only in A", found.only_a) + _listed("only in B", found.only_b)
    lines += [f"shape of {key}: {one} in A, {two} in B" for key, (one, two) in found.shapes.items()]
    lines += [f"type of {key}: {one} in A, {two} in B" for key, (one, two) in found.dtypes.items()]
    ordered = sorted(found.values.items(), key=lambda item: -item[1].relative)
    for key, each in ordered[:_MOST]:
        lines.append(
            f"{key}: {each.elements:,} of {each.of:,} elements differ, at most by {each.largest:.3e} "
            f"(relative {each.relative:.3e})"
        )
    if len(ordered) > _MOST:
        lines.append(f"and {len(ordered) - _MOST} more tensors that differ less; --json lists all")
    lines.append(f"{found.equal} tensors are equal to the last bit" + (", all there are" * found.same_tensors))
    return lines


def pruned_lines(done: Pruned, dry: bool) -> list[str]:
    """What went and what stays."""
    would = "would be " if dry else ""
    lines = [f"kept, verified: {_steps(done.kept)}"]
    if done.spared:
        lines.append(f"kept, pinned or by the job's rule: {_steps(done.spared)}")
    lines += [f"left, but does not count: {problem}" for problem in done.damaged.values()]
    if done.left_overs:
        lines.append(f"{would}removed: {', '.join(done.left_overs)}")
    lines.append(f"{would}removed: {_steps(done.removed)}; {done.freed_bytes:,} bytes {would}freed")
    return lines


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return [f"{what}: {', '.join(names[:_MOST])}{more}"]


def _steps(numbers: Sequence[int]) -> str:
    return ", ".join(f"step-{number}" for number in sorted(numbers)) or "none"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "none"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
