"""``meshwright checkpoint``: Hugging Face weights out of a run, and in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at checkpoints, and exchange weights with Hugging Face.", no_args_is_help=True)


@app.command("export")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A step-N folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder to write config.json and safetensors to; must be new or empty.")],
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder."""
    from meshwright.train.exchange import export_hugging_face

    for path in export_hugging_face(checkpoint, out):
        print(path)


@app.command("verify")
def verify(checkpoint: Annotated[Path, typer.Argument(help="A step-N folder of a run.")]) -> None:
    """Read a checkpoint whole and compare every checksum; exit code 2 names what is wrong."""
    from meshwright.checkpoint.folder import verify as verify_folder

    manifest = verify_folder(checkpoint)
    print(
        f"{checkpoint}: step {manifest.step}, {len(manifest.tensors)} tensors, {manifest.bytes:,} bytes, all as written"
    )
