"""The warm spare: a process that has loaded everything a rank needs, and becomes one by forking.

`python -m meshwright.recovery.zygote DESCRIPTOR MODULE`: it imports the module, then takes orders from the socket, one
JSON object a line, and reports how its children ended. Nothing else runs here: no thread, no tensor, no device, so
that a fork of it is as good as a process started anew. A child runs ``MODULE.main(arguments)``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

from meshwright.recovery.rank import PARENT_VARIABLE, end_with_launcher


def main() -> None:
    """Serve until the launcher closes the socket, or dies."""
    end_with_launcher()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orders = socket.socket(fileno=int(sys.argv[1]))
    program = importlib.import_module(sys.argv[2])
    gc.collect()
    gc.freeze()  # the collector does not touch, and so does not copy, what the children share
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    say(orders, {"ready": os.getpid()})
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in selector.select():
                if key.fd == wake_read:
                    while _read(wake_read):
                        pass
                    continue
                received = orders.recv(1 << 16)
                if not received:
                    os._exit(0)
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    if "signal" in order:
                        _signal(order["pid"], order["signal"])
                    else:
                        _start(order, program, orders, selector, (wake_read, wake_write))
            _reap(orders)


_children: set[int] = set()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except BlockingIOError:
        return b""


def _signal(pid: int, number: int) -> None:
    if pid in _children:  # it cannot be another process: its number is ours until we have waited for it
        os.kill(pid, number)


def _reap(orders: socket.socket) -> None:
    while _children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _children.discard(pid)
        say(orders, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _start(
    order: dict[str, Any], program: Any, orders: socket.socket, selector: selectors.BaseSelector, pipes: tuple[int, int]
) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        _children.add(pid)
        say(orders, {"started": pid, "rank": order["rank"]})
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        selector.close()
        orders.close()
        for descriptor in pipes:
            os.close(descriptor)
        os.environ.update(order["environment"])
        os.environ[PARENT_VARIABLE] = str(parent)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        os.close(log)
        program.main(order["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def say(orders: socket.socket, message: dict[str, Any]) -> None:
    """One line of JSON; without a launcher to read it there is nothing left to do."""
    try:
        orders.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    main()
