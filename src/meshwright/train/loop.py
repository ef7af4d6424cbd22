"""The training loop: steps, validation, checkpoints, records, and a clean end."""

from __future__ import annotations

import json
import math
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from meshwright.comm.collectives import all_gather_json, barrier
from meshwright.comm.mesh import Mesh
from meshwright.comm.phase import phase
from meshwright.comm.position import begin_own_time, begin_step, finish_step, holds_state, in_phase
from meshwright.data.loader import Loader
from meshwright.errors import SaveError, TrainingStopped
from meshwright.files import replace_text
from meshwright.job.job import Job
from meshwright.job.steady import steady_step
from meshwright.observe.progress import StepProgress
from meshwright.observe.records import JsonLines, read_json_lines, truncate_after_step
from meshwright.recovery.handover import Here
from meshwright.sync.server.cursor import passed_over
from meshwright.train.background_save import BackgroundSaver
from meshwright.train.cadence import Cadence
from meshwright.train.delayed import make_trainer
from meshwright.train.measured import LedgerRecorder
from meshwright.train.replicas import Replicas
from meshwright.train.resizing import Resizing
from meshwright.train.saving import Saver, require_shared
from meshwright.train.sinks import TensorBoard, peak_memory_bytes
from meshwright.train.trainer import StepReport

Outcome = Literal["done", "stopped"]


