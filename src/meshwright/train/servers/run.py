"""Start servers and workers on this machine, coordinate them, start again what dies, and end all of them together."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import CHECKPOINTS, step_folder, steps, supersede_later
from meshwright.checkpoint.verify import verify
from meshwright.data.corpora import open_corpora
from meshwright.errors import CheckpointError, DamagedCheckpoint, InputError, TrainingStopped
from meshwright.files import replace_text
from meshwright.job.job import Job
from meshwright.job.schedule_rules import micro_steps
from meshwright.observe.progress import StepProgress
from meshwright.recovery.generation import new_log_folder
from meshwright.recovery.launch import RanksFailed, last_lines
from meshwright.recovery.rank import LAUNCHER_VARIABLE, RECORDS_VARIABLE, RankRecord
from meshwright.recovery.threads import threads_per_rank
from meshwright.sync.server.coordinator import Coordinator
from meshwright.sync.server.cursor import Position, passed_over
from meshwright.sync.server.ledger import ServersLedger, differences, predict
from meshwright.sync.server.modes import Arrival, Clocked, Mode
from meshwright.sync.server.node import PassiveNode, watch
from meshwright.sync.server.plan import Plan
from meshwright.sync.server.protocol import VERSION, Run
from meshwright.sync.server.replica import COORDINATOR
from meshwright.sync.server.sockets import listen
from meshwright.train.learning_rate import learning_rate
from meshwright.train.optimizer import variance_steps
from meshwright.train.resumable import check_samples
from meshwright.train.servers.records import RunRecords
from meshwright.train.servers.shapes import Shapes, fingerprint
from meshwright.train.servers.whereabouts import FACTS, forget, write_token

_MODULE = "meshwright.train.servers.process"
_POLL_SECONDS = 0.05
_END_SECONDS = 30.0
"""How long processes may take to leave once all is done."""
_STOP_SECONDS = 60.0
"""How long a stop by a signal may take: the steps that have begun, and a checkpoint."""


def check_servers(job: Job) -> None:
    """Refuse what can be refused before anything is written: too many servers, an address that cannot be had.

    Raises:
        InputError: in a sentence.
    """
    _ = Shapes(job).shards
    listen(job.sync.server_host, job.sync.server_port).close()


@dataclass(frozen=True)
class Begin:
    """Where a run begins: steps, samples and, if it goes on from one, the checkpoint."""

    step: int = 0
    position: Position = field(default_factory=lambda: Position(0))
    checkpoint: Path | None = None
    frozen_updates: int = 0
    """Updates that left AdamW's second moments as they were."""


