"""Fit the efficiency constants: `python -m bench.fit_efficiency FILE... [--write]`.

Few constants, by device type and by program, in logarithms; residuals are logarithms of predicted over measured step
time with a Huber loss, and every constant is drawn to its physical starting value with a stated width, so that what
the rows do not say stays where it was. Levenberg-Marquardt with differences, plain NumPy. Only calibration rows count:
half of each source, by a checksum of what the row says. ``--cross`` leaves each source out in turn.

Of memory two constants of one program are fitted, BLOOM's: the runtime's own bytes, and what the allocator holds
beyond the activations. Least squares.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.published_predict import (
    CONSTANTS_FILE,
    FITTED_ROWS_FILE,
    Batch,
    Constants,
    batches,
    choose_micro_batches,
    fingerprint,
    in_fitted_half,
    predict,
    seconds,
)
from bench.published_rows import Row, read_rows
from meshwright.plan.arrays import Floats

EFFICIENCY_FILE = Path(__file__).parents[1] / "src/meshwright/job/catalogue/efficiency.json"

A100, H100, H100_500W, B200 = "A100-SXM4-80GB", "H100-SXM5-80GB", "H100-SXM5-96GB-500W", "B200-SXM-180GB"

_DEVICE_START = {
    A100: {"gemm": 0.83, "area_half": 8e5, "depth_half": 64, "attention_forward": 0.5, "attention_backward": 0.35},
    H100: {"gemm": 0.65, "area_half": 1.2e6, "depth_half": 120, "attention_forward": 0.35, "attention_backward": 0.25},
    H100_500W: {"gemm": 0.55, "area_half": 1.2e6, "depth_half": 120, "attention_forward": 0.35,
                "attention_backward": 0.3},
    B200: {"gemm": 0.6, "area_half": 1.2e6, "depth_half": 120, "attention_forward": 0.35, "attention_backward": 0.3},
}  # fmt: skip
_DEVICE_COMMON = {"length_half": 200, "memory": 0.8, "launch": 2.5e-6, "dispatch": 1e-5, "link": 0.75, "latency": 7e-6}
_PROGRAM_START: dict[str, dict[str, float]] = {
    "megatron-deepspeed-vtrain": {"kernels": 4.0, "optimizer_bytes": 30, "step_seconds": 5e-3,
                                  "micro_batch_seconds": 1e-3},
    "megatron-deepspeed": {"kernels": 2.0, "micro_batch_seconds": 1e-3, "layer_seconds": 0.01},
    "megatron-2021": {"kernels": 1.5},
    "mosaic-fsdp": {"step_seconds": 1e-2, "micro_batch_seconds": 1e-3, "overlap_gathers": 0.8,
                    "overlap_gradients": 0.8},
    "fms-fsdp": {"elementwise": 0.6, "kernels": 0.7, "overlap_gathers": 0.9, "overlap_gradients": 0.9},
    "torchtitan": {"elementwise": 2.0, "overlap_gathers": 0.9, "overlap_gradients": 0.9},
    "torchtitan-compile": {"elementwise": 0.6, "kernels": 0.5, "overlap_gathers": 0.9, "overlap_gradients": 0.9},
    "megatron-core-no-overlap": {},
    "megatron-bridge": {"overlap_gathers": 0.9, "overlap_gradients": 0.9},
}  # fmt: skip
_PROGRAM_COMMON = {"elementwise": 1.0, "kernels": 1.0, "optimizer_bytes": 34.0}
_NETWORK_START = {
    "infiniband": {"efficiency": 0.8, "latency": 15e-6},
    "roce": {"efficiency": 0.75, "latency": 15e-6},
    "omnipath": {"efficiency": 0.75, "latency": 15e-6},
}

_CURVES = ("gemm", "area_half", "depth_half", "memory", "launch", "link", "latency")
_ATTENTION = ("attention_forward", "attention_backward", "length_half")


def _keys(kind: str, name: str, fields: Sequence[str]) -> list[str]:
    return [f"{kind}.{name}.{field}" for field in fields]


STEPS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    (
        A100,
        (
            *_keys("device", A100, (*_CURVES, *_ATTENTION)),
            *_keys("program", "megatron-deepspeed-vtrain",
                   ("elementwise", "kernels", "optimizer_bytes", "step_seconds", "micro_batch_seconds")),
            *_keys("program", "megatron-deepspeed", ("elementwise", "layer_seconds")),
            *_keys("program", "megatron-2021", ("elementwise",)),
            *_keys("program", "mosaic-fsdp", ("elementwise", "overlap_gathers")),
            *_keys("program", "fms-fsdp", ("elementwise", "overlap_gathers")),
            *_keys("network", "infiniband", ("efficiency",)),
            *_keys("network", "omnipath", ("efficiency",)),
        ),
        0.4,
    ),
    (H100, tuple(_keys("device", H100, ("gemm", "area_half", "depth_half", "memory", "link", *_ATTENTION))), 0.3),
    (
        H100_500W,
        (*_keys("device", H100_500W, ("gemm",)), *_keys("program", "torchtitan", ("elementwise",)),
         *_keys("program", "torchtitan-compile", ("elementwise",))),
        0.3,
    ),
    (B200, (*_keys("device", B200, ("gemm", "depth_half", "memory", "link")),), 0.3),
)  # fmt: skip
"""What is fitted on the rows of which device, and how far (in logarithms) a constant may go before it costs as much
as one row that is off by the Huber width."""

_HUBER = 0.1
_MOST_ROWS = 60
"""A source with more calibration rows weighs as much as one with this many, to the power 0.9."""


def starting_constants() -> Constants:
    """Physical starting values."""
    constants: Constants = {}
    for name, values in _DEVICE_START.items():
        constants |= {f"device.{name}.{key}": float(value) for key, value in {**_DEVICE_COMMON, **values}.items()}
    for name, values in _PROGRAM_START.items():
        constants |= {f"program.{name}.{key}": value for key, value in {**_PROGRAM_COMMON, **values}.items()}
    for name, values in _NETWORK_START.items():
        constants |= {f"network.{name}.{key}": value for key, value in values.items()}
    return constants


def fit(rows: Sequence[Row], used: Callable[[Row], bool]) -> Constants:
    """Constants fitted on the rows that ``used`` names."""
    constants = starting_constants()
    choose_micro_batches(rows, constants)
    for device, keys, width in STEPS:
        some = [row for row in rows if row.reason is None and row.step_time and row.device == device and used(row)]
        if some:
            constants = _fit_step(some, constants, keys, width)
    return _fit_memory(rows, constants, used)


def _fit_memory(rows: Sequence[Row], constants: Constants, used: Callable[[Row], bool]) -> Constants:
    """The runtime's bytes and the allocator's slack of DeepSpeed's runs."""
    some = [row for row in rows if row.reason is None and row.memory and row.source == "bloom" and used(row)]
    if len(some) < 4:
        return constants
    bare, one = {"context_bytes": 0.0, "slack": 0.0}, {"context_bytes": 0.0, "slack": 1.0}

    def predicted(values: dict[str, float]) -> Floats:
        named = {f"program.megatron-deepspeed.{key}": value for key, value in values.items()}
        return predict(some, constants | named)[1]

    without = predicted(bare)
    slope = np.stack([np.ones(len(some)), predicted(one) - without], axis=1)
    missing = np.array([row.memory for row in some], float) - without
    context, slack = np.linalg.lstsq(slope, missing, rcond=None)[0].tolist()
    return constants | {
        "program.megatron-deepspeed.context_bytes": context,
        "program.megatron-deepspeed.slack": slack,
    }


