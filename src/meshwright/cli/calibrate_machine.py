"""What ``meshwright calibrate`` does: find the ranks, measure, write the cluster file, print it in a few lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore

from meshwright.cli.outputs import check_out
from meshwright.errors import InputError
from meshwright.files import replace_text
from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.prove.calibrate import calibrate, calibrate_as_rank
from meshwright.recovery.environment import RankPlace, detect_environment

_MOST_RANKS = 16


def calibrate_machine(out: Path, ranks: int | None, effort: float, as_json: bool) -> None:
    """Measure this machine, or as one of the ranks that somebody else started; the options are the command's.

    Raises:
        InputError: an option cannot be.
    """
    place = detect_environment()
    devices = torch.cuda.device_count() if place is None else 0
    _check(out, ranks, effort, devices)
    console = Console(file=sys.stderr, quiet=as_json, highlight=False)
    began = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"{time.perf_counter() - began:5.1f} s  {text}", soft_wrap=True)

    torch.set_num_threads(1)
    if devices:
        cluster: ClusterSpec | None = _on_one_device(say, effort)
    elif place is None:
        cluster = calibrate(ranks or default_ranks(), say, effort=effort)
    else:
        if ranks is not None:
            raise InputError(f"--ranks: {place.source} has started {place.world_size} ranks already; leave it out")
        cluster = _among_ranks(place, say, effort)
    if cluster is None:  # the first rank has it
        return
    text = cluster.model_dump_json(indent=1, exclude_none=True) + "\n"
    replace_text(out, text)
    say(f"wrote {out}")
    if as_json:
        print(json.dumps(json.loads(text)))
    else:
        for line in summary(cluster):
            console.print(line, soft_wrap=True)


def _among_ranks(place: RankPlace, say: Callable[[str], None], effort: float) -> ClusterSpec | None:
    """As one of the ranks that somebody else started."""
    place.export()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        return calibrate_as_rank(place, say if place.rank == 0 else lambda _: None, effort=effort, cuda=cuda)
    finally:
        dist.destroy_process_group()


def _on_one_device(say: Callable[[str], None], effort: float) -> ClusterSpec | None:
    """As the only rank of this machine's only CUDA device."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=HashStore())
    try:
        place = RankPlace(
            rank=0, world_size=1, local_rank=0, local_world_size=1,
            master_address="127.0.0.1", master_port=0, source="meshwright",
        )  # fmt: skip
        return calibrate_as_rank(place, say, effort=effort, cuda=True)
    finally:
        dist.destroy_process_group()


def default_ranks() -> int:
    """Twice the cores, so that it is known what sharing costs; at least 2, at most 8."""
    return max(2, min(8, 2 * len(os.sched_getaffinity(0))))


def _check(out: Path, ranks: int | None, effort: float, devices: int = 0) -> None:
    """Refuse what cannot be; ``devices``: CUDA devices of this machine, where nobody has started ranks for them."""
    check_out(out, ".json", "a cluster file", _is_cluster_file)
    if ranks is not None and not 1 <= ranks <= _MOST_RANKS:
        raise InputError(f"--ranks: {ranks} cannot be measured on one machine; use 1 to {_MOST_RANKS}")
    if devices > 1:
        raise InputError(
            f"calibrate: this machine has {devices} CUDA devices, and each needs a rank; start them with "
            f"`torchrun --standalone --nproc-per-node {devices} -m meshwright.cli.main calibrate`"
        )
    if devices and ranks not in (None, 1):
        raise InputError(f"--ranks: {ranks} do not share this machine's one CUDA device; leave it out")
    if not 0 < effort <= 10:
        raise InputError(f"--effort: {effort:g} is no scale; use a number above 0, at most 10")


def _is_cluster_file(path: Path) -> bool:
    try:
        load_cluster(str(path))
    except InputError:
        return False
    return True


def summary(cluster: ClusterSpec) -> list[str]:
    """The cluster file in a few lines."""
    device, lines = cluster.device, []
    rates = ", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in device.peak_flops.items())
    lines.append(f"{cluster.name}: {rates}; memory {device.memory_bandwidth / 1e9:.1f} GB/s")
    if cluster.host is not None:
        host = cluster.host
        lines.append(
            f"a layer costs {1e6 * host.forward.layer:.0f} us forward and {1e6 * host.backward.layer:.0f} us backward "
            f"beside its arithmetic, an update {1e9 * host.update:.2f} ns a parameter"
        )
        slower = ", ".join(f"{count}: {factor:.2f}" for count, factor in cluster.contention.items())
        lines.append(f"a rank on {host.cores} cores is slower beside others (ranks: times): {slower}")
    for one in cluster.collectives:
        if one.groups == 1 or one.level == "inter":
            lines.append(
                f"{one.operation:<15} {one.ranks} ranks {one.level}: {1e6 * one.alpha:7.0f} us + "
                f"{1e9 * one.beta:6.3f} ns a byte"
            )
    lines += [f"({note})" for note in cluster.basis]
    return lines
