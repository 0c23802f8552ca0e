"""``odtpack adapter import``: a checkpoint that starts from an adapter of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import PACKAGE


def import_(
    package: Annotated[Path, PACKAGE],
    adapter: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder with adapter_model.safetensors and adapter_config.json."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="CK", help="Checkpoint to write.")],
) -> None:
    """Write a checkpoint of a package that starts from an adapter of PEFT.

    The package must have been built with an adapter of the same kind, rank and layers.
    """
    from odtpack.adapters.carry import from_peft
    from odtpack.adapters.peft_files import read_peft
    from odtpack.cli._files import check_writable
    from odtpack_runtime import CheckpointState, Package

    opened = Package.open(package)
    check_writable(out, "--out", outside=opened)
    state = from_peft(opened, read_peft(adapter), adapter)
    CheckpointState.save_checkpoint(state, out)
    _console.say(f"wrote {out}")
    _console.say(f"next: odtpack train {package} --data DATA.npz --resume {out} --out trained.ckpt")
