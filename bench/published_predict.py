"""Predictions of measured rows, all rows of a device and program in one call, and the constants they need.

Two data files hold every fitted number: the package's ``catalogue/efficiency.json`` (devices) and
``published_constants.json`` beside this file (programs, kinds of network, and how they were fitted).
``bench/fit_efficiency.py`` writes both.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.published_rows import Row
from meshwright.job.hardware import device_entry, efficiency_of
from meshwright.job.memory import DTYPE_BYTES
from meshwright.plan.array_memory import memory_use
from meshwright.plan.array_time import Machine, StepTime, step_time
from meshwright.plan.arrays import Floats, Layouts
from meshwright.plan.collectives import Network
from meshwright.plan.rules import Rules
from meshwright.plan.shape import Shape
from meshwright.plan.stages import Held, held

CONSTANTS_FILE = Path(__file__).with_name("published_constants.json")
FITTED_ROWS_FILE = Path(__file__).with_name("published_fitted_rows.json")
"""Fingerprints of the rows that the constants were fitted on."""

DEVICE_NAMES = ("gemm", "area_half", "depth_half", "attention_forward", "attention_backward", "length_half", "memory",
                "launch", "dispatch", "link", "latency")  # fmt: skip
Constants = dict[str, float]
"""Flat: ``device.NAME.gemm``, ``program.NAME.kernels``, ``network.KIND.latency``."""


def load_constants() -> Constants:
    """All constants of the data files."""
    stored = json.loads(CONSTANTS_FILE.read_text("utf-8"))
    constants: Constants = {}
    for name in stored["fitted_devices"]:
        constants |= {f"device.{name}.{key}": value for key, value in device_constants(name).items()}
    for kind in ("program", "network"):
        for name, values in stored[kind].items():
            constants |= {f"{kind}.{name}.{key}": value for key, value in values.items() if key != "note"}
    return constants


def device_constants(name: str) -> dict[str, float]:
    """A device's constants by the names used here."""
    own = efficiency_of(name)
    curve = own.gemm.get("bfloat16") or own.gemm["float16"]
    return {
        "gemm": curve.efficiency,
        "area_half": curve.area_half,
        "depth_half": curve.depth_half,
        "attention_forward": own.attention.forward,
        "attention_backward": own.attention.backward,
        "length_half": own.attention.length_half,
        "memory": own.memory,
        "launch": own.launch,
        "dispatch": own.dispatch,
        "link": own.link,
        "latency": own.latency,
    }


@dataclass
class Batch:
    """Rows of one device, program and kind of network, as columns."""

    index: np.ndarray[tuple[int], np.dtype[np.int64]]
    shape: Shape
    layouts: Layouts
    ranks: tuple[Held, Held, Held]
    devices_per_node: np.ndarray[tuple[int], np.dtype[np.int64]]
    node_bandwidth: Floats
    rules: Rules
    device: str
    outside: str
    dtype: str


