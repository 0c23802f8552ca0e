"""Check that the models and the checkpoint of a package are what its manifest says.

Whatever is checked here was read from the files themselves, by code that shares nothing
with the code that wrote the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.layout import Layout
from odtpack_runtime.errors import OdtpackError, onnx_missing
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import (
    BUFFER_SUFFIX,
    GRADIENT_SUFFIX,
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

Tensor = tuple[str, str, tuple[int | str | None, ...]]
"""Name, element type as numpy has it, and shape."""


def check_models(package: Package) -> None:
    """Check the models against the manifest.

    Raises:
        OdtpackError: ``model-not-readable``; ``model-external-data`` if a model would read
            another file; ``manifest-contradicts`` for anything that the manifest says
            otherwise; ``onnx-missing``.
    """
    manifest = package.manifest
    training = _load(package.training_model)
    evaluation = _load(package.eval_model)
    optimizer = _load(package.optimizer_model)
    models = {"training_model": training, "eval_model": evaluation, "optimizer_model": optimizer}
    if package.step_model is not None:
        models["step_model"] = _load(package.step_model)
    for kind, model in models.items():
        where = getattr(package, kind)
        opsets = _opsets(model, where)
        known = {domain or "ai.onnx": version for domain, version in manifest.opsets.items()}
        wrong = opsets.items() - known.items()
        if wrong or (kind == "training_model" and opsets != known):
            raise _contradiction(where, "opsets", opsets, known)
        if model.ir_version > manifest.ir_version:
            raise _contradiction(where, "IR version", model.ir_version, manifest.ir_version)
        _same(where, "operators", _operators(model, opsets), getattr(manifest.operators, kind))
    _check_training(manifest, training, package.training_model)
    _check_evaluation(manifest, evaluation, package.eval_model)
    _check_optimizer(manifest, optimizer, package.optimizer_model)
    if package.step_model is not None:
        _check_step(manifest, models["step_model"], training, package.step_model)
    _check_device_parts(package, training, optimizer)
    if manifest.files.inference_template is not None and manifest.inference is not None:
        path = package.path / manifest.files.inference_template.path
        _check_template(manifest, _load(path), path)


def check_checkpoints(package: Package) -> None:
    """Check the checkpoint, and the nominal one, against the manifest.

    Raises:
        OdtpackError: As :func:`read_checkpoint`, and ``manifest-contradicts``.
    """
    data = read_checkpoint(package.checkpoint)
    if data.nominal:
        raise _contradiction(package.checkpoint, "state", "nominal", "one with values")
    _check_parameters(package, data, package.checkpoint)
    if package.nominal_checkpoint is not None:
        nominal = read_checkpoint(package.nominal_checkpoint)
        if not nominal.nominal:
            raise _contradiction(
                package.nominal_checkpoint, "state", "one with values", "a nominal one"
            )
        _check_parameters(package, nominal, package.nominal_checkpoint)


def _check_parameters(package: Package, data: CheckpointData, where: Path) -> None:
    parameters = package.manifest.parameters
    for kind, found, roles in (
        ("trainable parameters", data.trainable, ("trainable",)),
        ("frozen parameters", data.frozen, ("frozen", "state")),
    ):
        said = {
            item.name: (item.dtype, () if data.nominal else item.shape)
            for item in parameters
            if item.role in roles
        }
        held = {
            name: (array.dtype.name, () if data.nominal else array.shape)
            for name, array in found.items()
        }
        _same(where, kind, held, said)


def _load(path: Path) -> onnx.ModelProto:
    try:
        import onnx
    except ImportError as error:
        raise onnx_missing("Verifying a package") from error
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except Exception as error:  # protobuf's exceptions have no common base with onnx's
        raise OdtpackError(
            "model-not-readable", f"{path.name} is not an ONNX model.", where=str(path)
        ) from error
    if any(not isinstance(text, str) for text in _texts(model)):  # bytes: not UTF-8
        raise OdtpackError(
            "model-not-readable", f"{path.name} holds a name that is not text.", where=str(path)
        )
    for tensor in _tensors(model):
        if tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise OdtpackError(
                "model-external-data",
                f"{path.name} reads its tensor {tensor.name!r} from another file, and the models "
                "of a package hold what they need.",
                where=str(path),
            )
    return model


def _graphs(model: onnx.ModelProto) -> Iterator[tuple[Any, Iterable[onnx.NodeProto]]]:
    """Yield every graph and function body with its nodes."""
    waiting: list[Any] = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph, graph.node
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [attribute.g] if attribute.HasField("g") else []
                waiting += attribute.graphs


def _texts(model: onnx.ModelProto) -> Iterator[object]:
    """The texts that are compared with those of a manifest."""
    for _, nodes in _graphs(model):
        for node in nodes:
            yield from (node.op_type, node.domain)
    for value in (*model.graph.input, *model.graph.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    yield from (entry.domain for entry in model.opset_import)
    yield from (text for entry in model.metadata_props for text in (entry.key, entry.value))


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph, nodes in _graphs(model):
        yield from getattr(graph, "initializer", ())
        for sparse in getattr(graph, "sparse_initializer", ()):
            yield from (sparse.values, sparse.indices)
        for node in nodes:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)


def _opsets(model: onnx.ModelProto, where: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in model.opset_import:
        if found.setdefault(entry.domain or "ai.onnx", entry.version) != entry.version:
            raise _contradiction(where, f"opset of {entry.domain!r}", "two versions", "one")
    return found


def _operators(model: onnx.ModelProto, opsets: Mapping[str, int]) -> dict[str, dict[str, int]]:
    import onnx.defs

    found: dict[str, dict[str, int]] = {}
    for _, nodes in _graphs(model):
        for node in nodes:
            domain = "" if node.domain == "ai.onnx" else node.domain
            opset = opsets.get(domain or "ai.onnx", 1)
            since = 1 if domain else opset
            if opset < 2**31 and onnx.defs.has(node.op_type, opset, domain):
                since = onnx.defs.get_schema(node.op_type, opset, domain).since_version
            found.setdefault(domain or "ai.onnx", {})[node.op_type] = since
    return found


def _check_training(manifest: Manifest, model: onnx.ModelProto, where: Path) -> None:
    inputs, outputs = _read(model.graph.input), _read(model.graph.output)
    fed, parameters = _said(manifest.inputs), _said(manifest.parameters)
    _same(where, "inputs", inputs[: len(fed)], fed)
    rest = inputs[len(fed) :]
    _same(where, "parameters", rest[: len(parameters)], parameters)
    given = _said(manifest.outputs)
    _same(where, "outputs", outputs[: len(given)], given)
    trained = {item.name for item in manifest.parameters if item.role == "trainable"}
    for what, values, suffix in (
        ("gradient buffers", rest[len(parameters) :], BUFFER_SUFFIX),
        ("gradients", outputs[len(given) :], GRADIENT_SUFFIX),
    ):
        owners = {name.removesuffix(suffix) for name, _, _ in values if name.endswith(suffix)}
        # The gradients of inputs may be accumulated as well.
        _same(where, what, owners - {item.name for item in manifest.inputs}, trained)
    state = {item.name for item in manifest.parameters if item.role == "state"}
    for name, _, _ in (*rest[len(parameters) :], *outputs[len(given) :]):
        owner = name.removesuffix(UPDATE_SUFFIX)
        known = name == RESET_NAME or name.endswith((BUFFER_SUFFIX, GRADIENT_SUFFIX))
        if not known and (owner == name or owner not in state):
            raise _contradiction(where, "inputs and outputs", f"{name!r} besides", "none such")
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    count, steps = manifest.class_count, manifest.accumulation_steps
    for key, value, usual in (
        ("odtpack.loss", manifest.loss, None),
        ("odtpack.class_count", None if count is None else str(count), None),
        ("odtpack.accumulation_steps", str(steps), "1"),
    ):
        _same(where, f"{key} in its metadata", metadata.get(key, usual), value)


def _check_evaluation(manifest: Manifest, model: onnx.ModelProto, where: Path) -> None:
    expected = [*_said(manifest.inputs), *_said(manifest.parameters)]
    _same(where, "inputs and parameters", _read(model.graph.input), expected)
    _same(where, "outputs", _read(model.graph.output), _said(manifest.all_outputs))


def _check_optimizer(manifest: Manifest, model: onnx.ModelProto, where: Path) -> None:
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    kind = metadata.get("odtpack.optimizer", "custom")
    _same(where, "odtpack.optimizer in its metadata", kind, manifest.optimizer.kind)


def _check_step(
    manifest: Manifest, model: onnx.ModelProto, training: onnx.ModelProto, where: Path
) -> None:
    """Check that a step model takes and gives what the training and the optimizer model do."""
    inputs, outputs = _read(model.graph.input), _read(model.graph.output)
    shared = [*_said(manifest.inputs), *_said(manifest.parameters)]
    _same(where, "inputs and parameters", inputs[: len(shared)], shared)
    given = _said(manifest.outputs)
    _same(where, "outputs", outputs[: len(given)], given)
    vectors = () if manifest.layout is None else manifest.layout.state
    trained = {item.name for item in manifest.parameters if item.role == "trainable"}
    state = {f"{name}.{vector.name}" for name in trained for vector in vectors}
    names = [name for name, _, _ in inputs[len(shared) :]]
    _same(where, "inputs", set(names), {*state, RATE_NAME, STEP_NAME})
    rest = (name for name, _, _ in outputs[len(given) :])
    updated = [name for name in rest if not name.startswith(ORDER_PREFIX)]
    moved = {name for name, _, _ in _read(training.graph.output) if name.endswith(UPDATE_SUFFIX)}
    expected = {f"{name}{UPDATE_SUFFIX}" for name in (*trained, *state)} | moved
    _same(where, "outputs", set(updated), expected)
    metadata = [
        {entry.key: entry.value for entry in each.metadata_props} for each in (model, training)
    ]
    _same(where, "metadata", *metadata)


def _check_device_parts(
    package: Package, training: onnx.ModelProto, optimizer: onnx.ModelProto
) -> None:
    """Check session options and layout against what the models say of themselves."""
    manifest, where = package.manifest, package.training_model
    metadata = {entry.key: entry.value for entry in training.metadata_props}
    if manifest.session is not None:
        level = metadata.get("odtpack.optimization_level")
        _same(where, "optimization level", level, manifest.session.optimization_level)
    if manifest.layout is None:
        return
    inputs = [value.name for value in optimizer.graph.input]
    about = {entry.key: entry.value for entry in optimizer.metadata_props}
    contract = read_contract(about, inputs, str(package.optimizer_model))
    privacy = manifest.privacy and Privacy(**manifest.privacy.as_dict())
    _same(package.optimizer_model, "privacy", contract.privacy, privacy)
    trained = {item.name: item for item in manifest.parameters if item.role == "trainable"}
    try:
        order = json.loads(metadata.get("odtpack.parameter_order", "[]")) or list(trained)
        dtype = np.dtype(manifest.layout.dtype)
        layout = Layout.pack((name, trained[name].shape, dtype) for name in order)
    except (ValueError, KeyError, TypeError) as error:
        raise _contradiction(where, "parameter order", "another", "one of its own") from error
    offsets = {slot.name: slot.offset // dtype.itemsize for slot in layout.slots}
    said = {name: item.offset for name, item in trained.items()}
    _same(where, "offsets of the parameters", offsets, said)
    found = (
        layout.nbytes // dtype.itemsize,
        contract.run,
        tuple(inputs),
        tuple((vector.name, vector.axes) for vector in contract.state),
    )
    _same(
        package.optimizer_model,
        "the layout",
        found,
        (
            manifest.layout.elements,
            manifest.layout.run,
            manifest.layout.inputs,
            tuple((vector.name, vector.axes) for vector in manifest.layout.state),
        ),
    )


def _check_template(manifest: Manifest, model: onnx.ModelProto, where: Path) -> None:
    """Check that what an inference template takes and lacks is what the manifest says."""
    info, graph = manifest.inference, model.graph
    assert info is not None  # noqa: S101 - the caller has looked
    _same(where, "inputs", tuple(value.name for value in graph.input), info.inputs)
    _same(where, "outputs", tuple(value.name for value in graph.output), info.outputs)
    known = {domain or "ai.onnx": version for domain, version in manifest.opsets.items()}
    if wrong := _opsets(model, where).items() - known.items():
        raise _contradiction(where, "opsets", dict(wrong), known)
    held: set[str] = set()
    read: set[str] = set()
    for inner, nodes in _graphs(model):
        held |= {tensor.name for tensor in getattr(inner, "initializer", ())}
        held |= {getattr(value, "name", value) for value in inner.input}
        for node in nodes:
            held.update(node.output)
            read.update(name for name in node.input if name)
    _same(where, "parameters", read - held, set(info.parameters))


def _read(values: Iterable[onnx.ValueInfoProto]) -> list[Tensor]:
    """Inputs or outputs of a graph."""
    import onnx

    found: list[Tensor] = []
    for value in values:
        kind = value.type.tensor_type
        try:
            name = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
            name = "string" if kind.elem_type == onnx.TensorProto.STRING else name
        except (KeyError, TypeError, ValueError):
            name = "no tensor"
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in kind.shape.dim
        )
        found.append((value.name, name, dims))
    return found


def _said(items: Iterable[Any]) -> list[Tensor]:
    """The same from a manifest."""
    return [(item.name, item.dtype, tuple(item.shape)) for item in items]


def _same(where: Path, what: str, found: object, said: object) -> None:
    if found != said:
        raise _contradiction(where, what, *_difference(found, said))


def _difference(found: Any, said: Any) -> tuple[object, object]:
    """The first entries that differ, to keep the message short."""
    if isinstance(found, Mapping) and isinstance(said, Mapping):
        for key in sorted({*found, *said}):
            if found.get(key) != said.get(key):
                return (
                    _difference(found.get(key), said.get(key))
                    if (isinstance(found.get(key), Mapping) and isinstance(said.get(key), Mapping))
                    else (f"{key}: {found.get(key)}", f"{key}: {said.get(key)}")
                )
    if isinstance(found, Sequence) and isinstance(said, Sequence) and not isinstance(found, str):
        for one, other in zip(found, said, strict=False):
            if one != other:
                return one, other
        return f"{len(found)} of them", f"{len(said)}"
    if isinstance(found, set) and isinstance(said, set):
        return sorted(found - said) or "less", sorted(said - found) or "less"
    return found, said


def _contradiction(where: Path, what: str, found: object, said: object) -> OdtpackError:
    return OdtpackError(
        "manifest-contradicts",
        f"{where.name} and the manifest differ in {what}: the file has {_short(found)}, and the "
        f"manifest says {_short(said)}.",
        where=str(where),
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
