"""``odtpack adapter merge``: a model with an adapter folded into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import MODEL


def merge(
    model: Annotated[Path, MODEL],
    adapter: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the adapter, as export writes it.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.onnx", help="Model to write.")],
) -> None:
    """Fold an adapter into the weights of the forward model that it was trained on."""
    from odtpack.adapters.merge import merge_adapter
    from odtpack.adapters.peft_files import read_peft
    from odtpack.cli._files import check_writable
    from odtpack_runtime.files.atomic import atomic_write

    check_writable(out, "--out")
    beside = out.resolve().parent == model.resolve().parent
    content = merge_adapter(model, read_peft(adapter), beside=beside)
    with atomic_write(out) as stream:
        stream.write(content)
    _console.say(f"wrote {out}")
