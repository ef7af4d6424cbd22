"""Every number of micro-batches, ranks and stages: the schedule runs to its end, or is refused in one sentence."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.job.layout import V_SCHEDULES, Layout
from meshwright.job.schedule_rules import legal_micro_batches, micro_batch_rule
from meshwright.parallel.pipeline import SCHEDULE_CLASSES

SCHEDULES = tuple(SCHEDULE_CLASSES)


def build(schedule: str, pp: int, virtual: int, micro_batches: int, rank: int) -> Any:
    """Torch's schedule as rank ``rank`` would have it, on stand-ins for the stages."""
    if schedule in V_SCHEDULES and virtual == 2:
        indices = (rank, 2 * pp - 1 - rank)
    else:
        indices = tuple(range(rank, pp * virtual, pp))
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=pp * virtual, group_size=pp, group_rank=rank, submod=torch.nn.Identity(),
            is_first=index == 0, is_last=index == pp * virtual - 1,
        )
        for index in indices
    ]  # fmt: skip
    return SCHEDULE_CLASSES[schedule](stages, micro_batches, lambda output, target: output, scale_grads=False)


def simulate(schedule: Any) -> dict[int, list[tuple[str, int]]]:
    """Play all ranks' actions; messages between two ranks arrive in the order they were sent.

    Returns what each stage computed, in order. Raises AssertionError when it cannot end.
    """
    rank_of = schedule.stage_index_to_group_rank
    actions = {
        rank: [part for action in row for part in (action.sub_actions or (action,))]
        for rank, row in schedule.pipeline_order_with_comms.items()
    }
    last = schedule._num_stages - 1
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    expected: dict[tuple[int, int], list[Any]] = defaultdict(list)
    done: set[Any] = set()
    computed: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def arrived(rank: int, source_stage: int, message: tuple[str, int, int]) -> bool:
        kind, _, micro_batch = message
        if rank_of[source_stage] == rank:
            return (kind, source_stage, micro_batch) in done
        channel = (rank_of[source_stage], rank)
        place = expected[channel].index(message)
        if len(sent[channel]) <= place:
            return False
        assert sent[channel][place] == message, f"{sent[channel][place]} arrives where {message} is received"
        return True

    def perform(rank: int, action: Any) -> bool:
        kind, stage, index = action.computation_type.value, action.stage_index, action.microbatch_index
        if kind == "SEND_F":
            sent[rank, rank_of[stage + 1]].append(("F", stage + 1, index))
        elif kind == "SEND_B":
            sent[rank, rank_of[stage - 1]].append(("B", stage - 1, index))
        elif kind == "RECV_F":
            expected[rank_of[stage - 1], rank].append(("F", stage, index))
        elif kind == "RECV_B":
            expected[rank_of[stage + 1], rank].append(("B", stage, index))
        elif kind in ("F", "B", "I", "W"):
            if kind == "F" and stage > 0 and not arrived(rank, stage - 1, ("F", stage, index)):
                return False
            if kind in ("B", "I"):
                assert ("F", stage, index) in done
                if stage < last and not arrived(rank, stage + 1, ("B", stage, index)):
                    return False
            if kind == "W":
                assert ("I", stage, index) in done
            computed[stage].append((kind, index))
            done.add((kind, stage, index))
            if kind == "I":
                done.add(("B", stage, index))
        return True

    position = dict.fromkeys(actions, 0)
    moved = True
    while moved:
        moved = False
        for rank, row in actions.items():
            while position[rank] < len(row) and perform(rank, row[position[rank]]):
                position[rank] += 1
                moved = True
    stuck = {rank: row[position[rank]] for rank, row in actions.items() if position[rank] < len(row)}
    assert not stuck, f"waiting for ever: {stuck}"
    assert sent == expected
    return computed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_size_runs_or_is_refused(schedule: str) -> None:
    for pp, virtual, micro_batches in product(range(2, 7), range(1, 7), (*range(1, 7), 11, 12)):
        refused = micro_batch_rule(schedule, pp, virtual, micro_batches)
        where = f"pp={pp} virtual={virtual} micro-batches={micro_batches}"
        if refused is not None:
            assert str(virtual) in refused or str(micro_batches) in refused, where
            assert "use " in refused, where
            continue
        computed = simulate(build(schedule, pp, virtual, micro_batches, rank=pp - 1))
        assert sorted(computed) == list(range(pp * virtual)), where
        for stage, actions in computed.items():
            forwards = [index for kind, index in actions if kind == "F"]
            gradients = [index for kind, index in actions if kind in ("B", "W")]
            assert forwards == list(range(micro_batches)), where
            # Gradients are added in this order: it must be the same for every schedule.
            assert gradients == list(range(micro_batches)), f"{where} stage {stage}: {actions}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_refusals_are_those_of_torch(schedule: str) -> None:
    for pp, virtual, micro_batches in product(range(2, 7), range(1, 4), range(1, 13)):
        if micro_batch_rule(schedule, pp, virtual, micro_batches) is None:
            continue
        if schedule in ("gpipe", "1f1b") or (schedule in V_SCHEDULES and virtual != 2):
            continue  # one stage a rank, folds of two: ours to say
        with pytest.raises(ValueError, match="microbatches"):
            build(schedule, pp, virtual, micro_batches, 0)


