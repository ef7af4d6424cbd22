"""What a rank does when resharding is proven: train, save and go on; or load what others saved and go on from there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from numpy.typing import NDArray

from meshwright.checkpoint.placed import PlacedTensor
from meshwright.comm.mesh import Mesh
from meshwright.data.corpora import Corpora
from meshwright.data.loader import Loader
from meshwright.data.samples import Samples
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.job.job import Job
from meshwright.prove.parity import to_numpy
from meshwright.prove.proof_data import ProofSamples
from meshwright.train.delayed import make_trainer
from meshwright.train.saving import Saver
from meshwright.train.trainer import Trainer
from meshwright.train.worker import prepare_determinism

Box = tuple[str, tuple[int, ...], tuple[int, ...], NDArray[Any]]


@dataclass(frozen=True)
class FewSamples(ProofSamples):
    """So few random samples that a proof crosses the end of an epoch."""

    count: int = 20

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Leg:
    """Steps ``start`` to ``stop`` of a run, from the checkpoint in ``come_from`` (start > 0), saved into ``save_to``.

    The state is saved and handed over after ``stop`` steps; ``further`` ones follow.
    """

    job: Job
    samples: FewSamples
    start: int
    stop: int
    come_from: str = ""
    save_to: str = ""
    further: int = 0


@dataclass
class LegTrace:
    """What one rank saw of it; tensors by ``role/full name``."""

    losses: list[float] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    """By step: digests of the samples this rank trained on, given by one rank of each dp coordinate."""
    saved: list[Box] = field(default_factory=list)
    ended: list[Box] = field(default_factory=list)
    """Masters after the last step."""


def run_leg(leg: Leg) -> LegTrace:
    """Runs on every rank of a pool."""
    prepare_determinism(leg.job)
    trace = LegTrace()
    with Mesh(leg.job.layout) as mesh:
        trainer = make_trainer(leg.job, mesh)
        loader = _loader(leg.job, leg.samples, mesh)
        if leg.start:
            Saver(trainer, loader, Path(leg.come_from)).resume()
        for step in range(leg.start, leg.stop + leg.further):
            if step == leg.stop:
                trace.saved = _save(trainer, loader, leg)
            _step(trainer, loader, trace)
        if not leg.further:
            trace.saved = _save(trainer, loader, leg)
        trace.ended = _boxes(trainer, "parameter")
        loader.close()
    return trace


def _loader(job: Job, samples: FewSamples, mesh: Mesh) -> Loader:
    corpora = Corpora(cast(Samples, samples), None, ByteTokenizer(), 0.0)
    return Loader(job, dp_rank=mesh.coordinate("dp"), dp=mesh.degree("dp"), corpora=corpora)


def _save(trainer: Trainer, loader: Loader, leg: Leg) -> list[Box]:
    Saver(trainer, loader, Path(leg.save_to)).save()
    return _boxes(trainer)


def _step(trainer: Trainer, loader: Loader, trace: LegTrace) -> None:
    batches = loader.batches(trainer.step_number)
    if trainer.mesh.coordinate("tp") == 0 and trainer.mesh.coordinate("pp") == 0:
        rows = (row for batch in batches for row in batch.tokens[batch.examples >= 0])
        trace.rows.append([row_digest(row.numpy()) for row in rows])
    trace.losses.append(trainer.step(batches).loss)


def row_digest(row: NDArray[Any]) -> str:
    """Which sample a row of tokens is."""
    return hashlib.blake2b(row.astype(numpy.int64).tobytes(), digest_size=8).hexdigest()


def _state(trainer: Trainer, counted: bool = False) -> list[PlacedTensor]:
    """Everything this rank holds of masters and optimizer state; with ``counted``, only what it would save."""
    chosen = [index for index, piece in enumerate(trainer.owned) if piece.counted or not counted]
    return Saver(trainer, None, Path()).tensors(chosen)


def _boxes(trainer: Trainer, role: str | None = None) -> list[Box]:
    return [
        (box.key, box.global_shape, box.offsets, to_numpy(box.boxed))
        for box in _state(trainer)
        if role in (None, box.role)
    ]


@dataclass(frozen=True)
class Source:
    """A run that was saved after ``step`` steps: its checkpoint, and two files with what must come of it.

    ``state`` and ``after`` hold whole tensors, one after the other as ``index`` says: those that were saved, and
    the masters one undisturbed step later.
    """

    folder: str
    step: int
    state: str
    after: str
    index: dict[str, tuple[int, tuple[int, ...]]]
    """By ``role/full name``: first element, shape."""


@dataclass
class Taken:
    """What one rank found when it took over one source."""

    wrong_bits: list[str] = field(default_factory=list)
    counted: int = 0
    """Elements this rank would save: over all ranks, each once."""
    loss: float = 0.0
    rows: list[str] = field(default_factory=list)
    gaps: dict[str, float] = field(default_factory=dict)
    """By key: max|p - p_undisturbed| after one more step, over this rank's part."""


def take_over_all(job: Job, samples: FewSamples, sources: Sequence[Source]) -> list[Taken]:
    """Runs on every rank of a pool: one trainer takes over each source in turn, and does one step."""
    prepare_determinism(job)
    results = []
    with Mesh(job.layout) as mesh:
        trainer = make_trainer(job, mesh)
        for source in sources:
            loader = _loader(job, samples, mesh)
            results.append(_take_over(trainer, loader, source))
            loader.close()
    return results


def _take_over(trainer: Trainer, loader: Loader, source: Source) -> Taken:
    _spoil(trainer)
    Saver(trainer, loader, Path(source.folder)).resume()
    result = Taken(counted=sum(box.tensor.numel() for box in _state(trainer, counted=True)))
    state = numpy.load(source.state, mmap_mode="r")
    for key, _, offsets, values in _boxes(trainer):
        if values.tobytes() != _box_of(state, source, key, offsets, values.shape).tobytes():
            result.wrong_bits.append(key)
    trace = LegTrace()
    _step(trainer, loader, trace)
    result.loss, result.rows = trace.losses[0], trace.rows[0] if trace.rows else []
    after = numpy.load(source.after, mmap_mode="r")
    for key, _, offsets, values in _boxes(trainer, "parameter"):
        gap = numpy.abs(values - _box_of(after, source, key, offsets, values.shape))
        result.gaps[key] = max(result.gaps.get(key, 0.0), float(numpy.nan_to_num(gap, nan=numpy.inf).max()))
    return result


@torch.no_grad()
def _spoil(trainer: Trainer) -> None:
    """Make everything that loading must bring wrong, so that what it does not bring shows."""
    for box in _state(trainer):  # padding is not among them: nobody saves or loads it
        box.tensor.fill_(float("nan"))
    trainer.optimizer.steps = trainer.step_number = -1000


def _box_of(
    flat: NDArray[Any], source: Source, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> NDArray[Any]:
    start, shape = source.index[key]
    whole = flat[start : start + int(numpy.prod(shape))].reshape(shape)
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
