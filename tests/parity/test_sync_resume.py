"""Residuals and replicas through a checkpoint: the same layout goes on bit for bit, another one keeps the sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from meshwright.checkpoint.folder import latest
from meshwright.checkpoint.load import read_tensor, tensor_names
from meshwright.checkpoint.manifest import read_manifest
from meshwright.comm.mesh import Mesh
from meshwright.job.job import Job
from meshwright.prove.pool import RankPool
from meshwright.train.saving import Saver
from meshwright.train.trainer import Trainer
from tests.small_jobs import contents, small_job, stopped_and_resumed, train_and_save

Ranks = Callable[[int], RankPool]

ADAMW = {"name": "adamw", "lr": 0.01}
NODES = {"compression_level": "slow", "node_size": 2}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dp=2 zero=2", {"compression": "sign"}, ADAMW),
    ("dp=2", {"compression": "dgc", "compression_sparsity": 0.9, "compression_warmup_steps": 4}, {"clip_norm": 0.5}),
    ("dp=2", {"compression": "one-bit-adam", "compression_warmup_steps": 2}, ADAMW),
    ("dp=4", {"compression": "int8", **NODES}, ADAMW),
    ("dp=2", {"strategy": "easgd", "period": 2}, {}),
    ("dp=2", {"strategy": "diloco", "period": 4, "fragments": 2, "compression": "int8"}, ADAMW),
    ("dp=2", {"compression": "powersgd", "compression_rank": 2}, {}),
    ("dp=2", {"strategy": "local", "period": 2}, ADAMW),
    ("dp=2 zero=1", {"compression": "qsgd"}, {}),
    ("dp=4 shard=2 zero=3", {"strategy": "diloco", "period": 2}, ADAMW),
    ("dp=4 shard=2 zero=1", {"strategy": "diloco", "period": 2, "compression": "dgc"}, ADAMW),
    ("dp=4 shard=2 zero=1", {"compression": "int8", "compression_level": "slow"}, ADAMW),
    ("dp=2 tp=2", {"compression": "sign"}, ADAMW),
    ("dp=4", {"compression": "one-bit-adam", "compression_warmup_steps": 2, **NODES}, ADAMW),
    ("dp=4", {"compression": "dgc", "compression_sparsity": 0.9, **NODES}, {"clip_norm": 0.5}),
]
UNMARKED = 6


def job_of(layout: str, sync: dict[str, Any], optimizer: dict[str, Any]) -> Job:
    """Large enough to be worth compressing."""
    return small_job(
        layout, model={"ffn_hidden": 320}, sync=sync, optimizer=optimizer, precision={"dtype": "float32"},
        memory={"bucket_bytes": 1 << 17},
    )  # fmt: skip


def job_by_nodes(text: str) -> Job:
    """One that sends signs; "dp=4 by nodes of 2": between nodes alone."""
    layout, _, size = text.partition(" by nodes of ")
    nodes = {**NODES, "node_size": int(size)} if size else {}
    return job_of(layout, {"compression": "sign", **nodes}, ADAMW)


@pytest.mark.parametrize(
    ("layout", "sync", "optimizer"),
    [
        pytest.param(*case, id=f"{case[0]} {case[1]}", marks=[] if number < UNMARKED else [pytest.mark.all])
        for number, case in enumerate(CASES)
    ],
)
def test_a_resumed_run_is_bit_equal(
    ranks: Ranks, tmp_path: Path, layout: str, sync: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    job = job_of(layout, sync, optimizer)
    found = stopped_and_resumed(ranks, job, tmp_path)
    remembers = sync.get("compression") != "qsgd"  # its error has mean zero, nothing is fed back
    assert any(name.startswith("sync/") for name in found) is remembers


def test_a_sum_that_was_on_its_way_leaves_its_residuals(ranks: Ranks, tmp_path: Path) -> None:
    """Of both stages: a checkpoint takes the sum in before its time, and the run that goes on is the resumed one."""
    job = job_of("dp=2", {"strategy": "diloco", "period": 4, "overlap": 2, "compression": "int8"}, ADAMW)
    whole = ranks(2).run(train_and_save, job, str(tmp_path / "a"), 0, 9, [3, 9])[0]
    ranks(2).run(train_and_save, job, str(tmp_path / "b"), 0, 3, [3])
    second = ranks(2).run(train_and_save, job, str(tmp_path / "b"), 3, 9, [9])[0]
    assert second == whole[3:]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def waiting(job: Job, folder: str) -> dict[str, Any]:
    """On a rank that takes over a checkpoint: what it has not sent, by full name."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        saver = Saver(trainer, None, Path(folder))
        saver.resume()
        shapes = dict(job.model_spec.parameters())
        found: dict[str, Any] = {}
        for box in saver.sync.tensors():
            if box.name.startswith(("residual/", "outer/")):
                add(found, box.name, box.tensor.numpy(), shapes)
    return found


