"""The search finds the best of everything, says the same twice, and says why not the others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.job.grid import groups_of
from meshwright.job.job import Job, job_from_values
from meshwright.job.layout_text import parse_layout
from meshwright.job.presets import preset
from meshwright.plan.arrays import SCHEDULES, Layouts, Work, to_layout
from meshwright.plan.confirm import exact_peak
from meshwright.plan.evaluate import evaluate
from meshwright.plan.machines import cluster_of, with_devices
from meshwright.plan.pareto import front
from meshwright.plan.placement import axis_places, order_words, placement_sentence
from meshwright.plan.planner import plan, plan_layout, representative_ranks
from meshwright.plan.predict import predict
from meshwright.plan.refine import refine
from meshwright.plan.search import search
from meshwright.plan.space import Counts, Space

EIGHT = "1x8 A100-SXM4-80GB"


def job_of(model: str = "gpt3-1.3b", batch: int = 8, sequence: int = 1024, **sections: object) -> Job:
    return job_from_values(
        {
            "model": {"preset": model},
            "data": {"sequence_length": sequence},
            "batch": {"global_size": batch},
            "precision": {"dtype": "bfloat16"},
            **sections,
        }
    )


def _usable(machines: str) -> int:
    return cluster_of(job_of(), machines).device.memory_bytes


def _everything(space: Space, cluster: ClusterSpec) -> tuple[Layouts, np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    layouts = Layouts.join([chunk for family in space.families() for chunk in space.chunks(family, Counts())])
    values = evaluate(space.work, cluster, layouts)
    return layouts, values.step_time, values.peak, values.fits


@pytest.mark.parametrize("machines", ["1x4 A100-SXM4-80GB", "2x2 V100-SXM2-32GB"])
def test_the_search_keeps_the_fastest_that_fit_and_the_whole_front(machines: str) -> None:
    cluster = load_cluster(machines)
    work = Work(spec=preset("gpt3-2.7b"), sequence=1024, global_batch=8, dtype="float16")
    space = Space(work, cluster.devices, cluster.devices_per_node)
    found = search(space, cluster, keep=50)
    layouts, time, memory, fits = _everything(space, cluster)
    assert found.counts.legal == len(layouts) == sum(result.evaluated for result in found.families)
    assert sum(result.fitting for result in found.families) == fits.sum() > 50
    assert np.array_equal(found.best.time, np.sort(time[fits])[:50])
    assert (found.best.memory <= cluster.device.memory_bytes).all()
    whole = front(memory[fits], time[fits])
    assert np.array_equal(found.pareto.time, time[fits][whole])
    assert np.array_equal(found.pareto.memory, memory[fits][whole])
    for result in found.families:
        assert result.closest is not None
        assert (result.best is not None) == (result.fitting > 0)


def test_the_front_has_nothing_that_another_beats() -> None:
    draw = np.random.default_rng(2)
    memory, time = draw.integers(0, 20, 300).astype(float), draw.integers(0, 20, 300).astype(float)
    chosen = front(memory, time)
    beaten = [
        any((memory <= memory[i]) & (time <= time[i]) & ((memory < memory[i]) | (time < time[i]))) for i in range(300)
    ]
    assert {(memory[i], time[i]) for i in chosen} == {(memory[i], time[i]) for i in range(300) if not beaten[i]}
    assert (np.diff(memory[chosen]) > 0).all() and (np.diff(time[chosen]) < 0).all()
    assert len(front(np.empty(0), np.empty(0))) == 0


def test_the_answer_is_complete_and_the_same_twice() -> None:
    job = job_of()
    first, second = plan(job, EIGHT, top=5), plan(job, EIGHT, top=5)
    assert first.model_copy(update={"seconds": 0.0}) == second.model_copy(update={"seconds": 0.0})
    value = json.loads(first.to_json())
    assert {"searched", "seconds", "layouts", "rejected"} <= set(value)
    assert len(value["layouts"]) == 5
    for entry in value["layouts"]:
        assert {
            "layout", "fits", "step_time_s", "tokens_per_s", "mfu", "peak_memory_bytes", "fullest_rank", "binding",
        } <= set(entry)  # fmt: skip
        layout = parse_layout(entry["layout"])
        job.with_layout(layout).resolve(8, purpose="plan")
        assert entry["tokens_per_s"] == pytest.approx(8 * 1024 / entry["step_time_s"])
        assert 0 < entry["mfu"] < 1 and entry["efficiency"] > 0 and 0 <= entry["fullest_rank"] < 8
        assert entry["useful_speedup"] == pytest.approx(8 * entry["efficiency"])
    assert value["layouts"] == sorted(value["layouts"], key=lambda entry: entry["step_time_s"])
    families = {line["family"] for line in value["rejected"]}
    assert len(families) == len(value["rejected"]) == 9  # of ten factorisations of 8 the chosen one is left out
    assert all(point[3] for point in value["points"])


def test_one_layout_costs_what_the_search_says_it_costs() -> None:
    job = job_of("llama2-7b", batch=16, sequence=2048)
    found = plan(job, EIGHT, top=1).layouts[0]
    alone = plan_layout(job.with_layout(parse_layout(found.layout)), EIGHT).layouts[0]
    assert alone == found


def test_a_model_that_fits_nowhere_names_the_closest_layout_rank_and_bytes() -> None:
    found = plan(job_of("llama3-70b"), "1x8 A100-SXM4-40GB")
    assert not found.fits
    (closest,) = found.layouts
    assert not closest.fits and closest.binding == "memory"
    lines = {line.closest: line for line in found.rejected}
    line = lines[closest.layout]
    assert line.kind == "memory" and line.rank == closest.fullest_rank
    assert line.lacks_bytes == pytest.approx(closest.peak_memory_bytes - _usable("1x8 A100-SXM4-40GB"), rel=0.1)
    assert f"rank {line.rank} needs " in line.reason and f"{line.lacks_bytes:,} too many" in line.reason
    assert all(other.lacks_bytes is None or other.lacks_bytes >= line.lacks_bytes for other in found.rejected)


def test_illegal_families_name_their_rule() -> None:
    reasons = {line.family: line.reason for line in plan(job_of("qwen2-7b", batch=16), EIGHT).rejected}
    assert reasons["dp=1 tp=8 pp=1"] == "rule: tp=8 does not divide 4 key/value heads"
    few = {line.family: line.reason for line in plan(job_of("gpt2"), "4x4 A100-SXM4-40GB").rejected}
    assert few["dp=1 tp=1 pp=16"] == "rule: pp=16 is more stages than the 12 layers"


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(InputError, match="experts=8 cannot be planned yet"):
        plan(job_of("mixtral-8x7b"), EIGHT)
    with pytest.raises(InputError, match="2048 is above the 1024 learned positions"):
        plan(job_of("gpt2", sequence=2048), EIGHT)
    with pytest.raises(InputError, match=r"nothing says which machines .*meshwright calibrate"):
        plan(job_of())
    with pytest.raises(InputError, match="different devices cannot be planned yet"):
        plan(job_of(), "2x8 A100-SXM4-80GB + 2x8 H100-SXM5-80GB")
    with pytest.raises(InputError, match="planner does not time yet"):
        plan_layout(job_of().with_layout(parse_layout("pp=2 dp=4 stages=3,21 micro_batch=1")), EIGHT)


def test_ranks_and_budget_of_the_job_cut_the_cluster() -> None:
    job = job_of(cluster={"machines": "4x8 A100-SXM4-80GB", "ranks": 16, "memory_per_rank_bytes": 10**10})
    cluster = cluster_of(job)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.memory_bytes) == (2, 8, 10**10)
    assert (with_devices(cluster, 4).nodes, with_devices(cluster, 4).devices_per_node) == (1, 4)
    for devices, sentence in ((12, "fill no whole number of nodes of 8 devices"), (24, "more than the 16 devices")):
        with pytest.raises(InputError, match=sentence):
            with_devices(cluster, devices)


def test_placement_is_put_into_words() -> None:
    cluster = load_cluster("4x8 A100-SXM4-80GB")
    layout = parse_layout("dp=4 tp=8 zero=1 micro_batch=1")
    assert [(place.axis, place.crosses) for place in axis_places(layout, 8)] == [("tp", False), ("dp", True)]
    sentence = placement_sentence(layout, cluster, {"tp": 9e9, "dp": 1e9})
    assert sentence == (
        "tensor-parallel groups (tp=8) inside a node, over nvlink at 300 GB/s (tp 9 GB a rank and step), because it "
        "sends most and would wait for the slower link; data-parallel groups (dp=4) across nodes, over infiniband at "
        "8 x 25 GB/s (dp 1 GB a rank and step)."
    )
    assert order_words(layout, 8) == "tp 8"
    assert order_words(parse_layout("dp=16 tp=2"), 8) == "tp 2, dp 4 of 16"


def test_the_order_of_a_planned_layout_is_where_its_groups_stand() -> None:
    work = Work(spec=preset("gpt3-2.7b"), sequence=1024, global_batch=32)
    space = Space(work, devices=16, node=4)
    seen = set()
    for family in space.families():
        for chunk in space.chunks(family, Counts()):
            for index in range(0, len(chunk), 997):
                layout = to_layout(chunk, index, work.spec.layers)
                order = int(chunk.order[index])
                if order == 4 and layout.pp > 1:  # the pipeline fastest: neighbours in it are neighbours in devices
                    assert all(
                        ranks == tuple(range(ranks[0], ranks[0] + layout.pp)) for ranks in groups_of(layout, "pp")
                    )
                seen.add(order)
    assert len(seen) > 3


def test_simulation_agrees_with_itself_on_long_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some micro-batches the rest is added by the period of the schedule: the same as simulating all."""
    cluster = load_cluster("2x8 A100-SXM4-80GB")
    work = Work(spec=preset("gpt3-6.7b"), sequence=1024, global_batch=16 * 4 * 4)
    layouts = Layouts.make(
        dp=4, pp=4, schedule=np.arange(len(SCHEDULES)), virtual=[1, 1, 2, 2, 2, 2, 2, 1], micro_batch=1,
        micro_batches=64, last_fewer=1, zero=1,
    )  # fmt: skip
    periodic = refine(work, cluster, layouts)
    monkeypatch.setattr("meshwright.plan.refine._PERIODIC_FROM", 1000)
    whole = refine(work, cluster, layouts)
    assert periodic == pytest.approx(whole, rel=1e-3)
    assert (periodic != evaluate(work, cluster, layouts).step_time).any()