def batches(rows: Sequence[Row]) -> list[Batch]:
    """Usable rows, gathered by what they share."""
    found: dict[Any, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.reason is None:
            found[(row.device, row.rules, row.outside, row.dtype)].append(index)
    return [_batch(rows, indices) for indices in found.values()]


def _batch(rows: Sequence[Row], indices: list[int]) -> Batch:
    some = [rows[index] for index in indices]
    layouts = Layouts.join([row.layout for row in some if row.layout is not None])
    each = [row.ranks or held(row.layout, row.shape.layers) for row in some if row.layout and row.shape]
    ranks = tuple(
        Held(*(np.concatenate([np.atleast_1d(getattr(one[part], name)) for one in each]) for name in _HELD))
        for part in range(3)
    )
    first = some[0]
    assert first.rules is not None
    return Batch(
        index=np.array(indices),
        shape=Shape.join([row.shape for row in some if row.shape is not None]),
        layouts=layouts,
        ranks=ranks,  # type: ignore[arg-type]
        devices_per_node=np.array([row.devices_per_node for row in some]),
        node_bandwidth=np.array([row.node_bandwidth for row in some]),
        rules=first.rules,
        device=first.device,
        outside=first.outside,
        dtype=first.dtype,
    )


_HELD = ("rank", "layers", "embedding", "head")


def seconds(batch: Batch, constants: Mapping[str, float]) -> Floats:
    """Predicted step times of a batch."""
    return _step(batch, constants).total


def _step(batch: Batch, constants: Mapping[str, float]) -> StepTime:
    entry = device_entry(batch.device)
    known = f"device.{batch.device}.gemm" in constants
    device = (
        {name: constants[f"device.{batch.device}.{name}"] for name in DEVICE_NAMES}
        if known
        else device_constants(batch.device)
    )
    peak = entry["peak_flops"][batch.dtype]
    machine = Machine(
        peak=peak,
        attention_peak=peak,
        bandwidth=entry["memory_bandwidth"] * device["memory"],
        gemm=device["gemm"],
        area_half=device["area_half"],
        depth_half=device["depth_half"],
        attention_forward=device["attention_forward"],
        attention_backward=device["attention_backward"],
        length_half=device["length_half"],
        launch=device["launch"],
        dispatch=device["dispatch"],
        element=float(DTYPE_BYTES[batch.dtype]),
    )
    prefix = f"network.{batch.outside}."
    network = Network(
        devices_per_node=batch.devices_per_node,
        inside_bandwidth=np.asarray(entry["intra"]["bandwidth"] * device["link"]),
        inside_latency=np.asarray(device["latency"]),
        in_switch=np.asarray(False),
        node_bandwidth=batch.node_bandwidth * constants[prefix + "efficiency"],
        outside_latency=np.asarray(constants[prefix + "latency"]),
    )
    rules = program_rules(batch.rules, constants)
    return step_time(batch.shape, batch.layouts, network, machine, rules, None, batch.ranks)


def program_rules(rules: Rules, constants: Mapping[str, float]) -> Rules:
    """The rules of a program with its fitted constants."""
    prefix = f"program.{rules.name}."
    fitted = {key.removeprefix(prefix): value for key, value in constants.items() if key.startswith(prefix)}
    return replace(rules, **fitted) if fitted else rules  # type: ignore[arg-type]


def memory_bytes(batch: Batch, constants: Mapping[str, float]) -> Floats:
    """Predicted bytes of the fullest rank of each row."""
    element = float(DTYPE_BYTES[batch.dtype])
    rules = program_rules(batch.rules, constants)
    return memory_use(batch.shape, batch.layouts, rules, element, batch.ranks).peak


def predict(rows: Sequence[Row], constants: Mapping[str, float],
            wanted: Callable[[Batch], bool] | None = None) -> tuple[Floats, Floats]:  # fmt: skip
    """Seconds and bytes of each row; NaN where a row is unusable (or its batch not wanted)."""
    times, memory = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for batch in batches(rows):
        if wanted is None or wanted(batch):
            times[batch.index], memory[batch.index] = seconds(batch, constants), memory_bytes(batch, constants)
    return times, memory


def choose_micro_batches(rows: Sequence[Row], constants: Mapping[str, float]) -> None:
    """Rows that give no micro-batch get the fastest of 1, 2, 4, 8, 16 that divides their share and fits."""
    for row in rows:
        if row.reason is not None or not row.open_micro_batch or row.layout is None or row.shape is None:
            continue
        share = int(row.shape.global_batch) // int(row.layout.dp[0])
        tries = []
        for micro in (size for size in (1, 2, 4, 8, 16) if share % size == 0):
            layout = row.layout.with_columns(micro_batch=micro, micro_batches=share // micro)
            tries.append(replace(row, layout=layout))
        times, memory = predict(tries, constants)
        fits = memory <= device_entry(row.device)["memory_bytes"]
        best = int(np.argmin(np.where(fits | ~fits.any(), times, np.inf)))
        row.layout = tries[best].layout
        row.basis.append(f"micro_batch {int(tries[best].layout.micro_batch[0])}")  # type: ignore[union-attr]


def fingerprint(row: Row) -> int:
    """Of what the row says, whatever file and place it stands in."""
    said = {key: row.raw.get(key) for key in _SAID}
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


_SAID = ("source", "model", "hardware", "layout", "global_batch", "micro_batch", "precision", "measured")


def in_fitted_half(row: Row) -> bool:
    """Whether the constants are to be fitted on this row: half of every source, by its fingerprint."""
    return fingerprint(row) % 2 == 0


def fitted_rows() -> frozenset[int]:
    """Fingerprints of the rows that the stored constants were fitted on."""
    return frozenset(json.loads(FITTED_ROWS_FILE.read_text("utf-8")))
