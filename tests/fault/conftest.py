"""A small job and runs of it, for tests that break them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import start, write_job


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``meshwright`` in a process of its own; ended after the test if it still runs."""
    running: list[subprocess.Popen[str]] = []

    def run(*words: object, **options: Any) -> subprocess.Popen[str]:
        running.append(start(*words, **options))
        return running[-1]

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the job that a module's runs share."""
    return write_job(tmp_path_factory.mktemp("job"))
