"""A tiny job on disk and the command line around it, for tests that go the way a user goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from meshwright.cli.main import main

ROOT = Path(__file__).parents[1]

JOB = """
[model]
vocabulary = 257
hidden = 32
layers = 2
heads = 4
kv_heads = 2
ffn_hidden = 64

[data]
train = "corpus.txt"
sequence_length = 32

[batch]
global_size = 4

[optimizer]
lr = 1e-3

[train]
steps = 6
seed = 3

[layout]
dp = 2

[cluster]
device = "cpu"

[observe]
one_device_steps = 0
"""


def write_job(folder: Path) -> Path:
    """``job.toml`` and its corpus of a few KB in ``folder``; the path of the job."""
    (folder / "corpus.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    job = folder / "job.toml"
    job.write_text(JOB)
    return job


def settings(*pairs: str) -> list[str]:
    """``--set`` before each ``section.key=value``."""
    return [word for pair in pairs for word in ("--set", pair)]


def start(
    *words: object, prefix: Sequence[str] = ("-m", "meshwright.cli.main"), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """``meshwright`` in a process of its own, one computing thread a rank, its outputs piped."""
    return subprocess.Popen(
        [sys.executable, *prefix, *(str(word) for word in words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one sentence with which a command must end, with exit code 2 and nothing on standard output."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said
    return said.err.rstrip("\n")
