"""Rows of published measurements, read into what the planner takes: sizes, a layout, links, and a program's rules.

Two forms: a JSON list of rows (``id``, ``source``, ``model``, ``hardware``, ``layout``, ``global_batch``,
``micro_batch``, ``precision``, ``measured``), and the comma-separated table of vTrain's single-node runs, told apart
by its header.
A row is unusable only for a named missing field, experts, context parallel, fp8 or fp4, or an unknown device.
What a usable row leaves out is filled by the defaults in ``DEFAULTS``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.published_programs import program_of
from meshwright.errors import InputError
from meshwright.job.hardware import device_entry
from meshwright.plan.arrays import RECOMPUTES, SCHEDULES, Layouts
from meshwright.plan.rules import Rules
from meshwright.plan.shape import Shape
from meshwright.plan.stages import Held, held

DEFAULTS = {
    "vocab": "51200 (GPT-2's 50257 padded, Megatron's usual) where the row gives none",
    "kv_heads": "as many as heads",
    "ffn": "4 x hidden",
    "gpus_per_node": "8",
    "dp": "gpus / (tp x pp)",
    "micro_batch": "the one of 1, 2, 4, 8, 16 that is predicted fastest among those that fit",
    "global_batch": "micro_batch x dp (one micro-batch a rank)",
    "recompute": "none",
    "zero": "0",
}

_DEVICES = {
    "A100 (variant not stated in the repo)": "A100-SXM4-80GB",
    "A100": "A100-SXM4-80GB",
    "H100": "H100-SXM5-80GB",
    "V100": "V100-SXM2-32GB",
}
"""Names of rows that the catalogue would refuse as ambiguous: what their sources used."""


@dataclass
class Row:
    """One measured run."""

    id: str
    source: str
    """Short name of the source."""
    group: str
    """Runs of one model on one cluster: what a planner ranks."""
    reason: str | None = None
    """Why it cannot be used; None when it can."""
    step_time: float | None = None
    """Measured seconds."""
    memory: float | None = None
    """Measured bytes."""
    out_of_memory: bool = False
    basis: list[str] = field(default_factory=list)
    """What was filled in."""
    shape: Shape | None = None
    layout: Layouts | None = None
    ranks: tuple[Held, Held, Held] | None = None
    """Set where stage boundaries are not the even ones."""
    rules: Rules | None = None
    device: str = ""
    devices: int = 0
    devices_per_node: int = 8
    node_bandwidth: float = 0.0
    """Bytes/s."""
    outside: str = "infiniband"
    dtype: str = "bfloat16"
    open_micro_batch: bool = False
    """The row gives no micro-batch: the fastest that fits is taken."""
    raw: Mapping[str, Any] = field(default_factory=dict)


class _Unusable(Exception):
    pass


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a file.

    Raises:
        InputError: it cannot be read, or is in neither form.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"published: {file} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})"
        ) from None
    if file.suffix == ".csv" or text.lstrip().startswith("# GPUs"):
        return [_row(values) for values in _table(text, file)]
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"published: {file} is not JSON: {error}") from None
    if isinstance(values, dict) and isinstance(values.get("rows"), list):
        values = values["rows"]
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InputError(f"published: {file} holds no list of rows")
    return [_row(value) for value in values]


_COLUMNS = (
    "gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp", "milliseconds",
)  # fmt: skip


def _table(text: str, file: Path) -> Iterator[dict[str, Any]]:
    """The single-node table of vTrain (VIA-Research/vTrain data/ground_truth_single.csv): one A100-80GB NVLink node."""
    for line, cells in enumerate(csv.reader(text.splitlines()), start=1):
        if line == 1 or not cells:
            continue
        try:
            row = dict(zip(_COLUMNS, map(float, cells), strict=True))
        except ValueError:
            raise InputError(f"published: {file}, line {line}: expected {len(_COLUMNS)} numbers") from None
        yield {
            "id": f"vtrain-single-{line - 1:04d}",
            "source": "VIA-Research/vTrain data/ground_truth_single.csv (MICRO-57 2024)",
            "model": {
                "name": f"GPT h{row['hidden']:g} L{row['layers']:g}",
                **{key: int(row[key]) for key in ("layers", "hidden", "heads", "seq")},
            },
            "hardware": {"gpu": "A100-80GB-SXM", "gpus": int(row["gpus"]), "gpus_per_node": 8},
            "layout": {key: int(row[key]) for key in ("tp", "dp", "pp")} | {"recompute": "full", "schedule": "1f1b"},
            "global_batch": int(row["global_batch"]),
            "micro_batch": int(row["micro_batch"]),
            "precision": "fp16 mixed",
            "measured": {"step_time_s": row["milliseconds"] / 1000},
        }


def _row(raw: Mapping[str, Any]) -> Row:
    name = str(raw.get("source", ""))
    row = Row(id=str(raw.get("id", "?")), source=source_name(name, str(raw.get("id", ""))), group="", raw=raw)
    measured = _table_of(raw, "measured")
    row.out_of_memory = bool(measured.get("oom"))
    row.memory = _bytes(measured)
    try:
        _fill(row, raw)
    except _Unusable as reason:
        row.reason = str(reason)
    except InputError as error:
        row.reason = f"unknown device: {str(error).split(';')[0]}"
    return row


def source_name(source: str, identity: str) -> str:
    """The short name of a source: the repository or paper, with the table where a source has several machines."""
    prefix = re.sub(r"-?[0-9]+$", "", identity)
    known = {
        "mosaicml": "mosaic", "pytorch/torchtitan": "titan", "NVIDIA-NeMo": "mbridge", "Narayanan": "narayanan",
        "bigscience": "bloom", "VIA-Research": "vtrain", "foundation-model": "fms", "MooreThreads": "simumax",
        "MLPerf": "mlperf",
    }  # fmt: skip
    short = next((value for key, value in known.items() if key in source), prefix or "other")
    if short == "mosaic":
        return "mosaic-a100" if "A100" in source else "mosaic-h100-large" if "Large Scale" in source else "mosaic-h100"
    if short == "vtrain":
        return "vtrain-single" if "single" in source else "vtrain-multi"
    return short


def _table_of(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _number(table: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A number above 0; what is no number counts as missing."""
    value = table.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _Unusable(
            f"missing field: {where}{key}" + ("" if value is None else f" ({value!r} is no number above 0)")
        )
    return float(value)


