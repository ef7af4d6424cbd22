"""The proofs of ``meshwright check``: run, with a line for each, and a table at the end."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from meshwright.cli.check_ledger import refuse_too_many
from meshwright.job.job import Job
from meshwright.prove.check import Found, check_layout, check_matrix, check_self_test
from meshwright.prove.parity import Parity
from meshwright.prove.reshard import Resharded, check_reshard
from meshwright.prove.sync_matrix import check_sync


def run_proofs(
    job: Job,
    layout: str | None,
    matrix: str | None,
    self_test: bool,
    dtype: str | None,
    max_ranks: int,
    steps: int,
    console: Console,
) -> list[Parity | Found | Resharded]:
    """Run what the options of ``check`` ask for, and print it on the console; the results in order."""
    results: list[Parity | Found | Resharded] = []
    began = time.monotonic()

    def show(result: Parity | Found | Resharded) -> None:
        console.print(_line(result, time.monotonic() - began), highlight=False, soft_wrap=True)

    if layout is not None:
        resolved = job.resolve()
        refuse_too_many(resolved.layout, max_ranks)
        result = check_layout(resolved, steps=steps)
        show(result)
        results.append(result)
    proof_dtype = dtype or (job.precision.dtype if job.precision.dtype == "float64" else "float32")
    if matrix == "layouts":
        results += check_matrix(job, dtype=proof_dtype, max_ranks=max_ranks, steps=steps, report=show)
    if matrix == "sync":
        results += check_sync(job, dtype=proof_dtype, max_ranks=max_ranks, steps=steps, report=show)
    if matrix == "reshard":
        results += check_reshard(job, dtype=proof_dtype, max_ranks=max_ranks, report=show)
    if self_test:
        results += check_self_test(job, max_ranks=max_ranks, report=show)
    if not console.stderr:
        console.print(_table(results))
    return results


def _line(result: Parity | Found | Resharded, seconds: float) -> str:
    mark = "[green]ok[/]  " if result.passed else "[red]FAIL[/]"
    if isinstance(result, Found):
        return f"{seconds:6.1f} s  {mark} {result.label}: planted {result.planted}, seen as {result.how or 'nothing'}"
    if isinstance(result, Resharded):
        return (
            f"{seconds:6.1f} s  {mark} {result.label}  {result.dtype} {result.optimizer}  wrong tensors "
            f"{len(result.wrong_tensors)}  samples {'in order' if result.samples_in_order else 'NOT in order'}  "
            f"next step: parameters {result.max_relative_parameter_difference:.1e}  "
            f"loss {result.max_relative_loss_difference:.1e}"
            + ("" if result.passed else f"  ({[*result.wrong_tensors[:3], result.worst]})")
        )
    return (
        f"{seconds:6.1f} s  {mark} {result.label}  {result.dtype} {result.optimizer}  "
        f"parameters {result.max_relative_parameter_difference:.1e}  gradients "
        f"{result.max_relative_gradient_difference:.1e}  loss {result.max_relative_loss_difference:.1e}"
        + ("" if result.passed else f"  ({result.worst})")
    )


def _table(results: list[Parity | Found | Resharded]) -> Table:
    table = Table("layout", "ranks", "what", "worst difference", "passed")
    for result in results:
        if isinstance(result, Found):
            table.add_row(
                result.label,
                str(result.ranks),
                f"planted {result.planted}",
                "found" if result.passed else "NOT FOUND",
                "yes" if result.passed else "NO",
            )
        elif isinstance(result, Resharded):
            worst = max(result.max_relative_parameter_difference, result.max_relative_loss_difference)
            what = f"{result.dtype} {result.optimizer}, taken over"
            table.add_row(result.label, str(result.ranks), what, f"{worst:.1e}", "yes" if result.passed else "NO")
        else:
            worst = max(
                result.max_relative_parameter_difference,
                result.max_relative_gradient_difference,
                result.max_relative_loss_difference,
            )
            clip = "clipped" if result.clipped else "not clipped"
            table.add_row(
                result.label,
                str(result.ranks),
                f"{result.dtype} {result.optimizer}, {clip}",
                f"{worst:.1e}",
                "yes" if result.passed else "NO",
            )
    return table
