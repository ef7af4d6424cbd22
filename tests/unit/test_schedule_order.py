"""Schedule tables: exactly the order in which torch's runtime computes, and every planted error found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_rules import build

from meshwright.errors import InputError
from meshwright.job.layout import LOOPED_SCHEDULES, V_SCHEDULES, Layout
from meshwright.job.schedule_rules import micro_batch_rule
from meshwright.parallel.pipeline import SCHEDULE_CLASSES
from meshwright.schedule.needs import boundaries, leaves_after
from meshwright.schedule.table import Action, Table, stages_of, table
from meshwright.schedule.validate import validate

Rows = list[list[Action]]
SCHEDULES = tuple(SCHEDULE_CLASSES)
"""Those that torch's runtime works off."""
SMALL = [
    (schedule, pp, virtual, micro_batches)
    for schedule, pp, virtual, micro_batches in product(SCHEDULES, (2, 3, 4), (1, 2, 3), (*range(1, 9), 12))
    if micro_batch_rule(schedule, pp, virtual, micro_batches) is None
]


def torch_order(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank computes, from the very list of actions torch's runtime works off (messages left out)."""
    plan = build(schedule, pp, virtual, micro_batches, 0).pipeline_order_with_comms
    return tuple(
        tuple(
            Action(part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in plan[rank]
            for part in (action.sub_actions or (action,))
            if part.computation_type.value in tuple("FBIW")
        )
        for rank in range(pp)
    )


def held_forwards(schedule: str, pp: int, virtual: int, micro_batches: int) -> set[Action]:
    """Forwards whose output torch's runtime sends only after the backward that is paired with them."""
    plan = build(schedule, pp, virtual, micro_batches, 0).pipeline_order_with_comms
    pairs = [action.sub_actions for row in plan.values() for action in row if action.sub_actions]
    return {Action("F", forward.stage_index, forward.microbatch_index) for forward, _ in pairs}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_are_what_torch_runs(schedule: str) -> None:
    sizes = [one for one in SMALL if one[0] == schedule]
    assert len(sizes) >= 10
    for one in sizes:
        assert table(*one).rows == torch_order(*one), one


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Any schedule at any legal size up to 9 ranks, 4 stages a rank and about 40 micro-batches."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(2, 9))
    if schedule in V_SCHEDULES:
        virtual = 2
    else:
        virtual = draw(st.integers(1, 4)) if schedule in LOOPED_SCHEDULES else 1
    legal = [count for count in range(1, 41) if micro_batch_rule(schedule, pp, virtual, count) is None]
    return schedule, pp, virtual, draw(st.sampled_from(legal))


@settings(max_examples=25)
@given(sizes())
def test_any_table_is_what_torch_runs(one: tuple[str, int, int, int]) -> None:
    assert table(*one).rows == torch_order(*one)
    assert validate(table(*one)) == []


class RecordingStage(torch.nn.Module):
    """Stands in for a stage in torch's runtime: writes down what it is told to do and does nothing."""

    def __init__(self, index: int, rank: int, pp: int, count: int, log: list[Action | str]) -> None:
        super().__init__()
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, count, rank, pp
        self.is_first, self.is_last, self.submod, self.log = index == 0, index == count - 1, torch.nn.Identity(), log

    def forward_one_chunk(self, index: int, *_: object, **__: object) -> None:
        self.log.append(Action("F", self.stage_index, index))

    def backward_one_chunk(self, index: int, *, full_backward: bool, **_: object) -> None:
        self.log.append(Action("B" if full_backward else "I", self.stage_index, index))

    def backward_weight_one_chunk(self, index: int, **_: object) -> None:
        self.log.append(Action("W", self.stage_index, index))

    def get_fwd_send_ops(self, index: int) -> list[object]:
        self.log.append(f"sends F{index} of stage {self.stage_index}")
        return []

    def get_bwd_send_ops(self, index: int) -> list[object]:
        self.log.append(f"sends B{index} of stage {self.stage_index}")
        return []

    def _nothing(self, *_: object) -> list[object]:
        return []

    get_fwd_recv_ops = get_bwd_recv_ops = get_local_bwd_output = _nothing
    set_local_fwd_input = set_local_bwd_input = perform_reduce_grad = _nothing


def recorded(schedule: str, pp: int, virtual: int, micro_batches: int, rank: int) -> list[Action | str]:
    """What torch's runtime has the stages of one rank do, and send, in a step."""
    log: list[Action | str] = []
    indices = stages_of(schedule, pp, virtual, rank)
    stages: list[Any] = [RecordingStage(index, rank, pp, pp * virtual, log) for index in indices]
    runtime = SCHEDULE_CLASSES[schedule](stages, micro_batches, lambda output, target: output, scale_grads=False)
    runtime.rank = rank
    runtime._stages_forward_initialized = runtime._stages_backward_initialized = True
    runtime._step_microbatches([()] * micro_batches, None, [None] * micro_batches, [], return_outputs=False)
    return log


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_are_what_the_runtime_does(schedule: str) -> None:
    """The runtime itself, run on stages that only record: what is computed, and when each result is sent."""
    for one in [one for one in SMALL if one[0] == schedule and one[1] in (2, 4)][::5]:
        made = table(*one)
        crossed, leaves = boundaries(made), leaves_after(made)
        for rank, row in enumerate(made.rows):
            expected: list[Action | str] = []
            first = int(made.starts[rank])
            for place, action in enumerate(row, start=first):
                expected.append(action)
                for sender in (place - 1, place):
                    if sender >= first and crossed[sender] >= 0 and leaves[sender] == place:
                        kind, stage, index = row[sender - first]
                        expected.append(f"sends {'F' if kind == 'F' else 'B'}{index} of stage {stage}")
            assert recorded(*one, rank) == expected, (one, rank)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (3, 8), (4, 8), (5, 10), (6, 17)])
