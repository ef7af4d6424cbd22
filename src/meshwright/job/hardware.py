"""The catalogue of devices: what a name such as ``A100-SXM4-80GB`` stands for. Dense peaks only."""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from meshwright.errors import InputError
from meshwright.job.efficiency import Efficiency

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

DEVICE_FIELDS = (
    "name, memory_bytes, memory_bandwidth (bytes/s) and peak_flops by type (dense FLOP/s, as bfloat16 = 312e12)"
)
"""What a cluster file must say of a device that the catalogue does not know."""


class DeviceSpec(BaseModel):
    """One device. Bytes, bytes/s and FLOP/s."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory_bytes: Annotated[int, Field(gt=0)]
    memory_bandwidth: Positive
    """Bytes/s."""
    peak_flops: dict[str, Positive]
    """Dense FLOP/s by type: float32, tf32, float16, bfloat16, float8, float4."""
    efficiency: Efficiency
    """What it reaches of them."""
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s for ``dtype``.

        Raises:
            InputError: the device has no such rate.
        """
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise InputError(f"cluster.device: {self.name} has no dense peak for {dtype}; it has {known}")
        return self.peak_flops[dtype]


@cache
def _data(name: str) -> Any:
    return json.loads((files("meshwright.job") / "catalogue" / name).read_text("utf-8"))


@cache
def _names() -> dict[str, str]:
    """Catalogue name by every spelling, lower case."""
    return {
        spelling.lower(): entry["name"]
        for entry in _data("devices.json")["devices"]
        for spelling in (entry["name"], *entry["aliases"])
    }


def device_names() -> tuple[str, ...]:
    """Every name of the catalogue."""
    return tuple(entry["name"] for entry in _data("devices.json")["devices"])


def device_entry(name: str) -> dict[str, Any]:
    """The catalogue's entry for one name or alias: rates, the usual links, sources.

    Raises:
        InputError: there is none; the message says what to give.
    """
    known = _names()
    if name.lower() not in known:
        raise InputError(
            f"cluster: {name!r} is not a device of the catalogue; {_hint(name)}known are "
            f"{', '.join(device_names())}; for another give a cluster file whose [device] has {DEVICE_FIELDS}"
        )
    wanted = known[name.lower()]
    entry: dict[str, Any] = next(entry for entry in _data("devices.json")["devices"] if entry["name"] == wanted)
    return entry


def _hint(name: str) -> str:
    """Names that begin alike, or else the closest one."""
    alike = [known for known in device_names() if known.lower().startswith(name.lower())]
    close = alike or [_names()[near] for near in difflib.get_close_matches(name.lower(), _names(), n=1, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}? If not: " if close else ""


def device(name: str) -> DeviceSpec:
    """The device called ``name`` in the catalogue.

    Raises:
        InputError: there is none; the message says what to give.
    """
    entry = device_entry(name)
    fields = {key: entry[key] for key in ("name", "memory_bytes", "memory_bandwidth", "peak_flops", "source")}
    return DeviceSpec(**fields, efficiency=efficiency_of(entry["name"]))


def efficiency_of(name: str) -> Efficiency:
    """The efficiency constants of a device: its own, or those of the device whose constants it borrows."""
    data = _data("efficiency.json")
    row = data["devices"].get(name, {"as": data["default"]})
    if "as" in row:
        return Efficiency(
            **data["devices"][row["as"]] | {"fitted_on": (), "note": row.get("note", f"constants of {row['as']}")}
        )
    return Efficiency(**row)


def network_of(name: str) -> dict[str, Any]:
    """The catalogue's usual links of a device: ``intra`` and ``inter``."""
    entry = device_entry(name)
    return {"intra": entry["intra"], "inter": entry["inter"]}
