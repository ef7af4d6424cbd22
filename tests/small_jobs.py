"""Small jobs and runs of them on ranks, for tests of whole training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import latest
from meshwright.checkpoint.load import read_tensor, tensor_names
from meshwright.comm.mesh import Mesh
from meshwright.data.batch import Batch
from meshwright.job.job import Job, job_from_values
from meshwright.prove.layout_run import Request, run_layout
from meshwright.prove.oracle import train_one_device
from meshwright.prove.parity import Trace
from meshwright.prove.pool import RankPool
from meshwright.prove.proof_data import ProofSamples, proof_batches
from meshwright.train.saving import Saver
from meshwright.train.trainer import StepReport, Trainer

MODEL: dict[str, Any] = {
    "vocabulary": 97, "hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "max_positions": 64,
}  # fmt: skip


def small_job(layout: str, **sections: dict[str, Any]) -> Job:
    """A resolved job of a tiny Llama; ``sections`` override single values."""
    values: dict[str, Any] = {
        "model": dict(MODEL),
        "data": {"train": ["unused.txt"], "sequence_length": 16},
        "batch": {"global_size": 8},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "train": {"steps": 20, "seed": 5},
        "precision": {"dtype": "float64"},
        "memory": {"bucket_bytes": 1 << 15},
        "layout": layout,
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    if values["optimizer"]["name"] == "adamw":
        values["optimizer"].pop("momentum", None)
    return job_from_values(values).resolve()


WIDE: dict[str, Any] = {"vocabulary": 97, "hidden": 64, "layers": 8, "heads": 16, "kv_heads": 8, "ffn_hidden": 96}
"""Of a model that most layouts of up to 8 ranks can split."""


def unresolved_job(layout: str = "", **changes: Any) -> Job:
    """A job of such a model as it was read, for what resolving it refuses; ``changes``: ``section__key=value``."""
    values: dict[str, Any] = {
        "model": WIDE,
        "data": {"train": "/corpus.txt", "sequence_length": 64},
        "batch": {"global_size": 8},
        "layout": layout,
    }
    for key, value in changes.items():
        section, name = key.split("__")
        values[section] = {**values.get(section, {}), name: value}
    return job_from_values(values)


SCHEDULED: dict[str, Any] = {
    "name": "adamw", "lr": 0.01, "eps": 1e-6, "betas": (0.8, 0.9), "schedule": "cosine", "warmup_steps": 1,
    "decay_steps": 3, "min_lr_ratio": 0.2,
}  # fmt: skip
"""An optimizer with nothing at its default: in five steps the warm-up, the decay and what is left after it."""


def samples(job: Job, *, masked: bool = True) -> ProofSamples:
    """Random samples for a job."""
    return ProofSamples(job.model_spec.vocabulary, job.data.sequence_length, seed=11, masked=masked)


def request(job: Job, steps: int = 3, *, masked: bool = True, gradients: bool = True) -> Request:
    """A run of a few steps on random samples."""
    return Request(job, steps, samples(job, masked=masked), gradient_steps=steps if gradients else 0)


def run(ranks: Callable[[int], RankPool], job: Job, steps: int = 3, *, masked: bool = True) -> Trace:
    """Train under the job's layout; whole tensors."""
    return run_layout(ranks(job.layout.ranks), request(job, steps, masked=masked))


def one_device(job: Job, steps: int = 3, *, masked: bool = True) -> Trace:
    """The oracle's run of the same job."""
    source = samples(job, masked=masked)
    assert job.layout.micro_batch is not None
    size, micro_batch = job.batch.global_size, job.layout.micro_batch

    def batches(step: int) -> list[Batch]:
        return proof_batches(source, step, global_size=size, micro_batch=micro_batch, dp_rank=0, dp=1)

    return train_one_device(job, batches, steps, gradient_steps=steps)


def my_batches(job: Job, mesh: Mesh, step: int, *, masked: bool = True) -> list[Batch]:
    """This rank's micro-batches of a step of random samples."""
    assert job.layout.micro_batch is not None
    return proof_batches(
        samples(job, masked=masked),
        step,
        global_size=job.batch.global_size,
        micro_batch=job.layout.micro_batch,
        dp_rank=mesh.coordinate("dp"),
        dp=mesh.degree("dp"),
    )


def checksum(trainer: Trainer) -> list[str]:
    """The bits of every master this rank owns."""
    return [piece.master.detach().cpu().numpy().tobytes().hex()[-4096:] for piece in trainer.owned]


def train_and_save(job: Job, folder: str, start: int, stop: int, save_at: Sequence[int]) -> list[StepReport]:
    """On a rank: train steps ``start`` to ``stop``, from the last checkpoint in ``folder`` if start > 0."""
    reports = []
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        saver = Saver(trainer, None, Path(folder))
        if start:
            saver.resume()
            assert trainer.step_number == start
        for step in range(start, stop):
            reports.append(trainer.step(my_batches(job, mesh, step)))
            if step + 1 in save_at:
                saver.save()
    return reports


def contents(folder: Path) -> dict[str, bytes]:
    """The bits of everything in the last checkpoint."""
    path = latest(folder / "checkpoints")
    assert path is not None
    return {
        f"{role}/{name}": read_tensor(path, name, role).numpy().tobytes()  # type: ignore[arg-type]
        for role in ("parameter", "exp_avg", "exp_avg_sq", "momentum", "sync")
        for name in tensor_names(path, role)  # type: ignore[arg-type]
    }


def stopped_and_resumed(ranks: Callable[[int], RankPool], job: Job, folder: Path) -> dict[str, bytes]:
    """Six steps at a time and three by three, equal to the last bit; what they end with."""
    pool = ranks(job.layout.ranks)
    whole = pool.run(train_and_save, job, str(folder / "a"), 0, 6, [6])[0]
    first = pool.run(train_and_save, job, str(folder / "b"), 0, 3, [3])[0]
    second = pool.run(train_and_save, job, str(folder / "b"), 3, 6, [6])[0]
    assert [*first, *second] == whole
    found = contents(folder / "a")
    assert found == contents(folder / "b")
    return found
