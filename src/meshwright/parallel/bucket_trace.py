"""When a bucket's sum was ready to begin, began, ended, and how long it kept the training thread from computing.

    backward   |grad|grad|grad|        |grad|grad|           |optimizer
    bucket 0             ^ ready, start   .   .  ^ end         waits and additions in between: exposed
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from meshwright.comm.collectives import Handle
from meshwright.comm.operations import Operations
from meshwright.comm.timeline import Timeline, active_timeline
from meshwright.ledger.ledger import BucketTimes


@dataclass
class _Exposed:
    seconds: float = 0.0


class _Timed(Handle):
    """A handle that adds the time of its wait, local additions included, to its bucket's."""

    def __init__(self, inner: Handle, exposed: _Exposed, timeline: Timeline) -> None:
        super().__init__(inner.group, "", ())
        self._inner, self._exposed, self._timeline = inner, exposed, timeline

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See ``Handle.wait``."""
        began = self._timeline.elapsed()
        done = self._inner.wait(timeout)
        self._exposed.seconds += self._timeline.elapsed() - began
        return done

    def is_completed(self) -> bool:
        """See ``Handle.is_completed``."""
        return self._inner.is_completed()


def now() -> float | None:
    """Seconds since the timed step began; None outside of one."""
    timeline = active_timeline()
    return None if timeline is None else timeline.elapsed()


def traced(name: str, nbytes: int, ready: float | None, sequence: Operations) -> Operations:
    """The same sequence; in a timed step its times are entered when it ends.

    Args:
        name: of the bucket.
        nbytes: of its gradients.
        ready: when its last gradient came (``now``); absent: when it starts.
        sequence: its operations, not begun.
    """
    timeline = active_timeline()
    return sequence if timeline is None else _traced(timeline, name, nbytes, ready, sequence)


def _traced(timeline: Timeline, name: str, nbytes: int, ready: float | None, sequence: Operations) -> Operations:
    start, exposed = timeline.elapsed(), _Exposed()
    for handle in sequence:
        yield _Timed(handle, exposed, timeline)
    if active_timeline() is timeline:
        timeline.buckets.append(
            BucketTimes(
                name=name, bytes=nbytes, ready=start if ready is None else ready, start=start, end=timeline.elapsed(),
                exposed=exposed.seconds,
            )
        )  # fmt: skip
