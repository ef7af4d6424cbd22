"""The end of a run: the summary completed, and what a person wants to see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.checkpoint.folder import CHECKPOINTS, latest
from meshwright.data.tokenizer import open_tokenizer
from meshwright.files import replace_text
from meshwright.job.job import Job
from meshwright.ledger.ledger import Ledger
from meshwright.ledger.render import ledger_tables
from meshwright.observe.console import table_console
from meshwright.recovery.threads import threads, threads_per_rank


def finish_report(job: Job, run_dir: Path, *, quiet: bool) -> dict[str, Any]:
    """Measure the one-device rate, complete ``summary.json``, print ledger, sample and where everything is.

    Returns the summary.
    """
    console = table_console(quiet=quiet)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    if job.observe.one_device_steps:
        console.print(f"measuring {job.observe.one_device_steps + 1} steps on one device alone ...")
    alone = _one_device(job)
    rate = summary["tokens_per_second"]
    summary["one_device_tokens_per_second"] = alone
    summary["useful_speedup"] = rate / alone if alone and rate else None
    summary["efficiency"] = summary["useful_speedup"] / job.layout.ranks if summary["useful_speedup"] else None
    summary["sample"] = _sample(job, run_dir)
    replace_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    ledger = _complete_ledger(run_dir, rate, alone)
    _print(console, summary, job, run_dir, ledger)
    return summary


def _one_device(job: Job) -> float | None:
    if not job.observe.one_device_steps:
        return None
    from meshwright.train.one_device import one_device_tokens_per_second  # loads the whole program

    return one_device_tokens_per_second(job, threads=threads(threads_per_rank(job.layout.ranks)))


def _complete_ledger(run_dir: Path, rate: float | None, alone: float | None) -> Ledger | None:
    """``ledger.json`` with the speed of the run beside it; None where no step was recorded."""
    path = run_dir / "ledger.json"
    if not path.exists():
        return None
    ledger = Ledger.from_json(path.read_text(encoding="utf-8")).with_rates(rate, alone)
    replace_text(path, ledger.to_json())
    return ledger


def _sample(job: Job, run_dir: Path) -> str | None:
    prompt = job.observe.sample_prompt
    checkpoint = latest(run_dir / CHECKPOINTS)
    if not prompt or checkpoint is None:
        return None
    from meshwright.train.sampling import continue_prompt  # load the whole program
    from meshwright.train.saving import load_whole_model

    tokenizer = open_tokenizer(job.data.tokenizer)
    model = load_whole_model(job, checkpoint)
    numbers = continue_prompt(
        model, tokenizer.encode([prompt])[0].tolist(), tokens=job.observe.sample_tokens, window=job.data.sequence_length
    )
    return tokenizer.decode(numbers)


def _print(console: Console, summary: dict[str, Any], job: Job, run_dir: Path, ledger: Ledger | None) -> None:
    for table in ledger_tables(ledger) if ledger is not None else ():
        console.print(table)
    if summary["sample"] is not None:
        console.print(f"[bold]sample[/] (after {job.observe.sample_prompt!r}):")
        console.print(str(job.observe.sample_prompt) + summary["sample"], highlight=False, markup=False)
    if summary["validation_loss"] is not None:
        entropy, loss = summary["validation_unigram_entropy"], summary["validation_loss"]
        console.print(
            f"validation loss {loss:.4f} nats per token; unigram entropy of the same tokens {entropy:.4f}; "
            f"ratio {loss / entropy:.3f}"
        )
    if summary["tokens_per_second"]:
        line = f"{summary['tokens_per_second']:,.0f} valid tokens/s on {summary['ranks']} ranks"
        if summary["useful_speedup"]:
            line += (
                f"; one device alone {summary['one_device_tokens_per_second']:,.0f}; measured useful speed-up "
                f"{summary['useful_speedup']:.2f}, efficiency {summary['efficiency']:.0%}"
            )
        console.print(line)
    console.print(f"run directory: {run_dir}", soft_wrap=True)
