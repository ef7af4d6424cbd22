"""Saving and loading: from any boxes to any boxes, all or nothing, the old one last to go."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from simulated_ranks import FailingDisk, Killed, ThreadWorld, on_ranks

from meshwright.checkpoint.boxes import Box, boxes_of_flat_range
from meshwright.checkpoint.folder import clean, latest, steps
from meshwright.checkpoint.load import load, read_tensor, tensor_names
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.placed import DTYPES, PlacedTensor, whole
from meshwright.checkpoint.retention import rotate
from meshwright.checkpoint.save import SaveError, pieces_of, plan, save
from meshwright.checkpoint.verify import verify
from meshwright.errors import CheckpointError
from meshwright.prove.pool import RankPool

Tensors = dict[str, torch.Tensor]


def model(seed: int = 0) -> Tensors:
    """A few tensors of every rank and several types, by role/name."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "parameter/embedding.weight": ((97, 16), torch.float32),
        "parameter/layers.0.attention.q.weight": ((16, 16), torch.float32),
        "exp_avg/layers.0.attention.q.weight": ((16, 16), torch.float32),
        "exp_avg_sq/layers.0.attention.q.weight": ((16, 16), torch.float32),
        "parameter/final_norm.weight": ((16,), torch.float64),
        "momentum/cube": ((3, 4, 5), torch.bfloat16),
        "parameter/scalar": ((), torch.float16),
    }
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for key, (shape, dtype) in shapes.items()
    }


def flat_shards(tensors: Tensors, rank: int, cuts: Callable[[int], Sequence[int]]) -> list[PlacedTensor]:
    """This rank's flat range of each tensor, as boxes, flat as optimizers hold them."""
    found = []
    for key, tensor in tensors.items():
        role, _, name = key.partition("/")
        places = cuts(tensor.numel())
        position = places[rank]
        for offsets, sizes in boxes_of_flat_range(tuple(tensor.shape), places[rank], places[rank + 1]):
            count = math.prod(sizes)
            part = tensor.reshape(-1)[position : position + count].clone()
            found.append(PlacedTensor(name, tuple(tensor.shape), offsets, sizes, part, role))  # type: ignore[arg-type]
            position += count
    return found


def even(size: int) -> Callable[[int], Sequence[int]]:
    return lambda count: [count * rank // size for rank in range(size + 1)]


def blank(boxes: Sequence[PlacedTensor]) -> list[PlacedTensor]:
    return [
        PlacedTensor(
            box.name, box.global_shape, box.offsets, box.sizes, torch.full_like(box.tensor, float("nan")), box.role
        )
        for box in boxes
    ]


def save_flat(folder: Path, step: int, tensors: Tensors, size: int = 1, **more: Any) -> Path:
    """Save from ``size`` simulated ranks with flat shards."""
    disk = more.pop("disk", None)

    def run(world: ThreadWorld) -> Path:
        boxes = flat_shards(tensors, world.rank, even(size))
        return save(folder, step, boxes, world=world, disk=disk, **more)

    return on_ranks(size, run)[0]


def same(path: Path, tensors: Tensors) -> bool:
    for key, tensor in tensors.items():
        role, _, name = key.partition("/")
        if not torch.equal(read_tensor(path, name, role), tensor):  # type: ignore[arg-type]
            return False
    return True


def test_what_is_saved_comes_back_with_its_state(tmp_path: Path) -> None:
    tensors = model()
    state = {"cursor": {"samples": 123, "epoch": 4}, "scaler": {"scale": 65536.0, "good_steps": 7}}
    path = save_flat(
        tmp_path / "checkpoints", 7, tensors, 3,
        layout="dp=3 zero=1", model={"hidden": 16}, optimizer={"name": "adamw", "groups": [{"decay": 0.1}]},
        state=state,
    )  # fmt: skip
    assert path == tmp_path / "checkpoints" / "step-7"
    manifest = verify(path)
    assert (manifest.step, manifest.layout, manifest.state) == (7, "dp=3 zero=1", state)
    assert manifest.optimizer["groups"] == [{"decay": 0.1}]
    assert set(manifest.versions) == {"meshwright", "torch", "python"}
    assert same(path, tensors)
    assert tensor_names(path, "exp_avg") == ["layers.0.attention.q.weight"]
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoints"]
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors",
    ]  # fmt: skip


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = model()
    path = save_flat(tmp_path, 1, tensors)
    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("parameter/embedding.weight/0,0"), tensors["parameter/embedding.weight"])
        assert torch.equal(file.get_tensor("momentum/cube/0,0,0"), tensors["momentum/cube"])
        assert torch.equal(file.get_tensor("parameter/scalar/"), tensors["parameter/scalar"])


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_any_shards_load_into_any_shards(tmp_path_factory: Any, data: st.DataObject, savers: int, loaders: int) -> None:
    tensors = model()
    folder = tmp_path_factory.mktemp("reshard")
    drawn: dict[tuple[int, int], list[int]] = {}

    def cuts(size: int) -> Callable[[int], Sequence[int]]:
        for count in {tensor.numel() for tensor in tensors.values()}:
            if (size, count) not in drawn:
                inner = data.draw(st.lists(st.integers(0, count), min_size=size - 1, max_size=size - 1))
                drawn[size, count] = [0, *sorted(inner), count]
        return lambda count: drawn[size, count]

    from_, to = cuts(savers), cuts(loaders)

    def store(world: ThreadWorld) -> Path:
        return save(folder, 1, flat_shards(tensors, world.rank, from_), world=world)

    path = on_ranks(savers, store)[0]

    def restore(world: ThreadWorld) -> None:
        right = flat_shards(tensors, world.rank, to)
        found = blank(right)
        load(path, found, world=world)
        for expected, box in zip(right, found, strict=True):
            assert torch.equal(expected.tensor, box.tensor)

    on_ranks(loaders, restore)