def test_stages_stand_where_the_layout_says() -> None:
    for schedule in SCHEDULES:
        for pp in (2, 3, 4):
            layout = Layout(pp=pp, schedule=schedule)
            plan = build(schedule, pp, layout.virtual_stages, 2 * pp, 0)
            for rank in range(pp):
                for stage in layout.stages_of(rank):
                    assert plan.stage_index_to_group_rank[stage] == rank


def test_the_sentences() -> None:
    assert micro_batch_rule("1f1b", 1, 1, 1) is None
    assert micro_batch_rule("1f1b", 4, 1, 3) == (
        "micro-batches: 3 a step on each data-parallel rank, but schedule 1f1b with pp=4 needs at least 4; "
        "use 4 or more (a larger global batch, a smaller micro-batch or fewer data-parallel ranks)"
    )
    assert micro_batch_rule("interleaved", 2, 2, 5) == (
        "micro-batches: 5 a step on each data-parallel rank do not divide into 2 equal rounds, "
        "which schedule interleaved with pp=2 needs; use 4 or 6"
    )
    assert micro_batch_rule("zbv", 2, 3, 4) == (
        "virtual: 3 stages a rank, but schedule zbv folds exactly 2 onto each; use virtual=2"
    )
    assert micro_batch_rule("gpipe", 2, 2, 4) == (
        "virtual: 2 stages a rank, but schedule gpipe runs 1; "
        "use virtual=1 or one of the schedules interleaved, looped-bfs, zero-bubble"
    )


def test_legal_counts_are_legal_and_the_nearest() -> None:
    for pp, count in product(range(2, 7), range(1, 40)):
        legal = legal_micro_batches("zero-bubble", pp, count)
        assert all(micro_batch_rule("zero-bubble", pp, 2, each) is None for each in legal)
        between = set(range(legal[0] + 1, legal[-1])) - {count}
        assert all(micro_batch_rule("zero-bubble", pp, 2, each) is not None for each in between)


def test_layers_each_on_one_stage() -> None:
    for layers, pp in product(range(1, 41), range(1, 9)):
        stages = Layout(pp=pp, schedule="gpipe").stage_layers(layers)
        assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert [len(stage) for stage in Layout(pp=4).stage_layers(30)] == [8, 8, 7, 7]
    assert [len(stage) for stage in Layout(pp=3).stage_layers(10)] == [4, 3, 3]
    for schedule in SCHEDULES:
        layout = Layout(pp=4, schedule=schedule)
        held = sorted(stage for rank in range(4) for stage in layout.stages_of(rank))
        assert held == list(range(layout.stage_count))
