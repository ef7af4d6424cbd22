"""Which axis of the rank grid lies inside a node, and why: the sentence beside a planned layout.

The search tries every distinct order of the axes and takes the fastest; ``arrays.placement`` turns the order into
``Layout.placement``, which the run uses. Here the answer is put into words, from what each axis sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.job.cluster import ClusterSpec
from meshwright.job.grid import groups_of
from meshwright.job.layout import Layout
from meshwright.job.nodes import NODE_AXES

_NAMES = {
    "tp": "tensor-parallel", "dp": "data-parallel", "shard": "shard", "replicate": "replica", "pp": "pipeline",
}  # fmt: skip


@dataclass(frozen=True)
class AxisPlace:
    """Where the groups of one axis stand."""

    axis: str
    degree: int
    crosses: bool
    """Some group has ranks on several nodes."""
    per_node: int
    """Ranks of one group on a node, where groups are spread evenly; the most otherwise."""


def axis_places(layout: Layout, node: int) -> list[AxisPlace]:
    """Every axis of degree above 1, fastest in the grid first; rank ``r`` runs on node ``r // node``."""
    found = []
    data = ("shard", "replicate") if 1 < layout.shard_degree < layout.dp else ("dp",)
    for axis in ("tp", *data, "pp"):
        group = groups_of(layout, axis)
        if len(group[0]) == 1:
            continue
        spread = [[rank // node for rank in ranks] for ranks in group]
        crosses = any(len(set(nodes)) > 1 for nodes in spread)
        per_node = max(nodes.count(nodes[0]) for nodes in spread)
        found.append(AxisPlace(axis, len(group[0]), crosses, per_node))
    return found


def placement_sentence(layout: Layout, cluster: ClusterSpec, sent: Mapping[str, float]) -> str:
    """Which axes stay inside a node, which cross nodes, and what that costs.

    Args:
        layout: the layout; its placement counts.
        cluster: nodes and links.
        sent: bytes one rank sends in a step, by axis.
    """
    places = axis_places(layout, cluster.devices_per_node)
    if not places:
        return "One device: nothing is sent."
    if cluster.nodes == 1:
        return f"One node: everything stays on {_link(cluster, 'intra')} ({_amounts(places, sent)})."
    inside = [place for place in places if not place.crosses]
    across = [place for place in places if place.crosses]
    if not inside:
        return f"Every axis crosses nodes, over {_link(cluster, 'inter')}: {_amounts(across, sent)}."
    words = f"{_list(inside)} inside a node, over {_link(cluster, 'intra')} ({_amounts(inside, sent)})"
    if not across:
        return f"{words}; nothing crosses nodes."
    why = ""
    if _total(inside, sent) > _total(across, sent):
        why = ", because it sends most and would wait for the slower link"
    elif all(place.degree >= cluster.devices_per_node for place in across):
        why = ", since no other axis is small enough for one"
    return f"{words}{why}; {_list(across)} across nodes, over {_link(cluster, 'inter')} ({_amounts(across, sent)})."


def order_words(layout: Layout, node: int) -> str:
    """The axes inside a node, in a few characters for tables: ``tp=8`` or ``tp=4 x shard 2 of 16``."""
    words = []
    for place in axis_places(layout, node):
        if not place.crosses:
            words.append(f"{place.axis} {place.degree}")
        elif place.per_node > 1:
            words.append(f"{place.axis} {place.per_node} of {place.degree}")
    return ", ".join(words) or "-"


def _bytes(place: AxisPlace, sent: Mapping[str, float]) -> float:
    names = ("dp", "shard", "replicate", *NODE_AXES) if place.axis == "dp" else (place.axis,)
    return sum(sent.get(name, 0.0) for name in names)


def _total(places: list[AxisPlace], sent: Mapping[str, float]) -> float:
    return sum(_bytes(place, sent) for place in places)


def _list(places: list[AxisPlace]) -> str:
    words = [f"{_NAMES[place.axis]} groups ({place.axis}={place.degree})" for place in places]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _amounts(places: list[AxisPlace], sent: Mapping[str, float]) -> str:
    return ", ".join(f"{place.axis} {_bytes(place, sent) / 1e9:.3g} GB" for place in places) + " a rank and step"


def _link(cluster: ClusterSpec, level: str) -> str:
    link = cluster.links.intra if level == "intra" else cluster.links.inter
    if link is None:
        return "no link"
    each = f"{link.nics} x " if link.nics > 1 else ""
    return f"{link.kind} at {each}{link.bandwidth / 1e9:.4g} GB/s"