class TrainingLoop:
    """Runs one job on one rank from its start, or from the last checkpoint of its run directory, to its end."""

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        run_dir: Path,
        *,
        device: torch.device,
        resume: bool,
        quiet: bool = False,
        restart: bool = False,
        state: Path | None = None,
        here: Here | None = None,
    ) -> None:
        self.job, self.mesh, self.run_dir = job, mesh, run_dir
        self.first = mesh.coordinate("world") == 0
        self._shown = self.first and not quiet
        self.loader = Loader(job, dp_rank=mesh.coordinate("dp"), dp=mesh.degree("dp"), device=device)
        # Where the state comes from is the run itself: what it began with need not be there any more.
        self.trainer = make_trainer(job.with_fresh_weights() if resume or state is not None else job, mesh, device)
        self.saver = Saver(self.trainer, self.loader, run_dir)
        require_shared(run_dir, self.saver.world)
        if state is not None:
            self.saver.resume_from_memory(state)
        elif resume:
            self.saver.resume()
        # Replicas that train apart are not equal, and where steps overlap, ranks are at no one step when one fails.
        # Compression keeps state of a rank's own, too, which no replica and no copy in memory has.
        alike = job.sync.strategy == "all-reduce" and not job.layout.delayed
        self.here = here if alike and self.trainer.compressing is None else None
        replicas = Replicas(self.saver)
        self.replicas = replicas if alike and replicas.any else None
        auto = job.batch.split == "auto"
        self.resizing = Resizing(job, mesh, self.loader.split) if auto else None
        self.background = BackgroundSaver(self.saver) if job.checkpoint.mode == "async" else None
        self.cadence = Cadence(job.checkpoint, self.saver.world)
        self._unsaved: SaveError | None = None
        self.start, self._resumed = self.trainer.step_number, resume
        self.recorder = LedgerRecorder(self.trainer, run_dir, first_step=self._ledger_step())
        self._open_records(resume or restart)
        self._best_rates: list[float] = []
        self._last_validation: float | None = None
        if job.fault.inject or job.fault.listen:
            from meshwright.train.faults.arm import arm

            arm(self)
        holds_state(self.start)
        begin_own_time()
        if self.here is not None:
            self.here.offer(self.trainer.changing, self.saver.held)

    def run(self) -> dict[str, Any]:
        """Train to the last step; the summary, which is also ``summary.json`` (whole on the first rank).

        Raises:
            TrainingStopped: by an agreed decision (a signal, or a step that is not finite under policy ``stop``);
                the state after the last step that counts is saved.
        """
        self._install_signals()
        began = time.monotonic()
        with StepProgress(self.job.train.steps, self.start, shown=self._shown) as self.progress:
            if self._resumed:
                self.progress.say(f"going on after step {self.start} under layout {self.job.layout}")
                if self.saver.samples_passed_over:
                    self.progress.say(passed_over(self.saver.samples_passed_over))
            outcome, report = self._steps()
        with phase("checkpoint"):
            self._take_written(wait=True)
            if self.trainer.step_number > self.saver.saved_step:
                self._compare()
                self._save_now(last=True)
        in_phase("end")
        self._event(outcome, step=self.trainer.step_number)
        summary = self._summary(outcome, report, time.monotonic() - began)
        self.loader.close()
        if self.background is not None:
            self.background.close()
        if self.board is not None:
            self.board.close()
        barrier(self.mesh.group("world"))
        if self._unsaved is not None and self.job.checkpoint.failure == "stop":
            raise self._unsaved
        if outcome == "stopped" and report is not None:
            raise TrainingStopped(self._why(report))
        return summary

    def _steps(self) -> tuple[Outcome, StepReport | None]:
        """Steps until all are done or the ranks agree to stop; how it ended, and the last step."""
        report: StepReport | None = None
        self._complete_last_step()
        while self.trainer.step_number < self.job.train.steps:
            for report in self._one_step():
                if self._refused(report):
                    return "stopped", report
                if report.stop_requested and self.trainer.next_step < self.job.train.steps:
                    return "stopped", self._end_what_is_under_way()
                if report.step == self.trainer.next_step:
                    self._after(report)
                else:
                    begin_own_time()
        return "done", report

    def _refused(self, report: StepReport) -> bool:
        """Record a step that was not applied; whether it ends the run."""
        if report.applied:
            return False
        facts = {"step": report.step, "loss": report.loss, "gradient_norm": report.gradient_norm}
        if not self.trainer.must_stop(report):
            self._event("skipped", **facts)
            return False
        self._event("not-finite", **facts)
        # It changed nothing and does not count: what is saved is the state after the step before.
        self.trainer.abandon()
        self.trainer.step_number -= 1
        return True

    def _end_what_is_under_way(self) -> StepReport | None:
        """End every step that has begun; the report of the last one."""
        for later in self.trainer.drain():
            self._record_step(later)
            self._refused(later)
        return self.trainer.last_report

    def _after(self, report: StepReport, *, evaluate: bool = True) -> None:
        """What is due once a step is done and none is under way."""
        self.recorder.gather()
        if self.trainer.norms is not None:
            found, self.trainer.norms.found = self.trainer.norms.found, []
            for outlier in found:
                self._event("gradient-outlier", **vars(outlier))
        if evaluate:
            self._maybe_evaluate(report)
        with phase("checkpoint"):
            every = self.job.recovery.digest_every
            self._compare(due=every is not None and self.trainer.step_number % every == 0)
            self._maybe_copy()
            self._maybe_save()
        begin_own_time()

    def _complete_last_step(self) -> None:
        """What was due after the step of a state from memory, and did not come to be done."""
        report = self.trainer.last_report
        if report is None:
            return
        rows = [row for row in read_json_lines(self.metrics_path) if row.get("step") == report.step]
        if not any("loss" in row for row in rows):
            self._record_step(report)
        evaluated = self.saver.world.broadcast(any("validation_loss" in row for row in rows))
        if self.trainer.step_number > self.saver.saved_step:
            self._after(report, evaluate=not evaluated)

    def _why(self, report: StepReport) -> str:
        step = self.trainer.step_number
        if report.step == step:
            return f"stopped by a signal after step {step}; saved, continue with --resume"
        return (
            f"step {report.step}: loss {report.loss} and gradient norm {report.gradient_norm} must be finite; "
            "the update was not applied on any rank; "
            + (f"step {step} is saved" if step else "no step was done before it, so nothing is saved")
        )

    def _ledger_step(self) -> int:
        """The step to count (the next is timed), early enough that a short run records two."""
        wanted = steady_step(self.job, self.start + self.job.observe.ledger_step)
        return min(wanted, max(self.start + 1, self.job.train.steps - 1))

    def _one_step(self) -> list[StepReport]:
        """Begin the next step; the steps that ended meanwhile."""
        started, step = time.monotonic(), self.trainer.next_step
        begin_step(step + 1)
        with self.recorder.around(step):
            with phase("data"):
                batches = self.loader.batches(step)
            data_seconds = time.monotonic() - started
            with self._sized():
                reports = self.trainer.advance(batches, drain=self._due_after(step + 1))
        seconds = (time.monotonic() - started) / max(1, len(reports))
        for report in reports:
            self._ended(report, seconds, data_seconds / len(reports))
        return reports

    def _due_after(self, step: int) -> bool:
        """Whether anything but the next step comes after step ``step``."""
        every = (self.job.train.eval_every, self.job.checkpoint.every, self.job.train.steps)
        return any(number is not None and step % number == 0 for number in every)

    def _ended(self, report: StepReport, seconds: float, data_seconds: float) -> None:
        finish_step(report.step)
        rate = report.valid_tokens / seconds
        if not self.recorder.instrumented:
            self._best_rates.append(rate)
        self._record_step(
            report,
            step_seconds=seconds,
            data_seconds=data_seconds,
            tokens_per_second=rate,
            peak_memory_bytes=peak_memory_bytes(self.trainer.device),
            **self._share(),
        )
        self.progress.update(report.step, loss=report.loss, gradient_norm=report.gradient_norm, tokens_per_second=rate)
        self._resize(report.step)

    def _record_step(self, report: StepReport, **times: float) -> None:
        self._record(
            step=report.step,
            loss=report.loss,
            gradient_norm=report.gradient_norm,
            learning_rate=report.learning_rate,
            applied=report.applied,
            loss_scale=report.loss_scale,
            valid_tokens=report.valid_tokens,
            total_tokens=self.job.batch.global_size * self.job.data.sequence_length,
            **times,
        )

    def _share(self) -> dict[str, float]:
        """This rank's sequences of the step, and its time without waiting where that is measured."""
        split = self.loader.split
        share: dict[str, float] = {}
        if split is not None:
            share["sequences"] = split.sequences[self.mesh.coordinate("dp")]
        if self.resizing is not None:
            share["own_seconds"] = self.resizing.own_seconds
        return share

    def _sized(self) -> AbstractContextManager[None]:
        """Around a step: measured for ``batch.split = "auto"``, unless the ledger's instruments slow it down."""
        if self.resizing is None or self.recorder.instrumented:
            return nullcontext()
        return self.resizing.around_step()

    def _resize(self, step: int) -> None:
        """The replicas' shares of the next step, where they follow their speed."""
        change = None if self.resizing is None else self.resizing.after_step()
        if change is not None:
            self.loader.split = change.after
            self._event(
                "resized",
                step=step,
                before=list(change.before),
                sequences=list(change.after.sequences),
                micro_batches=change.after.micro_steps,
                predicted_gain=change.seconds_before / change.seconds_after - 1.0,
            )

    def _maybe_evaluate(self, report: StepReport) -> None:
        every, step = self.job.train.eval_every, report.step
        if not (step == self.job.train.steps or (every and step % every == 0)):
            return
        loss = self.evaluate()
        if loss is None:
            return
        self._last_validation = loss
        self._record(step=step, validation_loss=loss)
        self.progress.say(f"step {step}  validation loss {loss:.4f}")

    def evaluate(self) -> float | None:
        """Loss in nats per valid token over the validation split, each sample once; None without a split.

        None too when a rank is asked to stop meanwhile: the next step ends the run on all of them.
        """
        total, tokens = 0.0, 0
        with self.trainer.shared_model():
            for batches in self.loader.validation():
                loss, valid, stop = self.trainer.evaluate(batches)
                if stop:
                    return None
                total, tokens = total + loss, tokens + valid
        return total / tokens if tokens else None

    def _compare(self, *, due: bool = True) -> None:
        """Compare what replicas hold, where the job asks for it: now and then, and always before it is saved."""
        if due and self.replicas is not None and self.job.recovery.digest_every is not None:
            self.replicas.compare()

    def _maybe_copy(self) -> None:
        """Copy the state into memory that outlives this rank, where the job asks for it."""
        every = self.job.recovery.memory_every
        if self.here is not None and every is not None and self.trainer.step_number % every == 0:
            self.here.copy(self.saver.held())

    def _maybe_save(self) -> None:
        self._take_written(wait=False)
        if not self.cadence.due(self.trainer.step_number):
            return
        self._compare()
        if self.background is None:
            self._save_now()
            return
        began = time.monotonic()
        self._take_written(wait=True)  # one at a time
        if self._unsaved is None or self.job.checkpoint.failure == "continue":
            self.background.begin()
            stall = time.monotonic() - began
            self.cadence.saved(stall)
            self._event("saving", step=self.trainer.step_number, stall_seconds=stall)

    def _take_written(self, *, wait: bool) -> None:
        """Record how the checkpoint in the background ended, if it did (``wait``: until it did).

        Ranks may see a failure some steps apart; by the agreed wish to stop they leave at the same step.
        """
        ended = self.background.take(wait=wait) if self.background is not None else None
        if isinstance(ended, SaveError):
            self._save_failed(ended)
            self.trainer.stop_wanted |= self.job.checkpoint.failure == "stop"
        elif ended is not None:
            self._event("saved", step=ended.step, seconds=ended.seconds)

    def _save_now(self, *, last: bool = False) -> None:
        began = time.monotonic()
        try:
            self.saver.save()
        except SaveError as error:  # the same on every rank
            if last or self.job.checkpoint.failure == "stop":
                raise
            self._save_failed(error)
        else:
            self._event("saved", step=self.saver.saved_step, seconds=time.monotonic() - began)
        self.cadence.saved(time.monotonic() - began)

    def _save_failed(self, error: SaveError) -> None:
        self._unsaved = error
        self._event("save-failed", step=self.trainer.step_number, reason=str(error))
        self.progress.say(str(error))

    def _summary(self, outcome: Outcome, report: StepReport | None, seconds: float) -> dict[str, Any]:
        steady = sorted(self._best_rates[2:] or self._best_rates)
        summary: dict[str, Any] = {
            "outcome": outcome,
            "steps": self.trainer.step_number,
            "ranks": self.mesh.degree("world"),
            "layout": str(self.job.layout),
            "loss": report.loss if report and math.isfinite(report.loss) else None,
            "validation_loss": self._last_validation,
            "validation_unigram_entropy": self.loader.unigram_entropy() if self.first else None,
            "tokens_per_second": steady[len(steady) // 2] if steady else None,
            "training_seconds": seconds,
            "data_seconds_waited": self.loader.seconds_waited,
            "preprocessing_seconds": self.loader.preprocessing_seconds,
            "peak_memory_bytes": max(all_gather_json(peak_memory_bytes(self.trainer.device), self.mesh.group("world"))),
        }
        if self.first:
            replace_text(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def _open_records(self, resume: bool) -> None:
        rank = self.mesh.coordinate("world")
        folder = self.run_dir if self.first else self.run_dir / "ranks"
        folder.mkdir(exist_ok=True, parents=True)
        suffix = "" if self.first else f"-{rank:05d}"
        path = folder / f"metrics{suffix}.jsonl"
        if resume:
            for records in [path, *self._records_of_absent_ranks()]:
                truncate_after_step(records, self.start)
        self.metrics_path, self.metrics = path, JsonLines(path)
        self.board = TensorBoard(self.run_dir / "tensorboard") if self.first and self.job.observe.tensorboard else None
        self.events = JsonLines(self.run_dir / "events.jsonl") if self.first else None
        for problem in self.saver.passed_over:
            self._event("damaged-checkpoint", problem=problem, resumed_from=self.start)
        superseded = {"superseded": self.saver.superseded} if self.saver.superseded else {}
        self._event("resumed" if resume else "started", step=self.start, layout=str(self.job.layout), **superseded)

    def _records_of_absent_ranks(self) -> list[Path]:
        """First rank: the metrics of ranks that an earlier, larger layout had."""
        if not self.first:
            return []
        world = self.mesh.degree("world")
        paths = (self.run_dir / "ranks").glob("metrics-*.jsonl")
        return [path for path in paths if int(path.stem.removeprefix("metrics-")) >= world]

    def _record(self, **record: Any) -> None:
        self.metrics.write(**record)
        if self.board is not None:
            self.board.write(**record)

    def _event(self, kind: str, **facts: Any) -> None:
        if self.events is not None:
            self.events.write(event=kind, **facts)

    def _install_signals(self) -> None:
        def wish(_number: int, _frame: FrameType | None) -> None:
            self.trainer.stop_wanted = True

        signal.signal(signal.SIGTERM, wish)
        signal.signal(signal.SIGINT, wish)
