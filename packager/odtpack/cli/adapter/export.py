"""``odtpack adapter export``: the adapter of a checkpoint, for PEFT and ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import PACKAGE, TRAINED

if TYPE_CHECKING:
    from odtpack_runtime import CheckpointState
    from odtpack_runtime.package.package import Package

_BASE, _ADAPTER = "base.onnx", "adapter.onnx_adapter"


def export(
    package: Annotated[Path, PACKAGE],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the adapter's files.")],
    checkpoint: Annotated[Path | None, TRAINED] = None,
    onnxruntime: Annotated[
        bool,
        typer.Option(
            "--onnxruntime",
            help=f"Also write {_ADAPTER}, and {_BASE}, the inference model that takes it.",
        ),
    ] = False,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"Output of {_BASE}; may be repeated. As for odtpack export."
        ),
    ] = None,
) -> None:
    """Write the adapter of a checkpoint as PEFT's files.

    They are adapter_model.safetensors and adapter_config.json; of bitfit, which PEFT does not
    have, only ONNX Runtime's are written.
    """
    from odtpack.adapters.carry import adapter_of, to_peft
    from odtpack.adapters.peft_files import CONFIG, write_peft
    from odtpack.cli.package.export import check_state
    from odtpack.errors import OdtpackError
    from odtpack_runtime import CheckpointState, Package
    from odtpack_runtime.files.folder_update import update_folder

    opened = Package.open(package)
    info = adapter_of(opened)
    if onnxruntime:
        opened.require_one_model("ONNX Runtime's file of an adapter")
    if info.kind == "bitfit" and not onnxruntime:
        raise OdtpackError(
            "peft-without-kind",
            "PEFT has no file for bitfit, which trains biases that the model has",
            hint="add --onnxruntime for ONNX Runtime's, or write the whole model: odtpack export",
        )
    if outputs and not onnxruntime:
        raise OdtpackError(
            "option-not-used",
            f"--outputs names outputs of {_BASE}, which is not written",
            hint="add --onnxruntime, or leave --outputs out",
        )
    if out.exists() and not out.is_dir():
        raise OdtpackError(
            "cannot-write", f"--out {str(out)!r} cannot be written: it is a file",
            hint="name a folder",
        )  # fmt: skip
    source = checkpoint or opened.checkpoint
    state = CheckpointState.load_checkpoint(source)
    check_state(opened, state, source)
    written: list[Path] = []
    # Weights mean something with the settings beside them only: they are replaced as one.
    with update_folder(out, last=CONFIG if info.kind != "bitfit" else _ADAPTER) as stage:
        if info.kind != "bitfit":
            written += write_peft(stage, to_peft(opened, state))
        if onnxruntime:
            written += _for_onnxruntime(opened, state, source, stage, outputs or [])
    for path in written:
        _console.say(f"wrote {out / path.name}")


def _for_onnxruntime(
    package: Package, state: CheckpointState, source: Path, out: Path, outputs: list[str]
) -> list[Path]:
    from odtpack.adapters.carry import adapter_of
    from odtpack.adapters.onnx_adapter import with_adapter_inputs, write_onnx_adapter
    from odtpack.cli.package.export import inference_of
    from odtpack_runtime import CheckpointState
    from odtpack_runtime.export.inference_model import export_inference_model

    names = adapter_of(package).parameters
    values = state.arrays(trainable=True)
    base, adapter = out / _BASE, out / _ADAPTER
    model = inference_of(package, outputs, source)
    export_inference_model(
        package.eval_model, model.parameters, base, list(model.outputs), apart=True
    )
    start = CheckpointState.load_checkpoint(package.checkpoint).arrays(trainable=True)
    with_adapter_inputs(base, {name: start[name] for name in names})
    write_onnx_adapter(adapter, {name: values[name] for name in names})
    return [base, adapter]