def test_memory_of_the_search_is_near_the_predicted_ledger() -> None:
    """Typically within 2 %; what is answered in the end is confirmed to the byte."""
    differences = []
    for model, batch, sequence in (("gpt3-1.3b", 16, 1024), ("llama2-7b", 16, 2048), ("qwen2-0.5b", 16, 512)):
        job = job_of(model, batch, sequence)
        cluster = load_cluster(EIGHT)
        space = Space(Work.of(job), 8, 8)
        layouts = Layouts.join([chunk for family in space.families() for chunk in space.chunks(family, Counts())])
        layouts = layouts.take(np.random.default_rng(7).choice(len(layouts), 25, replace=False))
        values = evaluate(space.work, cluster, layouts)
        for index in range(len(layouts)):
            exact = exact_peak(job, to_layout(layouts, index, space.work.spec.layers))
            differences.append(float(values.peak[index]) / exact.peak - 1)
    sizes = np.abs(differences)
    assert np.median(sizes) <= 0.025
    assert np.quantile(sizes, 0.9) <= 0.10


def test_the_fullest_rank_is_among_those_that_are_looked_at() -> None:
    job = job_of("gpt3-350m", 16)
    for text in (
        "pp=8 schedule=1f1b micro_batch=1", "pp=4 dp=2 schedule=interleaved virtual=2 micro_batch=1 zero=2",
        "pp=4 dp=2 schedule=zbv micro_batch=1", "pp=8 schedule=zero-bubble virtual=1 micro_batch=1",
        "pp=4 dp=2 schedule=dualpipev micro_batch=1", "pp=8 schedule=gpipe micro_batch=2 recompute=full",
    ):  # fmt: skip
        layout = parse_layout(text)
        every = predict(job.with_layout(layout).resolve(purpose="plan"), representative_ranks(layout))
        assert exact_peak(job, layout).peak == pytest.approx(every.fullest.stores.peak, rel=0.02), text
