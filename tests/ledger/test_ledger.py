"""The ledger type: written and read, compared, printed; without torch."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from meshwright.errors import InputError
from meshwright.ledger.compare import Difference, Tolerances, compare
from meshwright.ledger.ledger import Computes, Ledger, RankLedger, Send, Spends, Stores
from meshwright.ledger.render import comparison_table, ledger_tables, with_unit


def send(axis: str = "dp", payload: int = 1000, **changes: object) -> Send:
    values = {"axis": axis, "operation": "all_gather", "phase": "forward", "messages": 2}
    values |= {"payload": payload, "wire": 3 * payload}
    return Send(**{**values, **changes})  # type: ignore[arg-type]


def entry(rank: int, **changes: object) -> RankLedger:
    stores = Stores(parameters=400, gradients=400, optimizer=800, activations=900, temporary=50, peak=2550 + rank)
    values = {
        "rank": rank,
        "place": {"pp": 0, "tp": rank},
        "stores": stores,
        "computes": Computes(forward=10, backward=20, recompute=5),
        "sends": (send(), send("tp", 20)),
        "spends": Spends(wall=1.0, data=0.1, compute={"forward": 0.3, "backward": 0.4}, communication={"tp": 0.2}),
    }
    return RankLedger(**{**values, **changes})  # type: ignore[arg-type]


def ledger(source: str = "measured", *entries: RankLedger) -> Ledger:
    return Ledger(source=source, layout="tp=2", world=2, step=4, ranks=entries or (entry(0), entry(1)))  # type: ignore[arg-type]


def test_sums():
    one = entry(0)
    assert one.stores.state == 1600
    assert (one.computes.model, one.computes.hardware) == (30, 35)
    assert (one.payload(), one.payload("tp"), one.wire("dp"), one.wire()) == (1020, 20, 3000, 3060)
    assert one.spends is not None and one.spends.sum == pytest.approx(1.0)
    assert ledger().fullest.rank == 1
    assert ledger().rank(1).rank == 1
    with pytest.raises(InputError, match="rank: 5 is not in this measured ledger; it has 0, 1"):
        ledger().rank(5)


def test_rates():
    rated = ledger().with_rates(150.0, 100.0)
    assert (rated.useful_speedup, rated.efficiency) == (1.5, 0.75)
    assert ledger().with_rates(150.0, None).efficiency is None


def test_json_round_trip():
    original = ledger().with_rates(150.0, 100.0)
    assert Ledger.from_json(original.to_json()) == original


@pytest.mark.parametrize("text", ["", "{", "[]", '{"source": "guessed"}', ledger().to_json()[:-40]])
def test_damaged_json_is_named(text):
    with pytest.raises(InputError, match=r"runs/a/ledger\.json: .*expected a ledger written by meshwright"):
        Ledger.from_json(text, "runs/a/ledger.json")


def test_equal_ledgers_agree():
    differences = compare([ledger("traced"), ledger("measured")])
    assert len(differences) > 2 * 12
    assert all(one.agrees and one.relative == 0 for one in differences)


@pytest.mark.parametrize(
    "changes, quantity",
    [
        ({"stores": entry(0).stores.model_copy(update={"gradients": 401})}, "stores: gradients"),
        ({"stores": entry(0).stores.model_copy(update={"activations": 920})}, "stores: activations"),
        ({"computes": Computes(forward=10, backward=21, recompute=5)}, "computes: backward"),
        ({"sends": (send(payload=1001, wire=3000), send("tp", 20))}, "sends: dp all_gather forward: payload"),
        ({"sends": (send(messages=3), send("tp", 20))}, "sends: dp all_gather forward: messages"),
        ({"sends": (send(),)}, "sends: tp all_gather forward: payload"),
    ],
)
def test_each_difference_is_found(changes, quantity):
    differences = compare([ledger("traced"), ledger("measured", entry(0, **changes), entry(1))])
    assert {one.rank for one in differences if not one.agrees} == {0}
    assert quantity in [one.quantity for one in differences if not one.agrees]


def test_tolerances_by_category():
    changed = entry(0).stores.model_copy(update={"activations": 910, "temporary": 99})
    other = ledger("measured", entry(0, stores=changed), entry(1))
    assert all(one.agrees for one in compare([ledger("traced"), other])), "2 % of activations; temporary is shown only"
    assert not all(one.agrees for one in compare([ledger("traced"), other], Tolerances(activations=0.0)))
    alone = [one.model_copy(update={"world": 1}) for one in (ledger("traced"), other)]
    assert [one.quantity for one in compare(alone) if not one.agrees] == ["stores: activations"]


def test_ranks_of_one_ledger_only_are_not_compared():
    assert {one.rank for one in compare([ledger("traced", entry(1)), ledger("measured")])} == {1}


def text_of(*tables: object, width: int = 200) -> str:
    output = io.StringIO()
    for table in tables:
        Console(file=output, width=width).print(table)
    return output.getvalue()


def test_nothing_is_cut_in_80_columns():
    sends = (Send(axis="dp", operation="reduce_scatter", phase="backward", messages=2, payload=10**9, wire=10**10),)
    busy = ledger("measured", *(entry(rank, sends=sends) for rank in range(16)))
    text = text_of(*ledger_tables(busy), width=80)
    assert "…" not in text
    for words in ("parameters", "activations", "reduce_scatter", *(f"rank {rank}" for rank in range(16))):
        assert words in text
    high = 987_654_321
    differing = [
        Difference(0, f"sends: dp reduce_scatter backward: {name}", {"traced": high, "measured": high + 1}, 0.0)
        for name in ("payload", "wire")
    ]
    text = text_of(comparison_table(differing), width=80)
    assert "…" not in text and f"{high:,}" in text and f"{high + 1:,}" in text, "every byte of it"
    assert text.count("reduce_scatter") == 1 and "  wire" in text


def test_tables():
    text = text_of(*ledger_tables(ledger()))
    for part in ("Stores", "Computes", "Sends", "Spends", "communication: tp", "all_gather"):
        assert part in text
    stores = text.split("Computes")[0]
    assert stores.index("\n1 ") < stores.index("\n0 "), "the fullest rank first"
    assert "1,000.0" in text, "sum and wall in milliseconds"
    empty = ledger("traced", RankLedger(rank=0))
    assert "Spends" not in text_of(*ledger_tables(empty)) and "none" in text_of(*ledger_tables(empty))
    differing = compare([ledger("traced"), ledger("measured", entry(0, sends=()), entry(1))])
    assert "DIFFERS" in text_of(comparison_table(differing))


def test_units():
    assert with_unit(0, "B", 1024) == "0 B"
    assert with_unit(1023, "B", 1024) == "1,023 B"
    assert with_unit(1536, "B", 1024) == "1.5 KiB"
    assert with_unit(12_300_000_000, "FLOP") == "12.3 GFLOP"


def test_needs_no_torch():
    code = "import meshwright.ledger.render, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
