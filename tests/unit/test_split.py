"""Unequal batches: how a batch is divided, how shares follow measured times, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.batch import micro_batches
from meshwright.data.loader import Loader
from meshwright.data.unequal import unequal_micro_batches
from meshwright.errors import InputError
from meshwright.job.split import Split, first_split, micro_batch_limits, resumed_split, split_into
from meshwright.plan.planner import plan
from meshwright.plan.predict import predict
from meshwright.prove.ledgers import hold_together
from meshwright.prove.pool import RankPool
from meshwright.prove.proof_data import ProofSamples
from meshwright.recovery.shrink import fewer_ranks
from meshwright.sync.batch_sizing import Line, Sample, fastest_possible, fit, share_out
from meshwright.train.resizing import Change, Sizer
from tests.small_jobs import small_job
from tests.unit.test_data_loader import job as corpus_job

splits = st.builds(
    Split,
    sequences=st.lists(st.integers(0, 20), min_size=1, max_size=5).map(tuple),
    micro_steps=st.integers(1, 6),
    unit=st.integers(1, 3),
    uniform=st.booleans(),
)


@given(splits)
def test_every_place_of_the_batch_is_in_one_micro_batch(split: Split) -> None:
    replicas = range(len(split.sequences))
    places = [place for replica in replicas for one in split.positions(replica) for place in one]
    assert sorted(places) == list(range(sum(split.sequences)))
    for replica in replicas:
        sizes, rows = split.sizes(replica), split.rows(replica)
        assert sum(sizes) == split.sequences[replica]
        assert len(sizes) == len(rows) == split.micro_steps
        assert all(row >= max(size, 1) and row % split.unit == 0 for size, row in zip(sizes, rows, strict=True))
        assert not split.uniform or len(set(rows)) == 1
        assert sum(rows) == split.rows_for(split.sequences[replica])


def test_equal_shares_are_what_each_rank_has_without_a_split() -> None:
    samples: Any = ProofSamples(97, 16, seed=3, masked=True)
    job = small_job("dp=4 micro_batch=2", batch={"global_size": 16, "split": [1, 1, 1, 1]})
    split = first_split(job)
    assert split is not None
    indices = np.arange(100, 116, dtype=np.int64)
    for rank in range(4):
        plain = micro_batches(samples, indices, 16, 2, rank, 4)
        shared = unequal_micro_batches(samples, indices, split, rank)
        assert [batch.tokens.tolist() for batch in plain] == [batch.tokens.tolist() for batch in shared]
        assert [batch.examples.tolist() for batch in plain] == [batch.examples.tolist() for batch in shared]


def test_limits_set_the_number_of_micro_batches() -> None:
    batch = {"global_size": 8, "split": [1, 3], "micro_batch_limits": [1, 2]}
    split = first_split(small_job("dp=2 micro_batch=8", batch=batch))
    assert split == Split((2, 6), 3)
    assert [split.sizes(replica) for replica in (0, 1)] == [(1, 1, 0), (2, 2, 2)]
    assert first_split(small_job("dp=2 micro_batch=8", batch={"split": [1, 3]})) == Split((2, 6), 1)
    piped = first_split(small_job("dp=2 pp=2 micro_batch=8", batch={"split": [1, 3]}))
    assert piped == Split((2, 6), 2, uniform=True)  # 1F1B needs as many micro-batches as stages


def rows_of(loaders: Sequence[Loader], step: int) -> list[list[int]]:
    """The sequences of a step over all ranks, in the order of the global batch."""
    found = [
        (int(example), tokens)
        for loader in loaders
        for batch in loader.batches(step)
        for example, tokens in zip(batch.examples, batch.tokens.tolist(), strict=True)
        if example >= 0
    ]
    assert [example for example, _ in sorted(found)] == list(range(len(found)))
    return [tokens for _, tokens in sorted(found)]


def test_changing_shares_change_no_sample(tmp_path: Path) -> None:
    """Also not where a batch was made ahead under other shares, nor after a resume with other shares."""
    plain = corpus_job(tmp_path)
    alone = Loader(plain, 0, 1)
    layout = plain.layout.model_copy(update={"dp": 3})
    batch = plain.batch.model_copy(update={"split": (1, 2, 3)})
    job = plain.model_copy(update={"layout": layout, "batch": batch})
    ranks = [Loader(job, rank, 3) for rank in range(3)]
    divisions = [(1, 2, 3), (1, 2, 3), (0, 6, 0), (2, 2, 2), (4, 1, 1)]
    for step, sequences in enumerate(divisions):
        for loader in ranks:
            loader.split = split_into(job, sequences)
        assert rows_of(ranks, step) == rows_of([alone], step)
    resumed = [Loader(job, rank, 3) for rank in range(3)]
    for loader in resumed:
        loader.resume(4, ranks[0].cursor(4))
    assert rows_of(resumed, 4) == rows_of([alone], 4)
    whole = [batch.examples.tolist() for made in alone.validation() for batch in made]
    shared = [batch.examples.tolist() for loader in ranks for made in loader.validation() for batch in made]
    assert sum(number >= 0 for rows in shared for number in rows) == sum(n >= 0 for rows in whole for n in rows)
    for loader in (alone, *ranks, *resumed):
        loader.close()


def test_saved_shares_are_taken_up_where_they_fit() -> None:
    job = small_job("dp=2 micro_batch=4", batch={"split": "auto"})
    first = first_split(job)
    assert first == Split((4, 4), 1)
    assert resumed_split(job, [2, 6], first) == Split((2, 6), 2)
    assert resumed_split(job, None, first) is first
    assert resumed_split(job, [2, 2, 4], first) is first
    by_hand = small_job("dp=2 micro_batch=4", batch={"split": [1, 1]})
    assert resumed_split(by_hand, [2, 6], first) is first


# -- shares from times ------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(0, 6),
    st.data(),
)
def test_no_division_is_faster(increments: list[list[int]], total: int, data: st.DataObject) -> None:
    """Against all divisions, for any times that never fall."""
    times = [list(itertools.accumulate(each)) for each in increments]
    most = [data.draw(st.integers(0, 6)) for _ in times]
    if sum(most) < total:
        with pytest.raises(ValueError, match="can take"):
            share_out(total, [each.__getitem__ for each in times], most)
        return
    found = share_out(total, [each.__getitem__ for each in times], most)
    assert sum(found) == total and all(one <= limit for one, limit in zip(found, most, strict=True))
    every = [one for one in itertools.product(*(range(limit + 1) for limit in most)) if sum(one) == total]
    slowest: Callable[[Sequence[int]], int] = lambda taken: max(  # noqa: E731
        each[count] for each, count in zip(times, taken, strict=True)
    )
    assert slowest(found) == min(map(slowest, every))


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_the_bound_is_below_every_division(lines: list[tuple[float, float]], total: int) -> None:
    fitted = [Line(start, row) for start, row in lines]
    found = share_out(total, [lambda n, line=line: line.seconds(1, n) for line in fitted], [total] * len(fitted))
    slowest = max(line.seconds(1, count) for line, count in zip(fitted, found, strict=True))
    assert fastest_possible(total, 1, fitted) <= slowest * (1 + 1e-9)


def test_a_line_is_found_and_one_slow_step_does_not_bend_it() -> None:
    exact = [Sample(2, rows, 2 * 0.5 + 0.25 * rows) for rows in (4, 4, 4, 8, 8, 8)]
    for samples in (exact, [*exact, Sample(2, 8, 60.0)]):
        line = fit(samples)
        assert (line.start, line.row) == pytest.approx((0.5, 0.25))
        assert line.overhead == pytest.approx(2.0)
    assert fit([Sample(1, 4, 2.0)] * 3) == Line(0.0, 0.5)  # one kind of step: no fixed cost, unless it is known
    assert fit([Sample(1, 4, 3.0)] * 3, overhead=2.0) == Line(1.0, 0.5)
    assert fit([Sample(1, 8, 5.0), Sample(1, 9, 5.1)], overhead=2.0).overhead == pytest.approx(2.0)  # too much alike
    falling = fit([Sample(1, 4, 2.0), Sample(1, 8, 1.0)])
    assert falling.start == 0.0 and falling.row > 0
    with pytest.raises(ValueError, match="at least one"):
        fit([])


def drive(
    sizer: Sizer, speeds: Callable[[int], Sequence[float]], steps: int, noise: float = 0.0, start: float = 0.3
) -> list[Change]:
    """Replicas whose step takes ``start k + n`` times their speed's inverse."""
    changes = []
    for step in range(steps):
        split = sizer.split
        wobble = noise * (-1.0) ** step
        times = [
            (start * split.micro_steps + sum(split.rows(replica))) / speed * (1 + wobble * (replica % 2))
            for replica, speed in enumerate(speeds(step))
        ]
        change = sizer.after_step(times)
        if change is not None:
            changes.append(change)
    return changes


