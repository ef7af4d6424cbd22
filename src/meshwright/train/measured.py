"""The measured ledger of a run: one steady step is counted, the next one timed, and ``ledger.json`` written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.comm.measure import Instruments
from meshwright.comm.timeline import span
from meshwright.files import replace_text
from meshwright.ledger.ledger import Ledger
from meshwright.train.trainer import Trainer


def instruments_for(trainer: Trainer) -> Instruments:
    """Instruments that know what the trainer's long-lived memory is for."""
    instruments = Instruments(trainer.mesh)
    modules = trainer.stages.values()
    instruments.register([parameter for module in modules for parameter in module.parameters()], "parameters")
    instruments.register([piece.master for piece in trainer.owned], "parameters")
    instruments.register(trainer.data_parallel.gradient_buffers(), "gradients")
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
        self.instrumented = False
        """Whether the last step ran slower because it was recorded."""
        self.ledger: Ledger | None = None

    @contextmanager
    def around(self, steps_done: int) -> Iterator[None]:
        """Surround a step, and what loads its data."""
        step = steps_done + 1
        self.instrumented = step in (self._first, self._first + 1)
        if step == self._first:
            self._instruments = instruments_for(self._trainer)
            with self._instruments.counting():
                yield
        elif step == self._first + 1 and self._instruments is not None:
            with self._instruments.timing():
                yield
            self.ledger = self._instruments.gather(step=step)
            self._instruments = None
            if self._run_dir is not None and self._trainer.mesh.rank == 0:
                replace_text(self._run_dir / "ledger.json", self.ledger.to_json())
        else:
            yield

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Charge what happens inside to ``kind`` in a timed step."""
        with span(kind):
            yield
