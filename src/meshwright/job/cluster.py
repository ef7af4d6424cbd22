"""The machines a job is planned for: how many nodes of which device, and the links inside and between them.

``load_cluster`` reads ``512x8 A100-SXM4-80GB`` (nodes x devices, a name of the catalogue, whose usual links are
taken) or the path of a cluster file, TOML or JSON, with the fields of :class:`ClusterSpec`.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from meshwright.errors import InputError
from meshwright.job.hardware import DEVICE_FIELDS, DeviceSpec, device, device_entry, efficiency_of, network_of
from meshwright.job.host import Host

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_PRICE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*[A-Za-z]{3}\s*")

_SLOWEST_LINK = 1e5
"""Bytes/s; a bandwidth below it is a figure in another unit."""

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Level = Literal["intra", "inter"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(_Part):
    """What connects devices of a node (``intra``), or nodes (``inter``)."""

    kind: str
    """nvlink, pcie, xgmi, infiniband, ethernet, shared memory and so on; a label."""
    bandwidth: _Rate
    """Bytes/s and direction: of each device inside a node, of each adapter between nodes."""
    latency: _NonNegative
    """Seconds of one message."""
    nics: PositiveInt = 1
    """Adapters of a node; between nodes only."""
    in_switch: bool = False
    """The switch itself adds up what all-reduce and reduce-scatter send it."""

    @field_validator("bandwidth")
    @classmethod
    def _bytes(cls, value: float) -> float:
        if value < _SLOWEST_LINK:
            raise ValueError(f"{value:g} is too little for bytes per second; 25 GB/s are 25e9")
        return value


class Links(_Part):
    """The links of a cluster."""

    intra: Link | None = None
    """Between the devices of a node; absent only where a node has one."""
    inter: Link | None = None
    """Between nodes; absent only where there is one node."""


class Measured(_Part):
    """What one collective was measured to take: ``alpha + beta * bytes``."""

    operation: Operation
    ranks: PositiveInt
    level: Level
    alpha: _NonNegative
    """Seconds."""
    beta: _NonNegative
    """Seconds a byte of payload."""
    groups: PositiveInt = 1
    """Groups that did it at the same time."""
    points: tuple[tuple[_NonNegative, _NonNegative], ...] = ()
    """Bytes of payload and median seconds, as measured; between them they say more than the straight line."""


class ClusterSpec(_Part):
    """A cluster of equal nodes of equal devices."""

    name: str = ""
    nodes: PositiveInt
    devices_per_node: PositiveInt
    device: DeviceSpec
    links: Links
    collectives: tuple[Measured, ...] = ()
    """Measured collectives; they replace what links would give."""
    contention: dict[int, float] = {}
    """How many times slower a rank computes when that many ranks share the machine."""
    host: Host | None = None
    """Ranks are processes that share a node's processor cores."""
    price_per_device_hour: str | None = None
    """With its currency, as ``2.10 USD``."""
    mtbf_device_hours: _Rate | None = None
    """Mean hours between failures of one device."""
    basis: tuple[str, ...] = ()
    """What was assumed, not given."""

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @field_validator("price_per_device_hour", mode="before")
    @classmethod
    def _has_currency(cls, value: object) -> object:
        if value is None or (isinstance(value, str) and _PRICE.fullmatch(value)):
            return value
        raise ValueError(f'{value!r} is no price; write an amount and a currency, as "2.10 USD"')

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: object) -> object:
        """A device by name becomes its entry in the catalogue, with its usual links where none are given."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if "devices" in values or isinstance(values.get("device"), list | tuple) or "groups" in values:
            raise ValueError(_MIXED)
        try:
            _complete_device(values)
        except InputError as error:
            raise ValueError(str(error)) from None
        return values

    @model_validator(mode="after")
    def _has_links(self) -> ClusterSpec:
        for level, count, what in (
            ("intra", self.devices_per_node, "devices a node"),
            ("inter", self.nodes, "nodes"),
        ):
            if count > 1 and getattr(self.links, level) is None:
                raise ValueError(
                    f"links.{level} is missing, but there are {count} {what}; "
                    f"give [links.{level}] with kind, bandwidth (bytes/s) and latency (seconds)"
                )
        return self


_MIXED = (
    "a cluster of different devices cannot be planned yet; describe the part of one kind, "
    "with nodes, devices_per_node and one device"
)


def _complete_device(values: dict[str, Any]) -> None:
    given = values.get("device")
    if isinstance(given, str):
        values["device"] = device(given)
        usual, basis = _usual_links(given)
        links = values.get("links") or {}
        if isinstance(links, dict):
            for level in ("intra", "inter"):
                if level not in links:
                    values["basis"] = (*values.get("basis", ()), basis[level])
            values["links"] = {**usual, **links}
    elif isinstance(given, dict):
        missing = [name for name in ("name", "memory_bytes", "memory_bandwidth", "peak_flops") if name not in given]
        if missing:
            raise InputError(f"device: {', '.join(missing)} missing; give {DEVICE_FIELDS}")
        if "efficiency" not in given:
            values["device"] = {**given, "efficiency": efficiency_of(str(given["name"]))}


def _usual_links(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    usual = network_of(name)
    intra, inter = dict(usual["intra"]), dict(usual["inter"])
    basis = inter.pop("basis")
    intra.setdefault(
        "latency",
        efficiency_of(device_entry(name)["name"]).latency if "nvlink" in intra["kind"] else _LATENCY[intra["kind"]],
    )
    inter.setdefault("latency", _LATENCY[inter["kind"]])
    return {"intra": intra, "inter": inter}, {
        "intra": f"links.intra: {intra['kind']} at {intra['bandwidth'] / 1e9:g} GB/s, usual for {name}",
        "inter": f"links.inter: {inter['nics']} x {inter['bandwidth'] / 1e9:g} GB/s a node, usual for {name}: {basis}",
    }


_LATENCY = {"xgmi": 10e-6, "pcie": 10e-6, "infiniband": 15e-6, "network": 20e-6}
"""Seconds of one step of a collective by kind of link, where the catalogue has none; cluster files give their own."""

_SHORT = re.compile(r"(?P<nodes>[0-9]+)\s*[xX]\s*(?P<devices>[0-9]+)\s+(?P<name>\S.*)")


def load_cluster(text: str) -> ClusterSpec:
    """A cluster from ``NODESxDEVICES NAME`` or from a cluster file.

    Raises:
        InputError: what is wrong, one sentence a fault.
    """
    text = text.strip()
    match = _SHORT.fullmatch(text)
    if match is not None:
        name = match["name"].strip()
        if re.search(r"[+,]\s*[0-9]+\s*[xX]\s*[0-9]+", name):
            raise InputError(f"cluster: {text!r}: {_MIXED}")
        values = {"name": text, "nodes": int(match["nodes"]), "devices_per_node": int(match["devices"]), "device": name}
        return cluster_from_values(values, "cluster")
    path = Path(text)
    if path.suffix not in (".toml", ".json") and not path.exists():
        raise InputError(
            f"cluster: {text!r} is neither NODESxDEVICES NAME, such as '2x8 A100-SXM4-80GB', nor the path of a "
            "cluster file (.toml or .json)"
        )
    return cluster_from_values(_read(path), f"cluster: {path.name}")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(f"cluster: {path} cannot be read ({reason}); give a TOML or JSON cluster file") from None
    try:
        values = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InputError(f"cluster: {path} is not {kind}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"cluster: {path} holds no table; give the fields of a cluster")
    return values


def cluster_from_values(values: dict[str, Any], where: str) -> ClusterSpec:
    """A cluster from the fields of a file.

    Raises:
        InputError: all wrong values, one sentence a line, each starting with ``where``.
    """
    try:
        return ClusterSpec.model_validate(values)
    except ValidationError as error:
        found = dict.fromkeys(_sentence(fault) for fault in error.errors(include_url=False))
        raise InputError("\n".join(f"{where}: {one.removeprefix('cluster: ')}" for one in found)) from None


_UNITS = re.compile(r"\s*[0-9.eE+]+\s*[kKMGTP]?i?[bB](/s|ps|it/s)?\s*|\s*[0-9.eE+]+\s*(us|ms|s|T?FLOPS?|TFLOP/s)\s*")


def _sentence(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    value = fault["input"]
    if fault["type"] == "value_error":
        reason = str(fault["ctx"]["error"])
        return f"{where}: {reason}" if where else reason
    if fault["type"] == "missing":
        return f"{where} is missing; {_WANTED.get(fault['loc'][-1], 'give it')}"
    if fault["type"] == "extra_forbidden":
        return f"{where} is not a field of a cluster file; see docs/reference/cluster-file.md"
    if isinstance(value, str) and _UNITS.fullmatch(value):
        return f"{where}: {value!r} has a unit; give a plain number, {_WANTED.get(fault['loc'][-1], 'without one')}"
    wanted = _WANTED.get(fault["loc"][-1], "see docs/reference/cluster-file.md")
    return f"{where}: {value!r} is not allowed: {fault['msg'].lower()}; give it {wanted}"


_WANTED = {
    "memory_bytes": "in bytes, such as 85899345920 for 80 GiB",
    "memory_bandwidth": "in bytes per second, such as 2039e9",
    "bandwidth": "in bytes per second and direction, such as 25e9 for a 200 Gb/s adapter; above 0",
    "latency": "in seconds, such as 5e-6",
    "nodes": "a whole number above 0",
    "devices_per_node": "a whole number above 0",
    "nics": "adapters of a node, a whole number above 0",
    "peak_flops": "dense FLOP/s by type, such as bfloat16 = 312e12",
    "bfloat16": "in dense FLOP/s, such as 312e12",
    "float16": "in dense FLOP/s, such as 312e12",
    "float32": "in dense FLOP/s, such as 19.5e12",
    "device": f"a name of the catalogue, or a table with {DEVICE_FIELDS}",
    "mtbf_device_hours": "in hours, above 0",
}
