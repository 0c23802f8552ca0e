"""Writes the artifacts of a forward model: models, checkpoint, manifest, ORT format."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
import onnx_ir as ir

import odtpack
from odtpack import targets
from odtpack.choices import SESSIONS
from odtpack.errors import OdtpackError, shortened
from odtpack.graph.graphs import Dims, dims_of, draws, nodes_of
from odtpack.option import options_of
from odtpack.ort import kernel_needs
from odtpack.ort.files import with_ort_files, write_ort_files
from odtpack.ort.kernel_needs import Need, oldest_of_files
from odtpack.ort.session_runs import TRAINING_MODELS
from odtpack.package.parameters import master_type
from odtpack.package.segments.build import build_segments, check_options, stage_segments
from odtpack.package.self_check import checked
from odtpack.package.task import Graphs, OptimizerStep, Remark, Task, resolve_update, silent
from odtpack.package.training import STATE_SUFFIX, build_graphs, read_by
from odtpack.passes import native
from odtpack.passes.gradient_buffers import OUTPUT_SUFFIX
from odtpack.spec import AdapterSpec, BuildSpec, MemorySpec
from odtpack_runtime.apart import worker as apart
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.parameters import CHUNK_ELEMENTS, Layout
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.files.atomic import file_sha256, write_whole
from odtpack_runtime.files.folder_update import finish_update, is_stage, update_folder
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.adapter import peft_info
from odtpack_runtime.package.generator import DECODER_ROLES, DECODER_RUNS
from odtpack_runtime.package.manifest import MEANINGS, Manifest, PackageFile
from odtpack_runtime.package.package import (
    MANIFEST_NAME,
    Package,
    is_as_listed,
    package_in,
    signature_path,
)
from odtpack_runtime.package.trust import STANDARD_DOMAINS
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX
from odtpack_runtime.session.options import usual_session
from odtpack_runtime.training.optimizer_contract import read_contract

if TYPE_CHECKING:
    from odtpack.memory.compile import MemoryReport
    from odtpack_simulator.memory.planning import MemoryPlan


def model_digest(model: ir.Model) -> str:
    """Return the digest of a model: of its graph, and of its initializers one by one."""
    # It does not depend on where the model came from, nor on whether its values lay in files of
    # their own.
    digest = hashlib.sha256()
    tensors: dict[ir.Value, ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            continue
        head = [name, tensor.dtype.name, list(tensor.shape.numpy())]
        digest.update(json.dumps(head).encode())
        digest.update(_tensor_digest(tensor))
        tensors[value] = tensor
    try:
        for value in tensors:
            value.const_value = ir.Tensor(np.empty(0, np.float32), name=value.name)
        proto = ir.to_proto(model)
    finally:
        for value, tensor in tensors.items():
            value.const_value = tensor
    del proto.graph.value_info[:]  # what shape inference found follows from the rest
    digest.update(proto.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _tensor_digest(tensor: ir.TensorProtocol) -> bytes:
    array = tensor.numpy()
    if array.dtype == object:  # text
        lines = [item if isinstance(item, bytes) else str(item).encode() for item in array.flat]
        return hashlib.sha256(json.dumps([line.hex() for line in lines]).encode()).digest()
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data).digest()


def _canonical(value: Any) -> Any:
    """A value as JSON has it, with nothing left out that distinguishes two settings."""
    if value is None or (
        isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)
    ):
        return value
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **_canonical(fields)}
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_canonical, value))
    if hasattr(value, "SerializeToString"):
        return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"a setting is a {type(value).__name__}, which has no canonical form")


_TEMPLATE = "inference_template"
_PROTOBUF_LIMIT = 2**31


@dataclasses.dataclass(frozen=True)
class Made:
    """What is written besides the graphs."""

    step: OptimizerStep  # what an optimizer step does
    optimizer: ir.Model  # the model that makes it
    step_model: ir.Model | None = None  # the training model that also makes it; None to write none
    digest: str | None = None  # what decided the build, see `_digest`
    oldest: Need | None = None  # the oldest ONNX Runtime that loads the models; found out if None
    # checkpoint whose optimizer state and properties the package's takes over
    carried: CheckpointData | None = None


def write_package(
    graphs: Graphs, made: Made | None, folder: Path, remark: Remark = silent, *, run: bool = True
) -> Manifest | None:
    """Write a package into ``folder``, in place of the package or the files of its names."""
    # run: Whether to run its models once, to see that they do.
    task, prefix = graphs.task, graphs.task.prefix
    stock = task.backend.is_stock
    models = {"training_model": graphs.training, "eval_model": graphs.evaluation}
    if made is not None:
        models["optimizer_model"] = made.optimizer
        if made.step_model is not None:
            models["step_model"] = made.step_model
        if task.spec.native and stock:
            models = {key: model if key == "eval_model" else native.wrap(model)
                      for key, model in models.items()}  # fmt: skip
            if graphs.segments is not None:
                wrapped = {n: native.wrap(model) for n, model in graphs.segments.models.items()}
                segments_native = dataclasses.replace(graphs.segments, models=wrapped)
                graphs = dataclasses.replace(graphs, segments=segments_native)
        if graphs.inference is not None and stock:
            models[_TEMPLATE] = graphs.inference.model
    name = f"{prefix}{MANIFEST_NAME}"
    with _replacing(folder, name, remark) as stage:
        staged = _stage(models, graphs, stage, None if made is None else made.carried)
        manifest = None if made is None else _manifest(graphs, models, made, staged)
        if graphs.segments is not None:
            info, extra = stage_segments(graphs.segments, stage, prefix)
            if manifest is not None:
                files = dataclasses.replace(manifest.files, extra=(*manifest.files.extra, *extra))
                manifest = dataclasses.replace(manifest, files=files, segments=info).sealed()
                if run and stock and graphs.segments.decoder is not None:
                    _write(manifest, stage / name)
                    manifest = _with_decoder_that_runs(manifest, stage / name, remark)
        if manifest is not None:
            if graphs.memory is not None and manifest.session and manifest.session.shared_allocator:
                manifest = _with_fitted_arena(manifest, stage / name, graphs)
            _write(manifest, stage / name)
        if run and stock:
            graphs_of_all = (model.graph for model in (*_models(graphs), *models.values()))
            domains = {node.domain for graph in graphs_of_all for node in nodes_of(graph)}
            manifest = checked(
                manifest,
                staged,
                inputs=_compared(graphs),
                prediction=_prediction(graphs),
                losses=task.spec.self_check,
                drawn=next((n.op_type for n in nodes_of(graphs.training.graph) if draws(n)), None),
                foreign=domains - {"", *STANDARD_DOMAINS},
                library=task.custom_op_library,
                remark=remark,
            )
            if manifest is not None:
                _write(manifest, stage / name)
        elif run:
            remark(f"the models were not run: only {task.backend.runtime} runs them")
    return manifest


def _with_decoder_that_runs(manifest: Manifest, path: Path, remark: Remark) -> Manifest:
    """The manifest, without the model for generation if that does not run here."""
    own = [file for file in manifest.files.extra if file.role in DECODER_ROLES]
    try:
        files = [path.parent / file.path for file in manifest.files.all()]
        apart.call(DECODER_RUNS, apart.Limits.of(files), manifest=str(path))
    except OdtpackError as error:
        if error.code not in ("model-not-loadable", "run-failed", "models-memory"):
            raise
        remark(f"the model is not kept for generation: {error.what}")
        for file in own:
            (path.parent / file.path).unlink()
        extra = tuple(file for file in manifest.files.extra if file not in own)
        files_left = dataclasses.replace(manifest.files, extra=extra)
        manifest = dataclasses.replace(manifest, files=files_left).sealed()
    return manifest


def _prediction(graphs: Graphs) -> tuple[str, Dims | None]:
    """What the loss reads first, if that is known: its name and dimensions."""
    task, template = graphs.task, graphs.inference
    name = (*task.spec.loss_inputs, str(task.model.graph.outputs[0].name))[0]
    if task.loss is None and template is not None:  # it ends in its loss
        name = template.outputs[0]
    values = (value for node in graphs.evaluation.graph for value in node.outputs)
    return name, next((dims_of(value) for value in values if value.name == name), None)


def _compared(graphs: Graphs) -> list[dict[str, object]]:
    """The inputs; what a loss of the model's own reads besides the prediction is a target."""
    inputs, template = _inputs(graphs), graphs.inference
    if graphs.task.loss is None and template is not None:
        (first, *_) = template.model.graph.outputs
        for entry in inputs:
            entry["role"] = "data" if entry["name"] in read_by(first) else "target"
    return inputs