def _fit_step(rows: Sequence[Row], constants: Constants, keys: Sequence[str], width: float) -> Constants:
    measured = np.log([row.step_time or np.nan for row in rows])
    counts = Counter(row.source for row in rows)
    weight = np.array([min(1.0, (_MOST_ROWS / counts[row.source]) ** 0.9) for row in rows])
    groups = batches(rows)
    start = np.log([constants[key] for key in keys])

    def residuals(values: Floats) -> Floats:
        return _log_times(groups, constants | dict(zip(keys, np.exp(values), strict=True)), len(rows)) - measured

    values = _levenberg_marquardt(residuals, start, weight / _HUBER**2, width)
    return constants | {key: _bounded(key, value) for key, value in zip(keys, np.exp(values).tolist(), strict=True)}


def _bounded(key: str, value: float) -> float:
    bounded = ("gemm", "memory", "link", "efficiency", "overlap_gathers", "attention_forward", "attention_backward")
    return min(value, 1.0) if key.rsplit(".", 1)[1] in bounded else value


def _log_times(groups: Sequence[Batch], constants: Constants, count: int) -> Floats:
    times = np.empty(count)
    for batch in groups:
        times[batch.index] = seconds(batch, {key: _bounded(key, value) for key, value in constants.items()})
    return np.log(times)


