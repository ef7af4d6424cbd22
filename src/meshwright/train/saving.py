"""Checkpoints of a run: the trainer's state as named, placed tensors, and back onto any layout."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.folder import CHECKPOINTS, step_folder, steps, supersede_later
from meshwright.checkpoint.load import ALL_ROLES, load, read_tensor
from meshwright.checkpoint.manifest import Manifest, read_manifest
from meshwright.checkpoint.placed import PlacedTensor, Role
from meshwright.checkpoint.remote import copy_to_store
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.save import save
from meshwright.checkpoint.world import GroupWorld, World
from meshwright.data.loader import Loader
from meshwright.errors import CheckpointError, DamagedCheckpoint, InputError
from meshwright.job.job import Job
from meshwright.job.split import resumed_split
from meshwright.model.transformer import StageModel
from meshwright.parallel.owned import Owned
from meshwright.recovery.handover import State
from meshwright.sync.server.cursor import Position
from meshwright.train.optimizer import AdamW, variance_steps
from meshwright.train.placement import placements, segments_of
from meshwright.train.resumable import check_samples
from meshwright.train.sync_state import SyncState
from meshwright.train.trainer import StepReport, Trainer


class Saver:
    """Saves and restores one trainer. All ranks call each method together."""

    def __init__(self, trainer: Trainer, loader: Loader | None, run_dir: Path) -> None:
        self.trainer, self.loader, self.folder = trainer, loader, run_dir / CHECKPOINTS
        self.world = GroupWorld(trainer.mesh.group("world"))
        self.disk = Disk()
        self.sync = SyncState(trainer)
        self._writes = 0
        self.saved_step = 0
        self.passed_over: list[str] = []
        """What was wrong with newer checkpoints than the one resumed from."""
        self.samples_passed_over = 0
        """Samples that had come back to a parameter server, which alone hands such samples out again."""
        self.superseded: list[int] = []
        """Steps of later checkpoints that were put aside at resume."""

    def save(self) -> Path:
        """Write the state after the current step.

        Each element is saved by the one rank that counts it in the norm, so it is written once.
        """
        path = self.write(self.trainer.step_number, self.counted_tensors(), self.scalars(), self.world)
        self.saved_step = self.trainer.step_number
        return path

    def counted_tensors(self) -> list[PlacedTensor]:
        """The tensors that this rank speaks for, always in the same order."""
        counted = [index for index, piece in enumerate(self.trainer.owned) if piece.counted]
        apart = self.trainer.apart
        if apart is None:
            return self.tensors(counted) + self.sync.tensors()
        apart.settle()
        model = apart.model()  # of all replicas together, so every rank asks for it
        return (self.tensors(counted, model) if apart.replica == 0 else []) + self.sync.tensors()

    def write(self, step: int, tensors: list[PlacedTensor], state: Mapping[str, Any], world: World) -> Path:
        """Write these tensors as the state after ``step``; all ranks of ``world`` together."""
        job = self.trainer.job
        self._writes += 1
        every = job.checkpoint.drill_every
        path = save(
            self.folder,
            step,
            tensors,
            layout=str(job.layout),
            model=job.model_spec.model_dump(mode="json"),
            optimizer=job.optimizer.model_dump(mode="json"),
            state=state,
            keep=retention(job),
            finite=True,
            drill=every is not None and self._writes % every == 0,
            full_every=job.checkpoint.incremental,
            world=world,
            disk=self.disk,
        )
        if job.checkpoint.copy_to is not None:
            run_dir = self.folder.parent
            copy_to_store(path, job.checkpoint.copy_to, world, keep=job.checkpoint.keep, job=run_dir / "job.toml")
        return path

    def resume(self) -> None:
        """Continue from the last complete checkpoint of the run, or by policy from the last that is not damaged.

        Later ones are then put aside: the run takes another course from here.

        Raises:
            CheckpointError: there is none, or it does not fit the model or the optimizer; or it is damaged and the
                policy is to refuse, or all are.
        """
        # Rank 0 looks, so that all ranks take the same one.
        found = self.world.broadcast(steps(self.folder) if self.world.rank == 0 else None)
        if not found:
            raise CheckpointError(
                f"--resume: {self.folder} has no complete checkpoint; start again, without --resume and in a new --out"
            )
        for step in reversed(found):
            try:
                self.restore(step_folder(self.folder, step))
                break
            except DamagedCheckpoint as error:
                if step == found[0]:
                    raise CheckpointError(f"{error}; it is the only one left, so start again in a new --out") from None
                if self.trainer.job.checkpoint.damaged == "refuse":
                    raise CheckpointError(f'{error}; --set checkpoint.damaged="previous" takes that') from None
                self.passed_over.append(str(error))
        later = supersede_later(self.folder, self.saved_step, self.disk) if self.world.rank == 0 else None
        self.superseded = self.world.broadcast(later)

    def resume_from_memory(self, path: Path) -> None:
        """Continue from a state that the ranks before these handed over; no checkpoint is later than it."""
        last = self.restore(path).state.get("last_report")
        self.trainer.last_report = StepReport(**last) if last is not None else None
        self.saved_step = self.world.broadcast(max(steps(self.folder), default=0) if self.world.rank == 0 else None)

    def held(self) -> State:
        """Everything this rank holds after the last step, the copies of what another one speaks for included."""
        job, tensors, counted = self.trainer.job, list[PlacedTensor](), list[bool]()
        for index, piece in enumerate(self.trainer.owned):
            placed = self.tensors([index])
            tensors += placed
            counted += [piece.counted] * len(placed)
        header = {
            "layout": str(job.layout), "model": job.model_spec.model_dump(mode="json"),
            "optimizer": job.optimizer.model_dump(mode="json"),
            # Its step may have been the last thing that happened: nobody has written down yet how it went.
            "state": {**self.scalars(), "last_report": vars(report) if (report := self.trainer.last_report) else None},
        }  # fmt: skip
        return State(self.trainer.step_number, tensors, counted, job.model_spec.parameter_count, header)

    def restore(self, path: Path) -> Manifest:
        """Take over everything a checkpoint holds; its layout may be any."""
        trainer = self.trainer
        boxes = self.tensors(range(len(trainer.owned)))
        manifest = load(path, boxes, roles=self._roles(path), world=self.world)
        state = manifest.state
        check_samples(state, trainer.job.train.seed, self.scalars()["samples"])
        trainer.step_number = manifest.step
        trainer.optimizer.steps = int(state["optimizer_steps"])
        if isinstance(trainer.optimizer, AdamW):
            trainer.optimizer.variance_steps = variance_steps(state)
        trainer.loss_scale.value = float(state["loss_scale"]) if trainer.loss_scale.enabled else 1.0
        trainer.loss_scale.good_steps = int(state["loss_scale_good_steps"])
        if self.loader is not None:
            position = Position.of(state)
            self.samples_passed_over = position.waiting
            self.loader.resume(manifest.step, position.next)
            self.loader.split = resumed_split(trainer.job, state.get("sequences"), self.loader.split)
        self.sync.restore(path, manifest, self.world)
        self._restore_previous(path, manifest)
        trainer.publish()
        self.saved_step = manifest.step
        return manifest

    def _roles(self, path: Path) -> tuple[Role, ...]:
        """What to load: all, but for the momentum of SGD where a compressor had it or has it now; it begins anew."""
        here = there = "momentum" in self.trainer.optimizer.state()
        if self.world.rank == 0 and self.trainer.job.optimizer.momentum:
            with contextlib.suppress(CheckpointError):  # which loading says on all ranks
                manifest = read_manifest(path)
                if manifest.optimizer.get("momentum"):
                    there = any(key.startswith("momentum/") for key in manifest.tensors)
        kept = self.world.broadcast(here == there)
        return tuple(role for role in ALL_ROLES if kept or role != "momentum")

    @torch.no_grad()
    def _restore_previous(self, path: Path, manifest: Manifest) -> None:
        """Where gradients are one update late: the parameters before the last update.

        A checkpoint of a run whose gradients were not has none; the first gradient is then taken at the newest.
        """
        previous = self.trainer.previous
        if previous is None:
            return
        if any(key.startswith("previous/") for key in manifest.tensors):
            boxes = self.tensors(range(len(self.trainer.owned)))
            roles: tuple[Role, ...] = ("previous",)
            load(path, [box for box in boxes if box.role in roles], roles=roles, world=self.world)
            return
        for piece, tensor in zip(self.trainer.owned, previous, strict=True):
            tensor.copy_(piece.master)

    def scalars(self) -> dict[str, Any]:
        """What comes back besides tensors."""
        trainer = self.trainer
        extra: dict[str, Any] = {"sync": self.sync.scalars()} if self.sync.used else {}
        if isinstance(trainer.optimizer, AdamW):
            # Also after 1-bit and 0/1 Adam: what was left out of the second moments stays so.
            extra["variance_steps"] = trainer.optimizer.variance_steps
        return {
            "cursor": self.loader.cursor(trainer.step_number) if self.loader else 0,
            "seed": trainer.job.train.seed,
            "samples": len(self.loader.corpora.training) if self.loader else None,
            "sequences": list(self.loader.split.sequences) if self.loader and self.loader.split else None,
            "optimizer_steps": trainer.optimizer.steps,
            "loss_scale": trainer.loss_scale.value,
            "loss_scale_good_steps": trainer.loss_scale.good_steps,
            **extra,
        }

    def tensors(self, indices: Any, values: Sequence[Tensor] | None = None) -> list[PlacedTensor]:
        """Masters (or ``values`` in their place) and optimizer state of the owned ranges with these numbers.

        Where gradients are one update late, also the masters before the last update.
        """
        state, previous = self.trainer.optimizer.state(), self.trainer.previous
        result = []
        for index in indices:
            piece = self.trainer.owned[index]
            result += self._placed(piece, piece.master if values is None else values[index], "parameter")
            for role, tensors in state.items():
                result += self._placed(piece, tensors[index], role)  # type: ignore[arg-type]
            if previous is not None:
                result += self._placed(piece, previous[index], "previous")
        return result

    def _placed(self, piece: Owned, flat: Tensor, role: Role) -> list[PlacedTensor]:
        segments = segments_of(self.trainer.stages, piece.parameter)
        return [
            PlacedTensor(place.name, place.shape, place.offsets, place.sizes, flat[place.start : place.stop], role)
            for place in placements(piece, segments)
        ]


def retention(job: Job) -> Retention:
    """What a job's ``[checkpoint]`` keeps."""
    section = job.checkpoint
    return Retention(section.keep, section.keep_every, section.keep_hours)


def require_shared(run_dir: Path, world: World) -> None:
    """Refuse a run directory that ranks on other hosts do not see: at the start, not at the first save.

    Raises:
        InputError: on all ranks; names the hosts.
    """
    mark = run_dir / f".shared-{world.broadcast(secrets.token_hex(4))}"
    if world.rank == 0:
        mark.touch()
    world.broadcast(None)  # from here on it is there
    blind = world.gather(None if mark.exists() else socket.gethostname())
    hosts = world.broadcast(sorted({host for host in blind if host is not None}))
    if world.rank == 0:
        mark.unlink()
    if hosts:
        raise InputError(
            f"--out: {run_dir} on {', '.join(hosts)} is not the directory that the first rank has; "
            "give one on storage that all hosts share"
        )


@torch.no_grad()
def load_whole_model(job: Job, path: Path) -> StageModel:
    """The model of a checkpoint on one device, in the type of its masters."""
    spec = job.model_spec
    manifest: Manifest = read_manifest(path)
    dtype = torch.float64 if job.precision.dtype == "float64" else torch.float32
    model = StageModel(spec, range(spec.layers), first=True, last=True).to(dtype)
    model.fill(lambda segment: read_tensor(manifest, segment.name))
    return model
