"""Resharding proven: what one layout saved, another takes over to the bit, and goes on as if nothing had happened."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from meshwright.data.order import Order
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.layout_text import parse_layout
from meshwright.prove.check import Prover, proof_job
from meshwright.prove.matrix import PROOF_SEQUENCE, Case, layout_cases
from meshwright.prove.parity import PARAMETER_BOUNDS, Arrays, assemble
from meshwright.prove.pool import RankFailure, last_line
from meshwright.prove.reshard_run import FewSamples, Leg, LegTrace, Source, Taken, row_digest, run_leg, take_over_all

_STEPS = 2
"""Before the state is saved; one follows. 20 samples in batches of 8: the epoch ends in the step after."""
_RATE = 1e-3
"""AdamW's learning rate in a proof."""
_PARTNERS = 2
"""Of every layout of 8 ranks: that many others take over from it, and it from them."""
_CHAIN = ("dp=1 micro_batch=1", "dp=8 zero=3 micro_batch=1", "dp=3 zero=2 micro_batch=1")
"""Grown and shrunk again, each at a save."""


@dataclass(frozen=True)
class Resharded:
    """The verdict on one pair of layouts (or on a chain of them)."""

    label: str
    layout: str
    """That took over."""
    ranks: int
    dtype: str
    optimizer: str
    wrong_tensors: list[str]
    """Not bit-equal to what was saved."""
    max_relative_parameter_difference: float
    """One step later, to the undisturbed run."""
    max_relative_loss_difference: float
    samples_in_order: bool
    """Before and after, every step had exactly its samples: none skipped, none repeated."""
    worst: str
    passed: bool

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


Report = Callable[[Resharded], None]


@dataclass(frozen=True)
class _Saved:
    """A run under one layout: where it is saved, and how it went on undisturbed."""

    source: Source
    losses: list[float]
    peaks: dict[str, float]
    """By key: max|p| after the last step."""
    in_order: bool


def pairs_of(max_ranks: int = 8, cases: Sequence[Case] | None = None) -> list[tuple[Case, Case]]:
    """All pairs of the matrix's layouts of at most 4 ranks, and for each of 8 ranks a drawn sample, both ways."""
    chosen = _distinct(layout_cases(max_ranks) if cases is None else cases)
    small = [case for case in chosen if case.layout.ranks <= 4]
    pairs = [(a, b) for a in small for b in small if _one_model(a, b)]
    draw = random.Random(1)
    for large in chosen:
        if large.layout.ranks <= 4:
            continue
        others = [case for case in chosen if _one_model(case, large) and case is not large]
        for other in draw.sample(others, min(_PARTNERS, len(others))):
            pairs += [(large, other), (other, large)]
    return pairs


def _one_model(a: Case, b: Case) -> bool:
    """Whether both train the same model to the same numbers: gradients one update late are other numbers."""
    return a.tied == b.tied and a.layout.delayed == b.layout.delayed


def _distinct(cases: Iterable[Case]) -> list[Case]:
    """One device and every different layout once, on one batch: other batches and labels prove nothing here."""
    found: dict[tuple[Layout, bool], Case] = {}
    alone = Case("dp=1", parse_layout("dp=1 micro_batch=1"))
    for case in [alone, *cases]:
        key = case.layout, case.tied
        found.setdefault(key, Case(case.label, case.layout, case.kv_heads, case.tied))
    return [
        case for case in found.values() if case.global_size % (case.layout.dp * (case.layout.micro_batch or 1)) == 0
    ]


def check_reshard(
    job: Job, *, dtype: str, max_ranks: int = 8, report: Report | None = None, cases: Sequence[Case] | None = None
) -> list[Resharded]:
    """Every pair of layouts (AdamW), and the chain 1 -> 8 -> 3 ranks where ``max_ranks`` allows it."""
    results: list[Resharded] = []

    def tell(result: Resharded) -> None:
        results.append(result)
        if report:
            report(result)

    with Prover() as prover, tempfile.TemporaryDirectory(prefix="meshwright-reshard-") as folder:
        proof = Proof(prover, job, dtype, Path(folder))
        proof.run(pairs_of(max_ranks, cases), tell)
        if max_ranks >= 8 and cases is None:
            tell(proof.chain(_CHAIN))
    return results


