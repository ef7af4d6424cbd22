"""Weights out of checkpoints of torch.distributed.checkpoint: all of them, and nothing that such a file could run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.dcp import DcpFolder
from meshwright.cli.main import main
from meshwright.errors import CheckpointError, DamagedCheckpoint, InputError
from meshwright.job.model_spec import ModelSpec
from meshwright.model.hf_names import hugging_face_tensors
from meshwright.model.hugging_face import HuggingFaceFolder
from meshwright.model.segments import Segment
from meshwright.prove.pool import RankPool
from meshwright.train.importing import import_dcp
from tests.small_jobs import small_job

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns of itself


def spec(**changes: Any) -> ModelSpec:
    return small_job("dp=1", model=changes).model_spec


def logical(model: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in model.parameters()}


def theirs(model: ModelSpec) -> dict[str, torch.Tensor]:
    values = logical(model)
    return {tensor.name: tensor.assemble(values.__getitem__) for tensor in hugging_face_tensors(model)}


def put(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder)
    return folder


def holds(folder: Path, model: ModelSpec) -> bool:
    """Whether a Hugging Face folder has exactly the model's values."""
    source = HuggingFaceFolder(folder, model)
    for name, value in logical(model).items():
        shape = tuple(value.shape)
        box = Segment(name, shape, tuple(0 for _ in shape), shape, 0)
        if not torch.equal(source.box(box), value):
            return False
    return True


@pytest.mark.parametrize("preset", [{}, {"tied": True}], ids=["llama", "tied"])
def test_hugging_face_names_under_a_prefix(tmp_path: Path, preset: dict[str, Any]) -> None:
    """Beside optimizer state and objects that are no tensors, as training programs save it."""
    model = spec(**preset)
    weights = theirs(model)
    state = {
        "app": {"model": weights, "optim": {"state": {name: {"exp_avg": value} for name, value in weights.items()}}},
        "step": 7, "schedule": {"last": [1, 2]},
    }  # fmt: skip
    source = put(tmp_path / "dcp", state)
    found = DcpFolder(source)
    assert "step" in found.objects and len(found.tensors) == 2 * len(weights)
    import_dcp(source, model, tmp_path / "out")
    assert holds(tmp_path / "out", model)


def test_our_own_names_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = small_job("dp=1")
    source = put(tmp_path / "dcp", {"model": logical(job.model_spec)})
    (tmp_path / "job.toml").write_text(job.to_toml())
    words = ["checkpoint", "import", source, "--job", tmp_path / "job.toml", "--out", tmp_path / "out", "--json"]
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code == 0
    assert [Path(name).name for name in json.loads(capsys.readouterr().out)["files"]] == [
        "model.safetensors", "config.json",
    ]  # fmt: skip
    assert holds(tmp_path / "out", job.model_spec)


def _shard(folder: str, seed_names: list[tuple[str, tuple[int, ...]]]) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    state = {
        name: distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(len(shape) - 1)])
        for name, shape in seed_names
    }
    dcp.save({"model": state}, checkpoint_id=folder)


def test_sharded_tensors_come_together(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    model = spec()
    ranks(2).run(_shard, str(tmp_path / "dcp"), list(model.parameters()))
    assert {len(tensor.chunks) for tensor in DcpFolder(tmp_path / "dcp").tensors.values()} == {2}
    import_dcp(tmp_path / "dcp", model, tmp_path / "out")
    assert holds(tmp_path / "out", model)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def test_an_index_that_would_run_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = put(tmp_path / "dcp", {"model": {"a": torch.ones(2)}})
    index = pickle.loads((source / ".metadata").read_bytes())
    index.planner_data = _Evil()
    (source / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.metadata is refused: it names posix\.mkdir, which no index"):
        DcpFolder(source)
    for name in ("builtins\neval", "torch\nload", "torch.serialization\nload", "os\nsystem"):
        (source / ".metadata").write_bytes(f"c{name}\n(S'1'\ntR.".encode())
        with pytest.raises(CheckpointError, match="is refused: it names"):
            DcpFolder(source)
    assert not (tmp_path / "was-run").exists()


def test_data_that_would_run_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.chdir(tmp_path)
    source = put(tmp_path / "dcp", {"model": {"a": torch.ones(2)}})
    index = pickle.loads((source / ".metadata").read_bytes())
    buffer = io.BytesIO()
    torch.save(_Evil(), buffer)
    (source / "__0_0.distcp").write_bytes(buffer.getvalue())
    for place in index.storage_data.values():
        place.offset, place.length = 0, len(buffer.getvalue())
    (source / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp is damaged at byte 0"):
        DcpFolder(source).read("model.a")
    assert not (tmp_path / "was-run").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    source = put(tmp_path / "dcp", {"model": {"a": torch.ones(300), "b": torch.zeros(4)}})
    data, index = (source / "__0_0.distcp").read_bytes(), (source / ".metadata").read_bytes()
    (source / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(
        DamagedCheckpoint, match=r"__0_0\.distcp is damaged at byte \d+ \(it ends before"
    ):
        DcpFolder(source).read("model.b")
    (source / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"cannot be read: No such file"):
        DcpFolder(source).read("model.a")
    for size in (0, 10, len(index) // 2, len(index) - 1):
        (source / ".metadata").write_bytes(index[:size])
        with pytest.raises(CheckpointError, match=r"\.metadata is (damaged|refused)"):
            DcpFolder(source)
    (source / ".metadata").write_bytes(index.replace(b"__0_0.distcp", b"../0_0.distcp"[:12]))
    with pytest.raises(CheckpointError, match=r"leaves the folder"):
        DcpFolder(source)
    with pytest.raises(CheckpointError, match=r"has no \.metadata, so it is no checkpoint of torch"):
        DcpFolder(tmp_path)


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    model = spec()
    weights = theirs(model)
    weights["model.norm.weight"] = torch.ones(5)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.ones(2)
    source = put(tmp_path / "dcp", {"model": weights})
    with pytest.raises(InputError) as error:
        import_dcp(source, model, tmp_path / "out")
    assert str(error.value).splitlines() == [
        f"import: {source} lacks: model.layers.1.mlp.up_proj.weight",
        f"import: {source} has tensors that the model does not have: model.layers.9.mlp.up_proj.weight",
        f"import: {source} has another shape for: model.norm.weight ([5] instead of [32])",
    ]
    two = put(tmp_path / "two", {"model": theirs(model), "ema": theirs(model)})
    with pytest.raises(InputError, match=r"several prefixes; give --prefix, one of 'ema\.', 'model\.'"):
        import_dcp(two, model, tmp_path / "out")
    import_dcp(two, model, tmp_path / "out", "ema.")
    assert holds(tmp_path / "out", model)
    other = put(tmp_path / "other", {"net": {"w": torch.ones(2)}})
    with pytest.raises(InputError, match=r"has neither model\.embed_tokens\.weight nor embedding\.weight"):
        import_dcp(other, model, tmp_path / "out2")
    tied = spec(tied=True)
    both = {**theirs(tied), "lm_head.weight": torch.zeros(97, 32)}
    with pytest.raises(InputError, match=r"lm_head\.weight differs from the embedding although the model ties them"):
        import_dcp(put(tmp_path / "tied", {"model": both}), tied, tmp_path / "out3")
