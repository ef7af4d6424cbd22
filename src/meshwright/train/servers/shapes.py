"""What servers and workers must agree on without talking: the parameters, their chunks, who owns which, the job."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property

import torch

from meshwright.errors import InputError
from meshwright.job.job import Job
from meshwright.job.sentences import either
from meshwright.job.server_keys import MOST_SERVER_PROCESSES
from meshwright.model.segments import Segment
from meshwright.model.transformer import StageModel
from meshwright.parallel.buckets import accumulation_dtype
from meshwright.sync.server.placement import CHUNK_BYTES, Chunk, cut, filled_by_hashing, place
from meshwright.train.build import COMPUTE_DTYPES


class Shapes:
    """The job's parameters as one worker holds them, and their places on the servers."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.compute_dtype = COMPUTE_DTYPES[job.precision.dtype]
        self.master_dtype = accumulation_dtype(self.compute_dtype)

    @cached_property
    def model(self) -> StageModel:
        """The whole model without values."""
        spec = self.job.model_spec
        with torch.device("meta"):
            return StageModel(spec, range(spec.layers), first=True, last=True)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements by physical parameter."""
        return {name: parameter.numel() for name, parameter in self.model.named_parameters()}

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Parameters that weight decay applies to."""
        return frozenset(name for name, parameter in self.model.named_parameters() if parameter.dim() > 1)

    def segments(self, parameter: str) -> tuple[Segment, ...]:
        """The named boxes that a physical parameter is made of."""
        return tuple(self.model.segments[parameter])

    @cached_property
    def shards(self) -> list[list[Chunk]]:
        """The chunks of each server.

        Raises:
            InputError: there are more servers than chunks, or than processes may be, or hashing leaves one empty.
        """
        sync, limit = self.job.sync, CHUNK_BYTES // self.master_dtype.itemsize
        chunks = cut(self.sizes, limit)
        count = len(chunks)
        if sync.servers > count:  # known before anything is placed, whatever the number
            raise InputError(
                f"sync.servers: {sync.servers} leaves server {count} without parameters (there are {count} chunks); "
                f"use 1 to {count}"
            )
        processes, most = sync.servers * sync.server_replicas, MOST_SERVER_PROCESSES // sync.server_replicas
        if processes > MOST_SERVER_PROCESSES:
            raise InputError(
                f"sync.servers: {sync.servers} x server_replicas={sync.server_replicas} would start {processes} "
                f"processes on this machine, which are too many; use 1 to {min(most, count)}"
            )
        placed = place(self.sizes, sync.servers, sync.server_placement, limit=limit)
        empty = [shard for shard, mine in enumerate(placed) if not mine]
        if empty:
            legal = [number for number in filled_by_hashing(chunks, min(most, count)) if number > 1]
            words = f"{either(legal)}, or server_placement=size" if legal else "server_placement=size"
            raise InputError(
                f"sync.servers: {sync.servers} leaves server {empty[0]} without parameters (there are {count} chunks, "
                f"placed by {sync.server_placement}); use {words}"
            )
        return placed


def fingerprint(job: Job) -> str:
    """Equal for jobs whose servers and workers may talk: the model, the data, the update and its division."""
    sections = ("model", "data", "batch", "optimizer", "precision", "layout", "sync", "train")
    values = {name: getattr(job, name).model_dump(mode="json") for name in sections}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()