def sizer_of(layout: str, size: int, **batch: Any) -> Sizer:
    job = small_job(layout, batch={"global_size": size, "split": "auto", **batch})
    split = first_split(job)
    assert split is not None
    return Sizer(job, split)


def test_shares_settle_at_the_best_and_follow_a_change_of_speed_within_20_steps() -> None:
    sizer = sizer_of("dp=3 micro_batch=8", 24)
    drive(sizer, lambda step: (2.0, 1.0, 1.0), 20)
    assert sizer.split.sequences == (12, 6, 6)
    assert max(sizer.split.rows(0)) <= 8
    assert drive(sizer, lambda step: (2.0, 1.0, 1.0), 50) == []
    drive(sizer, lambda step: (1.0, 1.0, 2.0), 20)
    assert sizer.split.sequences == (6, 6, 12)


def test_small_differences_and_noise_change_nothing() -> None:
    sizer = sizer_of("dp=2 micro_batch=16", 32)
    assert drive(sizer, lambda step: (1.0, 1.03), 60, noise=0.04) == []
    assert sizer.split.sequences == (16, 16)


def test_costly_micro_batches_are_remembered_and_shares_do_not_swing() -> None:
    """Two micro-batches of unequal shares are slower here than one of equal ones, which only a trial can show."""
    sizer = sizer_of("dp=3 micro_batch=8", 24)
    changes = drive(sizer, lambda step: (2.0, 1.0, 1.0), 100, start=4.0)
    assert [change.after.sequences for change in changes] == [(12, 6, 6), (8, 8, 8)]


