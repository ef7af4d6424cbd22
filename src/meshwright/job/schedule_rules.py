"""What each pipeline schedule asks of the number of stages a rank and of micro-batches."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.job.layout import LOOPED_SCHEDULES, V_SCHEDULES

ROUND_SCHEDULES: frozenset[str] = frozenset({"interleaved", "zero-bubble"})
"""Schedules that run micro-batches in equal rounds of about ``pp``."""


def micro_steps(global_size: int, micro_batch: int, dp: int) -> int:
    """Micro-batches that every rank runs in a step: micro-batch ``j`` of the batch goes to dp rank ``j % dp``.

    Ranks that have one fewer run an empty one in its place.

    Raises:
        InputError: one of the numbers is not positive.
    """
    if min(global_size, micro_batch, dp) < 1:
        raise InputError(f"batch sizes {global_size}, {micro_batch} and dp={dp} must all be at least 1")
    micro_batches = -(-global_size // micro_batch)
    return -(-micro_batches // dp)


def micro_batch_rule(schedule: str, pp: int, virtual: int, micro_batches: int) -> str | None:
    """The sentence that says why the schedule cannot run, or None when it can.

    Args:
        schedule: name as in ``Layout.schedule``.
        pp: pipeline ranks; 1 needs no schedule, so nothing is refused.
        virtual: stages on each pipeline rank.
        micro_batches: micro-batches a data-parallel rank runs in one step.
    """
    if pp == 1:
        return None
    if micro_batches < 1:
        return f"micro-batches: {micro_batches} is none at all; a step needs at least 1"
    if schedule in V_SCHEDULES and virtual != 2:
        return f"virtual: {virtual} stages a rank, but schedule {schedule} folds exactly 2 onto each; use virtual=2"
    if schedule not in V_SCHEDULES | LOOPED_SCHEDULES and virtual != 1:
        return (
            f"virtual: {virtual} stages a rank, but schedule {schedule} runs 1; "
            f"use virtual=1 or one of the schedules {', '.join(sorted(LOOPED_SCHEDULES))}"
        )
    fewest = fewest_micro_batches(schedule, pp)
    if micro_batches < fewest:
        return (
            f"micro-batches: {micro_batches} a step on each data-parallel rank, but schedule {schedule} "
            f"with pp={pp} needs at least {fewest}; use {fewest} or more (a larger global batch, a smaller "
            f"micro-batch or fewer data-parallel ranks)"
        )
    if schedule in ROUND_SCHEDULES and not _divides_into_rounds(pp, micro_batches):
        legal = legal_micro_batches(schedule, pp, micro_batches)
        return (
            f"micro-batches: {micro_batches} a step on each data-parallel rank do not divide into "
            f"{micro_batches // pp} equal rounds, which schedule {schedule} with pp={pp} needs; "
            f"use {' or '.join(str(count) for count in legal)}"
        )
    return None


def fewest_micro_batches(schedule: str, pp: int) -> int:
    """The smallest number of micro-batches the schedule runs with."""
    return {"1f1b": pp, "2bw": pp, "dualpipev": 2 * pp}.get(schedule, 1)


def legal_micro_batches(schedule: str, pp: int, near: int) -> tuple[int, ...]:
    """The closest legal counts below and above ``near`` (multiples of ``pp`` are always legal)."""

    def legal(count: int) -> bool:
        rounds_fit = schedule not in ROUND_SCHEDULES or _divides_into_rounds(pp, count)
        return count >= fewest_micro_batches(schedule, pp) and rounds_fit

    below = next((count for count in range(near - 1, 0, -1) if legal(count)), None)
    above = next(count for count in range(near + 1, near + 2 * pp + 2) if legal(count))
    return (above,) if below is None else (below, above)


def _divides_into_rounds(pp: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // pp) == 0
