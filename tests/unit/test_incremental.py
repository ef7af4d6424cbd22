"""Incremental checkpoints: what did not change is not written again, and every folder stays whole by itself."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_ranks import FailingDisk, Killed, ThreadWorld, on_ranks

from meshwright.checkpoint.delta import accounts, on_disk
from meshwright.checkpoint.describe import describe, describe_run
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.drill import restore
from meshwright.checkpoint.folder import latest, step_of, steps
from meshwright.checkpoint.load import load, read_tensor
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.placed import PlacedTensor
from meshwright.checkpoint.retention import Retention, prune
from meshwright.checkpoint.save import save
from meshwright.checkpoint.verify import verify
from meshwright.cli.checkpoint_show import checkpoint_lines, run_lines
from meshwright.errors import CheckpointError
from meshwright.prove.pool import RankPool
from tests.small_jobs import small_job, train_and_save

BIG, SMALL = (64, 64), (64, 8)
BIG_BYTES, SMALL_BYTES = 4 * 64 * 64, 4 * 64 * 8


def tensors(frozen: float, moving: float) -> dict[str, torch.Tensor]:
    """A large tensor and a small one, each row its own value."""
    rows = torch.arange(64.0)[:, None]
    return {"frozen": rows.expand(BIG) + 100 * frozen, "moving": rows.expand(SMALL) + 100 * moving}


def store(folder: Path, step: int, values: dict[str, torch.Tensor], size: int = 2, **more: Any) -> Path:
    """Save from ``size`` ranks, each with its rows."""
    more.setdefault("full_every", 10)

    def run(world: ThreadWorld) -> Path:
        rows = 64 // size
        boxes = [
            PlacedTensor(name, tuple(whole.shape), (rows * world.rank, 0), (rows, whole.shape[1]),
                         whole[rows * world.rank :][:rows].contiguous())
            for name, whole in values.items()
        ]  # fmt: skip
        return save(folder, step, boxes, world=world, **more)

    return on_ranks(size, run)[0]


def holds(path: Path, values: dict[str, torch.Tensor]) -> bool:
    verify(path)
    return all(torch.equal(read_tensor(path, name), whole) for name, whole in values.items())


def test_what_did_not_change_is_referenced(tmp_path: Path) -> None:
    first = store(tmp_path, 1, tensors(1, 1))
    second = store(tmp_path, 2, tensors(1, 2))
    assert holds(first, tensors(1, 1)) and holds(second, tensors(1, 2))
    assert restore(second) == 2, "as the restore drill loads it"
    manifest = read_manifest(second)
    assert (read_manifest(first).version, manifest.version, manifest.generation) == (1, 2, 1)
    assert {file.name for file in second.iterdir()} == {
        "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors",
        "step-1.rank-00000.safetensors", "step-1.rank-00001.safetensors",
    }  # fmt: skip
    saved = accounts(manifest)
    headers = sum(manifest.files[f"rank-{rank:05d}.safetensors"].header_bytes for rank in range(2))
    assert saved.written_bytes == SMALL_BYTES + headers
    assert saved.referenced_bytes == BIG_BYTES
    linked = sum(os.stat(second / f"step-1.rank-{rank:05d}.safetensors").st_size for rank in range(2))
    assert saved.referenced_bytes + saved.unused_bytes == linked, "every byte is accounted for"
    manifests = sum((path / "manifest.json").stat().st_size for path in (first, second))
    assert on_disk([first, second]) == linked + saved.written_bytes + manifests
    facts = describe(second)
    assert facts["referenced_bytes"] == BIG_BYTES and facts["version"] == 2
    assert any(f"{BIG_BYTES:,} referenced in files of earlier" in line for line in checkpoint_lines(facts, False))
    assert "if each had files of its own" in run_lines(describe_run([first, second]))[-1]


def test_another_layout_reads_it(tmp_path: Path) -> None:
    store(tmp_path, 1, tensors(1, 1))
    path = store(tmp_path, 2, tensors(1, 2))

    def read(world: ThreadWorld) -> bool:
        rows = 16
        wanted = [
            PlacedTensor(name, tuple(whole.shape), (rows * world.rank, 0), (rows, whole.shape[1]),
                         torch.zeros(rows, whole.shape[1]))
            for name, whole in tensors(1, 2).items()
        ]  # fmt: skip
        load(path, wanted, world=world)
        return all(torch.equal(box.tensor, tensors(1, 2)[box.name][rows * world.rank :][:rows]) for box in wanted)

    assert all(on_ranks(4, read))


def test_every_folder_is_whole_by_itself(tmp_path: Path) -> None:
    """Older ones go, by rotation or by hand, or a folder is copied elsewhere: what is referenced stays."""
    store(tmp_path / "run", 1, tensors(1, 1))
    store(tmp_path / "run", 2, tensors(1, 2), keep=1)
    assert steps(tmp_path / "run") == [2] and holds(tmp_path / "run/step-2", tensors(1, 2))
    third = store(tmp_path / "run", 3, tensors(1, 3))
    assert read_manifest(third).generation == 2
    assert "step-1.rank-00000.safetensors" in read_manifest(third).files, "a linked file keeps its name"
    shutil.copytree(third, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "run")
    assert holds(tmp_path / "elsewhere", tensors(1, 3))


def test_everything_anew_every_so_many(tmp_path: Path) -> None:
    generations = []
    for step in range(1, 8):
        generations.append(read_manifest(store(tmp_path, step, tensors(1, step), full_every=3)).generation)
    assert generations == [0, 1, 2, 0, 1, 2, 0]
    assert read_manifest(store(tmp_path, 9, tensors(1, 9), full_every=1)).generation == 0
    assert read_manifest(store(tmp_path, 10, tensors(1, 9), full_every=None)).generation == 0


def test_a_file_of_which_less_than_half_is_used_is_left(tmp_path: Path) -> None:
    store(tmp_path, 1, tensors(1, 1))
    path = store(tmp_path, 2, tensors(2, 1))
    assert read_manifest(path).generation == 0 and holds(path, tensors(2, 1))
    assert all(name.startswith("rank-") for name in read_manifest(path).files)


def test_nothing_changed_nothing_is_written(tmp_path: Path) -> None:
    store(tmp_path, 1, tensors(1, 1))
    path = store(tmp_path, 2, tensors(1, 1))
    assert accounts(read_manifest(path)).written_bytes == 0 and holds(path, tensors(1, 1))


def test_equal_contents_are_one_slice(tmp_path: Path) -> None:
    """Two tensors of the same bytes refer to the same place, and the file's checksum still fits."""
    zeros = {"a": torch.zeros(BIG), "b": torch.zeros(BIG)}
    store(tmp_path, 1, zeros)
    path = store(tmp_path, 2, zeros)
    assert holds(path, zeros)
    places = {(piece.file, piece.begin) for entry in read_manifest(path).tensors.values() for piece in entry.slices}
    assert len(places) < 4