def _levenberg_marquardt(
    residuals: Callable[[Floats], Floats], start: Floats, weight: Floats, width: float, rounds: int = 15
) -> Floats:
    """Least Huber loss plus half the squared distance from the start in units of ``width``."""

    def loss(errors: Floats, values: Floats) -> float:
        size = np.abs(errors)
        huber = np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))
        return float((weight * huber).sum() + (((values - start) / width) ** 2).sum() / 2)

    values, damping = start.copy(), 1e-2
    errors = residuals(values)
    cost = loss(errors, values)
    for _ in range(rounds):
        steps = np.eye(len(values)) * 1e-3
        slopes = np.stack([(residuals(values + step) - errors) / 1e-3 for step in steps], axis=1)
        pull = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(errors), 1e-9))
        curvature = slopes.T @ (pull[:, None] * slopes) + np.eye(len(values)) / width**2
        gradient = slopes.T @ (pull * errors) + (values - start) / width**2
        for _ in range(6):
            step = np.clip(np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient), -0.5, 0.5)
            tried = residuals(values + step)
            if loss(tried, values + step) < cost:
                break
            damping *= 5
        else:
            break
        before, values, errors = cost, values + step, tried
        cost, damping = loss(errors, values), max(damping / 5, 1e-5)
        if before - cost < 1e-3 * cost:
            break
    return values


def leave_one_out(rows: Sequence[Row]) -> dict[str, Floats]:
    """For each source the errors of all its rows, with constants fitted on calibration rows of the other sources."""
    errors = {}
    for source in sorted({row.source for row in rows if row.reason is None and row.step_time}):
        constants = fit(rows, lambda row, left=source: in_fitted_half(row) and row.source != left)  # type: ignore[misc]
        some = [row for row in rows if row.source == source and row.reason is None and row.step_time]
        times = np.exp(_log_times(batches(some), constants, len(some)))
        errors[source] = times / np.array([row.step_time for row in some], float) - 1
    return errors


def write(constants: Constants, rows: Sequence[Row], crossed: dict[str, Floats]) -> None:
    """Both data files."""
    stored = json.loads(EFFICIENCY_FILE.read_text("utf-8"))
    for name in _DEVICE_START:
        one = {key.rsplit(".", 1)[1]: value for key, value in constants.items() if key.startswith(f"device.{name}.")}
        used = Counter(row.source for row in rows if row.device == name and row.reason is None and in_fitted_half(row))
        stored["devices"][name] = _device_entry(one, used) | {
            "network": float(f"{constants['network.infiniband.efficiency']:.4g}")
        }
    EFFICIENCY_FILE.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    used_rows = sorted(fingerprint(row) for row in rows if row.reason is None and row.step_time and in_fitted_half(row))
    FITTED_ROWS_FILE.write_text(json.dumps(used_rows) + "\n", "utf-8")
    tables = {
        kind: {
            name: {
                key.rsplit(".", 1)[1]: float(f"{value:.4g}")
                for key, value in constants.items()
                if key.startswith(f"{kind}.{name}.")
            }
            for name in names
        }
        for kind, names in (("program", _PROGRAM_START), ("network", _NETWORK_START))
    }
    document = {
        "about": "Constants of programs and kinds of network that published rows were measured with; written by "
        "python -m bench.fit_efficiency FILE... --write. Fitted on half of each source, chosen by a checksum.",
        "fitted_devices": list(_DEVICE_START),
        **tables,
        "leave_one_source_out": {
            source: {
                "rows": len(error),
                "median_abs_error": round(float(np.median(np.abs(error))), 4),
                "bias": round(float(np.median(error)), 4),
            }
            for source, error in crossed.items()
        },
    }
    CONSTANTS_FILE.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _device_entry(one: dict[str, float], used: Counter[str]) -> dict[str, object]:
    curve = {key: float(f"{one[name]:.4g}") for key, name in
             (("efficiency", "gemm"), ("area_half", "area_half"), ("depth_half", "depth_half"))}  # fmt: skip
    rounded = {key: float(f"{value:.4g}") for key, value in one.items()}
    return {
        "gemm": {"float16": curve, "bfloat16": curve, "float32": curve | {"efficiency": 0.8}},
        "attention": {
            "forward": rounded["attention_forward"],
            "backward": rounded["attention_backward"],
            "length_half": rounded["length_half"],
        },
        **{key: rounded[key] for key in ("memory", "launch", "dispatch", "link", "latency")},
        "fitted_on": [f"{source}: {count} rows" for source, count in sorted(used.items())],
        "note": "float32: not fitted",
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.fit_efficiency", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", help="published rows, JSON or CSV")
    parser.add_argument("--write", action="store_true", help="write the data files")
    parser.add_argument("--cross", action="store_true", help="leave one source out in turn (slow)")
    options = parser.parse_args()
    rows = [row for file in options.files for row in read_rows(file)]
    constants = fit(rows, in_fitted_half)
    for key, value in constants.items():
        print(f"{key:55s} {value:.4g}")
    crossed = leave_one_out(rows) if options.cross else {}
    for source, error in crossed.items():
        print(f"left out {source:20s} median {np.median(np.abs(error)):.1%} bias {np.median(error):+.1%}")
    if options.write:
        write(constants, rows, crossed)


if __name__ == "__main__":
    main()
