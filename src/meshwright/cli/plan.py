"""``meshwright plan``: which layout is fastest and fits, what the others lack, and what each one costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.cli.plan_days import HELP, DaysOptions, print_days
from meshwright.errors import InputError
from meshwright.job.cluster import load_cluster
from meshwright.job.job import Job, job_from_values, load_job
from meshwright.job.layout_text import parse_layout
from meshwright.observe.console import table_console
from meshwright.verbs import nothing_fits

if TYPE_CHECKING:
    from meshwright.plan.answer import Plan
    from meshwright.plan.horizon import Horizon
    from meshwright.plan.search import Progress as Report

_DTYPE = "bfloat16"
_TOP = 10


def plan(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB]", help="The job file; or --model and what goes with it.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help='"512x8 A100-SXM4-80GB" (nodes x devices, name), or a cluster file.')
    ] = None,
    layout: Annotated[str | None, typer.Option(help='This layout alone: "dp=2 tp=2 zero=1"; auto: search.')] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = _TOP,
    delayed: Annotated[
        bool,
        typer.Option(
            "--delayed", help="Also try schedule=2bw: no bubble, but each gradient is one update late (PipeDream-2BW)."
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="The ledger of the layout, with the formula beside each number.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Of --explain (absent: the fullest), or of --explain-sync (absent: 0).")
    ] = None,
    explain_sync: Annotated[
        bool, typer.Option("--explain-sync", help="Follow one element of a rank's gradient to the sum, hop by hop.")
    ] = False,
    element: Annotated[
        str | None, typer.Option(help='Of --explain-sync: "layers.0.mlp.down.weight[7]"; absent: of the first matrix.')
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help='Layouts side by side: --compare "dp=8" "dp=2 tp=4".')
    ] = None,
    compare_sync: Annotated[
        bool,
        typer.Option("--compare-sync", help="Ways to synchronise the layout side by side: sums, compressions, others."),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Without a job: a preset such as megatron-1t, or a config.json.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Without a job: sequences of a step.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Without a job: tokens of a sequence.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of forward and backward; without a job bfloat16.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeatable.")] = None,
    tokens: Annotated[float | None, typer.Option(help=HELP["tokens"])] = None,
    mtbf: Annotated[str | None, typer.Option(help=HELP["mtbf"])] = None,
    checkpoint_cost: Annotated[str | None, typer.Option(help=HELP["checkpoint_cost"])] = None,
    checkpoint_write: Annotated[str | None, typer.Option(help=HELP["checkpoint_write"])] = None,
    detection: Annotated[str | None, typer.Option(help=HELP["detection"])] = None,
    restart: Annotated[str | None, typer.Option(help=HELP["restart"])] = None,
    repair: Annotated[str | None, typer.Option(help=HELP["repair"])] = None,
    restart_delay: Annotated[str | None, typer.Option(help=HELP["restart_delay"])] = None,
    confidence: Annotated[float, typer.Option(help=HELP["confidence"])] = 0.999,
    spares: Annotated[int | None, typer.Option(help=HELP["spares"])] = None,
    elastic: Annotated[bool, typer.Option("--elastic", help=HELP["elastic"])] = False,
    price: Annotated[str | None, typer.Option(help=HELP["price"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Find the fastest layout that fits, and say why the others are not the answer.

    Every layout of the devices is tried: degrees, micro-batch, schedule, virtual stages, stage boundaries, ZeRO,
    recomputation, placement. Exit code 0: some layout fits; 1: none does, and the closest is named.
    """
    job_file, compared = _sort_words(words or [], compare)
    job = _job(job_file, overrides or [], layout, model, global_batch, sequence, dtype)
    days = DaysOptions(
        tokens=tokens, mtbf=mtbf, checkpoint_cost=checkpoint_cost, checkpoint_write=checkpoint_write,
        detection=detection, restart=restart, repair=repair, restart_delay=restart_delay, confidence=confidence,
        spares=spares, elastic=elastic, price=price,
    )  # fmt: skip
    _refuse_unused(
        "--explain-sync" if explain_sync else "--compare-sync" if compare_sync else "--compare" if compared else None,
        {
            "--compare": (explain_sync or compare_sync) and bool(compared),
            "--compare-sync": explain_sync and compare_sync, "--explain": explain, "--top": top != _TOP,
            "--delayed": compare_sync and delayed,
            "--layout": layout is not None and not (explain_sync or compare_sync),
            **dict.fromkeys(days.given(), True),
        },
        rank if not (explain or explain_sync) else None,
    )  # fmt: skip
    if days.given() and (cluster or job.cluster.machines):
        days = days.with_defaults(load_cluster(cluster or str(job.cluster.machines)))
    days.question(1)  # what is no quantity is refused before the search
    console = table_console(quiet=as_json)
    if explain_sync:
        _explain_sync(job, cluster, rank or 0, element, console, as_json)
        return
    if element is not None:
        raise InputError(f"--element: {element!r} is followed by --explain-sync only; give both or neither")
    if compare_sync:
        from meshwright.cli.plan_compare_sync import compare_ways

        compare_ways(job, cluster, console, as_json)
        return
    if compared:
        _compare(job, compared, cluster, console, as_json)
        return
    found = _find(job, cluster, layout, top, as_json, delayed=delayed)
    _answer(job, found, days, cluster, console, explain=explain, rank=rank, as_json=as_json)


