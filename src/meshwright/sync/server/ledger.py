"""What a parameter server stores and what its workers send, in closed form, to hold measurements against.

With ``n`` parameters, ``n_j`` of them on shard ``j``, ``m`` bytes an element of masters and gradients, ``c`` of the
type of forward and backward, ``k`` optimizer tensors, ``P`` pushes to an update, and ``W`` that wait at most: all of
one update, with a staleness bound ``s`` of ``s + 1``, and where a push is an update one of each worker:

    worker, per gradient   push  n m            pull  n c
    replica of shard j     parameters n_j m     gradients n_j m     optimizer k n_j m
                           pushes that wait: up to W n_j m          values for readers n_j c
    head of shard j, per update: takes in P n_j m; a replica with a successor passes as much on

An all-reduce over P ranks sends 2 (P-1)/P n m a rank and stores (2 + k) n m on every one; here a worker sends n m
and stores no optimizer state, and the servers take in and give out P times as much between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerLedger:
    """Bytes of one gradient's round."""

    push: int
    pull: int


@dataclass(frozen=True)
class ServerLedger:
    """Bytes one replica holds, and takes in for an update."""

    parameters: int
    gradients: int
    optimizer: int
    waiting: int
    readers: int
    push: int
    """Of one push: this shard's part."""


@dataclass(frozen=True)
class ServersLedger:
    """All workers alike, and each shard's replicas alike."""

    worker: WorkerLedger
    shards: tuple[ServerLedger, ...]

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def predict(shards: Sequence[int], *, master: int, compute: int, moments: int, waiting: int) -> ServersLedger:
    """The closed form of the module.

    Args:
        shards: parameters on each.
        master, compute: bytes an element.
        moments: optimizer tensors.
        waiting: the most pushes that are with the servers and not applied, while nobody dies.
    """
    total = sum(shards)
    return ServersLedger(
        WorkerLedger(push=total * master, pull=total * compute),
        tuple(
            ServerLedger(
                parameters=count * master,
                gradients=count * master,
                optimizer=moments * count * master,
                waiting=waiting * count * master,
                readers=count * compute,
                push=count * master,
            )
            for count in shards
        ),
    )


def differences(predicted: ServersLedger, processes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where processes measured other bytes than predicted, one sentence each.

    Args:
        predicted: by ``predict``.
        processes: what each left by its name: a worker its ``pushes`` and ``pulls`` by shard and their bytes; a server
            its shard, what it stores, the most bytes that waited, and the bytes of pushes that came.
    """
    wrong = []
    for name, found in sorted(processes.items()):
        if "shard" in found:
            shard = predicted.shards[int(found["shard"])]
            for key in ("parameters", "gradients", "optimizer"):
                if found[key] != getattr(shard, key):
                    wrong.append(f"{name}: {key} {found[key]} bytes, predicted {getattr(shard, key)}")
            if found["push_bytes"] != found["pushes"] * shard.push:
                wrong.append(f"{name}: pushes {found['push_bytes']} bytes, predicted {found['pushes']} x {shard.push}")
        else:
            for key, times, size in (("push", "pushes", "push"), ("pull", "pulls", "readers")):
                each = [getattr(shard, size) for shard in predicted.shards]
                expected = sum(count * one for count, one in zip(found[times], each, strict=True))
                if found[f"{key}_bytes"] != expected:
                    wrong.append(f"{name}: {key} {found[f'{key}_bytes']} bytes, predicted {expected}")
    return wrong
