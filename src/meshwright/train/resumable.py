"""What ``--resume`` refuses before anything of the run is changed: no run, no checkpoint, another model or data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import CHECKPOINTS, not_counted, step_folder, steps
from meshwright.checkpoint.manifest import Manifest, read_manifest
from meshwright.errors import CheckpointError, DamagedCheckpoint, InputError
from meshwright.job.job import Job, run_job


def check_run(run_dir: Path) -> None:
    """Refuse a directory that holds no run.

    Raises:
        InputError: it holds none.
    """
    if not (run_dir / "job.toml").is_file():
        raise InputError(f"--resume: {run_dir} holds no run (no job.toml); leave --resume out to start one")


def check_resumable(job: Job, run_dir: Path, from_step: int | None) -> Manifest:
    """The manifest of the checkpoint that ``job`` goes on from.

    Raises:
        InputError: the job's model, optimizer or steps are not those of the run.
        CheckpointError: there is no checkpoint, or the newest cannot be read by this program.
    """
    before = run_job(run_dir).model_spec
    now = job.model_spec
    for field in type(now).model_fields:
        if field != "name" and getattr(before, field) != getattr(now, field):
            raise InputError(
                f"--resume: model.{field} is {getattr(now, field)} in this job but "
                f"{getattr(before, field)} in {run_dir}; "
                "resume with the model the run began with, or start a new run"
            )
    path = step_folder(run_dir / CHECKPOINTS, _step(run_dir / CHECKPOINTS, from_step))
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
    return manifest


def _step(folder: Path, from_step: int | None) -> int:
    """The step to go on from: ``from_step``, or the last."""
    found, others = steps(folder), not_counted(folder)
    if from_step is not None:
        if from_step in found:
            return from_step
        raise InputError(
            f"--from-step: {folder} has no complete checkpoint of step {from_step}; "
            + (f"use one of {', '.join(map(str, found))}" if found else "start again, without --resume")
        )
    last = found[-1] if found else -1
    newest = max(others, default=-1)
    if newest > last and not isinstance(others[newest], DamagedCheckpoint):  # whole, but not for this program
        earlier = f"; --from-step {last} goes on from the one before" if found else ""
        raise CheckpointError(f"--resume: {others[newest]}{earlier}")
    if not found:
        why = f" ({others[newest]})" if others else ""
        raise CheckpointError(
            f"--resume: {folder} has no complete checkpoint{why}; start again, without --resume and in a new --out"
        )
    return last


def check_samples(state: Mapping[str, Any], seed: int, samples: int | None) -> None:
    """A checkpoint's place in the data means the same samples only under the same seed and over as many samples.

    Args:
        state: of the checkpoint's manifest.
        seed: ``train.seed`` of the job that goes on.
        samples: how many training samples it has; None: not known, not compared.

    Raises:
        CheckpointError: they are others.
    """
    for key, name, now in (
        ("seed", "train.seed", seed), ("samples", "the number of training samples", samples),
    ):  # fmt: skip
        then = state.get(key)
        if None not in (now, then) and now != then:
            raise CheckpointError(
                f"--resume: {name} is {now} in this job but {then} in the checkpoint, so samples would "
                "be skipped or repeated; resume with the seed, data and sequence_length the run began with"
            )
