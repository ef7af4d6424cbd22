"""A parameter server in one process against one device, and bit for bit against all-reduce on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.load import read_tensor
from meshwright.checkpoint.verify import verify
from meshwright.data.corpora import open_corpora
from meshwright.job.job import Job, load_job
from meshwright.observe.progress import StepProgress
from meshwright.prove.check import Prover
from meshwright.prove.layout_run import Request
from meshwright.prove.pool import RankPool
from meshwright.prove.server_run import rehearse
from meshwright.prove.sync_cases_server import SERVER_CASES, server_proofs
from meshwright.sync.server.cursor import Position
from meshwright.sync.server.rehearsal import Rehearsal
from meshwright.train.optimizer import AdamW
from meshwright.train.servers.compute import join_alone
from meshwright.train.servers.records import RunRecords
from meshwright.train.servers.shapes import Shapes, fingerprint
from meshwright.train.servers.store import ShardStore, fresh_store, resumed_store
from tests.command_line import write_job
from tests.small_jobs import request, small_job

ROOT = Path(__file__).parents[2]
SAMPLE = {"server synchronous"}
CASES = [
    pytest.param(case, id=case[0], marks=[] if case[0] in SAMPLE else [pytest.mark.all]) for case in SERVER_CASES
]


@pytest.mark.parametrize("case", CASES)
def test_servers_change_nothing(ranks: Callable[[int], RankPool], case: tuple) -> None:  # type: ignore[type-arg]
    label, workers, sync, train = case
    with Prover(ranks) as prover:
        proofs = list(
            server_proofs(
                prover, load_job(ROOT / "examples/quickstart.toml"), "float64", 2,
                label=label, workers=workers, sync=sync, train=train,
            )
        )  # fmt: skip
    assert len(proofs) == 4
    for proof in proofs:
        assert proof.passed, proof
        if "rank order" in proof.label:
            assert proof.max_relative_parameter_difference == proof.max_relative_loss_difference == 0.0


def server_request(layout: str, sync: dict[str, object], steps: int = 3) -> Request:
    return request(small_job(layout, sync={"strategy": "server", "servers": 2, **sync}), steps)


def replayed(run: Rehearsal, asked: Request) -> list[ShardStore]:
    """What one process comes to from the order of updates alone: each gradient taken anew at what was read."""
    shapes = Shapes(asked.job)
    stores = [fresh_store(shapes, shard) for shard in range(asked.job.sync.servers)]
    history: list[list[list[Tensor]]] = [[store.values() for store in stores]]
    model = run.compute()
    for update in run.notes.updates:
        gradients = []
        for work, fact in zip(update.works, update.facts, strict=True):
            model.load([history[version][shard] for shard, version in enumerate(fact["versions"])])
            gradients.append([[part.clone() for part in parts] for parts in model.gradient(work).parts])
        for shard, store in enumerate(stores):
            store.add_up([gradient[shard] for gradient in gradients])
            if update.factor is not None:
                store.update(update.rate, update.factor)
        history.append([store.values() for store in stores])
    return stores


@pytest.mark.parametrize(
    ("layout", "sync"),
    [
        ("dp=2 micro_batch=4", {"server_mode": "asynchronous", "stale_rate": "inverse"}),
        ("dp=2 micro_batch=4", {"server_mode": "stale-synchronous", "staleness_bound": 2}),
    ],
)
def test_the_order_of_updates_replayed_in_one_process_gives_the_same_bits(layout: str, sync: dict[str, object]) -> None:
    asked = server_request(layout, sync, steps=6)
    _, run = rehearse(asked, seed=4)
    assert max(max(update.staleness) for update in run.notes.updates) > 0
    join_alone()
    try:
        stores = replayed(run, asked)
    finally:
        dist.destroy_process_group()
    for replica in run.replicas.values():
        for mine, other in zip(replica.store.state(), stores[replica.shard].state(), strict=True):
            assert torch.equal(mine, other)


def test_a_dead_worker_changes_no_bit_of_synchronous_training() -> None:
    whole, _ = rehearse(server_request("dp=2 micro_batch=4", {}), seed=1)
    hurt, run = rehearse(
        server_request("dp=2 micro_batch=4", {}), seed=2,
        before=lambda run, number: run.kill("worker-1") if number == 60 else None,
    )  # fmt: skip
    assert any(kind == "worker-lost" for kind, _ in run.notes.events)
    assert hurt.losses == whole.losses
    assert all((hurt.parameters[name] == whole.parameters[name]).all() for name in whole.parameters)


def file_job(folder: Path, **changes: object) -> Job:
    pairs = {"sync.strategy": '"server"', "sync.servers": "2", **changes}
    return load_job(write_job(folder), [f"{key}={value}" for key, value in pairs.items()]).resolve()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_servers_state_comes_back_from_a_checkpoint(tmp_path: Path, optimizer: str) -> None:
    momentum = {"optimizer.momentum": "0.9"} if optimizer == "sgd" else {}
    job = file_job(tmp_path, **{"optimizer.name": f'"{optimizer}"', "checkpoint.every": "1", **momentum})
    shapes = Shapes(job)
    stores = [fresh_store(shapes, shard) for shard in range(2)]
    for store in stores:
        for _ in range(2):
            store.add_up([[torch.randn_like(piece.master) for piece in store.owned]])
            store.update(0.1, 0.5)
    out = tmp_path / "run"
    out.mkdir()
    corpora = open_corpora(job.data, job.model.vocabulary)
    records = RunRecords(job, out, corpora, begin=0, progress=StepProgress(6, 0, shown=False), resumed=False)
    records.save(2, [store.state() for store in stores], 2, Position(24, (4, 16), 4))
    assert records.error is None
    records.close()
    checkpoint = out / "checkpoints" / "step-2"
    manifest = verify(checkpoint)
    assert Position.of(manifest.state) == Position(24, (4, 16), 4) and manifest.state["optimizer_steps"] == 2
    # The same names and shapes as any layout's; other shards read it too.
    name = "layers.0.mlp.down.weight"
    assert read_tensor(manifest, name).shape == (32, 64)
    hashed = {"optimizer.name": f'"{optimizer}"', "sync.server_placement": '"hash"', **momentum}
    other = Shapes(file_job(tmp_path, **hashed))
    for shapes_now in (shapes, other):
        for shard in range(2):
            back = resumed_store(shapes_now, shard, checkpoint)
            assert back.updates == 2
            for piece in back.owned:
                whole = {
                    mine.name: mine for store in stores for mine in store.owned
                    if mine.name == piece.name and mine.start <= piece.start < mine.start + mine.count
                }  # fmt: skip
                source = whole[piece.name]
                low = piece.start - source.start
                assert torch.equal(piece.master, source.master[low : low + piece.count])
    # And goes on as if it had never stopped.
    for shard, store in enumerate(stores):
        back = resumed_store(shapes, shard, checkpoint)
        gradients = [[torch.randn_like(piece.master) for piece in store.owned]]
        for each in (store, back):
            each.add_up(gradients)
            each.update(0.1, 0.5)
        for mine, other in zip(store.state(), back.state(), strict=True):
            assert torch.equal(mine, other)


def test_updates_that_left_the_second_moments_alone_stay_counted(tmp_path: Path) -> None:
    """A run that goes on from 1-bit Adam's: also from its own checkpoints, and on a server that takes over."""
    job = file_job(tmp_path, **{"optimizer.name": '"adamw"', "checkpoint.every": "1"})
    shapes, out = Shapes(job), tmp_path / "run"
    out.mkdir()
    records = RunRecords(
        job, out, open_corpora(job.data, job.model.vocabulary), begin=5,
        progress=StepProgress(6, 0, shown=False), resumed=False, frozen_updates=3,
    )  # fmt: skip
    records.save(6, [fresh_store(shapes, shard).state() for shard in range(2)], 6, Position(0))
    records.close()
    store = resumed_store(shapes, 0, out / "checkpoints" / "step-6")
    assert isinstance(store.optimizer, AdamW)
    assert (store.updates, store.optimizer.variance_steps) == (6, 3)
    store.restore([tensor.clone() for tensor in store.state()], 8)
    store.update(0.1, 1.0)
    assert (store.updates, store.optimizer.variance_steps) == (9, 6)


def test_a_job_has_one_fingerprint_and_another_job_another(tmp_path: Path) -> None:
    job = file_job(tmp_path)
    assert fingerprint(job) == fingerprint(load_job(_written(job, tmp_path)))
    other = job.model_copy(update={"train": job.train.model_copy(update={"seed": 4})})
    assert fingerprint(other) != fingerprint(job)


def _written(job: Job, folder: Path) -> Path:
    path = folder / "resolved.toml"
    path.write_text(job.to_toml())
    return path


def test_bfloat16_is_pulled_in_sixteen_bits_and_summed_in_thirty_two(tmp_path: Path) -> None:
    job = file_job(tmp_path, **{"precision.dtype": '"bfloat16"'})
    shapes = Shapes(job)
    store = fresh_store(shapes, 0)
    assert {tensor.dtype for tensor in store.values()} == {torch.bfloat16}
    assert {piece.master.dtype for piece in store.owned} == {torch.float32}
    assert {piece.gradient.dtype for piece in store.owned} == {torch.float32}
