"""What is counted as sent: against the transport's own books, against fake tensors, and by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.phase import phase
from meshwright.comm.record import TrafficRecorder
from meshwright.comm.traffic import Traffic
from meshwright.ledger.ledger import Send
from tests.ledger import programs, recording_group

PROGRAMS = {"own": programs.own_collectives, "fsdp": programs.fsdp, "pipeline": programs.pipeline}


def books(recorder: TrafficRecorder) -> dict[str, int]:
    """The recorder's transport counts in the form of the recording group's."""
    result = {}
    for operation, count in recorder.traffic.transport.items():
        result[operation], result[f"{operation} bytes"] = count.messages, count.payload
    return result


def recorded_both_ways(program: str) -> tuple[dict[str, int], dict[str, int], list[dict[str, object]]]:
    group = recording_group.recording_group()
    recorder = TrafficRecorder(lambda _group: "world")

    @contextmanager
    def recorded():
        recording_group.counts.clear()
        with recorder:
            yield
        counted.update(recording_group.counts)

    counted: dict[str, int] = {}
    PROGRAMS[program](group, recorded)
    dist.barrier()
    dist.distributed_c10d.destroy_process_group(group)
    return books(recorder), counted, [send.model_dump() for send in recorder.sends]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_the_independent_count_to_the_byte(ranks, program, size):
    for recorded, counted, _sends in ranks(size).run(recorded_both_ways, program):
        assert recorded == counted
        assert sum(count for name, count in counted.items() if name.endswith("bytes")) > 1_000


FAKE = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from meshwright.comm.record import TrafficRecorder
from tests.ledger import programs
program, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
recorder = TrafficRecorder(lambda _group: "world")
if program == "fsdp":
    programs.fsdp(dist.group.WORLD, lambda: recorder, fake=True)
else:
    with torch._subclasses.FakeTensorMode():
        programs.own_collectives(dist.group.WORLD, lambda: recorder)
print(json.dumps([send.model_dump() for send in recorder.sends]))
"""


@pytest.mark.parametrize("program", ["own", "fsdp"])
def test_fake_tensors_give_the_same_counts(ranks, program):
    real = ranks(3).run(recorded_both_ways, program)
    for rank in (0, 2):
        command = [sys.executable, "-c", FAKE, program, str(rank), "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == real[rank][2]


def own_sends(_rank: int = 0) -> list[Send]:
    recorder = TrafficRecorder(lambda _group: "dp")
    programs.own_collectives(dist.group.WORLD, lambda: recorder)
    return list(recorder.sends)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_are_counted_as_the_collectives_they_are(ranks, size):
    elements = sum(programs.SIZES)
    each = elements * (4 + 2)  # float32 and bfloat16
    calls = len(programs.SIZES) * 2
    for rank, sends in enumerate(ranks(size).run(own_sends)):
        by = {(send.operation, send.phase): send for send in sends}
        assert all(send.axis == "dp" for send in sends)
        gather, scatter = by["all_gather", "forward"], by["reduce_scatter", "forward"]
        assert (gather.payload, gather.wire, gather.messages) == (each, (size - 1) * each, calls)
        # Waited for in backward, but begun in forward.
        assert (scatter.payload, scatter.wire, scatter.messages) == (size * each, (size - 1) * each, calls)
        assert by["all_to_all", "backward"].payload == size * each
        assert by["all_to_all", "backward"].wire == (size - 1) * each
        assert by["all_reduce", "none"].payload == each + 3 * 4
        assert by["all_reduce", "reduce"].payload == size * each
        assert by["broadcast", "reduce"].payload == (each if rank == size - 1 else 0)
        assert by["barrier", "none"].messages == 1
        wire = 0
        for whole in (size * elements * width for elements in programs.SIZES for width in (4, 2)):
            # Everything to everybody while that is little; else pieces there and sums back.
            everything = (size - 1) * whole
            wire += everything if everything <= 512 * 1024 else 2 * (size - 1) * whole // size
        assert by["all_reduce", "reduce"].wire == wire


def native_sends() -> list[Send]:
    recorder = TrafficRecorder(lambda _group: "x")
    with recorder, phase("reduce"):
        dist.all_reduce(torch.ones(100))
        dist.all_gather_single(torch.ones(200), torch.ones(100))
        dist.reduce_scatter_single(torch.ones(50), torch.ones(100))
        dist.all_to_all_single(torch.ones(100), torch.ones(100))
        rank = dist.get_rank()
        ours, theirs = [30, 70], [[30, 70], [20, 80]]
        splits = theirs[rank]
        ours = [theirs[peer][rank] for peer in range(2)]
        dist.all_to_all_single(torch.ones(sum(ours)), torch.ones(100), ours, splits)
        dist.all_reduce(torch.ones(10), group=dist.new_group([rank], use_local_synchronization=True))
        torch.ops._c10d_functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD.group_name)
        torch.ops._c10d_functional.wait_tensor(torch.ones(1))
    return list(recorder.sends)


