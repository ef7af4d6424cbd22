"""The command ``meshwright``: one verb a file; errors for people on one line; exit codes 0, 1, 2."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, NoReturn

import typer

from meshwright import __version__
from meshwright.cli import calibrate as calibrate_verb
from meshwright.cli import check as check_verb
from meshwright.cli import fault as fault_verb
from meshwright.cli import plan as plan_verb
from meshwright.cli import report as report_verb
from meshwright.cli import train as train_verb
from meshwright.cli.checkpoint import app as checkpoint_app
from meshwright.errors import MeshwrightError

# The parser under typer has had two homes (click, then typer itself); its base of wrong usage is this in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="meshwright",
    help="Spread the training of a large model over many devices, and know beforehand what it costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan_verb.plan)
app.command("train")(train_verb.train)
app.command("check")(check_verb.check)
app.command("calibrate")(calibrate_verb.calibrate)
app.command("report")(report_verb.report)
app.command("fault")(fault_verb.fault)
app.add_typer(checkpoint_app, name="checkpoint")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Spread the training of a large model over many devices, and know beforehand what it costs."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 the work failed, 2 the input is wrong."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(words, standalone_mode=False, prog_name="meshwright")
    except MeshwrightError as error:
        _fail(str(error), error.exit_code, words)
    except _UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # that one has shown the help
            _fail(_usage_sentence(error), 2, words)
        sys.exit(2)
    except typer.Abort:
        _fail("interrupted before training began; nothing was started", 1, words)
    except BrokenPipeError:
        sys.exit(1)  # whoever read our output has enough
    except OSError as error:
        place = error.filename or "the system"
        _fail(f"{place}: {error.strerror or error}; nothing already saved was touched", 1, words)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str, exit_code: int, words: list[str]) -> NoReturn:
    if "--json" in words:
        print(json.dumps({"error": sentence, "exit_code": exit_code}))
    print(sentence, file=sys.stderr)
    sys.exit(exit_code)


def _usage_sentence(error: Any) -> str:
    """What is wrong with the words of the command, on one line, and where its options are explained."""
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "meshwright"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message}; see {command} --help"


if __name__ == "__main__":
    main()
