"""Layouts as columns: what they hold, there and back, and what they cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec, load_cluster
from meshwright.job.layout import Layout
from meshwright.job.presets import preset
from meshwright.plan.arrays import (
    BINDINGS,
    ORDERS,
    RECOMPUTES,
    SCHEDULES,
    Layouts,
    Work,
    axis_strides,
    from_layouts,
    stage_counts,
    to_layout,
)
from meshwright.plan.collectives import Group, Network, all_reduce_seconds, round_seconds
from meshwright.plan.evaluate import evaluate
from meshwright.plan.shape import Shape
from meshwright.plan.stages import held

_WORK = Work(preset("llama3-8b"), 8192, 128)


def _cluster() -> ClusterSpec:
    return load_cluster("8x8 H100-SXM5-80GB")


def _some(count: int = 300) -> Layouts:
    random = np.random.default_rng(0)
    tp, pp = 2 ** random.integers(0, 4, count), 2 ** random.integers(0, 3, count)
    dp = 64 // (tp * pp)
    micro = 2 ** random.integers(0, 2, count)
    return Layouts.make(
        tp=tp, pp=pp, dp=dp, shard=dp // np.minimum(dp, 2 ** random.integers(0, 2, count)), micro_batch=micro,
        micro_batches=-(-128 // (dp * micro)), zero=random.integers(0, 4, count),
        recompute=random.integers(0, 3, count), order=random.integers(0, len(ORDERS), count),
    )  # fmt: skip


def test_stage_counts_hold_every_layer_once() -> None:
    for layers, stages in itertools.product((12, 13, 31, 96), (1, 2, 3, 7, 12)):
        for fewer in range(min(4, layers // stages)):
            counts = stage_counts(layers, stages, fewer)
            assert sum(counts) == layers
            assert len(counts) == stages
    assert stage_counts(96, 7, 3) == (14, 15, 15, 14, 14, 14, 10)


def test_columns_hold_what_layouts_hold() -> None:
    virtuals = {"interleaved": (1, 2, 3), "looped-bfs": (2,), "zero-bubble": (2,), "zbv": (2,), "dualpipev": (2,)}
    for number, schedule in enumerate(SCHEDULES):
        for pp, virtual, layers, fewer in itertools.product(
            (2, 3, 4), virtuals.get(schedule, (1,)), (24, 25, 31), (0, 1, 2)
        ):
            columns = Layouts.make(pp=pp, virtual=virtual, schedule=number, last_fewer=fewer, micro_batches=8)
            counts = stage_counts(layers, pp * virtual, fewer)
            layout = Layout(pp=pp, schedule=schedule, virtual=virtual)
            for rank in held(columns, layers):
                stages = layout.stages_of(int(rank.rank[0]))
                assert rank.layers[0] == sum(counts[stage] for stage in stages)
                assert bool(rank.head[0]) == (pp * virtual - 1 in stages)


def test_there_and_back() -> None:
    columns = _some(60)
    for index in range(60):
        layout = to_layout(columns, index, 32)
        again = from_layouts([layout], _WORK)
        assert to_layout(again, 0, 32) == layout
    uneven = Layout(pp=2, stages=(20, 12), micro_batch=1)
    assert int(from_layouts([uneven], _WORK).last_fewer[0]) == 4
    with pytest.raises(ValueError, match="neither even"):
        from_layouts([Layout(pp=4, stages=(20, 4, 4, 4), micro_batch=1)], _WORK)


def test_axis_strides_are_those_of_the_placement() -> None:
    columns = _some(40)
    strides = axis_strides(columns)
    for index in range(40):
        layout = to_layout(columns, index, 32)
        places = np.asarray(layout.placement or range(layout.ranks)).reshape(
            layout.pp, layout.dp // layout.shard_degree, layout.shard_degree, layout.tp
        )
        for axis, name in enumerate(("pp", "replicate", "shard", "tp")):
            if places.shape[axis] > 1:
                assert set(np.diff(places, axis=axis).ravel()) == {int(strides[name][index])}


def test_costs_do_not_depend_on_their_neighbours() -> None:
    columns = _some(200)
    whole = evaluate(_WORK, _cluster(), columns)
    for index in (0, 57, 199):
        alone = evaluate(_WORK, _cluster(), columns.take(slice(index, index + 1)))
        assert alone.step_time[0] == pytest.approx(whole.step_time[index], rel=1e-12)
        assert alone.peak[0] == whole.peak[index]
        assert alone.binding[0] == whole.binding[index]


def test_parts_sum_to_the_whole() -> None:
    result = evaluate(_WORK, _cluster(), _some())
    assert np.allclose(sum(result.time.values()), result.step_time)
    assert np.allclose(sum(result.memory.values()), result.peak)
    assert all(np.all(part >= 0) for part in (*result.time.values(), *result.memory.values()))
    assert np.array_equal(result.fits, result.peak <= _cluster().device.memory_bytes)
    assert np.all((result.mfu > 0) & (result.mfu < 1))
    assert {BINDINGS[code] for code in result.binding[~result.fits]} <= {"memory"}


def test_more_recomputation_takes_less_memory_and_more_time() -> None:
    columns = Layouts.make(dp=8, zero=1, micro_batches=16, recompute=[RECOMPUTES.index(name) for name in RECOMPUTES])
    result = evaluate(_WORK, _cluster(), columns)
    assert result.memory["activations"][2] < result.memory["activations"][0]
    assert result.step_time[0] <= result.step_time[1] <= result.step_time[2]


def test_zero_stages_take_less_and_less() -> None:
    result = evaluate(_WORK, _cluster(), Layouts.make(dp=64, zero=[0, 1, 2, 3], micro_batches=2))
    state = result.memory["parameters"] + result.memory["gradients"] + result.memory["optimizer"]
    assert np.all(np.diff(state) <= 0)
    assert state[0] == pytest.approx(18 * preset("llama3-8b").parameter_count)


def test_parameters_are_those_of_the_model() -> None:
    for name in ("gpt3-13b", "llama3-8b", "qwen2-0.5b", "qwen3-8b", "megatron-1t"):
        spec = preset(name)
        assert float(Shape.of(Work(spec, 1024, 8)).parameters()) == spec.parameter_count


def test_impossible_utilisation_is_an_error_of_the_inputs() -> None:
    fast = _cluster().model_copy(
        update={"device": _cluster().device.model_copy(update={"peak_flops": {"bfloat16": 1e9}})}
    )
    assert evaluate(_WORK, fast, Layouts.make(dp=64, micro_batches=2)).mfu[0] <= 1
    wrong = Layouts.make(dp=8, micro_batches=1)
    with pytest.raises(InputError, match="which no device can"):
        evaluate(_WORK, _cluster(), wrong)


def test_a_rate_the_device_lacks_is_named() -> None:
    with pytest.raises(InputError, match="no dense peak for bfloat16"):
        evaluate(_WORK, load_cluster("8x8 V100-SXM2-32GB"), Layouts.make(dp=64, micro_batches=2))


def _network(in_switch: bool = False) -> Network:
    return Network(
        devices_per_node=np.asarray(8), inside_bandwidth=np.asarray(200e9), inside_latency=np.asarray(2e-6),
        in_switch=np.asarray(in_switch), node_bandwidth=np.asarray(80e9), outside_latency=np.asarray(10e-6),
    )  # fmt: skip


def test_collectives_in_closed_form() -> None:
    size = np.array([1, 4, 8, 32])
    whole = Group.of(size, np.array([1, 1, 1, 1]), _network())
    seconds = round_seconds(np.full(4, 1e9), whole, _network())
    assert seconds[0] == 0
    assert seconds[1] == pytest.approx(0.75 * 1e9 / 200e9 + 3 * 2e-6)
    # 32 ranks are four whole nodes: the ring over all adapters, or inside and then between nodes.
    ring = 31 / 32 * 1e9 / 80e9 + 28 * 2e-6 + 4 * 10e-6
    layered = 7 / 8 * 1e9 / 200e9 + 7 * 2e-6 + 3 / 4 * 1e9 / 80e9 + 2 * 10e-6
    assert seconds[3] == pytest.approx(min(ring, layered))
    assert all_reduce_seconds(np.full(4, 1e9), whole, _network())[1] == pytest.approx(2 * seconds[1])


def test_small_all_reduces_take_the_tree_and_switches_halve_the_traffic() -> None:
    group = Group.of(np.array([8]), np.array([1]), _network())
    assert all_reduce_seconds(np.array([8.0]), group, _network())[0] == pytest.approx(2 * 3 * 2e-6, rel=0.01)
    plain = all_reduce_seconds(np.array([1e9]), group, _network())[0]
    assert all_reduce_seconds(np.array([1e9]), group, _network(True))[0] == pytest.approx(plain / 1.75, rel=0.01)


@pytest.mark.parametrize("in_switch", [False, True])
def test_whether_switches_add_up_is_what_the_cluster_says(in_switch: bool) -> None:
    links = _cluster().links
    assert links.intra is not None
    intra = links.intra.model_copy(update={"in_switch": in_switch})
    cluster = _cluster().model_copy(update={"links": links.model_copy(update={"intra": intra})})
    network = Network.of(cluster)
    assert bool(network.in_switch) == in_switch
    assert network.inside_bandwidth == intra.bandwidth * cluster.device.efficiency.link


def test_groups_that_share_a_node_share_its_adapters() -> None:
    """One member in each of 4 nodes, eight such groups: an eighth of the node's bandwidth each."""
    apart = Group.of(np.array([4]), np.array([8]), _network())
    assert (float(apart.inside[0]), float(apart.nodes[0]), float(apart.share[0])) == (1, 4, 10e9)
    together = Group.of(np.array([32]), np.array([1]), _network())
    assert (float(together.inside[0]), float(together.nodes[0]), float(together.share[0])) == (8, 4, 80e9)
