"""Predicted step times know how ranks agree: over a slow link they are those of the bytes, and of what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.job.cluster import ClusterSpec
from meshwright.job.job import Job, load_job
from meshwright.plan.arrays import Work, from_layouts
from meshwright.plan.evaluate import evaluate
from meshwright.plan.planner import plan_layout
from meshwright.plan.predict import predict
from meshwright.plan.spends import predicted_spends
from meshwright.plan.sync_bytes import link_bytes
from tests.slow_cluster import slow_cluster

PARAMETERS = 9_965_824
LINK = 12.5e6
"""Bytes/s each way."""
HOSTS = slow_cluster(2, 2, host=True)
"""Two hosts of two CPU ranks."""
DEVICES = slow_cluster(2, 2)
"""The same links between devices that do not share cores."""


def job(layout: str, *sync: str, model: str = "") -> Job:
    """The quick-start model, 2,048 tokens a step."""
    settings = [f"sync.{one}" for one in sync] + ["optimizer.clip_norm=1e9", *([model] if model else [])]
    return load_job("examples/quickstart.toml", settings, layout).resolve(purpose="plan")


def parts(one: Job, cluster: ClusterSpec) -> dict[str, float]:
    work = Work.of(one)
    found = evaluate(work, cluster, from_layouts([one.layout], work))
    return {name: float(part[0]) for name, part in found.time.items()} | {"step": float(found.step_time[0])}


def exchanged(one: Job, cluster: ClusterSpec = HOSTS) -> float:
    found = parts(one, cluster)
    return found["shard"] + found["replicate"]


def crossing(one: Job, cluster: ClusterSpec = HOSTS) -> float:
    """Bytes on the link in a step, both ways together."""
    work = Work.of(one)
    return 4 * float(link_bytes(work, cluster, from_layouts([one.layout], work))[1][0])


PLAIN = ("algorithm=direct",)
WAYS: dict[tuple[str, ...], tuple[float, float]] = {
    PLAIN: (160e6, 1.0),
    ("algorithm=hierarchical", "node_size=2"): (80e6, 1 / 2),
    ("compression=bf16",): (80e6, 1 / 2),
    ("compression=int8",): (40.6e6, (1 + 4 / 256) / 4),
    ("compression=powersgd",): (3.5e6, 3.5 / 160),
    ("strategy=easgd", "period=4"): (42.8e6, 1 / 4),
    ("strategy=diloco", "period=4"): (42.8e6, 1 / 4),
}
"""Bytes that the kernel counted on a link in a step, both ways, and the part of the plain sum's."""


@pytest.mark.parametrize("way", WAYS)
def test_seconds_on_the_wire_are_those_of_the_bytes_that_were_counted_on_it(way: tuple[str, ...]) -> None:
    counted, part = WAYS[way]
    one = job("dp=4", *way)
    sent = crossing(one)
    small = "powersgd" in way[0]  # which cuts its sums by buckets, here counted as alike
    assert sent == pytest.approx(counted, rel=0.35 if small else 0.08)
    assert sent / crossing(job("dp=4", *PLAIN)) == pytest.approx(part, rel=0.35 if small else 0.01)
    wire = sent / 2 / LINK
    assert wire < exchanged(one) < wire + 0.25, "the rest: copies in memory, encoding"


def test_a_plain_sum_takes_80_megabytes_each_way_over_the_link() -> None:
    found = parts(job("dp=4", *PLAIN), HOSTS)
    assert found["replicate"] == pytest.approx(2 * 4 * PARAMETERS / LINK, rel=0.02)
    # 8.02 s were measured with 1.2 s of computation, 4.24 s by the two-level form.
    assert found["replicate"] + 1.2 == pytest.approx(8.02, rel=0.08)
    two_level = parts(job("dp=4", "algorithm=hierarchical", "node_size=2"), HOSTS)
    assert two_level["replicate"] + 1.2 == pytest.approx(4.24, rel=0.08)


def test_idle_cores_hide_no_more_of_it_than_they_compute() -> None:
    assert HOSTS.host is not None
    idle = HOSTS.model_copy(update={"host": HOSTS.host.model_copy(update={"cores": 8})})
    found = parts(job("dp=4", *PLAIN), idle)
    wire = 2 * 4 * PARAMETERS / LINK
    assert wire - found["backward"] <= found["replicate"] < wire


@pytest.mark.parametrize("cluster", [HOSTS, DEVICES])
def test_replicated_ranks_spend_it_on_the_dp_axis(cluster: ClusterSpec) -> None:
    assert set(predicted_spends(job("dp=4", "compression=int8"), cluster, 0).communication) == {"dp"}
    assert set(predicted_spends(job("dp=4 zero=1"), cluster, 0).communication) == {"shard"}