def test_torch_operations_by_hand(ranks):
    for rank, sends in enumerate(ranks(2).run(native_sends)):
        by = {send.operation: send for send in sends}
        assert set(by) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
        # One of 400 bytes and one of 20; the group of one rank sends nothing.
        assert (by["all_reduce"].payload, by["all_reduce"].wire, by["all_reduce"].messages) == (420, 420, 2)
        assert (by["all_gather"].payload, by["all_gather"].wire) == (400, 400)
        # Gloo's reduce-scatter is an all-reduce inside.
        assert (by["reduce_scatter"].payload, by["reduce_scatter"].wire) == (400, 400)
        own = [30, 80][rank]
        assert (by["all_to_all"].payload, by["all_to_all"].wire) == (800, 200 + 400 - own * 4)


def test_nccl_rules_differ_where_its_algorithms_do():
    class Group:
        def size(self) -> int:
            return 4

        def rank(self) -> int:
            return 1

    from meshwright.comm.traffic import Transport

    group: dist.ProcessGroup = Group()  # type: ignore[assignment]
    scatter = Transport("reduce_scatter", group, 4000)
    assert (scatter.wire("gloo"), scatter.wire("nccl")) == (6000, 3000)
    assert Transport("all_reduce", group, 4000).wire("nccl") == 6000
    # Binomial tree of 4: root to 1 and 2, then 1 to 3.
    assert Transport("broadcast", group, 10, root=1).wire("gloo") == 20
    assert Transport("broadcast", group, 10, root=0).wire("gloo") == 10


def unknown_operation() -> str:
    traffic = Traffic(lambda _group: "x", "gloo")
    schema = torch._C.parse_schema("c10d::teleport_(Tensor x) -> ()")

    class Operation:
        _schema = schema

    with pytest.raises(NotImplementedError) as refusal:
        traffic.see(Operation(), (torch.ones(1),), {})
    return str(refusal.value)


def test_an_unknown_operation_does_not_go_uncounted():
    assert unknown_operation() == "traffic: operation c10d::teleport_ has no counting rule"


def nothing_recorded_outside() -> int:
    recorder = TrafficRecorder(lambda _group: "x")
    programs.own_collectives(dist.group.WORLD, _nothing)
    with recorder:
        pass
    programs.own_collectives(dist.group.WORLD, _nothing)
    return len(recorder.sends)


def _nothing() -> AbstractContextManager[object]:
    return torch.enable_grad()


def test_only_what_runs_inside_is_recorded(ranks):
    assert ranks(2).run(nothing_recorded_outside) == [0, 0]


def test_phases_nest_and_backward_is_known():
    from meshwright.comm.phase import current_phase

    seen: defaultdict[str, str] = defaultdict(str)
    x = torch.ones(2, requires_grad=True)
    with phase("forward"):
        y = x * 2
        y.register_hook(lambda _gradient: seen.__setitem__("hook", current_phase()))
        with phase("publish"):
            seen["inner"] = current_phase()
        seen["outer"] = current_phase()
        y.sum().backward()
    assert seen == {"inner": "publish", "outer": "forward", "hook": "backward"}
    assert current_phase() == "none"