def _write(manifest: Manifest, path: Path) -> None:
    write_whole(path, manifest.to_json().encode())


def _with_fitted_arena(manifest: Manifest, path: Path, graphs: Graphs) -> Manifest:
    """A manifest with the arena that suits its package, whose other files are beside ``path``."""
    from odtpack.memory.compile import input_shapes
    from odtpack.ort.session_runs import fitted

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


@contextmanager
def _replacing(folder: Path, name: str, remark: Remark) -> Iterator[Path]:
    """Yield the stage of a package that takes the place of the one that a manifest speaks of."""
    finish_update(folder)
    before = package_in(folder, name)
    obsolete = set[str]()
    with update_folder(folder, last=name, obsolete=obsolete) as stage:
        yield stage
        if before is None:
            return
        files = {file.path: file for file in before.files.all()}
        new, signature = {path.name for path in stage.iterdir()}, signature_path(folder / name).name
        _refuse_others(folder, before, new - {name, signature})
        obsolete.add(signature)
        for path in sorted({*files} - new):
            if is_as_listed(folder, files[path]):
                obsolete.add(path)
            elif os.path.lexists(folder / path):
                remark(f"{path} stays: it is not the file that the manifest of {folder} listed")


def _refuse_others(folder: Path, package: Manifest, names: Iterable[str]) -> None:
    """Refuse a folder where a file of such a name is not one of the package in it."""
    for path in sorted({*names} - {file.path for file in package.files.all()}):
        if os.path.lexists(folder / path):
            raise OdtpackError(
                "folder-not-empty",
                f"the folder {str(folder)!r} holds {path!r}, which is not a file of its "
                "package, and the new package may have a file of that name",
                hint="move that file, or choose an empty or a new folder (--out DIR)",
            )


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
        write_whole(staged[key], proto.SerializeToString(deterministic=True))
    data = CheckpointData(
        {p.name: p.value() for p in graphs.parameters if p.role == "trainable"},
        {p.name: p.value() for p in graphs.parameters if p.role != "trainable"},
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
        write_checkpoint(staged["nominal_checkpoint"], data.without_values())
    return staged


def _manifest(
    graphs: Graphs, models: dict[str, ir.Model], made: Made, staged: dict[str, Path]
) -> Manifest:
    task, backend = graphs.task, graphs.task.backend
    template = graphs.inference if backend.is_stock else None
    lowest = (made.oldest or backend.oldest_runtime((*_models(graphs), *models.values()))).name
    inputs, outputs = _inputs(graphs), _outputs(graphs)
    predictions = [
        _value(value, "prediction") for value in graphs.evaluation.graph.outputs[len(outputs) :]
    ]
    roles = [str(item["role"]) for item in (*inputs, *outputs, *predictions)]
    roles += [parameter.role for parameter in graphs.parameters]
    layout, offsets, session = None, dict[str, int](), None
    if backend.is_stock:
        layout, offsets = _layout(graphs, models["optimizer_model"])
        level = graphs.training.metadata_props["odtpack.optimization_level"]
        memory = SESSIONS[task.spec.sessions]
        session = usual_session(level, **memory, threads=task.spec.threads)
    content = {
        "schema_version": 1,
        "tool": {
            "odtpack": odtpack.__version__,
            "onnx": onnx.__version__,
            "onnx_ir": ir.__version__,
        },
        "files": {key: PackageFile.describe(path).as_dict() for key, path in staged.items()},
        "target": None if backend.is_stock else backend.runtime,
        "minimum_onnxruntime": lowest,
        "ir_version": models["training_model"].ir_version,
        "opsets": dict(sorted(models["training_model"].graph.opset_imports.items())),
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
                "module": p.module,
                "shape": list(p.tensor.shape.numpy()),
                "dtype": p.dtype.numpy().name,
                "model_dtype": None if p.dtype == p.tensor.dtype else p.tensor.dtype.numpy().name,
                "scale": p.scale,
                "offset": offsets.get(p.name),
                "role": p.role,
                "size_bytes": math.prod(p.tensor.shape.numpy()) * p.dtype.numpy().itemsize,
            }
            for p in graphs.parameters
        ],
        "roles": {role: MEANINGS[role] for role in roles},
        "operators": _operators(graphs, models),
        "recipe_digest": made.digest,
        "session": session and session.as_dict(defaults=False),
        "layout": layout,
        "adapter": task.adapter and task.adapter.as_dict(defaults=False),
        "inference": template
        and {key: list(getattr(template, key)) for key in ("inputs", "outputs", "parameters")},
    }
    manifest = Manifest.from_json(json.dumps(content).encode(), "manifest.json")
    if manifest.adapter is not None:
        adapter = dataclasses.replace(manifest.adapter, peft=peft_info(manifest))
        manifest = dataclasses.replace(manifest, adapter=adapter)
    return manifest.sealed()