def test_on_measured_hosts_auto_is_what_training_takes_there() -> None:
    auto, best = job("dp=4"), job("dp=4", "algorithm=hierarchical", "node_size=2")
    assert parts(auto, HOSTS)["step"] == pytest.approx(parts(best, HOSTS)["step"])
    assert parts(auto, DEVICES)["step"] == pytest.approx(parts(job("dp=4", *PLAIN), DEVICES)["step"])


@pytest.mark.parametrize("layout", ["dp=4", "dp=4 zero=1", "dp=4 zero=2", "dp=4 shard=2 zero=2", "dp=4 shard=2 zero=1"])
@pytest.mark.parametrize(
    "way",
    [(), ("compression=bf16",), ("compression=int8",), ("compression=sign",),
     ("compression=qsgd", "compression_bits=8"), ("compression=dgc",),
     ("strategy=diloco", "period=1", "compression=int8"), ("strategy=easgd", "period=1"),
     ("strategy=local", "period=1", "average=state")],
)  # fmt: skip
def test_bytes_inside_and_between_nodes_sum_to_the_predicted_ledgers(layout: str, way: tuple[str, ...]) -> None:
    if way and ("strategy" in way[0] and "zero" in layout and "shard" not in layout):
        layout = "dp=4 shard=2 zero=3 micro_batch=2"
    if "dgc" in "".join(way) and "zero=2" in layout:
        layout = "dp=4 shard=4 zero=1"
    one = job(layout, *way)
    work = Work.of(one)
    near, far = link_bytes(work, HOSTS.model_copy(update={"host": None}), from_layouts([one.layout], work))
    sends = [send for rank in predict(one).ranks for send in rank.sends]
    wire = sum(send.wire for send in sends if send.axis in ("dp", "shard", "replicate")) / 4
    # ZeRO-3 keeps the last block from forward to backward, which the closed form does not.
    assert float(near[0] + far[0]) == pytest.approx(wire, rel=0.06 if "zero=3" in layout else 0.002)


@pytest.mark.parametrize("cluster", [HOSTS, DEVICES])
def test_meetings_are_averaged_over_the_period(cluster: ClusterSpec) -> None:
    often, seldom = (exchanged(job("dp=4", "strategy=diloco", f"period={period}"), cluster) for period in (4, 40))
    assert often == pytest.approx(10 * seldom)
    state = exchanged(job("dp=4", "strategy=local", "period=4", "average=state"), cluster)
    assert state == pytest.approx(3 * exchanged(job("dp=4", "strategy=local", "period=4"), cluster), rel=0.02)


def test_groups_that_meet_inside_a_host_cost_the_link_nothing() -> None:
    plain = exchanged(job("dp=4", "strategy=local", "period=40"))
    near = exchanged(job("dp=4", "strategy=local", "period=40", "group_size=2", "group_period=4"))
    often = exchanged(job("dp=4", "strategy=local", "period=4"))
    assert plain < near < plain + 0.05 * often


@pytest.mark.parametrize("cluster", [HOSTS, DEVICES])
def test_what_travels_while_training_goes_on_is_hidden(cluster: ClusterSpec) -> None:
    seconds = [
        exchanged(job("dp=4", "strategy=diloco", "period=40", "fragments=4", f"overlap={overlap}"), cluster)
        for overlap in (0, 1, 9)
    ]
    assert seconds[0] > seconds[1] > seconds[2]
    assert seconds[2] < 0.1 * seconds[0], "nine steps of computation hide a quarter of the model"


def test_sharded_replicas_sum_gradients_inside_and_meet_with_their_part() -> None:
    one = job("dp=4 shard=2 zero=2", "strategy=diloco", "period=4")
    found = parts(one, DEVICES)
    # Two ranks of a host meet with half of the parameters each: together all of them, there and back.
    assert found["replicate"] == pytest.approx(4 * PARAMETERS / LINK / 4, rel=0.05)
    assert found["shard"] < 0.05 * found["replicate"]


def test_only_the_slow_level_is_compressed_where_that_is_asked() -> None:
    every, slow = (
        job("dp=4 shard=2 zero=2", "compression=int8", f"compression_level={level}") for level in ("all", "slow")
    )
    assert crossing(every, DEVICES) == crossing(slow, DEVICES) == pytest.approx(40.6e6 / 2, rel=0.01)
    assert exchanged(slow, DEVICES) < exchanged(job("dp=4 shard=2 zero=2"), DEVICES) / 3


