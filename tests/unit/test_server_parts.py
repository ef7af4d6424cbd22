"""The parts of a parameter server one by one: frames, introductions, placement, cursor, ledger, rules of the job."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import InputError, MeshwrightError
from meshwright.sync.server import protocol, sockets
from meshwright.sync.server.client import Worker
from meshwright.sync.server.coordinator import Coordinator
from meshwright.sync.server.cursor import Cursor, Position, passed_over
from meshwright.sync.server.ledger import differences, predict
from meshwright.sync.server.membership import Workers
from meshwright.sync.server.node import Node, PassiveNode
from meshwright.sync.server.placement import cut, filled_by_hashing, place
from meshwright.sync.server.protocol import Message, ProtocolError, Refused, Run, decode, encode
from meshwright.sync.server.rehearsal import Notes
from meshwright.sync.server.replica import COORDINATOR, Replica
from meshwright.sync.server.sockets import dial, listen, receive, send
from meshwright.sync.server.worker_link import WorkerLink
from tests.command_line import settings, write_job
from tests.small_jobs import small_job
from tests.unit.server_nodes import RUN, Echo, until
from tests.unit.simulated_servers import Computing, SmallStore, clocked, plan, replay, start


def through(frame: bytes, *, stranger: bool = False) -> Message:
    position = 0

    def receive(buffer: memoryview) -> None:
        nonlocal position
        if position + len(buffer) > len(frame):
            raise EOFError
        buffer[:] = frame[position : position + len(buffer)]
        position += len(buffer)

    return decode(receive, stranger=stranger)


def frame(message: Message) -> bytes:
    return b"".join(bytes(part) for part in encode(message))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_message_comes_out_as_it_went_in(dtype: torch.dtype) -> None:
    tensors = [torch.arange(5).to(dtype), torch.empty(0, dtype=dtype), torch.ones(2, 3).to(dtype).view(-1)]
    message = through(frame(Message("push", {"worker": "w", "sequence": 3}, tensors)))
    assert (message.kind, message.fields) == ("push", {"worker": "w", "sequence": 3})
    assert all(torch.equal(one, two) for one, two in zip(message.tensors, tensors, strict=True))


@given(st.binary(min_size=18, max_size=80))
def test_noise_is_refused_in_a_sentence(noise: bytes) -> None:
    with pytest.raises((ProtocolError, EOFError)):
        through(noise)


@pytest.mark.parametrize(
    ("header", "tensor_bytes", "rule"),
    [
        (b"{}", 0, "malformed: it has no kind, fields and tensors"),
        (b"[1]", 0, "malformed: it is no object"),
        (b"[" * 4000, 0, "malformed: it is no JSON, or nested too deep"),
        (b"{", 0, "malformed: it is no JSON"),
        (b"\xff\xff", 0, "malformed: it is no JSON"),
        (json.dumps({"kind": "a", "fields": {}, "tensors": [[[], 1]]}).encode(), 0, "malformed: a tensor is no type"),
        (json.dumps({"kind": "a", "fields": {}, "tensors": [["F16", 1]]}).encode(), 2, "malformed"),
        (json.dumps({"kind": "a", "fields": {}, "tensors": [["F32", -1]]}).encode(), 0, "malformed"),
        (json.dumps({"kind": "a", "fields": {}, "tensors": [["F32", True]]}).encode(), 4, "malformed"),
        (json.dumps({"kind": "a", "fields": {}, "tensors": [["F32", 2]]}).encode(), 4, "announces 4 bytes"),
    ],
)  # fmt: skip
def test_a_wrong_header_is_refused(header: bytes, tensor_bytes: int, rule: str) -> None:
    prefix = protocol.PREFIX.pack(protocol.MAGIC, protocol.VERSION, len(header), tensor_bytes)
    with pytest.raises(ProtocolError, match=rule) as refused:
        through(prefix + header + b"\0" * tensor_bytes)
    assert "Error" not in str(refused.value)


def test_a_stranger_can_make_us_hold_nothing() -> None:
    for header_bytes, tensor_bytes in ((protocol.STRANGER_HEADER_BYTES + 1, 0), (10, 1)):
        prefix = protocol.PREFIX.pack(protocol.MAGIC, protocol.VERSION, header_bytes, tensor_bytes)
        with pytest.raises(ProtocolError, match=r"too (long|many)"):
            through(prefix, stranger=True)


@pytest.fixture
def node() -> Iterator[Node]:
    said: list[str] = []
    made = PassiveNode(Echo(), COORDINATOR, RUN, listen("127.0.0.1", None), said.append)
    made.said = said  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.mark.parametrize(
    ("run", "rule"),
    [(Run("wrong", "job-1"), "its token is not this run's"), (Run("secret", "job-2"), "it works on job job-2")],
)
def test_who_does_not_belong_is_refused_and_nothing_is_applied(node: Node, run: Run, rule: str) -> None:
    with pytest.raises(Refused, match=rule) as refused:
        dial(node.address, run, "worker-9")
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2
    until(lambda: node.said)  # type: ignore[attr-defined]
    assert node.machine.seen == []  # type: ignore[attr-defined]
    assert "secret" not in str(refused.value) + repr(run) and "wrong" not in repr(node.said)  # type: ignore[attr-defined]


def test_another_version_is_told_so_on_both_sides(node: Node) -> None:
    with socket.create_connection(node.address) as connection:
        prefix = protocol.PREFIX.pack(protocol.MAGIC, 7, 2, 0)
        connection.sendall(prefix + b"{}")
        until(lambda: node.said)  # type: ignore[attr-defined]
    said = node.said[0]  # type: ignore[attr-defined]
    assert "speaks version 7" in said and f"this side version {protocol.VERSION}" in said
    assert node.machine.seen == []  # type: ignore[attr-defined]


DEEP = b"[" * 900 + b"]" * 900


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        (b"[" * 4000, "a header is malformed: it is no JSON, or nested too deep"),
        (b'{"kind": "hello", "fields": {"name": %s}, "tensors": []}' % DEEP, "a hello with a name"),
        (b'{"kind": "hello", "fields": {"name": "a\\nb", "token": "secret"}, "tensors": []}', "a hello with a name"),
        (b'{"kind": "hello", "fields": {"name": "a", "token": "\\ud800"}, "tensors": []}', "a: its token is not this"),
        (b'{"kind": "hello", "fields": {"name": "a", "token": "secret", "job": []}, "tensors": []}', "without a f"),
    ],
)  # fmt: skip
def test_a_stranger_s_nonsense_is_reported_in_a_sentence(node: Node, header: bytes, rule: str) -> None:
    with socket.create_connection(node.address) as connection:
        connection.sendall(protocol.PREFIX.pack(protocol.MAGIC, protocol.VERSION, len(header), 0) + header)
        until(lambda: node.said)  # type: ignore[attr-defined]
        assert rule in receive(connection)["why"]
    assert rule in node.said[0] and len(node.said) == 1  # type: ignore[attr-defined]


def test_one_that_says_too_little_is_reported_and_a_flood_is_counted(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", 0.2)
    said: list[str] = node.said  # type: ignore[attr-defined]
    with socket.create_connection(node.address) as connection:
        connection.sendall(protocol.MAGIC)
        until(lambda: said)
    assert said == ["refused a connection: it did not introduce itself within 10 s"]
    for number in range(2, 41):
        socket.create_connection(node.address).close()
        until(lambda number=number: node._refusals == number)  # type: ignore[misc]
    assert said[1:20] == ["refused a connection: it ended before it had introduced itself"] * 19
    assert said[20:] == ["refused a connection (32 by now): it ended before it had introduced itself"]


def test_one_that_sends_a_byte_now_and_then_does_not_stay(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", 0.5)
    said: list[str] = node.said  # type: ignore[attr-defined]
    with socket.create_connection(node.address) as connection:
        for byte in protocol.PREFIX.pack(protocol.MAGIC, protocol.VERSION, 4000, 0) + b"[" * 4000:
            if said:
                break
            with contextlib.suppress(OSError):
                connection.sendall(bytes([byte]))
            time.sleep(0.02)
    assert said == ["refused a connection: it did not introduce itself within 10 s"]


def test_a_name_in_use_is_refused_and_its_owner_is_left_alone_and_may_connect_again(node: Node) -> None:
    one = dial(node.address, RUN, "worker-0.5")
    for name in ("worker-0.5", "worker-0.5/beat", COORDINATOR):
        with pytest.raises(Refused, match=rf"{name.removesuffix('/beat')}: another process of this run has this name"):
            dial(node.address, RUN, name, instance="another process")
    send(one, Message("beat"))
    assert receive(one).kind == "beat"
    again = dial(node.address, RUN, "worker-0.5")
    with pytest.raises(EOFError):
        receive(one)
    send(again, Message("next"))
    assert receive(again).kind == "next" and node.machine.gone == []  # type: ignore[attr-defined]
    again.close()
    until(lambda: not node.knows("worker-0.5"))
    dial(node.address, RUN, "worker-0.5", instance="another process").close()
    one.close()


def test_a_port_in_use_is_one_sentence(node: Node) -> None:
    port = node.address[1]
    with pytest.raises(InputError, match=rf"sync.server_port: port {port} on 127.0.0.1 cannot be used \(Address alr"):
        listen("127.0.0.1", port)


def test_a_coordinator_that_is_not_there_is_one_sentence() -> None:
    listener = listen("127.0.0.1", None)
    address = listener.getsockname()
    listener.close()
    worker = Worker("worker-0", 0, Computing())
    with pytest.raises(MeshwrightError, match=r"cannot be reached \(Connection refused\)"):
        WorkerLink(worker, address, RUN, 1.0).work()


def test_a_peer_that_hangs_up_or_talks_nonsense_is_lost(node: Node) -> None:
    one, two = dial(node.address, RUN, "one"), dial(node.address, RUN, "two")
    send(one, Message("hello?"))
    until(lambda: ("one", "hello?") in node.machine.seen)  # type: ignore[attr-defined]
    one.close()
    two.sendall(b"\0" * 64)
    until(lambda: set(node.machine.gone) == {"one", "two"})  # type: ignore[attr-defined]
    two.close()


def test_over_sockets_too_every_replica_holds_what_the_order_says() -> None:
    notes = Notes()
    coordinator = Coordinator(plan(workers=2, steps=5), clocked(2), notes)
    center = PassiveNode(coordinator, COORDINATOR, RUN, listen("127.0.0.1", None))
    replicas, nodes = [], [center]
    for shard in range(2):
        for number in range(2):
            name = f"server-{shard}.{number}"
            replicas.append(Replica(name, shard, SmallStore(start(shard))))
            nodes.append(Node(replicas[-1], name, RUN, listen("127.0.0.1", None)))
            nodes[-1].connect(COORDINATOR, center.address)
            host, port = nodes[-1].address
            nodes[-1].tell(COORDINATOR, Message("register", {"shard": shard, "host": host, "port": port}))
    links = [WorkerLink(Worker(f"worker-{i}", i, Computing()), center.address, RUN, 5.0) for i in range(2)]
    threads = [threading.Thread(target=link.work) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    until(lambda: all(replica.finished for replica in replicas))
    for each in reversed(nodes):
        each.close()
    expected = replay(notes, 2)
    assert len(notes.updates) == 5
    for replica in replicas:
        assert torch.equal(replica.store.state()[0], expected[replica.shard].state()[0])
    # Two workers, five steps, two shards of six float64: counted on both sides.
    assert sum(link.payload["out", "push"] for link in links) == 2 * 5 * 2 * 6 * 8
    assert sum(node.payload["in", "push"] for node in nodes) == 2 * (2 * 5 * 2 * 6 * 8)  # heads, then their successors


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 6), st.sampled_from(["size", "hash"]))
def test_every_element_has_one_owner(sizes: list[int], shards: int, policy: str) -> None:
    named = {f"p{index}": size for index, size in enumerate(sizes)}
    placed = place(named, shards, policy, limit=512)  # type: ignore[arg-type]
    chunks = sorted((c.parameter, c.start, c.stop) for mine in placed for c in mine)
    assert chunks == sorted((c.parameter, c.start, c.stop) for c in cut(named, 512))
    for name, size in named.items():
        bounds = sorted((start, stop) for parameter, start, stop in chunks if parameter == name)
        assert bounds[0][0] == 0 and bounds[-1][1] == size
        assert all(one[1] == two[0] for one, two in pairwise(bounds))
    if policy == "size":
        loads = [sum(chunk.count for chunk in mine) for mine in placed]
        best = max(max(c[2] - c[1] for c in chunks), -(-sum(sizes) // shards))
        assert max(loads) <= (4 / 3 - 1 / (3 * shards)) * best * 1.5


def test_a_further_server_takes_its_share_by_hashing_and_moves_nothing_else() -> None:
    sizes = {f"layer{index}": 1000 for index in range(2000)}
    before = {c.parameter: s for s, mine in enumerate(place(sizes, 4, "hash", limit=10_000)) for c in mine}
    after = {c.parameter: s for s, mine in enumerate(place(sizes, 5, "hash", limit=10_000)) for c in mine}
    moved = [name for name in sizes if before[name] != after[name]]
    assert {after[name] for name in moved} == {4}
    assert len(moved) / len(sizes) == pytest.approx(1 / 5, rel=0.3)
    loads = Counter(after.values())
    assert max(loads.values()) / (len(sizes) / 5) < 1.35


def test_numbers_of_servers_that_hashing_fills() -> None:
    chunks = cut({f"layer{index}": 1000 for index in range(40)}, 10_000)
    sizes = {chunk.parameter: chunk.count for chunk in chunks}
    filled = [shards for shards in range(1, 25) if all(place(sizes, shards, "hash", limit=10_000))]
    assert filled_by_hashing(chunks, 24) == filled and 1 < len(filled) < 24


def test_a_worker_under_the_name_of_one_that_has_gone_counts_on() -> None:
    workers = Workers()
    workers.join("guest", 2).sequence = 7
    assert workers.join("guest", 2).sequence == 7
    workers.leave("guest")
    assert workers.join("guest", 0).sequence == 7, "servers hold pushes up to there for settled"


def test_returned_ranges_come_first_and_none_twice() -> None:
    cursor = Cursor(100, 10)
    assert [cursor.take() for _ in range(3)] == [100, 110, 120]
    cursor.give_back(110)
    cursor.give_back(100)
    assert cursor.returned == [100, 110]
    assert [cursor.take() for _ in range(3)] == [100, 110, 130]
    cursor.give_back(110)
    assert Position.of(cursor.position.as_state()) == cursor.position == Position(140, (110,), 10)
    assert Position.of(Position(140).as_state()) == Position(140)


@pytest.mark.parametrize(
    ("count", "firsts"),
    [(4, (8, 20, 24, 28)), (2, (8, 10, 20, 22, 24, 26, 28, 30)), (8, (20,)), (3, (8, 20, 23, 26, 29)), (16, ())],
)
def test_what_came_back_is_cut_anew_without_a_sample_twice(count: int, firsts: tuple[int, ...]) -> None:
    before = Position(40, (24, 8, 20, 28), 4)
    after = before.cut(count)
    assert (after.next, after.returned, after.waiting) == (40, firsts, count * len(firsts))


@pytest.mark.parametrize(
    ("layout", "sync", "left"),
    [
        ("dp=3", {"backup_workers": 1}, 0),
        ("dp=3", {"backup_workers": 2}, 4),
        ("dp=2", {}, 12),
        ("dp=2", {"server_mode": "asynchronous"}, 12),
    ],
)
def test_what_a_job_cannot_hand_out_again_it_says(layout: str, sync: dict[str, object], left: int) -> None:
    from meshwright.train.servers.run import Begin, first_ranges, make_mode

    job = small_job(layout, sync={**SERVER, **sync})
    position = Position(40, (8, 20, 24), 4)
    assert position.waiting - first_ranges(job, position).waiting == left
    mode = make_mode(job, Begin(5, position))
    assert mode.position.next == 40 and mode.position.waiting == 12 - left
    assert passed_over(left).startswith(f"{left} samples were dropped before the checkpoint and not handed out again; ")


def test_the_closed_form_of_bytes_and_what_differs_from_it() -> None:
    ledger = predict([10, 6], master=4, compute=2, moments=2, waiting=3)
    assert (ledger.worker.push, ledger.worker.pull) == (64, 32)
    assert ledger.shards[0].optimizer == 80 and ledger.shards[1].waiting == 72
    server = {"shard": 1, "parameters": 24, "gradients": 24, "optimizer": 48, "pushes": 5, "push_bytes": 120}
    worker = {"pushes": [2, 3], "push_bytes": 2 * 40 + 3 * 24, "pulls": [2, 2], "pull_bytes": 64}
    assert differences(ledger, {"server": server, "worker": worker}) == []
    wrong = differences(ledger, {"server": {**server, "gradients": 20}, "worker": {**worker, "pull_bytes": 60}})
    assert wrong == ["server: gradients 20 bytes, predicted 24", "worker: pull 60 bytes, predicted 64"]


SERVER = {"strategy": "server"}


@pytest.mark.parametrize(
    ("layout", "sync", "deterministic", "pushes"),
    [
        ("dp=2", {}, False, 2),
        ("dp=2 micro_batch=1", {}, True, 8),
        ("dp=3", {"backup_workers": 1}, False, 3),
        ("dp=2", {"server_mode": "stale-synchronous", "staleness_bound": 2}, False, 6),
        ("dp=4", {"server_mode": "asynchronous"}, False, 4),
    ],
)
def test_the_pushes_that_wait_are_those_of_the_mode(
    layout: str, sync: dict[str, object], deterministic: bool, pushes: int
) -> None:
    from meshwright.train.servers.run import predicted_ledger

    job = small_job(layout, sync={**SERVER, **sync}, train={"deterministic": deterministic})
    shard = predicted_ledger(job).shards[0]
    assert shard.waiting == pushes * shard.push


@pytest.mark.parametrize(
    ("layout", "sync", "more", "rule"),
    [
        ("dp=2", {"servers": 2}, {}, "sync.servers: 2 is used by sync.strategy=server alone"),
        ("dp=2 tp=2", SERVER, {}, "tp=2 does not combine with sync.strategy=server"),
        ("pp=2 micro_batch=1", SERVER, {}, "pp=2 does not combine with sync.strategy=server"),
        ("dp=2 zero=1", SERVER, {}, "zero=1 does not combine with sync.strategy=server, where the servers hold"),
        ("dp=2", {**SERVER, "server_mode": "stale-synchronous"}, {}, "sync.staleness_bound is missing"),
        ("dp=2", {**SERVER, "staleness_bound": 1}, {}, "used by server_mode=stale-synchronous alone"),
        ("dp=2", {**SERVER, "backup_workers": 2}, {}, "leaves none of the 2 workers"),
        ("dp=4", {**SERVER, "backup_workers": 1}, {}, "8 is not divided by the 3 pushes"),
        ("dp=3", {**SERVER, "server_mode": "asynchronous"}, {}, "8 is not divided by the 3 workers"),
        ("dp=2", {**SERVER, "server_mode": "asynchronous", "backup_workers": 1}, {}, "needs server_mode=synchronous"),
        ("dp=2", {**SERVER, "stale_rate": "inverse"}, {}, "sync.stale_rate: inverse needs server_mode=asynchronous"),
        ("dp=2", {**SERVER, "algorithm": "ring"}, {}, "ring is of strategy=all-reduce"),
        ("dp=2", {**SERVER, "compression": "int8"}, {}, "with strategy=server gradients travel whole"),
        ("dp=2", {**SERVER, "server_host": "0.0.0.0"}, {}, "is no address that workers can reach"),
        *(("dp=2", {**SERVER, "server_host": host}, {}, f'sync.server_host: "{host}" is no address that')
          for host in ("", " ", "0", "::", "224.0.0.1", "255.255.255.255", "<broadcast>", "ff02::1")),
        ("dp=2", {"server_host": ""}, {}, 'sync.server_host: "" is used by sync.strategy=server alone'),
        ("dp=2", {**SERVER, "server_port": 70000}, {}, "70000 is no port"),
        ("dp=2", {**SERVER, "server_replicas": 9}, {},
         "sync.server_replicas: 9 must be a whole number of at least 1 and at most 8"),
        ("dp=2", {**SERVER, "server_timeout": 1e-9}, {},
         "sync.server_timeout: 1e-09 must be a number of at least 0.5 and at most 86400"),
        ("dp=2", {**SERVER, "server_timeout": 1e308}, {}, "1e+308 must be a number of at least 0.5 and at most 86400"),
        ("dp=2", {**SERVER, "server_placement": "hash"}, {}, "sync.server_placement: hash says which of"),
        ("dp=2", SERVER, {"recovery": {"restarts": 5}}, "recovery.restarts: 5 is not used by sync.strategy=server; "
         "leave it out (sync.server_restarts, "),
        ("dp=2", SERVER, {"recovery": {"digest_every": 2}}, "recovery.digest_every: 2 is not used by"),
        ("dp=2", SERVER, {"recovery": {"memory_every": 2}}, "recovery.memory_every: 2 is not used by"),
        ("dp=2", SERVER, {"recovery": {"alert_command": "cat"}}, "recovery.alert_command: cat is not used by"),
        ("dp=2", SERVER, {"fault": {"listen": True}}, "fault.listen: true is not used by"),
        ("dp=2", SERVER, {"fault": {"inject": ["kill rank=0 step=2"]}}, 'fault.inject: "kill rank=0 step=2" is not'),
        ("dp=2", SERVER, {"checkpoint": {"incremental": 4}}, "checkpoint.incremental: 4 is not used by"),
        ("dp=2", SERVER, {"checkpoint": {"failure": "continue"}}, "checkpoint.failure: continue is not used by"),
        ("dp=2", SERVER, {"observe": {"tensorboard": True}}, "observe.tensorboard: true is not used by"),
        ("dp=2 placement=1,0", SERVER, {}, "layout: placement=1,0 is of ranks"),
        ("dp=2", {**SERVER, "server_mode": "asynchronous"}, {"train": {"deterministic": True}}, "depends on who is"),
        ("dp=2", SERVER, {"precision": {"dtype": "float16"}}, "float16 needs a loss scale"),
        ("dp=2", SERVER, {"cluster": {"device": "cuda"}}, "cuda is not available with sync.strategy=server"),
        ("dp=2", SERVER, {"checkpoint": {"mode": "async"}}, "checkpoint.mode: async is not available"),
        ("dp=2", SERVER, {"checkpoint": {"interval": 5.0}}, "checkpoint.interval: 5.0 is not available"),
    ],
)  # fmt: skip
def test_what_does_not_combine_is_one_sentence(layout: str, sync: dict, more: dict, rule: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InputError) as refused:
        small_job(layout, sync=sync, **more)
    assert any(rule in line for line in str(refused.value).splitlines()), str(refused.value)


@pytest.mark.parametrize("words", [["--layout", "dp=2"], ["--layout", "dp=2", "--ledger"]])
def test_check_says_what_to_use_instead(tmp_path: Path, words: list[str]) -> None:
    job = write_job(tmp_path)
    result = CliRunner().invoke(app, ["check", str(job), "--set", "sync.strategy=server", *words])
    said = str(result.exception) if isinstance(result.exception, InputError) else result.output
    assert result.exit_code != 0 and "sync.strategy=server has" in said


def test_a_launcher_of_ranks_is_told_to_start_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    words = ["train", str(job), "--out", str(tmp_path / "run"), "--set", "sync.strategy=server"]
    result = CliRunner().invoke(app, words)
    said = str(result.exception) if isinstance(result.exception, InputError) else result.output
    assert "run `meshwright train` by itself" in said and not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with listen("127.0.0.1", None) as taken:
        pairs = ["sync.strategy=server", f"sync.server_port={taken.getsockname()[1]}"]
        words = ["train", str(write_job(tmp_path)), "--out", str(tmp_path / "run"), *settings(*pairs)]
        result = CliRunner().invoke(app, words)
    said = str(result.exception) if isinstance(result.exception, InputError) else result.output
    assert "cannot be used (Address already in use)" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sync", "sentence"),
    [
        ({"servers": 100_000_000},
         "sync.servers: 100000000 leaves server 27 without parameters (there are 27 chunks); use 1 to 27"),
        ({"servers": 28}, "sync.servers: 28 leaves server 27 without parameters (there are 27 chunks); use 1 to 27"),
        ({"servers": 9, "server_replicas": 8},
         "sync.servers: 9 x server_replicas=8 would start 72 processes on this machine, which are too many; use 1 to "
         "8"),
        ({"servers": 20, "server_placement": "hash"},
         "sync.servers: 20 leaves server 4 without parameters (there are 27 chunks, placed by hash); use 2, 3, 4, 5, 6 "
         "or 7, or server_placement=size"),
    ],
)  # fmt: skip
def test_too_many_servers_are_refused_at_once_before_anything_is_written(sync: dict, sentence: str) -> None:  # type: ignore[type-arg]
    from meshwright.train.servers.run import check_servers

    with pytest.raises(InputError) as refused:
        check_servers(small_job("dp=2", sync={**SERVER, **sync}))
    assert str(refused.value) == sentence


def test_what_servers_use_of_those_sections_stays_legal() -> None:
    from meshwright.train.servers.run import check_servers

    for servers, replicas in ((27, 2), (8, 8)):
        sync = {**SERVER, "servers": servers, "server_replicas": replicas, "server_host": "localhost"}
        check_servers(small_job("dp=2", sync=sync, checkpoint={"drill_every": 2, "keep_every": 3}))
