"""``odtpack adapter``: adapters to and from the files of PEFT and ONNX Runtime."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote

from odtpack.cli import _console
from odtpack.cli._options import Json, command, group

_BASE, _ADAPTER = "base.onnx", "adapter.onnx_adapter"

# Names of onnxruntime-genai's builder, which no module in transformers has.
_MADE_UP = re.compile(r".+\.(MatMul|Add|attn\.[qk]_norm\.layernorm|final_norm_layernorm)")


def export(
    package: Path,
    *,
    out: Path,
    checkpoint: Path | None = None,
    onnxruntime: bool = False,
    outputs: list[str] | None = None,
) -> Json:
    """Write the adapter of a checkpoint as PEFT's files.

    Writes adapter_model.safetensors and adapter_config.json. PEFT does not have bitfit: for it
    only the files of ONNX Runtime are written.

    Parameters:
        out DIR: Folder of the adapter's files.
        onnxruntime: Also write adapter.onnx_adapter, and base.onnx, the inference model for it. A
            package of segments has decoder.onnx for this.
        outputs NAME: Output of base.onnx, as for odtpack export. May be repeated.

    Examples:
        odtpack adapter export package --checkpoint trained.ckpt --out adapter
        odtpack adapter export package --checkpoint trained.ckpt --out adapter --onnxruntime
    """
    from odtpack.cli._files import check_creatable
    from odtpack.cli.export import inference_of, load_state
    from odtpack.errors import OdtpackError, some
    from odtpack_runtime import CheckpointState, Package
    from odtpack_runtime.files.folder_update import update_folder
    from odtpack_runtime.package import adapter as peft

    opened = Package.open(package)
    info = peft.adapter_of(opened)
    in_segments = opened.manifest.segments is not None
    if onnxruntime and in_segments:
        _ = opened.decoder
    trained = {item.name for item in opened.manifest.parameters if item.role == "trainable"}
    without = "bitfit, which trains biases that the model has" if info.kind == "bitfit" else ""
    if info.kind == "prompt" and trained.difference(info.parameters):
        without = "prompt vectors and what is trained beside them (--train)"
    if without and not onnxruntime:
        hint = "add --onnxruntime for ONNX Runtime's, or write the whole model: odtpack export"
        raise OdtpackError("peft-without-kind", f"PEFT has no file for {without}", hint=hint)
    if outputs and (in_segments or not onnxruntime):
        what = f"--outputs names outputs of {_BASE}, which is not written"
        hint = "leave --outputs out" + ("" if in_segments else ", or add --onnxruntime")
        raise OdtpackError("option-not-used", what, hint=hint)
    check_creatable(out, "--out")
    state = load_state(opened, checkpoint)
    written: list[Path] = []
    # Weights mean something with the settings beside them only: they are replaced as one.
    with update_folder(out, last=_ADAPTER if without else peft.CONFIG) as stage:
        if onnxruntime:
            peft.check_onnx_adapter(out / _ADAPTER)
        if not without:
            made = peft.to_peft(opened, state)
            peft.check_peft(out)
            written += peft.write_peft(stage, made)
            lost = (*info.absent, *filter(_MADE_UP.fullmatch, made.saved))
            if lost:
                _console.warn(
                    f"PEFT will not find {some(lost)}: the module in transformers does not "
                    "have them under these names, and PEFT drops their trained values"
                )
        if onnxruntime and not in_segments:
            from odtpack.adapters.inference import is_base, with_adapter_inputs

            peft.check_replaced(out, _BASE, ours=is_base(out / _BASE))
            written.append(stage / _BASE)
            inference_of(opened, outputs or [], checkpoint).write(opened, written[-1])
            start = CheckpointState.load_checkpoint(opened.checkpoint)
            with_adapter_inputs(written[-1], start.arrays(trainable=True))
        if onnxruntime:
            written.append(stage / _ADAPTER)
            peft.write_onnx_adapter(written[-1], state.arrays(trainable=True))
    names = [path.name for path in written]
    _console.wrote(*map(out.joinpath, names))
    others = {peft.TENSORS, peft.CONFIG, _BASE, _ADAPTER}.difference(names)
    if older := [name for name in sorted(others) if (out / name).exists()]:
        _console.say(f"older files in {out}, which may be another adapter's: {', '.join(older)}")
    return {"path": str(out), "files": names}


def import_(package: Path, adapter: Path, *, out: Path) -> Json:
    """Write a checkpoint with the values of a PEFT adapter.

    The package must have been built with an adapter of the same kind, rank and layers.

    Parameters:
        adapter DIR: Folder with adapter_model.safetensors and adapter_config.json.
        out CK: Checkpoint to write.

    Examples:
        odtpack adapter import package adapter --out start.ckpt
    """
    from odtpack.cli._files import check_writable
    from odtpack_runtime import CheckpointState, Package, load_adapter

    opened = Package.open(package)
    check_writable(out, "--out", [], outside=opened)
    state = CheckpointState.load_checkpoint(opened.checkpoint)
    load_adapter(opened, state, adapter)
    CheckpointState.save_checkpoint(state, out)
    _console.wrote(out)
    _console.say(
        f"next: odtpack train {quote(str(package))} --data DATA.npz --resume {quote(str(out))} "
        "--out trained.ckpt"
    )
    return {"path": str(out)}


def merge(model: Path, adapter: Path, *, out: Path) -> Json:
    """Merge an adapter into the weights of its forward model.

    Parameters:
        adapter DIR: Folder of the adapter, as export writes it.
        out FILE.onnx: Model to write.

    Examples:
        odtpack adapter merge model.onnx adapter --out merged.onnx
    """
    from odtpack.adapters.merge import merge_adapter
    from odtpack.cli._files import check_writable, write_file
    from odtpack_runtime.package.adapter import read_peft

    check_writable(out, "--out", [model])
    beside = out.resolve().parent == model.resolve().parent
    content = merge_adapter(
        model, read_peft(adapter), beside=beside, remark=lambda text: _console.say(f"note: {text}")
    )
    write_file(out, content)
    return {"path": str(out)}


adapter = group(
    "adapter",
    "Convert adapters to and from PEFT and ONNX Runtime.",
    "odtpack adapter export package --checkpoint trained.ckpt --out adapter",
    "odtpack adapter import package adapter --out start.ckpt",
    "odtpack adapter merge model.onnx adapter --out merged.onnx",
)
for _each in (export, import_, merge):
    command(adapter)(_each)