def _layout(graphs: Graphs, model: ir.Model) -> tuple[dict[str, object], dict[str, int]]:
    """The manifest's entry about flat vectors, and where each parameter begins, in elements."""
    inputs = [value.name or "" for value in model.graph.inputs]
    contract = read_contract(model.metadata_props, inputs, "optimizer_model.onnx")
    shapes = {
        p.name: tuple(p.tensor.shape.numpy()) for p in graphs.parameters if p.role == "trainable"
    }
    order = json.loads(graphs.training.metadata_props.get("odtpack.parameter_order", "[]"))
    dtype = master_type(graphs.parameters).numpy()
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
    dtype = value.dtype or ir.DataType.FLOAT
    return {
        "name": value.name,
        "dtype": "string" if dtype == ir.DataType.STRING else dtype.numpy().name,
        "shape": list(dims_of(value) or ()),
        "role": role,
    }


def _inputs(graphs: Graphs) -> list[dict[str, object]]:
    """The inputs that the caller feeds: neither parameters nor gradient buffers."""
    known, inputs = {parameter.name for parameter in graphs.parameters}, []
    fed = graphs.evaluation.graph.inputs if graphs.segments is None else graphs.segments.inputs
    for value in (each for each in fed if each.name not in known):
        role = graphs.loss.roles.get(value.name or "", "data")
        entry = _value(value, role)
        inputs.append({**entry, **graphs.loss.labels.get(value.name or "", {})})
    return inputs


