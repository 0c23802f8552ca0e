"""``odtpack export``, ``ort`` and ``config``: what an app ships of a package."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from odtpack.choices import Format, Mode, Platform, Types
from odtpack.cli import _console
from odtpack.cli._options import Json, StyleChoice, read_formats

if TYPE_CHECKING:
    from odtpack.ort.files import Inference
    from odtpack.ort.session_runs import SessionRun
    from odtpack_runtime import CheckpointState
    from odtpack_runtime.package.package import Package


LOSS_PREFIX = "loss/"
"""Start of the names of the values that an attached loss adds."""


def export(
    package: Path,
    *,
    out: Path,
    outputs: list[str] | None = None,
    checkpoint: Path | None = None,
    model: Path | None = None,
    ort_format: bool = False,
    ort_style: StyleChoice | None = None,
    ort_platform: list[Platform] | None = None,
) -> Json:
    """Write an inference model with trained parameters.

    For a package of segments this is its decoder as exported, with the adapter inside: operators,
    cache and packed weights are unchanged. Weights go to M.onnx.data. For other packages --model
    does the same; without it, products with quantized weights become standard operators, and a
    decoder has no cache.

    Parameters:
        out M.onnx: Inference model to write.
        outputs NAME: Output of the model: any value of the forward graph. May be repeated. Default:
            the outputs of build --output, or the prediction that the loss reads.
        model MODEL.onnx: Put a LoRA adapter into this model, from which the package was built; its
            operators, cache and packed weights are unchanged.
        ort_format: Also write ORT format, M.ort.
        json: Print inputs and outputs as JSON on stdout.

    Examples:
        odtpack export package --checkpoint trained.ckpt --outputs output --out inference.onnx
    """
    from odtpack.cli._files import check_writable
    from odtpack_runtime import OdtpackError, Package
    from odtpack_simulator.values.units import format_bytes

    opened = Package.open(package)
    formats = read_formats(ort_format, ort_style, ort_platform)
    if opened.manifest.segments is not None or model is not None:
        if formats is not None:
            opened.require_one_model("The ORT format")
            what = "--ort-format and --model exclude each other"
            raise OdtpackError("option-not-used", what, hint="leave one out")
        return _decoder(opened, out, outputs, checkpoint, model)
    variants = formats.names(out.stem) if formats is not None else []
    for path in (out, *(out.with_name(name) for name in variants)):
        check_writable(path, "--out", [checkpoint], outside=opened)
    found = inference_of(opened, outputs or [], checkpoint)
    written: list[Path] = []
    if formats is None:
        taken = found.write(opened, out)
    else:
        from odtpack.ort.format import convert_variants
        from odtpack_runtime.files.folder_update import replace_together, staged_beside

        with staged_beside(out) as stage:  # at any moment the variants that there are are its own
            made = stage / out.name
            taken = found.write(opened, made)
            written = replace_together(out, made, list(convert_variants(made, formats, stage)))
    size = format_bytes(out.stat().st_size)
    _console.say(f"wrote {out} ({size}): {', '.join(found.outputs)}, from {', '.join(taken)}")
    adapter = opened.manifest.adapter
    by_domain = opened.manifest.operators.eval_model.values()
    unpacks = any("DequantizeLinear" in names for names in by_domain)
    if adapter and adapter.kind == "lora" and unpacks:
        _console.say(
            "note: quantized weights are unpacked before each product; --model MODEL.onnx puts the "
            "adapter into the original model instead and keeps its operators and cache"
        )
    stale = out.with_suffix(".ort")
    if formats is None and stale != out and stale.is_file():
        _console.say(f"{stale} is an older file of another model: add --ort-format to replace it")
    for path in written:
        _console.say(f"wrote {path} ({format_bytes(path.stat().st_size)})")
    return {
        "path": str(out),
        "outputs": list(found.outputs),
        "checkpoint": str(checkpoint or opened.checkpoint),
        **({"ort": [str(path) for path in written]} if written else {}),
    }


def _decoder(
    package: Package, out: Path, outputs: list[str] | None, checkpoint: Path | None,
    model: Path | None,
) -> Json:  # fmt: skip
    from odtpack.adapters.inference import export_decoder
    from odtpack.cli._files import check_writable
    from odtpack.errors import OdtpackError

    if outputs:
        what = "--outputs names outputs of a training model, and a decoder keeps its own"
        raise OdtpackError("option-not-used", what)
    if model is None:
        _ = package.decoder
    state = load_state(package, checkpoint)
    for path in (out, out.with_name(f"{out.name}.data")):
        check_writable(path, "--out", [checkpoint, model], outside=package)
    written = export_decoder(package, state, out, model)
    _console.wrote(*written)
    _console.say("the adapter is beside the layers that it is on: no weight is rounded again")
    return {
        "path": str(out),
        "files": [each.name for each in written],
        "checkpoint": str(checkpoint or package.checkpoint),
    }


def inference_of(package: Package, outputs: list[str], checkpoint: Path | None) -> Inference:
    """The inference model that options ask for."""
    from odtpack.ort.files import Inference

    names = _outputs(package, outputs)
    state = load_state(package, checkpoint)
    parameters = {**state.arrays(trainable=True), **state.arrays(trainable=False)}
    info = package.manifest.inference
    for name in () if info is None else info.inputs:
        parameters.pop(name, None)  # a state that training carries over is fed in inference
    return Inference(tuple(names), parameters)


def load_state(package: Package, checkpoint: Path | None) -> CheckpointState:
    """The state of a checkpoint, or of the package's own; it must hold the package's parameters."""
    from odtpack_runtime import CheckpointState, OdtpackError
    from odtpack_runtime.checkpoint.parameters import nominal_error

    where = checkpoint or package.checkpoint
    state = CheckpointState.load_checkpoint(where)
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
    return state


def _outputs(package: Package, wanted: list[str]) -> list[str]:
    """Names of the outputs, once the evaluation model is known to compute them from data."""
    from odtpack_runtime import OdtpackError, UnknownNameError

    available, predictions = forward_values(package)
    manifest = package.manifest
    known = {*available}  # what reads labels, as the parts of several losses, is not there
    own = [i.name for i in manifest.all_outputs if i.role != "loss" and i.name in known]
    names = wanted or own or predictions
    near = ", ".join(available[:6]) + (", ..." if len(available) > 6 else "")
    if not names:
        what = "--outputs is needed: the model includes its loss, which may read any value"
        hint = f"pass --outputs NAME; nearest to the loss are {near}"
        raise OdtpackError("no-outputs", what, where=str(package.path), hint=hint)
    for name in names:
        if name not in available:
            what = f"--outputs {name!r} is not a value that the model computes from its data"
            hint = f"nearest to the loss are {near}"
            raise UnknownNameError("unknown-output", what, where=str(package.eval_model), hint=hint)
    return list(dict.fromkeys(names))


def forward_values(package: Package) -> tuple[list[str], list[str]]:
    """What the package's models compute without labels or target; what of it the loss reads."""
    from odtpack_runtime.package.checks import read_model

    # Their digests are the manifest's, so they are the models that the builder wrote.
    template = package.manifest.files.inference_template
    paths = [*([] if template is None else [package.path / template.path]), package.eval_model]
    nodes = [n for p in paths for n in read_model(p).graph.node]
    inputs = package.manifest.inputs
    known = {item.name for item in inputs if item.role == "data"}
    beyond = {item.name for item in inputs if item.role != "data"}
    produced: list[str] = []
    read_by_loss: set[str] = set()
    for node in nodes:
        of_loss = all(name.startswith(LOSS_PREFIX) for name in node.output)
        if of_loss:
            read_by_loss.update(node.input)
        if beyond.intersection(node.input):
            beyond.update(node.output)
        elif known.intersection(node.input):
            known.update(node.output)
            produced += [] if of_loss else [name for name in node.output if name]
    of_both = dict.fromkeys(produced)
    return list(dict.fromkeys(produced[::-1])), [n for n in of_both if n in read_by_loss]