class Proof:
    """Runs each saving layout once, and each loading layout once for all it takes over."""

    def __init__(self, prover: Prover, job: Job, dtype: str, folder: Path) -> None:
        self.prover, self.job, self.dtype, self.folder = prover, job, dtype, folder
        self.samples = FewSamples(97, PROOF_SEQUENCE, seed=job.train.seed, masked=True)
        self._saved: dict[tuple[Layout, bool, int], _Saved | str] = {}

    def run(self, pairs: Sequence[tuple[Case, Case]], tell: Report) -> None:
        """Prove every pair; ``tell`` hears of each."""
        by_taker: dict[tuple[Layout, bool, int], tuple[Case, list[Case]]] = {}
        for giver, taker in pairs:
            heads = max(giver.kv_heads, taker.kv_heads)  # the pair has one model, that both layouts can split
            wanted = by_taker.setdefault((taker.layout, taker.tied, heads), (replace(taker, kv_heads=heads), []))
            wanted[1].append(replace(giver, kv_heads=heads))
        for taker, givers in by_taker.values():
            self._take_over(taker, givers, tell)

    def _job(self, case: Case) -> Job:
        return proof_job(self.job, case, self.dtype, "adamw")

    def saved(self, case: Case) -> _Saved | str:
        """The run under a layout, saved after two steps; a text when it failed."""
        key = case.layout, case.tied, case.kv_heads
        if key not in self._saved:
            try:
                self._saved[key] = self._save(case, self.folder / f"run-{len(self._saved)}")
            except (RankFailure, ValueError) as error:
                self._saved[key] = last_line(error)
        return self._saved[key]

    def _save(self, case: Case, folder: Path) -> _Saved:
        leg = Leg(self._job(case), self.samples, 0, _STEPS, save_to=str(folder), further=1)
        traces: list[LegTrace] = self.prover.pool(case.layout.ranks).run(run_leg, leg, timeout=300)
        state, after = (assemble([getattr(each, name) for each in traces]) for name in ("saved", "ended"))
        index: dict[str, tuple[int, tuple[int, ...]]] = {}
        position = 0
        for key, value in state.items():  # masters and moments; the masters alone have the same places in `after`
            index[key] = position, value.shape
            position += value.size
        files = folder / "state.npy", folder / "after.npy"
        numpy.save(files[0], _flat(state, index, position))
        numpy.save(files[1], _flat(after, index, position))
        return _Saved(
            Source(str(folder), _STEPS, str(files[0]), str(files[1]), index),
            traces[0].losses,
            {key: float(numpy.abs(value).max()) for key, value in after.items()},
            self._in_order([each.rows for each in traces], 0),
        )

    def _in_order(self, rows: Sequence[Sequence[Sequence[str]]], first: int) -> bool:
        """Whether the ranks together had exactly the samples of each step, from step ``first`` on."""
        steps = max(len(each) for each in rows)
        size = Case.global_size
        order = Order(len(self.samples), self.job.train.seed)
        for step in range(steps):
            tokens = self.samples.rows(order.samples((first + step) * size, size)).tokens
            found = [digest for rank in rows if rank for digest in rank[step]]
            if sorted(found) != sorted(row_digest(row) for row in tokens):
                return False
        return True

    def _take_over(self, taker: Case, givers: Sequence[Case], tell: Report) -> None:
        saved = [(giver, self.saved(giver)) for giver in givers]
        sources = [(giver, each) for giver, each in saved if isinstance(each, _Saved)]
        for giver, problem in saved:
            if isinstance(problem, str):
                tell(self._failed(f"{giver.label} -> {taker.label}", taker.layout, f"saving: {problem}"))
        try:
            ranks: list[list[Taken]] = self.prover.pool(taker.layout.ranks).run(
                take_over_all, self._job(taker), self.samples, [each.source for _, each in sources],
                timeout=60 + 30 * len(sources),
            )  # fmt: skip
        except RankFailure as error:
            for giver, _ in sources:
                tell(self._failed(f"{giver.label} -> {taker.label}", taker.layout, last_line(error)))
            return
        for number, (giver, each) in enumerate(sources):
            tell(self._verdict(f"{giver.label} -> {taker.label}", taker.layout, each, [rank[number] for rank in ranks]))

    def _verdict(self, label: str, layout: Layout, saved: _Saved, taken: Sequence[Taken]) -> Resharded:
        wrong = sorted({key for rank in taken for key in rank.wrong_bits})
        elements = sum(math.prod(shape) for _, shape in saved.source.index.values())
        if sum(rank.counted for rank in taken) != elements:
            wrong.append(f"{sum(rank.counted for rank in taken)} elements instead of {elements}")
        gaps: dict[str, float] = {}
        for rank in taken:
            for key, gap in rank.gaps.items():
                gaps[key] = max(gaps.get(key, 0.0), gap)
        moved = _RATE * (_STEPS + 1)
        relative = {key: gap / max(saved.peaks[key], moved) for key, gap in gaps.items()}
        worst = max(relative, key=lambda key: relative[key])
        loss = max(_relative(rank.loss, saved.losses[-1]) for rank in taken)
        in_order = saved.in_order and self._in_order([[rank.rows] if rank.rows else [] for rank in taken], _STEPS)
        return self._result(label, layout, wrong, relative[worst], loss, in_order, worst)

    def _result(
        self, label: str, layout: Layout, wrong: list[str], parameter: float, loss: float, in_order: bool, worst: str
    ) -> Resharded:
        bound = PARAMETER_BOUNDS[self.dtype, "adamw"]
        passed = not wrong and in_order and parameter <= bound and loss <= bound
        return Resharded(
            label, str(layout), layout.ranks, self.dtype, "adamw", wrong, parameter, loss, in_order, worst, passed
        )

    def _failed(self, label: str, layout: Layout, why: str) -> Resharded:
        return self._result(label, layout, [], math.inf, math.inf, False, why)

    def chain(self, texts: Sequence[str]) -> Resharded:
        """Two steps under each layout in turn, each from the checkpoint of the one before, against one layout alone."""
        cases = [Case(text, parse_layout(text)) for text in texts]
        label, last = " -> ".join(f"{case.layout.ranks}" for case in cases) + " ranks", cases[-1].layout
        try:
            alone = self._leg(cases[0], 0, _STEPS * len(cases), "", str(self.folder / "alone"))
            legs: list[list[LegTrace]] = []
            for number, case in enumerate(cases):
                start = _STEPS * number
                come_from, save_to = (str(self.folder / f"chain-{n}") for n in (number - 1, number))
                legs.append(self._leg(case, start, start + _STEPS, come_from, save_to))
            expected, found = (assemble([rank.ended for rank in traces]) for traces in (alone, legs[-1]))
        except (RankFailure, ValueError) as error:
            return self._failed(label, last, last_line(error))
        moved = _RATE * _STEPS * len(cases)
        relative = {
            key: float(numpy.abs(found[key] - value).max()) / max(float(numpy.abs(value).max()), moved)
            for key, value in expected.items()
        }
        worst = max(relative, key=lambda key: relative[key])
        losses = [loss for traces in legs for loss in traces[0].losses]
        loss = max(_relative(a, b) for a, b in zip(losses, alone[0].losses, strict=True))
        in_order = all(
            self._in_order([rank.rows for rank in traces], _STEPS * number) for number, traces in enumerate(legs)
        )
        return self._result(label, last, [], relative[worst], loss, in_order, worst)

    def _leg(self, case: Case, start: int, stop: int, come_from: str, save_to: str) -> list[LegTrace]:
        leg = Leg(self._job(case), self.samples, start, stop, come_from, save_to)
        traces: list[LegTrace] = self.prover.pool(case.layout.ranks).run(run_leg, leg, timeout=300)
        return traces


def _flat(tensors: Arrays, index: dict[str, tuple[int, tuple[int, ...]]], elements: int) -> Any:
    flat = numpy.zeros(elements, next(iter(tensors.values())).dtype)
    for key, value in tensors.items():
        start, _ = index[key]
        flat[start : start + value.size] = value.reshape(-1)
    return flat


def _relative(a: float, b: float) -> float:
    gap = abs(a - b) / max(abs(b), 1e-30)
    return math.inf if math.isnan(gap) else gap
