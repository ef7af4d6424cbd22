"""A campaign of random faults: `python -m bench.faults --runs N --seed S --json`.

A small model is trained in float64 under layouts of 2 to 4 ranks, as `meshwright train` does it, and faults happen
to it: a process is killed or stopped, a write fails, a file is damaged, the launcher dies, and so on, at a drawn rank,
step and phase; up to four in one training, `--runs` in all. After each it must go on, and come to its end with the
parameters of the run that nothing happened to: the same bits under the same layout, and within the bound of float64
where it goes on under another. Nothing may hang, no process may be left, and the rank that is to blame must be named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench.fault_draw import LAYOUTS, SORTS, TOGETHER, draw
from bench.fault_runs import Campaign, Verdict
from bench.statistics import median


def campaign(
    runs: int,
    seed: int,
    folder: Path,
    *,
    layouts: Sequence[str] = LAYOUTS,
    kinds: Sequence[str] = (),
    together: int = TOGETHER,
    at_once: int = 1,
    tell: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Inject ``runs`` faults of the seed, up to ``together`` in one training, ``at_once`` of which run side by side.

    ``kinds``: only of these. ``tell`` gets each verdict when it falls; what comes back is in the order of the draw.
    """
    sorts = [sort for sort in SORTS if not kinds or sort.kind in kinds]
    work = Campaign(folder)
    verdicts = []
    groups = draw(runs, seed, layouts, sorts, together)
    with ThreadPoolExecutor(at_once) as crew:  # of threads that wait for processes
        for done in as_completed([crew.submit(work.run, group) for group in groups]):
            for verdict in done.result():
                verdicts.append(verdict)
                tell(verdict)
    return sorted(verdicts, key=lambda verdict: verdict.number)


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The counts and times of a campaign."""

    def spread(values: list[float]) -> dict[str, float | None]:
        return {"median": median(values) if values else None, "max": max(values, default=None)}

    return {
        "runs": len(verdicts),
        "not_fired": sum(not verdict.fired for verdict in verdicts),
        "wrong_state": sum(not verdict.right_state for verdict in verdicts),
        "hangs": sum(verdict.hang for verdict in verdicts),
        "orphans": sum(verdict.orphans for verdict in verdicts),
        "misnamed": sum(not verdict.rightly_named for verdict in verdicts),
        "detection_s": spread([each.detection_s for each in verdicts if each.detection_s is not None]),
        "restart_s": spread([each.restart_s for each in verdicts if each.restart_s is not None]),
        "lost_steps": spread([float(each.lost_steps) for each in verdicts if each.lost_steps is not None]),
    }


def passed(found: dict[str, Any]) -> bool:
    """Whether nothing went wrong."""
    return not any(found[key] for key in ("not_fired", "wrong_state", "hangs", "orphans", "misnamed"))


def line(verdict: Verdict) -> str:
    """One entry on one line."""
    facts = [
        f"{'ok  ' if verdict.good else 'FAIL'} {verdict.number:>4}  {verdict.layout:<18} {'; '.join(verdict.faults)}",
        "fired" if verdict.fired else "NOT FIRED",
        f"{verdict.outcome} under {verdict.recovered_layout}",
        *([f"named rank {verdict.named}"] if verdict.named else []),
        *verdict.problems,
    ]
    return " | ".join(facts)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="A campaign of random faults.")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--together", type=int, default=TOGETHER, choices=range(1, TOGETHER + 1), help="in one run")
    parser.add_argument("--at-once", type=int, default=1, choices=range(1, 9), help="trainings side by side")
    parser.add_argument("--layouts", default="", help="only these, separated by commas")
    parser.add_argument("--out", type=Path, help="keep the runs that went wrong, and all verdicts, in this new folder")
    parser.add_argument("--json", action="store_true", help="one JSON object, verdicts on standard error")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="meshwright-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def tell(verdict: Verdict) -> None:
        print(line(verdict), file=sys.stderr, flush=True)
        with (folder / "verdicts.jsonl").open("a") as file:
            file.write(json.dumps(verdict.as_json()) + "\n")

    try:
        found = summary(
            campaign(
                options.runs, options.seed, folder,
                layouts=options.layouts.split(",") if options.layouts else LAYOUTS,
                kinds=options.kinds.split(",") if options.kinds else (), together=options.together,
                at_once=options.at_once, tell=tell,
            )
        )  # fmt: skip
    finally:
        if options.out is None:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{found['runs']} faults in {time.monotonic() - began:.0f} s: {json.dumps(found)}")
    sys.exit(0 if passed(found) else 1)


if __name__ == "__main__":
    main()
