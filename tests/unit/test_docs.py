"""The documentation is current: generated pages, links, commands, and every job field explained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from docs.generate import attribute_docstrings, leaves, pages
from meshwright.cli.main import app
from meshwright.job.job import Job

ROOT = Path(__file__).parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_pages_are_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == pages()[path], "run `make docs`"


@pytest.mark.parametrize("section", Job.model_fields)
def test_every_field_of_a_job_is_explained(section: str) -> None:
    model: Any = Job.model_fields[section].annotation
    assert issubclass(model, BaseModel)
    documented = attribute_docstrings(model)
    assert [name for name in model.model_fields if not documented.get(name)] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    broken = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert broken == []


def commands() -> list[tuple[str, str]]:
    """Every line of an indented block that runs the command, continuation lines joined."""
    found = []
    for path in TEXTS:
        text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
        for line in re.findall(r"^    (?:.*-m meshwright\.cli\.main|meshwright) (.+)$", text, re.MULTILINE):
            found.append((path.name, line))
    return found


@pytest.mark.parametrize(("page", "line"), [pytest.param(*one, id=f"{one[0]}: {one[1]}") for one in commands()])
def test_commands_in_the_text_exist(page: str, line: str) -> None:
    verbs = {name.removeprefix("meshwright "): verb for name, verb in leaves("meshwright", typer.main.get_command(app))}
    words = shlex.split(line, comments=True)
    verb = next((words[:length] for length in (2, 1) if " ".join(words[:length]) in verbs), None)
    assert verb is not None, f"no verb in: {line}"
    known = {option for parameter in verbs[" ".join(verb)].params for option in parameter.opts}
    used = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in used if option not in {*known, "--help"}] == []


def test_there_are_commands_to_test() -> None:
    assert len(commands()) >= 5