def test_tensor_parallel_columns_load_from_rows(tmp_path: Path) -> None:
    weight = torch.randn(8, 12)

    def part(rank: int, dimension: int, tensor: torch.Tensor) -> PlacedTensor:
        size = weight.shape[dimension] // 2
        offsets = tuple(rank * size if d == dimension else 0 for d in range(2))
        sizes = tuple(size if d == dimension else weight.shape[d] for d in range(2))
        return PlacedTensor("w", (8, 12), offsets, sizes, tensor)

    def store(world: ThreadWorld) -> Path:
        return save(tmp_path, 1, [part(world.rank, 0, weight.chunk(2, 0)[world.rank])], world=world)

    path = on_ranks(2, store)[0]

    def restore(world: ThreadWorld) -> None:
        tensor = torch.zeros(8, 6)
        load(path, [part(world.rank, 1, tensor)], world=world)
        assert torch.equal(tensor, weight.chunk(2, 1)[world.rank])

    on_ranks(2, restore)


def test_replicas_are_written_once_and_spread_over_their_holders(tmp_path: Path) -> None:
    tensors = {f"parameter/layers.{number}.weight": torch.randn(10, 10) for number in range(16)}

    def store(world: ThreadWorld) -> Path:
        boxes = [whole(key.partition("/")[2], tensor) for key, tensor in tensors.items()]
        return save(tmp_path, 1, boxes, world=world)

    path = on_ranks(4, store)[0]
    manifest = verify(path)
    assert sum(len(entry.slices) for entry in manifest.tensors.values()) == 16
    written = [sum(piece.bytes for entry in manifest.tensors.values() for piece in entry.slices if piece.file == file)
               for file in manifest.files]  # fmt: skip
    assert written == [4 * 400] * 4
    assert same(path, tensors)


def test_no_rank_writes_much_more_than_the_mean() -> None:
    """One large embedding that all hold is cut, so that it does not fall on one rank."""
    boxes = [whole("embedding", torch.zeros(4096, 64)), *(whole(f"w{n}", torch.zeros(64, 64)) for n in range(8))]
    described = [
        [[piece.source.key, "F32", piece.source.global_shape, *piece.box, piece.bytes]
         for piece in pieces_of(boxes, slice_bytes=2**16)]
        for _ in range(4)
    ]  # fmt: skip
    order, assignment = plan(described)
    loads = [sum(described[rank][number][5] for number in numbers) for rank, numbers in enumerate(assignment)]
    assert sum(loads) == sum(piece[5] for piece, _ in order) == 4 * (4096 * 64 + 8 * 64 * 64)
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_large_boxes_are_cut_into_slices() -> None:
    cut = pieces_of([whole("w", torch.arange(60.0).view(5, 12))], slice_bytes=100)
    assert [piece.box for piece in cut] == [((0, 0), (2, 12)), ((2, 0), (2, 12)), ((4, 0), (1, 12))]
    assert torch.equal(torch.cat([piece.tensor for piece in cut]), torch.arange(60.0).view(5, 12))
    cut = pieces_of([whole("w", torch.zeros(2, 12))], slice_bytes=20)
    assert [piece.box for piece in cut][:3] == [((0, 0), (1, 5)), ((0, 5), (1, 5)), ((0, 10), (1, 2))]


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (4, 4))], "parameter/w: part of it is missing (16 elements of 32, first at [4, 0])"),
        ([((0, 0), (8, 4)), ((6, 0), (2, 4))], "parameter/w: part of it is there more than once (40 elements of 32, "),
        ([((0, 0), (4, 4)), ((3, 0), (4, 4))], "parameter/w: part of it is misplaced (32 elements of 32, "),
    ],
)  # fmt: skip
def test_holes_and_overlaps_are_refused_before_anything_is_written(
    tmp_path: Path, boxes: list[Box], problem: str
) -> None:
    placed = [PlacedTensor("w", (8, 4), *box, torch.zeros(box[1])) for box in boxes]
    with pytest.raises(SaveError) as error:
        save(tmp_path / "run", 3, placed)
    assert problem in str(error.value)
    assert str(error.value).startswith(f"checkpoint: step 3 could not be saved to {tmp_path / 'run'} (rank 0: ")
    assert list((tmp_path / "run").iterdir()) == []