def ort(
    package: Path,
    *,
    style: StyleChoice = "fixed",
    platform: list[Platform] | None = None,
    inference: bool = False,
    outputs: list[str] | None = None,
    checkpoint: Path | None = None,
) -> Json:
    """Add models in ORT format to a package. The list of operators they need is added, too.

    A minimal build of ONNX Runtime reads this format only. Existing files in ORT format are
    replaced, and the manifest lists the new ones.

    Parameters:
        style: fixed: fully optimized. runtime: some optimizations are left to the app's session,
            for NNAPI and CoreML.
        platform: Processors to optimize for. May be repeated. Default: models that run on all.
        inference: Also add the inference model to the package.
        outputs NAME: Output of the inference model, as for odtpack export.
        checkpoint CK: Parameters of the inference model. [default: the package's]
        json: Print the files as JSON on stdout.

    Examples:
        odtpack ort package
        odtpack ort package --style both --platform arm --platform amd64 --inference
    """
    from odtpack.ort.files import add_ort_files
    from odtpack_runtime import OdtpackError, Package
    from odtpack_runtime.files.folder_update import finish_update
    from odtpack_simulator.values.units import format_bytes

    if (outputs or checkpoint is not None) and not inference:
        what = "--outputs and --checkpoint apply to the inference model only"
        raise OdtpackError("option-not-used", what, hint="pass --inference too, or leave them out")
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
    return {"path": str(package), "files": [f.as_dict() for f in made]}