def _outputs(graphs: Graphs) -> list[dict[str, object]]:
    shown = [
        value
        for value in graphs.training.graph.outputs
        if not (value.name or "").endswith((OUTPUT_SUFFIX, STATE_SUFFIX, COTANGENT_SUFFIX))
    ]
    roles = ("prediction" if v.name == graphs.scores else "additional" for v in shown[1:])
    return [_value(v, role) for v, role in zip(shown, ("loss", *roles), strict=True)]


def _operators(graphs: Graphs, models: dict[str, ir.Model]) -> dict[str, dict[str, dict[str, int]]]:
    """Operators of each model; those of all segments are the training and evaluation model's."""
    found = {
        key: operators(model.graph, model.functions.values())
        for key, model in models.items()
        if key != _TEMPLATE
    }
    for name, model in () if graphs.segments is None else graphs.segments.models.items():
        for domain, versions in operators(model.graph, model.functions.values()).items():
            for key in ("training_model", *(() if "backward" in name else ("eval_model",))):
                known = found[key].get(domain, {}) | versions
                found[key][domain] = dict(sorted(known.items()))
    return {key: dict(sorted(domains.items())) for key, domains in found.items()}


def operators(graph: ir.Graph, functions: Iterable[ir.Function] = ()) -> dict[str, dict[str, int]]:
    """Operator types in a graph, its subgraphs and functions, by domain, sorted."""
    nodes = itertools.chain(nodes_of(graph), *functions)
    used = {(node.domain, node.op_type) for node in nodes}
    found: dict[str, dict[str, int]] = {}
    for domain, op_type in used:
        opset = graph.opset_imports.get(domain, 1)
        since = 1 if domain else opset  # contributed operators have one version
        if onnx.defs.has(op_type, opset, domain):
            since = onnx.defs.get_schema(op_type, opset, domain).since_version
        found.setdefault(domain or "ai.onnx", {})[op_type] = since
    return {domain: dict(sorted(names.items())) for domain, names in sorted(found.items())}


