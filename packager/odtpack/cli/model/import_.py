"""``odtpack import``: a package from artifacts of onnxruntime-training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import MANIFEST_AS_JSON


def import_(
    artifacts: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            show_default=False,
            help="Folder that onnxruntime-training's generate_artifacts wrote.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="PKG", help="Folder of the package: new, empty, or a package."),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="CK",
            help="Checkpoint to go on from, for example one that a device saved.  "
            "[default: the folder's]",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Start of the file names, where there are several."),
    ] = None,
    as_json: Annotated[bool, MANIFEST_AS_JSON] = False,
) -> None:
    """Build a training package from artifacts of onnxruntime-training 1.19.

    Parameters, the optimizer's state and properties come from the checkpoint. Inputs, outputs
    and parameters keep their names.
    """
    from odtpack.cli._personal import of_properties
    from odtpack.cli.package.build import print_built
    from odtpack.ort_training.importing import import_artifacts
    from odtpack_runtime.checkpoint.format import read_checkpoint

    manifest = import_artifacts(artifacts, out, checkpoint=checkpoint, prefix=prefix)
    print_built(manifest, out)
    saved = read_checkpoint(out / manifest.files.checkpoint.path)
    for sentence in of_properties(saved.properties):
        _console.warn(sentence)
    if as_json:
        _console.print_json({"path": str(out), **manifest.as_dict()})