def config(
    packages: list[Path],
    *,
    mode: Mode = Mode.TRAIN,
    out: Path | None = None,
    check: Path | None = None,
    types: bool = False,
    globally_allowed_types: bool = False,
    file_format: Format | None = None,
    platform: list[Platform] | None = None,
    data: Path | None = None,
) -> tuple[Json, int]:
    """Write or check the list of operators of packages. A reduced build needs it.

    ONNX Runtime's build takes the file as --include_ops_by_config. The check runs every model
    with every session option that an app may use, and compares the kernels that ran with the
    file. Exit code 1 if an operator or type is missing or unused.

    Parameters:
        packages PKG: Packages.
        mode: train: training, evaluation and optimizer model. infer: the exported model.
        out FILE: Configuration file to write.
        check FILE: Check this configuration against the kernels that run.
        types: Limit operators to the types they need.
        globally_allowed_types: Limit all operators to the types of the models.
        file_format: Files that the app loads; onnx: at any optimization level. Default:
            ort if the package has such files, else onnx.
        platform: Processors of the devices. May be repeated. Default: all.
        data DATA.npz: Samples for --check. [default: generated]

    Examples:
        odtpack config package --types --out operators.config
        odtpack config package another --mode both --out operators.config
        odtpack config package --check operators.config
    """
    from odtpack.cli._files import check_writable
    from odtpack_runtime import OdtpackError, Package
    from odtpack_runtime.apart.worker import worker

    if (out is None) == (check is None):
        what = "pass either --out to write a configuration, or --check to check one"
        raise OdtpackError("out-or-check", what)
    if types and globally_allowed_types:
        raise OdtpackError(
            "types-twice",
            "--types limits each operator and --globally-allowed-types all operators: ONNX "
            "Runtime's build takes one or the other",
        )
    if check is not None and (types or globally_allowed_types):
        what = "--types and --globally-allowed-types apply to --out, not to --check"
        raise OdtpackError("option-not-used", what, hint="leave them out")
    if out is not None and data is not None:
        raise OdtpackError("option-not-used", "--data is for --check")
    opened = [Package.open(path) for path in packages]
    if out is not None:
        for package in opened:
            check_writable(out, "--out", [], outside=package)
    limit = Types.OPERATOR if types else Types.GLOBAL if globally_allowed_types else Types.NONE
    with tempfile.TemporaryDirectory() as name, worker():  # one process for all models
        scratch = Path(name)
        runs = [
            _runs(package, mode, file_format, platform or [], scratch / str(index))
            for index, package in enumerate(opened)
        ]
        if out is not None:
            content = _write(out, [run for some in runs for run in some], limit, scratch)
        else:
            assert check is not None  # noqa: S101 - one of them is given
            _console.results()
            content = _check(check, opened, runs, data, scratch)
    return content, not content.get("passed", True)


