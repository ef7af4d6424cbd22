"""One rank of a training run: what the launcher, ``torchrun`` or ``srun`` start."""

from __future__ import annotations

import argparse
import mmap
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm.collectives import all_gather_json
from meshwright.comm.mesh import Mesh
from meshwright.errors import InputError, MeshwrightError
from meshwright.job.job import Job, run_job
from meshwright.recovery.causes import lost_a_peer
from meshwright.recovery.environment import Begin
from meshwright.recovery.handover import Here, await_the_launcher
from meshwright.recovery.lost import keep_position, peers_lost
from meshwright.recovery.meeting import join
from meshwright.recovery.rank import RECORDS_VARIABLE, run_as_rank
from meshwright.recovery.shared import Member
from meshwright.recovery.threads import threads
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
    prepare: Callable[[], Begin] | None = None,
    restart: bool = False,
    state: Path | None = None,
) -> None:
    """Join the process group and train.

    Args:
        run_dir: the run's directory.
        resume: go on from its last checkpoint.
        job: absent: the directory's ``job.toml``.
        quiet: no progress on the terminal.
        prepare: what the first rank does before any trains, where no launcher did; if it refuses, all ranks do. What it
            finds takes the place of ``resume`` and ``restart`` on every rank.
        restart: after a failure: what the run recorded beyond where it goes on from is forgotten.
        state: go on from this state in memory instead.

    Raises:
        TrainingStopped: the ranks agreed to stop early; all is saved.
        MeshwrightError: the input is wrong, or training failed.
    """
    here = _here()
    memory = keep_position() if here is None else None
    job = job or run_job(run_dir)
    torch.set_num_threads(threads())
    prepare_determinism(job)
    device = choose_device(job)
    timeout = timedelta(seconds=job.recovery.collective_after)
    _join("nccl" if device.type == "cuda" else "gloo", here, timeout)
    if dist.get_rank() != 0:
        # The first rank speaks; what it would warn of, the others would repeat.
        warnings.simplefilter("ignore")
    with Mesh(job.layout, device.type, timeout=timeout) as mesh:
        try:
            if prepare is not None:
                resume, restart = on_first_rank(prepare, mesh)
            TrainingLoop(
                job, mesh, run_dir, device=device, resume=resume, quiet=quiet, restart=restart, state=state, here=here
            ).run()
        except Exception as error:
            _if_a_peer_is_lost(error, here, memory, job)
            raise
    dist.destroy_process_group()


def _if_a_peer_is_lost(error: Exception, here: Here | None, memory: mmap.mmap | None, job: Job) -> None:
    """Stay for our launcher, if there is one; otherwise say whom this rank waited for.

    Raises:
        PeersLost: another rank is gone, and no launcher of ours watches.
    """
    if not lost_a_peer(str(error)):
        return
    if here is not None:
        await_the_launcher(job.recovery.handover)
    elif memory is not None and not isinstance(error, MeshwrightError):
        raise peers_lost(
            memory, dist.get_rank(), dist.get_world_size(), job.recovery.collective_after, error
        ) from error


def _here() -> Here | None:
    """This rank as its launcher sees it; None where another launcher started it."""
    member = Member.from_environment()
    if member is None:
        return None
    here = Here(member)
    here.write_stacks_to(Path(os.environ[RECORDS_VARIABLE]) / f"rank-{member.rank}.stack")
    return here


def _join(backend: str, here: Here | None, timeout: timedelta) -> None:
    if here is None:
        join(backend, timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=here.store(size, timeout), rank=rank, world_size=size, timeout=timeout)


def on_first_rank(prepare: Callable[[], Begin], mesh: Mesh) -> Begin:
    """Run ``prepare`` on the first rank; what it found, on every rank. They leave together if it refused.

    Raises:
        InputError: it did.
    """
    found, refusal = Begin(resume=False, restart=False), None
    if mesh.coordinate("world") == 0:
        try:
            found = prepare()
        except InputError as error:
            refusal = str(error)
    *begin, said = all_gather_json([*found, refusal], mesh.group("world"))[0]
    if said is not None:
        raise InputError(said)
    return Begin(*begin)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m meshwright.train.worker RUN_DIR [--resume] [--quiet] [--restart] [--state PATH]``."""
    parser = argparse.ArgumentParser(description="One rank of a training run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--state", type=Path)
    options = parser.parse_args(arguments)
    run_as_rank(
        lambda: train_rank(
            options.run_dir, resume=options.resume, quiet=options.quiet, restart=options.restart, state=options.state
        )
    )


if __name__ == "__main__":
    main()
