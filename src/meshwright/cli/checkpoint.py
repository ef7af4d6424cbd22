"""``meshwright checkpoint``: look at checkpoints, verify, compare and prune them, and exchange weights."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli import checkpoint_show as show
from meshwright.errors import DamagedCheckpoint, InputError

app = typer.Typer(help="Look at checkpoints, and exchange weights with Hugging Face.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A step-N folder, or a run.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, or which checkpoints a run has. Manifests are checked; data are not read."""
    from meshwright.checkpoint.describe import describe, describe_run
    from meshwright.checkpoint.folder import checkpoints_at

    found = checkpoints_at(path)
    if found == [path]:
        facts = describe(path)
        lines = show.checkpoint_lines(facts, tensors)
    else:
        facts = describe_run(found)
        lines = show.run_lines(facts)
    _print(facts, lines, as_json)


@app.command("verify")
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A step-N folder, or a run: all its checkpoints.")],
    threads: Annotated[int | None, typer.Option(min=1, help="That read at once; absent: one a core.")] = None,
    as_json: Json = False,
) -> None:
    """Read checkpoints whole and compare every checksum. Exit code 1 names each damaged file and why."""
    from meshwright.checkpoint.folder import checkpoints_at

    results = [_verified(one, threads) for one in checkpoints_at(path)]
    passed = all(result["passed"] for result in results)
    lines = [line for result in results for line in show.verified_lines(result)]
    _print({"passed": passed, "checkpoints": results}, lines, as_json)
    raise typer.Exit(0 if passed else 1)


def _verified(path: Path, threads: int | None) -> dict[str, Any]:
    from meshwright.checkpoint.manifest import read_manifest
    from meshwright.checkpoint.verify import damage

    began = time.monotonic()
    try:
        manifest = read_manifest(path)
        problems = damage(manifest, threads)
    except DamagedCheckpoint as error:
        return {"path": str(path), "passed": False, "problems": [str(error)]}
    if refusal := next((problem for problem in problems if not isinstance(problem, DamagedCheckpoint)), None):
        raise refusal  # may not be read: whether it is damaged is not known
    return {
        "path": str(path),
        "passed": not problems,
        "problems": [str(problem) for problem in problems],
        "step": manifest.step,
        "tensors": len(manifest.tensors),
        "bytes": manifest.bytes,
        "seconds": time.monotonic() - began,
    }


@app.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A step-N folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, written under whatever layout.")],
    as_json: Json = False,
) -> None:
    """Show which tensors of two checkpoints differ, and by how much; names, shapes and types that differ; settings.

    Exit code 0 whether or not they differ; 1: one of them is damaged.
    """
    from meshwright.checkpoint.compare import compare_checkpoints

    found = compare_checkpoints(a, b)
    _print(found.as_json(), show.difference_lines(found), as_json)


@app.command("prune")
def prune(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or the folder of its checkpoints.")],
    keep: Annotated[int | None, typer.Option(min=1, help="Good ones that stay; absent: the run's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old checkpoints. The newest that verify stay, however damaged newer ones are; pinned ones stay.

    Give a run that is not training: one that is prunes by itself.
    """
    from dataclasses import asdict

    from meshwright.checkpoint.folder import checkpoints_at
    from meshwright.checkpoint.manifest import read_manifest
    from meshwright.checkpoint.retention import prune as prune_run

    found = checkpoints_at(run)
    if found == [run]:
        read_manifest(run)
        raise InputError(f"prune: {run} is one checkpoint; give the run it belongs to")
    kept = _retention(run, keep)
    with _not_training(run) if not dry_run else nullcontext():
        done = prune_run(run, kept, dry=dry_run)
    _print(asdict(done), show.pruned_lines(done, dry_run), as_json)


def _not_training(run: Path) -> AbstractContextManager[object]:
    """Holds the run that ``run``, or the folder of checkpoints in it, is; what is no run needs no holding.

    Raises:
        InputError: it is training.
    """
    from meshwright.recovery.lock import RunLock

    for directory in (run, run.parent):
        if (directory / "job.toml").is_file():
            return RunLock(directory, "prune", "or leave it to the run, which prunes by itself")
    return nullcontext()


def _retention(run: Path, keep: int | None) -> Any:
    """What the run's own job keeps, with another number where one is given."""
    from dataclasses import replace

    from meshwright.checkpoint.retention import Retention
    from meshwright.job.job import run_job
    from meshwright.train.saving import retention

    if (run / "job.toml").is_file():
        own = retention(run_job(run))
        return own if keep is None else replace(own, keep=keep)
    if keep is None:
        raise InputError(f"prune: {run} has no job.toml that says how many stay; give --keep N")
    return Retention(keep)


@app.command("fetch")
def fetch(
    url: Annotated[str, typer.Argument(metavar="URL", help="What a run's checkpoint.copy_to says.")],
    out: Annotated[Path, typer.Option(help="The run directory to bring it to; made if it is not there.")],
    step: Annotated[int | None, typer.Option(min=1, help="Which; absent: the last.")] = None,
    as_json: Json = False,
) -> None:
    """Bring a copy of a checkpoint back from a store, verified, with its job; train --resume goes on from it."""
    from meshwright.checkpoint.remote import Store

    path = Store(url).fetch(out, step)
    _print({"path": str(path)}, [f"{path}: all as written"], as_json)


@app.command("export")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A step-N folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder to write config.json and safetensors to; must be new or empty.")],
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder."""
    from meshwright.train.exchange import export_hugging_face

    written = [str(path) for path in export_hugging_face(checkpoint, out)]
    _print({"files": written}, written, as_json)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint of torch.distributed.checkpoint.")],
    job_file: Annotated[Path, typer.Option("--job", help="The job whose model it is.")],
    out: Annotated[Path, typer.Option(help="Folder to write config.json and safetensors to; must be new or empty.")],
    prefix: Annotated[
        str | None, typer.Option(help='What stands before the names, such as "model."; absent: found.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint of torch.distributed.checkpoint as a Hugging Face folder, for model.init_from.

    Nothing in it is executed. A Hugging Face folder needs no import: give it as model.init_from.
    """
    from meshwright.job.job import load_job
    from meshwright.train.importing import import_dcp

    written = [str(path) for path in import_dcp(source, load_job(job_file).model_spec, out, prefix)]
    _print({"files": written}, written, as_json)


def _print(facts: dict[str, Any], lines: list[str], as_json: bool) -> None:
    print(json.dumps(show.finite(facts)) if as_json else "\n".join(lines))
