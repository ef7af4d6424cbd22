"""[fault]: failures that a run inflicts on itself, addressed by rank, step and phase.

One fault is one line of text, the same in a job file and on the command line:

    kill rank=1 step=5 phase=backward
    flip-bit rank=0 step=7 tensor=layers.0.attention.q.weight
    hung-write rank=2 step=10 seconds=30
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from meshwright.errors import InputError
from meshwright.job.schedule_rules import micro_steps
from meshwright.job.sections import Section

if TYPE_CHECKING:
    from meshwright.job.job import Job

STEP_PHASES = ("start", "forward", "backward", "reduce", "agree", "optimizer", "publish", "end")
"""Of a step, in their order: before its data; in the first forward and backward pass (or that of ``micro_batch``);
before gradients are summed over ranks, before the ranks agree, before the update, before it is published; after it."""
SAVE_PHASES = ("save", "sync", "commit", "saved")
"""Of the checkpoint after a step: a write, the sync of a file, the renaming (rank 0's alone); after it."""
PHASES = STEP_PHASES + SAVE_PHASES


@dataclass(frozen=True)
class Kind:
    """What one kind of fault does, where it can happen, and what can be said about it."""

    does: str
    phase: str
    """Where it happens if nothing is said."""
    phases: tuple[str, ...] = PHASES
    options: tuple[str, ...] = ()
    ends: bool = False
    """The rank does not go on from it by itself."""


KINDS: Mapping[str, Kind] = {
    "kill": Kind("SIGKILL to the rank", "start", ends=True),
    "stop": Kind("SIGSTOP to the rank; SIGCONT after `seconds`, if given", "start", options=("seconds",)),
    "raise": Kind("an exception", "start", ends=True),
    "exit": Kind("the process exits with `code` (3)", "start", options=("code",), ends=True),
    "hang": Kind("the rank sleeps for `seconds`, or for ever", "start", options=("seconds",)),
    "slow": Kind("each of `steps` (1) steps takes `seconds` (0.2) longer", "start", ("start",), ("seconds", "steps")),
    "nan": Kind("NaN in what the pass hands on", "backward", ("forward", "backward")),
    "flip-bit": Kind("one bit of a parameter: `bit` (20) of `element` (0) of `tensor` (the rank's first)", "end",
                     STEP_PHASES, ("tensor", "element", "bit")),
    "link-down": Kind("the rank's connections are cut for `seconds` (1), or its network `interface` is down so long",
                      "start", options=("seconds", "interface")),
    "disk-full": Kind("the rank's writes of this checkpoint find no space", "save", ("save", "sync")),
    "io-error": Kind("the rank's writes of this checkpoint fail", "save", ("save", "sync")),
    "hung-write": Kind("a write of this checkpoint takes `seconds`, or for ever", "save", ("save", "sync"),
                       ("seconds",)),
    "flip-byte": Kind("one bit of `byte` (the middle) of `file` (the rank's in the newest checkpoint)", "saved",
                      options=("file", "byte")),
    "truncate": Kind("`file` (as above) loses its end, from `byte` (the middle) on", "saved",
                     options=("file", "byte")),
    "remove": Kind("`file` (as above) goes", "saved", options=("file",)),
    "kill-launcher": Kind("SIGKILL to the process that started the run", "start"),
    "kill-store": Kind("SIGKILL to the process that holds the ranks' key-value store", "start"),
}  # fmt: skip
"""Every kind of fault, by the word a user writes."""

_NUMBERS = ("rank", "step", "micro_batch", "steps", "element", "bit", "byte", "code")
_LEAST = {"step": 1, "micro_batch": 1, "steps": 1}
_ADDRESS = ("rank", "step", "phase", "micro_batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault and where it happens. Steps count from 1, as in the run's records."""

    kind: str
    rank: int
    step: int
    phase: str
    micro_batch: int = 1
    """For ``forward`` and ``backward``: in which pass of the rank, from 1."""
    options: Mapping[str, str | int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.kind, f"rank={self.rank}", f"step={self.step}", f"phase={self.phase}"]
        words += [f"micro_batch={self.micro_batch}"] if self.micro_batch > 1 else []
        return " ".join([*words, *(f"{name}={value}" for name, value in sorted(self.options.items()))])

    def number(self, name: str, otherwise: int) -> int:
        """A whole-numbered option."""
        return int(self.options.get(name, otherwise))

    def seconds(self, otherwise: float) -> float:
        """The option ``seconds``."""
        return float(self.options.get("seconds", otherwise))

    def text(self, name: str) -> str | None:
        """An option in words."""
        value = self.options.get(name)
        return None if value is None else str(value)


def parse_fault(text: str) -> Fault:
    """Read ``KIND rank=R step=S [phase=P] [option=value ...]``.

    Raises:
        InputError: what is wrong with it, and what is legal.
    """
    words = text.split()
    if not words or "=" in words[0]:
        raise InputError(f'"{text}" does not begin with a kind of fault; {_one_of("kind", KINDS)}')
    kind = KINDS.get(words[0])
    if kind is None:
        raise InputError(f'"{text}": {words[0]} is no kind of fault{_close(words[0], KINDS)}; {_one_of("kind", KINDS)}')
    legal = (*_ADDRESS, *kind.options)
    values: dict[str, str | int | float] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not value or name not in legal:
            raise InputError(
                f'"{text}": {word} is no part of a {words[0]} fault{_close(name, legal)}; legal are '
                + ", ".join(f"{one}=" for one in legal)
            )
        values[name] = _value(text, name, value)
    missing = [name for name in ("rank", "step") if name not in values]
    if missing:
        raise InputError(f'"{text}" lacks {" and ".join(f"{name}=" for name in missing)}; give rank= and step=')
    phase = str(values.get("phase", kind.phase))
    if phase not in kind.phases:
        raise InputError(f'"{text}": {words[0]} cannot happen in phase={phase}; {_one_of("phase", kind.phases)}')
    if phase == "commit" and values["rank"] != 0:
        raise InputError(f'"{text}": phase=commit is rank 0\'s alone; use rank=0, or phase=save, sync or saved')
    if "micro_batch" in values and phase not in ("forward", "backward"):
        raise InputError(f'"{text}": micro_batch= needs phase=forward or phase=backward, not {phase}; leave it out')
    file = PurePosixPath(str(values.get("file", "x")))
    if file.is_absolute() or ".." in file.parts:
        raise InputError(f'"{text}": file={file} leaves the run directory; give a path relative to it, inside it')
    return Fault(
        kind=words[0],
        rank=int(values["rank"]),
        step=int(values["step"]),
        phase=phase,
        micro_batch=int(values.get("micro_batch", 1)),
        options={name: value for name, value in values.items() if name not in _ADDRESS},
    )


def _value(text: str, name: str, value: str) -> str | int | float:
    if name == "seconds":
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise InputError(f'"{text}": seconds={value} must be a number of at least 0')
        return seconds
    if name not in _NUMBERS:
        return value
    least = _LEAST.get(name, 0)
    if not value.isdecimal() or int(value) < least:
        raise InputError(f'"{text}": {name}={value} must be a whole number of at least {least}')
    return int(value)


def _one_of(what: str, legal: Sequence[str] | Mapping[str, object]) -> str:
    return f"use the {what} {', '.join(legal)}" if len(legal) == 1 else f"{what}s are {', '.join(legal)}"


def _close(word: str, legal: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(legal), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class FaultSection(Section):
    """[fault]: failures that a run inflicts on itself, to see what becomes of it."""

    inject: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Faults, each ``KIND rank=R step=S [phase=P] [option=value ...]``; each happens once, across restarts."""
    listen: bool = False
    """Between steps, take faults that ``meshwright fault RUN`` sends."""

    @field_validator("inject", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("inject")
    @classmethod
    def _each_is_legal(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                parse_fault(text)
            except InputError as error:
                raise ValueError(str(error)) from None
        return value

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What ``inject`` says."""
        return tuple(parse_fault(text) for text in self.inject)


def check_faults(job: Job) -> None:
    """Refuse faults that can never happen in this job: of ranks, steps or checkpoints it does not have.

    Raises:
        InputError: one sentence for each.
    """
    found = ((fault, fault_problem(fault, job)) for fault in job.fault.faults)
    lines = [f'fault.inject: "{fault}": {problem}' for fault, problem in found if problem]
    if lines:
        raise InputError("\n".join(lines))


def fault_problem(fault: Fault, job: Job) -> str | None:
    """Why a fault can never happen in a job; None if it can."""
    ranks, steps, section = job.layout.ranks, job.train.steps, job.checkpoint
    if fault.rank >= ranks:
        return f"there are {ranks} ranks; use rank=0 to {ranks - 1}"
    if fault.step > steps:
        return f"train.steps is {steps}; use step=1 to {steps}"
    regular = section.every is not None and fault.step % section.every == 0
    if fault.phase in SAVE_PHASES and not (regular or fault.step == steps or section.interval is not None):
        every = f"a multiple of checkpoint.every={section.every}, or " if section.every else ""
        return f"no checkpoint is written after step {fault.step}; use {every}the last step, {steps}"
    return _pass_problem(fault, job)


def _pass_problem(fault: Fault, job: Job) -> str | None:
    """Why a fault in a forward or backward of a micro-batch can never happen: a rank has not so many."""
    if job.layout.micro_batch is None or job.batch.split is not None or job.sync.strategy == "server":
        return None  # not known before it runs
    passes = micro_steps(job.batch.global_size, job.layout.micro_batch, job.layout.dp)
    if fault.micro_batch > passes:
        legal = "leave micro_batch= out" if passes == 1 else f"use micro_batch=1 to {passes}"
        return f"micro-batches of a rank and step: {passes}; {legal}"
    return None
