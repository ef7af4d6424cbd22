"""Hosts of CPU ranks joined by a link of 100 Mbit/s, as planned for."""

from __future__ import annotations

from typing import Any

from meshwright.job.cluster import ClusterSpec, cluster_from_values


def slow_cluster(nodes: int, each: int, *, host: bool = False, bandwidth: float = 12.5e6) -> ClusterSpec:
    """``nodes`` hosts of ``each`` ranks.

    Args:
        nodes: hosts.
        each: ranks of one.
        host: ranks share its cores, and what they exchange in memory was measured.
        bandwidth: bytes/s of the link, each way.
    """
    values: dict[str, Any] = {
        "nodes": nodes,
        "devices_per_node": each,
        "device": {
            "name": "core", "memory_bytes": 8 << 30, "memory_bandwidth": 20e9, "peak_flops": {"float32": 50e9},
            "efficiency": {
                "gemm": {"float32": {"efficiency": 0.8}}, "attention": {"forward": 0.3, "backward": 0.3},
                "memory": 1.0, "link": 1.0, "network": 1.0,
            },
        },
        "links": {
            "intra": {"kind": "memory", "bandwidth": 5e9, "latency": 1e-5},
            "inter": {"kind": "ethernet", "bandwidth": bandwidth, "latency": 1e-4},
        },
    }  # fmt: skip
    if host:
        values["host"] = {
            "cores": each, "update": 1e-9, "forward": {"element": 5e-10, "layer": 2e-4},
            "backward": {"element": 5e-10, "layer": 4e-4},
        }  # fmt: skip
        values["collectives"] = [
            {"operation": operation, "ranks": ranks, "level": "intra", "alpha": 2e-4, "beta": 5e-10}
            for operation in ("all_reduce", "all_gather", "reduce_scatter", "send")
            for ranks in (2, 4)
        ]
    return cluster_from_values(values, "cluster")