def _refuse_unused(alone: str | None, given: Mapping[str, bool], rank: int | None) -> None:
    """Refuse options that the answer asked for has no use for.

    Args:
        alone: the option whose answer stands alone, if one was given.
        given: which of the others were.
        rank: of an explanation that nobody asked for.
    """
    unused = next((name for name, on in given.items() if on), None)
    if alone is not None and unused is not None:
        raise InputError(f"{unused}: not used by {alone}; give one of them")
    if rank is not None:
        raise InputError(f"--rank: {rank} is of --explain or --explain-sync; give one of them, or leave --rank out")


def _sort_words(words: list[str], compare: list[str] | None) -> tuple[Path | None, list[str]]:
    """The job file and the layouts to compare; a word with ``=`` that is no file is a layout."""
    layouts = [word for word in words if "=" in word and not Path(word).exists()]
    files = [word for word in words if word not in layouts]
    if layouts and not compare:
        raise InputError(f"plan: {layouts[0]!r} is a layout; give it by --layout, or several by --compare")
    if len(files) > 1:
        raise InputError(f"plan: {files[0]} and {files[1]} are two job files; give one")
    return Path(files[0]) if files else None, [*(compare or []), *layouts]


def _job(
    file: Path | None, overrides: list[str], layout: str | None, model: str | None, global_batch: int | None,
    sequence: int | None, dtype: str | None,
) -> Job:  # fmt: skip
    """The job of a file, or one made of the options that stand for it."""
    options = {"--model": model, "--global-batch": global_batch, "--sequence": sequence}
    if file is not None:
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise InputError(f"plan: {given[0]} stands for a job file, but {file} is given; use --set to change it")
        return load_job(file, [*overrides, *([f"precision.dtype={dtype}"] if dtype else [])], layout)
    missing = [name for name, value in options.items() if value is None]
    if missing:
        raise InputError(
            f"plan: {', '.join(missing)} missing; give a job file, or --model, --global-batch and --sequence, for "
            "example --model megatron-1t --global-batch 3072 --sequence 2048"
        )
    assert model is not None
    if overrides:
        raise InputError(f"--set: {overrides[0]!r} changes a job file, but none is given")
    origin = "hf" if Path(model).exists() else "preset"
    values: dict[str, Any] = {
        "model": {origin: model},
        "data": {"sequence_length": sequence},
        "batch": {"global_size": global_batch},
        "precision": {"dtype": dtype or _DTYPE},
        "cluster": {"device": "cuda"},
    }
    if layout is not None:
        values["layout"] = layout
    return job_from_values(values)


def _find(job: Job, cluster: str | None, layout: str | None, top: int, quiet: bool, *, delayed: bool = False) -> Plan:
    """One layout's costs, or the search."""
    from meshwright.plan.planner import plan as search
    from meshwright.plan.planner import plan_layout

    if layout is not None and not job.auto:
        return plan_layout(job, cluster)
    with search_progress(quiet) as report:
        return search(job, cluster, top=top, delayed=delayed, progress=report)


