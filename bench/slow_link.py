"""Time to one loss over a slow link, strategy by strategy: `python -m bench.slow_link [--json]` (root, Linux).

Two hosts (network namespaces) of two ranks each, joined by a link of 100 Mbit/s each way, train the quick-start model.
The target is the validation loss that plain all-reduce has after ``--steps`` steps. How many steps a strategy takes to
it does not depend on how quick the link is, so that is found over the same link without its limit, seed by seed, in
at most ``--most`` times as many steps; how long a step takes, and what it sends, is measured over the limited link.

    T1      plain all-reduce: its steps times its seconds a step       T0    the same steps without any exchange
    time    of a strategy: first steps that travel whole at plain all-reduce's pace, the others at its own
    closed  (T1 - time) / (T1 - T0)
    link    bytes that the kernel counted on both ends, against what the run's own ledger says crosses

Validation and starting are not in the times. Nothing is clipped, the rate is constant after its warm-up, and all
strategies see the same samples. ``--whole`` runs a strategy over the limited link from its first to its last step as
well, and sums what its steps took. The whole comparison is 300 steps of 2,048 tokens with three seeds (hours on a small
machine); ``--steps 20 --tokens 256 --seeds 1`` takes minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.slow_link_runs import EVALUATIONS, PER_HOST, RANKS, Pace, Run, Scale, Strategy, pace, train
from tests.cluster.hosts import TwoHosts, two_hosts, why_not


def _tenth(steps: int) -> int:
    return max(4, steps // 10)


def _fifth(steps: int) -> int:
    return max(4, steps // 5)


PLAIN = Strategy("all-reduce", {})
ALONE = Strategy("no exchange", {"strategy": "local", "period": 1_000_000})
STRATEGIES = (
    Strategy(
        "hierarchical", {"algorithm": "hierarchical", "node_size": PER_HOST}, symmetric=False, same_update_as=PLAIN.name
    ),
    Strategy("bf16", {"compression": "bf16"}),
    Strategy("int8", {"compression": "int8"}),
    Strategy("fp8", {"compression": "fp8"}),
    Strategy("sign", {"compression": "sign"}),
    Strategy("qsgd", {"compression": "qsgd"}),
    Strategy("powersgd", {"compression": "powersgd", "compression_rank": 4}),
    Strategy("dgc", {"compression": "dgc", "compression_warmup_steps": _tenth}),
    Strategy("one-bit-adam", {"compression": "one-bit-adam", "compression_warmup_steps": _fifth}),
    Strategy("zero-one-adam", {"compression": "zero-one-adam"}),
    Strategy("local", {"strategy": "local", "period": 4}),
    Strategy("easgd", {"strategy": "easgd", "period": 4}),
    Strategy("diloco", {"strategy": "diloco", "period": _tenth}),
    Strategy("diloco-int8", {"strategy": "diloco", "period": _tenth, "compression": "int8"}),
)


def measure(
    strategies: Sequence[Strategy], scale: Scale, seeds: Sequence[int], timed: int, whole: Sequence[str]
) -> dict[str, Any]:
    """Paces first, one strategy after the other; then losses, seed by seed."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name, two_hosts(rate=scale.rate) as hosts:
        folder = Path(name)
        paces = {}
        for strategy in (PLAIN, *strategies):
            paces[strategy.name] = pace(hosts, folder, strategy, scale, timed)
            _say(f"{strategy.name}: {paces[strategy.name]}")
        compute = statistics.median(train(hosts, folder, ALONE, scale, 4 + timed, 1, every=4 + timed).step_seconds[4:])
        _say(f"{ALONE.name}: {compute} s a step")
        rows: dict[str, list[dict[str, Any]]] = {strategy.name: [] for strategy in (PLAIN, *strategies)}
        through = {one: _through(hosts, folder, one, scale) for one in strategies if one.name in whole}
        hosts.limit(None)
        targets = []
        for seed in seeds:
            curves: dict[str, Run] = {}
            for strategy in (PLAIN, *strategies):
                steps = scale.steps if strategy is PLAIN else round(scale.most * scale.steps)
                run = curves.get(strategy.same_update_as or "")
                every = max(1, scale.steps // EVALUATIONS)
                run = run or train(hosts, folder, strategy, scale, steps, seed, every=every)
                curves[strategy.name] = run
                if strategy is PLAIN:
                    targets.append(run.validation[-1][1])
                rows[strategy.name].append(row(strategy, run, targets[-1], paces, compute, scale))
                _say(f"{strategy.name}, seed {seed}: {summary(rows[strategy.name][-1])}")
        for strategy, found in through.items():
            rows[strategy.name][0]["whole_seconds"] = sum(found.step_seconds[: scale.steps])
    return {
        "rate": scale.rate,
        "steps": scale.steps,
        "tokens_per_step": scale.tokens,
        "seeds": list(seeds),
        "targets": targets,
        "compute_step_seconds": compute,
        "strategies": rows,
    }


def _through(hosts: TwoHosts, folder: Path, strategy: Strategy, scale: Scale) -> Run:
    return train(hosts, folder, strategy, scale, scale.steps, 1, every=scale.steps)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def summary(figures: Mapping[str, Any]) -> str:
    """One row on one line."""
    return ", ".join(f"{key} {value}" for key, value in figures.items() if key not in ("validation", "losses"))


def row(
    strategy: Strategy, run: Run, target: float, paces: Mapping[str, Pace], compute: float, scale: Scale
) -> dict[str, Any]:
    """One run in figures; ``compute``: seconds of a step without any exchange."""
    mine, plain = paces[strategy.name], paces[PLAIN.name]
    steps = run.steps_to(target)
    whole = min(strategy.whole_steps(scale.steps), steps or 0.0)
    seconds = None if steps is None else whole * plain.seconds + (steps - whole) * mine.seconds
    sent = None if steps is None else whole * plain.link_bytes + (steps - whole) * mine.link_bytes
    everything = scale.steps * plain.seconds
    gap = scale.steps * (plain.seconds - compute)
    return {
        "seconds": seconds,
        "steps": steps,
        "step_seconds": mine.seconds,
        "closed": None if seconds is None or gap <= 0 else (everything - seconds) / gap,
        "times_faster": None if not seconds else everything / seconds,
        "link_bytes_per_step": mine.link_bytes,
        "link_over_ledger": None if not mine.ledger_bytes else mine.link_bytes / mine.ledger_bytes,
        "times_fewer_bytes": None if not sent else scale.steps * plain.link_bytes / sent,
        "validation": run.validation,
        "losses": run.losses,
    }


def table(found: Mapping[str, Any]) -> str:
    """The result for people, medians over seeds."""
    columns = (
        ("seconds", "seconds", "9.1f", 1.0), ("steps", "steps", "7.1f", 1.0), ("s a step", "step_seconds", "8.2f", 1.0),
        ("closed", "closed", "7.2f", 1.0), ("faster", "times_faster", "7.2f", 1.0),
        ("MB a step", "link_bytes_per_step", "10.3f", 1e-6), ("/ledger", "link_over_ledger", "8.3f", 1.0),
        ("fewer bytes", "times_fewer_bytes", "11.1f", 1.0),
    )  # fmt: skip
    widths = [int(form.split(".")[0]) for _, _, form, _ in columns]
    heads = " ".join(title.rjust(width) for (title, *_), width in zip(columns, widths, strict=True))
    lines = [f"no exchange: {found['compute_step_seconds']:.2f} s a step", f"{'strategy':<14} {heads}"]
    for name, runs in found["strategies"].items():
        cells = [f"{name:<14}"]
        for (_, key, form, scale), width in zip(columns, widths, strict=True):
            values = [run[key] for run in runs if run.get(key) is not None]
            shown = format(scale * statistics.median(values), form) if len(values) == len(runs) else "-".rjust(width)
            cells.append(shown)
        lines.append(" ".join(cells))
    return "\n".join(lines)


def _names(text: str | None, option: str, parser: argparse.ArgumentParser, default: Sequence[str]) -> list[str]:
    names = [strategy.name for strategy in STRATEGIES]
    chosen = text.split(",") if text else list(default)
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.exit(2, f"slow_link: {option}: {', '.join(unknown)} unknown; use some of {', '.join(names)}\n")
    return chosen


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Time to one loss over a slow link, strategy by strategy.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=2048, help="a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=float, default=1.5, help="steps of a strategy, in those of plain all-reduce")
    parser.add_argument("--timed", type=int, default=10, help="steps whose pace over the limited link is measured")
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc says it")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--strategies", help="names, with commas; absent: all")
    parser.add_argument("--whole", help="names, with commas, of those that also run over the limited link throughout")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        parser.exit(2, f"slow_link: {reason}\n")
    if options.tokens % (16 * RANKS) or options.steps < 4:
        parser.exit(2, f"slow_link: --tokens must be a multiple of {16 * RANKS}, and --steps at least 4\n")
    chosen = _names(options.strategies, "--strategies", parser, [strategy.name for strategy in STRATEGIES])
    whole = _names(options.whole, "--whole", parser, [])
    scale = Scale(options.steps, options.tokens, options.most, options.rate, options.lr)
    strategies = [strategy for strategy in STRATEGIES if strategy.name in chosen]
    found = measure(strategies, scale, range(1, options.seeds + 1), options.timed, whole)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
