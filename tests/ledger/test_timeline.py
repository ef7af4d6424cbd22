"""Time by parts: exclusive, summing to the whole, and the waits parted into transfer and waiting."""

from __future__ import annotations

import time

import pytest
import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.measure import Instruments, receive_transfers, waiting_for_the_slowest
from meshwright.comm.mesh import Mesh
from meshwright.comm.phase import phase
from meshwright.comm.timeline import Timeline, active_timeline, blocked, span
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.ledger.ledger import Ledger, Spends
from meshwright.train.trainer import Trainer
from tests.small_jobs import my_batches, small_job


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timeline(clock: Clock) -> Timeline:
    return Timeline(lambda group: str(group), clock=clock)


def test_inner_spans_are_taken_out_of_outer_ones():
    clock = Clock()
    line = timeline(clock)
    line.start()
    assert active_timeline() is line
    clock.now += 1  # other
    with phase("data"):
        clock.now += 2
    with phase("forward"):
        clock.now += 4
        with blocked("tp", "all_gather"):  # type: ignore[arg-type]
            clock.now += 8
        clock.now += 16
        with span("checkpoint"):
            clock.now += 32
    with phase("optimizer"):
        clock.now += 64
    line.stop()
    assert active_timeline() is None
    assert line.wall == 127
    assert dict(line.seconds) == {
        ("other", ""): 1,
        ("data", ""): 2,
        ("compute", "forward"): 20,
        ("communication", "tp"): 8,
        ("checkpoint", ""): 32,
        ("compute", "optimizer"): 64,
    }
    assert line.waits == {"tp": [8]}


def test_spans_survive_exceptions_and_cost_nothing_without_a_timeline():
    with span("data"), blocked("dp", "all_reduce"), phase("forward"):  # type: ignore[arg-type]
        pass
    clock = Clock()
    line = timeline(clock)
    line.start()
    with pytest.raises(ZeroDivisionError), phase("forward"):
        clock.now += 1
        _ = 1 / 0
    clock.now += 1
    line.stop()
    assert dict(line.seconds) == {("compute", "forward"): 1, ("other", ""): 1}
    with pytest.raises(RuntimeError, match="already running"):
        line.start()
        line.start()
    line.stop()


def test_waits_are_transfer_and_waiting_for_the_slowest():
    # Rank 1 is late by 5 at the first operation, rank 0 by 2 at the second; each transfer takes 1.
    waits = [{"dp": [6.0, 1.0], "tp": [3.0]}, {"dp": [1.0, 3.0], "tp": [4.0]}]
    groups = [{"dp": [0, 1], "tp": [0]}, {"dp": [0, 1], "tp": [1]}]
    assert waiting_for_the_slowest(waits, groups) == [{"dp": 5.0, "tp": 0.0}, {"dp": 2.0, "tp": 0.0}]
    # Groups that did not do the same are left whole.
    waits[1]["dp"].append(1.0)
    assert waiting_for_the_slowest(waits, groups) == [{"tp": 0.0}, {"tp": 0.0}]


def test_receives_take_as_long_as_the_quickest_of_the_column():
    groups = [{"pp": [0, 2]}, {"pp": [1]}, {"pp": [0, 2]}]
    assert receive_transfers([[4.0, 2.0], [], [0.5]], groups) == [1.0, 0.0, 0.5]


def sleepy_step() -> tuple[Ledger, dict[str, list[float]]]:
    with Mesh(Layout(dp=3)) as mesh:
        instruments = Instruments(mesh)
        with instruments.timing() as line:
            with phase("data"):
                time.sleep(0.02)
            with phase("forward"):
                time.sleep(0.25 if mesh.rank == 1 else 0.05)
            with phase("reduce"):
                all_reduce(torch.ones(100_000), mesh.group("dp"))
            time.sleep(0.03)
        return instruments.gather(step=7), line.waits


def test_a_late_rank_makes_the_others_wait(ranks):
    ledgers = [ledger for ledger, _ in ranks(3).run(sleepy_step)]
    assert all(ledger == ledgers[0] for ledger in ledgers)
    assert (ledgers[0].step, ledgers[0].source, ledgers[0].world) == (7, "measured", 3)
    for entry in ledgers[0].ranks:
        spends = entry.spends
        assert isinstance(spends, Spends)
        assert spends.sum == pytest.approx(spends.wall, rel=0.02)
        assert spends.data >= 0.02 and spends.other >= 0.03
        if entry.rank == 1:
            assert spends.waiting < 0.1 and spends.compute["forward"] >= 0.25
        else:
            assert spends.waiting > 0.1
    transfers = [entry.spends.communication["dp"] for entry in ledgers[0].ranks if entry.spends]
    assert max(transfers) == pytest.approx(min(transfers))


def pipelined(job: Job) -> tuple[float, float, float, int]:
    with Mesh(job.layout) as mesh:
        trainer = Trainer(job, mesh)
        if mesh.rank == 0:
            for module in trainer.stages.values():
                module.register_forward_pre_hook(lambda *_: time.sleep(0.04))
        instruments = Instruments(mesh)
        for step in range(2):
            trainer.step(my_batches(job, mesh, step))
        with instruments.timing() as line:
            trainer.step(my_batches(job, mesh, 2))
    return line.seconds["bubble", ""], line.seconds["compute", "forward"], line.wall, len(line.receives)


def test_pipeline_waits_are_bubble(ranks):
    slow, fast = ranks(2).run(pipelined, small_job("pp=2 micro_batch=2"))
    assert fast[0] > 0.08, "the second stage waits for the first, 40 ms a micro-batch"
    assert slow[1] >= 0.16 and fast[1] < fast[2] / 2
    assert slow[3] == fast[3] == 4, "gradients come back to the first, activations to the second"