_ANY_TIME: Final = 2.0
_ATTEMPTS: Final = 8
_REACHED: Final = 1.05
"""Times the limit: what is further above it cannot be brought down."""
_FINEST: Final = 1.02
"""Times a limit that was not reached: a limit nearer to it is not tried."""
_SHOWN: Final = 8


def build_within(spec: MemorySpec, task: Task) -> Graphs:
    """Build graphs whose training is planned within the budget."""
    from odtpack.memory.compile import input_shapes
    from odtpack_simulator.device.app import memory_fit, with_margin
    from odtpack_simulator.memory.memory_plan import plan_memory
    from odtpack_simulator.values.units import format_bytes

    scratch = dataclasses.replace(
        task, prefix="", spec=dataclasses.replace(task.spec, nominal=False)
    )
    budget = spec.budget or 0
    asked, haste, reached, out_of_reach = spec, 1, 0, 0
    for _ in range(_ATTEMPTS):
        graphs = build_graphs(dataclasses.replace(scratch, memory=asked))
        with scratch_folder("budget") as folder:
            write_package(graphs, _made(graphs), Path(folder), run=False)  # only planned
            package = Package.open(Path(folder))
            shapes = input_shapes(graphs.training.graph, spec)
            sizes = {i.name: shapes.get(i.name, i.shape) for i in package.manifest.inputs}
            plan = plan_memory(package, sizes).bounded()  # type: ignore[arg-type]
        most = with_margin(plan.peak.nbytes)
        if memory_fit(plan.peak.nbytes, budget) == "fits":
            return dataclasses.replace(graphs, task=task)
        kept, excess = _kept(graphs, plan), most - budget
        if asked.limit is not None and kept > _REACHED * asked.limit:
            out_of_reach = asked.limit
        else:
            if kept <= excess:
                break
            if asked.limit is not None:
                haste *= 2  # an arena's peak does not fall by all that a step keeps less
            reached = kept
            limit = max(kept - haste * excess, (kept - excess) // 2)
        if out_of_reach:
            limit = max(limit, (out_of_reach + reached) // 2)
            if limit <= _FINEST * out_of_reach:
                break
        asked = dataclasses.replace(spec, limit=limit, slowdown=_ANY_TIME)
    parts = [f"{each.name} {format_bytes(each.bytes)}" for each in plan.tensors_at_peak()[:2]]
    raise OdtpackError(
        "memory-budget-too-small",
        f"the phase '{plan.explained.name}' takes {format_bytes(most)}, the plan's margin "
        f"included, even with every useful recomputation (most of it: {', '.join(parts)}); "
        f"{format_bytes(budget)} are allowed",
        hint=f"allow more, a batch size below {spec.batch} (--memory-batch), an optimizer "
        "that keeps less, or freeze layers",
    )


def _kept(graphs: Graphs, plan: MemoryPlan) -> int:
    """Bytes of activations at the peak of a training step."""
    if graphs.memory is not None:
        return graphs.memory.after
    steps = (phase for phase in plan.phases if phase.name == "training step")
    return sum(i.nbytes for phase in steps for i in phase.items if i.kind == "activations")


def sentences(report: MemoryReport) -> Iterator[str]:
    """What was done, for people: the sum, then the largest decisions."""
    from odtpack_simulator.values.units import format_bytes, format_duration, format_percent

    yield (
        f"activations of a step: {format_bytes(report.after)} instead of "
        f"{format_bytes(report.before)}, for about {format_percent(report.slowdown)} more time in "
        "the training model"
    )
    shown = report.decisions[:_SHOWN]
    for each in shown:
        yield (
            f"{each.name}: {format_bytes(each.nbytes)} recomputed, +{format_duration(each.seconds)}"
        )
    rest = report.decisions[_SHOWN:]
    if rest:
        nbytes, seconds = sum(r.nbytes for r in rest), sum(r.seconds for r in rest)
        yield (f"{len(rest)} more: {format_bytes(nbytes)} recomputed, +{format_duration(seconds)}")


_WORTH_A_STEP_MODEL: Final = 1 << 18
"""Trainable elements from which on a package has a step model by itself: a MiB of gradients."""


# Options whose effect is in the digest in its resolved form: in the model, the names of the
# parameters, the loss, the optimizer model or the problem that the memory compiler solves.
_RESOLVED: Final = {
    *("model", "head", "train", "freeze", "like", "untie", "stop_gradient"),
    *("loss", "loss_options", "optimizer"),
    *("optimizer_options", "clip_norm", "clip_value", "privacy_clip", "privacy_noise", "groups"),
    *("decay_vectors", "schedule", "prediction", "base", "onnxruntime", "adapter"),
    *(f"adapter_{each.name}" for each in options_of(AdapterSpec)),
    *("memory_budget", "memory_batch", "memory_sizes"),
}


def write_artifacts(task: Task, folder: Path, remark: Remark = silent) -> Manifest | None:
    """Differentiate a loaded model and write everything that is asked for."""
    spec, backend = task.spec, task.backend
    if spec.ort_format and not backend.is_stock:
        raise OdtpackError(
            "target-cannot",
            "the ORT format is written by this ONNX Runtime, which does not know the operators "
            "of onnxruntime-training",
            hint="convert with onnxruntime-training: "
            "python -m onnxruntime.tools.convert_onnx_models_to_ort FOLDER",
        )
    if spec.segments or spec.keep_products:
        check_options(task)
    backend.require_opset(task.model.graph.opset_imports[""])
    if task.memory is not None and task.memory.budget is not None:
        graphs = build_within(task.memory, task)
        if graphs.memory is not None:
            for sentence in sentences(graphs.memory):
                remark(sentence)
    else:
        graphs = build_segments(task) if spec.segments else build_graphs(task)
    if spec.onnxruntime is not None:
        targets.require(spec.onnxruntime, graphs.opset, remark)
    made = _made(graphs)
    if made is not None:
        made = dataclasses.replace(
            made, step_model=_step_model(made.step, graphs, remark), digest=_digest(graphs, made)
        )
    oldest = backend.oldest_runtime(_models(graphs, made))
    if spec.native:
        oldest = kernel_needs.newest([oldest, Need((1, 12), "functions of a model")])
    if made is not None:
        made = dataclasses.replace(made, oldest=oldest)
    if spec.onnxruntime is not None and backend.is_stock:
        kernel_needs.require(spec.onnxruntime, oldest)
    if spec.ort_format is None:
        return write_package(graphs, made, folder, remark)
    # ONNX Runtime may refuse the conversion: only what it took as a whole reaches the folder.
    name = f"{task.prefix}{MANIFEST_NAME}"
    with _replacing(folder, name, remark) as stage:
        manifest = write_package(graphs, made, stage, remark)
        paths = {key: stage / f"{task.prefix}{key}.onnx" for key in TRAINING_MODELS}
        present = {key: path for key, path in paths.items() if path.exists()}
        files = write_ort_files(
            present, spec.ort_format, stage, task.prefix, task.custom_op_library
        )
        needed = oldest_of_files(stage / file.path for file in files if file.role == "ort_model")
        if spec.onnxruntime is not None:
            kernel_needs.require(spec.onnxruntime, needed)
        if manifest is not None:
            least = kernel_needs.newest([oldest, needed]).name
            manifest = with_ort_files(manifest, files, least)
            (stage / name).write_bytes(manifest.to_json().encode())
    return manifest


def _models(graphs: Graphs, made: Made | None = None) -> list[ir.Model]:
    """Every model that a step or an evaluation runs, with the optimizer's where that is made."""
    more = () if graphs.segments is None else graphs.segments.models.values()
    own = () if made is None else (made.optimizer, made.step_model)
    return [m for m in (graphs.training, graphs.evaluation, *more, *own) if m is not None]


def _made(graphs: Graphs) -> Made | None:
    """The optimizer and its model; None without an optimizer."""
    step = resolve_update(graphs)
    return None if step is None else Made(step, step.model(graphs))


def _digest(graphs: Graphs, made: Made) -> str:
    """What decided the build: what is resolved, and the options that are not."""
    task, library = graphs.task, graphs.task.custom_op_library
    plain = (each.name for each in options_of(BuildSpec) if each.name not in _RESOLVED)
    content = {
        "model": model_digest(task.model),
        "parameters": {parameter.name: parameter.role for parameter in graphs.parameters},
        "loss": graphs.loss,
        "prediction": graphs.scores,
        "spec": {name: getattr(task.spec, name) for name in plain},
        "newest_opset": targets.newest_opset(task.spec.onnxruntime),
        "memory": task.memory,
        "adapter": task.adapter,
        "attached": task.attached,
        "input_gradients": task.input_gradients,
        "prefix": task.prefix,
        "update": made.step.describe(),
        "optimizer": model_digest(made.optimizer),
        "custom_op_library": None if library is None else file_sha256(library),
    }
    text = json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _step_model(step: OptimizerStep, graphs: Graphs, remark: Remark) -> ir.Model | None:
    """The step model, if the package is to have one and the step allows it."""
    spec, choice = graphs.task.spec, graphs.task.spec.step_model
    trained = sum(p.tensor.size for p in graphs.parameters if p.role == "trainable")
    if choice == "never" or (choice == "auto" and trained < _WORTH_A_STEP_MODEL):
        return None
    model = None if graphs.segments is not None else step.step_model(graphs)
    if model is None and choice == "always":
        needed = "several batches" if spec.accumulation_steps > 1 else "all gradients at once"
        why = f"an optimizer step needs {needed}"
        if spec.segments or not graphs.task.backend.is_stock:
            why = "it has segments" if spec.segments else "onnxruntime-training runs none"
        remark(f"the package gets no step model: {why}")
    return None if model is None else graphs.task.backend.lower(model)


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Refuse to mix a package with other things, as far as is known before it is made."""
    path = Path(folder)
    try:
        str(path.resolve()).encode()
        path.exists()
    except UnicodeEncodeError:
        what = f"the path {str(path)!r} is not UTF-8 text, and ONNX Runtime opens no other"
        raise OdtpackError("package-not-written", what) from None
    except OSError as error:
        what = f"{shortened(str(path))!r} cannot be written: {error.strerror or error}"
        raise OdtpackError("package-not-written", what) from error
    if path.exists() and not path.is_dir():
        what = f"{str(path)!r} is a file, and a package is a folder"
        raise OdtpackError("package-not-written", what)
    finish_update(path)
    entries = path.iterdir() if path.is_dir() else ()
    found = [entry.name for entry in entries if not is_stage(entry.name)]
    if not found:
        return path
    if (package := package_in(path)) is None:
        what = f"the folder {str(path)!r} is not empty and is not a package"
        raise OdtpackError("folder-not-empty", what)
    _refuse_others(path, package, filter(_USUAL_NAMES.fullmatch, found))
    return path


_USUAL_NAMES: Final = re.compile(
    r"((training|eval|optimizer|step)_model|inference_template|segment_\w+)\.onnx"
    r"|(nominal_)?checkpoint(\.data)?|segments\.weights"
)
"""Names of files of packages, whatever the model; a package in ORT format has more."""
