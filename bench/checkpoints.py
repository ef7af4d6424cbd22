"""Checkpoints side by side with torch.distributed.checkpoint: `python -m bench.checkpoints [--rounds N] [--json]`.

A model of ten million parameters under FSDP-like sharding (each rank holds its rows of every tensor, with AdamW's two
moments) is saved and loaded by both, round by round in turn, on Gloo ranks of this machine. Both sync their files;
ours writes and checks checksums and refuses what is not finite. Blocking time of an asynchronous save: our copy into
host buffers, against DCP's `async_save` until it returns. Memory: how far a rank's resident set rises meanwhile.
Planning is timed for simulated ranks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

from bench.checkpoint_ranks import COLUMNS, ROWS, TENSORS, rounds_on_rank
from bench.statistics import median, paired_ratio
from meshwright.checkpoint.save import plan
from meshwright.prove.pool import RankPool

_SIMULATED = (64, 128, 256)
_PAIRS = (("save", "dcp_save"), ("load", "dcp_load"), ("stall", "dcp_stall"))


def planning(tensors: int = 1000) -> dict[str, float]:
    """Seconds to agree who writes what, by simulated ranks, each holding its slice of every tensor."""
    result = {}
    for size in _SIMULATED:
        ranks = range(size)
        described = [[[f"parameter/w{n}", "F32", [size * 4], [r * 4], [4], 16] for n in range(tensors)] for r in ranks]
        began = time.process_time()
        plan(described)
        result[str(size)] = time.process_time() - began
    return result


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """All figures."""
    pool = RankPool(ranks)
    try:
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
            by_rank = pool.run(rounds_on_rank, folder, rounds, timeout=1200)
    finally:
        pool.close()
    seconds = by_rank[0]
    found: dict[str, Any] = {"ranks": ranks, "rounds": rounds, "parameters": ROWS * COLUMNS * TENSORS}
    for ours, theirs in _PAIRS:
        ratio = paired_ratio(seconds[theirs], seconds[ours])
        found[f"{ours}_s"], found[f"{theirs}_s"] = median(seconds[ours]), median(seconds[theirs])
        found[f"{ours}_speedup"] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
        for kind in (ours, theirs):  # of the rank that takes most
            found[f"{kind}_peak_bytes"] = int(max(median(rank[f"{kind}_bytes"]) for rank in by_rank))
    found["peak_rss_bytes"] = int(seconds["peak_rss_bytes"][0])
    found["planning_s"] = planning()
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Checkpoints side by side with torch.distributed.checkpoint.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    found = measure(options.ranks, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    for ours, theirs in _PAIRS:
        ratio = found[f"{ours}_speedup"]
        print(
            f"{ours:<6} {found[f'{ours}_s']:.3f} s, DCP {found[f'{theirs}_s']:.3f} s: "
            f"{ratio['median']:.2f} times as fast [{ratio['low']:.2f}, {ratio['high']:.2f}]; "
            f"memory {found[f'{ours}_peak_bytes'] / 1e6:.1f} MB, DCP {found[f'{theirs}_peak_bytes'] / 1e6:.1f} MB"
        )
    print("planning 1,000 tensors: " + ", ".join(f"{n} ranks {s:.2f} s" for n, s in found["planning_s"].items()))


if __name__ == "__main__":
    main()