def test_ranks_that_disagree_on_a_tensor_are_refused(tmp_path: Path) -> None:
    def store(world: ThreadWorld) -> None:
        save(tmp_path, 1, [whole("w", torch.zeros(3 + world.rank))], world=world)

    with pytest.raises(SaveError, match=r"parameter/w is F32 of shape \[4\] on rank 1, but F32 of \[3\] elsewhere"):
        on_ranks(2, store)


def test_folders_that_are_not_shared_are_named(tmp_path: Path) -> None:
    def store(world: ThreadWorld) -> None:
        save(tmp_path / str(world.rank), 1, [whole(f"w{world.rank}", torch.zeros(3))], world=world)

    with pytest.raises(SaveError, match=r"rank 1: .* is not the same folder on all ranks; use storage that all hosts"):
        on_ranks(2, store)


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    path = save_flat(tmp_path, 4, model())
    with pytest.raises(SaveError, match="step-4 is there already"):
        save_flat(tmp_path, 4, model(1))
    assert same(path, model())
    (path / "manifest.json").unlink()  # now it does not exist, but what is left of it is not destroyed
    assert same(save_flat(tmp_path, 4, model(1)), model(1))
    assert len(list(tmp_path.glob(".step-4.broken-*"))) == 1


# --- strictness ----------------------------------------------------------------------------------


def test_four_clear_errors_list_the_names(tmp_path: Path) -> None:
    path = save_flat(tmp_path, 1, {f"parameter/{name}": torch.zeros(2, 3) for name in "abcd"})
    wanted = [
        whole("a", torch.zeros(2, 3)),
        whole("b", torch.zeros(3, 2)),
        whole("c", torch.zeros(2, 3, dtype=torch.float64)),
        whole("e", torch.zeros(2, 3)),
    ]
    before = [box.tensor.clone() for box in wanted]
    with pytest.raises(CheckpointError) as error:
        load(path, wanted)
    assert str(error.value).splitlines() == [
        f"checkpoint: {path} lacks: parameter/e",
        f"checkpoint: {path} has tensors that the model does not have: parameter/d",
        f"checkpoint: {path} has another shape for: parameter/b ([2, 3] instead of [3, 2])",
        f"checkpoint: {path} has another element type for: parameter/c (F32 instead of F64)",
    ]
    assert all(torch.equal(old, box.tensor) for old, box in zip(before, wanted, strict=True))


def test_weights_only(tmp_path: Path) -> None:
    tensors = model()
    path = save_flat(tmp_path, 1, tensors)
    weights = [whole(key[10:], torch.zeros_like(tensor)) for key, tensor in tensors.items() if key[:9] == "parameter"]
    with pytest.raises(CheckpointError, match="has tensors that the model does not have: exp_avg/layers"):
        load(path, weights)
    load(path, weights, roles=("parameter",))
    assert all(torch.equal(box.tensor, tensors[box.key]) for box in weights)


