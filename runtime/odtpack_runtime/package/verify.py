"""Verifies a package, step by step.

A trained model is written from the inference template as the kits in all languages do: protobuf
merges messages that stand one after the other: the template's bytes, followed by a fragment for
each parameter that holds nothing but its tensor, are one ONNX model.

Whatever is checked here was read from the files themselves, by code that shares nothing
with the code that wrote the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime

from odtpack_runtime.apart import worker as apart
from odtpack_runtime.apart.child import alive, forget_log
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.parameters import Array, Layout
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError, UnknownNameError
from odtpack_runtime.export import onnx_wire as wire
from odtpack_runtime.export.inference_model import Template, check_size
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.files.protobuf_wire import MalformedError, Piece, fields, replaced
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package import trust
from odtpack_runtime.package.checks import (
    SegmentModels,
    Tensor,
    graphs_of,
    likely_sizes,
    load_model,
    operators_of,
    opsets_of,
    said,
    values_of,
)
from odtpack_runtime.package.generator import decoder_runs
from odtpack_runtime.package.manifest import Manifest, contradiction, same
from odtpack_runtime.package.package import (
    Package,
    changed_meanwhile,
    check_nothing_else,
    check_paths,
    find_manifest,
    read_manifest,
    signature_path,
)
from odtpack_runtime.package.records import SelfCheckInput
from odtpack_runtime.package.self_check import NO_SIZES, made_up_batch, search_batch, self_check
from odtpack_runtime.session.graph_signature import (
    BUFFER_SUFFIX,
    GRADIENT_SUFFIX,
    KEPT_NAME,
    ORDER_PREFIX,
    RATE_NAME,
    RESET_NAME,
    STEP_NAME,
    UPDATE_SUFFIX,
)
from odtpack_runtime.session.session import open_session
from odtpack_runtime.training.loop import loss_of, train_step
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_runtime.training.optimizer_contract import Privacy, read_contract

if TYPE_CHECKING:
    import onnx


def write_inference_model(
    package: Package,
    parameters: Mapping[str, Array],
    destination: str | os.PathLike[str],
    output_names: Sequence[str] | None = None,
) -> None:
    """Write the forward model of a package with these parameters inside."""
    # `output_names`: which of the forward model's outputs it has, in the template's order; all of
    # them if None.
    file, info = package.manifest.files.inference_template, package.manifest.inference
    wanted = [] if info is None else list(info.outputs if output_names is None else output_names)
    if file is None or info is None or not wanted or len(set(wanted)) != len(wanted):
        raise OdtpackError(
            "no-outputs",
            "The package has no inference template: its model has no output but its loss."
            if info is None
            else "An exported model needs at least one output, and each only once.",
            where=str(package.path),
        )
    for name in wanted:
        if name not in info.outputs:
            what = f"The inference template computes no value '{name}'."
            hint = f"its outputs are {', '.join(info.outputs)}"
            raise UnknownNameError("unknown-output", what, where=file.path, hint=hint)
    path = package.path / file.path
    pieces: list[Piece] = [path.read_bytes()]
    if set(wanted) != set(info.outputs):
        try:
            pieces = with_outputs(memoryview(pieces[0]), wanted)
        except MalformedError as error:  # its hash was right: it was not written by odtpack
            what = f"{path} is not a readable ONNX model: {error}."
            hint = "build the package again"
            raise OdtpackError("model-not-loadable", what, where=str(path), hint=hint) from error
    pieces += Template(path, package.manifest).fragments(parameters)
    check_size(pieces)
    with atomic_write(destination) as stream:
        stream.writelines(pieces)


def with_outputs(model: memoryview, names: Collection[str]) -> list[Piece]:
    """Return the pieces of a model without the outputs of its graph that are not named."""

    def kept(graph: memoryview) -> list[Piece]:
        return [
            graph[part.start : part.end]
            for part in fields(graph)
            if part.number != wire.OUTPUTS or wire.value_name(graph[part.body : part.end]) in names
        ]

    return replaced(model, {wire.MODEL_GRAPH: kept})


def check_models(package: Package) -> None:
    """Check the models against the manifest."""
    manifest = package.manifest
    training = load_model(package.training_model)
    evaluation = load_model(package.eval_model)
    optimizer = load_model(package.optimizer_model)
    segments = SegmentModels(package)
    models = {"training_model": training, "eval_model": evaluation, "optimizer_model": optimizer}
    if package.step_model is not None:
        models["step_model"] = load_model(package.step_model)
    known = _known_opsets(manifest)
    for path, model in segments.models.items():
        _check_versions(manifest, model, path, known)
    for kind, model in models.items():
        where = getattr(package, kind)
        opsets = _check_versions(manifest, model, where, known)
        if kind == "training_model" and opsets != known:
            raise contradiction(where, "opsets", opsets, known)
        found = operators_of(model, opsets)
        if kind in ("training_model", "eval_model"):
            found = segments.operators(found, training=kind == "training_model")
        same(where, "operators", found, getattr(manifest.operators, kind))
    whole = segments.whole(training, package.training_model, training=True)
    _check_training(manifest, *whole, _metadata(training), package.training_model)
    inputs, outputs = segments.whole(evaluation, package.eval_model, training=False)
    expected = [*said(manifest.inputs), *said(manifest.parameters)]
    same(package.eval_model, "inputs and parameters", inputs, expected)
    same(package.eval_model, "outputs", outputs, said(manifest.all_outputs))
    kind = _metadata(optimizer).get("odtpack.optimizer", "custom")
    what = "odtpack.optimizer in its metadata"
    same(package.optimizer_model, what, kind, manifest.optimizer.kind)
    if package.step_model is not None:
        _check_step(manifest, models["step_model"], training, package.step_model)
    _check_device_parts(package, training, optimizer)
    if manifest.files.inference_template is not None and manifest.inference is not None:
        path = package.path / manifest.files.inference_template.path
        _check_template(manifest, load_model(path), path)


def check_checkpoints(package: Package) -> None:
    """Check the checkpoint, and the nominal one, against the manifest."""
    data = read_checkpoint(package.checkpoint)
    if data.nominal:
        raise contradiction(package.checkpoint, "state", "nominal", "one with values")
    _check_parameters(package, data, package.checkpoint)
    if package.nominal_checkpoint is not None:
        nominal = read_checkpoint(package.nominal_checkpoint)
        if not nominal.nominal:
            raise contradiction(
                package.nominal_checkpoint, "state", "one with values", "a nominal one"
            )
        _check_parameters(package, nominal, package.nominal_checkpoint)


def _check_parameters(package: Package, data: CheckpointData, where: Path) -> None:
    parameters = package.manifest.parameters
    for kind, found, roles in (
        ("trainable parameters", data.trainable, ("trainable",)),
        ("frozen parameters", data.frozen, ("frozen", "state")),
    ):
        stated = {
            item.name: (item.dtype, () if data.nominal else item.shape)
            for item in parameters
            if item.role in roles
        }
        held = {
            name: (array.dtype.name, () if data.nominal else array.shape)
            for name, array in found.items()
        }
        same(where, kind, held, stated)


def _metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _known_opsets(manifest: Manifest) -> dict[str, int]:
    return {domain or "ai.onnx": version for domain, version in manifest.opsets.items()}


def _check_versions(
    manifest: Manifest, model: onnx.ModelProto, where: Path, known: Mapping[str, int]
) -> dict[str, int]:
    """Check that a model needs no opset and no format that the manifest does not name."""
    opsets = opsets_of(model, where)
    if opsets.items() - known.items():
        raise contradiction(where, "opsets", opsets, known)
    if model.ir_version > manifest.ir_version:
        raise contradiction(where, "IR version", model.ir_version, manifest.ir_version)
    return opsets


def _check_training(
    manifest: Manifest,
    inputs: list[Tensor],
    outputs: list[Tensor],
    metadata: Mapping[str, str],
    where: Path,
) -> None:
    fed, parameters = said(manifest.inputs), said(manifest.parameters)
    same(where, "inputs", inputs[: len(fed)], fed)
    rest = inputs[len(fed) :]
    same(where, "parameters", rest[: len(parameters)], parameters)
    given = said(manifest.outputs)
    same(where, "outputs", outputs[: len(given)], given)
    trained = {item.name for item in manifest.parameters if item.role == "trainable"}
    for what, values, suffix in (
        ("gradient buffers", rest[len(parameters) :], BUFFER_SUFFIX),
        ("gradients", outputs[len(given) :], GRADIENT_SUFFIX),
    ):
        owners = {name.removesuffix(suffix) for name, _, _ in values if name.endswith(suffix)}
        # The gradients of inputs may be accumulated as well.
        same(where, what, owners - {item.name for item in manifest.inputs}, trained)
    state = {item.name for item in manifest.parameters if item.role == "state"}
    for name, _, _ in (*rest[len(parameters) :], *outputs[len(given) :]):
        owner = name.removesuffix(UPDATE_SUFFIX)
        known = name == RESET_NAME or name.endswith((BUFFER_SUFFIX, GRADIENT_SUFFIX))
        if not known and (owner == name or owner not in state):
            raise contradiction(where, "inputs and outputs", f"{name!r} besides", "none such")
    labels = [item for item in manifest.inputs if item.role == "labels"]
    named = labels[0].name if len(labels) == 1 else "labels"
    wanted = {
        "odtpack.loss": manifest.loss,
        "odtpack.labels": named,
        "odtpack.accumulation_steps": str(manifest.accumulation_steps),
    }
    for item in labels:
        of = f".{item.name}" if len(labels) > 1 else ""
        for fact in ("class_count", "ignore_index"):
            if (value := getattr(item, fact)) is not None:
                wanted[f"odtpack.{fact}{of}"] = str(value)
    usual = {"odtpack.labels": "labels", "odtpack.accumulation_steps": "1"}
    facts = ("odtpack.class_count", "odtpack.ignore_index")
    for key in sorted({*wanted, *(key for key in metadata if key.startswith(facts))}):
        found = metadata.get(key, usual.get(key))
        same(where, f"{key} in its metadata", found, wanted.get(key))


def _check_step(
    manifest: Manifest, model: onnx.ModelProto, training: onnx.ModelProto, where: Path
) -> None:
    """Check that a step model takes and gives what the training and the optimizer model do."""
    inputs, outputs = values_of(model.graph.input), values_of(model.graph.output)
    shared = [*said(manifest.inputs), *said(manifest.parameters)]
    same(where, "inputs and parameters", inputs[: len(shared)], shared)
    given = said(manifest.outputs)
    same(where, "outputs", outputs[: len(given)], given)
    vectors = () if manifest.layout is None else manifest.layout.state
    trained = {item.name for item in manifest.parameters if item.role == "trainable"}
    state = {f"{name}.{vector.name}" for name in trained for vector in vectors}
    names = [name for name, _, _ in inputs[len(shared) :]]
    same(where, "inputs", set(names), {*state, RATE_NAME, STEP_NAME})
    rest = (name for name, _, _ in outputs[len(given) :])
    updated = [name for name in rest if not name.startswith(ORDER_PREFIX)]
    given_by_training = values_of(training.graph.output)
    moved = {name for name, _, _ in given_by_training if name.endswith(UPDATE_SUFFIX)}
    expected = {f"{name}{UPDATE_SUFFIX}" for name in (*trained, *state)} | moved | {KEPT_NAME}
    same(where, "outputs", set(updated), expected)
    same(where, "metadata", _metadata(model), _metadata(training))


def _check_device_parts(
    package: Package, training: onnx.ModelProto, optimizer: onnx.ModelProto
) -> None:
    """Check session options and layout against what the models say of themselves."""
    manifest, where = package.manifest, package.training_model
    metadata = _metadata(training)
    if manifest.session is not None:
        level = metadata.get("odtpack.optimization_level")
        same(where, "optimization level", level, manifest.session.optimization_level)
    if manifest.layout is None:
        return
    inputs = [value.name for value in optimizer.graph.input]
    contract = read_contract(_metadata(optimizer), inputs, str(package.optimizer_model))
    privacy = manifest.privacy and Privacy(**manifest.privacy.as_dict())
    same(package.optimizer_model, "privacy", contract.privacy, privacy)
    # A reader takes the groups from one of the two, with their order, scales and decays.
    groups = [dataclasses.astuple(group) for group in contract.groups]
    stated = [
        (group.learning_rate_scale, group.weight_decay, group.parameters)
        for group in manifest.groups
    ]
    same(package.optimizer_model, "groups", groups, stated)
    trained = {item.name: item for item in manifest.parameters if item.role == "trainable"}
    try:
        order = json.loads(metadata.get("odtpack.parameter_order", "[]")) or list(trained)
        dtype = np.dtype(manifest.layout.dtype)
        layout = Layout.pack((name, trained[name].shape, dtype) for name in order)
    except (ValueError, KeyError, TypeError) as error:
        raise contradiction(where, "parameter order", "another", "one of its own") from error
    offsets = {slot.name: slot.offset // dtype.itemsize for slot in layout.slots}
    said = {name: item.offset for name, item in trained.items()}
    same(where, "offsets of the parameters", offsets, said)
    kept, stated_state = (
        tuple((vector.name, vector.axes) for vector in state)
        for state in (contract.state, manifest.layout.state)
    )
    elements, info = layout.nbytes // dtype.itemsize, manifest.layout
    found = (elements, contract.run, tuple(inputs), kept)
    stated_layout = (info.elements, info.run, info.inputs, stated_state)
    same(package.optimizer_model, "the layout", found, stated_layout)


def _check_template(manifest: Manifest, model: onnx.ModelProto, where: Path) -> None:
    """Check that what an inference template takes and lacks is what the manifest says."""
    info, graph = manifest.inference, model.graph
    assert info is not None  # noqa: S101 - the caller has looked
    same(where, "inputs", tuple(value.name for value in graph.input), info.inputs)
    same(where, "outputs", tuple(value.name for value in graph.output), info.outputs)
    known = _known_opsets(manifest)
    if wrong := opsets_of(model, where).items() - known.items():
        raise contradiction(where, "opsets", dict(wrong), known)
    held: set[str] = set()
    read: set[str] = set()
    for inner, nodes in graphs_of(model):
        held |= {tensor.name for tensor in getattr(inner, "initializer", ())}
        held |= {getattr(value, "name", value) for value in inner.input}
        for node in nodes:
            held.update(node.output)
            read.update(name for name in node.input if name)
    same(where, "parameters", read - held, set(info.parameters))


# Run every model of a package once on made-up data, in a process of its own.

_SAMPLES = 2


@dataclass(frozen=True)
class StepFigures:
    """What the steps on made-up data gave."""

    onnxruntime: str  # version that ran them
    training_loss: float | None  # loss of the first training step; None if it is not finite
    # loss of the same batch after the optimizer steps, in evaluation mode
    evaluation_loss: float | None
    shapes: dict[str, list[int]]  # shape of each input


def run_steps_apart(package: Package) -> StepFigures | None:
    """Run :func:`run_steps` in a process of its own, as a hostile model may do anything."""
    # None where no step can be made: onnxruntime-training alone runs the models, or they run with
    # no batch that can be made up, as the manifest says.
    # Raises OdtpackError: What run_steps raised; `models-crash` if the process ended without a
    # word, `models-stall` if it was silent for longer than its limit.
    files = [package.path / file.path for file in package.manifest.files.all()]
    try:
        found = apart.call(
            "odtpack_runtime.package.verify:figures_of",
            apart.Limits.of(files),
            manifest=str(package.path / package.manifest_name),
        )
    except OdtpackError as error:
        error.where = error.where or str(package.path)
        raise
    return None if found is None else StepFigures(**found)


def figures_of(manifest: str) -> dict[str, Any] | None:
    """:func:`run_steps` of the package of a manifest, as JSON has it."""
    found = run_steps(Package.open(Path(manifest)))
    return None if found is None else asdict(found)


def run_steps(package: Package) -> StepFigures | None:
    """Load every model, and make a training, an optimizer and an evaluation step."""
    # A package with a self-check has to pass that.
    info = package.manifest.self_check
    figures = None
    if info is not None and info.reason is None:
        result = self_check(package)
        shapes = {item.name: list(item.shape) for item in info.inputs}
        figures = StepFigures(
            onnxruntime.__version__, result.losses[0], result.evaluation_loss, shapes
        )
    else:
        state = CheckpointState.load_checkpoint(package.checkpoint)
        try:
            figures = search_batch(
                package.manifest.inputs,
                _SAMPLES,
                partial(_steps, package),
                partial(likely_sizes, package.eval_model, state),
            )
        except OdtpackError as error:
            if error.code != "run-failed" or info is None or info.reason != NO_SIZES:
                raise
    _load_converted(package)
    _load_exported(package)
    if any(file.role == "decoder_model" for file in package.manifest.files.extra):
        decoder_runs(str(package.path / package.manifest_name))
    return figures


def _steps(package: Package, chosen: Sequence[SelfCheckInput]) -> StepFigures:
    forget_log()
    batch = made_up_batch(package.manifest.inputs, chosen)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model)
    optimizer = Optimizer(package.optimizer_model, module)
    alive()
    loss = train_step(module, optimizer, [batch])
    alive()
    module.eval()
    return StepFigures(
        onnxruntime.__version__,
        _finite(loss),
        _finite(loss_of(module(*batch))),
        {item.name: list(item.shape) for item in chosen},
    )


def _load_converted(package: Package) -> None:
    """Load the models in ORT format that were made for this machine or for all."""
    here = "arm" if platform.machine().lower() in ("arm64", "aarch64") else "amd64"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for file in package.manifest.files.extra:
        if file.role == "ort_model" and file.platform in (None, here):
            open_session(package.path / file.path, options)
            alive()


def _load_exported(package: Package) -> None:
    """Load what the inference template becomes: the manifest says what each parameter is in it."""
    file = package.manifest.files.inference_template
    if file is None:
        return
    state = CheckpointState.load_checkpoint(package.checkpoint)
    arrays = {**state.arrays(trainable=True), **state.arrays(trainable=False)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with scratch_folder("verify") as folder:
        exported = Path(folder) / "model.onnx"
        write_inference_model(package, arrays, exported)
        try:
            open_session(exported, options)
        except OdtpackError as error:
            template = package.path / file.path
            raise contradiction(
                template, "the types of parameters", "others", "those of an exported model"
            ) from error


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


# Verify a package: that it is whole, unaltered, true to its manifest, and that it trains.


@dataclass(frozen=True)
class Verification:
    """What was verified."""

    path: str  # the package's folder, absolute
    manifest_sha256: str  # of its manifest: what the package is, to the byte
    recipe_digest: str | None  # of what it was built from, if the manifest has one
    files: int  # number of files that the manifest lists
    size_bytes: int  # their size together, with the manifest's
    # `valid` for the key that was passed; `unchecked` if there is a signature and no key was passed
    signature: Literal["valid", "unchecked", "none"]
    steps: StepFigures | None  # None where none can be made; the last phrase of `checked` says why
    signed_with: str | None  # file of the key that the signature is valid for
    release: int | None  # number of the release, if it has one
    checked: list[str]  # what was checked, in order, a phrase each


def verify_package(
    path: str | os.PathLike[str],
    *,
    public_key: trust.KeyFiles | None = None,
    require_signature: bool = False,
    minimum_release: int | None = None,
    limits: trust.Limits | None = None,
) -> Verification:
    """Verify a package.

    In this order, so that nothing is parsed before it is known to be what was signed and
    listed, and nothing is hashed that is too large or not listed: the signature; the manifest;
    its release and the limits of what it declares; paths, and that there are no other files;
    sizes and hashes; what models and checkpoints hold against what the manifest says; in a process
    of its own, a training, an optimizer and an evaluation step on made-up data.

    Args:
        path: The folder, or its manifest file.
        public_key: File with the public key (PEM, Ed25519) that the package must be signed
            with, or several, with one of which it must be.
        require_signature: Refuse a package without a signature also where no key is passed; then
            nothing checks who signed it.
        minimum_release: Refuse an older release, and a package without a number.
        limits: Refuse a package that asks for more; for packages from somebody else.

    Returns:
        What was verified.

    Raises:
        OdtpackError: The first thing that is wrong. ``not-signed``, ``signature-wrong``,
            ``package-downgrade``, ``package-limits``, and
            what :meth:`Package.open`, :func:`check_nothing_else`, :func:`check_models`,
            :func:`check_checkpoints` and :func:`run_steps` raise.
    """
    manifest_path = find_manifest(path)
    data = read_manifest(manifest_path)
    key = trust.check_signed(manifest_path, data, public_key, require_signature)
    root = manifest_path.parent.resolve()
    manifest = Manifest.from_json(data, str(manifest_path))
    if minimum_release is not None:
        trust.check_release(manifest, minimum_release, str(root))
    if limits is not None:
        limits.check(manifest, str(root))
    check_paths(root, manifest.files.all(), manifest_path.name)
    check_nothing_else(root, manifest_path.name, manifest)
    package = Package.open(manifest_path)
    if package.manifest_sha256 != hashlib.sha256(data).hexdigest():
        raise changed_meanwhile(package.path)
    if limits is not None:
        trust.check_operators(package, limits.domains)
    check_models(package)
    check_checkpoints(package)
    files = package.manifest.files.all()
    steps = None if package.manifest.target else run_steps_apart(package)
    present = os.path.lexists(signature_path(manifest_path))
    return Verification(
        str(package.path),
        package.manifest_sha256,
        package.manifest.recipe_digest,
        len(files),
        len(data) + sum(file.size_bytes for file in files),
        "valid" if key is not None else "unchecked" if present else "none",
        steps,
        None if key is None else str(key),
        manifest.release,
        _checked(manifest, key, minimum_release, limits, steps is None),
    )


def _checked(
    manifest: Manifest,
    key: Path | None,
    minimum_release: int | None,
    limits: trust.Limits | None,
    no_steps: bool,
) -> list[str]:
    """What was checked, a phrase each."""
    check = manifest.self_check
    reason = None if check is None else check.reason
    known = check is not None and reason is None
    files = len(manifest.files.all())
    return [
        *([f"the manifest's signature, with {key.name}"] if key is not None else []),
        *([f"the release, {minimum_release} or later"] if minimum_release is not None else []),
        *(["limits of disk, memory, sizes and operator domains"] if limits is not None else []),
        "the manifest: its schema and its digest, session options and self-check included",
        f"path, size and SHA-256 of {files} files, and that there are no others",
        "inputs, outputs, operators and options of every model against the manifest",
        *(
            [f"the weights of {len(manifest.segments.segments)} segments, and what models take"]
            if manifest.segments is not None
            else []
        ),
        "names, shapes, types and digests of the checkpoint's tensors",
        f"no training step: {reason or 'only onnxruntime-training runs the models'}"
        if no_steps
        else "training steps against the losses of the self-check"
        if known
        else "a training, an optimizer and an evaluation step on made-up data"
        + (f", not against known losses: {reason}" if reason else ""),
    ]
