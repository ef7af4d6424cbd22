"""``meshwright calibrate``: measure this machine or cluster into the cluster file that ``plan`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    out: Annotated[Path, typer.Option(help="The cluster file (.json) to write.")] = Path("cluster.json"),
    ranks: Annotated[
        int | None, typer.Option(help="Ranks on this machine; absent: twice its cores, at most 8.")
    ] = None,
    effort: Annotated[float, typer.Option(help="Scales how long it takes; 1 is under a minute.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="The cluster file on standard output, too.")] = False,
) -> None:
    """Measure matrix products, memory, collectives and shared cores, as the program uses them.

    On one machine it starts its own ranks. Under torchrun, srun or a Kubernetes Job all ranks run it together, over
    as many hosts as they are on; the first one writes the file. A CUDA device is measured by the rank that has it.
    """
    from meshwright.cli.calibrate_machine import calibrate_machine  # loads the whole program

    calibrate_machine(out, ranks, effort, as_json)
