"""The predicted and the traced ledger of a rank side by side: state and traffic must agree to the byte."""

from __future__ import annotations

from meshwright.job.job import Job
from meshwright.ledger.compare import Tolerances, compare
from meshwright.plan.predict import predict
from meshwright.prove.trace import trace

EXACT = Tolerances(activations=None, wire=0.0)


def differences(job: Job, rank: int) -> list[str]:
    """What the two do not agree on."""
    found = compare([trace(job, [rank]), predict(job, [rank])], EXACT)
    return [f"{each.quantity}: {each.values}" for each in found if not each.agrees]