def _answer(
    job: Job, found: Plan, days: DaysOptions, cluster: str | None, console: Console, *, explain: bool, rank: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print what was found, with its days and its ledger where they were asked for; exit code 1 where nothing fits."""
    horizon = _horizon(found, days, job)
    explained = _explained(job, found, rank) if explain and found.layouts else None
    if as_json:
        # With the job and the machines the answer stands alone: `meshwright report` draws from it.
        value = {**found.model_dump(), "job": job.model_dump(mode="json", exclude_none=True)}
        value["machines"] = load_cluster(cluster or str(job.cluster.machines)).model_dump(exclude_none=True)
        value |= {"days": horizon.model_dump()} if horizon is not None else {}
        value |= {"ledger": explained[1].model_dump(), "explained": explained[2]} if explained is not None else {}
        print(json.dumps(value))
    else:
        from meshwright.cli.plan_show import show_explained, show_plan

        show_plan(console, found, job)
        if explained is not None:
            show_explained(console, *explained)
        if horizon is not None:
            print_days(console, horizon)
    if not found.fits:
        if not as_json:
            console.print(f"nothing fits; {nothing_fits(found)}", style="bold red", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@contextmanager
def search_progress(quiet: bool) -> Iterator[Report | None]:
    """A bar on standard error while a search runs, where somebody looks."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("searching"),
        BarColumn(),
        TextColumn("{task.fields[count]:,} layouts"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("searching", count=0)
        yield lambda done, total, count: bar.update(task, completed=done, total=total, count=count)


def _explained(job: Job, found: Plan, rank: int | None) -> tuple[str, Any, list[tuple[str, str, int]]]:
    """The layout's short form, its ledger of one rank, and every number with its formula."""
    from meshwright.plan.explain import explain
    from meshwright.plan.machines import without_budget
    from meshwright.plan.predict import predict

    best = found.layouts[0]
    layout = parse_layout(best.layout)
    resolved = without_budget(job).with_layout(layout).resolve(layout.ranks, purpose="plan")
    chosen = best.fullest_rank if rank is None else rank
    if chosen >= resolved.layout.ranks:
        raise InputError(
            f"--rank: {chosen} is not a rank of layout {best.layout}; use 0 to {resolved.layout.ranks - 1}"
        )
    ledger = predict(resolved, [chosen])
    lines = [(line.quantity, line.formula, line.value) for line in explain(resolved, chosen)]
    return best.layout, ledger, lines


def _explain_sync(
    job: Job, cluster: str | None, rank: int, element: str | None, console: Console, as_json: bool
) -> None:
    """Follow one gradient element under the job's layout, or the planner's where that is "auto"."""
    from meshwright.cli.plan_sync import explain_sync, show_sync
    from meshwright.plan.machines import without_budget

    if job.auto:
        found = _find(job, cluster, None, 1, as_json)
        if not found.layouts:
            raise InputError(f"--explain-sync: no layout fits ({nothing_fits(found)}); give one by --layout")
        job = job.with_layout(parse_layout(found.layouts[0].layout))
    resolved = without_budget(job).resolve(purpose="plan")
    boundaries = explain_sync(resolved, rank, element)
    if as_json:
        followed = [boundary._asdict() for boundary in boundaries]
        print(json.dumps({"layout": str(resolved.layout), "rank": rank, "boundaries": followed}))
    else:
        show_sync(console, resolved, rank, boundaries)


def _horizon(found: Plan, options: DaysOptions, job: Job) -> Horizon | None:
    """Days, failures and cost of the first layout, where they were asked for."""
    if not found.layouts:
        return None
    best = parse_layout(found.layouts[0].layout)
    question = options.question(best.ranks, best.dp)
    if question is None:
        return None
    from meshwright.plan.horizon import horizon

    tokens = job.batch.global_size * job.data.sequence_length
    return horizon(question, step_time=found.layouts[0].step_time_s, tokens_per_step=tokens, devices=best.ranks)


def _compare(job: Job, texts: list[str], cluster: str | None, console: Console, as_json: bool) -> None:
    from meshwright.cli.plan_show import show_compared
    from meshwright.plan.side_by_side import compare

    found = compare(job, [parse_layout(text) for text in texts], cluster)
    if as_json:
        print(json.dumps({"compared": [one.model_dump() for one in found]}))
    else:
        show_compared(console, found)