def test_outputs_are_held_where_torch_sends_them_late(pp: int, micro_batches: int) -> None:
    made = table("dualpipev", pp, 2, micro_batches)
    actions = [action for row in made.rows for action in row]
    assert {action for action, held in zip(actions, made.held, strict=True) if held} == held_forwards(
        "dualpipev", pp, 2, micro_batches
    )


def test_one_forward_one_backward_by_hand() -> None:
    """Derived from the paper (arXiv:1806.03377, figure 4), not from any program: three ranks, four micro-batches."""
    words = ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    for rank, row in enumerate(table("1f1b", 3, 1, 4).rows):
        assert " ".join(f"{kind}{index}" for kind, _, index in row) == words[rank]
        assert {action.stage for action in row} == {rank}


def test_without_a_pipeline_every_micro_batch_goes_forward_and_back() -> None:
    for schedule in SCHEDULES:
        virtual = Layout(pp=2, schedule=schedule).virtual_stages
        (row,) = table(schedule, 1, virtual, 3).rows
        assert row == tuple(Action(kind, 0, index) for index in range(3) for kind in ("F", "B"))


@pytest.mark.parametrize("one", SMALL[::7], ids=str)
def test_stages_stand_where_the_layout_has_them(one: tuple[str, int, int, int]) -> None:
    schedule, pp, virtual, _ = one
    layout, made = Layout(schedule=schedule, pp=pp, virtual=virtual), table(*one)
    for rank, row in enumerate(made.rows):
        assert made.stages_of(rank) == layout.stages_of(rank)
        assert {action.stage for action in row} == set(layout.stages_of(rank))


def test_sizes_a_schedule_cannot_run_are_refused() -> None:
    with pytest.raises(InputError, match="needs at least 4"):
        table("1f1b", 4, 1, 3)
    with pytest.raises(InputError, match="at least 1"):
        table("gpipe", 1, 1, 0)


def swap(rows: Rows, rank: int, first: int, second: int) -> None:
    row = rows[rank]
    row[first], row[second] = row[second], row[first]


def find(rows: Rows, action: Action) -> tuple[int, int]:
    return next((rank, row.index(action)) for rank, row in enumerate(rows) if action in row)


def drop_forward(rows: Rows) -> None:
    rank, place = find(rows, Action("F", 1, 1))
    del rows[rank][place]


def drop_weight_part(rows: Rows) -> None:
    rank, place = find(rows, Action("W", 1, 1))
    del rows[rank][place]


def double(rows: Rows) -> None:
    rank, place = find(rows, Action("F", 2, 0))
    rows[rank].insert(place, Action("F", 2, 0))


def backward_first(rows: Rows) -> None:
    rank, place = find(rows, Action("F", 3, 0))
    swap(rows, rank, place, find(rows, Action("I", 3, 0))[1])


def weight_before_input(rows: Rows) -> None:
    rank, place = find(rows, Action("I", 2, 2))
    swap(rows, rank, place, find(rows, Action("W", 2, 2))[1])


def gradients_out_of_order(rows: Rows) -> None:
    rank, place = find(rows, Action("W", 3, 2))
    swap(rows, rank, place, find(rows, Action("W", 3, 3))[1])


