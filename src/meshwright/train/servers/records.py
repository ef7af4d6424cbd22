"""What a parameter-server run leaves behind: metrics, events, the order of updates, checkpoints, the summary."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint.folder import CHECKPOINTS
from meshwright.checkpoint.placed import PlacedTensor
from meshwright.checkpoint.save import save
from meshwright.checkpoint.world import Alone
from meshwright.data.corpora import Corpora
from meshwright.data.tokens import unigram_entropy
from meshwright.files import replace_text
from meshwright.job.job import Job
from meshwright.observe.progress import StepProgress
from meshwright.observe.records import JsonLines, truncate_after_step
from meshwright.sync.server.cursor import Position
from meshwright.sync.server.update import Update
from meshwright.train.saving import retention
from meshwright.train.servers.shapes import Shapes
from meshwright.train.servers.store import owned_ranges, placed

UPDATES = "updates.jsonl"
"""In the run directory: the order of updates, each with its pushes and what their workers had read."""

_SAID = frozenset({
    "worker-lost", "worker-silent", "worker-returned", "server-lost", "server-silent", "server-returned", "new-head",
    "failed",
})  # fmt: skip
"""Events that the terminal shows."""


class RunRecords:
    """The coordinator's sink. Not safe for two threads; the coordinator's lock covers it.

    Args:
        job: resolved.
        run_dir: the run's.
        corpora: for the summary's figures.
        begin: steps done before.
        progress: of the terminal.
        frozen_updates: before this run, that left AdamW's second moments as they were.
    """

    def __init__(
        self, job: Job, run_dir: Path, corpora: Corpora, *, begin: int, progress: StepProgress,
        resumed: bool, frozen_updates: int = 0,
    ) -> None:  # fmt: skip
        self.job, self.run_dir, self.corpora, self.progress = job, run_dir, corpora, progress
        self.shapes = Shapes(job)
        self._frozen_updates = frozen_updates
        self._pushes = job.layout.dp if job.sync.server_mode == "asynchronous" else 1
        if resumed:
            for name in ("metrics.jsonl", UPDATES):
                truncate_after_step(run_dir / name, begin)
        self.metrics = JsonLines(run_dir / "metrics.jsonl")
        self.events = JsonLines(run_dir / "events.jsonl")
        self.updates = JsonLines(run_dir / UPDATES)
        self._step: list[tuple[Update, float]] = []
        self._since = time.monotonic()
        self._start = self._since
        self._rates: list[float] = []
        self._staleness: Counter[int] = Counter()
        self._pushed: Counter[str] = Counter()
        self._loss: float | None = None
        self._validation: float | None = None
        self._done = begin
        self.error: Exception | None = None
        """Why a checkpoint or a record could not be written; the run ends."""
        self.why: str | None = None
        """Why the run stopped early."""
        self.event("resumed" if resumed else "started", step=begin, layout=str(job.layout), strategy="server")

    def _write(self, file: JsonLines, **record: Any) -> None:
        """Append a record. That it cannot be written is the run's end, not the fault of whose message it tells of."""
        try:
            file.write(**record)
        except OSError as error:
            self.error = self.error or OSError(error.errno, error.strerror, str(file.path))

    def event(self, kind: str, **facts: Any) -> None:
        """See ``Sink.event``."""
        self._write(self.events, event=kind, **facts)
        if kind in _SAID:
            self.progress.say(f"{kind}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))

    def update(self, update: Update, loss: float) -> None:
        """See ``Sink.update``."""
        step = (update.number - 1) // self._pushes + 1
        self._staleness.update(update.staleness)
        self._pushed.update(worker for worker, _ in update.entries)
        self._write(
            self.updates,
            step=step,
            update=update.number,
            pushes=[
                {"worker": key[0], "sequence": key[1], "first": work.first, "slot": work.slot, "read": fact["versions"]}
                for key, work, fact in zip(update.entries, update.works, update.facts, strict=True)
            ],
            rate=update.rate,
            factor=update.factor,
        )
        self._step.append((update, loss))
        if update.number == step * self._pushes:
            self._end_step(step)

    def _end_step(self, step: int) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        updates = [update for update, _ in self._step]
        valid = sum(update.valid for update in updates)
        total = sum(loss * (update.valid if self._pushes > 1 else 1) for update, loss in self._step)
        self._loss = total / max(1, valid) if self._pushes > 1 else total
        staleness = [each for update in updates for each in update.staleness]
        rate = valid / seconds if seconds > 0 else 0.0
        self._rates.append(rate)
        self._done = step
        self._step = []
        self._write(
            self.metrics,
            step=step,
            loss=self._loss,
            gradient_norm=updates[-1].norm,
            learning_rate=updates[-1].rate,
            applied=all(update.factor is not None for update in updates),
            loss_scale=1.0,
            valid_tokens=valid,
            total_tokens=self.job.batch.global_size * self.job.data.sequence_length,
            step_seconds=seconds,
            tokens_per_second=rate,
            updates=len(updates),
            staleness_mean=statistics.fmean(staleness),
            staleness_max=max(staleness),
        )
        self.progress.update(step, loss=self._loss, gradient_norm=updates[-1].norm, tokens_per_second=rate)

    def evaluated(self, step: int, loss: float | None) -> None:
        """See ``Sink.evaluated``."""
        self._since = time.monotonic()
        if loss is not None:
            self._validation = loss
            self._write(self.metrics, step=step, validation_loss=loss)
            self.progress.say(f"step {step}  validation loss {loss:.4f}")

    def save(self, step: int, shards: Sequence[Sequence[Tensor]], updates: int, position: Position) -> None:
        """See ``Sink.save``: the same files that every layout writes and reads."""
        began = time.monotonic()
        tensors = [each for shard, state in enumerate(shards) for each in self._placed(shard, state)]
        state = {
            **position.as_state(), "seed": self.job.train.seed, "samples": len(self.corpora.training),
            "optimizer_steps": updates, "loss_scale": 1.0, "loss_scale_good_steps": 0,
            **({"variance_steps": updates - self._frozen_updates} if self.job.optimizer.name == "adamw" else {}),
        }  # fmt: skip
        every, number = self.job.checkpoint.drill_every, step // (self.job.checkpoint.every or step)
        try:
            save(
                self.run_dir / CHECKPOINTS, step, tensors,
                layout=str(self.job.layout),
                model=self.job.model_spec.model_dump(mode="json"),
                optimizer=self.job.optimizer.model_dump(mode="json"),
                state=state, keep=retention(self.job), finite=True,
                drill=every is not None and number % every == 0, world=Alone(),
            )  # fmt: skip
        except Exception as error:
            self.error = error
            self.event("save-failed", step=step, reason=str(error))
        else:
            self.event("saved", step=step, seconds=time.monotonic() - began)
        self._since = time.monotonic()

    def _placed(self, shard: int, state: Sequence[Tensor]) -> list[PlacedTensor]:
        chunks = self.shapes.shards[shard]
        count = len(chunks)
        owned = owned_ranges(self.shapes, chunks, state[:count])
        optimizer = self.job.optimizer
        roles = ["exp_avg", "exp_avg_sq"] if optimizer.name == "adamw" else ["momentum"] if optimizer.momentum else []
        result = []
        for index, piece in enumerate(owned):
            result += placed(self.shapes, piece, piece.master, "parameter")
            for number, role in enumerate(roles, 1):
                result += placed(self.shapes, piece, state[number * count + index], role)  # type: ignore[arg-type]
        return result

    def ended(self, why: str | None) -> None:
        """See ``Sink.ended``."""
        self.why = why
        self.event("stopped" if why else "done", step=self._done)

    def summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """Write ``summary.json``, with the keys of every run and the servers' own."""
        steady = sorted(self._rates[2:] or self._rates)
        pushes = sum(self._staleness.values())
        validation = self.corpora.validation
        summary: dict[str, Any] = {
            "outcome": "stopped" if self.why else "done",
            "steps": self._done,
            "ranks": self.job.layout.dp,
            "layout": str(self.job.layout),
            "loss": self._loss if self._loss is not None and math.isfinite(self._loss) else None,
            "validation_loss": self._validation,
            "validation_unigram_entropy": None if validation is None else unigram_entropy(validation.targets()),
            "tokens_per_second": steady[len(steady) // 2] if steady else None,
            "training_seconds": time.monotonic() - self._start,
            "preprocessing_seconds": self.corpora.preprocessing_seconds,
            "staleness_mean": sum(s * n for s, n in self._staleness.items()) / pushes if pushes else None,
            "staleness_max": max(self._staleness, default=None),
            "staleness": {str(staleness): count for staleness, count in sorted(self._staleness.items())},
            "pushes_by_worker": dict(sorted(self._pushed.items())),
            **more,
        }
        replace_text(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def close(self) -> None:
        """Close the files."""
        for file in (self.metrics, self.events, self.updates):
            with contextlib.suppress(OSError):  # of what could not be written before
                file.close()
