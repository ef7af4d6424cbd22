"""torchrun starts its ranks again: they meet each other, not the addresses that an earlier attempt left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from meshwright.recovery.launch import free_port

RENDEZVOUS = {
    "c10d": lambda: ["--standalone"],
    "static": lambda: ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())],
}


@pytest.mark.all
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_ranks_started_again_meet_in_a_store_with_old_addresses(
    begin: Callable[..., subprocess.Popen[str]], backend: str
) -> None:
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "tests.fault.meeting_rank", "join"]
    process = begin(prefix=("-m", "torch.distributed.run", *RENDEZVOUS[backend](), *words))
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, output + errors
    assert output.splitlines() == ["sum 2", "sum 2"], output + errors
    assert "exitcode: 3" in errors, "the first attempt failed"
