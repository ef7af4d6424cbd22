"""2BW: the table is what the program runs, and every backward finds the parameters of its forward."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.parallel.continuous import ContinuousPipeline, InFlight
from meshwright.plan.receives import receives
from meshwright.schedule.in_flight import in_flight
from meshwright.schedule.table import Action, table
from meshwright.schedule.validate import validate

SIZES = [(pp, count) for pp, count in product((2, 3, 4, 5), range(2, 11)) if count >= pp]


class RecordingStage:
    """What the program asks of a version's stage."""

    def __init__(self, version: int, rank: int, log: list[Any]) -> None:
        self.version, self.rank, self.log, self.chunks = version, rank, log, 0

    def forward_one_chunk(self, micro_batch: int, *_: Any) -> torch.Tensor:
        self.log.append(("F", self.version, micro_batch))
        return torch.zeros(())

    def backward_one_chunk(self, micro_batch: int, loss: object = None) -> None:
        self.log.append(("B", self.version, micro_batch))

    def get_fwd_recv_ops(self, micro_batch: int) -> None:
        self.log.append((False, self.rank))

    def get_bwd_recv_ops(self, micro_batch: int) -> None:
        self.log.append((True, self.rank))

    def get_fwd_send_ops(self, micro_batch: int) -> None: ...

    def get_bwd_send_ops(self, micro_batch: int) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...


def recorded(pp: int, count: int, steps: int, rank: int) -> tuple[list[Any], list[int]]:
    """What one rank does in some steps and a drain, and how many actions had run when each step's gradients were."""
    log: list[Any] = []
    complete: list[int] = []
    stages = [RecordingStage(version, rank, log) for version in (0, 1)]

    def made(version: int, batches: Any) -> list[RecordingStage]:
        stages[version].chunks = len(batches)
        return [stages[version]]

    versions: Any = [SimpleNamespace(make_stages=lambda batches, v=version: made(v, batches)) for version in (0, 1)]

    def ended(_: InFlight) -> None:
        complete.append(sum(entry[0] in ("F", "B") for entry in log))

    pipeline = ContinuousPipeline(versions, pp, rank, ended)
    batches: Any = [object()] * count
    for step in range(steps):
        pipeline.feed(step % 2, batches, 1.0)
    pipeline.drain()
    return log, complete


@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_the_table_is_what_the_program_runs(pp: int, count: int) -> None:
    made = table("2bw", pp, 1, count, 4)
    assert validate(made) == []
    versions = made.version.tolist()
    for rank, row in enumerate(made.rows):
        log, complete = recorded(pp, count, 4, rank)
        actions = [entry for entry in log if entry[0] in ("F", "B")]
        assert actions == [(kind, index // count % 2, index % count) for kind, _, index in row]
        # Which parameters: of the first two steps the first ones, then those of one update before.
        first = int(made.starts[rank])
        assert [max(index // count - 1, 0) for _, _, index in row] == versions[first : first + len(row)]
        backwards = [place for place, action in enumerate(row, 1) if action.kind == "B"]
        assert complete == backwards[count - 1 :: count]


@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_receives_are_posted_where_the_ledger_has_them(pp: int, count: int) -> None:
    for rank in range(pp):
        log, _ = recorded(pp, count, 3, rank)
        # The second step is a steady one: from its first receive or forward to the third's.
        begins = [at for at, entry in enumerate(log) if entry == (False, rank)][::count]
        expected: list[list[Any]] = [[]]
        for entry in log[begins[1] : begins[2]]:
            if entry[0] in ("F", "B"):
                expected.append([])
            else:
                expected[-1].append(entry)
        kept = [[entry for entry in one if entry[0] or rank] for one in expected]
        kept = [[entry for entry in one if not entry[0] or rank < pp - 1] for one in kept]
        assert [list(one) for one in receives("2bw", pp, 1, count)[rank]] == kept


def test_two_versions_hold_as_many_micro_batches_as_1f1b() -> None:
    for pp, count in SIZES:
        assert in_flight(table("2bw", pp, 1, count, 3)).rank.tolist() == list(range(pp, 0, -1))


def test_a_step_that_takes_the_parameters_of_a_backward_to_come_is_found() -> None:
    made = table("2bw", 2, 1, 2, 3)
    rows = [list(row) for row in made.rows]
    rows[0] = [Action("F", 0, index) for index in range(5)] + [Action("B", 0, index) for index in range(2)]
    rows[0] += [Action("F", 0, 5), *(Action("B", 0, index) for index in range(2, 6))]
    assert validate(made.with_rows(rows)) == [
        "stage 0: step 2 begins with F4 of stage 0 before step 0 ends with B1 of stage 0, so that it would overwrite "
        "the parameters of that backward"
    ]


def test_only_steps_that_overlap_are_numbered_through() -> None:
    with pytest.raises(InputError, match="steps: 2, but schedule 1f1b ends with each step; use 1"):
        table("1f1b", 2, 1, 2, 2)
    with pytest.raises(InputError, match="3 a step on each data-parallel rank, but schedule 2bw with pp=4 needs at le"):
        table("2bw", 4, 1, 3)
