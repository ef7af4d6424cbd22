"""Schedules by the name they have in a job; without torch, so that a plan can follow them."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import InputError
from meshwright.sync.halving_doubling import HalvingDoubling
from meshwright.sync.hierarchical import Hierarchical
from meshwright.sync.leaders import Leaders
from meshwright.sync.ordered import Ordered
from meshwright.sync.ring import Ring
from meshwright.sync.schedule import Schedule
from meshwright.sync.tree import Tree

SCHEDULED = ("ring", "tree", "halving-doubling", "hierarchical", "leaders", "ordered")
TWO_LEVEL = ("hierarchical", "leaders")


def make_schedule(name: str, nodes: Sequence[int] | None = None) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of ``SCHEDULED``.
        nodes: the node of each rank of the group, for ``TWO_LEVEL`` ones.

    Raises:
        InputError: there is no such schedule, or it needs ``nodes``.
    """
    if name in TWO_LEVEL:
        if nodes is None:
            raise InputError(f"algorithm: {name} must know the node of each rank; give nodes")
        return Hierarchical(tuple(nodes)) if name == "hierarchical" else Leaders(tuple(nodes))
    match name:
        case "ring":
            return Ring()
        case "tree":
            return Tree()
        case "halving-doubling":
            return HalvingDoubling()
        case "ordered":
            return Ordered()
    raise InputError(f"algorithm: {name!r} is not a schedule; use one of {', '.join(SCHEDULED)}")
