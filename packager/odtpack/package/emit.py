"""Writes a package: models, checkpoint and the manifest that names them.

A package takes its place as a whole, see :mod:`odtpack_runtime.files.folder_update`. Without an
optimizer model there is no package, and no manifest.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import odtpack
from odtpack.choices import SESSIONS
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import dims_of, nodes_of
from odtpack.ort.kernel_needs import Need
from odtpack.package.optimizer_update import OptimizerStep
from odtpack.package.segments.files import stage_segments
from odtpack.package.self_check import with_self_check
from odtpack.package.training import STATE_SUFFIX, Graphs
from odtpack.passes.accumulate import OUTPUT_SUFFIX
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.layout import CHUNK_ELEMENTS, Layout
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.files.folder_update import finish_update, update_folder
from odtpack_runtime.package.listed_files import MANIFEST_NAME, read_manifest, signature_path
from odtpack_runtime.package.manifest import MEANINGS, Manifest, PackageFile
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX
from odtpack_runtime.session.options import usual_session
from odtpack_runtime.training.optimizer_contract import read_contract

_TEMPLATE = "inference_template"
_PROTOBUF_LIMIT = 2**31


@dataclasses.dataclass(frozen=True)
class Made:
    """What is written besides the graphs.

    Attributes:
        step: What an optimizer step does.
        optimizer: The model that makes it.
        step_model: The training model that also makes it; None to write none.
        digest: What decided the build, see :mod:`odtpack.package.digest`.
        oldest: The oldest ONNX Runtime that loads the models; found out if None.
        carried: Checkpoint whose optimizer state and properties the package's takes over.
    """

    step: OptimizerStep
    optimizer: ir.Model
    step_model: ir.Model | None = None
    digest: str | None = None
    oldest: Need | None = None
    carried: CheckpointData | None = None


def write_package(graphs: Graphs, made: Made | None, folder: Path) -> Manifest | None:
    """Write a package into ``folder``, in place of the package or the files of its names.

    Args:
        graphs: Training and evaluation models, their parameters and their loss.
        made: The optimizer, or None to write none.
        folder: Destination; created if needed.

    Returns:
        The manifest as written; None without an optimizer.

    Raises:
        OdtpackError: A file cannot be written, or a model exceeds protobuf's 2 GB.
    """
    task, prefix = graphs.task, graphs.task.prefix
    stock = task.backend.is_stock
    models = {"training_model": graphs.training, "eval_model": graphs.evaluation}
    if made is not None:
        models["optimizer_model"] = made.optimizer
        if made.step_model is not None:
            models["step_model"] = made.step_model
        if graphs.inference is not None and stock:
            models[_TEMPLATE] = graphs.inference.model
    name = f"{prefix}{MANIFEST_NAME}"
    with update_folder(folder, last=name, obsolete=listed_files(folder, name)) as stage:
        staged = _stage(models, graphs, stage, None if made is None else made.carried)
        segments = (
            None if graphs.segments is None else stage_segments(graphs.segments, stage, prefix)
        )
        if made is None:
            return None
        manifest = _manifest(graphs, models, made, staged)
        if segments is not None:
            manifest = segments.listed_in(manifest)
        if graphs.memory is not None and manifest.session and manifest.session.shared_allocator:
            manifest = _with_fitted_arena(manifest, stage / name, graphs)
        if task.spec.self_check and stock:
            manifest = with_self_check(manifest, staged)
        _write(manifest, stage / name)
    return manifest


def _write(manifest: Manifest, path: Path) -> None:
    with atomic_write(path) as stream:
        stream.write(manifest.to_json().encode())


def _with_fitted_arena(manifest: Manifest, path: Path, graphs: Graphs) -> Manifest:
    """A manifest with the arena that suits its package, whose other files are beside ``path``."""
    from odtpack.memory.compile import input_shapes
    from odtpack.ort.arena import fitted

    assert graphs.memory is not None  # noqa: S101 - the caller looked
    spec = graphs.memory.spec
    _write(manifest, path)
    # A budget is planned without the step model.
    session = fitted(
        Package.open(path),
        input_shapes(graphs.training.graph, spec),
        step_model=spec.budget is None,
    )
    return dataclasses.replace(manifest, session=session).sealed()


def listed_files(folder: Path, name: str) -> set[str]:
    """The files of the package that lies in a folder to be written, whatever state they are in."""
    finish_update(folder)
    path = folder / name
    try:
        files = Manifest.from_json(read_manifest(path), name).files.all()
    except OdtpackError as error:
        if isinstance(error.__cause__, OSError) and path.is_file():
            raise  # the disk: the package may be sound, and its files must not stay unlisted
        return set()  # no package, or a damaged one: its files stay
    plain = {file.path for file in files if file.path == Path(file.path).name}
    return plain | {signature_path(path).name}


def _stage(
    models: dict[str, ir.Model], graphs: Graphs, scratch: Path, carried: CheckpointData | None
) -> dict[str, Path]:
    """Write every file but the manifest into ``scratch``."""
    staged, prefix = {}, graphs.task.prefix
    for key, model in models.items():
        proto = ir.to_proto(model)
        if proto.ByteSize() >= _PROTOBUF_LIMIT:
            raise OdtpackError(
                "model-too-large",
                f"the {key.replace('_', ' ')} would exceed 2 GB, the limit of a protobuf file",
                hint="list the large initializers under --train or --freeze, so that they go "
                "to the checkpoint",
            )
        staged[key] = scratch / f"{prefix}{key}.onnx"
        with atomic_write(staged[key]) as stream:
            stream.write(proto.SerializeToString(deterministic=True))
    arrays = {p.name: p for p in graphs.parameters}
    data = CheckpointData(
        {n: p.value() for n, p in arrays.items() if p.role == "trainable"},
        {n: p.value() for n, p in arrays.items() if p.role != "trainable"},
    )
    if carried is not None:
        data.optimizer, data.properties = carried.optimizer, carried.properties
    staged["checkpoint"] = scratch / f"{prefix}checkpoint"
    write_checkpoint(staged["checkpoint"], data)
    tensors = scratch / f"{prefix}checkpoint.data"
    if tensors.exists():
        staged["checkpoint_data"] = tensors
    if graphs.task.spec.nominal:
        staged["nominal_checkpoint"] = scratch / f"{prefix}nominal_checkpoint"
        empty = CheckpointData(
            {n: np.empty(0, a.dtype) for n, a in data.trainable.items()},
            {n: np.empty(0, a.dtype) for n, a in data.frozen.items()},
            nominal=True,
        )
        write_checkpoint(staged["nominal_checkpoint"], empty)
    return staged


def _manifest(
    graphs: Graphs, models: dict[str, ir.Model], made: Made, staged: dict[str, Path]
) -> Manifest:
    graph = graphs.training.graph
    task, backend = graphs.task, graphs.task.backend
    template = graphs.inference if backend.is_stock else None
    lowest = (made.oldest or backend.oldest_runtime((*graphs.models, *models.values()))).name
    inputs, outputs = _inputs(graphs), _outputs(graph)
    predictions = [
        _value(value, "prediction") for value in graphs.evaluation.graph.outputs[len(outputs) :]
    ]
    roles = [str(item["role"]) for item in (*inputs, *outputs, *predictions)]
    roles += [parameter.role for parameter in graphs.parameters]
    layout, offsets = None, dict[str, int]()
    if backend.is_stock:
        layout, offsets = _layout(graphs, models["optimizer_model"])
    content = {
        "schema_version": 1,
        "tool": {
            "odtpack": odtpack.__version__,
            "onnx": onnx.__version__,
            "onnx_ir": ir.__version__,
        },
        "files": {key: PackageFile.describe(path).as_dict() for key, path in staged.items()},
        **({} if backend.is_stock else {"target": backend.runtime}),
        "minimum_onnxruntime": lowest,
        "ir_version": graphs.training.ir_version,
        "opsets": dict(sorted(graph.opset_imports.items())),
        "inputs": inputs,
        "outputs": outputs,
        "evaluation_outputs": predictions,
        "loss": graphs.loss.name,
        "loss_options": dict(graphs.loss.options) or None,
        **made.step.describe(),
        "accumulation_steps": task.spec.accumulation_steps,
        "parameters": [
            {
                "name": p.name,
                **({"module": p.module} if p.module else {}),
                "shape": list(p.tensor.shape.numpy()),
                "dtype": p.dtype.numpy().name,
                **(
                    {"model_dtype": p.tensor.dtype.numpy().name}
                    if p.dtype != p.tensor.dtype
                    else {}
                ),
                **({"scale": p.scale} if p.scale else {}),
                **({"offset": offsets[p.name]} if p.name in offsets else {}),
                "role": p.role,
                "size_bytes": math.prod(p.tensor.shape.numpy()) * p.dtype.numpy().itemsize,
            }
            for p in graphs.parameters
        ],
        "roles": {role: MEANINGS[role] for role in roles},
        "operators": _operators(graphs, models),
        "recipe_digest": made.digest,
        "session": (
            usual_session(
                graphs.training.metadata_props["odtpack.optimization_level"],
                **SESSIONS[task.spec.sessions],
            ).as_dict(defaults=False)
            if backend.is_stock
            else None
        ),
        "layout": layout,
        **({} if task.adapter is None else {"adapter": task.adapter.as_dict(defaults=False)}),
        "inference": template
        and {key: list(getattr(template, key)) for key in ("inputs", "outputs", "parameters")},
    }
    return Manifest.from_json(json.dumps(content).encode(), "manifest.json").sealed()


def _layout(graphs: Graphs, model: ir.Model) -> tuple[dict[str, object], dict[str, int]]:
    """What a manifest says of the flat vectors, and where each parameter begins, in elements."""
    inputs = [value.name or "" for value in model.graph.inputs]
    contract = read_contract(model.metadata_props, inputs, "optimizer_model.onnx")
    shapes = {
        p.name: tuple(p.tensor.shape.numpy()) for p in graphs.parameters if p.role == "trainable"
    }
    order = json.loads(graphs.training.metadata_props.get("odtpack.parameter_order", "[]"))
    dtype = graphs.master.numpy()
    layout = Layout.pack((name, shapes[name], dtype) for name in order or shapes)
    content = {
        "dtype": dtype.name,
        "elements": layout.nbytes // dtype.itemsize,
        "run": contract.run,
        "chunk_elements": CHUNK_ELEMENTS,
        "inputs": inputs,
        "state": [
            {"name": vector.name} | ({} if vector.axes is None else {"axes": list(vector.axes)})
            for vector in contract.state
        ],
    }
    return content, {slot.name: slot.offset // dtype.itemsize for slot in layout.slots}


def _value(value: ir.Value, role: str) -> dict[str, object]:
    dims = dims_of(value)
    return {
        "name": value.name,
        "dtype": _type_name(value.dtype or ir.DataType.FLOAT),
        "shape": list(dims or ()),
        "role": role,
    }


def _inputs(graphs: Graphs) -> list[dict[str, object]]:
    """The inputs that the caller feeds: neither parameters nor gradient buffers."""
    inputs = []
    for value in graphs.user_inputs:
        role = graphs.loss.roles.get(value.name or "", "data")
        entry = _value(value, role)
        for key in ("class_count", "ignore_index"):
            known = graphs.loss.metadata.get(f"odtpack.{key}")
            if role == "labels" and known is not None:
                entry[key] = int(known)
        inputs.append(entry)
    return inputs


def _type_name(dtype: ir.DataType) -> str:
    return "string" if dtype == ir.DataType.STRING else dtype.numpy().name


def _outputs(graph: ir.Graph) -> list[dict[str, object]]:
    shown = [
        value
        for value in graph.outputs
        if not (value.name or "").endswith((OUTPUT_SUFFIX, STATE_SUFFIX, COTANGENT_SUFFIX))
    ]
    return [_value(v, "additional" if i else "loss") for i, v in enumerate(shown)]


def _operators(graphs: Graphs, models: dict[str, ir.Model]) -> dict[str, dict[str, dict[str, int]]]:
    """Operators of each model; those of all segments are the training and evaluation model's."""
    found = {key: operators(model.graph) for key, model in models.items() if key != _TEMPLATE}
    for name, model in () if graphs.segments is None else graphs.segments.models.items():
        for domain, versions in operators(model.graph).items():
            for key in ("training_model", *(() if "backward" in name else ("eval_model",))):
                known = found[key].get(domain, {}) | versions
                found[key][domain] = dict(sorted(known.items()))
    return {key: dict(sorted(domains.items())) for key, domains in found.items()}


def operators(graph: ir.Graph) -> dict[str, dict[str, int]]:
    """Operator types in a graph and its subgraphs, by domain, sorted.

    Returns:
        For each domain, each operator and the opset version since which it is what the
        graph's opset has: the version of the kernel that a reduced runtime must contain.
    """
    used = {(node.domain, node.op_type) for node in nodes_of(graph)}
    found: dict[str, dict[str, int]] = {}
    for domain, op_type in used:
        opset = graph.opset_imports.get(domain, 1)
        since = opset
        if onnx.defs.has(op_type, opset, domain):
            since = onnx.defs.get_schema(op_type, opset, domain).since_version
        elif domain:
            since = 1  # contributed operators have one version
        found.setdefault(domain or "ai.onnx", {})[op_type] = since
    return {domain: dict(sorted(names.items())) for domain, names in sorted(found.items())}
