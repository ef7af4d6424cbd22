"""Everything that can be refused before a rank starts: the run directory, the data, the memory."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import psutil

from meshwright.checkpoint.folder import CHECKPOINTS, steps, supersede_later
from meshwright.data.corpora import open_corpora
from meshwright.data.progress import terminal_progress
from meshwright.errors import InputError
from meshwright.files import replace_text
from meshwright.job.fault_section import check_faults
from meshwright.job.job import Job
from meshwright.job.memory import check_memory
from meshwright.recovery.lock import LOCK, RunLock
from meshwright.train.resumable import check_resumable, check_run, check_samples
from meshwright.train.servers.whereabouts import forget


def prepare_run(job: Job, run_dir: Path, *, resume: bool, from_step: int | None = None) -> RunLock:
    """Check the run directory and the data, tokenise, and write ``job.toml``; the lock is to be held while it runs.

    Args:
        job: resolved.
        run_dir: new or empty, or with ``resume`` that of a run.
        resume: go on with it.
        from_step: from this checkpoint instead of the last; later ones are put aside.

    Raises:
        InputError: the directory is not empty (or, to resume, holds no run or another model's), cannot be
            written, another run works in it, the data are unusable, or the ranks need more memory than there is.
    """
    if from_step is not None and not resume:
        raise InputError(f"--from-step: {from_step} is of a run that goes on; give --resume too")
    if resume:
        check_run(run_dir)
    else:
        check_faults(job)
        _check_fresh(run_dir)
    lock = RunLock(run_dir)
    try:
        forget(run_dir)  # a launcher that was killed could not
        _prepare(job, run_dir, resume, from_step)
    except BaseException:
        lock.release()
        raise
    return lock


def _prepare(job: Job, run_dir: Path, resume: bool, from_step: int | None) -> None:
    manifest = check_resumable(job, run_dir, from_step) if resume else None
    if manifest is None and job.model.init_from is not None:
        from meshwright.train.initial_weights import check_weights  # loads torch

        check_weights(job.model_spec, Path(job.model.init_from))
    if job.cluster.device == "cpu" or not _check_devices(job):
        _check_machine(job)
    _check_space(job, run_dir)
    if job.checkpoint.copy_to is not None:
        from meshwright.checkpoint.remote import Store  # loads torch

        Store(job.checkpoint.copy_to).check()
    with terminal_progress("tokenising", sys.stderr) as progress:
        corpora = open_corpora(job.data, job.model.vocabulary, progress)
    if manifest is not None:
        check_samples(manifest.state, job.train.seed, len(corpora.training))
    if from_step is not None:
        supersede_later(run_dir / CHECKPOINTS, from_step)
    replace_text(run_dir / "job.toml", job.to_toml())


def _check_devices(job: Job) -> bool:
    """Refuse a job that has more ranks on this host than the host has GPUs; whether it trains on GPUs."""
    import torch  # only where a GPU may be meant: it takes seconds to load

    if job.cluster.device == "auto" and not torch.cuda.is_available():
        return False
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", job.layout.ranks)), torch.cuda.device_count()
    if here > devices:
        raise InputError(
            f"cluster.device: {here} ranks on this host need a CUDA device each but it has {devices}; "
            'start fewer ranks, or set cluster.device = "cpu"'
        )
    return True


def _check_machine(job: Job) -> None:
    """Refuse a job whose state is more than this machine's ranks can hold."""
    if job.cluster.memory_per_rank_bytes is not None:
        check_memory(job, job.cluster.memory_per_rank_bytes)
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", job.layout.ranks))
    free = psutil.virtual_memory().available
    check_memory(job, free // here, f"memory of this machine, {free:,} bytes free")


def _check_fresh(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        entries = sorted(entry.name for entry in run_dir.iterdir() if entry.name != LOCK)
    except OSError as error:
        raise InputError(
            f"--out: {run_dir} cannot be used ({error.strerror}); give a directory you may write"
        ) from None
    if entries:
        raise InputError(
            f"--out: {run_dir} is not empty (it has {entries[0]}); "
            "give a new directory, or --resume to go on with that run"
        )
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise InputError(f"--out: {run_dir} is not writable; give a directory you may write")


def _check_space(job: Job, run_dir: Path) -> None:
    """Refuse a run whose checkpoints will not fit on the disk: now, not at the first save."""
    section, optimizer = job.checkpoint, job.optimizer
    moments = 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)
    each = job.model_spec.parameter_count * (8 if job.precision.dtype == "float64" else 4) * (1 + moments)
    saves = -(-job.train.steps // section.every) if section.every else section.keep + 1 if section.interval else 1
    # A new one is written and verified before the oldest goes.
    more = max(1, min(section.keep + 1, saves) - len(steps(run_dir / CHECKPOINTS)))
    free = shutil.disk_usage(run_dir).free
    if free < more * each:
        raise InputError(
            f"--out: {run_dir} has {free:,} bytes free but {more} checkpoints of {each:,} bytes need {more * each:,}; "
            "free space there, give another --out, or lower checkpoint.keep"
        )
