"""Recovery without processes: who is to blame, how often to restart, where the time went, who is slow."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from meshwright.comm import position
from meshwright.comm.phase import phase
from meshwright.comm.position import Position
from meshwright.errors import InputError
from meshwright.job.recovery_section import RecoverySection
from meshwright.recovery import supervise
from meshwright.recovery.alerts import Alerts
from meshwright.recovery.budget import Budget
from meshwright.recovery.causes import lost_a_peer, named_cause
from meshwright.recovery.gathered import assembled
from meshwright.recovery.generation import Plan
from meshwright.recovery.goodput import Goodput, part_of
from meshwright.recovery.incident import Incident
from meshwright.recovery.lock import RunLock
from meshwright.recovery.lost import keep_position, peers_lost
from meshwright.recovery.monitor import Finding, Kind, Limits, Monitor, Seen, process_state, waiters_for
from meshwright.recovery.prefetch import Prefetch
from meshwright.recovery.reporting import Reporting
from meshwright.recovery.shrink import fewer_ranks
from meshwright.recovery.stragglers import Stragglers
from meshwright.train.prepare import prepare_run
from tests.small_jobs import small_job

LIMITS = Limits(stopped=2.0, hang=10.0, setup=60.0)
ALL = (0, 1, 2, 3)


def at(
    changed: float = 0.0, *, waiting: bool = False, operation: str = "all_reduce", sequence: int = 5, beats: int = 100,
    phase: str = "reduce", started: int | None = None, group: tuple[str, tuple[int, ...]] = ("dp", ALL),
) -> Position:  # fmt: skip
    return Position(
        process=1, beats=beats, changed=changed, step=3, phase=phase, micro_batch=0, waiting=waiting,
        operation=operation, group=0 if waiting else -1, sequence=sequence if waiting else 0, finished=2,
        finished_at=0.0, own_seconds=0.1, state_step=2, port=0,
        started=(sequence if started is None else started,), groups=(group,),
    )  # fmt: skip


def look(now: float, seen: dict[int, Seen], limits: Limits = LIMITS) -> Finding | None:
    return Monitor(limits).look(now, seen)


def test_ranks_that_wait_for_one_that_computes_are_not_blamed() -> None:
    seen = {rank: Seen(position=at(waiting=rank != 2, started=4 if rank == 2 else 5)) for rank in ALL}
    assert look(9.0, seen) is None, "it may still be computing"
    found = look(11.0, seen)
    assert found is not None
    assert (found.kind, found.ranks, found.waiters) == ("hung", (2,), (0, 1, 3))


def test_a_stopped_rank_is_named_after_its_bound_unless_it_goes_on() -> None:
    monitor = Monitor(LIMITS)
    stopped = {0: Seen(position=at(waiting=True), stopped=False), 1: Seen(position=at(started=4), stopped=True)}
    going_on = {**stopped, 1: Seen(position=at(started=4), stopped=False)}
    assert monitor.look(0.0, stopped) is None and monitor.look(1.9, stopped) is None
    assert monitor.look(1.95, going_on) is None and monitor.look(2.5, stopped) is None, "counted anew"
    found = monitor.look(4.6, stopped)
    assert found is not None and (found.kind, found.ranks) == ("stopped", (1,))


def test_a_rank_that_was_stopped_for_long_is_not_hung_the_moment_it_goes_on() -> None:
    monitor = Monitor(Limits(stopped=100.0, hang=10.0, setup=60.0))
    assert monitor.look(0.0, {0: Seen(position=at(), stopped=True)}) is None
    assert monitor.look(50.0, {0: Seen(position=at(), stopped=True)}) is None
    assert monitor.look(50.1, {0: Seen(position=at())}) is None
    assert monitor.look(59.0, {0: Seen(position=at())}) is None
    assert monitor.look(61.0, {0: Seen(position=at())}) is not None


def test_setup_and_checkpoints_have_a_bound_of_their_own() -> None:
    assert look(59.0, {0: Seen(position=at(phase="checkpoint"))}) is None
    assert look(61.0, {0: Seen(position=at(phase="checkpoint"))}) is not None


def test_a_rank_that_left_out_a_collective_is_out_of_step() -> None:
    waiting = {rank: Seen(position=at(waiting=True)) for rank in (0, 1, 3)}
    ahead = at(waiting=True, operation="all_gather", phase="publish", beats=120)
    found = look(11.0, {**waiting, 2: Seen(position=ahead)})
    assert found is not None and (found.kind, found.ranks) == ("desync", (2,))
    assert found.detail == (
        "its operation 5 of dp is all_gather in publish, where the others are in all_reduce in reduce"
    )
    elsewhere = at(waiting=True, group=("tp", (2,)), started=9, sequence=9)
    found = look(11.0, {**waiting, 2: Seen(position=elsewhere)})
    assert found is not None and (found.kind, found.ranks, found.waiters) == ("desync", (2,), (0, 1, 3))


def test_all_in_the_same_operation_is_a_lost_message() -> None:
    found = look(11.0, {rank: Seen(position=at(waiting=True)) for rank in ALL})
    assert found is not None and found.kind == "lost"


def test_who_waits_through_others() -> None:
    positions = {
        0: at(waiting=True, group=("tp", (0, 1)), sequence=7, started=7),
        1: at(waiting=True, group=("pp", (1, 2)), operation="receive", sequence=2, started=2),
        2: at(started=1, group=("pp", (1, 2))),
        3: at(started=1, group=("dp", (3,))),
    }
    assert waiters_for([2], positions) == (0, 1), "rank 0 waits for rank 1, which waits for rank 2"
    assert waiters_for([1], positions) == (0,)
    assert waiters_for([3], positions) == ()


def test_no_more_restarts_than_allowed_without_a_new_step() -> None:
    budget = Budget(2)
    assert budget.take(0, "first") and budget.take(0, "second") and not budget.take(0, "third")
    assert budget.first_cause == "first"
    assert budget.take(5, "later") and budget.used == 1 and budget.first_cause == "later"
    assert budget.take(5, "again") and not budget.take(5, "again")
    assert not Budget(0).take(3, "never")


def test_the_parts_of_the_wall_sum_to_it() -> None:
    goodput = Goodput(100.0, planned_ranks=4)
    goodput.charge(110.0, "idle", 4)
    goodput.charge(150.0, "useful", 4)
    goodput.charge(152.0, "checkpoint", 4)
    goodput.charge(163.0, "useful", 4)
    goodput.failed(since=158.0, last_sign=160.0, now=163.0)
    goodput.charge(170.0, "restart", 4)
    goodput.charge(180.0, "replayed", 3)
    goodput.charge(200.0, "useful", 3)
    seconds = goodput.seconds()
    assert seconds == {
        "idle": 10.0, "useful": 40.0 + 6.0 + 15.0, "checkpoint": 2.0, "replayed": 2.0 + 10.0, "detection": 3.0,
        "restart": 7.0, "degraded": 5.0,
    }  # fmt: skip
    assert sum(seconds.values()) == 100.0


def test_a_step_that_never_ended_after_a_restart_is_not_useful() -> None:
    goodput = Goodput(0.0, planned_ranks=4)
    goodput.charge(50.0, "useful", 4)
    goodput.charge(52.0, "restart", 4)  # its ranks were started at 51
    goodput.charge(54.0, "useful", 4)
    goodput.failed(since=51.0, last_sign=53.5, now=54.0)
    seconds = {part: taken for part, taken in goodput.seconds().items() if taken}
    assert seconds == {"useful": 50.0, "restart": 2.0, "replayed": 1.5, "detection": 0.5}


@pytest.mark.parametrize(
    ("kind", "moved", "sign"),
    [("hung", 3.0, 3.0), ("hung", 0.0, 10.0), ("dead", 3.0, 9.5), ("dead", 9.8, 9.8), ("dead", 0.0, 9.5)],
)
def test_a_dead_rank_lived_when_it_was_last_looked_at(kind: Kind, moved: float, sign: float) -> None:
    positions = {0: at(changed=9.9), 1: at(changed=moved)}
    incident = Incident(kind=kind, ranks=(1,), world=2, sentence="", positions=positions)
    assert incident.last_sign(9.5, 10.0) == sign


@pytest.mark.parametrize(
    ("step", "phases", "restarting", "part"),
    [
        (0, ["setup"] * 2, False, "idle"),
        (0, ["setup"] * 2, True, "restart"),
        (0, ["checkpoint"] * 2, True, "restart"),
        (7, ["forward", "backward"], True, "replayed"),
        (8, ["forward", "backward"], True, "useful"),
        (8, ["checkpoint", "none"], False, "checkpoint"),
        (8, ["end", "checkpoint"], False, "checkpoint"),
        (8, ["end", "end"], False, "idle"),
    ],
)
def test_what_ranks_do_says_where_the_time_goes(step: int, phases: list[str], restarting: bool, part: str) -> None:
    positions = [replace(at(phase=phase), step=step) for phase in phases]
    assert part_of(positions, restarting=restarting, replay_until=7) == part


def test_goodput_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        goodput = Goodput(0.0, planned_ranks=1)
        goodput.charge(6.0, "useful", 1)
        goodput.charge(8.0, "idle", 1)
        goodput.write(tmp_path / "goodput.json", outcome="done")
    content = json.loads((tmp_path / "goodput.json").read_text())
    assert content["wall_seconds"] == 16.0 and content["goodput"] == 0.75 and len(content["launches"]) == 2


@pytest.mark.parametrize("damage", ["{", "{}", "[]"])
def test_a_damaged_goodput_file_is_told_and_kept(tmp_path: Path, damage: str) -> None:
    (tmp_path / "goodput.json").write_text(damage)
    Reporting(tmp_path, RecoverySection()).end("done", Goodput(0.0, planned_ranks=2))
    assert (tmp_path / "goodput.json").read_text() == damage
    said = json.loads((tmp_path / "events.jsonl").read_text())
    assert said["event"] == "goodput-not-written" and "damaged" in said["reason"]


def test_a_state_in_memory_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervise, "newest_state", lambda *_, **__: (7, None, {}))
    monkeypatch.setattr(supervise, "put_down", full)
    plan = Plan(
        run_directory=tmp_path, ranks=2, module="", arguments=["--resume"], port=0, grace_seconds=1.0, environment={},
        section=RecoverySection(), job=small_job("dp=2"),
    )  # fmt: skip
    incident = Incident(kind="dead", ranks=(1,), world=2, sentence="", positions={})
    assert supervise.Supervisor(plan)._state_arguments(tmp_path, incident) == ["--restart"]
    lost, again = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (lost["event"], lost["step"], lost["reason"]) == ("memory-lost", 7, "[Errno 28] No space left on device")
    assert (again["event"], again["source"]) == ("restarting", "start")


def test_slow_ranks_are_scored_against_the_fastest_of_their_stage() -> None:
    stragglers = Stragglers(3, 0.5, lambda rank: (0, 1) if rank < 2 else (2, 3))
    for step in range(1, 4):
        for rank, own in enumerate((1.0, 2.5, 9.0, 9.5)):
            stragglers.step(rank, step, own)
            stragglers.step(rank, step, own)  # seen twice, counted once
    (slow,) = stragglers.new_ones()
    assert (slow.rank, slow.score, slow.best_rank) == (1, 0.4, 0)
    assert stragglers.new_ones() == [], "reported once"
    even = Stragglers(3, 0.5, lambda _: (0, 1))
    for step in range(1, 4):
        even.step(0, step, 0.02)
        even.step(1, step, 0.05)
    assert even.new_ones() == [], "thirty milliseconds are the noise of a busy machine"


@pytest.mark.parametrize(
    ("error", "exit_code", "kills", "name"),
    [
        ("", -9, 1, "host out of memory"),
        ("", -9, 0, ""),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", 1, 0, "out of memory"),
        ("OSError: [Errno 28] No space left on device", 1, 0, "disk full"),
        ("OSError: [Errno 98] Address already in use", 1, 0, "port in use"),
        ("ValueError: three", 1, 0, ""),
    ],
)
def test_known_causes_have_names(error: str, exit_code: int, kills: int, name: str) -> None:
    assert named_cause(error, exit_code, kills) == name


def test_a_lost_peer_is_a_consequence() -> None:
    assert lost_a_peer("RuntimeError: Connection closed by peer [127.0.0.1]:3")
    assert lost_a_peer("PeerLost: process 7, rank 1 of its group of 4, has ended")
    assert not lost_a_peer("ValueError: three")


def piece(key: str, rank: int, start: int, stop: int, counted: bool) -> dict[str, Any]:
    box = {"offsets": [start], "sizes": [stop - start], "file": f"rank-{rank}", "begin": 0, "bytes": 0, "checksum": ""}
    entry = {"bytes": 0, "header_bytes": 0, "header_checksum": "", "checksum": ""}
    header = {"layout": "", "model": {}, "optimizer": {}, "state": {}}
    return {"elements": 8, "header": header, "file": f"rank-{rank}", "entry": entry,
            "pieces": [[key, "F32", [8], counted, box]]}  # fmt: skip


def test_a_state_is_put_together_only_when_the_ranks_hold_all_of_it() -> None:
    whole, copy = piece("parameter/w", 0, 0, 8, True), piece("parameter/w", 1, 0, 8, False)
    left, right = piece("parameter/w", 0, 0, 4, True), piece("parameter/w", 1, 4, 8, True)
    for parts in ([whole, copy], [copy], [left, right]):
        manifest = assembled(3, parts)
        assert manifest is not None and manifest.step == 3
    assert list(assembled(3, [whole, copy]).files) == ["rank-0"]  # type: ignore[union-attr]
    assert assembled(3, [left]) is None
    assert assembled(3, [{**left, "pieces": [], "elements": 8}]) is None
    short = piece("parameter/v", 0, 0, 8, True)
    assert assembled(3, [{**short, "elements": 16}]) is None, "another tensor was on the lost rank alone"


def test_fewer_ranks_keep_what_they_can() -> None:
    job = small_job("dp=2 tp=2 zero=1")
    smaller = fewer_ranks(job, 3)
    assert smaller is not None and (smaller.layout.dp, smaller.layout.tp, smaller.layout.ranks) == (1, 2, 2)
    assert fewer_ranks(small_job("dp=4"), 3).layout.dp == 3  # type: ignore[union-attr]
    late = fewer_ranks(small_job("pp=4 schedule=2bw micro_batch=1"), 3)
    assert late is not None and (late.layout.pp, late.layout.schedule) == (2, "2bw")
    assert fewer_ranks(small_job("pp=2 schedule=2bw micro_batch=1"), 1) is None
    alone = fewer_ranks(small_job("pp=2 schedule=zbv"), 1)
    assert alone is not None and alone.layout.ranks == 1


def test_the_newest_checkpoint_is_read_ahead(tmp_path: Path) -> None:
    prefetch = Prefetch(tmp_path)
    prefetch.look()
    assert prefetch.newest is None
    for step in (900, 1100, 1000):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-1200").mkdir()
    prefetch = Prefetch(tmp_path)
    prefetch.look()
    assert prefetch.newest == tmp_path / "checkpoints" / "step-1100", "the highest number with a manifest"


def test_a_directory_has_one_run(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(InputError, match=r"is in use by process \d+ on .*; wait for it, end it"):
        RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_a_second_run_in_a_directory_is_refused(tmp_path: Path) -> None:
    job = small_job("dp=1")
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"), pytest.raises(InputError, match="is in use by process"):
        prepare_run(job, tmp_path / "run", resume=False)
    (tmp_path / "run" / "job.toml").write_text(job.to_toml())
    with RunLock(tmp_path / "run"), pytest.raises(InputError, match="is in use by process"):
        prepare_run(job, tmp_path / "run", resume=True)


def test_alerts_reach_their_hooks_and_say_how_it_came_out(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    told = tmp_path / "told"
    section = RecoverySection(
        alert_webhook=f"http://127.0.0.1:{server.server_port}/", alert_command=f"cat >> {told}", alert_timeout=5.0
    )
    alerts = Alerts(tmp_path / "alerts.jsonl", section)
    number = alerts.send("dead", "rank 1 is gone", action="restart", deadline_seconds=9.0)
    alerts.settle(number, "step 5 done", good=True)
    alerts.settle(number, "twice", good=True)
    alerts.close()
    server.shutdown()
    server.server_close()
    notes = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [note["outcome"] for note in notes] == ["open", "step 5 done"]
    assert notes[0]["action"] == "restart" and notes[0]["deadline"] > notes[0]["sent"]
    assert notes[1]["in_time"] is True
    assert sorted(note["outcome"] for note in received) == ["open", "step 5 done"]
    assert told.read_text().count('"kind": "dead"') == 2


def test_a_hook_that_fails_is_noted_and_changes_nothing(tmp_path: Path) -> None:
    section = RecoverySection(alert_command=f"{sys.executable} -c 'raise SystemExit(3)'", alert_timeout=5.0)
    alerts = Alerts(tmp_path / "alerts.jsonl", section)
    alerts.send("slow", "rank 1 is slow", action="go on")
    alerts.close()
    notes = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert notes[0]["outcome"] == "none needed"
    assert notes[1]["hook"] == "command" and notes[1]["failed"].startswith("exit code 3")


def test_a_hook_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    class Patience:
        seconds = 0.0

        def join(self, seconds: float) -> None:
            self.seconds = seconds

    silent = socket.create_server(("127.0.0.1", 0))
    child = tmp_path / "child"
    section = RecoverySection(
        alert_webhook=f"http://127.0.0.1:{silent.getsockname()[1]}/", alert_timeout=0.5,
        alert_command=f"sleep 60 & echo $! > {child}; wait; true",
    )  # fmt: skip
    alerts, last = Alerts(tmp_path / "alerts.jsonl", section), Patience()
    alerts.send("slow", "rank 1 is slow", action="go on")
    alerts._threads.append(last)  # type: ignore[arg-type]
    alerts.close()
    notes = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()[1:]]
    silent.close()
    assert sorted(note["hook"] for note in notes) == ["command", "webhook"]
    assert all("timed out" in note["failed"] for note in notes)
    assert last.seconds <= 1.5, "a hook that does not end is waited for no more than a second longer"
    deadline = time.monotonic() + 10
    while process_state(int(child.read_text())) not in ("", "Z"):
        assert time.monotonic() < deadline, "what the command started goes on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stopped_after": 400.0}, "stopped_after = 400 s must be at most hang_after = 300 s"),
        ({"hang_after": 1600.0}, "hang_after = 1600 s must be at most setup_after = 1500 s"),
        ({"setup_after": 1800.0}, "setup_after = 1800 s must be below collective_after = 1800 s"),
        ({"handover": 300.0}, "handover = 300 s must be below hang_after = 300 s"),
    ],
)
def test_time_limits_must_be_in_order(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_job("dp=1", recovery=values)


class _Group:
    group_name = "pair"


def test_a_rank_that_lost_another_says_whom_it_waited_for_and_in_what() -> None:
    memory = keep_position()
    try:
        early = str(peers_lost(memory, 2, 4, 6.0, RuntimeError("Connection refused\nat gloo")))
        position.name_group("pair", "replicate", (0, 2))
        position.begin_step(15)
        with suppress(RuntimeError), phase("reduce"):
            position.begin_wait(_Group(), "all_reduce")
            time.sleep(0.25)
            raise RuntimeError  # what the rank says next is said outside the phase
        sentence = str(peers_lost(memory, 2, 4, 6.0, RuntimeError("[pair.cc:1] Timed out waiting 6000ms\nmore")))
    finally:
        position.attach(None)
    assert early.startswith("rank 2 of 4 lost another rank after waiting 0.")
    assert early.endswith("(recovery.collective_after = 6 s), before its first step: Connection refused")
    waited = re.match(r"rank 2 of 4 lost rank 0 after waiting (\d+\.\d) s ", sentence)
    assert waited and float(waited[1]) >= 0.2
    assert sentence.endswith(
        "(recovery.collective_after = 6 s), in step 15, reduce, in all_reduce number 1 of replicate (ranks 0, 2): "
        "[pair.cc:1] Timed out waiting 6000ms"
    )
