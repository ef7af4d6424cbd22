"""The measured ledger of a run: one steady step is counted, the next one timed, and ``ledger.json`` written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshwright.comm.measure import Instruments
from meshwright.comm.record import TrafficRecorder
from meshwright.comm.timeline import span
from meshwright.files import replace_text
from meshwright.ledger.ledger import Ledger
from meshwright.train.trainer import Trainer


def instruments_for(trainer: Trainer) -> Instruments:
    """Instruments that know what the trainer's long-lived memory is for."""
    instruments = Instruments(trainer.mesh)
    for version in trainer.versions:
        modules, owned = version.stages.values(), version.data_parallel.owned()
        instruments.register([parameter for module in modules for parameter in module.parameters()], "parameters")
        instruments.register([piece.master for piece in owned], "parameters")
        instruments.register(version.data_parallel.gradient_buffers(), "gradients")
    moments = trainer.optimizer.state().values()
    instruments.register([tensor for tensors in moments for tensor in tensors], "optimizer")
    instruments.register(trainer.sync_memory(), "optimizer")
    return instruments


class LedgerRecorder:
    """Instruments the first steady steps of a run.

    Args:
        trainer: whose steps.
        run_dir: where ``ledger.json`` goes, if given.
        first_step: the step that is counted; the one after it is timed. Steps count from 1.
    """

    def __init__(self, trainer: Trainer, run_dir: Path | None, *, first_step: int) -> None:
        self._trainer, self._run_dir, self._first = trainer, run_dir, first_step
        self._instruments: Instruments | None = None
        self._watched = ExitStack()
        """Open from the beginning of the step before, where that overlaps the one that is counted."""
        self._recorder: TrafficRecorder | None = None
        self._timed: int | None = None
        """The step that has been timed and not gathered."""
        self.instrumented = False
        """Whether the last step ran slower because it was recorded."""
        self.ledger: Ledger | None = None

    @contextmanager
    def around(self, steps_done: int) -> Iterator[None]:
        """Surround a step, and what loads its data."""
        step = steps_done + 1
        before = self._first - (len(self._trainer.versions) - 1)
        self.instrumented = before <= step <= self._first + 1
        if step == before < self._first:
            self._instruments = instruments_for(self._trainer)
            self._recorder = self._watched.enter_context(self._instruments.counting())
            yield
        elif step == self._first and self._instruments is not None:
            assert self._recorder is not None
            self._recorder.restart()
            with self._watched:
                yield
        elif step == self._first:
            self._instruments = instruments_for(self._trainer)
            with self._instruments.counting():
                yield
        elif step == self._first + 1 and self._instruments is not None:
            with self._instruments.timing():
                yield
            self._timed = step
            if self._trainer.next_step == self._trainer.step_number:
                self.gather()
        else:
            yield

    def gather(self) -> None:
        """Gather what was recorded, once it is; where steps overlap, when none is under way any more.

        Until then other messages of all ranks are on their way.
        """
        if self._timed is None or self._instruments is None:
            return
        self.ledger = self._instruments.gather(step=self._timed)
        self._instruments = self._timed = None
        if self._run_dir is not None and self._trainer.mesh.rank == 0:
            replace_text(self._run_dir / "ledger.json", self.ledger.to_json())

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Charge what happens inside to ``kind`` in a timed step."""
        with span(kind):
            yield