def first_ranges(job: Job, position: Position) -> Position:
    """What of the samples that came back to the run before this job hands out, in ranges of its own."""
    size, backup = job.batch.global_size, job.sync.backup_workers
    return position.cut(size // (job.layout.dp - backup)) if backup else Position(position.next)


def make_mode(job: Job, begin: Begin) -> Mode:
    """The rule of the job's mode."""
    sync, dp, size = job.sync, job.layout.dp, job.batch.global_size
    if sync.server_mode == "asynchronous":
        return Arrival(begin=begin.step, cursor=begin.position.next, pushes=dp, batch=size)
    return Clocked(
        begin=begin.step, cursor=begin.position.next, slots=_slots(job), workers=dp, batch=size,
        bound=sync.staleness_bound or 0, enough=dp - sync.backup_workers if sync.backup_workers else None,
        returned=first_ranges(job, begin.position).returned,
    )  # fmt: skip


def _slots(job: Job) -> int:
    """How many pushes a step is cut into, where it is."""
    if job.train.deterministic:  # a push a micro-batch: then the sum does not depend on the number of workers
        assert job.layout.micro_batch is not None
        return micro_steps(job.batch.global_size, job.layout.micro_batch, job.layout.dp) * job.layout.dp
    return job.layout.dp


def _waiting(job: Job) -> int:
    """The most pushes that servers hold at once: a worker goes on only from what has all that was in order."""
    if job.sync.server_mode == "asynchronous":
        return job.layout.dp
    return _slots(job) * ((job.sync.staleness_bound or 0) + 1)


def make_plan(job: Job, begin: Begin) -> Plan:
    """What the coordinator needs to know of the job."""
    train, optimizer, sync = job.train, job.optimizer, job.sync

    def rate(step: int) -> float:
        return learning_rate(
            step, peak=optimizer.lr, schedule=optimizer.schedule, total_steps=train.steps,
            warmup_steps=optimizer.warmup_steps, decay_steps=optimizer.decay_steps, min_ratio=optimizer.min_lr_ratio,
        )  # fmt: skip

    validates = job.data.validation is not None
    every = range(train.eval_every or train.steps, train.steps + 1, train.eval_every or train.steps)
    saves = range(job.checkpoint.every, train.steps + 1, job.checkpoint.every) if job.checkpoint.every else ()
    return Plan(
        shards=sync.servers,
        replicas=sync.server_replicas,
        workers=job.layout.dp,
        pushes=job.layout.dp if sync.server_mode == "asynchronous" else 1,
        begin=begin.step,
        steps=train.steps,
        rate=rate,
        clip_norm=optimizer.clip_norm,
        stop_on_nonfinite=train.nonfinite == "stop",
        staleness=sync.stale_rate,
        evaluate_at=frozenset([*every, train.steps]) if validates else frozenset(),
        save_at=frozenset(saves),
        timeout=sync.server_timeout,
        awaited=frozenset(range(job.layout.dp) if sync.workers_elsewhere else ()),
    )


def predicted_ledger(job: Job) -> ServersLedger:
    """What the job's servers store and its workers send, in closed form."""
    shapes, optimizer = Shapes(job), job.optimizer
    return predict(
        [sum(chunk.count for chunk in chunks) for chunks in shapes.shards],
        master=shapes.master_dtype.itemsize,
        compute=shapes.compute_dtype.itemsize,
        moments=2 if optimizer.name == "adamw" else int(optimizer.momentum > 0),
        waiting=_waiting(job),
    )


def train_with_servers(job: Job, run_dir: Path, *, resume: bool, quiet: bool) -> None:
    """Train a prepared run with a parameter server on this machine.

    Raises:
        InputError: an address is taken, or a process refused the job.
        CheckpointError: there is nothing to resume from.
        TrainingStopped: by a signal, or a step that is not finite; the state is saved.
        RanksFailed: what died could not be done without.
    """
    begin = _resume_point(job, run_dir) if resume else Begin()
    corpora = open_corpora(job.data, job.model.vocabulary)
    if begin.checkpoint is not None:
        check_samples(verify(begin.checkpoint).state, job.train.seed, len(corpora.training))
    with StepProgress(job.train.steps, begin.step, shown=not quiet) as progress:
        left = begin.position.waiting - first_ranges(job, begin.position).waiting
        if left:
            progress.say(passed_over(left))
        records = RunRecords(
            job, run_dir, corpora, begin=begin.step, progress=progress, resumed=resume,
            frozen_updates=begin.frozen_updates,
        )  # fmt: skip
        try:
            _Supervisor(job, run_dir, begin, records).run()
        finally:
            records.close()


def _resume_point(job: Job, run_dir: Path) -> Begin:
    folder = run_dir / CHECKPOINTS
    found = steps(folder)
    for step in reversed(found):
        path = step_folder(folder, step)
        try:
            manifest = verify(path)
        except DamagedCheckpoint as error:
            if job.checkpoint.damaged == "refuse":
                raise CheckpointError(f'{error}; --set checkpoint.damaged="previous" takes the one before') from None
            continue
        supersede_later(folder, step)
        state = manifest.state
        frozen = int(state["optimizer_steps"]) - variance_steps(state)
        return Begin(step, Position.of(state), path, frozen)
    raise CheckpointError(f"--resume: {folder} has no complete checkpoint that is not damaged; start again")


@dataclass
class _Child:
    """One process: what it is, and how it was started."""

    name: str
    role: str
    index: int
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    ended: bool = False


@dataclass
class _Supervisor:
    job: Job
    run_dir: Path
    begin: Begin
    records: RunRecords
    children: list[_Child] = field(default_factory=list)
    restarts: int = 0
    first_failure: str | None = None
    signals: list[int] = field(default_factory=list)

    def run(self) -> None:
        job, sync = self.job, self.job.sync
        self.logs = new_log_folder(self.run_dir)
        listener = listen(sync.server_host, sync.server_port)
        run = Run(write_token(self.run_dir), fingerprint(job), sync.server_timeout)
        self.coordinator = Coordinator(make_plan(job, self.begin), make_mode(job, self.begin), self.records)
        self.node = PassiveNode(
            self.coordinator, COORDINATOR, run, listener, lambda text: self.records.event("refused", reason=text)
        )
        host, port = self.node.address
        facts = {
            "coordinator": [host, port], "protocol": VERSION, "job": run.job, "version": self.coordinator.ordered,
            "checkpoint": None if self.begin.checkpoint is None else str(self.begin.checkpoint.absolute()),
        }  # fmt: skip
        replace_text(self.run_dir / FACTS, json.dumps(facts, indent=2) + "\n")
        watch(self.node, self.coordinator.tick, min(1.0, sync.server_timeout / 4))
        try:
            with self._signals():
                for shard in range(sync.servers):
                    for _ in range(sync.server_replicas):
                        self._start("server", shard)
                here = job.layout.dp - sync.workers_elsewhere
                for index in range(here):
                    self._start("worker", index)
                self._say_what_runs_elsewhere(range(here, job.layout.dp))
                self._watch_children()
        finally:
            self._end_children()
            self.node.close()
            forget(self.run_dir)
        self._judge()

    def _say_what_runs_elsewhere(self, workers: range) -> None:
        say, host = self.records.progress.say, self.node.address[0]
        for index in workers:
            words = f"python -m {_MODULE} {self.run_dir.absolute()} --worker {index}"
            say(f"training begins when this runs too, elsewhere: {words}")
        if workers and ipaddress.ip_address(host).is_loopback:
            say(
                f"only processes of this machine reach {host}; for others, set sync.server_host to an address of this "
                "machine that they reach"
            )

    def _start(self, role: str, index: int) -> None:
        number = len(self.children) + 1
        name = f"{role}-{index}.{number}"
        while self.node.knows(name):  # somebody has started one by hand under a name of ours
            name += "-"
        log = self.logs / f"{name}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(self.job.layout.dp))),
            "THP_MEM_ALLOC_ENABLE": "1",
            LAUNCHER_VARIABLE: str(os.getpid()),
            RECORDS_VARIABLE: str(self.logs),
            "RANK": str(number),
        }
        words = [sys.executable, "-u", "-m", _MODULE, str(self.run_dir), f"--{role}", str(index), "--name", name]
        with log.open("wb") as file:
            # A session of its own: Ctrl-C reaches the launcher alone, which then decides.
            process = subprocess.Popen(
                words, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.children.append(_Child(name, role, index, number, process, log))
        self.records.event("process-started", process=name, pid=process.pid)

    def _watch_children(self) -> None:
        deadline: float | None = None
        while not self.coordinator.finished:
            if self.coordinator.failure is not None or self.records.error is not None:
                return
            for child in list(self.children):
                if not child.ended and child.process.poll() is not None:
                    self._ended(child)
            if not any(not child.ended and child.role == "worker" for child in self.children):
                with self.node.lock:  # those started elsewhere go on without any of ours
                    if self.coordinator.deserted:
                        self.coordinator.fail("no worker is left")
            if self.signals and deadline is None:
                deadline = time.monotonic() + _STOP_SECONDS
                self.node.act(lambda: self.coordinator.wish_to_stop("signal"))
            if len(self.signals) > 1 or (deadline is not None and time.monotonic() > deadline):
                return
            time.sleep(_POLL_SECONDS)

    def _ended(self, child: _Child) -> None:
        """A process is gone before all was done: its peers are told, and another is started in its place."""
        child.ended = True
        record = RankRecord.read(self.logs, child.number)
        code = child.process.returncode
        error = record.error if record is not None else ""
        end = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        how = f"{child.name} {end}"
        if error:
            how += f": {error}"
        if code == InputError.exit_code and record is not None and record.state == "failed":
            raise InputError(error)
        self.first_failure = self.first_failure or "\n".join(
            [how, *(f"  | {line}" for line in last_lines(child.log, 12)), f"  whole log: {child.log}"]
        )
        self.records.event("process-ended", process=child.name, exit_code=code, error=error)
        self.node.act(lambda: self.coordinator.lost(child.name))
        if self.restarts < self.job.sync.server_restarts and self.coordinator.failure is None:
            self.restarts += 1
            self._start(child.role, child.index)
        elif self.coordinator.awaits(child.role):
            with self.node.lock:
                self.coordinator.fail(f"{child.name} ended before training began")

    def _end_children(self) -> None:
        """Give every process a moment to leave by itself if all went well, and end what is then left."""
        deadline = time.monotonic() + (_END_SECONDS if self.coordinator.finished else 0.0)
        for child in self.children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def _judge(self) -> None:
        step = self.coordinator.ordered // self.coordinator.plan.pushes
        if self.records.error is not None:
            raise self.records.error
        if self.coordinator.failure is not None:
            first = f"\n{self.first_failure}" if self.first_failure else ""
            raise RanksFailed(f"{self.coordinator.failure}{first}")
        if not self.coordinator.finished:
            name = _signal_name(self.signals[0])
            raise TrainingStopped(f"stopped by {name} before step {step} could be saved")
        self.records.summary(self._measured())
        if self.records.why == "signal":
            raise TrainingStopped(f"stopped by a signal after step {step}; saved, continue with --resume")
        if self.records.why is not None:
            raise TrainingStopped(f"{self.records.why}; step {step} is saved")

    def _measured(self) -> dict[str, Any]:
        """What the processes left of their bytes, beside the closed form."""
        predicted = predicted_ledger(self.job)
        found = {}
        for child in self.children:
            path = self.logs / f"{child.name}.bytes.json"
            if path.exists():
                found[child.name] = json.loads(path.read_text(encoding="utf-8"))
        return {
            "servers": {
                "restarts": self.restarts,
                "predicted": predicted.as_json(),
                "measured": found,
                "ledger_differences": differences(predicted, found),
            }
        }

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, _frame: object) -> None:
            self.signals.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
