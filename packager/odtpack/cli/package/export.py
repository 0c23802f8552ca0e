"""``odtpack export``: a plain inference model with trained parameters inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odtpack.choices import Platform
from odtpack.cli import _console
from odtpack.cli._options import PACKAGE, TRAINED
from odtpack.cli._spec_options import ORT_PLATFORM, ORT_STYLE, StyleChoice, read_formats

if TYPE_CHECKING:
    from odtpack.choices import OrtFormat
    from odtpack.ort.files import Inference
    from odtpack_runtime import CheckpointState
    from odtpack_runtime.package.package import Package

LOSS_PREFIX = "loss/"
"""Start of the names of the values that an attached loss adds."""


def export(
    package: Annotated[Path, PACKAGE],
    out: Annotated[Path, typer.Option(metavar="M.onnx", help="Where the inference model goes.")],
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Output of the model, any value of the forward graph; may be repeated. "
            "Default: those named by build --output, else the prediction that the loss reads.",
        ),
    ] = None,
    checkpoint: Annotated[Path | None, TRAINED] = None,
    ort_format: Annotated[
        bool, typer.Option("--ort-format", help="Also write ORT format, M.ort.")
    ] = False,
    ort_style: Annotated[StyleChoice | None, ORT_STYLE] = None,
    ort_platform: Annotated[list[Platform] | None, ORT_PLATFORM] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print inputs and outputs as JSON on stdout.")
    ] = False,
) -> None:
    """Write an inference model with the parameters of a checkpoint."""
    from odtpack.cli._files import check_writable
    from odtpack_runtime.export.inference_model import export_inference_model
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.values.units import format_bytes

    opened = Package.open(package)
    opened.require_one_model("The export of a model")
    formats = read_formats(ort_format, ort_style, ort_platform)
    variants = formats.names(out.stem) if formats is not None else []
    for path in (out, *(out.with_name(name) for name in variants)):
        check_writable(path, "--out", outside=opened)
    model = inference_of(opened, outputs or [], checkpoint)
    names = list(model.outputs)
    written: list[Path] = []
    if formats is None:
        export_inference_model(opened.eval_model, model.parameters, out, names)
    else:
        written = _write_with_ort(opened, model, out, formats)
    _console.say(f"wrote {out} ({format_bytes(out.stat().st_size)}): {', '.join(names)}")
    stale = out.with_suffix(".ort")
    if formats is None and stale != out and stale.is_file():
        _console.say(f"{stale} was there before and is another model's: add --ort-format")
    for path in written:
        _console.say(f"wrote {path} ({format_bytes(path.stat().st_size)})")
    if as_json:
        content = {
            "path": str(out),
            "outputs": names,
            "checkpoint": str(checkpoint or opened.checkpoint),
        }
        ort = {"ort": [str(path) for path in written]} if written else {}
        _console.print_json({**content, **ort})


def _write_with_ort(
    package: Package, model: Inference, out: Path, formats: OrtFormat
) -> list[Path]:
    """Write the model and its variants in ORT format: at any moment those there are its own."""
    from odtpack.ort.format import convert_models
    from odtpack_runtime.export.inference_model import export_inference_model
    from odtpack_runtime.files.together import replace_together, staged_beside

    with staged_beside(out) as stage:
        made = stage / out.name
        export_inference_model(package.eval_model, model.parameters, made, list(model.outputs))
        return replace_together(out, made, list(convert_models([made], formats, stage)))


def inference_of(package: Package, outputs: list[str], checkpoint: Path | None) -> Inference:
    """The inference model that options ask for.

    Args:
        package: The package.
        outputs: Names of its outputs; the usual ones if empty.
        checkpoint: Where its parameters come from; the package's if None.

    Raises:
        OdtpackError: The package computes no such value, or the checkpoint is not its own.
    """
    from odtpack.ort.files import Inference
    from odtpack_runtime import CheckpointState

    names = _outputs(package, outputs)
    source = checkpoint or package.checkpoint
    state = CheckpointState.load_checkpoint(source)
    check_state(package, state, source)
    parameters = {**state.arrays(trainable=True), **state.arrays(trainable=False)}
    return Inference(tuple(names), parameters)


def check_state(package: Package, state: CheckpointState, where: Path) -> None:
    """Refuse a checkpoint that does not hold the package's parameters.

    Raises:
        OdtpackError: It is nominal, or a parameter is missing or has another shape.
    """
    from odtpack_runtime import OdtpackError
    from odtpack_runtime.checkpoint.parameters import nominal_error

    if state.is_nominal:
        raise nominal_error("there are no values to export")
    arrays = {**state.arrays(trainable=True), **state.arrays(trainable=False)}
    for item in package.manifest.parameters:
        array = arrays.get(item.name)
        if array is not None and (array.shape, array.dtype.name) == (item.shape, item.dtype):
            continue
        found = "lacks it" if array is None else f"has {array.dtype}{list(array.shape)}"
        raise OdtpackError(
            "model-mismatch",
            f"the package has a parameter {item.name!r}, {item.dtype}{list(item.shape)}, and the "
            f"checkpoint {found}",
            where=str(where),
        )


def _outputs(package: Package, wanted: list[str]) -> list[str]:
    """Names of the outputs, once the evaluation model is known to compute them from data."""
    from odtpack_runtime import OdtpackError, UnknownNameError

    available, predictions = forward_values(package)
    own = [item.name for item in package.manifest.all_outputs if item.role != "loss"]
    names = wanted or own or predictions
    near = ", ".join(available[:6]) + (", ..." if len(available) > 6 else "")
    if not names:
        raise OdtpackError(
            "no-outputs",
            "--outputs is needed: the loss is part of the model, and may read any value",
            where=str(package.path),
            hint=f"pass --outputs NAME; nearest to the loss are {near}",
        )
    for name in names:
        if name not in available:
            raise UnknownNameError(
                "unknown-output",
                f"--outputs {name!r} is not a value that the model computes from its data",
                where=str(package.eval_model),
                hint=f"nearest to the loss are {near}",
            )
    return list(dict.fromkeys(names))


def forward_values(package: Package) -> tuple[list[str], list[str]]:
    """What the evaluation model computes without labels or target.

    Returns:
        Names of the forward graph's values, the last one first, and of those among them
        that the attached loss reads.
    """
    import onnx

    # Its digest is the manifest's, so it is the model that the builder wrote.
    graph = onnx.load_model(str(package.eval_model)).graph
    inputs = package.manifest.inputs
    known = {item.name for item in inputs if item.role == "data"}
    beyond = {item.name for item in inputs if item.role != "data"}
    produced: list[str] = []
    read_by_loss: set[str] = set()
    for node in graph.node:
        of_loss = all(name.startswith(LOSS_PREFIX) for name in node.output)
        if of_loss:
            read_by_loss.update(node.input)
        if beyond.intersection(node.input):
            beyond.update(node.output)
        elif known.intersection(node.input):
            known.update(node.output)
            produced += [] if of_loss else [name for name in node.output if name]
    return produced[::-1], [name for name in produced if name in read_by_loss]
