"""Time to one loss over a slow link, strategy by strategy: `python -m bench.slow_link [--json]` (root, Linux).

Two hosts (network namespaces) of two ranks each, joined by a link of 100 Mbit/s each way, train the quick-start model.
The target is the validation loss that plain all-reduce has after ``--steps`` steps. How many steps a strategy takes to
it does not depend on any link, so that is found on this machine without one, seed by seed, in at most ``--most`` times
as many steps; how long a step takes, and what it sends, is measured over the limited link. Only asynchronous servers
run over it from the first step to the last: who reaches them quickly trains on more. A strategy with SGD has the loss
of plain all-reduce with SGD for its target.

    T1      plain all-reduce: its steps times its seconds a step       T0    the same steps without any exchange
    time    of a strategy: steps that travel whole at plain all-reduce's pace, the others at its own; a warm-up that
            sends ever less as it was measured, with what starting sends
    closed  (T1 - time) / (T1 - T0)
    link    bytes that the kernel counted on both ends, against what the run's own ledger says crosses

Validation and starting are not in the times. Nothing is clipped, the rate is constant after its warm-up, and all
strategies see the same samples. ``--whole`` runs a strategy over the limited link from its first to its last step as
well, and sums what its steps took. The whole comparison is 300 steps of 2,048 tokens with three seeds (hours on a small
machine); ``--steps 20 --tokens 256 --seeds 1`` takes minutes. ``--keep FOLDER`` goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.slow_link_runs import (
    PER_HOST,
    RANKS,
    Pace,
    Run,
    Scale,
    Strategy,
    losses,
    pace,
    train,
    validation_every,
)
from tests.cluster.hosts import two_hosts, why_not


def _fifth(steps: int) -> int:
    return max(4, steps // 5)


PLAIN = Strategy("all-reduce", {})
_SGD = {"name": "sgd", "momentum": 0.9, "weight_decay": 0, "lr": 0.03}
PLAIN_SGD = Strategy("all-reduce-sgd", {}, optimizer=_SGD, against="all-reduce-sgd", paced_as=PLAIN.name)
"""What a strategy with SGD is held against."""
ALONE = Strategy("no exchange", {"strategy": "local", "period": 1_000_000})
BETWEEN = f"dp={RANKS} shard={PER_HOST} zero=1"
"""Gradients are summed whole inside a host; what is compressed, or rare, is the exchange between hosts."""
_MEAN = {"strategy": "diloco", "period": 5, "outer_lr": 1, "outer_momentum": 0}
STRATEGIES = (
    Strategy(
        "hierarchical", {"algorithm": "hierarchical", "node_size": PER_HOST}, crossing=1 / 3, same_update_as=PLAIN.name
    ),
    Strategy("server", {"strategy": "server", "servers": 2}, same_update_as=PLAIN.name),
    Strategy("server-async", {"strategy": "server", "servers": 2, "server_mode": "asynchronous"}, over_link=True),
    Strategy("bf16", {"compression": "bf16"}),
    Strategy("int8", {"compression": "int8"}),
    Strategy("fp8", {"compression": "fp8"}),
    Strategy("sign", {"compression": "sign"}),
    Strategy("qsgd", {"compression": "qsgd"}),
    Strategy("powersgd", {"compression": "powersgd", "compression_rank": 4}),
    Strategy("dgc", {"compression": "dgc", "compression_warmup_steps": 4}, ramp=True),
    Strategy(
        "dgc-between",
        {"compression": "dgc", "compression_level": "slow", "compression_warmup_steps": 16},
        layout=BETWEEN,
        ramp=True,
    ),
    Strategy(
        "dgc-sgd",
        {
            "compression": "dgc",
            "compression_level": "slow",
            "compression_warmup_steps": 4,
            "compression_sparsity": 0.993,
        },
        layout=BETWEEN,
        optimizer=_SGD,
        against=PLAIN_SGD.name,
        ramp=True,
    ),
    Strategy(
        "one-bit-adam",
        {"compression": "one-bit-adam", "compression_warmup_steps": _fifth},
        optimizer={"betas": "[0.9, 0.999]"},  # what is frozen should be the mean of many steps
    ),
    Strategy("zero-one-adam", {"compression": "zero-one-adam"}, paced_as="one-bit-adam"),
    Strategy("local", {"strategy": "local", "period": 8}, layout=BETWEEN),
    Strategy("easgd", {"strategy": "easgd", "period": 8}, layout=BETWEEN),
    Strategy("diloco", {"strategy": "diloco", "period": 10}, layout=BETWEEN),
    Strategy("diloco-int8", {**_MEAN, "compression": "int8"}, layout=BETWEEN),
    Strategy("diloco-dgc", {**_MEAN, "compression": "dgc", "compression_sparsity": 0.97}, layout=BETWEEN),
)


@dataclass(frozen=True)
class Kept:
    """What was found, in files of ``folder``: a comparison that was stopped goes on, and nothing is measured twice."""

    folder: Path
    scale: Scale

    def pace(self, name: str, find: Callable[[], Pace]) -> Pace:
        """How quick a strategy is, whatever the number of steps."""
        return Pace(**self._kept(f"pace-{name}", lambda: asdict(find())))

    def run(self, name: str, find: Callable[[], Run]) -> Run:
        """One run."""
        return Run(**self._kept(f"run-{self.scale.steps}-{name}", lambda: asdict(find())))

    def _kept(self, name: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.folder / f"{self.scale.tokens}-{self.scale.rate}-{name}.json"
        if not path.exists():
            found = find()
            path.write_text(json.dumps(found), encoding="utf-8")
            _say(f"{path.stem}: " + summary(found))
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept


@dataclass(frozen=True)
class Comparison:
    """Strategies at a scale, in a folder for run directories."""

    strategies: Sequence[Strategy]
    scale: Scale
    kept: Kept
    folder: Path

    @property
    def baselines(self) -> list[Strategy]:
        """Plain all-reduce, with SGD as well if a strategy is held against that."""
        wanted = {PLAIN.name, *(one.against for one in self.strategies)}
        return [one for one in (PLAIN, PLAIN_SGD) if one.name in wanted]

    def paces(self, timed: int) -> dict[str, Pace]:
        """Of all strategies, over the limited link; the last is that of no exchange."""
        found: dict[str, Pace] = {}
        for one in (*self.baselines, *self.strategies, ALONE):
            if one.over_link:
                continue
            if one.paced_as is not None and one.paced_as in found:
                found[one.name] = found[one.paced_as]
                continue
            found[one.name] = self.kept.pace(one.name, partial(self._pace, one, timed))
        return found

    def _pace(self, one: Strategy, timed: int) -> Pace:
        with two_hosts(rate=self.scale.rate) as hosts:
            return pace(hosts, self.folder, one, self.scale, timed)

    def whole(self, one: Strategy) -> float:
        """Seconds of a run over the limited link from its first to its last step."""
        steps = self.scale.steps
        measured = partial(self._over_link, one, steps, 1, every=steps)
        return sum(self.kept.run(f"{one.name}-whole", measured).step_seconds)

    def curves(self, seed: int) -> dict[str, Run]:
        """The losses of all strategies."""
        scale, found = self.scale, {}
        for one in self.baselines:
            plain = partial(losses, self.folder, one, scale, scale.steps, seed, None)
            found[one.name] = self.kept.run(f"{one.name}-{seed}", plain)
        most = round(scale.most * scale.steps)
        for one in self.strategies:
            if one.same_update_as is not None:
                found[one.name] = found[one.same_update_as]
                continue
            if one.over_link:
                measured = partial(self._over_link, one, most, seed, every=validation_every(scale.steps))
            else:
                measured = partial(losses, self.folder, one, scale, most, seed, found[one.against].last)
            found[one.name] = self.kept.run(f"{one.name}-{seed}", measured)
        return found

    def _over_link(self, one: Strategy, steps: int, seed: int, *, every: int) -> Run:
        with two_hosts(rate=self.scale.rate) as hosts:
            return train(hosts, self.folder, one, self.scale, steps, seed, every=every)


def measure(comparison: Comparison, seeds: Sequence[int], timed: int, whole: Sequence[str]) -> dict[str, Any]:
    """Paces first, one strategy after the other; then losses, seed by seed."""
    scale = comparison.scale
    paces = comparison.paces(timed)
    compute = paces[ALONE.name].seconds
    everyone = (*comparison.baselines, *comparison.strategies)
    through = {one.name: comparison.whole(one) for one in everyone if one.name in whole}
    rows: dict[str, list[dict[str, Any]]] = {one.name: [] for one in everyone}
    targets: dict[str, list[float]] = {one.name: [] for one in comparison.baselines}
    for seed in seeds:
        curves = comparison.curves(seed)
        for name, reached in targets.items():
            reached.append(curves[name].last)
        for one in everyone:
            rows[one.name].append(row(one, curves[one.name], curves[one.against].last, paces, compute, scale))
    for name, seconds in through.items():
        rows[name][0]["whole_seconds"] = seconds
    return {
        "rate": scale.rate,
        "steps": scale.steps,
        "tokens_per_step": scale.tokens,
        "seeds": list(seeds),
        "targets": targets,
        "compute_step_seconds": compute,
        "strategies": rows,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def summary(figures: Mapping[str, Any]) -> str:
    """One result on one line."""
    return ", ".join(f"{key} {value}" for key, value in figures.items() if not isinstance(value, list))


def row(
    strategy: Strategy, run: Run, target: float, paces: Mapping[str, Pace], compute: float, scale: Scale
) -> dict[str, Any]:
    """One run in figures; ``compute``: seconds of a step without any exchange."""
    mine, plain = paces.get(strategy.name) or run.pace(), paces[PLAIN.name]
    steps = run.steps_to(target)
    seconds = sent = None
    if steps is not None:
        whole = strategy.whole_rounds(scale.steps, steps)
        later = max(0.0, steps - whole - mine.first)
        seconds = mine.first_seconds + whole * plain.seconds + later * mine.seconds
        sent = mine.first_bytes + whole * plain.link_bytes + later * mine.link_bytes
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
    lines = [f"no exchange: {found['compute_step_seconds']:.2f} s a step"]
    lines += [
        f"loss of {name}: " + ", ".join(f"{loss:.3f}" for loss in each) for name, each in found["targets"].items()
    ]
    lines.append(f"{'strategy':<14} {heads}")
    for name, runs in found["strategies"].items():
        cells = [f"{name:<14}"]
        for (_, key, form, scale), width in zip(columns, widths, strict=True):
            values = [run[key] for run in runs if run.get(key) is not None]
            shown = format(scale * statistics.median(values), form) if len(values) == len(runs) else "-".rjust(width)
            cells.append(shown)
        lines.append(" ".join(cells))
    return "\n".join([*lines, "", *_curves(found)])


def _curves(found: Mapping[str, Any]) -> Iterator[str]:
    """Validation losses on the way, medians over seeds; a dash: the run had ended."""
    every = validation_every(found["steps"])
    marks = [round(found["steps"] * part / 5 / every) * every for part in range(1, 6)]
    yield f"{'loss after step':<15}" + "".join(f"{mark:9}" for mark in marks)
    for name, runs in found["strategies"].items():
        curves = [dict(run["validation"]) for run in runs]
        values = [[curve[mark] for curve in curves if mark in curve] for mark in marks]
        yield f"{name:<15}" + "".join(
            f"{statistics.median(each):9.3f}" if len(each) == len(curves) else "-".rjust(9) for each in values
        )


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
    parser.add_argument("--keep", type=Path, help="a folder for what is found; what it holds is not measured again")
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
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name) if options.keep is None else options.keep
        folder.mkdir(parents=True, exist_ok=True)
        (Path(name) / "runs").mkdir()
        comparison = Comparison(strategies, scale, Kept(folder, scale), Path(name) / "runs")
        found = measure(comparison, range(1, options.seeds + 1), options.timed, whole)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