def add(found: dict[str, Any], key: str, values: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    name, _, text = key.split("/", 3)[3].rpartition("@")
    offsets = [int(part) for part in text.split(",") if part]
    whole = found.setdefault(name, numpy.zeros(shapes[name]))
    whole[tuple(slice(a, a + n) for a, n in zip(offsets, values.shape, strict=True))] += values


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2", "dp=4 zero=1"),
        pytest.param("dp=4 shard=2 zero=2", "dp=2 zero=3", marks=pytest.mark.all),
        pytest.param("dp=2 tp=2", "dp=4", marks=pytest.mark.all),
        pytest.param("dp=2 zero=1", "dp=2 tp=2", marks=pytest.mark.all),
        ("dp=4 by nodes of 2", "dp=2"),
        ("dp=2 zero=1", "dp=4 by nodes of 2"),
        pytest.param("dp=4 by nodes of 2", "dp=8 by nodes of 2", marks=pytest.mark.all),
        pytest.param("dp=4 by nodes of 2", "dp=8 by nodes of 4", marks=pytest.mark.all),
        pytest.param("dp=4 by nodes of 2", "dp=4 tp=2 by nodes of 4", marks=pytest.mark.all),
    ],
)
def test_another_dp_keeps_the_sum(ranks: Ranks, tmp_path: Path, before: str, after: str) -> None:
    keeps_the_sum(ranks, tmp_path, job_by_nodes(before), job_by_nodes(after))


OUTER = {"strategy": "diloco", "period": 3}


@pytest.mark.parametrize(
    ("before", "after", "compression"),
    [
        ("dp=2", "dp=4 shard=2 zero=1", "int8"),
        pytest.param("dp=4 shard=2 zero=3", "dp=2", "sign", marks=pytest.mark.all),
        pytest.param("dp=2 tp=2", "dp=4", "bf16", marks=pytest.mark.all),
        pytest.param("dp=4 shard=2", "dp=2 tp=2", "fp16", marks=pytest.mark.all),
    ],
)
def test_another_layout_keeps_the_sum_of_outer_residuals(
    ranks: Ranks, tmp_path: Path, before: str, after: str, compression: str
) -> None:
    old = job_of(before, {**OUTER, "compression": compression, "fragments": 3}, ADAMW)
    keeps_the_sum(ranks, tmp_path, old, job_of(after, {**OUTER, "compression": compression}, ADAMW))


def keeps_the_sum(ranks: Ranks, tmp_path: Path, old: Job, new: Job) -> None:
    ranks(old.layout.ranks).run(train_and_save, old, str(tmp_path), 0, 3, [3])
    path = latest(tmp_path / "checkpoints")
    assert path is not None
    expected: dict[str, Any] = {}
    shapes = dict(old.model_spec.parameters())
    for name in tensor_names(path, "sync"):
        if name.startswith(("residual/", "outer/")):
            add(expected, name, read_tensor(path, name, "sync").numpy(), shapes)
    assert expected.keys() == shapes.keys()
    found: dict[str, Any] = {}
    for rank in ranks(new.layout.ranks).run(waiting, new, str(tmp_path)):
        for name, values in rank.items():
            found[name] = found.get(name, 0.0) + values
    for name, values in expected.items():
        assert numpy.abs(values).max() > 0
        assert numpy.abs(found[name] - values).max() <= 1e-6 * numpy.abs(values).max(), name


