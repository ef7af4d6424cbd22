"""The two files by which processes find a parameter-server run that is going: where it listens, and its secret."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

FACTS = "servers.json"
TOKEN = "servers.token"


def write_token(run_dir: Path) -> str:
    """A new secret for a run, in a file that only its owner may read."""
    token = secrets.token_hex(32)
    path = run_dir / TOKEN
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


def forget(run_dir: Path) -> None:
    """The run has ended, or one before it that could not say so itself."""
    for name in (FACTS, TOKEN):
        (run_dir / name).unlink(missing_ok=True)


def read_whereabouts(run_dir: Path) -> tuple[dict[str, Any], str, tuple[str, int]]:
    """What the launcher left for its processes, the run's secret, and the coordinator's address.

    Raises:
        InputError: the directory holds no such run.
    """
    text, token = (_read(run_dir, name) for name in (FACTS, TOKEN))
    try:
        facts = json.loads(text)
        host, port = facts["coordinator"]
        return dict(facts, version=int(facts["version"])), token, (str(host), int(port))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _none(run_dir, f"its {FACTS} is not as a launcher writes it") from None


def _read(run_dir: Path, name: str) -> str:
    try:
        return (run_dir / name).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        why = f"it has no {name}" if run_dir.is_dir() else "there is no such directory"
    except OSError as error:
        why = f"its {name} cannot be read: {error.strerror}"
    except ValueError:
        why = f"its {name} is no text"
    raise _none(run_dir, why)


def _none(run_dir: Path, why: str) -> InputError:
    return InputError(
        f"{run_dir} holds no parameter-server run that is going ({why}); "
        "give the directory of one, started with sync.strategy=server"
    )
