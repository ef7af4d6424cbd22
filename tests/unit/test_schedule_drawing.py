"""Drawings of schedules: what stands where, read back from the text and the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from meshwright.schedule.draw_svg import COLOURS, draw_svg
from meshwright.schedule.draw_text import draw_text
from meshwright.schedule.simulate import simulate
from meshwright.schedule.table import table
from meshwright.schedule.units import scaled

SVG = "{http://www.w3.org/2000/svg}"


def test_text_shows_each_rank_in_time() -> None:
    drawn = draw_text(simulate(table("1f1b", 3, 1, 4), 1, 1, 1), width=54, unit="units")
    assert drawn.splitlines() == [
        "rank 0 |F0─F1─F2─            B0════F3─B1════   B2════   B3════|  67% busy",
        "rank 1 |   F0─F1─      B0════F2─B1════F3─B2════   B3════      |  67% busy",
        "rank 2 |      F0─B0════F1─B1════F2─B2════F3─B3════            |  67% busy",
        "       0                                              18 units",
    ]


def test_text_tells_stages_and_parts_apart() -> None:
    drawn = draw_text(simulate(table("zbv", 2, 2, 4), 1, 1, 1), width=120)
    first, second, axis = drawn.splitlines()
    assert re.findall(r"[FBIWfbiw]\d", first) == [
        f"{kind.lower() if stage > 1 else kind}{index}" for kind, stage, index in table("zbv", 2, 2, 4).rows[0]
    ]
    assert "f0" in second and axis.endswith("25 s")


def test_text_of_a_long_schedule_stays_as_wide_as_asked() -> None:
    drawn = draw_text(simulate(table("interleaved", 8, 2, 64), 1, 1, 1), width=80)
    assert {len(line) for line in drawn.splitlines()[:-1]} == {len("rank 7 |") + 80 + len("|  95% busy")}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "dualpipev"])
def test_picture_has_every_action_at_its_time(schedule: str) -> None:
    made = table(schedule, 3, 1 if schedule == "1f1b" else 2, 6)
    simulation = simulate(made, 0.001, 0.002, 0.001, 0.0005)
    root = ElementTree.fromstring(draw_svg(simulation))
    bars = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert len(bars) == len(made.kind)
    lefts, tops = [float(bar.get("x", "")) for bar in bars], [float(bar.get("y", "")) for bar in bars]
    scale = (960 - 62 - 18) / simulation.makespan
    assert lefts == pytest.approx([62 + start * scale for start in simulation.start], abs=0.06)
    assert [float(bar.get("width", "")) for bar in bars] == pytest.approx(
        (simulation.end - simulation.start) * scale, abs=0.06
    )
    assert len(set(tops)) == 3 and tops == sorted(tops)
    actions = [action for row in made.rows for action in row]
    assert [bar.get("fill") for bar in bars] == [COLOURS[action.kind] for action in actions]
    told = [bar.findtext(f"{SVG}title", "") for bar in bars]
    assert told[0].endswith("of micro-batch 0 in stage 0: 0 s to 1 ms")
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {"rank 0", "rank 1", "rank 2", "time (ms)", "forward"} <= words


def test_picture_of_a_window_has_only_what_is_in_it() -> None:
    simulation = simulate(table("gpipe", 2, 1, 8), 1, 1, 1)
    root = ElementTree.fromstring(draw_svg(simulation, window=(2, 4), unit="units"))
    told = [one.text or "" for one in root.iter(f"{SVG}title")][1:]
    assert [text.split(":")[0] for text in told] == [
        "forward of micro-batch 2 in stage 0",
        "forward of micro-batch 3 in stage 0",
        "forward of micro-batch 1 in stage 1",
        "forward of micro-batch 2 in stage 1",
    ]


def test_picture_needs_nothing_beside_it() -> None:
    drawn = draw_svg(simulate(table("zbv", 2, 2, 4), 1, 1, 1), title="a < b & c")
    assert "a &lt; b &amp; c" in drawn
    assert re.findall(r'(?:href|src)="([^#"][^"]*)"|url\((?!#)', drawn) == []


def test_times_get_a_fitting_unit() -> None:
    assert [scaled(time)[1] for time in (2.0, 0.5, 3e-5, 4e-8, 0.0)] == ["s", "ms", "µs", "ns", "s"]
    assert scaled(0.5, "units") == (0.5, "units")
