"""Writes the generated pages and pictures: `make docs`, or `python -m docs.generate`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from docs.schedule_page import schedule_pages
from meshwright.cli.main import app
from meshwright.job.job import Job

FOLDER = Path(__file__).parent / "reference"


def pages() -> dict[Path, str]:
    """Every generated page and what it must contain."""
    return {FOLDER / "job-file.md": job_page(), FOLDER / "command-line.md": command_page(), **schedule_pages()}


def job_page() -> str:
    """The sections and fields of a job file, from the pydantic models."""
    schema = Job.model_json_schema()
    definitions = schema["$defs"]
    lines = [
        "# Job file",
        "",
        "One TOML file says what is trained, on what, and how it is split. Unknown keys and wrong types are refused.",
        "Any field is overridden on the command line by `--set section.key=value`, the layout by",
        '`--layout "dp=2 tp=2"`. Generated from the program by `make docs`.',
    ]
    for name, field in Job.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        definition = definitions[model.__name__]
        documented = attribute_docstrings(model)
        lines += ["", f"## [{name}]", "", introduction(model), "", "| key | value | default | |", "|---|---|---|---|"]
        required = set(definition.get("required", ()))
        for key, value in definition["properties"].items():
            default = "required" if key in required else default_text(model.model_fields[key].default)
            lines.append(f"| `{key}` | {kind(value, definitions)} | {default} | {documented.get(key, '')} |")
    return "\n".join(lines) + "\n"


def introduction(model: type[BaseModel]) -> str:
    """A class's docstring without the `[name]: ` that opens it."""
    text = plain(inspect.getdoc(model) or "")
    text = text.split("]: ", 1)[1] if text.startswith("[") else text
    return text[:1].upper() + text[1:]


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The text that stands under each field in the source, base classes first."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls is BaseModel or not issubclass(cls, BaseModel):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[statement.target.id] = plain(text)
    return found


def kind(value: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A JSON schema type in words."""
    if "$ref" in value:
        return kind(definitions[value["$ref"].rsplit("/", 1)[1]], definitions)
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(kind(one, definitions) for one in value["anyOf"] if one.get("type") != "null"))
    if "enum" in value or "const" in value:
        return ", ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
    match value.get("type"):
        case "array":
            if "prefixItems" in value:
                return f"list of {len(value['prefixItems'])} {kind(value['prefixItems'][0], definitions)}"
            return f"list of {kind(value['items'], definitions)}"
        case "integer" | "number" as name:
            return name + bounds(value)
        case "string":
            return "text"
        case "boolean":
            return "`true`, `false`"
    return "any"


def bounds(value: dict[str, Any]) -> str:
    """What a number may be."""
    words = {"exclusiveMinimum": "> {}", "minimum": "≥ {}", "exclusiveMaximum": "< {}", "maximum": "≤ {}"}
    # Of whole numbers, "above 0" is said as "at least 1".
    if value["type"] == "integer" and value.get("exclusiveMinimum") == 0:
        value = {**value, "minimum": 1}
        del value["exclusiveMinimum"]
    parts = [text.format(f"{value[word]:g}") for word, text in words.items() if word in value]
    return " " + ", ".join(parts) if parts else ""


def default_text(value: object) -> str:
    """A default as it would stand in TOML."""
    match value:
        case None:
            return "absent"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return "`" + repr(value)[1:-1] + "`"
        case tuple():
            return "`[" + ", ".join(str(one) for one in value) + "]`"
    return f"`{value}`"


def command_page() -> str:
    """Every verb with its arguments and options."""
    command = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Exit codes: 0 done, 1 the work failed, 2 the input is wrong. An error for a person is one sentence on",
        "standard error: the value, the rule, the legal values. Generated from the program by `make docs`.",
    ]
    for path, one in leaves("meshwright", command):
        lines += ["", f"## {path}", "", plain(one.help or "", keep_paragraphs=True), ""]
        lines += ["| | | default |", "|---|---|---|"]
        for parameter in one.params:
            if parameter.name == "help":
                continue
            name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name
            default = "required" if parameter.required else shown_default(parameter)
            lines.append(f"| `{name}` | {plain(getattr(parameter, 'help', None) or '')} | {default} |")
    return "\n".join(lines) + "\n"


def shown_default(parameter: Any) -> str:
    """The default of an option; switches and absent ones have none worth a word."""
    return "" if parameter.default in (None, False, ()) or callable(parameter.default) else f"`{parameter.default}`"


def leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Commands that are no groups, with their full names."""
    verbs = getattr(command, "commands", None)  # typer's own copy of click, so no isinstance
    if verbs is None:
        yield path, command
        return
    for name, verb in verbs.items():
        yield from leaves(f"{path} {name}", verb)


def plain(text: str, *, keep_paragraphs: bool = False) -> str:
    """Docstring text as Markdown: single backquotes; lines joined."""
    paragraphs = [" ".join(part.split()) for part in textwrap.dedent(text).strip().split("\n\n")]
    joined = ("\n\n" if keep_paragraphs else " ").join(paragraphs)
    return joined.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    for target, content in pages().items():
        target.write_text(content, encoding="utf-8")
        print(f"wrote {target.relative_to(FOLDER.parents[1])}")