def wrong_rank(rows: Rows) -> None:
    rank, place = find(rows, Action("F", 3, 1))
    rows[1 - rank].append(rows[rank].pop(place))


def no_such_stage(rows: Rows) -> None:
    rows[0].append(Action("F", 4, 0))


def both_ways_back(rows: Rows) -> None:
    rank, place = find(rows, Action("W", 2, 1))
    rows[rank].insert(place, Action("B", 2, 1))


PLANTED: list[tuple[Callable[[Rows], None], str]] = [
    (drop_forward, "F1 of stage 1: 0 times"),
    (drop_weight_part, "backward of micro-batch 1 in stage 1: B 0, I 1, W 0 times"),
    (double, "F0 of stage 2: 2 times"),
    (backward_first, "micro-batch 0 in stage 3: B or I before its own F"),
    (weight_before_input, "micro-batch 2 in stage 2: W before its own I"),
    (gradients_out_of_order, "stage 3: the gradient of micro-batch 3 comes before that of 2"),
    (wrong_rank, "F1 of stage 3 on rank 0: rank 1 holds that stage"),
    (no_such_stage, "F0 of stage 4: there are stages 0 to 3"),
    (both_ways_back, "backward of micro-batch 1 in stage 2: B 1, I 1, W 1 times"),
]


@pytest.mark.parametrize(("plant", "sentence"), PLANTED, ids=lambda one: getattr(one, "__name__", ""))
def test_planted_errors_are_found(plant: Callable[[Rows], None], sentence: str) -> None:
    good = table("zero-bubble", 2, 2, 4)
    rows = [list(row) for row in good.rows]
    assert validate(good.with_rows(rows)) == []
    plant(rows)
    assert sentence in "\n".join(validate(good.with_rows(rows)))


def test_a_circle_of_waiting_ranks_is_found() -> None:
    """Rank 0 wants its gradient before it has sent the forward that rank 1 waits for; all else is in order."""
    good = table("1f1b", 2, 1, 2)
    assert [" ".join(f"{kind}{index}" for kind, _, index in row) for row in good.rows] == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    rows: Rows = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)],
        [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)],
    ]
    found = validate(good.with_rows(rows))
    assert found == [
        "rank 0 waits for ever at B0 of stage 0: it needs B0 of stage 1, which waits behind F1 of stage 1 on rank 1",
        "rank 1 waits for ever at F1 of stage 1: it needs F1 of stage 0, which waits behind B0 of stage 0 on rank 0",
    ]


@settings(max_examples=30)
@given(sizes(), st.data())
def test_any_dropped_or_doubled_action_is_found(one: tuple[str, int, int, int], data: st.DataObject) -> None:
    good = table(*one)
    rows = [list(row) for row in good.rows]
    row = data.draw(st.sampled_from(rows))
    place = data.draw(st.integers(0, len(row) - 1))
    if data.draw(st.booleans()):
        del row[place]
    else:
        row.insert(data.draw(st.integers(0, len(row))), row[place])
    assert validate(good.with_rows(rows))


def plays_to_its_end(good: Table, rows: Rows) -> bool:
    """The plainest check there is: play one action at a time, gradients of a stage in order."""
    done: set[Any] = set()
    gradients = [0] * good.stage_count
    position = [0] * good.pp
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                kind, stage, index = row[position[rank]]
                last = stage == good.stage_count - 1
                needed = {
                    "F": [("F", stage - 1, index)] if stage else [],
                    "W": [("B", stage, index)],
                }.get(kind, [("F", stage, index), *([] if last else [("B", stage + 1, index)])])
                if not all(one in done for one in needed):
                    break
                if kind in "BW":
                    if gradients[stage] != index:
                        return False
                    gradients[stage] += 1
                done.add(("B" if kind in "BI" else kind, stage, index))
                position[rank] += 1
                moved = True
    return all(place == len(row) for place, row in zip(position, rows, strict=True))


@settings(max_examples=60)
@given(sizes(), st.data())
def test_swapped_actions_are_judged_as_by_plain_play(one: tuple[str, int, int, int], data: st.DataObject) -> None:
    good = table(*one)
    rows = [list(row) for row in good.rows]
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, good.pp - 1))
        first, second = data.draw(st.tuples(*[st.integers(0, len(rows[rank]) - 1)] * 2))
        swap(rows, rank, first, second)
    assert (validate(good.with_rows(rows)) == []) == plays_to_its_end(good, rows)
