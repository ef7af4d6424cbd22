"""``meshwright check``: layouts proven equal to one device, and planted errors that must be found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.auto import settled_layout
from meshwright.errors import InputError
from meshwright.job.job import load_job
from meshwright.job.layout import Layout
from meshwright.job.sections import PrecisionSection
from meshwright.observe.console import table_console


def check(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    layout: Annotated[str | None, typer.Option(help='One layout, the job as it is: "dp=2 tp=2 zero=1".')] = None,
    matrix: Annotated[str | None, typer.Option(help="A standard set at proof size: layouts, sync, or reshard.")] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Plant errors; each must be found.")] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Compare predicted, traced and measured ledgers instead of training.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="With --ledger: the cluster file to predict times by (`meshwright calibrate`).")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float64 or float32, with --ledger also 16 bits; absent: the job's.")
    ] = None,
    max_ranks: Annotated[int, typer.Option(min=1, help="Leave out layouts of more ranks; --layout: refuse them.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 10,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Prove that a layout changes nothing but speed and memory.

    Trains some steps under the layout and on one device from the same job, and compares losses,
    gradients and parameters. With --ledger: compares what each rank stores, computes and sends by three
    independent sources. Exit code 0: all equal within the bounds; 1: not.
    """
    if matrix not in (None, "layouts", "sync", "reshard"):
        raise InputError(f"--matrix: {matrix!r} is not a matrix; use layouts, sync or reshard")
    if layout is None and matrix is None and not self_test:
        raise InputError("check: nothing to check; give --layout, --matrix or --self-test")
    given = {"--layout": layout is not None, "--matrix": matrix is not None, "--self-test": self_test}
    several = [name for name, on in given.items() if on]
    if ledger and self_test:
        raise InputError("check: --ledger and --self-test do not go together; give one of them")
    if len(several) > 1:
        raise InputError(f"check: {' and '.join(several)} are proofs of their own; give one of them")
    if max_ranks < 2 and layout is None:
        raise InputError(f"--max-ranks: {max_ranks} leaves no layout to check; use at least 2")
    if ledger:
        if matrix not in (None, "layouts"):
            raise InputError(f"--matrix: {matrix} has no ledgers to compare; use --matrix layouts, or --layout")
        from meshwright.cli.check_ledger import compare_ledgers

        compare_ledgers(job_file, layout, matrix, dtype, max_ranks, cluster, overrides or [], as_json)
    if cluster is not None:
        raise InputError("check: --cluster predicts times for --ledger; give both or neither")
    if dtype not in (None, "float64", "float32"):
        raise InputError(f"--dtype: {dtype!r} has no bound to hold; use float64 or float32")
    settings = [*(overrides or []), *dtype_settings(dtype)]
    job = load_job(job_file, settings, layout)
    if job.auto:  # which matters only to what is proven of the job's own layout
        job = job.with_layout(Layout()) if layout is None else settled_layout(job, None, None, as_json).job
    from meshwright.cli.check_proofs import run_proofs  # loads the whole program

    console = table_console(stderr=as_json)  # standard output is for the JSON object alone
    results = run_proofs(job, layout, matrix, self_test, dtype, max_ranks, steps, console)
    passed = bool(results) and all(result.passed for result in results)
    if as_json:
        print(json.dumps({"passed": passed, "results": [_finite(result.as_json()) for result in results]}))
    else:
        failed = sum(not result.passed for result in results)
        console.print(f"{len(results) - failed} of {len(results)} passed", style="bold green" if passed else "bold red")
    raise typer.Exit(0 if passed else 1)


def dtype_settings(dtype: str | None) -> list[str]:
    """Of the command line, for ``--dtype``: what only the job's own type uses goes back to its default."""
    if dtype is None:
        return []
    fields = PrecisionSection.model_fields
    scale = [f"precision.{key}={fields[key].default}" for key in fields if key.startswith("loss_scale_")]
    return [f"precision.dtype={dtype}", *(scale if dtype != "float16" else [])]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN: null stands for a difference without bound."""
    return {key: None if isinstance(item, float) and not math.isfinite(item) else item for key, item in value.items()}
