"""Calibration: what the fits find again, what a cluster file says between its points, and the command's refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.calibrate_machine import _check, summary
from meshwright.errors import InputError
from meshwright.job.cluster import ClusterSpec, cluster_from_values, load_cluster
from meshwright.job.efficiency import GemmCurve
from meshwright.plan.arrays import Work, from_layouts
from meshwright.plan.evaluate import evaluate
from meshwright.prove.calibrate import calibrate, measure_contention
from meshwright.prove.calibrate_collectives import OPERATIONS, Grouping, groupings, measure_collectives
from meshwright.prove.calibrate_fit import (
    fit_attention,
    fit_gemm,
    fit_sharding,
    fit_split,
    non_negative_least_squares,
)
from meshwright.prove.calibrate_kernels import ATTENTIONS, GEMMS, measure_kernels
from meshwright.prove.calibrate_program import SHARDED, SPLIT, Shape, Sharding, Split, measure_program, program_job
from meshwright.prove.pool import RankPool
from meshwright.prove.stopwatch import Timing, interleaved


def _exactly(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds)


def test_least_squares_finds_what_it_was_made_of_and_nothing_negative() -> None:
    columns = np.random.default_rng(0).random((12, 4))
    prices = np.array([3.0, 0.0, 1e-4, 2.0])
    assert non_negative_least_squares(columns, columns @ prices) == pytest.approx(prices, abs=1e-8)
    assert np.all(non_negative_least_squares(columns, -columns @ prices) == 0)
    assert np.all(non_negative_least_squares(np.zeros((3, 2)), np.ones(3)) == 0)


def test_the_curve_of_matrix_products_is_found_again() -> None:
    made = {(m, k, n): _exactly(2 * (m * n + 2000.0) * (k + 20.0) / 50e9) for m, k, n in GEMMS}
    peak, curve = fit_gemm(made)
    assert isinstance(curve, GemmCurve)
    for (m, k, n), timing in made.items():
        fitted = 2 * (m * n + curve.area_half) * (k + curve.depth_half) / (peak * curve.efficiency)
        assert fitted == pytest.approx(timing.median, rel=0.05)


def test_the_curve_of_attention_is_found_again() -> None:
    peak = 1e11

    def seconds(shape: tuple[int, int, int, int], passes: float, rate: float) -> Timing:
        batch, heads, sequence, size = shape
        return _exactly(passes * 2 * batch * heads * size * sequence**2 * (1 + 60.0 / sequence) / (rate * peak))

    forward = {shape: seconds(shape, 1.0, 0.5) for shape in ATTENTIONS}
    both = {shape: _exactly(forward[shape].median + seconds(shape, 2.5, 0.25).median) for shape in ATTENTIONS}
    curve = fit_attention(forward, both, peak)
    assert curve.forward == pytest.approx(0.5, rel=0.1)
    assert curve.backward == pytest.approx(0.25, rel=0.1)
    assert curve.length_half == pytest.approx(60, rel=0.3)


def test_what_sharding_adds_is_found_again() -> None:
    made = []
    for shape in SHARDED:
        parameters = program_job(shape).model_spec.parameter_count
        passes = 3 * shape.micro_batches
        made.append(Sharding(shape, passes * (7e-4 * (shape.layers + 1) + 6e-10 * parameters)))
    unit, sharded = fit_sharding(made)
    assert unit == pytest.approx(7e-4, rel=0.01)
    assert sharded == pytest.approx(6e-10, rel=0.01)


def test_what_splitting_adds_is_what_is_beyond_the_computation() -> None:
    alone = CLUSTER.model_copy(update={"collectives": (), "contention": {}})
    made = []
    for shape in SPLIT:
        one = program_job(shape, {"tp": 2})
        work = Work.of(one)
        computed = float(evaluate(work, alone, from_layouts([one.layout], work)).step_time[0])
        calls = 10 * shape.layers + 5
        made.append(Split(shape, computed + calls * 2e-4, calls))
    assert fit_split(made, alone) == pytest.approx(2e-4)
    assert fit_split([Split(SPLIT[0], 0.0, 85)], alone) == 0


def test_cases_are_timed_in_turns() -> None:
    calls: list[str] = []
    found = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0, shortest=0.0, fewest_rounds=3
    )
    assert calls[4:] == ["a", "b"] * 3, "after two warm-up calls of each"
    assert set(found) == {"a", "b"} and found["a"].low <= found["a"].median <= found["a"].high


def test_groupings_cover_every_size_and_both_levels() -> None:
    one_host = groupings(4, 4)
    assert {(each.size, len(each.groups)) for each in one_host} == {(2, 1), (2, 2), (3, 1), (4, 1)}
    assert {each.level for each in one_host} == {"intra"}
    two_hosts = [each for each in groupings(4, 2) if each.level == "inter"]
    assert two_hosts == [Grouping(((0, 2), (1, 3)), "inter"), Grouping(((0, 1, 2, 3),), "inter")]
    assert groupings(1, 1) == []


def test_kernels_are_timed_by_type_and_shape() -> None:
    found = measure_kernels(0.0, ("float32",))
    assert set(found.gemm["float32"]) == set(GEMMS)
    assert set(found.attention_both["float32"]) == set(ATTENTIONS)
    assert all(timing.median > 0 for timing in found.gemm["float32"].values())


def test_collectives_are_timed_alike_on_all_ranks(ranks: Callable[[int], RankPool]) -> None:
    replies = ranks(2).run(measure_collectives, groupings(2, 2), (64, 1 << 18), 0.0)
    assert replies[0] == replies[1]
    assert [(one.operation, one.bytes) for one in replies[0]] == [
        (name, size) for name in OPERATIONS for size in (64, 1 << 18)
    ]


@pytest.mark.all
def test_steps_are_timed_by_phase(ranks: Callable[[int], RankPool]) -> None:
    shape = Shape(32, 1, 2, 64, 64, 16, 1, 1)
    (phases,) = ranks(1).run(measure_program, (shape,), 3)[0]
    assert phases.shape == shape
    assert min(phases.forward, phases.backward, phases.optimizer, phases.other) > 0
    assert phases.step == pytest.approx(phases.forward + phases.backward + phases.optimizer + phases.other)


@pytest.mark.all
def test_a_calibration_is_a_cluster_file(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = calibrate(2, said.append, effort=0.02)
    path = tmp_path / "cluster.json"
    path.write_text(cluster.model_dump_json(exclude_none=True))
    assert load_cluster(str(path)) == cluster
    assert cluster.host is not None and cluster.host.unit > 0
    assert len(said) == 5
    assert {one.operation for one in cluster.collectives} == set(OPERATIONS)
    assert any("slower beside others" in line for line in summary(cluster))


@pytest.mark.all
def test_ranks_never_get_faster_beside_others() -> None:
    slower = measure_contention(2, 0.3)
    assert slower[1] == 1.0 <= slower[2]


@pytest.mark.parametrize(
    ("out", "ranks", "effort", "words"),
    [
        ("cluster.toml", None, 1.0, "must end in .json"),
        ("missing/cluster.json", None, 1.0, "does not exist; make it first"),
        ("cluster.json", 0, 1.0, "--ranks: 0 cannot be measured"),
        ("cluster.json", 99, 1.0, "use 1 to 16"),
        ("cluster.json", None, 0.0, "--effort: 0 is no scale"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, out: str, ranks: int | None, effort: float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        _check(tmp_path / out, ranks, effort)


@pytest.mark.parametrize(
    ("ranks", "devices", "words"),
    [(None, 8, "8 CUDA devices.*torchrun --standalone --nproc-per-node 8"), (2, 1, "--ranks: 2 do not share")],
)
def test_cuda_devices_want_a_rank_each(tmp_path: Path, ranks: int | None, devices: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        _check(tmp_path / "cluster.json", ranks, 1.0, devices)
    _check(tmp_path / "cluster.json", None, 1.0, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"links": {"intra": {"kind": "loopback", "bandwidth": 0, "latency": 1e-5}}}, "bandwidth"),
        ({"host": {"cores": 0}}, "cores"),
        ({"host": {"cores": 2, "update": -1.0}}, "update"),
        ({"collectives": [{"operation": "all_reduce", "ranks": 2, "level": "intra", "alpha": -1, "beta": 0}]}, "alpha"),
    ],
)
def test_impossible_cluster_files_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        cluster_from_values({**json.loads(CLUSTER.model_dump_json(exclude_none=True)), **change}, "cluster")
    assert all("\n" not in line for line in str(caught.value).splitlines())


CLUSTER: ClusterSpec = cluster_from_values(
    {
        "nodes": 1,
        "devices_per_node": 4,
        "device": {
            "name": "made up",
            "memory_bytes": 4 << 30,
            "memory_bandwidth": 20e9,
            "peak_flops": {"float32": 80e9},
            "efficiency": {
                "gemm": {"float32": {"efficiency": 1.0}},
                "attention": {"forward": 0.5, "backward": 0.5},
                "memory": 1.0,
            },
        },
        "links": {"intra": {"kind": "loopback", "bandwidth": 2e9, "latency": 1e-4}},
        "contention": {"1": 1.0, "2": 1.1, "4": 2.4},
        "host": {
            "cores": 2,
            "forward": {"element": 6e-10, "layer": 2e-4, "logit": 1e-9, "parameter": 4e-10, "micro_batch": 1e-3},
            "backward": {"element": 6e-10, "layer": 4e-4, "parameter": 1e-9, "micro_batch": 5e-4},
            "update": 1e-9,
            "step": 6e-4,
            "unit": 7e-4,
            "sharded": 7e-10,
        },
        "collectives": [
            {
                "operation": operation, "ranks": size, "groups": groups, "level": "intra", "alpha": 2e-4, "beta": 1e-9,
                "points": [[64, 2e-4], [65536, 3e-4], [4194304, 4e-3 * size]],
            }
            for operation in OPERATIONS
            for size, groups in ((2, 1), (2, 2), (3, 1), (4, 1))
        ],
    },
    "cluster",
)  # fmt: skip
"""Figures near those of two cores of a server."""