def test_ranks_together_want_everything(tmp_path: Path) -> None:
    """Each pipeline rank wants only its own tensors; extra is what nobody wants. All ranks raise the same."""
    path = save_flat(tmp_path, 1, {f"parameter/{name}": torch.ones(2) for name in "abc"})

    def restore(world: ThreadWorld, names: str) -> str:
        try:
            load(path, [whole(names[world.rank], torch.zeros(2))], world=world)
        except CheckpointError as error:
            return str(error)
        return ""

    assert on_ranks(3, lambda world: restore(world, "abc")) == ["", "", ""]
    said = on_ranks(2, lambda world: restore(world, "ab"))
    assert said[0] == said[1] == f"checkpoint: {path} has tensors that the model does not have: parameter/c"


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    path = save_flat(tmp_path, 1, model())
    with pytest.raises(CheckpointError, match=r"has no tensor parameter/layers\.9"):
        read_tensor(path, "layers.9")
    with pytest.raises(CheckpointError, match=r"is not a folder; give a step-N folder"):
        read_manifest(tmp_path / "step-2")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json, so it is incomplete or no checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_element_type(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    save(tmp_path, 1, [whole("w", tensor)])
    found = read_tensor(tmp_path / "step-1", "w")
    assert found.dtype == dtype and torch.equal(found, tensor)


def test_bits_survive(tmp_path: Path) -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.4e38])
    save(tmp_path, 1, [whole("w", tensor)])
    found = read_tensor(tmp_path / "step-1", "w")
    assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


def test_wrong_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter/w: box at \(3,\) of \(2,\) is not inside shape \(4,\)"):
        PlacedTensor("w", (4,), (3,), (2,), torch.zeros(2))
    with pytest.raises(ValueError, match=r"parameter/w: 3 elements do not fill a box of \(2,\)"):
        PlacedTensor("w", (4,), (0,), (2,), torch.zeros(3))


# --- rotation --------------------------------------------------------------------------------------


def test_rotation_goes_by_number(tmp_path: Path) -> None:
    tensors = {"parameter/w": torch.zeros(2)}
    for step in (900, 950, 1000, 1050, 1100):
        save_flat(tmp_path, step, tensors, keep=2)
    assert steps(tmp_path) == [1050, 1100]
    assert latest(tmp_path) == tmp_path / "step-1100"


def test_rotation_spares_later_steps_and_the_newest(tmp_path: Path) -> None:
    """A run resumed from 400 with 5000 on disk: 450 must not be the one that goes."""
    tensors = {"parameter/w": torch.zeros(2)}
    for step in (300, 400, 5000):
        save_flat(tmp_path, step, tensors)
    save_flat(tmp_path, 450, tensors, keep=1)
    assert steps(tmp_path) == [450, 5000]
    assert rotate(tmp_path, 1, newest=460) == [], "460 is not there: nothing may go"
    with pytest.raises(ValueError, match="keep=0 would remove the last checkpoint; use at least 1"):
        rotate(tmp_path, 0, newest=450)


def test_nothing_is_removed_when_the_new_one_reads_back_wrong(tmp_path: Path) -> None:
    class Flips(FailingDisk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            file = next(target.glob("*.safetensors"))
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    save_flat(tmp_path, 1, model(1))
    with pytest.raises(SaveError, match=r"rank-00000\.safetensors is damaged"):
        save_flat(tmp_path, 2, model(2), keep=1, disk=Flips())
    assert same(tmp_path / "step-1", model(1))


def test_half_folders_do_not_exist(tmp_path: Path) -> None:
    save_flat(tmp_path, 5, model())
    for name in ("step-6", "step-07", "step-x", "step-8.tmp", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-6" / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-9").write_text("a file")
    assert steps(tmp_path) == [5]
    assert latest(tmp_path / "nowhere") is None


# --- failures ------------------------------------------------------------------------------------


def _count(tmp_path: Path, size: int, **more: Any) -> int:
    disk = FailingDisk()
    save_flat(tmp_path / "count", 1, model(1), size)
    save_flat(tmp_path / "count", 2, model(2), size, disk=disk, **more)
    assert {"make_folder", "create", "write", "sync_file", "sync_folder", "rename", "remove"} >= set(disk.operations)
    return len(disk.operations)


@pytest.mark.parametrize("how", ["kill", "power"])
@pytest.mark.parametrize(("size", "keep"), [(1, None), (2, 1)])
def test_death_at_any_point_leaves_this_step_or_the_one_before(
    tmp_path: Path, how: str, size: int, keep: int | None
) -> None:
    total = _count(tmp_path, size, keep=keep)
    assert total > 15
    outcomes = []
    for point in range(total):
        folder = tmp_path / f"at-{point}"
        save_flat(folder, 1, model(1), size)
        with pytest.raises(Killed):
            save_flat(folder, 2, model(2), size, keep=keep, disk=FailingDisk(point, how))
        last = latest(folder)
        assert last is not None
        outcomes.append(int(last.name[5:]))
        assert same(last, model(outcomes[-1]))
        assert verify(last).step == outcomes[-1]
        save_flat(folder, 3, model(3), size, keep=keep)  # and the next save is not in its way
        assert same(folder / "step-3", model(3))
        assert not list(folder.glob(".step-*"))
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}