def _count(table: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    return int(_number(table, key, where, default))


def _need(table: Mapping[str, Any], key: str, where: str) -> Any:
    value = table.get(key)
    if value is None:
        raise _Unusable(f"missing field: {where}{key}")
    return value


def _fill(row: Row, raw: Mapping[str, Any]) -> None:
    model, hardware, layout = (_table_of(raw, key) for key in ("model", "hardware", "layout"))
    row.device = _device(str(_need(hardware, "gpu", "hardware.")))
    row.devices = _count(hardware, "gpus", "hardware.")
    row.devices_per_node = min(_count(hardware, "gpus_per_node", "hardware.", 8), row.devices)
    if model.get("moe") or _count(layout, "ep", "layout.", 1) > 1 or model.get("experts"):
        raise _Unusable("experts")
    if _count(layout, "cp", "layout.", 1) > 1:
        raise _Unusable("context parallel")
    precision = str(raw.get("precision", "")).lower()
    if any(low in precision for low in ("fp8", "fp4", "mxfp", "float8", "nvfp")):
        raise _Unusable(f"precision {raw.get('precision')}: fp8 or fp4")
    row.dtype = "float16" if "fp16" in precision else "bfloat16"
    if "fp32" in precision and "16" not in precision:
        row.dtype = "float32"
    layers, hidden, heads, sequence = (_count(model, key, "model.") for key in ("layers", "hidden", "heads", "seq"))
    tp, pp = _count(layout, "tp", "layout.", 1), _count(layout, "pp", "layout.", 1)
    dp = _count(layout, "dp", "layout.", max(1, row.devices // (tp * pp)))
    if tp * pp * dp != row.devices:
        raise _Unusable(f"inconsistent: dp {dp} x tp {tp} x pp {pp} is not {row.devices} gpus")
    row.rules = program_of(row.source, raw)
    vocabulary = _count(model, "vocab", "model.", 51200)
    if model.get("vocab") is None:
        row.basis.append("vocab 51200")
    if raw.get("micro_batch") is None:
        row.open_micro_batch = True
        row.basis.append("micro_batch: fastest that fits")
    micro = _count(raw, "micro_batch", "", 1)
    batch = _count(raw, "global_batch", "", micro * dp)
    if raw.get("global_batch") is None:
        row.basis.append("global_batch = micro_batch x dp")
    head_size = _number(model, "head_size", "model.", hidden / heads)
    row.shape = _shape(model, layers, hidden, heads, head_size, vocabulary, sequence, batch)
    row.layout = _layout(layout, dp, tp, pp, micro, batch, row, raw)
    row.ranks = _boundaries(layers, row.layout)
    row.node_bandwidth, row.outside = _network(hardware, row)
    row.group = f"{row.source}: {model.get('name', '?')} on {row.devices} {row.device}"
    row.step_time = _step_time(raw, row)
    if row.step_time is None and not row.out_of_memory and row.memory is None:
        raise _Unusable("missing field: measured.step_time_s, tokens_per_s or tflops_per_gpu")


def _device(name: str) -> str:
    return str(device_entry(_DEVICES.get(name, name))["name"])


def _shape(model: Mapping[str, Any], layers: int, hidden: int, heads: int, head_size: float, vocabulary: int,
           sequence: int, batch: int) -> Shape:  # fmt: skip
    gated = str(model.get("mlp", "gelu")).lower() in ("swiglu", "geglu", "silu", "gated")
    kv_heads = _count(model, "kv_heads", "model.", heads)
    ffn = _count(model, "ffn", "model.", 4 * hidden)
    plain = not gated
    q, kv = heads * head_size, kv_heads * head_size
    return Shape(
        layers=layers, hidden=hidden, heads=heads, head_size=head_size, kv_heads=kv_heads, ffn=ffn, gated=float(gated),
        vocabulary=vocabulary, positions=float(sequence if plain else 0), tied=float(plain), sequence=sequence,
        window=sequence, global_batch=batch, norm_parameters=2.0 if plain else 1.0,
        biases=(q + 2 * kv + ffn) * plain, whole_biases=2 * hidden * plain, layer_norm=float(plain),
    )  # fmt: skip


def _layout(layout: Mapping[str, Any], dp: int, tp: int, pp: int, micro: int, batch: int, row: Row,
            raw: Mapping[str, Any]) -> Layouts:  # fmt: skip
    virtual = _count(layout, "vpp", "layout.", _count(layout, "virtual", "layout.", 1)) if pp > 1 else 1
    notes = str(raw.get("notes") or "").lower()
    schedule = str(layout.get("schedule") or ("interleaved" if virtual > 1 or "interleaved" in notes else "1f1b"))
    zero = layout["zero"] if layout.get("zero") in (0, 1, 2, 3) else 0
    hybrid = str(layout.get("sharding", "")).upper() == "HSDP"
    per_node = row.devices_per_node
    shard = min(dp, per_node) if hybrid and dp % per_node == 0 else dp
    recompute = [*str(layout.get("recompute") or "none").split(), "none"][0]
    if schedule not in SCHEDULES:
        schedule = "1f1b"
    if recompute not in RECOMPUTES:
        recompute = "full"
    return Layouts.make(
        dp=dp, shard=shard, zero=zero, tp=tp, pp=pp, virtual=virtual, micro_batch=micro,
        micro_batches=max(1, -(-batch // (dp * micro))), schedule=SCHEDULES.index(schedule),
        recompute=RECOMPUTES.index(recompute),
        sequence_parallel=bool(layout.get("sp", row.rules is not None and row.rules.name in _SEQUENCE_PARALLEL)),
    )  # fmt: skip


_SEQUENCE_PARALLEL = {"torchtitan", "megatron-bridge"}


def _boundaries(layers: int, layout: Layouts) -> tuple[Held, Held, Held] | None:
    """Where layers do not divide but layers + 2 do, embedding and head count as a layer each (BLOOM's way)."""
    pp = int(layout.pp[0])
    if pp <= 2 or layers % pp == 0 or (layers + 2) % pp:
        return None
    whole = (layers + 2) // pp
    first, middle, last = held(layout, layers)
    counts = (whole - 1.0, float(whole), whole - 1.0)
    return tuple(  # type: ignore[return-value]
        Held(rank.rank, np.array([count]), rank.embedding, rank.head)
        for rank, count in zip((first, middle, last), counts, strict=True)
    )


def _network(hardware: Mapping[str, Any], row: Row) -> tuple[float, str]:
    """Bytes/s of a node, from the row's words or else the device's usual adapters."""
    text = str(hardware.get("interconnect") or "")
    outside = "omnipath" if "omni" in text.lower() else "roce" if "roce" in text.lower() else "infiniband"
    several = re.search(r"([0-9]+)x [^0-9,;]{0,20}([0-9]+) Gb/s", text)
    per_gpu = re.search(r"([0-9]+) Gb/s per GPU", text)
    whole = re.search(r"([0-9]+) Gb/s \(?per node", text)
    if several:
        return int(several[1]) * int(several[2]) / 8 * 1e9, outside
    if per_gpu:
        return int(per_gpu[1]) / 8 * 1e9 * row.devices_per_node, outside
    if whole:
        return int(whole[1]) / 8 * 1e9, outside
    usual = device_entry(row.device)["inter"]
    return float(usual["nics"] * usual["bandwidth"]), "infiniband"


def _bytes(measured: Mapping[str, Any]) -> float | None:
    for key, unit in (("memory_gib", 2.0**30), ("memory_gb", 1e9), ("memory_bytes", 1.0)):
        if isinstance(measured.get(key), int | float) and measured[key]:
            return float(measured[key]) * unit
    return None


def _step_time(raw: Mapping[str, Any], row: Row) -> float | None:
    """Seconds of a step: printed, or from tokens/s, or from FLOP/s by the row's own convention."""
    shape = row.shape
    assert shape is not None
    measured = {key: value for key, value in _table_of(raw, "measured").items() if isinstance(value, int | float)}
    tokens = float(shape.global_batch * shape.sequence)
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    if measured.get("tokens_per_s"):
        return tokens / float(measured["tokens_per_s"])
    if measured.get("tokens_per_s_per_gpu"):
        return tokens / (float(measured["tokens_per_s_per_gpu"]) * row.devices)
    if measured.get("step_time_s_derived"):
        return float(measured["step_time_s_derived"])
    if measured.get("tflops_per_gpu"):
        return stated_flops(shape, str(raw.get("flops_convention"))) / (
            float(measured["tflops_per_gpu"]) * 1e12 * row.devices
        )
    return None


def stated_flops(shape: Shape, convention: str) -> float:
    """FLOPs of a step as the row counts them: causal attention or whole, recomputation counted or not."""
    tokens = shape.global_batch * shape.sequence
    attention = shape.attention_flops() * (1.0 if "causal" in convention and "non" not in convention else 2.0)
    layers = shape.layers * (tokens * shape.matrix_flops() + shape.global_batch * attention)
    passes = 4.0 if "hardware" in convention else 3.0
    return float(passes * layers + 3 * 2 * tokens * shape.hidden * shape.vocabulary)
