"""The campaign of random faults: a sample of it, and that it judges rightly."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.fault_draw import EVERY, LAYOUTS, SORTS, STEPS, Entry, Group, Sort, draw
from bench.fault_runs import JOB, Campaign, Verdict
from bench.faults import campaign, passed, summary
from meshwright.job.fault_section import check_faults, parse_fault
from meshwright.job.job import load_job
from meshwright.prove.pool import RankPool


def told(verdicts: list[Verdict]) -> str:
    return "\n".join(json.dumps(verdict.as_json()) for verdict in verdicts if not verdict.good)


def test_a_run_that_meets_a_damaged_checkpoint_and_a_kill(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """One run, one fault after the other; it goes on by itself from both, and ends with the same bits."""
    harm, kill = Sort("flip-byte", "recovers", then_kill=True), Sort("kill", "recovers")
    entries = (
        Entry(0, harm, (parse_fault("flip-byte rank=0 step=4"), parse_fault("kill rank=1 step=5 phase=reduce"))),
        Entry(1, kill, (parse_fault("kill rank=0 step=10 phase=backward"),)),
    )
    group = Group(0, "dp=2 zero=1", entries, ("recovery.memory=false",), "dp=2 zero=1")
    verdicts = Campaign(tmp_path, ranks).run(group)
    found = summary(verdicts)
    assert passed(found), told(verdicts)
    assert [verdict.outcome for verdict in verdicts] == ["recovered", "recovered"]
    assert [verdict.named for verdict in verdicts] == ["1", "0"]
    assert verdicts[0].lost_steps == 2, "back to step 2, past the damaged 4"
    assert found["detection_s"]["max"] < 60 and found["restart_s"]["max"] < 60


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_five_minutes_of_random_faults(tmp_path: Path) -> None:
    verdicts = campaign(40, 1, tmp_path)
    assert passed(summary(verdicts)), told(verdicts)


def test_every_sort_and_every_layout_comes_and_can_happen(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    groups = draw(300, 0)
    assert groups == draw(300, 0) and groups != draw(300, 1)
    entries = [entry for group in groups for entry in group.entries]
    assert [entry.number for entry in entries] == list(range(300))
    sorts = Counter(entry.sort.text for entry in entries)
    per_weight = 300 / sum(sort.weight for sort in SORTS)
    assert all(sorts[sort.text] >= int(per_weight) * sort.weight for sort in SORTS if sort.kind != "flip-bit")
    assert sorts["flip-bit bit=62"] > 0
    assert set(LAYOUTS) == {group.layout for group in groups}
    assert len({(entry.fault.phase, entry.fault.rank) for entry in entries}) > 25
    for group in groups:
        texts = json.dumps([str(fault) for fault in group.faults])
        pairs = [f"fault.inject={texts}", *group.settings]
        check_faults(load_job(tmp_path / "job.toml", pairs, f"{group.layout} micro_batch=1").resolve())
        at = [fault.step for fault in group.faults]
        assert at == sorted(set(at)) and at[0] >= 2 * EVERY and at[-1] < STEPS


def test_what_goes_wrong_is_counted() -> None:
    """A run whose parameters changed, one whose fault did not happen, one that blames the wrong rank."""
    good = Verdict(0, 0, ["kill rank=0 step=4"], "kill", 0, 4, "start", "dp=2", fired=True, right_state=True)
    assert passed(summary([good]))
    for change, count in [
        ({"fired": False}, "not_fired"), ({"right_state": False}, "wrong_state"), ({"hang": True}, "hangs"),
        ({"orphans": 2}, "orphans"), ({"rightly_named": False}, "misnamed"),
    ]:  # fmt: skip
        bad = Verdict(**{**good.as_json(), **change})
        found = summary([good, bad])
        assert found[count] == (2 if count == "orphans" else 1) and not passed(found)


@pytest.mark.all
def test_a_wrong_end_is_seen(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """A bit that flips in silence and that nobody looks for: the campaign sees that the parameters are others."""
    entry = Entry(0, Sort("flip-bit", "undisturbed"), (parse_fault("flip-bit rank=0 step=5 bit=55"),))
    (verdict,) = Campaign(tmp_path, ranks).run(Group(0, "dp=2 zero=1", (entry,), (), "dp=2 zero=1"))
    assert verdict.fired and not verdict.right_state and not verdict.good
    assert "the end: its bits are not those of the undisturbed run" in verdict.problems
