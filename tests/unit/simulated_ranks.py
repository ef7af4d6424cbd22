"""Ranks as threads of one process, and disks that fail: what the checkpoint tests need and torch does not give."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from meshwright.checkpoint.disk import Disk

Result = TypeVar("Result")


class Killed(BaseException):
    """This rank is dead: nothing of it runs any more, no cleaning up either."""


class _Shared:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[str] = [""] * size


class ThreadWorld:
    """A world of threads; values pass through JSON, as between processes."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.shared, self.rank, self.size = shared, rank, len(shared.slots)

    def _exchange(self, value: Any) -> list[Any]:
        self.shared.slots[self.rank] = json.dumps(value)
        self.shared.barrier.wait(20)
        values = [json.loads(text) for text in self.shared.slots]
        self.shared.barrier.wait(20)
        return values

    def gather(self, value: Any) -> list[Any]:
        values = self._exchange(value)
        return values if self.rank == 0 else []

    def scatter(self, values: Sequence[Any]) -> Any:
        return self._exchange(list(values))[0][self.rank]

    def broadcast(self, value: Any) -> Any:
        return self._exchange(value)[0]


def on_ranks(size: int, function: Callable[[ThreadWorld], Result]) -> list[Result]:
    """``function(world)`` on ``size`` ranks at once; raises what rank 0, or else the first, raised."""
    shared = _Shared(size)
    results: list[Any] = [None] * size
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorld(shared, rank))
        except BaseException as error:
            failures[rank] = error
            if not isinstance(error, Exception):
                shared.barrier.abort()  # the others notice that this one is gone

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dead = [error for error in failures.values() if isinstance(error, Killed)]
    if dead:
        raise dead[0]
    if failures:
        raise failures[min(failures)]
    return results


class FailingDisk(Disk):
    """A disk on which operation number ``fail_at`` does not succeed.

    ``"kill"``: the process dies in it, half-way; ``"power"``: the machine does, and what was not synced is
    lost (contents cut short, names gone, renames undone); ``"full"``: the disk is full from then on.
    """

    def __init__(self, fail_at: int | None = None, how: str = "kill") -> None:
        self.fail_at, self.how = fail_at, how
        self.operations: list[str] = []
        self._contents: set[Path] = set()  # files, names and renames that are not on the medium yet
        self._names: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []
        self._lock = threading.Lock()

    def _fails(self, operation: str) -> bool:
        with self._lock:
            self.operations.append(operation)
            number = len(self.operations) - 1
        if self.fail_at is None or number < self.fail_at:
            return False
        return number == self.fail_at or (self.how == "full" and operation in ("make_folder", "create", "write"))

    def _fail(self, path: Path) -> None:
        if self.how == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if self.how == "power":
            with self._lock:
                self._lose_what_is_not_synced()
        raise Killed

    def _lose_what_is_not_synced(self) -> None:
        for file in self._contents:
            if file.exists():
                with file.open("r+b") as opened:
                    opened.truncate(file.stat().st_size // 2)
        for file in self._names:
            file.unlink(missing_ok=True)
        for source, target in reversed(self._renames):
            if target.exists():
                target.rename(source)

    def make_folder(self, path: Path) -> None:
        if self._fails("make_folder"):
            self._fail(path)
        super().make_folder(path)

    def create(self, path: Path) -> BinaryIO:
        if self._fails("create"):
            self._fail(path)
        with self._lock:
            self._contents.add(path)
            self._names.add(path)
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self._fails("write"):
            super().write(file, data[: len(data) // 2])
            file.flush()
            self._fail(Path(file.name))
        super().write(file, data)

    def sync_file(self, file: BinaryIO) -> None:
        if self._fails("sync_file"):
            self._fail(Path(file.name))
        super().sync_file(file)
        with self._lock:
            self._contents.discard(Path(file.name))

    def sync_folder(self, path: Path) -> None:
        if self._fails("sync_folder"):
            self._fail(path)
        super().sync_folder(path)
        with self._lock:
            self._names -= {name for name in self._names if name.parent == path}
            self._renames = [(source, target) for source, target in self._renames if target.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        if self._fails("rename"):
            self._fail(source)
        super().rename(source, target)
        self._renames.append((source, target))
        for waiting in (self._contents, self._names):
            for file in [file for file in waiting if file.parent == source]:
                waiting.remove(file)
                waiting.add(target / file.name)

    def link(self, source: Path, target: Path) -> None:
        if self._fails("link"):
            self._fail(source)
        with self._lock:
            self._names.add(target)
        super().link(source, target)

    def remove(self, path: Path) -> None:
        if self._fails("remove"):
            for file in sorted(path.glob("*"))[:1]:
                file.unlink()
            self._fail(path)
        super().remove(path)