def test_replicated_ranks_compress_between_nodes_alone() -> None:
    """A host's ranks sum whole and keep a piece each, pieces are summed compressed, and gathered whole in the host."""
    one = job("dp=4", "compression=int8", "compression_level=slow", "node_size=2")
    assert crossing(one, DEVICES) == pytest.approx(40.6e6 / 2, rel=0.01)
    work = Work.of(one)
    near, far = (float(sent[0]) for sent in link_bytes(work, DEVICES, from_layouts([one.layout], work)))
    sends = predict(one, [0]).ranks[0].sends
    wire = {axis: sum(send.wire for send in sends if send.axis == axis) for axis in ("intra", "inter")}
    assert (near, far) == (pytest.approx(wire["intra"], rel=0.001), pytest.approx(wire["inter"], rel=0.001))
    assert exchanged(one, HOSTS) == pytest.approx(40.6e6 / 4 / LINK, rel=0.1)


@pytest.mark.parametrize("cluster", [HOSTS, DEVICES])
def test_a_parameter_server_is_a_pull_and_a_push_over_its_hosts_link(cluster: ClusterSpec) -> None:
    whole = 4 * PARAMETERS
    found = parts(job("dp=4", "strategy=server"), cluster)
    assert found["replicate"] == pytest.approx(2 * 2 * whole / LINK, rel=0.03), "two workers on the other host"
    alone = parts(job("dp=4", "strategy=server", "server_mode=asynchronous"), cluster)
    compute = found["step"] - found["replicate"] - found["optimizer"]
    # A worker's round alone (there and back, and computing), or both workers' pushes one after the other.
    assert alone["step"] == pytest.approx(max(2 * whole / LINK + compute, 2 * whole / LINK), rel=0.03)
    assert alone["step"] < found["step"]


def test_the_other_workers_do_what_backup_workers_are_spared() -> None:
    every, three = (
        parts(job("dp=4 micro_batch=1", "strategy=server", f"backup_workers={count}"), DEVICES) for count in (0, 2)
    )
    assert three["forward"] == pytest.approx(2 * every["forward"])


def test_a_warm_up_is_stated_apart() -> None:
    found = plan_layout(job("dp=4", "compression=int8", "compression_warmup_steps=10"), HOSTS)
    (one,) = found.layouts
    assert one.warmup_step_time_s is not None
    assert one.warmup_step_time_s == pytest.approx(plan_layout(job("dp=4"), HOSTS).layouts[0].step_time_s)
    assert "The first 10 steps travel whole and take " in found.sync
    assert plan_layout(job("dp=4", "compression=int8"), HOSTS).layouts[0].warmup_step_time_s is None


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ((), None),
        (("algorithm=ring",), "summed by ring"),
        (("compression=int8",), "Losses are not predicted"),
        (("strategy=diloco", "period=30"), "the mean over 30 steps"),
        (("strategy=server",), "4 workers in step, with 1 server process on the first node."),
        (("strategy=server", "servers=2"), "with 2 server processes on the first node."),
        (("strategy=server", "server_mode=asynchronous"), "a worker's own pace"),
    ],
)
def test_the_answer_says_what_its_step_time_is(sync: tuple[str, ...], words: str | None) -> None:
    said = plan_layout(job("dp=4", *sync), DEVICES).sync
    assert (words in said) if words else said == ""


@pytest.mark.parametrize("cluster", [HOSTS, DEVICES])
@pytest.mark.parametrize("sync", [(), ("compression=dgc",), ("strategy=easgd", "period=3"), ("strategy=server",)])
def test_parts_sum_to_the_step(cluster: ClusterSpec, sync: tuple[str, ...]) -> None:
    one = job("dp=4", *sync)
    found = parts(one, cluster)
    step = found.pop("step")
    assert min(found.values()) >= 0 and sum(found.values()) == pytest.approx(step)
    assert predicted_spends(one, cluster, 0).sum == pytest.approx(step)


def test_links_inside_a_node_only_leave_compression_little_to_save() -> None:
    one_node = slow_cluster(1, 4)
    plain, small = (parts(job("dp=4", *sync), one_node)["step"] for sync in ((), ("compression=int8",)))
    assert abs(plain - small) < 0.1 * plain


def test_columns_are_independent_of_one_another() -> None:
    """A layout's time does not depend on what else is evaluated with it."""
    for sync in (("compression=powersgd",), ("strategy=diloco", "period=4"), ("algorithm=ring",), ()):
        layouts = ["dp=4", "dp=2 tp=2", "dp=2 pp=2 micro_batch=2"]
        jobs = [job(layout, *sync) for layout in layouts]
        work = Work.of(jobs[0])
        for cluster in (HOSTS, DEVICES):
            together = evaluate(work, cluster, from_layouts([one.layout for one in jobs], work)).step_time
            assert np.allclose(together, [parts(one, cluster)["step"] for one in jobs])
