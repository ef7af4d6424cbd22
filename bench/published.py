"""Hold the planner against published measurements: `python -m bench.published FILE [--json]`.

Every row of the file is predicted, or the one field named that keeps it from being predicted. Rows that constants
were fitted on are marked ``calibration`` and left out of ``overall``, ``sources`` and ``groups``' error figures; their
own error stands apart (``calibration``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.published_predict import (
    CONSTANTS_FILE,
    choose_micro_batches,
    fingerprint,
    fitted_rows,
    load_constants,
    predict,
)
from bench.published_rows import DEFAULTS, Row, read_rows
from meshwright.errors import InputError
from meshwright.job.hardware import device_entry

_LEAST_OF_A_GROUP = 4
"""Runs of a group below which no rank correlation is given."""


def published(path: str) -> dict[str, Any]:
    """Everything the command reports, as its JSON.

    Raises:
        InputError: the file cannot be read.
    """
    rows = read_rows(path)
    constants = load_constants()
    choose_micro_batches(rows, constants)
    times, memory = predict(rows, constants)
    fitted = fitted_rows()
    entries = [
        _entry(row, float(seconds), float(size), fitted) for row, seconds, size in zip(rows, times, memory, strict=True)
    ]
    fresh = [entry for entry in entries if not entry["calibration"]]
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in fresh:
        by_source[entry["source"]].append(entry)
    return {
        "rows": entries,
        "overall": summary(fresh),
        "sources": {name: summary(some) for name, some in sorted(by_source.items())},
        "calibration": summary([entry for entry in entries if entry["calibration"]]),
        "groups": groups(entries),
        "leave_one_source_out": json.loads(CONSTANTS_FILE.read_text("utf-8"))["leave_one_source_out"],
        "defaults": DEFAULTS,
    }


def _entry(row: Row, seconds: float, size: float, fitted: frozenset[int]) -> dict[str, Any]:
    usable = row.reason is None
    fits = usable and size <= device_entry(row.device)["memory_bytes"]
    error = seconds / row.step_time - 1 if usable and row.step_time else None
    return {
        "id": row.id,
        "source": row.source,
        "group": row.group,
        "usable": usable,
        "reason": row.reason,
        "calibration": usable and fingerprint(row) in fitted,
        "measured_step_time_s": row.step_time,
        "predicted_step_time_s": seconds if usable else None,
        "error": error,
        "measured_memory_bytes": row.memory,
        "predicted_memory_bytes": size if usable else None,
        "measured_out_of_memory": row.out_of_memory,
        "predicted_fits": bool(fits) if usable else None,
        "filled_in": row.basis,
        "warning": _too_fast(row) if usable and row.step_time else None,
    }


def _too_fast(row: Row) -> str | None:
    """A measured time that no device of this kind can reach: an error of the row."""
    assert row.shape is not None and row.step_time is not None
    peak = device_entry(row.device)["peak_flops"][row.dtype]
    utilisation = float(row.shape.model_flops()) / (row.step_time * row.devices * peak)
    if utilisation <= 1:
        return None
    return f"the measured step would be {utilisation:.0%} of the dense peak of {row.devices} {row.device}"


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of some rows; None where no row has what is asked."""
    usable = [entry for entry in entries if entry["usable"]]
    errors = np.array([entry["error"] for entry in usable if entry["error"] is not None], float)
    sizes = np.array(
        [
            entry["predicted_memory_bytes"] / entry["measured_memory_bytes"] - 1
            for entry in usable
            if entry["measured_memory_bytes"]
        ],
        float,
    )

    def figure(values: np.ndarray[Any, np.dtype[np.float64]], quantile: float, *, signed: bool = False) -> float | None:
        return float(np.quantile(values if signed else np.abs(values), quantile)) if len(values) else None

    return {
        "rows": len(entries),
        "usable": len(usable),
        "timed": len(errors),
        "median_abs_error": figure(errors, 0.5),
        "p90_abs_error": figure(errors, 0.9),
        "bias": figure(errors, 0.5, signed=True),
        "memory_rows": len(sizes),
        "memory_median_abs_error": figure(sizes, 0.5),
        "false_fits": sum(entry["measured_out_of_memory"] and entry["predicted_fits"] for entry in usable),
        "false_oom": sum(not entry["measured_out_of_memory"] and not entry["predicted_fits"] for entry in usable),
    }


