"""The shape of a model as one of our checkpoints says it, so that training may begin from that checkpoint alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

MANIFEST = "manifest.json"


def fields_from_checkpoint(folder: str, where: str) -> dict[str, Any]:
    """The fields of ``[model]`` in a ``step-N`` folder; whether the checkpoint is whole is seen when it is read.

    Args:
        folder: with a manifest.
        where: the key that asks, for messages.

    Raises:
        InputError: the manifest cannot be read, or names no model.
    """
    path = Path(folder) / MANIFEST
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        if not model or not isinstance(model, dict):
            raise ValueError("it names no model")
    except OSError as error:
        raise InputError(f"{where}: {path} cannot be read ({error.strerror}); give a folder you may read") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{where}: {path} says no shape of a model; use another checkpoint") from None
    return {key: tuple(value) if isinstance(value, list) else value for key, value in model.items()}
