"""The parameter server's promises, message by message: real coordinator, replicas and workers in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.sync.server.cursor import Position
from meshwright.sync.server.modes import Clocked, Mode, Work
from meshwright.sync.server.protocol import Message
from meshwright.sync.server.rehearsal import Notes, Rehearsal
from meshwright.sync.server.replica import COORDINATOR, Replica
from meshwright.sync.server.staleness import factor, stability_limit
from tests.unit.simulated_servers import Computing, SmallStore, arrival, clocked, network, plan, replay, start

MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "synchronous": (lambda: clocked(2), {"steps": 3}),
    "asynchronous": (lambda: arrival(2), {"pushes": 2, "steps": 3}),
    "stale-synchronous": (lambda: clocked(2, bound=2), {"steps": 3}),
    "backup": (lambda: clocked(3, enough=2, batch=2), {"workers": 3, "steps": 3}),
}
VICTIMS = ("server-0.0", "server-0.1", "server-1.0", "worker-1")


def make(name: str, seed: int) -> Rehearsal:
    mode, changes = MODES[name]
    return network(plan(**changes), mode(), seed=seed)


def assert_exact(run: Rehearsal, notes: Notes) -> None:
    """Every replica left holds what the order of updates says, each push once; no accepted one is missing."""
    assert run.coordinator.failure is None
    expected = replay(notes, run.plan.shards)
    assert run.replicas
    for replica in run.replicas.values():
        assert replica.version == len(notes.updates)
        assert torch.equal(replica.store.state()[0], expected[replica.shard].state()[0])
        assert torch.equal(replica.store.state()[1], expected[replica.shard].state()[1])
    entries = [key for update in notes.updates for key in update.entries]
    assert len(entries) == len(set(entries))
    for worker in run.workers.values():
        mine = [key for key in entries if key[0] == worker.name]
        # A worker that died may not have heard of its last one.
        assert worker.accepted <= len(mine) <= worker.accepted + 1


def samples_of(notes: Notes) -> list[tuple[int, int]]:
    return [(work.first, work.slot if work.slots > 1 else 0) for update in notes.updates for work in update.works]


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_one_process_comes_to_the_same_parameters_from_the_order_alone(name: str, seed: int) -> None:
    run = make(name, seed)
    notes = run.run()
    assert_exact(run, notes)
    assert len(set(samples_of(notes))) == len(samples_of(notes))
    assert list(notes.saved) == [3] and notes.end == [None]


def campaign(name: str, victim: str, every: int) -> int:
    """Kill ``victim`` before every ``every``-th message of a run; how many kills there were."""
    reference = make(name, 1)
    reference.run()
    kills = 0
    for at in range(0, reference.delivered, every):
        run = make(name, at)

        def kill(number: int, run: Rehearsal = run, at: int = at) -> None:
            here = victim in {**run.replicas, **run.dialogues}
            if number == at and here and run.coordinator.started and not run.coordinator.finished:
                run.kill(victim)

        run.before_delivery = kill
        notes = run.run()
        assert_exact(run, notes)
        kills += victim not in {**run.replicas, **run.dialogues} and any("lost" in kind for kind, _ in notes.events)
        assert len(set(samples_of(notes))) == len(samples_of(notes))
        if name == "synchronous":
            for replica in run.replicas.values():
                assert torch.equal(replica.store.state()[0], reference.replicas[replica.name].store.state()[0])
    return kills


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_loses_nothing_and_applies_nothing_twice(name: str, victim: str) -> None:
    assert campaign(name, victim, every=29) > 1


@pytest.mark.all
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("victim", [*VICTIMS, "server-1.1", "worker-0"])
def test_a_kill_before_any_message_loses_nothing_and_applies_nothing_twice(name: str, victim: str) -> None:
    assert campaign(name, victim, every=1) > 50


@pytest.mark.parametrize("at", range(20, 150, 43))
@pytest.mark.parametrize("name", MODES)
def test_a_new_server_takes_over_the_state_and_then_the_shard(name: str, at: int) -> None:
    run = make(name, at)
    stage = 0

    def act(number: int) -> None:
        nonlocal stage
        if run.coordinator.finished:
            return
        if stage == 0 and number >= at and run.coordinator.started:
            run.kill("server-0.0")
            run.add_server("server-0.9", 0)
            stage = 1
        elif stage == 1 and "server-0.9" in run.coordinator.chains[0].ready:
            run.kill("server-0.1")
            stage = 2

    run.before_delivery = act
    notes = run.run()
    assert_exact(run, notes)
    assert set(run.coordinator.chains[0].members) == run.coordinator.chains[0].ready
    assert stage == 2 or at > 60, "the new one never was ready"


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_servers_that_come_while_the_chain_changes_are_ready_in_the_end_and_no_sooner(name: str, seed: int) -> None:
    run = make(name, seed)
    acts = [
        lambda: run.add_server("server-0.8", 0),
        lambda: run.add_server("server-0.9", 0),
        lambda: run.kill("server-0.0"),
        lambda: run.kill("server-0.1"),
    ]

    def act(number: int) -> None:
        chain = run.coordinator.chains[0]
        assert all(run.replicas[each]._whole for each in chain.ready & {"server-0.8", "server-0.9"})
        if run.coordinator.started and number % 9 == 0 and acts and (len(acts) > 1 or "server-0.8" in chain.ready):
            acts.pop(0)()

    run.before_delivery = act
    notes = run.run()
    assert_exact(run, notes)
    chain = run.coordinator.chains[0]
    assert set(chain.members) == chain.ready and {"server-0.8", "server-0.9"} <= chain.ready


def view(epoch: int, *names: str, equal: bool = False) -> Message:
    chain = [[name, "here", 1] for name in names]
    return Message("view", {"epoch": epoch, "chain": chain, "equal": equal})


def said(out: Any) -> list[tuple[str, str, Any]]:
    return [(to, message.kind, message.fields.get("epoch")) for to, message in out]


def test_one_whose_successor_is_cut_off_says_so_until_the_chain_goes_on_without_it() -> None:
    """The coordinator does not hear what comes from an older epoch, and nothing else is sent again."""
    head = Replica("head", 0, SmallStore(start(0)))
    head.handle(COORDINATOR, view(1, "head", "next", equal=True))
    head.handle("worker", Message("push", {"worker": "worker", "sequence": 1}, [start(0)]))
    assert said(head.lost("next")) == [(COORDINATOR, "suspect", 1)]
    assert (COORDINATOR, "suspect", 2) in said(head.handle(COORDINATOR, view(2, "head", "next", "last")))
    out = head.handle(COORDINATOR, view(3, "head", "last"))
    assert said(out) == [(COORDINATOR, "joined", 3), ("last", "install", 3)]
    assert said(head.handle("last", Message("installed", {"epoch": 3}))) == [("worker", "stored", None)]


def test_one_that_has_no_state_yet_passes_none_on_and_says_so_when_it_has_one() -> None:
    old, new, newest = (Replica(name, 0, SmallStore(start(0))) for name in ("old", "new", "newest"))
    old.handle(COORDINATOR, view(1, "old", equal=True))
    assert new.handle(COORDINATOR, view(2, "old", "new")) == []
    state = dict(old.handle(COORDINATOR, view(2, "old", "new")))["new"]
    assert new.handle(COORDINATOR, view(3, "old", "new", "newest")) == []
    passed = new.handle("old", state)
    assert said(passed) == [(COORDINATOR, "joined", 3), ("newest", "install", 3)]
    assert said(newest.handle("new", dict(passed)["newest"])) == [(COORDINATOR, "joined", 3), ("new", "installed", 3)]
    assert said(new.handle("newest", Message("installed", {"epoch": 3}))) == [("old", "installed", 2)]
    assert said(newest.handle(COORDINATOR, view(4, "new", "newest"))) == [(COORDINATOR, "joined", 4)]


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("victim", ["server-0.0", "server-0.1", "worker-1"])
@pytest.mark.parametrize("at", range(25, 140, 46))
def test_one_that_was_taken_for_dead_goes_on_and_does_no_harm(name: str, victim: str, at: int) -> None:
    run = make(name, at)

    def act(number: int) -> None:
        if number == at and run.coordinator.started and not run.coordinator.finished:
            run.frozen.add(victim)
            run.tick([victim])
        if number >= at + 40:
            run.frozen.discard(victim)

    run.before_delivery = act
    while run.step() or run.frozen:
        if not any(queue for pair, queue in run.queues.items() if not run.frozen & set(pair)):
            run.frozen.clear()  # everybody else is done
    notes = run.notes
    assert notes.end == [None]
    assert_exact(run, notes)
    out = run.replicas.get(victim)
    assert out is None or out.name in run.coordinator.chains[0].members, "a deposed replica serves on"


@given(
    workers=st.integers(1, 4), bound=st.integers(0, 3), steps=st.integers(1, 5), seed=st.integers(0, 10_000),
    dead=st.integers(0, 400),
)  # fmt: skip
@settings(max_examples=25)
def test_no_worker_runs_ahead_of_the_bound(workers: int, bound: int, steps: int, seed: int, dead: int) -> None:
    mode = clocked(workers, bound=bound)
    run = network(plan(workers=workers, steps=steps), mode, seed=seed)
    asked: list[tuple[int, int]] = []
    take = mode.take

    def watch(worker: int, alive: Any) -> Work | None:
        work = take(worker, alive)
        if work is not None:
            asked.append((work.clock, mode.open))  # type: ignore[attr-defined]
        return work

    mode.take = watch  # type: ignore[method-assign]

    def kill(number: int) -> None:
        if number == dead and workers > 1:
            run.kill("worker-0")

    run.before_delivery = kill
    notes = run.run()
    assert all(0 <= clock - oldest <= bound for clock, oldest in asked)
    # Reads hold every update of clocks up to c - s - 1.
    for update in notes.updates:
        for fact in update.facts:
            assert min(fact["versions"]) >= update.number - 1 - bound
            assert max(fact["versions"]) <= update.number - 1
    assert_exact(run, notes)


def final(mode: Mode, seed: int, **changes: Any) -> list[torch.Tensor]:
    run = network(plan(**changes), mode, seed=seed)
    run.run()
    return [run.replicas[f"server-{shard}.0"].store.state()[0] for shard in range(2)]


@pytest.mark.parametrize("seed", range(4))
def test_bound_zero_is_synchronous_to_the_bit_in_any_order_of_messages(seed: int) -> None:
    reference = final(clocked(3), 0, workers=3)
    for one, two in zip(final(clocked(3, bound=0), seed, workers=3), reference, strict=True):
        assert torch.equal(one, two)


def test_backup_workers_drop_late_pushes_and_hand_their_samples_out_again() -> None:
    run = network(plan(workers=3, steps=6), clocked(3, enough=2, batch=2), seed=5)
    notes = run.run()
    assert all(len(update.entries) == 2 for update in notes.updates)
    firsts = [work.first for update in notes.updates for work in update.works]
    assert len(firsts) == len(set(firsts)) == 12
    # Handed out so far: the applied ones and those that are to come back first, no other.
    position = notes.position
    assert position is not None and position.returned
    assert sorted([*firsts, *position.returned]) == list(range(position.next))


@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_backup_workers_that_goes_on_trains_on_no_sample_twice_and_on_none_later_than_it_must(
    seed: int,
) -> None:
    firsts: list[int] = []
    position = Position(0)
    for part in range(3):
        mode = Clocked(
            begin=3 * part, cursor=position.next, slots=3, workers=3, batch=8, enough=2, returned=position.returned
        )
        notes = network(plan(workers=3, begin=3 * part, steps=3 * part + 3), mode, seed=seed).run()
        firsts += [work.first for update in notes.updates for work in update.works]
        assert notes.position is not None
        position = notes.position
    assert position.count == 4 and position.returned
    assert sorted([*firsts, *position.returned]) == list(range(0, position.next, 4))


@pytest.mark.parametrize("name", MODES)
def test_a_run_that_stops_at_once_says_where_the_next_begins(name: str) -> None:
    """What came before the step that is not finite counts, what was begun beyond it does not."""

    def poison(values: list[torch.Tensor], work: Work) -> list[torch.Tensor]:
        return [torch.full_like(value, math.nan if work.clock == 1 else 1.0) for value in values]

    mode, changes = MODES[name]
    notes = network(plan(**changes), mode(), compute=lambda: Computing(poison), seed=4).run()
    assert notes.end[0] is not None and notes.position is not None
    applied = [work for update in notes.updates for work in update.works]
    used = {at for work in applied for at in range(work.first, work.first + work.count)}
    assert not used & set(notes.position.returned)
    assert used | set(notes.position.returned) == set(range(notes.position.next))


@pytest.mark.parametrize(("staleness", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618), (4, 0.347)])
def test_stability_on_a_quadratic_ends_where_theory_says(staleness: int, limit: float) -> None:
    """Workers that take turns have constant staleness: one less than their number."""
    assert stability_limit(staleness) == pytest.approx(limit, abs=5e-4)

    def size_after(rate: float) -> float:
        workers = staleness + 1
        run = network(
            plan(workers=workers, pushes=workers, steps=400 // workers, rate=lambda step: rate, clip_norm=None,
                 replicas=1, shards=1),
            arrival(workers),
            store=lambda shard: SmallStore(torch.ones(1, dtype=torch.float64), momentum=0.0),
            compute=lambda: Computing(lambda values, work: [values[0].clone()]),
            seed=None,
        )  # fmt: skip
        notes = run.run()
        late = [each for update in notes.updates[2 * workers : -2 * workers] for each in update.staleness]
        assert set(late) == {staleness}
        return float(run.replicas["server-0.0"].store.state()[0].abs().max())

    assert size_after(0.97 * limit) < 1.0
    assert size_after(1.03 * limit) > 1.0


def test_factors_of_the_learning_rate() -> None:
    assert [factor("none", s) for s in (0, 3)] == [1.0, 1.0]
    assert [factor("inverse", s) for s in (0, 1, 4)] == [1.0, 1.0, 0.25]
    assert factor("inverse-root", 3) == pytest.approx(1 / math.sqrt(4))


@pytest.mark.parametrize(
    ("mode", "workers", "pushes", "most"),
    [
        (lambda: clocked(3), 3, 1, 3),
        (lambda: clocked(3, enough=2, batch=2), 3, 1, 3),
        (lambda: clocked(2, bound=2), 2, 1, 6),
        (lambda: arrival(3), 3, 3, 3),
    ],
)
def test_so_many_pushes_wait_at_most(mode: Any, workers: int, pushes: int, most: int) -> None:
    """``most`` is what the ledger says of the mode."""
    found = set()
    for seed in range(8):
        run = network(plan(workers=workers, pushes=pushes, steps=6), mode(), seed=seed)
        run.run()
        found |= {replica.most_waiting for replica in run.replicas.values()}
    one = start(0).numel() * start(0).element_size()
    assert (workers - 1) * one <= max(found) <= most * one


@pytest.mark.parametrize(("rule", "pushes"), [("inverse", 3), ("inverse-root", 3), ("inverse", 1)])
def test_a_stale_push_is_applied_at_the_rule_s_rate(rule: Any, pushes: int) -> None:
    """With one push a step (dp=1), too: more workers than that may be started by hand."""
    run = network(plan(workers=3, pushes=pushes, staleness=rule), arrival(pushes), seed=2)
    notes = run.run()
    assert {max(update.staleness) for update in notes.updates} > {0}
    for update in notes.updates:
        assert update.rate == 0.1 * factor(rule, max(update.staleness))


def test_a_step_that_is_not_finite_is_applied_nowhere() -> None:
    def poison(values: list[torch.Tensor], work: Work) -> list[torch.Tensor]:
        bad = math.nan if work.clock == 1 and work.slot == 1 else 1.0
        return [torch.full_like(value, bad) for value in values]

    run = network(plan(steps=4), clocked(2), compute=lambda: Computing(poison))
    notes = run.run()
    assert notes.updates[-1].number == 2 and notes.updates[-1].factor is None
    assert notes.end[0] is not None and "must be finite" in notes.end[0]
    assert all(bool(replica.store.state()[0].isfinite().all()) for replica in run.replicas.values())
    skipping = network(plan(steps=4, stop_on_nonfinite=False), clocked(2), compute=lambda: Computing(poison))
    assert [update.factor is None for update in skipping.run().updates] == [False, True, False, False]


def test_validation_is_shared_out_and_survives_a_worker() -> None:
    run = network(plan(steps=2, evaluate_at=frozenset({1, 2})), clocked(2), seed=3)
    dead = False

    def act(number: int) -> None:
        nonlocal dead
        if run.coordinator._validating is not None and not dead:
            dead = True
            run.kill("worker-1")

    run.before_delivery = act
    notes = run.run()
    assert set(notes.validated) == {1, 2} and None not in notes.validated.values()
    assert_exact(run, notes)


def test_the_last_server_of_a_shard_cannot_be_done_without() -> None:
    run = network(plan(replicas=1), clocked(2))
    run.before_delivery = lambda number: run.kill("server-1.0") if number == 60 else None
    run.run()
    assert run.coordinator.failure is not None and "shard 1 has no server left" in run.coordinator.failure


def test_a_run_is_deserted_when_no_worker_is_connected_and_none_is_awaited() -> None:
    run = network(plan(workers=3, awaited=frozenset(range(3))), clocked(3))
    seen = []

    def act(number: int) -> None:
        seen.append(run.coordinator.deserted)
        for at, name in ((60, "worker-0"), (100, "worker-1"), (140, "worker-2")):
            if number == at:
                run.kill(name)

    assert not run.coordinator.deserted, "they are still to come"
    run.before_delivery = act
    with pytest.raises(RuntimeError, match="stands still"):
        run.run()
    assert len(run.coordinator.workers) == 0 and run.coordinator.deserted and not any(seen[:140])


@pytest.mark.parametrize("replicas", [1, 2])
def test_servers_that_are_silent_and_that_nobody_can_stand_in_for_are_waited_for_and_then_given_up(
    replicas: int,
) -> None:
    run = network(plan(replicas=replicas, timeout=10.0), clocked(2))
    while not run.coordinator.started:
        run.step()
    servers = [f"server-0.{number}" for number in range(replicas)]

    def after(seconds: float, heard: float = 0.0) -> list[str]:
        before = len(run.notes.events)
        run.coordinator.tick(seconds, dict.fromkeys(servers, heard))
        return [kind for kind, _ in run.notes.events[before:]]

    assert after(9.0) == []
    assert after(11.0) == [*["server-lost", "new-head"] * (replicas - 1), "server-silent"]
    assert after(40.0) == [] and run.coordinator.failure is None
    assert after(45.0, heard=44.0) == ["server-returned"]
    assert after(56.0, heard=44.0) == ["server-silent"]
    assert after(105.0, heard=44.0) == ["failed"] and after(106.0, heard=44.0) == []
    assert f"{servers[-1]} has said nothing for 60 s and no other server can go on" in str(run.coordinator.failure)


@pytest.mark.parametrize("name", MODES)
def test_workers_leave_and_join_while_the_run_goes_on(name: str) -> None:
    mode, changes = MODES[name]
    run = network(plan(**{**changes, "steps": 8}), mode(), seed=7)

    def act(number: int) -> None:
        if number == 60:
            run.workers["worker-0"].leaving = True
        if "worker-9" not in run.workers and any(kind == "worker-left" for kind, _ in run.notes.events):
            run.add_worker("worker-9", 0)

    run.before_delivery = act
    notes = run.run()
    kinds = [kind for kind, _ in notes.events]
    assert "worker-left" in kinds and kinds.count("worker-joined") == run.plan.workers + 1
    assert_exact(run, notes)
    assert len(set(samples_of(notes))) == len(samples_of(notes))


@pytest.mark.parametrize("name", MODES)
def test_a_server_that_comes_when_all_is_done_is_sent_home(name: str) -> None:
    """One that was started in another's place, and took longer than the rest of the run."""
    run = make(name, 1)
    run.run()
    late = Message("register", {"shard": 0, "host": "127.0.0.1", "port": 1})
    assert run.coordinator.finished
    assert [(to, message.kind) for to, message in run.coordinator.handle("server-0.9", late)] == [
        ("server-0.9", "finish")
    ]
