"""Everything that can be refused before a rank starts: the run directory, the data, the memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import torch

from meshwright.checkpoint.manifest import read_manifest
from meshwright.data.corpora import open_corpora
from meshwright.data.progress import terminal_progress
from meshwright.errors import CheckpointError, InputError
from meshwright.files import replace_text
from meshwright.job.job import Job, load_job
from meshwright.job.memory import check_memory
from meshwright.train.saving import FOLDER, latest_checkpoint


def prepare_run(job: Job, run_dir: Path, *, resume: bool) -> None:
    """Check the run directory and the data, tokenise, and write ``job.toml``.

    Raises:
        InputError: the directory is not empty (or, to resume, holds no run or another model's), cannot be
            written, the data are unusable, or the ranks need more memory than there is.
    """
    if resume:
        _check_resumable(job, run_dir)
    else:
        _check_fresh(run_dir)
    if job.cluster.device == "cuda" or (job.cluster.device == "auto" and torch.cuda.is_available()):
        _check_devices(job)
    else:
        _check_machine(job)
    with terminal_progress("tokenising", sys.stderr) as progress:
        open_corpora(job.data, job.model.vocabulary, progress)
    replace_text(run_dir / "job.toml", job.to_toml())


def _check_devices(job: Job) -> None:
    """Refuse a job that has more ranks on this host than the host has GPUs."""
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", job.layout.ranks)), torch.cuda.device_count()
    if here > devices:
        raise InputError(
            f"cluster.device: {here} ranks on this host need a CUDA device each but it has {devices}; "
            'start fewer ranks, or set cluster.device = "cpu"'
        )


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
        entries = sorted(entry.name for entry in run_dir.iterdir())
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


def _check_resumable(job: Job, run_dir: Path) -> None:
    if not (run_dir / "job.toml").is_file():
        raise InputError(f"--resume: {run_dir} holds no run (no job.toml); leave --resume out to start one")
    before = load_job(run_dir / "job.toml").model_spec
    now = job.model_spec
    for field in type(now).model_fields:
        if field != "name" and getattr(before, field) != getattr(now, field):
            raise InputError(
                f"--resume: model.{field} is {getattr(now, field)} in this job but "
                f"{getattr(before, field)} in {run_dir}; "
                "resume with the model the run began with, or start a new run"
            )
    _check_last_checkpoint(job, run_dir)


def _check_last_checkpoint(job: Job, run_dir: Path) -> None:
    """Refuse what would fail after ``job.toml`` is replaced: no checkpoint, another update rule, no step left."""
    path = latest_checkpoint(run_dir)
    if path is None:
        raise CheckpointError(
            f"--resume: {run_dir / FOLDER} has no complete checkpoint; start again, without --resume and in a new --out"
        )
    manifest = read_manifest(path)
    name = manifest.optimizer.get("name")
    if name != job.optimizer.name:
        raise InputError(
            f"--resume: optimizer.name is {job.optimizer.name} in this job but {name} in {path}; "
            "resume with the optimizer the run began with, or start a new run"
        )
    if manifest.step >= job.train.steps:
        raise InputError(
            f"--resume: {manifest.step} steps of {run_dir} are done and train.steps={job.train.steps} asks for no "
            f"more; use train.steps of at least {manifest.step + 1}"
        )
