"""Save and resume: the run that stopped equals the one that did not, on the same layout and on another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.checkpoint.folder import latest
from meshwright.checkpoint.load import read_tensor, tensor_names
from meshwright.checkpoint.verify import verify
from meshwright.comm.mesh import Mesh
from meshwright.errors import CheckpointError
from meshwright.job.job import Job
from meshwright.prove.oracle import whole_model
from meshwright.prove.pool import RankFailure, RankPool
from meshwright.train.saving import Saver, load_whole_model
from meshwright.train.trainer import Trainer
from tests.small_jobs import contents, small_job, stopped_and_resumed, train_and_save

Ranks = Callable[[int], RankPool]
ADAMW = {"optimizer": {"name": "adamw", "lr": 0.01, "schedule": "cosine", "warmup_steps": 3, "clip_norm": 0.5}}


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "dp=2 zero=1",
        "dp=4 shard=2 zero=2",
        "dp=4 zero=3",
        "tp=2",
        "pp=2 schedule=zbv micro_batch=1",
        "dp=2 tp=2",
        "dp=2 pp=2 zero=1 micro_batch=1",
    ],
)
def test_a_resumed_run_is_bit_equal(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Stopped at the edge of warm-up, with clipping, moments and momentum on the way."""
    job = small_job(layout, precision={"dtype": "float32"}, **ADAMW)
    stopped_and_resumed(ranks, job, tmp_path)


@pytest.mark.parametrize(
    "later", ["dp=2 zero=1", "dp=3", "dp=8 zero=3", "tp=2 pp=2 micro_batch=1", "dp=1 micro_batch=2"]
)
def test_a_run_goes_on_under_another_layout(ranks: Ranks, tmp_path: Path, later: str) -> None:
    """Moments, step counter and learning rate go along: the next losses are those of the undisturbed run."""
    job = small_job("dp=4 zero=2", **ADAMW)
    whole = ranks(4).run(train_and_save, job, str(tmp_path / "a"), 0, 5, [5])[0]
    ranks(4).run(train_and_save, job, str(tmp_path / "b"), 0, 3, [3])
    other = small_job(later, **ADAMW)
    rest = ranks(other.layout.ranks).run(train_and_save, other, str(tmp_path / "b"), 3, 5, [5])[0]
    for a, b in zip(rest, whole[3:], strict=True):
        assert a.learning_rate == b.learning_rate
        assert a.loss == pytest.approx(b.loss, rel=1e-11)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-10)
    expected, found = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(np.frombuffer(found[key]), np.frombuffer(value), rtol=1e-9, atol=1e-14, err_msg=key)


def test_a_checkpoint_of_another_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(train_and_save, small_job("dp=2"), str(tmp_path), 0, 1, [1])
    with pytest.raises(RankFailure, match=r"CheckpointError.*another shape"):
        ranks(2).run(train_and_save, small_job("dp=2", model={"ffn_hidden": 64}), str(tmp_path), 1, 2, [])
    assert latest(tmp_path / "checkpoints") is not None


def test_resume_without_a_checkpoint_says_so(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="no complete checkpoint"):
        ranks(1).run(train_and_save, small_job("dp=1"), str(tmp_path), 1, 2, [])


def test_another_seed_would_repeat_samples_so_it_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(train_and_save, small_job("dp=2"), str(tmp_path), 0, 1, [1])
    with pytest.raises(RankFailure, match=r"CheckpointError.*train.seed is 6 in this job but 5 in the checkpoint"):
        ranks(2).run(train_and_save, small_job("dp=2", train={"seed": 6}), str(tmp_path), 1, 2, [])


def test_the_vocabulary_is_saved_without_its_padding(ranks: Ranks, tmp_path: Path) -> None:
    """97 rows on 4 ranks are 25 a rank: the saved matrix has 97, and another degree takes it up."""
    job: Job = small_job("tp=4", model={"kv_heads": 4}, **ADAMW)
    ranks(4).run(train_and_save, job, str(tmp_path), 0, 2, [2])
    path = latest(tmp_path / "checkpoints")
    assert path is not None
    assert read_tensor(path, "embedding.weight").shape == (97, 32)
    model = load_whole_model(job, path)
    assert torch.isfinite(model.embedding.weight).all()
    other = small_job("tp=2", model={"kv_heads": 4}, **ADAMW)
    ranks(2).run(train_and_save, other, str(tmp_path), 2, 3, [3])
    flipped = path / "rank-00000.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-5] ^= 1
    flipped.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
        verify(path)


def test_a_damaged_checkpoint_is_refused_or_passed_over_by_policy(ranks: Ranks, tmp_path: Path) -> None:
    """Passed over, it is put aside: it is neither taken nor in the way when the run gets to its step again."""
    job = small_job("dp=2 zero=1", **ADAMW)
    whole = ranks(2).run(train_and_save, job, str(tmp_path), 0, 6, [2, 4])[0]
    file = tmp_path / "checkpoints" / "step-4" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(RankFailure, match=r"rank-00001.*before is step-2\); --set checkpoint.damaged"):
        ranks(2).run(train_and_save, job, str(tmp_path), 4, 6, [])
    lenient = small_job("dp=2 zero=1", checkpoint={"damaged": "previous"}, **ADAMW)
    again = ranks(2).run(train_and_save, lenient, str(tmp_path), 2, 6, [4])[0]
    assert again == whole[2:]
    assert latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-4"
    assert verify(tmp_path / "checkpoints" / "step-4").step == 4
    assert [path.name.rpartition("-")[0] for path in (tmp_path / "checkpoints").glob(".*")] == [
        ".step-4.superseded",
    ]  # fmt: skip


def test_weights_alone_start_another_run(ranks: Ranks, tmp_path: Path) -> None:
    """Another layout, type and update rule: masters are the saved weights; the oracle agrees."""
    ranks(2).run(train_and_save, small_job("dp=2 zero=1", **ADAMW), str(tmp_path), 0, 2, [2])
    path = latest(tmp_path / "checkpoints")
    assert path is not None
    later = small_job(
        "tp=2 pp=2 micro_batch=1", model={"init_from": str(path)}, precision={"dtype": "bfloat16"}, train={"seed": 9}
    )
    held = ranks(4).run(masters, later)
    names = {name for rank in held for name in rank}
    assert names == set(tensor_names(path))
    for rank in held:
        for name, boxes in rank.items():
            whole = read_tensor(path, name).float()
            for offsets, values in boxes:
                where = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                assert np.array_equal(whole[where].numpy(), values), name
    model = whole_model(later, path)
    assert torch.equal(model.embedding.weight.data, read_tensor(path, "embedding.weight").float())
    with pytest.raises(RankFailure, match=r"another shape for: parameter/layers\.0\.mlp"):
        ranks(1).run(masters, small_job("dp=1", model={"init_from": str(path), "ffn_hidden": 64}))


def masters(job: Job) -> dict[str, list[tuple[tuple[int, ...], np.ndarray]]]:
    """On a rank: the masters it starts with, by name."""
    found: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = {}
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        for box in Saver(trainer, None, Path()).tensors(range(len(trainer.owned))):
            if box.role == "parameter":
                found.setdefault(box.name, []).append((box.offsets, box.boxed.clone().numpy()))
    return found
