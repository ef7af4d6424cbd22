"""The verbs are functions of the package, found without importing torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import meshwright
from meshwright import verbs


def test_importing_meshwright_imports_nothing_heavy() -> None:
    code = (
        "import sys, meshwright\n"
        "assert all(map(callable, (meshwright.plan, meshwright.train, meshwright.check)))\n"
        "import meshwright.plan.space\n"
        "assert callable(meshwright.plan) and meshwright.plan.space\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["plan", "train", "check"])
def test_each_verb_is_the_function_of_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb = getattr(verbs, name)
    assert inspect.getdoc(verb)
    assert inspect.signature(getattr(meshwright, name)) == inspect.signature(verb)
    if name != "check":
        monkeypatch.setattr(verbs, name, lambda job, **named: (job, named))
        assert getattr(meshwright, name)("job.toml", top=3) == ("job.toml", {"top": 3})


def test_what_is_no_verb_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'paln'"):
        _ = meshwright.paln
