"""Two hosts on one machine: network namespaces joined by one link, whose bytes the kernel counts.

    host 0  10.213.0.1 (mw0) <------ veth pair ------> (mw1) 10.213.0.2  host 1

Each host has its own loopback, addresses, ports and counters. What goes from one to the other goes over that link.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Host:
    """One namespace and its end of the link."""

    namespace: str
    address: str
    interface: str


@dataclass(frozen=True)
class Counters:
    """Bytes an interface has received and sent since it was made, headers included."""

    received: int
    sent: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(self.received - before.received, self.sent - before.sent)


@dataclass
class TwoHosts:
    """The hosts, and the processes started on them."""

    hosts: tuple[Host, Host]
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host, from the repository's root; its output is piped as text.

        Gloo is told to use the link; one computing thread unless ``environment`` says otherwise.
        """
        place = self.hosts[host]
        process = subprocess.Popen(
            ["ip", "netns", "exec", place.namespace, *command],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",  # the program beside these tests, whichever is installed
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": place.interface,
                **(environment or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process

    def run_both(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None, *, timeout: float
    ) -> list[str]:
        """Run one command on each host at the same time; their outputs.

        Raises:
            AssertionError: one of them failed or took longer than ``timeout`` seconds; both outputs are in the message.
        """
        processes = [self.start(host, command, environment) for host, command in enumerate(commands)]
        outputs: list[str] = []
        late = False
        for process in processes:
            try:
                outputs.append(process.communicate(timeout=timeout)[0])
            except subprocess.TimeoutExpired:
                late = True
                self._kill_all()
                outputs.append(process.communicate()[0])
        if late or any(process.returncode for process in processes):
            codes = [process.returncode for process in processes]
            text = "\n".join(f"--- host {host}, exit {codes[host]}:\n{output}" for host, output in enumerate(outputs))
            raise AssertionError(f"{'took too long' if late else 'failed'}\n{text}")
        return outputs

    def torchrun(
        self, ranks_per_host: int, module: str, arguments: Sequence[str], *, port: int = 29500
    ) -> list[list[str]]:
        """Commands that start ``python -m module`` on both hosts as one group, for ``run_both``.

        Static rendezvous: the c10d one looks its host up by name, and both hosts have the same name here.
        """
        common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        common += ["--nproc-per-node", str(ranks_per_host)]
        common += ["--master-addr", self.hosts[0].address, "--master-port", str(port)]
        return [[*common, "--node-rank", str(host), "-m", module, *arguments] for host in range(2)]

    def counters(self, host: int) -> Counters:
        """The kernel's counters of the host's end of the link."""
        place = self.hosts[host]
        return link_counters(place.interface, _output("ip", "netns", "exec", place.namespace, "cat", "/proc/net/dev"))

    def limit(self, rate: str) -> None:
        """Limit the link in each direction, in the terms of ``tc`` (``"100mbit"``)."""
        form = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        for place in self.hosts:
            _output("tc", "-n", place.namespace, "qdisc", "replace", "dev", place.interface, "root", *form)

    def set_link(self, host: int, state: Literal["up", "down"]) -> None:
        """Take the host's end of the link down, or up again; the other end sees it lose its carrier."""
        place = self.hosts[host]
        _ip("-n", place.namespace, "link", "set", place.interface, state)

    def _kill_all(self) -> None:
        """End every process in either namespace, grandchildren too."""
        for place in self.hosts:
            for pid in _output("ip", "netns", "pids", place.namespace).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """End all processes and take the hosts away."""
        self._kill_all()
        for process in self._processes:
            process.communicate()
        for place in self.hosts:
            subprocess.run(["ip", "netns", "delete", place.namespace], check=False)


def link_counters(interface: str, table: str | None = None) -> Counters:
    """Counters of an interface; ``table`` is the text of ``/proc/net/dev``, by default of the caller's own host."""
    text = Path("/proc/self/net/dev").read_text(encoding="ascii") if table is None else table
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            fields = values.split()
            return Counters(received=int(fields[0]), sent=int(fields[8]))
    raise ValueError(f"no interface {interface} in /proc/net/dev")


def why_not() -> str | None:
    """Why two hosts cannot be made here; ``None`` if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux only"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if shutil.which("ip") is None:
        return "the ip command (iproute2) is not installed"
    probe = f"mwprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"this system does not allow network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=False)
    return None


@contextmanager
def two_hosts(*, rate: str | None = None) -> Iterator[TwoHosts]:
    """Make the hosts; end whatever runs on them and take them away afterwards.

    Args:
        rate: limit of the link in each direction, in the terms of ``tc`` (``"100mbit"``); ``None``: none.
    """
    hosts = tuple(Host(f"mw{os.getpid()}-{n}", f"10.213.0.{n + 1}", f"mw{n}") for n in range(2))
    first, second = hosts
    pair = TwoHosts((first, second))
    try:
        for place in hosts:
            _ip("netns", "add", place.namespace)
        _ip(
            *("link", "add", first.interface, "netns", first.namespace, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.namespace),
        )
        for place in hosts:
            _ip("-n", place.namespace, "address", "add", f"{place.address}/30", "dev", place.interface)
            _ip("-n", place.namespace, "link", "set", "lo", "up")
            _ip("-n", place.namespace, "link", "set", place.interface, "up")
        if rate is not None:
            pair.limit(rate)
        yield pair
    finally:
        pair.close()


def last_json(output: str) -> dict[str, Any]:
    """The last line of an output that is a JSON object."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            parsed: dict[str, Any] = json.loads(line)
            return parsed
    raise ValueError(f"no JSON in: {output}")


def _ip(*arguments: str) -> None:
    _output("ip", *arguments)


def _output(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
