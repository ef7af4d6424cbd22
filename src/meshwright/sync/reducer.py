"""Gradients summed by an algorithm of the job's choice: the same sums, other messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.copies import Copies, Span
from meshwright.comm.operations import Operations, shards_then_copies
from meshwright.sync.all_reduce import Algorithm


class AlgorithmReducer:
    """A reducer of ``parallel.reducing``: shards by the algorithm's reduce-scatter, copies by its all-reduce.

    Args:
        algorithm_of: the algorithm for a group of ranks.
    """

    def __init__(self, algorithm_of: Callable[[dist.ProcessGroup], Algorithm]) -> None:
        self._algorithm_of = algorithm_of
        self._known: dict[str, Algorithm] = {}

    def _algorithm(self, group: dist.ProcessGroup) -> Algorithm:
        name = str(group.group_name)
        if name not in self._known:
            self._known[name] = self._algorithm_of(group)
        return self._known[name]

    def prepare(self, name: str, size: int, spans: Sequence[Span], copies: Copies) -> None:
        """See ``Reducer.prepare``."""

    def reduce(self, name: str, gradient: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.reduce``."""
        return shards_then_copies(self, name, gradient, copies)

    def scatter(self, name: str, output: Tensor, contributions: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.scatter``."""
        assert copies.shard is not None
        yield from self._algorithm(copies.shard).reduce_scatter(output, contributions, copies.shard)

    def across(self, name: str, chunk: Tensor, copies: Copies) -> Operations:
        """See ``Reducer.across``."""
        if copies.copy is not None:
            yield from self._algorithm(copies.copy).all_reduce(chunk, copies.copy)

    def state(self) -> dict[str, Tensor]:
        """See ``Reducer.state``."""
        return {}
