"""Damage: no flipped byte, cut, missing or swapped file is ever loaded; the file is named."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from simulated_ranks import ThreadWorld, on_ranks

from meshwright.checkpoint.folder import is_complete, latest
from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import MANIFEST, Manifest, encode, read_manifest
from meshwright.checkpoint.placed import PlacedTensor, whole
from meshwright.checkpoint.save import save
from meshwright.checkpoint.verify import verify
from meshwright.errors import CheckpointError

_FILES = ("rank-00000.safetensors", "rank-00001.safetensors", MANIFEST)


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(6, 4, generator=generator) for name in ("a", "b", "norm")}


def _save(folder: Path, step: int) -> Path:
    def run(world: ThreadWorld) -> Path:
        boxes = [
            PlacedTensor(name, (6, 4), (3 * world.rank, 0), (3, 4), tensor[3 * world.rank :][:3])
            for name, tensor in _tensors().items()
        ]
        return save(folder, step, boxes, state={"cursor": 1e-05, "text": "ü"}, world=world)

    return on_ranks(2, run)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    _save(tmp_path / "run", 1)
    return _save(tmp_path / "run", 2)


def _refusal(path: Path) -> str:
    """What loading says; loading must not succeed, and must not fill anything with wrong values silently."""
    wanted = [whole(name, torch.zeros(6, 4)) for name in _tensors()]
    with pytest.raises(CheckpointError) as error:
        load(path, wanted)
    return str(error.value)


def _flip(file: Path, position: int, mask: int) -> bytes:
    data = file.read_bytes()
    changed = bytearray(data)
    changed[position] ^= mask
    file.write_bytes(bytes(changed))
    return data


def _flip_every(path: Path, name: str, stride: int) -> None:
    file = path / name
    for position in range(0, file.stat().st_size, stride):
        data = _flip(file, position, 1 << position % 8)
        said = _refusal(path)
        assert str(file) in said and said.endswith("(the one before is step-1)")
        with pytest.raises(CheckpointError, match=name):
            verify(path)
        file.write_bytes(data)
    assert verify(path).step == 2


@pytest.mark.parametrize("name", _FILES)
def test_bytes_of_every_kind_matter(path: Path, name: str) -> None:
    """Length field, header, each tensor, manifest: every seventh byte, one flipped bit at a time, by turns."""
    _flip_every(path, name, 7)


@pytest.mark.all
@pytest.mark.parametrize("name", _FILES)
def test_every_byte_matters(path: Path, name: str) -> None:
    _flip_every(path, name, 1)


def _random_flips(path: Path, count: int) -> None:
    draw = random.Random(5)
    for _ in range(count):
        file = path / draw.choice(_FILES)
        data = _flip(file, draw.randrange(file.stat().st_size), draw.randrange(1, 256))
        assert str(file) in _refusal(path)
        file.write_bytes(data)


def test_random_changes_of_one_byte(path: Path) -> None:
    _random_flips(path, 300)


@pytest.mark.all
@pytest.mark.timeout(900)
def test_ten_thousand_random_changes_of_one_byte(path: Path) -> None:
    _random_flips(path, 10_000)


@pytest.mark.parametrize("name", _FILES)
def test_cut_and_lengthened_files(path: Path, name: str) -> None:
    file = path / name
    data = file.read_bytes()
    for size in {0, 1, 7, 8, len(data) // 2, len(data) - 1}:
        file.write_bytes(data[:size])
        assert str(file) in _refusal(path)
        assert not is_complete(path)
        assert latest(path.parent) == path.parent / "step-1"
    file.write_bytes(data + b"\0")
    assert str(file) in _refusal(path)


@pytest.mark.parametrize("name", _FILES)
def test_missing_files(path: Path, name: str) -> None:
    (path / name).unlink()
    said = _refusal(path)
    assert name in said and str(path) in said
    assert latest(path.parent) == path.parent / "step-1"


def test_swapped_files(path: Path) -> None:
    first, second = path / _FILES[0], path / _FILES[1]
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert f"{first} is damaged" in _refusal(path)


def test_a_file_of_another_checkpoint(path: Path) -> None:
    """Same names, same shapes, same sizes; only the values differ."""
    other = path.parent / "other"

    def run(world: ThreadWorld) -> Path:
        part = slice(3 * world.rank, 3 * world.rank + 3)
        boxes = [PlacedTensor(n, (6, 4), (part.start, 0), (3, 4), 2 * t[part]) for n, t in _tensors().items()]
        return save(other, 2, boxes, world=world)

    on_ranks(2, run)
    shutil.copy(other / "step-2" / _FILES[1], path / _FILES[1])
    assert f"{path / _FILES[1]} is damaged (the checksum of parameter/a at byte" in _refusal(path)


def test_the_position_is_named(path: Path) -> None:
    manifest = read_manifest(path)
    piece = next(piece for piece in manifest.tensors["parameter/b"].slices if piece.file == _FILES[1])
    _flip(path / _FILES[1], piece.begin + 5, 1)
    assert _refusal(path) == (
        f"checkpoint: {path / _FILES[1]} is damaged (the checksum of parameter/b at byte {piece.begin} does not fit); "
        "use another checkpoint (the one before is step-1)"
    )


def test_only_what_is_needed_is_read(path: Path) -> None:
    """A rank that wants rows of the first file does not notice damage in the second; verify does."""
    _flip(path / _FILES[1], (path / _FILES[1]).stat().st_size - 1, 1)
    rows = [PlacedTensor(name, (6, 4), (0, 0), (2, 4), torch.zeros(2, 4)) for name in _tensors()]
    load(path, rows)
    assert all(torch.equal(box.tensor, _tensors()[box.name][:2]) for box in rows)
    with pytest.raises(CheckpointError, match="rank-00001"):
        verify(path)


def test_damage_seen_by_one_rank_is_raised_by_all(path: Path) -> None:
    _flip(path / _FILES[1], (path / _FILES[1]).stat().st_size - 1, 1)

    def run(world: ThreadWorld) -> str:
        rows = [PlacedTensor(n, (6, 4), (3 * world.rank, 0), (3, 4), torch.zeros(3, 4)) for n in _tensors()]
        try:
            load(path, rows, world=world)
        except CheckpointError as error:
            return str(error)
        return ""

    said = on_ranks(2, run)
    assert said[0] == said[1] and _FILES[1] in said[0]


def _rewritten(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads((path / MANIFEST).read_bytes())
    change(content)
    (path / MANIFEST).write_text(json.dumps(content))


def test_foreign_and_newer_manifests(path: Path) -> None:
    _rewritten(path, lambda content: content.update(version=3))
    assert _refusal(path).startswith(
        f"checkpoint: {path / MANIFEST} has format version 3, but this meshwright reads versions 1 and 2; "
        "use a newer meshwright"
    )
    _rewritten(path, lambda content: content.update(format="other"))
    assert "is not a meshwright-checkpoint manifest; give a step-N folder" in _refusal(path)
    for text in ("[]", "3", '"x"', "null", "{}"):
        (path / MANIFEST).write_text(text)
        assert "is not a meshwright-checkpoint manifest" in _refusal(path)


def test_rewritten_manifests_of_the_same_meaning_are_refused(path: Path) -> None:
    """Bytes that parse to the same values were still not written by us."""
    _rewritten(path, lambda content: None)
    assert "its root hash does not fit its contents" in _refusal(path)


def test_a_manifest_cannot_reach_outside_its_folder(path: Path) -> None:
    manifest = read_manifest(path)
    files = {f"../step-2/{name}": entry for name, entry in manifest.files.items()}
    forged = Manifest(2, "", {}, {}, {}, {}, manifest.tensors, files)
    (path / MANIFEST).write_bytes(encode(forged))
    assert "leaves the folder" in _refusal(path)


def test_slices_with_holes_are_refused(path: Path) -> None:
    """A well-signed manifest that leaves rows out (a program error, not damage) fills nothing silently."""
    manifest = read_manifest(path)
    tensors = dict(manifest.tensors)
    entry = tensors["parameter/a"]
    tensors["parameter/a"] = type(entry)(entry.dtype, entry.shape, entry.slices[:1])
    (path / MANIFEST).write_bytes(encode(Manifest(2, "", {}, {}, {}, {}, tensors, manifest.files)))
    assert "parameter/a has holes" in _refusal(path)


def test_header_is_what_safetensors_reads(path: Path) -> None:
    data = (path / _FILES[0]).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0 and set(json.loads(data[8 : 8 + length])) == {
        "parameter/a/0,0", "parameter/b/0,0", "parameter/norm/0,0",
    }  # fmt: skip
