"""What each kind of fault does. ``prepare`` finds its target, so that one without a target is an error, not a fault."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.checkpoint.folder import CHECKPOINTS, latest
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.errors import InputError
from meshwright.job.fault_section import Fault
from meshwright.recovery.rank import LAUNCHER_VARIABLE
from meshwright.train.saving import Saver

Act = Callable[[], None]

FOR_EVER = 10**8.0
"""Seconds: three years."""
_RESEND_SECONDS = 0.05


class InjectedFault(RuntimeError):
    """The exception of a ``raise`` fault."""


@dataclass(frozen=True)
class Site:
    """The rank a fault happens on."""

    run_dir: Path
    rank: int
    saver: Saver


def prepare(fault: Fault, site: Site) -> Act:
    """The fault as something to do.

    Raises:
        InputError: this rank has nothing it could happen to.
    """
    match fault.kind:
        case "kill":
            return lambda: os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            return lambda: _stop(fault)
        case "raise":
            return lambda: _raise(fault)
        case "exit":
            return lambda: os._exit(fault.number("code", 3))
        case "hang":
            return lambda: time.sleep(fault.seconds(FOR_EVER))
        case "flip-bit":
            return _flip_bit(fault, site)
        case "link-down":
            return lambda: _link_down(fault)
        case "flip-byte" | "truncate" | "remove":
            return _harm_file(fault, _target_file(fault, site))
        case "kill-launcher":
            return _killing(launcher())
        case "kill-store":
            return _killing(store_process())
    raise ValueError(f"{fault.kind} is done where it happens")


def _raise(fault: Fault) -> None:
    raise InjectedFault(f"injected fault: {fault}")


def _killing(pid: int) -> Act:
    return lambda: os.kill(pid, signal.SIGKILL)


def _later(seconds: float, command: str) -> None:
    """Run a shell command after a while, also when this process is stopped or gone by then."""
    subprocess.Popen(
        ["/bin/sh", "-c", f"sleep {seconds}; {command}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _stop(fault: Fault) -> None:
    seconds = fault.options.get("seconds")
    if seconds is not None:
        _later(float(seconds), f"kill -CONT {os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def _flip_bit(fault: Fault, site: Site) -> Act:
    wanted, element, bit = fault.text("tensor"), fault.number("element", 0), fault.number("bit", 20)
    boxes = site.saver.tensors(range(len(site.saver.trainer.owned)))
    mine = [box for box in boxes if box.role == "parameter" and box.tensor.numel()]
    box = next((box for box in mine if wanted in (None, box.name)), None)
    if box is None:
        raise InputError(f'fault: "{fault}": rank {site.rank} holds no part of {wanted or "any parameter"}')
    size, width = box.tensor.numel(), 8 * box.tensor.element_size()
    if element >= size or bit >= width:
        raise InputError(
            f'fault: "{fault}": rank {site.rank} holds {size} elements of {width} bits of {box.name}; '
            f"use element=0 to {size - 1} and bit=0 to {width - 1}"
        )
    tensor = box.tensor

    def act() -> None:
        one = tensor[element : element + 1].detach().cpu()
        one.numpy().view(numpy.uint8)[bit // 8] ^= numpy.uint8(1 << bit % 8)  # little end first
        tensor.detach()[element : element + 1].copy_(one)

    return act


def _target_file(fault: Fault, site: Site) -> Path:
    name = fault.text("file")
    if name is not None:
        path = site.run_dir / name
    else:
        newest = latest(site.run_dir / CHECKPOINTS)
        if newest is None:
            raise InputError(f'fault: "{fault}": the run has no checkpoint yet; use a later step')
        path = newest / f"rank-{site.rank:05d}.safetensors"
        path = path if path.exists() else newest / MANIFEST
    if not path.is_file():
        raise InputError(f'fault: "{fault}": there is no file {path}')
    return path


def _harm_file(fault: Fault, path: Path) -> Act:
    size = path.stat().st_size
    byte = fault.number("byte", size // 2)
    if byte >= size and fault.kind != "remove":
        raise InputError(f'fault: "{fault}": {path} has {size} bytes; use byte=0 to {size - 1}')

    def act() -> None:
        if fault.kind == "remove":
            path.unlink()
            return
        with path.open("r+b") as file:
            if fault.kind == "truncate":
                file.truncate(byte)
                return
            file.seek(byte)
            (value,) = file.read(1)
            file.seek(byte)
            file.write(bytes([value ^ 1 << byte % 8]))

    return act


def _link_down(fault: Fault) -> None:
    seconds, interface = fault.seconds(1.0), fault.text("interface")
    if interface is not None:
        _later(seconds, f"ip link set {interface} up")
        subprocess.run(["ip", "link", "set", interface, "down"], check=True)
        return
    until = time.monotonic() + seconds

    def keep_cutting() -> None:
        while time.monotonic() < until:
            cut_connections()
            time.sleep(_RESEND_SECONDS)

    cut_connections()
    threading.Thread(target=keep_cutting, name="link-down", daemon=True).start()


def cut_connections() -> int:
    """Shut down every TCP connection of this process, as a broken link would in the end; how many there were."""
    return sum(1 for _ in _cut())


def _cut() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.shutdown(socket.SHUT_RDWR)  # fails for one that only listens
                    yield number
        except OSError:
            continue  # closed meanwhile, or not connected


def launcher() -> int:
    """The process that started this run: the nearest above us that was not itself started by a launcher of ours.

    Raises:
        InputError: nobody of ours did.
    """
    if LAUNCHER_VARIABLE not in os.environ:
        raise InputError("fault: kill-launcher needs ranks that meshwright train started itself")
    process = psutil.Process(os.getppid())
    while LAUNCHER_VARIABLE in process.environ():
        above = process.parent()
        if above is None:
            break
        process = above
    return int(process.pid)


def _store_port() -> int:
    """Of the store that this rank uses; the port it would meet the others at, where it uses none yet."""
    store: object = getattr(distributed_c10d, "_get_default_store")() if dist.is_initialized() else None  # noqa: B009
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return int(getattr(store, "port", None) or os.environ.get("MASTER_PORT", "0"))


def store_process() -> int:
    """The process on this host that listens on the port of the ranks' key-value store.

    Raises:
        InputError: there is none here.
    """
    port = _store_port()
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return int(connection.pid)
    raise InputError(f"fault: kill-store finds no process of this host that listens on port {port}; use another rank")
