"""The predicted ledger: what every rank of a layout stores, computes and sends, by closed forms, in milliseconds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from meshwright.job.job import Job
from meshwright.ledger.ledger import Computes, Ledger, RankLedger, Send, Stores
from meshwright.plan.flops import flops
from meshwright.plan.passes import passes_of
from meshwright.plan.place import Place, every_place, places
from meshwright.plan.state import division, full_shards, state_bytes
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
        self._full_shards: dict[int, int] = {}
        """By pipeline rank."""
        self._known: dict[Hashable, int] = {}
        self._computes: dict[int, Computes] = {}
        """By pipeline rank."""
        self._stores: dict[Hashable, Stores] = {}
        self._sends: dict[Hashable, tuple[Send, ...]] = {}
        self._by_tp_rank: dict[Hashable, bool] = {}

    def entry(self, place: Place) -> RankLedger:
        """One rank's entry."""
        where = place.coordinates
        alike = (self._kind(place), self._shard(place))
        if alike not in self._stores:
            self._stores[alike] = self._stored(place)
        cut = (alike, self._cut(place))
        if cut not in self._by_tp_rank:
            self._by_tp_rank[cut] = depends_on_tp_rank(self._job, place)
        key = (cut, where.tp if self._by_tp_rank[cut] else 0)
        if key not in self._sends:
            self._sends[key] = sends(traffic(self._job, place, self._backend))
        if where.pp not in self._computes:
            self._computes[where.pp] = flops(self._job, place)
        return RankLedger.model_construct(
            rank=place.rank,
            place=where._asdict(),
            stores=self._stores[alike],
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

    def _shard(self, place: Place) -> int:
        """The rank's shard of the state; -1 for all that hold no padding: they are of one size."""
        divided = division(self._job, place)
        pp = place.coordinates.pp
        if pp not in self._full_shards:
            self._full_shards[pp] = full_shards(self._job, place)
        return -1 if divided.shard < self._full_shards[pp] else divided.shard

    def _cut(self, place: Place) -> tuple[int, ...]:
        """Which of the flat buckets' chunks and pieces are the rank's, where it matters what tensors they fall on."""
        divided = division(self._job, place)
        if divided.grouped:
            return ()
        if place.spec.tied and self._job.layout.stage_count > 1:
            return (divided.shard, divided.copy)
        return (divided.shard,) if place.tp > 1 else ()

    def _stored(self, place: Place) -> Stores:
        parameters, gradients, optimizer = state_bytes(self._job, place)
        return Stores(parameters=parameters, gradients=gradients, optimizer=optimizer)
