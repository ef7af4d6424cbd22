"""Copies of checkpoints in a store that has no rename (S3 and the like), reached by an fsspec URL.

    URL/job.toml
    URL/step-N/rank-00000.safetensors
    URL/step-N/manifest.json

A checkpoint is there exactly when its manifest is. So the manifest is written last, when the store says that all other
files are there in full size; and removed first, when a checkpoint is to go. A reader takes what it needs to a local
disk, where it is read, compared with its checksums, and used like any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.folder import is_complete, step_folder
from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.checkpoint.verify import verify
from meshwright.checkpoint.world import World
from meshwright.errors import CheckpointError, InputError, SaveError
from meshwright.files import folder_problem

JOB = "job.toml"
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What fsspec needs besides itself, by the URL's scheme."""


class Store:
    """The folder of one run's checkpoints at an fsspec URL.

    Raises:
        InputError: fsspec, or what it needs for this kind of store, is not installed; or the URL is none.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise InputError(f"{url} needs the package fsspec; pip install 'meshwright[remote]'") from None
        scheme = url.partition("://")[0]
        try:
            self._files, root = url_to_fs(url)
        except ImportError as error:
            need = _PACKAGES.get(scheme)
            how = f"the package {need}; pip install {need}" if need else f"a package ({error}); use s3://, gs:// or az://"
            raise InputError(f"{url} needs {how}") from None
        except ValueError as error:
            raise InputError(f"{url} is no URL of a store ({error}); give one such as s3://bucket/run") from None
        self.url, self._root = url.rstrip("/"), str(root).rstrip("/")

    def _at(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def check(self) -> None:
        """Refuse a store that nothing can be written to: an empty file goes there, and goes again.

        Raises:
            InputError: it cannot; says what the store said.
        """
        probe = self._at(".meshwright")
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(probe, b"")
            self._files.rm_file(probe)
        except Exception as error:  # stores raise all kinds
            raise InputError(
                f"checkpoint.copy_to: {self.url} cannot be written ({type(error).__name__}: {error}); give a place "
                "that you may write"
            ) from None

    def steps(self) -> list[int]:
        """The steps that have a manifest, by number."""
        self._files.invalidate_cache()
        found = self._files.glob(self._at("step-*", MANIFEST))
        names = (str(path).rstrip("/").split("/")[-2].removeprefix("step-") for path in found)
        return sorted(int(name) for name in names if name.isdigit())

    def put(self, path: Path, name: str) -> None:
        """Copy one file of a local checkpoint, and make sure that all of it is there."""
        target, size = self._at(path.name, name), (path / name).stat().st_size
        self._files.makedirs(self._at(path.name), exist_ok=True)
        self._files.put_file(str(path / name), target)
        self._files.invalidate_cache()
        there = int(self._files.size(target) or 0)
        if there != size:
            raise OSError(f"{self.url}/{path.name}/{name} has {there} bytes after it was copied, instead of {size}")

    def begin(self, path: Path) -> None:
        """What the store has of this step does not count from here on, until it is committed."""
        manifest = self._at(path.name, MANIFEST)
        if self._files.exists(manifest):
            self._files.rm_file(manifest)

    def commit(self, path: Path, job: Path | None = None) -> None:
        """Copy the manifest: from here on the checkpoint is there. The run's job goes beside it."""
        if job is not None and job.is_file():
            self._files.put_file(str(job), self._at(JOB))
        self.put(path, MANIFEST)

    def rotate(self, keep: int, newest: int) -> list[int]:
        """Remove the oldest up to ``newest`` beyond so many, each manifest first; the removed steps."""
        complete = self.steps()
        if newest not in complete:
            return []
        old = [step for step in complete if step <= newest][:-keep]
        for step in old:
            self._files.rm_file(self._at(f"step-{step}", MANIFEST))
            self._files.rm(self._at(f"step-{step}"), recursive=True)
        return old

    def _step(self, step: int | None) -> int:
        """The step to fetch: ``step``, or the last that the store has."""
        complete = self.steps()
        if not complete:
            raise CheckpointError(
                f"fetch: {self.url} has no checkpoint (no step-N/{MANIFEST}); give a run's checkpoint.copy_to"
            )
        if step not in (None, *complete):
            raise CheckpointError(
                f"fetch: {self.url} has no checkpoint of step {step}; use one of {', '.join(map(str, complete))}"
            )
        return complete[-1] if step is None else step

    def fetch(self, run: Path, step: int | None = None) -> Path:
        """Bring a checkpoint (the last) into a run's directory, verified; its folder there.

        Raises:
            InputError: ``run`` cannot be written, or has this checkpoint already.
            CheckpointError: the store has none, or what came is damaged; then it does not count in the run.
        """
        step = self._step(step)
        if problem := folder_problem(run / "checkpoints"):
            raise InputError(f"--out: {run} cannot be written ({problem}); give the directory of a run, or a new one")
        target = step_folder(run / "checkpoints", step)
        if is_complete(target):
            raise InputError(f"fetch: {target} is there already; give another --out, or remove it")
        partial = target.with_name(f".step-{step}.tmp-0")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in self._files.ls(self._at(f"step-{step}"), detail=False):
            self._files.get_file(str(path), str(partial / str(path).rsplit("/", 1)[-1]))
        verify(partial)
        job = self._at(JOB)
        if not (run / JOB).exists() and self._files.exists(job):
            self._files.get_file(job, str(run / JOB))
        disk = Disk()
        disk.rename(partial, target)
        disk.sync_folder(target.parent)
        return target


def copy_to_store(path: Path, url: str, world: World, *, keep: int, job: Path | None = None) -> None:
    """Copy a committed checkpoint to a store; all ranks together, each some of the files.

    Args:
        path: the local ``step-N`` folder.
        url: of the run's folder in the store.
        world: the ranks.
        keep: newest copies that stay.
        job: the run's job file.

    Raises:
        SaveError: on all ranks, when any could not; the local checkpoint and earlier copies are untouched.
    """
    _together(lambda: Store(url).begin(path), world, path, url, only_first=True)
    names = sorted(read_manifest(path).files)
    mine: Sequence[str] = names[world.rank :: world.size]

    def put() -> None:
        store = Store(url)
        for name in mine:
            store.put(path, name)

    def commit() -> None:
        store = Store(url)
        store.commit(path, job)
        store.rotate(keep, int(path.name.removeprefix("step-")))

    _together(put, world, path, url)
    _together(commit, world, path, url, only_first=True)


def _together(action: Any, world: World, path: Path, url: str, *, only_first: bool = False) -> None:
    failure = None
    if world.rank == 0 or not only_first:
        try:
            action()
        except Exception as error:  # stores raise all kinds; the other ranks must not wait for this one
            failure = f"rank {world.rank}: {type(error).__name__}: {error}"
    failures = [failure] if only_first else world.gather(failure)
    said = world.broadcast([each for each in failures if each] if world.rank == 0 else None)
    if said:
        raise SaveError(
            f"checkpoint: {path.name} could not be copied to {url} ({'; '.join(said)}); {path} and earlier copies are "
            "untouched"
        )
