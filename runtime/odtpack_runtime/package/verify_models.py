"""Check that the models and the checkpoint of a package are what its manifest says.

Whatever is checked here was read from the files themselves, by code that shares nothing
with the code that wrote the manifest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.parameters import Layout
from odtpack_runtime.package.checks import SegmentModels
from odtpack_runtime.package.contradictions import contradiction, same
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.onnx_files import (
    Tensor,
    graphs_of,
    load_model,
    operators_of,
    opsets_of,
    said,
    values_of,
)
from odtpack_runtime.package.package import Package
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
from odtpack_runtime.training.optimizer_contract import read_contract
from odtpack_runtime.training.private import Privacy

if TYPE_CHECKING:
    import onnx


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
    whole = segments.whole(evaluation, package.eval_model, training=False)
    _check_evaluation(manifest, *whole, package.eval_model)
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
    count, steps = manifest.class_count, manifest.accumulation_steps
    ignored = manifest.ignored_label
    labels = [item.name for item in manifest.inputs if item.role == "labels"]
    named = labels[0] if len(labels) == 1 else "labels"
    for key, value, usual in (
        ("odtpack.loss", manifest.loss, None),
        ("odtpack.labels", named, "labels"),
        ("odtpack.class_count", None if count is None else str(count), None),
        ("odtpack.ignore_index", None if ignored is None else str(ignored), None),
        ("odtpack.accumulation_steps", str(steps), "1"),
    ):
        same(where, f"{key} in its metadata", metadata.get(key, usual), value)


def _check_evaluation(
    manifest: Manifest, inputs: list[Tensor], outputs: list[Tensor], where: Path
) -> None:
    expected = [*said(manifest.inputs), *said(manifest.parameters)]
    same(where, "inputs and parameters", inputs, expected)
    same(where, "outputs", outputs, said(manifest.all_outputs))


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
