"""The launcher at work: ranks are started, watched, and when one fails, all are started again from the last good state.

    start -> watch -> [a rank fails] name it -> evidence -> the others hand over their state -> start again
                   -> [all end]      done, stopped by agreement, or refused

Every wait in here has an end: see ``[recovery]``.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from meshwright.checkpoint.folder import CHECKPOINTS, steps, supersede_later
from meshwright.comm.position import Position
from meshwright.errors import InputError, MeshwrightError, TrainingStopped
from meshwright.files import replace_text
from meshwright.job.job import Job
from meshwright.recovery.budget import Budget
from meshwright.recovery.causes import named_cause, oom_kill_count
from meshwright.recovery.endings import Ending, failure_block
from meshwright.recovery.gathered import newest_state, put_down
from meshwright.recovery.generation import Generation, Plan, new_log_folder, stopped_by_signal
from meshwright.recovery.goodput import Goodput, Part, part_of
from meshwright.recovery.incident import Incident, gather, next_folder, what_waits, where
from meshwright.recovery.monitor import Finding, Limits, Monitor, Seen, process_state, waiters_for
from meshwright.recovery.prefetch import Prefetch
from meshwright.recovery.reporting import Reporting
from meshwright.recovery.shared import HAND_OVER, MEMBER_VARIABLE, STACK_SIGNAL, RankMemory
from meshwright.recovery.stragglers import Stragglers
from meshwright.recovery.units import ColdUnits, Start, Units, WarmUnits

_POLL = 0.03
"""Seconds between two looks at the ranks."""
_SETTLE = 0.25
"""Seconds after a first failure in which others are collected: the cause may be seen later than a consequence."""
_STACKS = 0.5
"""Seconds that ranks have to write their stacks."""


class RanksFailed(MeshwrightError):
    """Some rank failed; the message is one block about the first."""


class Supervisor:
    """Runs a plan to its end; see the module's words."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.section = plan.section
        self.job = plan.job
        self._received: list[int] = []
        self._memories: list[RankMemory] = []
        self._budget = Budget(plan.section.restarts if plan.job is not None else 0)
        self._best = self._replay_until = self._number = 0
        self._replaced = 0
        self._failed_at: float | None = None
        self._known_at = 0.0
        self._state_folder: Path | None = None
        self._fewer_since: float | None = None
        self._rejoining = False
        self._oom_kills = oom_kill_count()
        self.goodput = Goodput(time.monotonic(), plan.ranks)
        self._prefetch = Prefetch(plan.run_directory) if plan.job is not None else None
        self.report = Reporting(plan.run_directory, plan.section) if plan.job is not None else None

    def run(self) -> None:
        """Until the work is done.

        Raises:
            InputError: a rank refused the job.
            TrainingStopped: the ranks stopped by agreement, or on a signal.
            RanksFailed: a rank failed, and the run may not start again.
        """
        kind = WarmUnits if self.section.start == "warm" and self.plan.job is not None else ColdUnits
        self._units: Units = kind(self.plan.module, self.plan.environment)
        outcome = "failed"
        try:
            with self._signals():
                arguments, ranks = list(self.plan.arguments), self.plan.ranks
                while True:
                    generation = self._start(arguments, ranks)
                    incident = self._watch(generation)
                    if incident is not None:
                        arguments, ranks = self._recover(generation, incident)
                    elif self._rejoining and not self._received and stopped_by_signal(generation):
                        arguments, ranks = self._rejoin()
                    else:
                        break
                outcome = self._judge(generation)
        except TrainingStopped:
            outcome = "stopped"
            raise
        finally:
            self._units.close()
            for memory in self._memories:
                memory.close()
            self._forget_state()
            if self.report is not None:
                self.goodput.charge(time.monotonic(), "idle", self.plan.ranks)
                self.report.end(outcome, self.goodput)

    # -- starting ---------------------------------------------------------------------------------

    def _start(self, arguments: Sequence[str], ranks: int) -> Generation:
        logs = new_log_folder(self.plan.run_directory)
        while len(self._memories) < ranks:
            self._memories.append(RankMemory(len(self._memories)))
        self._number += 1
        number = self._number
        for memory in self._memories:
            memory.renew()
        store = self._memories[0].beat
        starts = [
            Start(
                rank=rank,
                arguments=[str(self.plan.run_directory), *arguments],
                environment={
                    **self.plan.environment,
                    "RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                    "MESHWRIGHT_RECORDS": str(logs),
                    MEMBER_VARIABLE: self._memories[rank].member(number, store, self.plan.port).to_json(),
                },
                log=logs / f"rank-{rank}.log",
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self._monitor = Monitor(
            Limits(stopped=self.section.stopped_after, hang=self.section.hang_after, setup=self.section.setup_after)
        )
        self._stragglers = Stragglers(self.section.straggler_steps, self.section.straggler_score, self._peers)
        self._units.start(starts)
        return Generation(number, ranks, logs, time.monotonic())

    def _peers(self, rank: int) -> tuple[int, ...]:
        """The ranks with as much work as this one: those of its pipeline stage."""
        if self.job is None:
            return (rank,)
        from meshwright.job.grid import coordinates

        layout = self.job.layout
        stage = coordinates(layout, rank).pp
        return tuple(other for other in range(layout.ranks) if coordinates(layout, other).pp == stage)

    # -- watching ---------------------------------------------------------------------------------

    def _watch(self, generation: Generation) -> Incident | None:
        """Until all ranks have ended as they should (None), or one fails."""
        told, deadline = 0, float("inf")
        while True:
            now = time.monotonic()
            self._collect(generation)
            if len(generation.endings) == generation.ranks and not self._failures(generation):
                return None
            if len(self._received) > told or now > deadline:
                if told or now > deadline:
                    self._signal_all(generation, signal.SIGKILL)
                else:
                    self._signal_all(generation, self._received[0])
                    deadline = now + self.plan.grace_seconds
                told = len(self._received)
            if self._failures(generation) and not self._received:
                return self._death(generation)
            positions = self._positions(generation)
            self._account(generation, positions, now)
            if self._prefetch is not None:
                self._prefetch.look()
            if not self._received:
                finding = self._look(generation, positions, now)
                if finding is not None:
                    return self._named(generation, finding, positions)
                self._maybe_rejoin(generation, now)
            if len(generation.endings) == generation.ranks:
                return None
            time.sleep(_POLL)

    def _collect(self, generation: Generation) -> None:
        for rank, code in self._units.ended().items():
            generation.endings[rank] = Ending.of(
                rank, generation.logs, code, time.time(), asked=rank in generation.asked
            )

    def _failures(self, generation: Generation) -> list[Ending]:
        stopped_by = signal.Signals(self._received[0]) if self._received else None
        failed = [ending for ending in generation.endings.values() if ending.failed(stopped_by)]
        return sorted(failed, key=lambda ending: ending.blame)

    def _positions(self, generation: Generation) -> dict[int, Position]:
        return {rank: self._memories[rank].position() for rank in range(generation.ranks)}

    def _look(self, generation: Generation, positions: Mapping[int, Position], now: float) -> Finding | None:
        seen = {}
        for rank, pid in self._units.processes().items():
            state = process_state(pid)
            seen[rank] = Seen(position=positions[rank], stopped=state in ("T", "t"), process_state=state)
            if positions[rank].process == 0 and now - generation.began > self.section.setup_after:
                return Finding(kind="hung", ranks=(rank,), seconds=now - generation.began)
        return self._monitor.look(now, seen)

    def _account(self, generation: Generation, positions: Mapping[int, Position], now: float) -> None:
        """Charge the time since the last look, and take note of finished steps."""
        furthest = max(position.finished for position in positions.values())
        self.goodput.charge(now, self._part(positions.values()), generation.ranks)
        self._best = max(self._best, furthest)
        for rank, position in positions.items():
            if position.finished:
                self._stragglers.step(rank, position.finished, position.own_seconds)
        if furthest and self._failed_at is not None:
            self._recovered(generation, furthest, max(position.finished_at for position in positions.values()))
        if self.report is not None:
            for slow in self._stragglers.new_ones():
                self.report.slow(slow, positions[slow.rank], self.section.straggler_score)

    def _part(self, positions: Iterable[Position]) -> Part:
        """What the time is spent on while the ranks are there."""
        return part_of(positions, restarting=self._failed_at is not None, replay_until=self._replay_until)

    def _recovered(self, generation: Generation, step: int, now: float) -> None:
        if self.report is not None and self._failed_at is not None:
            self.report.recovered(
                step, now - self._failed_at, now - self._known_at, generation.ranks, self._replay_until
            )
        self._failed_at = None
        self._forget_state()
        for memory in self._memories:
            memory.forget_handed()

    # -- failures ---------------------------------------------------------------------------------

    def _death(self, generation: Generation) -> Incident:
        """Some rank has ended by itself: which was the first?"""
        first = self._failures(generation)[0]
        # What ended by a signal is no consequence; anything else may be.
        deadline = time.monotonic() + (0.0 if first.exit_code < 0 else _SETTLE)
        while time.monotonic() < deadline and len(generation.endings) < generation.ranks:
            time.sleep(0.01)
            self._collect(generation)
        positions = self._positions(generation)
        first = self._failures(generation)[0]
        oom = oom_kill_count() - self._oom_kills
        cause = named_cause(first.error, first.exit_code, oom)
        if first.blamed:
            return self._incident_of(
                generation, Incident(
                    kind="corrupt", ranks=first.blamed, world=generation.ranks, sentence=first.error.partition(": ")[2],
                    positions=positions, error=first.error, good_step=first.good_step,
                )
            )  # fmt: skip
        if first.lost_peer:
            kind, text = "lost", "lost its connection to another rank, though all live"
        else:
            kind, text = "dead", f"ended: {first.how}"
        said = f", {first.error.splitlines()[0][:300]}" if first.error else ""
        waiters = waiters_for([first.rank], positions)
        sentence = (
            f"rank {first.rank} of {generation.ranks} {text}{said}{f' ({cause})' if cause else ''}, "
            f"{where(positions[first.rank])}{what_waits(waiters, positions)}"
        )
        return self._incident_of(
            generation, Incident(
                kind=kind, ranks=(first.rank,), world=generation.ranks, sentence=sentence, cause=cause,  # type: ignore[arg-type]
                waiters=waiters, positions=positions, error=first.error,
            )
        )  # fmt: skip

    def _named(self, generation: Generation, finding: Finding, positions: Mapping[int, Position]) -> Incident:
        words = {
            "stopped": "is stopped (SIGSTOP or a debugger)", "hung": "hangs", "desync": "is out of step",
            "lost": "waits for a message that does not come",
        }  # fmt: skip
        names = ", ".join(map(str, finding.ranks))
        plural = "ranks" if len(finding.ranks) > 1 else "rank"
        detail = f" ({finding.detail})" if finding.detail else ""
        sentence = (
            f"{plural} {names} of {generation.ranks} {words[finding.kind]} for {finding.seconds:.1f} s{detail}, "
            f"{where(positions[finding.ranks[0]])}{what_waits(finding.waiters, positions)}"
        )
        return self._incident_of(
            generation, Incident(
                kind=finding.kind, ranks=finding.ranks, world=generation.ranks, sentence=sentence,
                waiters=finding.waiters, positions=positions,
            )
        )  # fmt: skip

    def _incident_of(self, generation: Generation, incident: Incident) -> Incident:
        now = time.monotonic()
        positions = incident.positions
        last_step = max(position.finished_at for position in positions.values())
        last_sign = incident.last_sign(max(self.goodput.until, generation.began), now)
        incident.detection_seconds = now - last_sign
        self.goodput.charge(now, self._part(positions.values()), generation.ranks)
        self.goodput.failed(last_step or generation.began, last_sign, now)
        if self._failed_at is None:
            self._failed_at = last_sign
        self._known_at = now
        self._best = max(self._best, *(position.finished for position in positions.values()))
        self._replay_until = self._best
        return incident

    def _recover(self, generation: Generation, incident: Incident) -> tuple[list[str], int]:
        """Gather evidence, end the rest, and say with what to start again.

        Raises:
            InputError: a rank refused the job.
            RanksFailed: it may not start again.
        """
        failures = self._failures(generation)
        deliberate = bool(failures) and failures[0].deliberate and not failures[0].lost_peer
        again = not deliberate and self._budget.take(self._best, incident.sentence)
        folder = next_folder(self.plan.run_directory)
        if self.report is not None and not deliberate:
            self.report.incident(incident, folder, again, self.section)
            self._ask_for_stacks(generation, incident)
            gather(folder, incident, generation.logs, self.plan.run_directory / "events.jsonl", generation.ranks)
        self._end_the_rest(generation, incident, hand_over=again and self.section.memory)
        self.goodput.charge(time.monotonic(), "restart", generation.ranks)
        if not again:
            raise self._given_up(generation, incident)
        job, ranks = self._layout_after(generation, incident)
        if job is not self.job:
            self._take_layout(job, ranks)
        return self._state_arguments(folder, incident), ranks

    def _ask_for_stacks(self, generation: Generation, incident: Incident) -> None:
        alive = {rank: pid for rank, pid in self._units.processes().items() if incident.positions[rank].process}
        for rank in alive:
            self._units.signal(rank, STACK_SIGNAL)
        waited_for = [rank for rank, pid in alive.items() if process_state(pid) not in ("T", "t")]
        deadline = time.monotonic() + _STACKS
        while time.monotonic() < deadline:
            paths = [generation.logs / f"rank-{rank}.stack" for rank in waited_for if rank not in generation.endings]
            if all(path.exists() and path.stat().st_size for path in paths):
                return
            time.sleep(0.01)
            self._collect(generation)

    def _end_the_rest(self, generation: Generation, incident: Incident, *, hand_over: bool) -> None:
        """Every rank has ended after this, at the latest ``handover`` seconds from now."""
        for rank in self._units.processes():
            generation.asked.add(rank)
            if rank in incident.ranks and incident.kind != "lost":
                self._units.signal(rank, signal.SIGKILL)
            elif incident.positions[rank].process == 0:
                self._units.signal(rank, signal.SIGTERM)
            elif hand_over and incident.kind != "corrupt":
                self._memories[rank].ask(HAND_OVER)
            else:
                self._units.signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + self.section.handover
        killed = False
        while len(generation.endings) < generation.ranks:
            time.sleep(0.01)
            self._collect(generation)
            if time.monotonic() > deadline and not killed:
                killed = True
                self._signal_all(generation, signal.SIGKILL)
            if time.monotonic() > deadline + self.section.handover:
                return  # in the kernel's hands (a dead disk): it is not waited for

    def _layout_after(self, generation: Generation, incident: Incident) -> tuple[Job | None, int]:
        """The job and the ranks to go on with: as before, or fewer when no replacement is left."""
        lost = len(incident.ranks) if incident.kind in ("dead", "stopped", "hung") else 0
        allowed = self.section.replacements
        replaced = lost if allowed is None else min(lost, max(0, allowed - self._replaced))
        self._replaced += replaced
        missing = lost - replaced
        if not missing:
            return self.job, generation.ranks
        assert self.job is not None and self.plan.job is not None
        left = generation.ranks - missing
        job = self.plan.replan(self.plan.job, left) if self.plan.replan is not None and left > 0 else None
        if job is None:
            raise RanksFailed(
                f"{incident.sentence}; no replacement is left (recovery.replacements={allowed}) and no layout of this "
                f"job fits {left} ranks; start it again with --resume when there are more"
            )
        self._fewer_since = time.monotonic()
        return job, job.layout.ranks

    def _take_layout(self, job: Job | None, ranks: int) -> None:
        assert job is not None
        self.job = job
        replace_text(self.plan.run_directory / "job.toml", job.to_toml())
        if self.report is not None:
            self.report.layout_changed(self.plan.job or job, job, ranks)

    def _state_arguments(self, folder: Path, incident: Incident) -> list[str]:
        """What tells the ranks where to go on: the newest of memory and disk, or the beginning."""
        checkpoints = self.plan.run_directory / CHECKPOINTS
        base = [word for word in self.plan.arguments if word not in ("--resume", "--restart")]
        if incident.good_step is not None:
            for memory in self._memories:
                memory.forget_states()
            supersede_later(checkpoints, incident.good_step)
        found = steps(checkpoints)
        on_disk = found[-1] if found else 0
        newest = newest_state(self._memories, handed=self.section.memory, above=on_disk)
        if newest is not None:
            step, manifest, files = newest
            self._forget_state()
            self._state_folder = folder / "memory"
            try:
                path = put_down(self._state_folder, step, manifest, files)
            except OSError as error:
                if self.report is not None:
                    self.report.event("memory-lost", step=step, reason=str(error))
            else:
                self._restarting(step, "memory")
                return [*base, "--restart", "--state", str(path)]
        self._restarting(on_disk, "disk" if found else "start")
        return [*base, "--restart", *(["--resume"] if found else [])]

    def _restarting(self, step: int, source: str) -> None:
        if self.report is not None:
            self.report.restarting(step, source, self._best - step, self._budget)

    def _forget_state(self) -> None:
        if self._state_folder is not None:
            shutil.rmtree(self._state_folder, ignore_errors=True)
            self._state_folder = None

    def _given_up(self, generation: Generation, incident: Incident) -> MeshwrightError:
        failures = self._failures(generation)
        if failures and failures[0].refusal:
            return InputError(failures[0].error)
        note = ""
        if self._budget.used and not (failures and failures[0].deliberate):
            note = (
                f"; gave up after {self._budget.used} restarts without a new step (recovery.restarts="
                f"{self._budget.restarts}); the first cause: {self._budget.first_cause}"
            )
        if incident.kind in ("dead", "lost") and failures:
            cause = f" ({incident.cause})" if incident.cause else ""
            return RanksFailed(failure_block(failures, generation.ranks, cause + note))
        return RanksFailed(incident.sentence + note)

    # -- more ranks again ---------------------------------------------------------------------------

    def _maybe_rejoin(self, generation: Generation, now: float) -> None:
        """After a while on fewer ranks: let them save and stop, after a step, to go on with all."""
        wait = self.section.rejoin_after
        if self._fewer_since is None or wait is None or self._rejoining or now - self._fewer_since < wait:
            return
        if self._failed_at is not None:
            return  # it has not come to a step yet
        self._rejoining = True
        self._signal_all(generation, signal.SIGTERM)

    def _rejoin(self) -> tuple[list[str], int]:
        self._rejoining, self._fewer_since, self._replaced = False, None, 0
        self._failed_at = self._known_at = time.monotonic()
        self._take_layout(self.plan.job, self.plan.ranks)
        base = [word for word in self.plan.arguments if word not in ("--resume", "--restart")]
        return [*base, "--restart", "--resume"], self.plan.ranks

    # -- the end --------------------------------------------------------------------------------------

    def _judge(self, generation: Generation) -> str:
        endings = [generation.endings[rank] for rank in sorted(generation.endings)]
        stopped_by = signal.Signals(self._received[0]) if self._received else None
        failed = self._failures(generation)
        if failed and failed[0].refusal:
            raise InputError(failed[0].error)
        if failed:
            raise RanksFailed(failure_block(failed, generation.ranks))
        stopped = [ending for ending in endings if ending.state == "stopped"]
        if stopped:
            raise TrainingStopped(stopped[0].error)
        unsaved = [str(ending.rank) for ending in endings if ending.state != "done"]
        if stopped_by is not None and unsaved:
            raise TrainingStopped(
                f"stopped by {stopped_by.name}; rank {', '.join(unsaved)} of {generation.ranks} ended without saving, "
                f"before training had begun or {self.plan.grace_seconds:g} s after the signal"
            )
        return "done"

    def _signal_all(self, generation: Generation, number: int) -> None:
        for rank in self._units.processes():
            generation.asked.add(rank)
            self._units.signal(rank, number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals to this process are for the ranks: the first asks them to save and stop, the second ends them."""
        watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, lambda n, _: self._received.append(n)) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