def test_damage_is_not_handed_on(tmp_path: Path) -> None:
    """A file that is damaged meanwhile is not linked: what it held is written anew."""
    first = store(tmp_path, 1, tensors(1, 1))
    flip(first / "rank-00001.safetensors", 600)
    path = store(tmp_path, 2, tensors(1, 2))
    assert holds(path, tensors(1, 2))
    assert set(read_manifest(path).files) >= {"step-1.rank-00000.safetensors"}
    assert "step-1.rank-00001.safetensors" not in read_manifest(path).files
    with pytest.raises(CheckpointError, match="rank-00001"):
        verify(first)


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 4
    file.write_bytes(data)


def test_damage_is_found_in_every_byte_of_a_linked_file(tmp_path: Path) -> None:
    """Header, slices that are used, and those that are not."""
    store(tmp_path, 1, tensors(1, 1))
    path = store(tmp_path, 2, tensors(1, 2))
    file = path / "step-1.rank-00000.safetensors"
    manifest = read_manifest(path)
    (unused,) = manifest.files[file.name].unused
    used = manifest.tensors["parameter/frozen"].slices[0].begin
    for position in (3, 60, unused.begin, unused.begin + unused.bytes - 1, used, file.stat().st_size - 1):
        flip(file, position)
        with pytest.raises(CheckpointError, match=file.name):
            verify(path)
        flip(file, position)
    verify(path)


class NoLinks(Disk):
    """A file system on which a file has one name."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(source))


def test_without_hard_links_all_is_written(tmp_path: Path) -> None:
    store(tmp_path, 1, tensors(1, 1))
    path = store(tmp_path, 2, tensors(1, 2), disk=NoLinks())
    assert read_manifest(path).generation == 0 and holds(path, tensors(1, 2))


@pytest.mark.parametrize("how", ["kill", "power"])
def test_death_at_every_operation(tmp_path: Path, how: str) -> None:
    """As with full ones: this step or the one before, each right."""
    for point in itertools.count():
        folder = tmp_path / f"{how}-{point}"
        store(folder, 1, tensors(1, 1))
        disk = FailingDisk(point, how)
        died = False
        try:
            store(folder, 2, tensors(1, 2), disk=disk, keep=1)
        except Killed:
            died = True
        last = latest(folder)
        assert last is not None and holds(last, tensors(1, step_of(last)))
        if not died:
            break
    assert "link" in disk.operations and point > 10


def test_prune_counts_what_it_frees(tmp_path: Path) -> None:
    """A file goes with its last name."""
    for step in (1, 2, 3):
        store(tmp_path / "checkpoints", step, tensors(1, step))
    folders = [tmp_path / "checkpoints" / f"step-{step}" for step in (1, 2, 3)]
    before = on_disk(folders)
    planned = prune(tmp_path, Retention(1), dry=True)
    done = prune(tmp_path, Retention(1))
    assert done.removed == [2, 1] and planned.freed_bytes == done.freed_bytes
    assert before - on_disk(folders[2:]) == done.freed_bytes
    assert done.freed_bytes < BIG_BYTES, "the large tensor stays"
    assert holds(folders[2], tensors(1, 3))


def test_a_job_asks_for_it(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """With a rate of 0 and no momentum nothing changes but the step."""
    for number, incremental in enumerate([None, 3]):
        job = small_job("dp=2 zero=1", checkpoint={"incremental": incremental}, optimizer={"lr": 0.0, "momentum": 0.0})
        folder = tmp_path / str(number)
        ranks(2).run(train_and_save, job, str(folder), 0, 2, [1, 2])
        manifest = verify(folder / "checkpoints/step-2")
        assert manifest.generation == (0 if incremental is None else 1)
        assert manifest.state["optimizer_steps"] == 2
