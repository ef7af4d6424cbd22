"""A training loop on the ranks of a pool, with faults that leave the ranks alive, for the tests of fault injection."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import torch

from meshwright.comm.mesh import Mesh
from meshwright.comm.phase import current_phase
from meshwright.errors import MeshwrightError
from meshwright.job.fault_section import Fault
from meshwright.job.job import load_job
from meshwright.train.faults.arm import Injector
from meshwright.train.faults.effects import InjectedFault
from meshwright.train.loop import TrainingLoop


@dataclass
class Ran:
    """How a loop ended on one rank, and the faults it met, in order."""

    error: str = ""
    met: list[tuple[Fault, int, str]] = field(default_factory=list)
    """Each with the steps done and the phase under way when it happened."""
    armed: bool = False


def run_loop(job: str, out: str, pairs: list[str], resume: bool = False) -> Ran:
    """On a rank: train a job in ``out``."""
    ran = Ran()
    original = Injector.fire

    def fire(injector: Injector, name: str, fault: Fault) -> None:
        ran.met.append((fault, injector.site.saver.trainer.step_number, current_phase()))
        original(injector, name, fault)

    Injector.fire = fire  # type: ignore[method-assign]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    loaded = load_job(job, pairs).resolve()
    try:
        with Mesh(loaded.layout) as mesh:
            loop = TrainingLoop(loaded, mesh, Path(out), device=torch.device("cpu"), resume=resume, quiet=True)
            ran.armed = "_one_step" in vars(loop)
            try:
                loop.run()
            except (MeshwrightError, InjectedFault) as error:
                ran.error = f"{type(error).__name__}: {error}"
            finally:
                loop.loader.close()
    finally:
        Injector.fire = original  # type: ignore[method-assign]
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ran
