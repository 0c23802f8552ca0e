"""``odtpack ort``: the models of a package in ORT format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.choices import Platform
from odtpack.cli import _console
from odtpack.cli._options import PACKAGE
from odtpack.cli._spec_options import StyleChoice, read_formats


def ort(
    package: Annotated[Path, PACKAGE],
    style: Annotated[
        StyleChoice,
        typer.Option(
            help="fixed: optimized for good. runtime: with optimizations left to the app's "
            "session, for NNAPI and CoreML."
        ),
    ] = StyleChoice.FIXED,
    platform: Annotated[
        list[Platform] | None,
        typer.Option(
            help="Processors to optimize for; may be repeated. Default: models that run on all."
        ),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Also add the inference model to the package.")
    ] = False,
    outputs: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Output of the inference model, as for export."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="CK", help="Parameters of the inference model.  [default: the package's]"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the files as JSON on stdout.")
    ] = False,
) -> None:
    """Write the models of a package in ORT format into it, with the operators they need.

    A minimal build of ONNX Runtime reads no other format. Files in ORT format that are there
    are replaced; the manifest lists the new ones.
    """
    from odtpack.cli.package.export import inference_of
    from odtpack.errors import OdtpackError
    from odtpack.ort.files import add_ort_files
    from odtpack_runtime.files.folder_update import finish_update
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.values.units import format_bytes

    if (outputs or checkpoint is not None) and not inference:
        raise OdtpackError(
            "option-not-used",
            "--outputs and --checkpoint say what the inference model is",
            hint="pass --inference too, or leave them out",
        )
    finish_update(package if package.is_dir() else package.parent)
    opened = Package.open(package)
    opened.require_one_model("The ORT format")
    formats = read_formats(True, style, platform)
    assert formats is not None  # noqa: S101 - they are wanted
    added = inference_of(opened, outputs or [], checkpoint) if inference else None
    made = add_ort_files(opened, formats, added)
    _console.say(f"wrote into {package}", style="bold")
    width = max(len(file.path) for file in made)
    for file in made:
        _console.say(f"  {file.path:<{width}} {format_bytes(file.size_bytes):>10}")
    if as_json:
        _console.print_json({"path": str(package), "files": [f.as_dict() for f in made]})
