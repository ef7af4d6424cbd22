"""Layouts side by side: does the full state fit, how many batches advance at once, what crosses which links."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshwright.job.cluster import ClusterSpec
from meshwright.job.job import Job
from meshwright.job.layout import Layout
from meshwright.ledger.ledger import RankLedger, Send
from meshwright.plan.machines import cluster_of, with_devices, without_budget
from meshwright.plan.placement import axis_places
from meshwright.plan.planner import check_plannable, evaluated, representative_ranks
from meshwright.plan.predict import predict

Link = Literal["inside a node", "between nodes"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Crossing(_Part):
    """Bytes that one rank puts on links in a step, of one kind and axis."""

    axis: str
    payload: int
    wire: int
    messages: int
    link: Link
    """The slowest link on the way."""


class Compared(_Part):
    """One layout."""

    layout: str
    ranks: int
    state_bytes: int
    """Parameters, gradients and optimizer state of the fullest rank."""
    peak_memory_bytes: int
    memory_bytes: int
    """Of a device."""
    state_fits: bool
    fits: bool
    """The peak fits, too."""
    fullest_rank: int
    groups: int
    """Groups of ranks that each advance a batch of their own: ``dp``."""
    ranks_of_group: int
    """Ranks that share the work on one batch: ``tp * pp``."""
    micro_batch: int
    """Sequences in each of these batches."""
    micro_batches: int
    """How many each group runs in turn in a step."""
    gradients: tuple[Crossing, ...]
    """Reduced between groups."""
    activations: tuple[Crossing, ...]
    """And their gradients, inside a group."""
    parameters: tuple[Crossing, ...]
    """Gathered by ZeRO."""
    step_time_s: float
    tokens_per_s: float
    mfu: float
    binding: str


def compare(job: Job, layouts: Iterable[Layout], cluster: ClusterSpec | str | None = None) -> list[Compared]:
    """The answers for each layout, in the order given.

    Raises:
        InputError: a layout is illegal or takes more devices than there are.
    """
    check_plannable(job)
    machines = cluster_of(job, cluster)
    found = []
    for layout in layouts:
        resolved = without_budget(job).with_layout(layout, source="--compare").resolve(layout.ranks, purpose="plan")
        found.append(_one(resolved, with_devices(machines, layout.ranks)))
    return found


def _one(job: Job, cluster: ClusterSpec) -> Compared:
    layout = job.layout
    entry = evaluated(job, cluster)
    ranks = predict(job, representative_ranks(layout), backend="nccl").ranks
    fullest = max(ranks, key=lambda rank: rank.stores.state)
    busiest = max(ranks, key=lambda rank: rank.wire())
    links = _links(layout, cluster)
    assert layout.micro_batch is not None
    return Compared(
        layout=str(layout),
        ranks=layout.ranks,
        state_bytes=fullest.stores.state,
        peak_memory_bytes=entry.peak_memory_bytes,
        memory_bytes=cluster.device.memory_bytes,
        state_fits=fullest.stores.state <= cluster.device.memory_bytes,
        fits=entry.fits,
        fullest_rank=entry.fullest_rank,
        groups=layout.dp,
        ranks_of_group=layout.tp * layout.pp,
        micro_batch=layout.micro_batch,
        micro_batches=-(-job.batch.global_size // (layout.dp * layout.micro_batch)),
        gradients=_crossings(busiest, links, "gradients"),
        activations=_crossings(busiest, links, "activations"),
        parameters=_crossings(busiest, links, "parameters"),
        step_time_s=entry.step_time_s,
        tokens_per_s=entry.tokens_per_s,
        mfu=entry.mfu,
        binding=entry.binding,
    )


def _kind(send: Send) -> str:
    """What a kind of traffic carries."""
    if send.phase in ("forward", "backward", "recompute") and send.axis in ("tp", "pp"):
        return "activations"
    if send.phase == "reduce":
        return "gradients"
    return "parameters" if send.operation == "all_gather" else "control"


def _crossings(rank: RankLedger, links: dict[str, Link], kind: str) -> tuple[Crossing, ...]:
    chosen = [send for send in rank.sends if _kind(send) == kind]
    return tuple(
        Crossing(
            axis=axis,
            payload=sum(send.payload for send in chosen if send.axis == axis),
            wire=sum(send.wire for send in chosen if send.axis == axis),
            messages=sum(send.messages for send in chosen if send.axis == axis),
            link=links.get(axis, "inside a node"),
        )
        for axis in dict.fromkeys(send.axis for send in chosen)
    )


def _links(layout: Layout, cluster: ClusterSpec) -> dict[str, Link]:
    """The slowest link of each axis."""
    links: dict[str, Link] = {}
    for place in axis_places(layout, cluster.devices_per_node):
        link: Link = "between nodes" if place.crosses else "inside a node"
        links[place.axis] = link
        if place.axis == "pp":
            links["embedding"] = link
        if place.axis == "dp":
            links["shard"] = links["replicate"] = links["inter"] = link
        elif place.axis in ("shard", "replicate"):
            links["dp"] = "between nodes" if "between nodes" in (link, links.get("dp")) else link
    return links