def test_unknown_times_do_not_count() -> None:
    sizer = sizer_of("dp=2 micro_batch=4", 8)
    assert all(sizer.after_step([0.0, 1.0]) is None for _ in range(30))
    assert sizer.split.sequences == (4, 4)


def test_memory_limits_hold_whatever_the_speed() -> None:
    sizer = sizer_of("dp=2 micro_batch=8", 16, micro_batch_limits=[2, 8])
    drive(sizer, lambda step: (9.0, 1.0), 40)
    assert max(sizer.split.rows(0)) <= 2 and max(sizer.split.rows(1)) <= 8
    assert sizer.split.sequences[0] > sizer.split.sequences[1]


def test_a_pipeline_keeps_to_what_its_schedule_runs() -> None:
    sizer = sizer_of("dp=2 pp=2 schedule=interleaved micro_batch=4", 16)
    drive(sizer, lambda step: (3.0, 1.0), 30)
    assert sizer.split.sequences[0] > sizer.split.sequences[1]
    assert sizer.split.micro_steps % 2 == 0
    assert max(sizer.split.rows(0)) <= 4 == micro_batch_limits(sizer.job)[0]


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "batch", "others", "sentence"),
    [
        (
            "dp=4 micro_batch=1",
            {"split": [1, 3]},
            {},
            "batch.split: 1,3 has 2 shares, but dp=4 (given); give 4, one for each data-parallel rank",
        ),
        (
            "dp=2 micro_batch=1",
            {"split": [1, 2]},
            {},
            "batch.split: 1,2 adds up to 3, which does not divide batch.global_size=8; use shares that add up to 8 or "
            "4 or 2 or 1, or a global_size that 3 divides",
        ),
        (
            "dp=2 micro_batch=1",
            {"split": [0, 0]},
            {},
            "batch.split: 0,0 gives no rank anything; use shares of which one is at least 1",
        ),
        (
            "dp=2 micro_batch=1",
            {"micro_batch_limits": [1, 2]},
            {},
            'batch.micro_batch_limits: 1,2 is not used without batch.split; leave it out, or give split = "auto" or '
            "shares",
        ),
        (
            "dp=2 micro_batch=1",
            {"split": "auto", "micro_batch_limits": [1]},
            {},
            "batch.micro_batch_limits: 1 has 1 entries, but dp=2 (given); give 2, one for each data-parallel rank",
        ),
        (
            "dp=2 tp=2 micro_batch=2",
            {"split": "auto", "micro_batch_limits": [1, 2]},
            {"data": {"sequence_length": 15}},
            "batch.micro_batch_limits: 1,2 with data.sequence_length=15 has micro-batches whose tokens tp=2 does not "
            "divide; use multiples of 2",
        ),
        (
            "dp=2 micro_batch=1",
            {"split": [1, 3]},
            {"train": {"deterministic": True}},
            "batch.split: 1,3 cuts the batch into micro-batches of unequal size, but train.deterministic=true needs "
            "one size, so that dp=2 changes no bit; leave split out, or use deterministic=false",
        ),
        (
            "dp=2 micro_batch=1",
            {"split": "auto"},
            {"sync": {"strategy": "local"}},
            "batch.split: auto divides each global batch over ranks that sum in every step, which they do not with "
            "sync.strategy=local; leave split out, or use strategy=all-reduce",
        ),
        (
            "dp=2 micro_batch=1",
            {"split": [1, -3]},
            {},
            "batch.split: -3 at position 1 is not allowed",
        ),
        ("dp=2 micro_batch=1", {"split": "outo"}, {}, 'batch.split: "outo" must be'),
    ],
)
def test_bad_input_is_one_sentence(
    layout: str, batch: dict[str, Any], others: dict[str, dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        small_job(layout, batch=batch, **others)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 and lines[0].startswith(sentence), lines


def test_an_empty_list_is_no_split() -> None:
    assert small_job("dp=2 micro_batch=1", batch={"split": [], "micro_batch_limits": []}).batch.split is None


def test_plans_and_ledgers_of_shares_by_hand_are_refused() -> None:
    job = small_job("dp=2 micro_batch=2", batch={"split": [1, 3]})
    with pytest.raises(InputError, match=r"^batch.split: 1,3 makes the replicas unequal, but the ledger is predicted"):
        predict(job)
    with pytest.raises(InputError, match=r"^batch.split: 1,3 makes the replicas unequal"):
        hold_together(RankPool(2), job, "", [0])
    with pytest.raises(InputError, match=r"^batch.split: 1,3 is of one layout, but layouts are planned with equal"):
        plan(job, "1x2 A100-SXM4-80GB")
    limited = small_job("dp=2 micro_batch=2", batch={"split": "auto", "micro_batch_limits": [2, 1]})
    with pytest.raises(InputError, match=r"^batch.micro_batch_limits: 2,1 is of one layout"):
        plan(limited, "1x2 A100-SXM4-80GB")
    assert predict(small_job("dp=2 micro_batch=2", batch={"split": "auto"})).ranks


def test_a_run_goes_on_with_fewer_replicas_than_it_had_shares() -> None:
    job = small_job("dp=4 micro_batch=4", batch={"split": [1, 1, 1, 1], "micro_batch_limits": [4, 2, 4, 4]})
    smaller = fewer_ranks(job, 3)
    assert smaller is not None and smaller.layout.dp == 3
    assert (smaller.batch.split, smaller.batch.micro_batch_limits, smaller.layout.micro_batch) == ("auto", None, 2)
    assert first_split(smaller) == Split((3, 3, 2), 2)
    plain = fewer_ranks(small_job("dp=4 micro_batch=2"), 3)
    assert plain is not None and plain.batch.split is None
