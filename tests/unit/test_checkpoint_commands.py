"""``meshwright checkpoint inspect, verify, diff, prune``: what they say, and with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.folder import steps
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.placed import PlacedTensor, whole
from meshwright.checkpoint.save import save
from meshwright.cli.main import main
from meshwright.recovery.lock import RunLock
from tests.command_line import JOB


def weights(shift: float = 0.0) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [whole(name, torch.randn(6, 4, generator=generator) + shift) for name in ("a", "b", "norm")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    for step in (900, 1000, 1100):
        save(folder, step, weights(step / 1000), layout="dp=1", state={"cursor": 8 * step}, model={"name": "small"})
    return tmp_path / "run"


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", *map(str, words)])
    output = capsys.readouterr()
    return int(left.value.code or 0), output.out, output.err


def ask_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code, output, _ = ask(capsys, *words, "--json")
    return code, json.loads(output)


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run / "checkpoints" / "step-900"
    (step / "pin").touch()
    (run / "checkpoints" / "step-1000" / "rank-00000.safetensors").unlink()
    code, facts = ask_json(capsys, "inspect", step)
    assert (code, facts["step"], facts["layout"], facts["pinned"]) == (0, 900, "dp=1", True)
    assert facts["roles"] == {"parameter": {"tensors": 3, "elements": 72, "bytes": 288}}
    assert facts["tensors"]["parameter/a"] == {"dtype": "F32", "shape": [6, 4], "slices": 1}
    assert facts["state"] == {"cursor": 7200}
    code, output, _ = ask(capsys, "inspect", step, "--tensors")
    assert code == 0 and "parameter/norm  F32 [6, 4]" in output and "step 900" in output
    code, facts = ask_json(capsys, "inspect", run)
    assert [(each["step"], each["complete"], each["pinned"]) for each in facts["checkpoints"]] == [
        (900, True, True), (1000, False, False), (1100, True, False),
    ]  # fmt: skip
    code, output, _ = ask(capsys, "inspect", run / "checkpoints")
    assert code == 0 and "rank-00000.safetensors is missing" in output and "pinned" in output


def test_verify_a_checkpoint_and_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = ask(capsys, "verify", run / "checkpoints" / "step-900")
    assert code == 0 and "step 900, 3 tensors, " in output and "all as written" in output
    code, facts = ask_json(capsys, "verify", run)
    assert (code, facts["passed"], len(facts["checkpoints"])) == (0, True, 3)
    broken = run / "checkpoints" / "step-1000" / "rank-00000.safetensors"
    flip(broken)
    code, facts = ask_json(capsys, "verify", run, "--threads", 2)
    assert code == 1 and [each["passed"] for each in facts["checkpoints"]] == [True, False, True]
    assert facts["checkpoints"][1]["problems"][0].startswith(f"checkpoint: {broken} is damaged (the checksum of ")
    code, output, _ = ask(capsys, "verify", broken.parent)
    assert code == 1 and str(broken) in output


def test_half_copied_and_wrong_places(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = tmp_path / "step-7"
    shutil.copytree(run / "checkpoints" / "step-900", half)
    (half / "manifest.json").unlink()
    code, _, said = ask(capsys, "inspect", half)
    assert (
        code == 1 and f"{half} has no manifest.json beside its data, so it was copied or written only in part" in said
    )
    code, facts = ask_json(capsys, "verify", half)
    assert code == 1 and "copy it again whole" in facts["checkpoints"][0]["problems"][0]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name, sentence in (
        ("notes.txt", "has no manifest.json, so it is incomplete or no checkpoint; give a step-N folder"),
        ("config.json", "is a Hugging Face folder, not a checkpoint; train from it with model.init_from"),
        (".metadata", "is a checkpoint of torch.distributed.checkpoint, not of meshwright"),
    ):
        (foreign / name).touch()
        for verb in ("inspect", "verify"):
            code, _, said = ask(capsys, verb, foreign)
            assert code == 2 and sentence in said
    code, _, said = ask(capsys, "verify", tmp_path / "nowhere")
    assert code == 2 and f"{tmp_path / 'nowhere'} is not a folder" in said
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    code, _, said = ask(capsys, "inspect", tmp_path / "new")
    assert code == 2 and "has no checkpoint; give a run that has one" in said


def test_newer_versions_and_permissions(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step-900"
    original = Path.open

    def refuse(self: Path, *words: Any, **more: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        code, _, said = ask(capsys, "verify", path)
    assert code == 2 and f"{path / 'rank-00000.safetensors'} may not be read; give a folder that you may read" in said
    content = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps({**content, "version": 9}))
    code, _, said = ask(capsys, "inspect", path)
    assert code == 2 and "format version 9, but this meshwright reads versions 1 and 2; use a newer meshwright" in said


def test_diff(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    code, facts = ask_json(capsys, "diff", folder / "step-900", folder / "step-900")
    assert (code, facts["same_tensors"], facts["equal"], facts["facts"]) == (0, True, 3, {})
    code, facts = ask_json(capsys, "diff", folder / "step-900", folder / "step-1000")
    assert code == 0 and not facts["same_tensors"] and facts["facts"]["state.cursor"] == [7200, 8000]
    assert facts["values"]["parameter/a"]["elements"] == 24
    assert facts["values"]["parameter/a"]["largest"] == pytest.approx(0.1, rel=1e-5)
    a, b, norm = (each.tensor for each in weights(0.9))
    moved = b.clone()
    moved[2, 1] = float("nan")
    save(tmp_path, 1, [whole("a", a), whole("b", moved), whole("c", a), whole("norm", norm.double()[:5])])
    code, facts = ask_json(capsys, "diff", folder / "step-900", tmp_path / "step-1")
    assert facts["only_b"] == ["parameter/c"] and facts["only_a"] == []
    assert facts["shapes"] == {"parameter/norm": [[6, 4], [5, 4]]}
    assert facts["dtypes"] == {"parameter/norm": ["F32", "F64"]}
    assert facts["values"] == {"parameter/b": {"elements": 1, "of": 24, "largest": None, "relative": None}}
    assert facts["equal"] == 1
    code, output, _ = ask(capsys, "diff", folder / "step-900", tmp_path / "step-1")
    assert code == 0 and "only in B: parameter/c" in output and "parameter/b: 1 of 24 elements differ" in output
    place = read_manifest(tmp_path / "step-1").tensors["parameter/b"].slices[0].begin
    flip(tmp_path / "step-1" / "rank-00000.safetensors", place)
    code, _, said = ask(capsys, "diff", folder / "step-900", tmp_path / "step-1")
    assert code == 1 and "rank-00000.safetensors is damaged" in said


def test_equal_tensors_cut_in_other_slices_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.randn(6, 4)
    save(tmp_path / "a", 1, [whole("w", tensor)])
    save(tmp_path / "b", 1, [PlacedTensor("w", (6, 4), (r, 0), (2, 4), tensor[r : r + 2]) for r in (0, 2, 4)])
    code, facts = ask_json(capsys, "diff", tmp_path / "a" / "step-1", tmp_path / "b" / "step-1")
    assert code == 0 and facts["same_tensors"]


def test_prune_keeps_the_last_good_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    code, _, said = ask(capsys, "prune", run)
    assert code == 2 and "has no job.toml that says how many stay; give --keep N" in said
    flip(folder / "step-1100" / "rank-00000.safetensors")
    (folder / ".step-1200.superseded-00ff").mkdir()
    code, facts = ask_json(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert code == 0 and facts["removed"] == [900] and steps(folder) == [900, 1000, 1100]
    code, facts = ask_json(capsys, "prune", run, "--keep", 1)
    assert (code, facts["kept"], facts["removed"], list(facts["damaged"])) == (0, [1000], [900], ["1100"])
    assert facts["left_overs"] == [".step-1200.superseded-00ff"] and facts["freed_bytes"] > 288
    assert steps(folder) == [1000, 1100] and not list(folder.glob(".*"))
    flip(folder / "step-1000" / "rank-00000.safetensors")
    code, _, said = ask(capsys, "prune", run, "--keep", 1)
    assert code == 2 and "is good, so none is removed" in said and steps(folder) == [1000, 1100]
    code, _, said = ask(capsys, "prune", folder / "step-1000", "--keep", 1)
    assert code == 2 and "is one checkpoint; give the run it belongs to" in said


def test_pinned_ones_stay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-900" / "pin").touch()
    code, output, _ = ask(capsys, "prune", run, "--keep", 1)
    assert code == 0 and "kept, pinned or by the job's rule: step-900" in output
    assert steps(run / "checkpoints") == [900, 1100]


def test_a_run_that_trains_is_not_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "job.toml").write_text(JOB)
    with RunLock(run):
        for given in (run, run / "checkpoints"):
            code, _, said = ask(capsys, "prune", given, "--keep", 1)
            assert code == 2 and said.startswith(f"prune: {run} is in use by process ")
        assert ask(capsys, "prune", run, "--keep", 1, "--dry-run")[0] == 0
    assert steps(run / "checkpoints") == [900, 1000, 1100]
    assert ask(capsys, "prune", run / "checkpoints", "--keep", 1)[0] == 0
    assert steps(run / "checkpoints") == [1100]
