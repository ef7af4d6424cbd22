"""How much an old gradient counts: the factor on the learning rate for a push of staleness ``s``.

``s`` is the number of updates between the parameters a gradient was taken at and those it is applied to.

* ``none``: 1.
* ``inverse``: 1 / max(1, s) (Zhang, Gupta, Lian and Liu, IJCAI 2016).
* ``inverse-root``: 1 / sqrt(1 + s), a gentler decay.

With constant staleness ``s``, gradient descent on a quadratic of curvature L is stable for rates below
``2 sin(pi / (2 (2 s + 1))) / L``: 2, 1, 0.618, 0.445, 0.347 for s = 0 to 4.
"""

from __future__ import annotations

import math
from typing import Literal

Rule = Literal["none", "inverse", "inverse-root"]


def factor(rule: Rule, staleness: int) -> float:
    """What the learning rate of a push is multiplied by."""
    if rule == "inverse":
        return 1.0 / max(1, staleness)
    if rule == "inverse-root":
        return 1.0 / math.sqrt(1.0 + staleness)
    return 1.0


def stability_limit(staleness: int) -> float:
    """Largest stable ``rate * curvature`` of gradient descent with constant staleness."""
    return 2.0 * math.sin(math.pi / (2.0 * (2 * staleness + 1)))
