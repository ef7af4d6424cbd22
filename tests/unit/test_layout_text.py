"""The short form of a layout: round trip, and a caret under what is wrong."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.job.layout import Layout, Schedule
from meshwright.job.layout_text import format_layout, parse_layout

_COUNT = st.integers(1, 64)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "dp": _COUNT,
    "shard": _COUNT,
    "zero": st.sampled_from([0, 1, 2, 3]),
    "tp": _COUNT,
    "pp": _COUNT,
    "cp": _COUNT,
    "ep": _COUNT,
    "schedule": st.sampled_from(get_args(Schedule)),
    "virtual": _COUNT,
    "micro_batch": _COUNT,
    "recompute": st.one_of(
        st.sampled_from(["none", "selective", "full"]),
        st.lists(st.sampled_from(["none", "selective", "full"]), min_size=2, max_size=5).map(tuple),
    ),
    "stages": st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple),
    "placement": st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple),
}


@given(st.fixed_dictionaries({}, optional=_FIELDS))
def test_round_trip(fields: dict[str, Any]) -> None:
    layout = Layout(**fields)
    assert parse_layout(format_layout(layout)) == layout
    assert parse_layout(str(layout)) == layout


def test_reads_every_key() -> None:
    layout = parse_layout(
        "dp=4 shard=2 tp=2 pp=2 zero=1 schedule=interleaved virtual=2 stages=3,3,1,1 micro_batch=2 "
        "recompute=full,none,selective,none"
    )
    assert layout == Layout(
        dp=4, shard=2, tp=2, pp=2, zero=1, schedule="interleaved", virtual=2, stages=(3, 3, 1, 1), micro_batch=2,
        recompute=("full", "none", "selective", "none"),
    )  # fmt: skip
    assert parse_layout("  ") == Layout()
    assert format_layout(Layout()) == "dp=1"
    assert format_layout(Layout(dp=2, tp=2, pp=2, zero=1)) == "dp=2 tp=2 pp=2 zero=1 schedule=1f1b"


_KEYS = "dp, shard, tp, pp, cp, ep, zero, schedule, virtual, stages, micro_batch, recompute, placement"


@pytest.mark.parametrize(
    ("text", "sentence", "caret"),
    [
        ("dp=2 zreo=1", f"'zreo' is not a key; did you mean zero?; legal keys are {_KEYS}", 5),
        ("dp=2 tp=0", "tp=0 is not a whole number of at least 1", 8),
        ("dp=two", "dp=two is not a whole number of at least 1", 3),
        ("dp=²", "dp=² is not a whole number of at least 1", 3),
        ("dp=2 zero=4", "zero=4 is not a ZeRO stage; use 0, 1, 2 or 3", 10),
        (
            "pp=2 schedule=1f1c",
            "schedule=1f1c is not one of gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv, dualpipev, 2bw; "
            "did you mean 1f1b?",
            14,
        ),
        ("stages=3,x,2", "stages=3,x,2 has 'x' in it, which is not a whole number of at least 0", 9),
        (
            "recompute=full,some",
            "recompute=full,some has 'some' in it, which is not one of none, selective, full",
            15,
        ),
        ("dp=2 dp=4", "dp is given twice; give it once", 5),
        ("dp 2", f"'dp' is not of the form key=value; legal keys are {_KEYS}", 0),
        ("dp=", "dp= without a value is not a whole number of at least 1", 3),
        ("auto", "auto stands for a whole layout, to be planned; give the degrees here", 0),
    ],
)
def test_what_is_wrong_stands_over_the_caret(text: str, sentence: str, caret: int) -> None:
    with pytest.raises(InputError) as error:
        parse_layout(text)
    assert str(error.value) == f"layout: {sentence}\n  {text}\n  {' ' * caret}^"
