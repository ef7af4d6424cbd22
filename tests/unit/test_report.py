"""The report: pictures that say what their data says, what is missing named, names that cannot run, one sentence."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.job.layout_text import parse_layout
from meshwright.observe.report_svg import Scale, byte_unit, show_ranks
from meshwright.observe.report_traffic import by_node, rank_traffic
from meshwright.plan.predict import predict
from tests.report_runs import EVIL, measured, small_job, write_plan, write_run

SECTIONS = ["search", "memory", "time", "pipeline", "traffic", "compare", "loss", "rate", "goodput"]


class Reader(HTMLParser):
    """Collects what an HTML file holds, and holds that every element is closed in its turn."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self._script = ""
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id") or ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data[self._script.removesuffix("-data")] = json.loads(data)
        else:
            self.words += data


def pictures(text: str) -> list[ElementTree.Element]:
    """Every picture, through an XML parser."""
    return [ElementTree.fromstring(picture) for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def picture(text: str, name: str) -> ElementTree.Element:
    """The one of that name."""
    (found,) = [one for one in pictures(text) if one.get("aria-labelledby") == f"{name}-title"]
    return found


def values(drawn: ElementTree.Element, tag: str, look: str | None = None) -> list[tuple[float, ...]]:
    """What marks stand for."""
    return [
        tuple(float(number) for number in mark.attrib["data-value"].split())
        for mark in drawn.iter(tag)
        if "data-value" in mark.attrib and look in (None, mark.get("class"))
    ]


def report(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run the verb: exit code, standard output and error."""
    with pytest.raises(SystemExit) as end:
        main(["report", *(str(word) for word in words)])
    output, error = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, output, error


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("report") / "run", small_job())
    write_plan(folder / "plan.json", small_job())
    return folder


@pytest.fixture(scope="module")
def run_page(run: Path) -> str:
    with pytest.raises(SystemExit):
        main(["report", str(run)])
    return (run / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def plan_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_plan(tmp_path_factory.mktemp("report") / "plan.json", small_job())
    with pytest.raises(SystemExit):
        main(["report", str(path)])
    return path.with_suffix(".html").read_text("utf-8")


def test_a_run_has_every_section(run_page: str) -> None:
    read = Reader(run_page)
    assert [attributes["id"] for tag, attributes in read.elements if tag == "section"] == SECTIONS
    assert set(read.data) == set(SECTIONS)


def test_a_plan_has_what_a_plan_knows(plan_page: str) -> None:
    read = Reader(plan_page)
    assert {"search", "memory", "time", "traffic"} <= set(read.data)
    assert "a plan has no steps" in read.words


@pytest.mark.parametrize("which", ["run_page", "plan_page"])
def test_nothing_is_fetched_and_nothing_runs(which: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(which)
    for tag, attributes in Reader(text).elements:
        assert tag not in ("link", "iframe", "object", "embed", "img", "image", "base", "use")
        assert tag != "script" or attributes["type"] == "application/json"
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "srcset", "xlink:href")
            assert name != "href" or (value or "").startswith("#")
    assert all(inside.startswith("#") for inside in re.findall(r"url\(([^)]*)", text))
    assert "@import" not in text and "//" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)


@pytest.mark.parametrize("which", ["run_page", "plan_page"])
def test_pictures_are_named_and_their_marks_lie_inside(which: str, request: pytest.FixtureRequest) -> None:
    drawn = pictures(request.getfixturevalue(which))
    assert drawn
    for one in drawn:
        assert one.get("role") == "img" and any(child.tag.endswith("title") for child in one)
        width, height = (float(number) for number in one.attrib["viewBox"].split()[2:])
        for mark in one.iter():
            if mark.tag.endswith("rect") and "x" in mark.attrib:
                x, y = float(mark.attrib["x"]), float(mark.attrib["y"])
                assert x >= 0 and y >= 0
                assert x + float(mark.attrib["width"]) <= width + 0.1 and y + float(mark.attrib["height"]) <= height
            if mark.tag.endswith("circle"):
                assert 0 <= float(mark.attrib["cx"]) <= width and 0 <= float(mark.attrib["cy"]) <= height


@pytest.mark.parametrize("name", ["memory", "time"])
def test_bars_are_their_data(run_page: str, name: str) -> None:
    data = Reader(run_page).data[name]
    drawn = values(picture(run_page, name), "rect")
    assert sorted(drawn) == sorted((value,) for bar in data["bars"] for value in bar["parts"].values() if value)


def test_memory_is_the_ledgers(run_page: str) -> None:
    bars = Reader(run_page).data["memory"]["bars"]
    for source in ("predicted", "measured"):
        for entry in measured(small_job()).ranks:
            (bar,) = [bar for bar in bars if bar["source"] == source and entry.rank in bar["ranks"]]
            assert sum(bar["parts"].values()) == (entry.stores.peak or entry.stores.state)


def test_time_parts_sum_to_the_wall(run_page: str) -> None:
    bars = Reader(run_page).data["time"]["bars"]
    assert {bar["source"] for bar in bars} == {"predicted", "measured"}
    for bar in bars:
        if bar["source"] == "measured":
            assert sum(bar["parts"].values()) == pytest.approx(1.0)


def test_squares_are_their_data(run_page: str) -> None:
    data = Reader(run_page).data["traffic"]
    drawn = values(picture(run_page, "traffic"), "rect")
    assert sorted(drawn) == sorted((sum(axes.values()),) for _, _, axes in data["pairs"] if sum(axes.values()))


def test_points_are_their_data(plan_page: str) -> None:
    data = Reader(plan_page).data["search"]
    drawn = picture(plan_page, "search")
    for look, fits in (("fits", True), ("unfit", False)):
        assert sorted(values(drawn, "circle", look)) == sorted(
            (memory, seconds) for seconds, memory, fit, _ in data["points"] if fit == fits
        )
    assert values(drawn, "circle", "front-dot") == [
        (entry["peak_memory_bytes"], entry["step_time_s"]) for entry in data["pareto"]
    ]
    best = data["layouts"][0]
    assert values(drawn, "circle", "chosen") == [(best["peak_memory_bytes"], best["step_time_s"])]


def test_a_layout_that_does_not_fit_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_plan(tmp_path / "plan.json", small_job())
    values_ = json.loads(path.read_text())
    seconds, _, _, family = values_["points"][0]
    values_["points"][0] = [seconds, 1e12, False, family]
    values_["rejected"].append({"family": family, "kind": "memory", "layouts": 1, "reason": "memory: rank 0 has less"})
    path.write_text(json.dumps(values_))
    assert report(capsys, path)[0] == 0
    drawn = picture((tmp_path / "plan.html").read_text("utf-8"), "search")
    (tip,) = [mark[0].text for mark in drawn.iter("circle") if mark.get("class") == "unfit" and len(mark)]
    assert tip is not None and "does not fit. It lacks" in tip and "memory: rank 0 has less" in tip


def test_lines_are_their_data(run_page: str) -> None:
    data = Reader(run_page).data
    loss = picture(run_page, "loss")
    assert values(loss, "circle", "dot") == [(value,) for _, value in data["loss"]["training"]]
    assert values(loss, "circle", "validation") == [(4.9,)]
    assert values(picture(run_page, "rate"), "circle", "dot") == [(value,) for _, value in data["rate"]["rates"]]
    assert data["loss"]["training"][-1] == [20, 3.0]


def test_a_long_run_is_thinned_and_keeps_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", small_job(), steps=2300)
    report(capsys, folder)
    training = Reader((folder / "report.html").read_text("utf-8")).data["loss"]["training"]
    assert len(training) <= 500 and training[-1][0] == 2300


def test_goodput_counts_steps_over_time(run_page: str) -> None:
    data = Reader(run_page).data["goodput"]
    # Twenty steps of a second in 81 s; a minute passes between the two attempts.
    assert data["goodput"] == pytest.approx(20 / 81)
    assert [attempt["begin"] for attempt in data["attempts"]] == [0.0, 70.0]
    assert [attempt["end"] for attempt in data["attempts"]] == [10.0, 81.0]
    parts = {part["part"]: part["seconds"] for part in data["parts"]}
    assert parts["between attempts"] == pytest.approx(60.0) and parts["saving checkpoints"] == pytest.approx(1.0)
    assert sum(parts.values()) == pytest.approx(81.0)


def test_the_pipeline_is_drawn_predicted_and_measured(run_page: str) -> None:
    data = Reader(run_page).data["pipeline"]
    assert [one["title"].split(",")[0] for one in data] == ["predicted", "measured"]
    for one in data:
        # Forward and backward of four micro-batches on each of two ranks.
        assert len(one["actions"]) == 16
        assert max(action[-1] for action in one["actions"]) == pytest.approx(one["makespan"])


def test_predicted_stands_beside_measured(run_page: str) -> None:
    rows = {row["quantity"]: row for row in Reader(run_page).data["compare"]}
    assert rows["stores: parameters"]["difference"] == "0.00%"
    assert rows["spends: wall"]["measured"] == 1.0
    assert rows["step time (s): median of steady steps"]["measured"] == 1.0


def test_a_traced_ledger_is_drawn_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", small_job())
    traced = predict(small_job()).model_copy(update={"source": "traced"})
    (folder / "traced.json").write_text(traced.to_json())
    report(capsys, folder)
    data = Reader((folder / "report.html").read_text("utf-8")).data
    assert [bar["source"] for bar in data["memory"]["bars"]][:3] == ["predicted", "traced", "measured"]
    assert data["compare"][0]["traced"] is not None


@pytest.mark.parametrize(
    ("absent", "gone", "why"),
    [
        ("plan.json", {"search"}, "has no plan.json"),
        ("metrics.jsonl", {"loss", "rate"}, "has no metrics.jsonl"),
        ("events.jsonl", {"goodput"}, "has no events.jsonl"),
        ("job.toml", {"pipeline", "compare"}, "has no job.toml"),
        ("ledger.json", set(), "Not in the run directory: cluster.json, ledger.json"),
        ("summary.json", set(), "Not in the run directory"),
    ],
)
def test_what_is_missing_is_named(
    absent: str, gone: set[str], why: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in run.iterdir():
        if file.name not in (absent, "report.html"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code, output, _ = report(capsys, tmp_path, "--out", tmp_path / "page.html")
    read = Reader((tmp_path / "page.html").read_text("utf-8"))
    assert code == 0 and set(SECTIONS) - set(read.data) == gone
    assert why in read.words
    assert len(re.findall("^left out: ", output, re.MULTILINE)) == len(gone)


def test_names_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run <b>", small_job(name=EVIL))
    (folder / "events.jsonl").write_text(json.dumps({"time": 1, "event": EVIL, "step": 1}) + "\n")
    write_plan(folder / "plan.json", small_job(name=EVIL))
    assert report(capsys, folder)[0] == 0
    text = (folder / "report.html").read_text("utf-8")
    read = Reader(text)
    assert {tag for tag, _ in read.elements} & {"b", "img"} == set() and "document.title" in read.words
    assert all(attributes["type"] == "application/json" for tag, attributes in read.elements if tag == "script")
    assert read.data["goodput"]["events"][0]["event"] == EVIL


def test_json_gives_what_the_page_holds(run: Path, capsys: pytest.CaptureFixture[str], run_page: str) -> None:
    code, output, _ = report(capsys, run, "--json")
    answer = json.loads(output)
    assert code == 0 and answer["out"] == str(run / "report.html")
    held = Reader(run_page).data
    for name in SECTIONS:
        assert answer["sections"][name] == {"title": answer["sections"][name]["title"], "absent": None,
                                            "data": held[name]}  # fmt: skip


def _files(folder: Path) -> dict[str, Path]:
    """Wrong things to report on."""
    (folder / "empty").mkdir()
    texts = {"broken.json": "{", "list.json": "[]", "other.json": "{}", "compared.json": '{"compared": []}',
             "half.json": '{"layouts": [{"fits": true}], "searched": 1}'}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name, file, text in (
        ("bad-ledger", "ledger.json", "{}"), ("bad-metrics", "metrics.jsonl", "{]\n"),
        ("bad-events", "events.jsonl", "3\n"), ("bad-job", "job.toml", "[model]\nlayres = 3\n"),
    ):  # fmt: skip
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "does not exist"),
        ("empty", "is no run directory"),
        ("broken.json", "is no JSON"),
        ("list.json", "must be an object"),
        ("other.json", "is no plan"),
        ("compared.json", "without --compare"),
        ("half.json", "model: Field required"),
        ("binary.json", "is no UTF-8 text"),
        ("bad-ledger", "expected a ledger"),
        ("bad-metrics", "metrics.jsonl line 1 is no JSON ("),
        ("bad-events", "no JSON object"),
        ("bad-job", "did you mean"),
    ],
)
def test_wrong_input_is_one_sentence(name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _files(tmp_path).get(name, tmp_path / name)
    code, output, error = report(capsys, path)
    assert code == 2 and says in error and output == ""
    if name != "bad-job":  # which may have several faults, one a line
        assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.html"))


def test_out_must_be_a_file_that_can_be_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, says in ((tmp_path, "is a directory"), (tmp_path / "no" / "page.html", "does not exist")):
        code, _, error = report(capsys, run, "--out", out)
        assert code == 2 and says in error
    code, _, error = report(capsys, run / "plan.json", "--out", run / "plan.json")
    assert code == 2 and "is the plan itself" in error


@pytest.mark.parametrize("layout", ["dp=2 tp=2 pp=2", "dp=4 shard=2 zero=2 pp=2 micro_batch=1",
                                    "pp=2 tp=2 schedule=zbv", "pp=4 placement=3,1,2,0"])  # fmt: skip
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_byte_sent_is_received(layout: str, backend: Any) -> None:
    job = small_job(layout)
    ledger = predict(job, backend=backend)
    traffic = rank_traffic(ledger, job.layout)
    for entry in ledger.ranks:
        for axis in {send.axis for send in entry.sends}:
            row = sum(axes.get(axis, 0.0) for (sender, _), axes in traffic.items() if sender == entry.rank)
            assert row == pytest.approx(entry.wire(axis))
    nodes = by_node(traffic, 2)
    total = sum(sum(axes.values()) for axes in traffic.values())
    assert sum(sum(axes.values()) for axes in nodes.values()) == pytest.approx(total)


def test_sums_by_node_cross_nodes_between_ranks_at_one_place() -> None:
    sync = {"compression": "int8", "compression_level": "slow", "node_size": 4}
    plain = small_job("dp=4 tp=2 micro_batch=1")
    job = plain.model_copy(update={"sync": type(plain.sync).model_validate(sync)})
    ledger = predict(job)
    traffic = rank_traffic(ledger, job.layout, 4)
    for axis, pairs in (("intra", {(0, 2), (1, 3), (4, 6), (5, 7)}), ("inter", {(0, 4), (1, 5), (2, 6), (3, 7)})):
        found = {pair for pair, axes in traffic.items() if axes.get(axis)}
        assert found == pairs | {(receiver, sender) for sender, receiver in pairs}
        assert sum(axes.get(axis, 0.0) for axes in traffic.values()) == sum(entry.wire(axis) for entry in ledger.ranks)


def test_pipeline_messages_go_to_neighbours() -> None:
    job = small_job("pp=4 placement=3,1,2,0 micro_batch=1")
    traffic = rank_traffic(predict(job), job.layout)
    piped = {pair for pair, axes in traffic.items() if axes.get("pp")}
    assert piped == {(3, 1), (1, 3), (1, 2), (2, 1), (2, 0), (0, 2)}


def test_a_ring_sends_to_the_next() -> None:
    job = small_job("dp=4 zero=1")
    traffic = rank_traffic(predict(job, backend="nccl"), parse_layout("dp=4 zero=1"))
    assert {pair for pair, axes in traffic.items() if axes.get("shard")} == {(0, 1), (1, 2), (2, 3), (3, 0)}


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0.001, 7.3), (1.0, 1.2), (30.0, 31.0), (2e9, 1.4e12)])
def test_ticks_are_round_and_inside(low: float, high: float, logarithmic: bool) -> None:
    ticks = Scale(low, high, 0, 100, logarithmic).ticks()
    assert 2 <= len(ticks) <= 10 and ticks == sorted(ticks)
    for tick in ticks:
        assert low * (1 - 1e-6) <= tick <= high * (1 + 1e-6) and len(f"{tick:.9e}".split("e")[0].rstrip("0")) <= 5


def test_words_for_ranks_and_units() -> None:
    assert show_ranks([3]) == "rank 3" and show_ranks([2, 0, 1]) == "ranks 0-2"
    assert show_ranks([0, 1, 4, 5]) == "ranks 0-1, 4-5" and show_ranks(range(1, 99, 2), 20) == "49 ranks from 1"
    assert byte_unit(2.5e9).name == "GB" and byte_unit(2.5e9).show(2.5e9) == "2.5"
