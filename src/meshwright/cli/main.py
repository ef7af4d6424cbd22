"""The command ``meshwright``: one verb a file; errors for people on one line; exit codes 0, 1, 2."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from meshwright import __version__
from meshwright.cli import check as check_verb
from meshwright.cli import train as train_verb
from meshwright.cli.checkpoint import app as checkpoint_app
from meshwright.errors import MeshwrightError

app = typer.Typer(
    name="meshwright",
    help="Spread the training of a large model over many devices, and know beforehand what it costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train_verb.train)
app.command("check")(check_verb.check)
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
        app(words, standalone_mode=True)
    except MeshwrightError as error:
        if "--json" in words:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        print(str(error), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
