"""Puts a job's faults into one rank's training loop, by standing in for the few methods in which they happen.

Only the objects of a loop that has faults are touched: others run the code they always run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from meshwright.checkpoint.placed import PlacedTensor
from meshwright.checkpoint.world import World
from meshwright.data.batch import Batch
from meshwright.job.fault_section import Fault
from meshwright.train.faults.disk import ERRORS, FaultyDisk
from meshwright.train.faults.effects import FOR_EVER, Site, prepare
from meshwright.train.faults.fired import Fired, named

if TYPE_CHECKING:
    from meshwright.train.loop import TrainingLoop

_PASSES = ("forward", "backward")


class Injector:
    """The faults that wait on one rank."""

    def __init__(self, site: Site, faults: Mapping[str, Fault], *, listen: bool) -> None:
        self.site, self._fired, self._listen = site, Fired(site.run_dir), listen
        self._waiting = {name: fault for name, fault in faults.items() if fault.rank == site.rank}
        self._waiting = {name: fault for name, fault in self._waiting.items() if not self._fired.has(name)}
        self._slow: list[tuple[int, float]] = []
        """Last step and seconds of what slows this rank down."""
        self.disk = FaultyDisk(site.saver.disk, self.at)

    def at(self, step: int, phase: str) -> None:
        """This rank has come to ``phase`` of ``step``: what waits for that happens now."""
        for name, fault in self.due(step, phase):
            self.fire(name, fault)

    def due(self, step: int, *phases: str) -> list[tuple[str, Fault]]:
        """What waits for one of these phases of a step, with names."""
        return [(n, fault) for n, fault in self._waiting.items() if fault.step == step and fault.phase in phases]

    def fire(self, name: str, fault: Fault) -> None:
        """Let it happen, unless it has already."""
        act = self._prepare(fault)
        del self._waiting[name]
        if self._fired.claim(name, fault):
            act()

    def _prepare(self, fault: Fault) -> Callable[[], None]:
        if fault.kind in ERRORS:
            return lambda: self.disk.fail(fault)
        if fault.kind == "hung-write":
            return lambda: self.disk.hang(fault.seconds(FOR_EVER))
        if fault.kind == "slow":
            last = fault.step + fault.number("steps", 1) - 1
            return lambda: self._slow.append((last, fault.seconds(0.2)))
        if fault.kind == "nan":
            return lambda: None  # in the hooks
        return prepare(fault, self.site)

    def begin_step(self, step: int) -> None:
        """What happens before a step; and between steps, look what was asked for."""
        if self._listen:
            for name, fault in self._fired.asked():
                if fault.rank == self.site.rank and not self._fired.has(name):
                    self._waiting.setdefault(name, fault)
        self.at(step, "start")
        for _, seconds in [each for each in self._slow if each[0] >= step]:
            time.sleep(seconds)

    def hooks(self, step: int) -> list[RemovableHandle]:
        """Hooks on this rank's stages for what is due in the passes of a step; to be removed after it."""
        due = self.due(step, *_PASSES)
        if not due:
            return []
        passes = _Passes(self, due)
        handles: list[RemovableHandle] = []
        for module in self.site.saver.trainer.stages.values():
            handles.append(module.register_forward_pre_hook(passes.before))
            handles.append(module.register_forward_hook(passes.after))
        return handles


class _Passes:
    """Counts the forward passes of one rank in one step, over all its stages, and fires in the right one."""

    def __init__(self, injector: Injector, due: list[tuple[str, Fault]]) -> None:
        self._injector, self._due, self._count = injector, due, 0

    def _now(self, phase: str) -> list[tuple[str, Fault]]:
        return [(n, fault) for n, fault in self._due if fault.phase == phase and fault.micro_batch == self._count]

    def before(self, _module: object, _arguments: object) -> None:
        self._count += 1
        for name, fault in self._now("forward"):
            if fault.kind != "nan":
                self._injector.fire(name, fault)

    def after(self, _module: object, _arguments: object, output: Tensor) -> Tensor:
        for name, fault in self._now("forward"):
            if fault.kind == "nan":
                self._injector.fire(name, fault)
                output = output * torch.nan
        for name, fault in self._now("backward"):
            output.register_hook(self._on_backward(name, fault))  # type: ignore[no-untyped-call]
        return output

    def _on_backward(self, name: str, fault: Fault) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            self._injector.fire(name, fault)
            return gradient * torch.nan if fault.kind == "nan" else None

        return hook


def arm(loop: TrainingLoop) -> Injector:
    """Put the faults of the loop's job into it."""
    trainer, saver = loop.trainer, loop.saver
    site = Site(loop.run_dir, loop.mesh.rank, saver)
    section = loop.job.fault
    injector = Injector(site, dict(named(section.faults)), listen=section.listen)

    def before(owner: Any, method: str, phase: str, *, counted: bool = False) -> None:
        """Come to ``phase`` of the step under way before ``method`` of ``owner`` runs.

        ``counted``: the step is then already among those done.
        """
        original = getattr(owner, method)

        def wrapped(*arguments: Any, **named_arguments: Any) -> Any:
            injector.at(trainer.step_number + (not counted), phase)
            return original(*arguments, **named_arguments)

        setattr(owner, method, wrapped)

    before(trainer.data_parallel, "finish_gradients", "reduce")
    before(trainer, "_agree", "agree")
    before(trainer, "_update", "optimizer")
    before(trainer.data_parallel, "publish", "publish", counted=True)
    _wrap_step(loop, injector)
    _wrap_passes(loop, injector)
    _wrap_saving(loop, injector)
    return injector


def _wrap_step(loop: TrainingLoop, injector: Injector) -> None:
    original = loop._one_step

    def one_step() -> Any:
        injector.begin_step(loop.trainer.step_number + 1)
        reports = original()
        for report in reports:
            injector.at(report.step, "end")
        return reports

    setattr(loop, "_one_step", one_step)  # noqa: B010


def _wrap_passes(loop: TrainingLoop, injector: Injector) -> None:
    original = loop.trainer.executor.run

    def run(batches: list[Batch], divisor: float) -> list[Tensor | None]:
        handles = injector.hooks(loop.trainer.step_number + 1)
        try:
            return original(batches, divisor)
        finally:
            for handle in handles:
                handle.remove()

    setattr(loop.trainer.executor, "run", run)  # noqa: B010


def _wrap_saving(loop: TrainingLoop, injector: Injector) -> None:
    original = loop.saver.write

    def write(step: int, tensors: list[PlacedTensor], state: Mapping[str, Any], world: World) -> Path:
        injector.disk.begin(step)
        path = original(step, tensors, state, world)
        injector.at(step, "saved")
        return path

    setattr(loop.saver, "write", write)  # noqa: B010
    loop.saver.disk = injector.disk
