"""The vectorised rules say what job checking says; the space holds every legal layout once."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout import Layout
from meshwright.job.presets import preset
from meshwright.job.sync_section import SyncSection
from meshwright.plan.arrays import RECOMPUTES, SCHEDULES, Layouts, Work, stage_counts, to_layout
from meshwright.plan.legality import RULES, Modes, broken_rules, first_broken_rule
from meshwright.plan.reasons import _law
from meshwright.plan.space import Counts, Family, Space

MODEL: dict[str, Any] = {
    "vocabulary": 97, "hidden": 48, "layers": 6, "heads": 12, "kv_heads": 6, "ffn_hidden": 56, "max_positions": 64,
}  # fmt: skip


def _job(**train: bool) -> Job:
    return job_from_values(
        {
            "model": MODEL,
            "data": {"train": ["unused.txt"], "sequence_length": 30},
            "batch": {"global_size": 24},
            "train": train,
        }
    )


def _random_layouts(count: int, seed: int, work: Work) -> Layouts:
    """Legal and illegal ones: every column drawn by itself, half of the time from its plain value."""
    draw = np.random.default_rng(seed)

    def column(values: list[int], plain: int) -> Any:
        return np.where(draw.random(count) < 0.5, plain, draw.choice(values, count))

    dp, micro_batch = column([1, 2, 3, 4, 6, 24], 2), column([1, 2, 3, 5, 8, 12, 25], 1)
    return Layouts.make(
        dp=dp,
        shard=np.where(draw.random(count) < 0.6, dp, draw.choice([1, 2, 3, 4], count)),
        zero=column([0, 1, 2, 3], 1),
        tp=column([1, 2, 3, 4, 5, 6], 1),
        pp=column([1, 2, 3, 4, 6, 7], 2),
        virtual=column([1, 2, 3], 1),
        micro_batch=micro_batch,
        micro_batches=-(-work.global_batch // (micro_batch * dp)),
        schedule=column(list(range(len(SCHEDULES))), 1),
        recompute=column([0, 1, 2], 0),
        last_fewer=column([0, 1, 2, 4], 0),
    )


def _layout(layouts: Layouts, index: int, layers: int) -> Layout | None:
    """Every column as a field, also where it is illegal; None where the stage counts cannot be written."""
    row = {name: int(getattr(layouts, name)[index]) for name in layouts.names()}
    values: dict[str, Any] = {name: row[name] for name in ("dp", "shard", "zero", "tp", "pp", "virtual", "micro_batch")}
    stages = row["pp"] * row["virtual"] if row["pp"] > 1 else 1
    if row["last_fewer"]:
        counts = stage_counts(layers, stages, row["last_fewer"]) if stages > 1 else ()
        if not counts or min(counts) < 0:
            return None
        values["stages"] = counts
    return Layout(schedule=SCHEDULES[row["schedule"]], recompute=RECOMPUTES[row["recompute"]], **values)


@pytest.mark.parametrize("train", [{}, {"deterministic": True}, {"compile": True}], ids=["plain", "det", "compile"])
def test_the_masks_say_what_resolve_says(train: dict[str, bool]) -> None:
    job = _job(**train)
    work = Work.of(job)
    layouts = _random_layouts(1000, seed=len(train) + sum(map(len, train)), work=work)
    rules = first_broken_rule(work, layouts, Modes(**train))
    seen = {"legal": 0, "illegal": 0}
    for index in range(len(layouts)):
        layout = _layout(layouts, index, work.spec.layers)
        if layout is None:
            assert RULES[rules[index]] != "legal"
            continue
        if layout.stages is not None and layout.stage_count > work.spec.layers:
            continue  # empty stages, which a person may write and the search leaves out
        try:
            job.with_layout(layout).resolve(purpose="plan")
            legal = True
        except InputError as error:
            legal, said = False, str(error)
        assert legal == (rules[index] == 0), f"{layout}: {RULES[rules[index]]}; {'' if legal else said}"
        seen["legal" if legal else "illegal"] += 1
    assert min(seen.values()) > 80


@pytest.mark.parametrize("sync", [{"strategy": "server"}, {"strategy": "local"}, {"compression": "bf16"}], ids=str)
def test_what_is_searched_goes_with_how_ranks_agree(sync: dict[str, str]) -> None:
    wide = {"model": {**MODEL, "hidden": 480}, "optimizer": {"lr": 1e-3}}
    values = {"data": {"train": ["unused.txt"], "sequence_length": 30}, "batch": {"global_size": 24}}
    job = job_from_values({**wide, **values, "sync": sync})
    work = Work.of(job)
    space = Space(work, 6, 6, Modes.of(job))
    chunks = [chunk for family in space.families() for chunk in space.chunks(family, Counts())]
    found = {to_layout(chunk, index, work.spec.layers) for chunk in chunks for index in range(len(chunk))}
    assert len(found) > 3
    for layout in sorted(found, key=str)[:: max(1, len(found) // 200)]:
        job.with_layout(layout).resolve(purpose="plan")
    assert space.size().legal < Space(work, 6, 6).size().legal, "some are left out"


def test_what_forbids_a_family_begins_with_its_degree() -> None:
    """The table of rejected families puts families with the same rule into one line by that."""
    work = Work.of(_job())
    laws = [_law(work, Family(dp=1, tp=2, pp=2), rule).removeprefix("rule: ") for rule in RULES[1:]]
    named = [law for law in laws if re.match("(dp|tp|pp)=", law)]
    assert len(named) >= 7
    for law in named:
        assert re.match(r"(dp|tp|pp)=\d+ [a-z]", law), law


def test_every_rule_is_broken_by_some_layout() -> None:
    work = Work.of(_job())
    asking = _job().model_copy(update={"sync": SyncSection(compression="int8")})
    modes = Modes(deterministic=True, compile=True, servers=True, apart=True, compressed=True, asking=asking)
    broken = broken_rules(work, _random_layouts(20000, seed=1, work=work), modes)
    assert sorted(broken) == list(range(1, len(RULES)))
    assert [RULES[rule] for rule, mask in broken.items() if not mask.any()] == []


@pytest.mark.parametrize("devices", [1, 4])
def test_the_space_is_legal_distinct_and_counted(devices: int) -> None:
    job = _job()
    space = Space(Work.of(job), devices=devices, node=4)
    counts, texts = Counts(), []
    for family in space.families():
        for chunk in space.chunks(family, counts, size=100):
            assert len(chunk) <= 100
            assert (chunk.ranks == devices).all()
            assert (first_broken_rule(space.work, chunk) == 0).all()
            texts += [str(to_layout(chunk, index, space.work.spec.layers)) for index in range(len(chunk))]
    assert counts.legal == len(texts) == len(set(texts))
    assert len(texts) == space.size().legal
    for text in texts[:: max(1, len(texts) // 100)]:
        from meshwright.job.layout_text import parse_layout

        job.with_layout(parse_layout(text)).resolve(devices, purpose="plan")


def test_nothing_legal_is_missing_but_what_equals_another() -> None:
    """Against every legal combination of columns for four devices, drawn without any cleverness."""
    job = _job()
    work = Work.of(job)
    space = Space(work, devices=4, node=4)
    found = set()
    for family in space.families():
        for chunk in space.chunks(family, Counts()):
            names = ("dp", "tp", "pp", "schedule", "virtual", "last_fewer", "micro_batch", "zero", "shard", "recompute")
            chunk = chunk.take(chunk.recompute == 2)
            found |= set(zip(*(getattr(chunk, name).tolist() for name in names), strict=True))
    grid = np.array(np.meshgrid([1, 2, 4], [1, 2, 4], [1, 2, 4], range(7), [1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4, 5, 6,
        7, 8, 9, 10, 11, 12, 24], range(4), [1, 2, 4], [2], indexing="ij")).reshape(10, -1)  # fmt: skip
    dp, tp, pp, schedule, virtual, fewer, micro_batch, zero, shard, recompute = grid[:, np.prod(grid[:3], axis=0) == 4]
    columns = Layouts.make(
        dp=dp, tp=tp, pp=pp, schedule=schedule, virtual=virtual, last_fewer=fewer, micro_batch=micro_batch, zero=zero,
        shard=shard, recompute=recompute, micro_batches=-(-work.global_batch // (micro_batch * dp)),
    )  # fmt: skip
    legal = first_broken_rule(work, columns) == 0
    looped = np.isin(columns.schedule, [SCHEDULES.index("interleaved"), SCHEDULES.index("looped-bfs")])
    same = (columns.virtual == 1) & looped
    same |= (columns.zero > 0) & (columns.shard == 1)
    smaller = columns.with_columns(micro_batch=columns.micro_batch - 1)
    fewer_tokens = -(-work.global_batch // (np.maximum(smaller.micro_batch, 1) * columns.dp))
    same |= (columns.micro_batch > 1) & (fewer_tokens == columns.micro_batches)
    same |= columns.last_fewer > space.head_in_layers()
    kept = columns.take(legal & ~same)
    expected = set(zip(*(getattr(kept, name).tolist() for name in names), strict=True))
    # tp must divide the tokens of a micro-batch, so there the smallest size is the smallest legal one.
    by_unit = {row for row in expected | found if row[1] == 4}
    assert found - by_unit == expected - by_unit
    assert found & by_unit >= expected & by_unit


def test_placements_that_change_nothing_are_left_out() -> None:
    work = Work(spec=preset("llama2-7b"), sequence=4096, global_batch=64)
    one_node, two_nodes = (Space(work, devices=8, node=node) for node in (8, 4))
    orders = [
        {int(order) for family in space.families() for chunk in space.chunks(family, Counts()) for order in chunk.order}
        for space in (one_node, two_nodes)
    ]
    assert orders[0] == {0}
    assert len(orders[1]) > 1
    assert replace(one_node, node=4) == two_nodes
