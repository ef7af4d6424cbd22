"""A pipeline that does not stop between steps: PipeDream-2BW (Narayanan et al. 2021).

    rank 0   F0 F1 B0' .. F2 B1' ..      pp=2, m=2: while the last micro-batches of step t drain,
    rank 1      F0 B0  F1 B1  F0' ..     those of step t+1 (') have begun

1F1B over an endless row of micro-batches, ``m >= pp`` of them a step: nobody waits at a step's end. So the forwards of
step t+1 run before the update of step t is there. They use the parameters of one update before, ``W_t``, as all
forwards and backwards of step t+1 do:

    W_{t+1} = W_t - update(gradient of step t at W_{t-1}),      W_{-1} = W_0

A rank has micro-batches of at most two steps in flight, so two *versions* are enough: even steps run on one, odd ones
on the other, each with parameters and gradients of its own. With fewer micro-batches than ranks there would be three.

A *drain* runs the backwards still to come and begins nothing; what follows it uses the versions it would have used
anyway, so a drain takes time and changes no bit.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021 (arXiv:2006.09503).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from meshwright.model.micro_batch import MicroBatch
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.pipeline_stage import Stage


@dataclass
class InFlight:
    """One step of which this rank has begun the forwards and not ended the backwards."""

    version: int
    """0 or 1: whose parameters and gradients it uses."""
    divisor: float
    batches: deque[MicroBatch]
    """Those whose forward has not run."""
    losses: list[Tensor | None] = field(default_factory=list)
    """Of the micro-batches whose forward has run: on the rank of the last stage, None elsewhere."""
    backwards: int = 0
    """How many have run."""


Ended = Callable[[InFlight], None]
"""What to do when the last backward of a step has run on this rank."""


class ContinuousPipeline:
    """Feeds steps into the pipeline, one behind the other.

    Args:
        versions: the two versions' stages, one of each on this rank, with the data parallelism of each.
        pp: pipeline ranks.
        rank: this one's place among them.
        ended: called once for every step, in their order.
    """

    def __init__(self, versions: Sequence[PipelineExecutor], pp: int, rank: int, ended: Ended) -> None:
        self._versions, self._ended = versions, ended
        self._ahead = pp - 1 - rank
        self._last = rank == pp - 1
        self._stages: dict[int, Stage] = {}
        self._waiting: deque[tuple[InFlight, int]] = deque()
        """Micro-batches whose forward has run and whose backward has not, oldest first."""

    def feed(self, version: int, batches: Sequence[MicroBatch], divisor: float) -> None:
        """Run all forwards of a step on a version, and in turn with them the backwards that have waited longest.

        Args:
            version: 0 or 1, in turn from step to step.
            batches: its micro-batches, all of one shape, as many in every step.
            divisor: as in ``PipelineExecutor.run``.

        Raises:
            InputError: too few micro-batches.
        """
        stage = self._stage(version, batches)
        step = InFlight(version, divisor, deque(batches))
        stage.get_fwd_recv_ops(0)
        for micro_batch in range(len(batches)):
            pairs = len(self._waiting) == self._ahead
            if pairs:
                # Each receive is posted one computation early, so that messages travel beside it.
                self._expect_gradient(*(self._waiting[0] if self._waiting else (step, micro_batch)))
            self._forward(stage, step, micro_batch)
            if micro_batch + 1 < len(batches):
                stage.get_fwd_recv_ops(micro_batch + 1)
            if pairs:
                self._backward()

    def drain(self) -> None:
        """Run every backward that waits; return when the neighbours have taken everything."""
        while self._waiting:
            self._expect_gradient(*self._waiting[0])
            self._backward()
        for stage in self._stages.values():
            stage.end_step()

    def _stage(self, version: int, batches: Sequence[MicroBatch]) -> Stage:
        """This version's stage, its last step forgotten."""
        made = self._stages.get(version)
        if made is None or made.chunks != len(batches):
            (made,) = self._versions[version].make_stages(batches)
            self._stages[version] = made
        made.end_step()  # of two steps ago: taken long since
        made.begin_step()
        return made

    def _forward(self, stage: Stage, step: InFlight, micro_batch: int) -> None:
        batch = step.batches.popleft()
        output = stage.forward_one_chunk(micro_batch, (), {"batch": batch, "divisor": step.divisor}, False)
        stage.get_fwd_send_ops(micro_batch)
        step.losses.append(output if self._last else None)
        self._waiting.append((step, micro_batch))

    def _expect_gradient(self, step: InFlight, micro_batch: int) -> None:
        stage = self._stages[step.version]
        stage.get_bwd_recv_ops(micro_batch)

    def _backward(self) -> None:
        step, micro_batch = self._waiting.popleft()
        stage, loss = self._stages[step.version], step.losses[micro_batch]
        stage.backward_one_chunk(micro_batch, loss=loss)
        stage.get_bwd_send_ops(micro_batch)
        step.losses[micro_batch] = None if loss is None else loss.detach()
        step.backwards += 1
        if step.backwards == stage.chunks:
            self._ended(step)
