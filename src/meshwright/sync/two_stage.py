"""A compressed sum in two stages, the wide type in between; each stage feeds its own error back.

P ranks, a buffer of n numbers in P rows:

    rank i      p_i = g_i + e_i       c_i = C(p_i)       e_i <- p_i - D(c_i)          row j of c_i goes to rank j
    rank j      q_j = sum_i D(c_ij) + f_j      d_j = C(q_j)      f_j <- q_j - D(d_j)   d_j goes to every rank
    all         the sum is D(d_0), D(d_1), ...

Nothing is lost, only late: with S the sums that came out,

    sum_t S_t + sum_i e_i + f  =  sum_t sum_i g_i,t

A reduce-scatter stops after the first stage and rounds no second time. Bytes a rank puts on its link: (P-1)/P of the
encoded buffer, and (P-1) encoded rows. Ranks decode the same bytes, so all hold the same bits. (Tang et al., "1-bit
Adam", ICML 2021, section 4.2; Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, for the feedback.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.collectives import all_gather, all_to_all
from meshwright.comm.copies import Span
from meshwright.comm.operations import Operations, started
from meshwright.sync.codec import Codec
from meshwright.sync.memory import Memories


class TwoStage:
    """Sums buffers over a group with one codec.

    Args:
        codec: how numbers travel.
        memories: where residuals are kept.
        feedback: keep what the codec loses and add it to the next gradients.
        seed: of what is random.
    """

    def __init__(self, codec: Codec, memories: Memories, *, feedback: bool = True, seed: int = 0) -> None:
        self.codec, self.memories, self.feedback, self.seed = codec, memories, feedback, seed
        self.step = 0
        self._calls = 0

    def begin(self, step: int) -> None:
        """A step (from 0) starts; what is random depends on its number."""
        self.step, self._calls = step, 0

    def prepare(
        self, name: str, level: str, start: int, like: Tensor, group: dist.ProcessGroup, spans: Sequence[Span]
    ) -> None:
        """Make the residuals of a buffer.

        Args:
            name: of the buffer.
            level: of the sum: "shard" or "copy".
            start: where in the buffer the values stand.
            like: the values, ``[n]``; only size and type count.
            group: over which they are summed.
            spans: the parameters in the buffer.
        """
        if self.feedback:
            self.memories.make(name, level, "residual", start, like)
            if level == "copy":
                row = like.numel() // group.size()
                self.memories.make(name, "back", "residual", start + group.rank() * row, like[:row])

    def scatter(self, name: str, level: str, output: Tensor, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` (``[P * n]``, used up) over the group; this rank's row into ``output`` (``[n]``)."""
        degree = group.size()
        payload = self._encode(name, level, values, degree, group.rank())
        arrived = torch.empty_like(payload)
        yield started(all_to_all(arrived, payload, group, asynchronous=True))
        self._add_rows(arrived.view(degree, -1), output)

    def sum(self, name: str, level: str, values: Tensor, group: dist.ProcessGroup) -> Operations:
        """Sum ``values`` (``[P * n]``) over the group in place, the same bits on every rank."""
        degree, rank = group.size(), group.rank()
        row = values.view(degree, -1)[rank]
        yield from self.scatter(name, level, row, values, group)
        payload = self._encode(name, "back", row, 1, rank)
        gathered = payload.new_empty((degree, payload.numel()))
        yield started(all_gather(gathered, payload, group, asynchronous=True))
        values.copy_(self.codec.decode(gathered, row.numel(), values.dtype).view(-1))

    def _encode(self, name: str, level: str, values: Tensor, rows: int, rank: int) -> Tensor:
        """The payload ``[bytes]`` of ``values`` and what was not sent before; keeps what is not sent now."""
        memory = self.memories.find(name, level, "residual")
        if memory is not None:
            values.add_(memory.now)
        divided = values.view(rows, -1)
        payload = self.codec.encode(divided, self._key(name, level, rank))
        if memory is not None:
            decoded = self.codec.decode(payload, divided.shape[1], values.dtype)
            memory.difference(values, decoded.view(-1))
        return payload.view(-1)

    def _add_rows(self, arrived: Tensor, output: Tensor) -> None:
        """Decode the rows in rank order, one at a time, into their sum."""
        count = output.numel()
        for index, row in enumerate(arrived):
            decoded = self.codec.decode(row.view(1, -1), count, output.dtype).view(-1)
            output.copy_(decoded) if index == 0 else output.add_(decoded)

    def _key(self, name: str, level: str, rank: int) -> int:
        """Different for every encoding of a run: the job's seed, the buffer, the rank, the step, the call in it."""
        self._calls += 1
        return key_of(self.seed, name, level, rank, self.step, self._calls)


def key_of(*parts: object) -> int:
    """A 64-bit number that depends on all of ``parts``."""
    digest = hashlib.blake2b("\0".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
