"""One rank of a training run: what the launcher, ``torchrun`` or ``srun`` start."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_gather_json
from meshwright.comm.mesh import Mesh
from meshwright.errors import InputError
from meshwright.job.job import Job, load_job
from meshwright.recovery.rank import run_as_rank
from meshwright.train.loop import TrainingLoop


def choose_device(job: Job) -> torch.device:
    """The device of this rank: its own GPU where the job takes CUDA, the CPU otherwise."""
    wanted = job.cluster.device
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def prepare_determinism(job: Job) -> None:
    """Deterministic kernels where the job asks for them; an operator without one raises and names itself."""
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory first would only cost time: nothing here reads what it has not written.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def train_rank(
    run_dir: Path,
    *,
    resume: bool,
    job: Job | None = None,
    quiet: bool = False,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Join the process group and train.

    Args:
        run_dir: the run's directory.
        resume: go on from its last checkpoint.
        job: absent: the directory's ``job.toml``.
        quiet: no progress on the terminal.
        prepare: what the first rank does before any trains, where no launcher did; if it refuses, all ranks do.

    Raises:
        TrainingStopped: the ranks agreed to stop early; all is saved.
        MeshwrightError: the input is wrong, or training failed.
    """
    job = job or load_job(run_dir / "job.toml")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    prepare_determinism(job)
    device = choose_device(job)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank() != 0:
        # The first rank speaks; what it would warn of, the others would repeat.
        warnings.simplefilter("ignore")
    with Mesh(job.layout, device.type) as mesh:
        if prepare is not None:
            on_first_rank(prepare, mesh)
        TrainingLoop(job, mesh, run_dir, device=device, resume=resume, quiet=quiet).run()
    dist.destroy_process_group()


def on_first_rank(prepare: Callable[[], None], mesh: Mesh) -> None:
    """Run ``prepare`` on the first rank; every rank leaves together, with its refusal if it refused.

    Raises:
        InputError: it did.
    """
    refusal = None
    if mesh.coordinate("world") == 0:
        try:
            prepare()
        except InputError as error:
            refusal = str(error)
    said = all_gather_json(refusal, mesh.group("world"))[0]
    if said is not None:
        raise InputError(said)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m meshwright.train.worker RUN_DIR [--resume] [--quiet]``."""
    parser = argparse.ArgumentParser(description="One rank of a training run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    run_as_rank(lambda: train_rank(options.run_dir, resume=options.resume, quiet=options.quiet))


if __name__ == "__main__":
    main()
