"""Clusters by name and by file, and the sentences for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.job.cluster import cluster_from_values, load_cluster
from meshwright.job.hardware import device, device_names

_DEVICE = {
    "name": "own",
    "memory_bytes": 16 * 10**9,
    "memory_bandwidth": 1e12,
    "peak_flops": {"bfloat16": 1e14},
}
_LINK = {"kind": "nvlink", "bandwidth": 100e9, "latency": 5e-6}


def _values(**changes: Any) -> dict[str, Any]:
    return {"nodes": 2, "devices_per_node": 4, "device": _DEVICE, "links": {"intra": _LINK, "inter": _LINK}} | changes


def test_short_form_takes_the_catalogue_and_says_what_it_assumed() -> None:
    cluster = load_cluster("512x8 A100-SXM4-80GB")
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (512, 8, 4096)
    assert cluster.device.peak("bfloat16") == 312e12
    assert cluster.device.memory_bytes == 80 * 2**30
    assert cluster.links.inter is not None
    assert cluster.links.inter.nics == 8
    assert len(cluster.basis) == 2


def test_aliases_are_read_and_every_device_is_complete() -> None:
    assert load_cluster("1x8 h100-80gb-sxm").device.name == "H100-SXM5-80GB"
    for name in device_names():
        one = device(name)
        assert one.peak("bfloat16" if "bfloat16" in one.peak_flops else "float16") > 1e13
        assert 0 < one.efficiency.memory <= 1


def test_peaks_are_dense() -> None:
    """Vendor figures with 2:4 sparsity are twice these: none of them may slip in."""
    dense = {"A100-SXM4-80GB": 312e12, "H100-SXM5-80GB": 989e12, "B200-SXM-180GB": 2250e12, "MI300X-192GB": 1307.4e12}
    assert {name: device(name).peak("bfloat16") for name in dense} == dense


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2x8 A100-SXM", ("did you mean A100-SXM4-40GB or A100-SXM4-80GB", "memory_bytes", "peak_flops")),
        ("2x8 A100", ("not a device of the catalogue",)),
        ("2x8 TPUv5", ("not a device of the catalogue", "a cluster file whose [device] has")),
        ("2x8 A100-SXM4-80GB + 2x8 H100-SXM5-80GB", ("different devices cannot be planned yet",)),
        ("nonsense", ("neither NODESxDEVICES NAME",)),
        ("absent.toml", ("cannot be read",)),
        ("0x8 A100-SXM4-80GB", ("nodes: 0",)),
    ],
)
def test_wrong_short_forms(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        load_cluster(text)
    assert all(word in str(error.value) for word in words)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"links": {"intra": _LINK}}, "links.inter is missing, but there are 2 nodes"),
        ({"links": {"inter": _LINK}}, "links.intra is missing, but there are 4 devices a node"),
        ({"links": {"intra": _LINK | {"bandwidth": 0}, "inter": _LINK}}, "links.intra.bandwidth: 0 is not allowed"),
        ({"links": {"intra": _LINK | {"bandwidth": 100}, "inter": _LINK}}, "25 GB/s are 25e9"),
        ({"links": {"intra": _LINK | {"bandwidth": "100 GB/s"}, "inter": _LINK}}, "'100 GB/s' has a unit"),
        ({"device": _DEVICE | {"memory_bytes": "80GB"}}, "'80GB' has a unit; give a plain number, in bytes"),
        ({"device": {"name": "own"}}, "device: memory_bytes, memory_bandwidth, peak_flops missing"),
        ({"device": "Z9"}, "'Z9' is not a device of the catalogue"),
        ({"device": ["A100-SXM4-80GB", "H100-SXM5-80GB"]}, "different devices cannot be planned yet"),
        ({"devices": [{"count": 8}]}, "different devices cannot be planned yet"),
        ({"speed": 1}, "speed is not a field of a cluster file"),
        ({"nodes": None}, "nodes: None is not allowed"),
        ({"price_per_device_hour": 2.1}, 'price_per_device_hour: 2.1 is no price; write an amount'),
        ({"price_per_device_hour": "-1 USD"}, "price_per_device_hour: '-1 USD' is no price"),
        ({"mtbf_device_hours": 0}, "mtbf_device_hours: 0 is not allowed"),
    ],
)
def test_wrong_files(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        cluster_from_values(_values(**changes), "cluster: own.toml")
    assert words in str(error.value)
    assert str(error.value).startswith("cluster: own.toml: ")


def test_files_in_toml_and_json(tmp_path: Path) -> None:
    text = tmp_path / "own.json"
    text.write_text(json.dumps(_values()), "utf-8")
    toml = tmp_path / "own.toml"
    toml.write_text(
        'nodes = 2\ndevices_per_node = 4\ndevice = "A100-SXM4-80GB"\n[links.inter]\nkind = "ethernet"\nnics = 1\n'
        "bandwidth = 3e9\nlatency = 3e-5\n",
        "utf-8",
    )
    assert load_cluster(str(text)).device.name == "own"
    cluster = load_cluster(str(toml))
    assert cluster.links.inter is not None
    assert cluster.links.inter.kind == "ethernet"
    assert len(cluster.basis) == 1
    toml.write_text("nodes = \n", "utf-8")
    with pytest.raises(InputError, match="is not TOML"):
        load_cluster(str(toml))


def test_a_missing_rate_is_named() -> None:
    with pytest.raises(InputError, match="V100-SXM2-32GB has no dense peak for bfloat16; it has float32, float16"):
        device("V100-SXM2-32GB").peak("bfloat16")
