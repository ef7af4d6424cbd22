"""A run directory and a plan to report on, made in a second: real predictions, invented times."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.job.cluster import load_cluster
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout_text import parse_layout
from meshwright.ledger.ledger import Ledger, Spends
from meshwright.plan.answer import Plan
from meshwright.plan.planner import plan
from meshwright.plan.predict import predict

EVIL = "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
"""A name that would run if it were not escaped."""
LAYOUT = "dp=2 pp=2 zero=1 micro_batch=1"


def small_job(layout: str = LAYOUT, name: str = "small") -> Job:
    """Four layers on a few ranks, resolved."""
    job = job_from_values(
        {
            "model": {"name": name, "vocabulary": 257, "hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2,
                      "ffn_hidden": 128},
            "data": {"train": ["corpus.txt"], "sequence_length": 32},
            "batch": {"global_size": 8},
            "cluster": {"device": "cpu"},
        }
    )  # fmt: skip
    return job.with_layout(parse_layout(layout)).resolve(purpose="plan")


def measured(job: Job) -> Ledger:
    """The predicted ledger with invented seconds, as if measured in step 4."""
    found = predict(job)
    ranks = []
    for entry in found.ranks:
        spends = Spends(
            wall=1.0, data=0.01, compute={"forward": 0.2 + entry.rank / 100, "backward": 0.4, "optimizer": 0.02},
            communication={"pp": 0.03, "shard": 0.04}, waiting=0.05, bubble=0.1, other=0.15 - entry.rank / 100,
        )  # fmt: skip
        ranks.append(entry.model_copy(update={"spends": spends}))
    return found.model_copy(update={"source": "measured", "step": 4, "ranks": tuple(ranks)})


def write_run(folder: Path, job: Job, steps: int = 20) -> Path:
    """Everything that a finished run leaves, interrupted once after step 10."""
    folder.mkdir()
    (folder / "job.toml").write_text(job.to_toml())
    (folder / "ledger.json").write_text(measured(job).to_json())
    lines = []
    for step in range(1, steps + 1):
        at = 1000.0 + step + (60 if step > steps // 2 else 0)
        lines.append({"time": at, "step": step, "loss": 5.0 - step / 10, "step_seconds": 1.0,
                      "tokens_per_second": 250.0 + step % 3})  # fmt: skip
    lines.insert(3, {"time": 1003.5, "step": 3, "loss": None, "validation_loss": 4.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    half = steps // 2
    events: list[dict[str, Any]] = [
        {"time": 1000.0, "event": "started", "step": 0},
        {"time": 1000.0 + half, "event": "saved", "step": half, "seconds": 0.5},
        {"time": 1060.0 + half, "event": "resumed", "step": half},
        {"time": 1061.0 + steps, "event": "saved", "step": steps, "seconds": 0.5},
        {"time": 1061.0 + steps, "event": "done", "step": steps},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary = {"outcome": "done", "tokens_per_second": 251.0, "loss": 3.0, "validation_unigram_entropy": 4.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@cache
def _plan(job: Job, cluster: str) -> Plan:
    return plan(job, cluster)


def write_plan(path: Path, job: Job, cluster: str = "1x8 A100-SXM4-80GB") -> Path:
    """What ``meshwright plan --json`` prints."""
    values = _plan(job, cluster).model_dump()
    values |= {"job": job.model_dump(mode="json", exclude_none=True)}
    values |= {"machines": load_cluster(cluster).model_dump(exclude_none=True)}
    path.write_text(json.dumps(values))
    return path