def groups(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Spearman's rank correlation of predicted and measured step time, among the runs of one model and cluster."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if entry["error"] is not None:
            found[entry["group"]].append(entry)
    return [
        {
            "name": name,
            "rows": len(some),
            "spearman": spearman(
                [entry["predicted_step_time_s"] for entry in some], [entry["measured_step_time_s"] for entry in some]
            )
            if len(some) >= _LEAST_OF_A_GROUP
            else None,
        }
        for name, some in sorted(found.items())
    ]


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    array = np.asarray(values, float)
    return np.array([((array < value).sum() + (array <= value).sum() + 1) / 2 for value in array])


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"


_FITS = {True: "", False: " (does not fit)"}


def _line(name: str, one: dict[str, Any]) -> str:
    return (
        f"{name:22s} {one['usable']:5d}/{one['rows']:<5d} {_percent(one['median_abs_error']):>7s} "
        f"{_percent(one['p90_abs_error']):>7s} {_percent(one['bias'], signed=True):>7s} "
        f"{_percent(one['memory_median_abs_error']):>7s} {one['false_fits']:5d} {one['false_oom']:5d}"
    )


def _show(result: dict[str, Any]) -> None:
    for entry in result["rows"]:
        if not entry["usable"]:
            print(f"{entry['id']:22s} not usable: {entry['reason']}")
            continue
        mark = " calibration" if entry["calibration"] else ""
        mark += f" WRONG INPUT: {entry['warning']}" if entry["warning"] else ""
        measured = entry["measured_step_time_s"]
        shown = "out of memory" if entry["measured_out_of_memory"] else f"{measured:.4g} s" if measured else "-"
        size = entry["measured_memory_bytes"]
        memory = f"{size / 1e9:.1f} GB" if size else "-"
        print(
            f"{entry['id']:22s} measured {shown:>13s} predicted {entry['predicted_step_time_s']:10.4g} s "
            f"{_percent(entry['error'], signed=True):>7s}  memory {memory:>8s} predicted "
            f"{entry['predicted_memory_bytes'] / 1e9:6.1f} GB{_FITS[entry['predicted_fits']]}{mark}"
        )
    print(f"\n{'rows not fitted on':22s} {'usable/all':>11s} {'median':>7s} {'p90':>7s} {'bias':>7s} {'memory':>7s} "
          f"{'fits!':>5s} {'oom!':>5s}")  # fmt: skip
    for name, one in result["sources"].items():
        print(_line(name, one))
    print(_line("overall", result["overall"]))
    print(_line("calibration rows", result["calibration"]))
    print("\nSpearman in groups of one model and cluster")
    for group in result["groups"]:
        if group["spearman"] is not None:
            print(f"{group['spearman']:6.2f}  {group['rows']:4d} rows  {group['name']}")
    print("\nLeft out of the fit in turn, each source's error with constants of the others")
    for name, one in result["leave_one_source_out"].items():
        print(f"{name:22s} {one['rows']:5d} rows  {one['median_abs_error']:.1%}  bias {one['bias']:+.1%}")
    print("\nFilled in where a row is silent: " + "; ".join(f"{key}: {value}" for key, value in DEFAULTS.items()))


def main() -> int:
    """Entry point: 0, or 2 where the file is no such file."""
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="published rows: JSON, or vTrain's CSV")
    parser.add_argument("--json", action="store_true", help="JSON alone on standard output")
    options = parser.parse_args()
    try:
        result = published(options.file)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
