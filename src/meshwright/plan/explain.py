"""Where each number of a predicted ledger comes from: the formula, with the rank's own numbers in it."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.job.job import Job
from meshwright.plan.place import Place
from meshwright.plan.predict import backend_of
from meshwright.plan.state import gradient_bytes, optimizer_bytes, parameter_bytes
from meshwright.plan.traffic import traffic


class Explained(NamedTuple):
    """One number. Those of one quantity add up to its entry in the ledger."""

    quantity: str
    """As ``ledger.compare`` names it: ``stores: parameters``, ``sends: tp all_gather forward: payload``."""
    formula: str
    value: int


def explain(job: Job, rank: int) -> list[Explained]:
    """Every number of one rank's predicted ledger that is stored or sent, with its formula.

    Args:
        job: resolved.
        rank: of its layout.
    """
    place = Place(job, rank)
    lines = []
    for name, amounts in (
        ("parameters", parameter_bytes), ("gradients", gradient_bytes), ("optimizer", optimizer_bytes),
    ):  # fmt: skip
        for amount in amounts(job, place):
            lines.append(Explained(f"stores: {name}", f"{amount.quantity}: {amount.formula}", amount.value))
    for sent in traffic(job, place, backend_of(job)):
        key = f"sends: {sent.axis} {sent.operation} {sent.phase}"
        lines.append(Explained(f"{key}: payload", sent.formula, sent.payload))
        lines.append(Explained(f"{key}: wire", sent.wired.rule, sent.wired.bytes))
        lines.append(Explained(f"{key}: messages", f"{sent.messages} x", sent.messages))
    return lines
