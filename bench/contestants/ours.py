"""meshwright's own training step, as `meshwright train` runs it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bench.contestants import Step
from bench.workload import Workload
from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout_text import parse_layout_values
from meshwright.train.trainer import Trainer


def job_of(work: Workload, layout: str, ranks: int) -> Job:
    """The common work as a job."""
    values = parse_layout_values(layout)
    whole_share = work.batch // values.get("dp", 1)
    micro_batch = work.batch // work.micro_batches if values.get("pp", 1) > 1 else whole_share
    model = {
        name: getattr(work.spec, name)
        for name in ("vocabulary", "hidden", "layers", "heads", "ffn_hidden", "max_positions", "tied")
    }
    return job_from_values(
        {
            "model": model,
            "data": {"sequence_length": work.sequence, "train": "made up as we go"},
            "batch": {"global_size": work.batch},
            "optimizer": {"name": "adamw", "lr": work.lr, "weight_decay": work.weight_decay, "betas": (0.9, 0.95)},
            "precision": {"dtype": work.dtype},
            "train": {"seed": work.seed},
            "layout": {**values, "micro_batch": micro_batch},
            "cluster": {"device": "cpu"},
        }
    ).resolve(ranks)


def build(work: Workload, variant: str) -> Step:
    """``variant`` is the layout in its short form, with ``{ranks}`` for the degree."""
    ranks = dist.get_world_size()
    job = job_of(work, variant.format(ranks=ranks), ranks)
    mesh = Mesh(job.layout)
    trainer = Trainer(job, mesh)
    dp, dp_rank, rows = mesh.degree("dp"), mesh.coordinate("dp"), job.layout.micro_batch or 1
    positions = torch.arange(work.sequence).expand(rows, work.sequence)

    def step(number: int) -> float | None:
        tokens, labels = work.step_data(number)
        batches = [
            Batch(
                tokens=tokens[start : start + rows],
                labels=labels[start : start + rows],
                positions=positions,
                documents=None,
                examples=torch.arange(start, start + rows),
            )
            for start in range(dp_rank * rows, work.batch, dp * rows)
        ]
        return trainer.step(batches).loss

    return step
