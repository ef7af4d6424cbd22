"""The two hosts themselves: apart but for the link, counted to the byte, gone afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from tests.cluster.hosts import TwoHosts, last_json, link_counters, two_hosts

MIB = 2**20
RANK = "tests.cluster.reducing_rank"


def reduce_on(pair: TwoHosts, ranks_per_host: int, elements: int, rounds: int) -> list[dict[str, Any]]:
    """Run the reducing ranks on both hosts; what one rank of each says."""
    arguments = [[place.interface, str(elements), str(rounds)] for place in pair.hosts]
    commands = [pair.torchrun(ranks_per_host, RANK, arguments[host])[host] for host in range(2)]
    return [last_json(output) for output in pair.run_both(commands, timeout=120)]


def test_hosts_see_each_other_and_nothing_else(hosts: TwoHosts) -> None:
    first, second = hosts.hosts
    listen = "import socket; s = socket.create_server(('', 4000)); print(s.accept()[1][0])"
    server = hosts.start(1, [sys.executable, "-c", listen])
    connect = (
        "import socket, time\n"
        "for attempt in range(100):\n"
        "    try:\n"
        f"        socket.create_connection(('{second.address}', 4000), 1).close(); break\n"
        "    except OSError: time.sleep(0.1)\n"
        "for other in ('127.0.0.1', '192.0.2.1'):\n"
        "    try: socket.create_connection((other, 4000), 1); print('reached', other)\n"
        "    except OSError: print('cannot reach', other)\n"
    )
    output, _ = hosts.start(0, [sys.executable, "-c", connect]).communicate(timeout=30)
    assert output.splitlines() == ["cannot reach 127.0.0.1", "cannot reach 192.0.2.1"]
    assert server.communicate(timeout=10)[0].strip() == first.address


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_all_reduce_puts_the_expected_bytes_on_the_link(hosts: TwoHosts, ranks_per_host: int) -> None:
    elements, rounds = MIB, 6
    payload = 4 * elements * rounds
    # Gloo reduces in a ring, 2 (P-1)/P of the tensor over every edge; one edge of the ring leads to the other host.
    size = 2 * ranks_per_host
    expected = 2 * (size - 1) / size * payload
    said = reduce_on(hosts, ranks_per_host, elements, rounds)
    for mine, other in zip(said, reversed(said), strict=True):
        assert mine["right"]
        assert 1.0 <= mine["sent"] / expected <= 1.05
        assert mine["sent"] == pytest.approx(other["received"], rel=0.05), "what one sends the other receives"


def test_counters_agree_from_inside_and_outside(hosts: TwoHosts) -> None:
    command = [sys.executable, "-c", "from tests.cluster.hosts import link_counters; print(link_counters('mw1'))"]
    for _ in range(10):
        before = hosts.counters(1)
        inside, _ = hosts.start(1, command).communicate(timeout=30)
        if hosts.counters(1) == before:  # otherwise the kernel itself sent something meanwhile, looking for neighbours
            break
    assert inside.strip() == str(before)


def test_a_limited_link_is_as_slow_as_it_says(can_make_hosts: None) -> None:
    rate_bytes = 80e6 / 8
    with two_hosts(rate="80mbit") as pair:
        said = reduce_on(pair, 1, MIB, 3)
    expected = 3 * 4 * MIB / rate_bytes
    for one in said:
        assert 0.7 * expected < one["seconds"] < 3 * expected


def test_nothing_is_left(can_make_hosts: None) -> None:
    with two_hosts() as pair:
        sleeper = pair.start(0, ["sh", "-c", "sleep 300 & wait"])
        deadline = time.monotonic() + 10
        namespace = pair.hosts[0].namespace
        pids: list[str] = []
        while len(pids) < 2 and time.monotonic() < deadline:
            pids = subprocess.check_output(["ip", "netns", "pids", namespace], text=True).split()
        assert len(pids) == 2
        processes = [psutil.Process(int(pid)) for pid in pids]
    assert sleeper.returncode is not None
    _, alive = psutil.wait_procs(processes, timeout=10)
    # The grandchild waits for init to collect it, which may take its time.
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert namespace not in subprocess.check_output(["ip", "netns", "list"], text=True)


def test_unknown_interface() -> None:
    with pytest.raises(ValueError, match="no interface mw9"):
        link_counters("mw9")
