"""The three ledgers of one layout held against each other: predicted by formulas, traced on fake tensors, measured.

The measured one comes from four steps on a pool of ranks, on random tokens: the third is counted, the fourth timed.
While the ranks work, this process traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from meshwright.comm.mesh import Mesh
from meshwright.job.cluster import ClusterSpec
from meshwright.job.grid import coordinates
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.job.steady import steady_step
from meshwright.ledger.compare import Difference, compare
from meshwright.ledger.ledger import Ledger, RankLedger, Spends
from meshwright.plan.place import refuse_shares
from meshwright.plan.predict import predict
from meshwright.plan.spends import predicted_spends
from meshwright.prove.check import proof_job
from meshwright.prove.matrix import Case, layout_cases
from meshwright.prove.pool import RankPool
from meshwright.prove.proof_data import ProofSamples, proof_batches
from meshwright.prove.trace import trace
from meshwright.train.delayed import make_trainer
from meshwright.train.measured import LedgerRecorder
from meshwright.train.worker import prepare_determinism

COUNTED_STEP = 3
"""Or the first steady one after it."""
SUM_TO_WALL = 0.02
"""How far the parts of a measured step may be from its wall time."""
NO_CLUSTER = "no --cluster file: `meshwright calibrate` writes one for this machine"


@dataclass(frozen=True)
class Agreement:
    """What the ledgers of one layout say, and whether they agree."""

    label: str
    layout: Layout
    dtype: str
    traced: tuple[int, ...]
    """Ranks that were traced; predicted and measured have all."""
    differences: tuple[Difference, ...]
    """Every quantity, equal or not."""
    measured: Ledger
    predicted_spends: Spends | None

    @property
    def sums(self) -> bool:
        """The parts of every rank's step sum to its wall time."""
        timed = [entry.spends for entry in self.measured.ranks if entry.spends is not None]
        return all(abs(spends.sum - spends.wall) <= SUM_TO_WALL * spends.wall for spends in timed)

    @property
    def passed(self) -> bool:
        """All differences are allowed."""
        return self.sums and all(difference.agrees for difference in self.differences)

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object; of the quantities those that are not equal."""
        slowest = self.slowest
        return {
            "label": self.label,
            "layout": str(self.layout),
            "ranks": self.layout.ranks,
            "traced_ranks": list(self.traced),
            "dtype": self.dtype,
            "passed": self.passed,
            "quantities": len(self.differences),
            "differences": [_difference(one) for one in self.differences if one.relative > 0.0],
            "spends": {
                "predicted": NO_CLUSTER if self.predicted_spends is None else _spends(self.predicted_spends),
                "measured": None if slowest is None or slowest.spends is None else _spends(slowest.spends),
                "sum_within_2_percent_of_wall": self.sums,
            },
        }

    @property
    def slowest(self) -> RankLedger | None:
        """The rank whose step took longest."""
        return slowest_rank(self.measured)


def slowest_rank(measured: Ledger) -> RankLedger | None:
    """The rank whose step took longest, of those that were timed."""
    timed = [entry for entry in measured.ranks if entry.spends is not None]
    return max(timed, key=lambda entry: entry.spends.wall if entry.spends else 0.0, default=None)


def _difference(one: Difference) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "quantity": one.quantity,
        "values": one.values,
        "relative": one.relative,
        "allowed": one.allowed,
        "agrees": one.agrees,
    }


def _spends(spends: Spends) -> dict[str, Any]:
    return {"wall": spends.wall, "sum": spends.sum, "parts": dict(spends.parts())}


def measure_on_rank(job: Job) -> str:
    """Runs on every rank of a pool: the measured ledger of all ranks as JSON."""
    prepare_determinism(job)
    layout = job.layout
    assert layout.micro_batch is not None
    samples = ProofSamples(
        job.model_spec.vocabulary, job.data.sequence_length, seed=job.train.seed, masked=job.data.document_mask
    )
    with Mesh(layout) as mesh:
        trainer = make_trainer(job, mesh)
        counted = steady_step(job, COUNTED_STEP)
        recorder = LedgerRecorder(trainer, None, first_step=counted)
        for step in range(counted + 1):
            with recorder.around(step):
                with recorder.span("data"):
                    batches = proof_batches(
                        samples,
                        step,
                        global_size=job.batch.global_size,
                        micro_batch=layout.micro_batch,
                        dp_rank=mesh.coordinate("dp"),
                        dp=mesh.degree("dp"),
                    )
                trainer.advance(batches, drain=False)
        trainer.drain()
        recorder.gather()
    assert recorder.ledger is not None
    return recorder.ledger.to_json() if mesh.rank == 0 else ""


def measure(pool: RankPool, job: Job, timeout: float = 300.0) -> Ledger:
    """The measured ledger of a resolved job on a pool of as many ranks.

    Raises:
        RankFailure: a rank failed or hung.
    """
    return Ledger.from_json(pool.run(measure_on_rank, job, timeout=timeout)[0])


def hold_together(
    pool: RankPool, job: Job, label: str, ranks: Sequence[int], cluster: ClusterSpec | None = None
) -> Agreement:
    """Measure, trace and predict one job and compare.

    Args:
        pool: of ``job.layout.ranks`` ranks.
        job: resolved.
        label: of the layout.
        ranks: to trace.
        cluster: the machine, for predicted times; absent: none are predicted.
    """
    refuse_shares(job)
    with ThreadPoolExecutor(1) as beside:
        # Not the other way round: the ranks of a pool end with the thread that started them.
        tracing = beside.submit(trace, job, ranks)
        measured = measure(pool, job)
        traced = tracing.result()
    predicted, slowest = predict(job, backend="gloo"), slowest_rank(measured)
    return Agreement(
        label=label,
        layout=job.layout,
        dtype=job.precision.dtype,
        traced=tuple(ranks),
        differences=tuple(compare([predicted, traced, measured])),
        measured=measured,
        predicted_spends=None if cluster is None or slowest is None else predicted_spends(job, cluster, slowest.rank),
    )


def ranks_to_trace(layout: Layout) -> tuple[int, ...]:
    """Of each pipeline rank the first and the last rank: ranks between them differ from those in nothing new."""
    by_stage: dict[int, list[int]] = {}
    for rank in range(layout.ranks):
        by_stage.setdefault(coordinates(layout, rank).pp, []).append(rank)
    return tuple(sorted({rank for ranks in by_stage.values() for rank in (ranks[0], ranks[-1])}))


def ledger_job(job: Job, case: Case, dtype: str) -> Job:
    """The job at proof size under the case's layout."""
    small = proof_job(job, case, dtype, "adamw")
    masked = small.data.model_copy(update={"document_mask": case.masked})
    return small.model_copy(update={"data": masked})


def check_ledgers(
    job: Job,
    pools: Callable[[int], RankPool],
    *,
    dtype: str,
    max_ranks: int,
    cluster: ClusterSpec | None = None,
    report: Callable[[Agreement], None] | None = None,
    cases: Iterable[Case] | None = None,
) -> list[Agreement]:
    """Every case of the standard set of layouts, at proof size."""
    results = []
    for case in layout_cases(max_ranks) if cases is None else cases:
        small = ledger_job(job, case, dtype)
        ranks = ranks_to_trace(case.layout)
        result = hold_together(pools(case.layout.ranks), small, case.label, ranks, cluster)
        results.append(result)
        if report:
            report(result)
    return results
