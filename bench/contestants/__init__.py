"""Who takes part. A contestant is built inside a rank process and then asked for one step after another.

``build(work, variant)`` returns ``step(number) -> loss``: one whole training step on the given number's data, and this
rank's mean loss over its own tokens (``None`` where another rank has it). The process group is up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from bench.workload import Workload

Step = Callable[[int], float | None]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Contestant:
    """One system in one mode."""

    name: str
    module: str
    variant: str
    ours: bool = False
    one_rank: bool = False

    def build(self, work: Workload) -> Step:
        """Build it in this rank process."""
        step: Step = import_module(f"bench.contestants.{self.module}").build(work, self.variant)
        return step


ONE_DEVICE = Contestant("one device", "torch_loops", "single", one_rank=True)

FAMILIES: dict[str, tuple[Contestant, ...]] = {
    "dp": (
        Contestant("meshwright dp=2", "ours", "dp={ranks}", ours=True),
        Contestant("DDP", "torch_loops", "ddp"),
        Contestant("Accelerate", "accelerate_loop", "ddp"),
        Contestant("Fabric", "fabric_loop", "ddp"),
        Contestant("DeepSpeed 0", "deepspeed_loop", "0"),
    ),
    "zero3": (
        Contestant("meshwright dp=2 zero=3", "ours", "dp={ranks} zero=3", ours=True),
        Contestant("FSDP2", "torch_loops", "fsdp2"),
        Contestant("DeepSpeed 3", "deepspeed_loop", "3"),
    ),
    "tp": (
        Contestant("meshwright tp=2", "ours", "tp={ranks}", ours=True),
        Contestant("DTensor", "tensor_loop", "replicated"),
        Contestant("DTensor, sequence parallel", "tensor_loop", "sequence"),
    ),
    **{
        f"pp {schedule}": (
            Contestant(f"meshwright pp=2 {schedule}", "ours", f"pp={{ranks}} schedule={schedule}", ours=True),
            Contestant(f"pipelining {schedule}", "pipeline_loop", schedule),
        )
        for schedule in SCHEDULES
    },
}
"""What is compared with what. Each family also has one device beside it."""