def _runs(
    package: Package,
    mode: Mode,
    file_format: Format | None,
    platforms: list[Platform],
    scratch: Path,
) -> list[SessionRun]:
    """Every way in which the models of a package are run."""
    from odtpack.ort.session_runs import INFERENCE_MODEL, onnx_models, runs_of

    scratch.mkdir()
    inference: dict[str, Path] = {}
    if mode is not Mode.TRAIN and INFERENCE_MODEL not in onnx_models(package):
        inference = {INFERENCE_MODEL: scratch / f"{INFERENCE_MODEL}.onnx"}
        inference_of(package, [], None).write(package, inference[INFERENCE_MODEL])
    return runs_of(package, mode, file_format, platforms, inference, scratch)


def _write(out: Path, runs: list[SessionRun], limit: Types, scratch: Path) -> Json:
    from odtpack.ort.operator_config import config_of, count_kernels
    from odtpack.ort.session_runs import final_graph
    from odtpack_runtime.files.atomic import write_whole
    from odtpack_simulator.values.text import counted

    graphs = [final_graph(run, scratch / f"{index}.ort") for index, run in enumerate(runs)]
    found = config_of(graphs, limit)
    names = [f"- {name}" for name in dict.fromkeys(str(run) for run in runs)]
    write_whole(out, found.text(["Operators that run in:", *names]).encode())
    kernels = count_kernels(found)
    kept = "" if kernels is None else f", {kernels[0]} of {kernels[1]} kernels"
    _console.say(f"wrote {out}: {counted(len(found.operators), 'operator')}{kept}")
    return {
        "path": str(out),
        "operators": [str(each) for each in sorted(found.operators)],
        "kernels": None if kernels is None else {"kept": kernels[0], "of": kernels[1]},
    }


def _check(
    path: Path,
    packages: list[Package],
    runs: list[list[SessionRun]],
    data: Path | None,
    scratch: Path,
) -> Json:
    from odtpack.ort.operator_config import check_config, read_config, version
    from odtpack.ort.session_runs import SampleFeeds

    held = read_config(path)
    samples = {
        run: sample
        for package, own in zip(packages, runs, strict=True)
        for sample in (SampleFeeds(package, data),)
        for run in own
    }
    verdict = check_config(
        held, list(samples), lambda run: samples[run](run.model, run.source), scratch
    )
    _console.say(f"ran on ONNX Runtime {version()}", style="bold")
    for ran in verdict.ran:
        _console.say(
            f"  {ran.run}: {ran.nodes} nodes, {ran.kernels_run} kernels ran, "
            f"{len(ran.operators)} operators"
        )
    for title, found in (("missing", verdict.missing), ("unused", verdict.unused)):
        for each in found:
            _console.say(f"  {title}  {each}", style="bold")
    count = len(held.operators)
    if verdict.passed:
        _console.say(f"{path}: all {count} operators are needed, and none is missing")
    else:
        _console.say(f"{path}: {len(verdict.missing)} missing, {len(verdict.unused)} unused")
    return {
        "path": str(path),
        "onnxruntime": version(),
        "passed": verdict.passed,
        "missing": list(verdict.missing),
        "unused": list(verdict.unused),
        "runs": [
            {
                "run": str(ran.run),
                "model": ran.run.model,
                "nodes": ran.nodes,
                "kernels_run": ran.kernels_run,
                "operators": [str(operator) for operator in sorted(ran.operators)],
            }
            for ran in verdict.ran
        ],
    }
