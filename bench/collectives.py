"""Our collectives against Gloo's own: `python -m bench.collectives`.

Every round runs every contestant once, in an order that rotates, each after a barrier; a round's time is the slowest
rank's. Figures are medians over rounds and, in parentheses, the quickest round, which on a shared machine is the
better number. ``ours`` goes through memory the ranks share, as on one host in a run; ``ours by sends`` is what goes
between hosts. Sizes are bytes of the whole tensor: a reduce-scatter's input, an all-gather's output.

The other ways to build an all-gather on Gloo are there too, to show why it is built from sends and receives; and every
algorithm of ``[sync] algorithm``, through shared memory. ``--links sends`` takes those by sends instead. Two-level
algorithms take half of the ranks for a node.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.statistics import median, paired_ratio
from meshwright.comm.collectives import all_gather, all_gather_json, all_reduce, reduce_scatter
from meshwright.comm.shared_memory import close_channel, open_channel
from meshwright.prove.pool import RankPool
from meshwright.sync.all_reduce import make_algorithm

KIB = 1024
SIZES = (4 * KIB, 64 * KIB, KIB**2, 4 * KIB**2, 16 * KIB**2, 64 * KIB**2)
ALGORITHMS = ("ring", "tree", "halving-doubling", "hierarchical", "leaders", "ordered")
CONTESTANTS: dict[str, tuple[str, ...]] = {
    "all_gather": ("ours", "ours by sends", "gloo", "all_to_all list", "batch_isend_irecv"),
    "reduce_scatter": ("ours", "ours by sends", "gloo", "all_to_all + sum", *ALGORITHMS),
    "all_reduce": ("ours", "ours by sends", "gloo", *ALGORITHMS),
}


def _all_to_all_list(whole: Tensor, part: Tensor) -> None:
    degree = dist.get_world_size()
    dist.all_to_all(list(whole.chunk(degree)), [part] * degree)


def _batch(whole: Tensor, part: Tensor) -> None:
    rank, degree = dist.get_rank(), dist.get_world_size()
    pieces = whole.chunk(degree)
    operations = []
    for distance in range(1, degree):
        before, after = (rank - distance) % degree, (rank + distance) % degree
        operations.append(dist.P2POp(dist.irecv, pieces[before], before))
        operations.append(dist.P2POp(dist.isend, part, after))
    pieces[rank].copy_(part)
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _all_to_all_and_sum(whole: Tensor, part: Tensor) -> None:
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    torch.sum(received.view(dist.get_world_size(), -1), 0, out=part)


def _algorithm(operation: str, name: str, group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], object]:
    degree = group.size()
    algorithm = make_algorithm(name, [rank // max(1, degree // 2) for rank in range(degree)])

    def run(whole: Tensor, part: Tensor) -> None:
        all_reduced = operation == "all_reduce"
        steps = algorithm.all_reduce(whole, group) if all_reduced else algorithm.reduce_scatter(part, whole, group)
        for handle in steps:
            handle.wait()

    return run


def _run(operation: str, contestant: str, sharing: dist.ProcessGroup, links: str) -> Callable[[Tensor, Tensor], object]:
    assert dist.group.WORLD is not None
    if contestant in ALGORITHMS:
        return _algorithm(operation, contestant, sharing if links == "memory" else dist.group.WORLD)
    group = sharing if contestant == "ours" else dist.group.WORLD
    contestant = contestant.removesuffix(" by sends")
    table: dict[tuple[str, str], Callable[[Tensor, Tensor], object]] = {
        ("all_gather", "ours"): lambda whole, part: all_gather(whole, part, group),
        ("all_gather", "gloo"): lambda whole, part: dist.all_gather_single(whole, part),
        ("all_gather", "all_to_all list"): _all_to_all_list,
        ("all_gather", "batch_isend_irecv"): _batch,
        ("reduce_scatter", "ours"): lambda whole, part: reduce_scatter(part, whole, group),
        ("reduce_scatter", "gloo"): lambda whole, part: dist.reduce_scatter_single(part, whole),
        ("reduce_scatter", "all_to_all + sum"): _all_to_all_and_sum,
        ("all_reduce", "ours"): lambda whole, part: all_reduce(whole, group),
        ("all_reduce", "gloo"): lambda whole, part: dist.all_reduce(whole),
    }
    return table[operation, contestant]


def measure(operation: str, size: int, rounds: int, dtype_name: str, links: str = "memory") -> dict[str, list[float]]:
    """Runs on every rank: seconds of this rank by contestant, one a round after two to warm up."""
    dtype = getattr(torch, dtype_name)
    degree = dist.get_world_size()
    elements = size // dtype.itemsize // degree * degree
    whole, part = torch.zeros(elements, dtype=dtype), torch.zeros(elements // degree, dtype=dtype)
    names = CONTESTANTS[operation]
    sharing = dist.new_group()
    open_channel(sharing, all_gather_json)
    calls = {name: _run(operation, name, sharing, links) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-2, rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            dist.barrier()
            began = time.perf_counter()
            calls[name](whole, part)
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    close_channel(sharing)
    dist.destroy_process_group(sharing)
    return seconds


def compare(pool: RankPool, operation: str, size: int, rounds: int, dtype: str, links: str) -> dict[str, Any]:
    """One operation at one size on the pool's ranks."""
    from bench.collectives import measure as on_ranks  # by its own name, not __main__'s: the ranks look it up there

    by_rank = pool.run(on_ranks, operation, size, rounds, dtype, links, timeout=600.0)
    slowest = {
        name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in CONTESTANTS[operation]
    }
    ratio = paired_ratio(slowest["gloo"], slowest["ours"])
    return {
        "operation": operation, "ranks": pool.size, "bytes": size, "dtype": dtype, "links": links, "seconds": slowest,
        "gloo_over_ours": ratio.median, "low": ratio.low, "high": ratio.high,
    }  # fmt: skip


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """The results of one operation as a table of milliseconds."""
    names = CONTESTANTS[results[0]["operation"]]
    title = f"{results[0]['operation']}, {results[0]['dtype']}: ms, median (quickest)"
    table = Table(title=title, title_justify="left")
    for column in ("ranks", "KiB", *names, "gloo / ours [90 %]"):
        table.add_column(column, justify="right")
    for one in results:
        cells = [f"{median(t) * 1e3:.2f} ({min(t) * 1e3:.2f})" for t in (one["seconds"][name] for name in names)]
        ratio = f"{one['gloo_over_ours']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
        table.add_row(str(one["ranks"]), str(one["bytes"] // KIB), *cells, ratio)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--links", choices=("memory", "sends"), default="memory", help="of the algorithms")
    parser.add_argument("--json", type=Path, help="write every round's seconds there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=200)
    load = os.getloadavg()[0]
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {load:.1f}")
    results: list[dict[str, Any]] = []
    for operation in CONTESTANTS:
        rows = []
        for ranks in options.ranks:
            pool = RankPool(ranks)
            for size in options.bytes:
                rows.append(compare(pool, operation, size, options.rounds, options.dtype, options.links))
            pool.close()
        console.print(table_of(rows))
        results.extend(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
