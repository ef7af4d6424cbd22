"""The search knows how ranks agree: its pick is the best of simulating everything, and goes with the job's [sync]."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.job.job import Job, load_job
from meshwright.job.layout_text import parse_layout
from meshwright.plan.arrays import Layouts, Work, from_layouts, to_layout
from meshwright.plan.evaluate import evaluate
from meshwright.plan.legality import Modes
from meshwright.plan.planner import plan
from meshwright.plan.refine import refine
from meshwright.plan.space import Counts, Space
from tests.slow_cluster import slow_cluster

DEVICES = slow_cluster(2, 2, bandwidth=50e6)
WAYS = [
    ("compression=int8",),
    ("compression=powersgd",),
    ("strategy=diloco", "period=20"),
    ("strategy=diloco", "period=20", "compression=int8"),
    ("strategy=local", "period=8"),
]


def job(*sync: str, clip: str = "1e9") -> Job:
    settings = [f"sync.{one}" for one in sync]
    return load_job("examples/quickstart.toml", [*settings, f"optimizer.clip_norm={clip}"], "auto")


def everything(one: Job) -> Layouts:
    """All layouts of the space that fit."""
    work = Work.of(one)
    space = Space(work, 4, 2, Modes.of(one))
    layouts = Layouts.join([chunk for family in space.families() for chunk in space.chunks(family, Counts())])
    return layouts.take(evaluate(work, DEVICES, layouts).fits)


@pytest.mark.parametrize("way", WAYS)
def test_the_pick_is_the_best_of_simulating_everything(way: tuple[str, ...]) -> None:
    one = job(*way)
    work, layouts = Work.of(one), everything(job(*way))
    times = refine(work, DEVICES, layouts)
    found = plan(one, DEVICES, top=1).layouts[0]
    assert found.step_time_s == pytest.approx(float(times.min()))
    chosen = from_layouts([parse_layout(found.layout)], work)
    assert float(refine(work, DEVICES, chosen)[0]) == pytest.approx(float(times.min()))


@pytest.mark.parametrize("way", WAYS)
def test_ranked_as_if_sums_were_plain_the_pick_would_be_another(way: tuple[str, ...]) -> None:
    one, layouts = job(*way), everything(job(*way))
    times = refine(Work.of(one), DEVICES, layouts)
    plain = refine(Work.of(job()), DEVICES, layouts)
    assert times[np.argmin(plain)] > 1.02 * times.min()


@pytest.mark.parametrize(
    "way",
    [
        *WAYS, ("compression=dgc",), ("compression=one-bit-adam", "compression_warmup_steps=5"), ("strategy=server",),
        ("compression=int8", "compression_level=slow"), ("strategy=easgd", "period=4"),
        ("compression=int8", "compression_level=slow", "node_size=2"),
        ("strategy=local", "period=4", "group_size=2", "group_period=2"), ("algorithm=hierarchical", "node_size=2"),
    ],
)  # fmt: skip
def test_every_layout_of_the_space_goes_with_the_jobs_sync_and_none_that_does_is_left_out(way: tuple[str, ...]) -> None:
    one = job(*way) if "one-bit-adam" not in way[0] else job(*way).model_copy(update={"optimizer": _unclipped(job())})
    work = Work.of(one)
    spaces = [Space(work, 4, 2, modes) for modes in (Modes.of(one), Modes())]
    legal, every = (
        {
            str(to_layout(chunk, index, work.spec.layers))
            for family in space.families()
            for chunk in space.chunks(family, Counts())
            for index in np.flatnonzero((chunk.recompute == 0) & (chunk.order == 0))
        }
        for space in spaces
    )
    assert legal and legal <= every
    for text in sorted(every)[::7]:
        try:
            one.with_layout(parse_layout(text)).resolve(4, purpose="plan")
        except InputError:
            assert text not in legal, text
        else:
            assert text in legal, text


def _unclipped(one: Job) -> object:
    return one.optimizer.model_copy(update={"clip_norm": None})


def test_a_sync_that_no_layout_goes_with_is_refused_with_its_reason() -> None:
    with pytest.raises(InputError, match=r"one-bit-adam has no gradient for optimizer\.clip_norm"):
        plan(job("compression=one-bit-adam", "compression_warmup_steps=5"), DEVICES)