def momenta(job: Job, folder: str) -> list[tuple[int, bool]]:
    """On a rank that takes over a checkpoint: where each momentum starts, and whether it is the optimizer's there."""
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        Saver(trainer, None, Path(folder)).resume()
        assert trainer.compressing is not None
        reducer, found = trainer.compressing.reducer, []
        for memory in reducer.memories:
            if memory.what == "momentum":
                starts = {span.name: span.start for span in reducer.spans[memory.buffer]}
                expected = torch.zeros(memory.start + memory.kept.numel() + (1 << 20))
                for piece, moment in zip(trainer.owned, trainer.optimizer.state()["exp_avg"], strict=True):
                    if piece.parameter in starts:
                        at = starts[piece.parameter] + piece.start
                        expected[at : at + piece.count] = moment
                here = expected[memory.start : memory.start + memory.kept.numel()]
                found.append((memory.start, bool(here.any()) and torch.equal(memory.kept, here)))
        return found


def test_momentum_is_taken_from_the_optimizer_by_pieces(ranks: Ranks, tmp_path: Path) -> None:
    sync = {"compression": "one-bit-adam", "compression_warmup_steps": 2}
    ranks(2).run(train_and_save, job_of("dp=2", sync, ADAMW), str(tmp_path), 0, 3, [3])
    results = ranks(4).run(momenta, job_of("dp=4", {**sync, **NODES}, ADAMW), str(tmp_path))
    assert all(right for found in results for _, right in found)
    assert [start > 0 for start, _ in (found[0] for found in results)] == [False, True, False, True]


@pytest.mark.parametrize(("before", "after"), [({"compression": "dgc"}, {}), ({}, {"compression": "dgc"})])
def test_a_momentum_that_compression_keeps_begins_anew_elsewhere(
    ranks: Ranks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    ranks(2).run(train_and_save, job_of("dp=2", before, {}), str(tmp_path), 0, 3, [3])
    losses = ranks(2).run(go_on, job_of("dp=2", after, {}), str(tmp_path), 4)
    assert losses[0] == losses[1] and len(losses[0]) == 1


def variance_steps(job: Job, folder: str, start: int) -> int:
    """On a rank that goes on for a step: updates that moved the second moments, in the checkpoint after it."""
    train_and_save(job, folder, start, start + 1, [start + 1])
    return int(read_manifest(Path(folder) / "checkpoints" / f"step-{start + 1}").state["variance_steps"])


def test_frozen_second_moments_stay_counted_after_one_bit_adam(ranks: Ranks, tmp_path: Path) -> None:
    sync = {"compression": "one-bit-adam", "compression_warmup_steps": 1}
    gentle = {**ADAMW, "eps": 0.1}  # after one step the second moments of most of the embedding are zero
    ranks(2).run(train_and_save, job_of("dp=2", sync, gentle), str(tmp_path), 0, 3, [3])
    plain = job_of("dp=2", {}, gentle)
    assert [ranks(2).run(variance_steps, plain, str(tmp_path), start)[0] for start in (3, 4)] == [2, 3]


def go_on(job: Job, folder: str, stop: int) -> list[float]:
    return [report.loss for report in train_and_save(job, folder, 3, stop, [])]


def test_replicas_go_on_as_another_number_of_them(ranks: Ranks, tmp_path: Path) -> None:
    """Two replicas become four, or one synchronous run: all start from the shared model."""
    sync = {"strategy": "diloco", "period": 3}
    ranks(2).run(train_and_save, job_of("dp=2", sync, ADAMW), str(tmp_path), 0, 3, [3])
    for layout, following in (("dp=4", sync), ("dp=2 zero=1", {})):
        job = job_of(layout, following, ADAMW)
        losses = ranks(job.layout.ranks).run(go_on, job, str(tmp_path), 4)
        first = losses[0][0]
        assert all(each[0] == first for each in losses)
        assert first == pytest.approx(reference(ranks, tmp_path), rel=1e-6)


def reference(ranks: Ranks, folder: Path) -> float:
    """The loss of the next global batch under the saved model, by a plain run."""
    return float(ranks(2).run(go_on, job_of("dp=2", {}, ADAMW), str(folder), 4)[0][0])