@pytest.mark.parametrize("size", [1, 3])
def test_a_full_disk_leaves_the_old_one_and_all_ranks_agree(tmp_path: Path, size: int) -> None:
    total = _count(tmp_path, size, keep=1)
    for point in range(total):
        folder = tmp_path / f"at-{point}"
        save_flat(folder, 1, model(1), size)
        disk = FailingDisk(point, "full")

        def store(world: ThreadWorld, folder: Path = folder, disk: FailingDisk = disk) -> str:
            try:
                save(folder, 2, flat_shards(model(2), world.rank, even(size)), keep=1, world=world, disk=disk)
            except SaveError as error:
                return str(error)
            return ""

        said = on_ranks(size, store)
        assert len(set(said)) == 1
        if said[0]:
            assert "No space left on device" in said[0]
            assert said[0].endswith("earlier checkpoints are untouched")
        last = latest(folder)
        assert last is not None and same(last, model(int(last.name[5:])))
        assert (last.name == "step-2") or said[0]


def test_one_rank_that_fails_in_its_own_way_stops_all(tmp_path: Path) -> None:
    class Odd(FailingDisk):
        def create(self, path: Path) -> Any:
            if "00001" in path.name:
                raise AssertionError("odd")
            return super().create(path)

    def store(world: ThreadWorld) -> str:
        try:
            save(tmp_path, 2, flat_shards(model(), world.rank, even(3)), world=world, disk=Odd())
        except SaveError as error:
            return str(error)
        return ""

    said = on_ranks(3, store)
    assert "rank 1: AssertionError: odd" in said[0] and said == [said[0]] * 3
    assert list(tmp_path.iterdir()) == []


def test_what_killed_saves_left_is_cleaned_but_nothing_else(tmp_path: Path) -> None:
    kept = {".step-1.tmpx", ".step-1.broken-00ff", "step-1", ".other"}
    for name in kept | {".step-1.tmp-00ff", ".step-12.removed-abcd"}:
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


# --- real ranks ----------------------------------------------------------------------------------


def _save_on_rank(folder: str, size: int) -> str:
    import torch.distributed as dist

    return str(save(folder, 11, flat_shards(model(), dist.get_rank(), even(size)), state={"cursor": 3}, keep=1))


def _load_on_rank(path: str, size: int) -> Any:
    import torch.distributed as dist

    right = flat_shards(model(), dist.get_rank(), even(size))
    found = blank(right)
    manifest = load(path, found)
    equal = all(torch.equal(expected.tensor, box.tensor) for expected, box in zip(right, found, strict=True))
    return equal, json.loads(json.dumps(dict(manifest.state)))


def _fail_on_rank(path: str) -> str:
    try:
        load(path, [])
    except CheckpointError as error:
        return str(error)
    return ""


def test_gloo_ranks_save_and_others_load(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    paths = ranks(4).run(_save_on_rank, str(tmp_path), 4)
    assert paths == [str(tmp_path / "step-11")] * 4
    assert same(tmp_path / "step-11", model())
    assert ranks(2).run(_load_on_rank, paths[0], 2) == [(True, {"cursor": 3})] * 2
    assert _load_alone(tmp_path / "step-11")
    said = ranks(2).run(_fail_on_rank, paths[0])
    assert said[0] == said[1] != ""


def _load_alone(path: Path) -> bool:
    right = flat_shards(model(), 0, even(1))
    found = blank(right)
    load(path, found)
    return all(torch.equal(expected.tensor, box.tensor) for expected, box in zip(right, found, strict=True))


def test_the_plan_is_linear_in_the_pieces() -> None:
    """Twice the ranks with twice the pieces: every box is looked at once, by how often it is compared."""
    looked = []
    for size in (8, 16, 32):
        count = itertools.count()

        class Counted(list[Any]):
            def __iter__(self, count: Any = count) -> Any:
                next(count)
                return super().__iter__()

        each = 512 // size
        described = [
            [Counted([f"parameter/w{n}", "F32", [512], [each * rank], [each], 4]) for n in range(9)]
            for rank in range(size)
        ]  # fmt: skip
        plan(described)
        looked.append(next(count) / (size * 9))
    assert looked == [looked[0]] * 3
