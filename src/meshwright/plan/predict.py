"""The predicted ledger: what every rank of a layout stores, computes and sends, by closed forms, in milliseconds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from meshwright.job.job import Job
from meshwright.ledger.ledger import Category, Computes, Ledger, RankLedger, Send, Stores
from meshwright.plan.buffers import Held, held
from meshwright.plan.flops import flops
from meshwright.plan.passes import passes_of
from meshwright.plan.place import Place, every_place, places
from meshwright.plan.state import division, lane_bytes, shares, state_bytes
from meshwright.plan.sync_traffic import DIRECT
from meshwright.plan.traffic import depends_on_tp_rank, sends, traffic
from meshwright.plan.wire import Backend


def predict(job: Job, ranks: Sequence[int] | None = None, *, backend: Backend | None = None) -> Ledger:
    """The ledger of a resolved job, without running anything.

    Args:
        job: resolved, and such as the program can train.
        ranks: which ranks; None: all.
        backend: whose algorithms wire bytes are of; None: NCCL's for ``cluster.device = "cuda"``, otherwise Gloo's.

    Raises:
        InputError: the job is not resolved or cannot be trained, or there is no such rank.
    """
    backend = backend or backend_of(job)
    predictor = _Predictor(job, backend)
    chosen = every_place(job) if ranks is None else places(job, ranks)
    entries = tuple(sorted((predictor.entry(place) for place in chosen), key=lambda entry: entry.rank))
    return Ledger.model_construct(
        source="predicted", layout=str(job.layout), world=job.layout.ranks, backend=backend, ranks=entries
    )


def backend_of(job: Job) -> Backend:
    """Whose collectives the job runs on."""
    return "nccl" if job.cluster.device == "cuda" else "gloo"


class _Predictor:
    """Ranks that are alike share their numbers: those of a large layout mostly differ in their coordinates alone."""

    def __init__(self, job: Job, backend: Backend) -> None:
        self._job, self._backend = job, backend
        self._kinds: dict[int, int] = {}
        """By pipeline rank."""
        self._sizes: dict[tuple[int, int], tuple[int, ...]] = {}
        """By pipeline rank and shard."""
        self._known: dict[Hashable, int] = {}
        self._computes: dict[int, Computes] = {}
        """By pipeline rank."""
        self._lanes: dict[Hashable, int] = {}
        self._beside: dict[Hashable, tuple[Held, int]] = {}
        """What is held beside the state, and how much of it are the lanes of that rank."""
        self._stores: dict[Hashable, Stores] = {}
        self._sends: dict[Hashable, tuple[Send, ...]] = {}
        self._by_tp_rank: dict[Hashable, bool] = {}

    def entry(self, place: Place) -> RankLedger:
        """One rank's entry."""
        where = place.coordinates
        alike = (self._kind(place), self._shares(place))
        stores = self._stored(place, alike)
        cut = (alike, self._cut(place))
        if cut not in self._by_tp_rank:
            self._by_tp_rank[cut] = depends_on_tp_rank(self._job, place)
        # Rank 0 alone has a piece of a single number, where the world is so large that one is cut in pieces.
        # So has every rank its own part in the messages of most algorithms.
        alone = -1 if self._job.sync.algorithm in DIRECT else place.rank
        key = (cut, where.tp if self._by_tp_rank[cut] else 0, place.rank == 0, alone)
        if key not in self._sends:
            self._sends[key] = sends(traffic(self._job, place, self._backend))
        if where.pp not in self._computes:
            self._computes[where.pp] = flops(self._job, place)
        return RankLedger.model_construct(
            rank=place.rank,
            place=where._asdict(),
            stores=stores,
            computes=self._computes[where.pp],
            sends=self._sends[key],
        )

    def _kind(self, place: Place) -> int:
        """A number that pipeline ranks share if they hold stages of the same shapes and run them alike."""
        pp = place.coordinates.pp
        if pp not in self._kinds:
            here = {stage.number for stage in place.stages}
            stages = tuple(
                (
                    stage.first, stage.last, stage.number - 1 in here, stage.number + 1 in here, stage.recompute,
                    len(stage.layers), passes_of(self._job, place, stage),
                    tuple((tensor.shape, tensor.tp_replicated, tensor.embedding) for tensor in stage.tensors),
                )
                for stage in place.stages
            )  # fmt: skip
            self._kinds[pp] = self._known.setdefault(stages, len(self._known))
        return self._kinds[pp]

    def _shares(self, place: Place) -> tuple[int, ...]:
        """The sizes of the rank's part of the state: most shards have the same, those with padding others."""
        key = (place.coordinates.pp, division(self._job, place).shard)
        if key not in self._sizes:
            self._sizes[key] = shares(self._job, place)
        return self._sizes[key]

    def _cut(self, place: Place) -> tuple[int, ...]:
        """Which of the flat buckets' chunks and pieces are the rank's, where it matters what tensors they fall on."""
        divided = division(self._job, place)
        if divided.grouped:
            return ()
        if place.spec.tied and self._job.layout.stage_count > 1:
            return (divided.shard, divided.copy)
        return (divided.shard,) if place.tp > 1 else ()

    def _stored(self, place: Place, alike: Hashable) -> Stores:
        divided = division(self._job, place)
        cut = (alike, None if divided.grouped else (divided.shard, divided.copy))
        if cut not in self._lanes:
            self._lanes[cut] = lane_bytes(self._job, place)
        # In which order a rank runs its passes, and with that what it holds meanwhile, goes by its pipeline rank.
        runs = (place.coordinates.pp, alike)
        if runs not in self._beside:
            self._beside[runs] = (held(self._job, place), self._lanes[cut])
        beside, lanes = self._beside[runs]
        key = (runs, self._lanes[cut])
        if key not in self._stores:
            self._stores[key] = _stores(state_bytes(self._job, place), beside, self._lanes[cut] - lanes)
        return self._stores[key]


def _stores(state: tuple[int, int, int], beside: Held, more: int) -> Stores:
    """All a rank holds; ``more``: temporary bytes that are there all the time and not in ``beside``."""
    parameters, gradients, optimizer = state
    activations, temporary = beside.at_peak
    at_peak: dict[Category, int] = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
        "temporary": temporary + more,
    }
    return Stores(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=beside.activations,
        temporary=beside.temporary + more,
        peak=sum(at_peak.values()),
        at_peak=at_peak,
    )
