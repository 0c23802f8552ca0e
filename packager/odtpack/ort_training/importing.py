"""``odtpack import``: a package from artifacts of onnxruntime-training.

The forward model is taken out of the artifacts, differentiated again, and
given the names that it had: inputs, outputs and parameters are what they were.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path

import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir

from odtpack import losses
from odtpack.errors import OdtpackError, located
from odtpack.graph import graphs
from odtpack.graph.graphs import dims_of
from odtpack.model.loading import load_source, refuse_bfloat16
from odtpack.model.source import Source, check_bytes
from odtpack.optimizers import Clip, Optimizer
from odtpack.ort_training.artifacts import Artifacts, open_artifacts
from odtpack.ort_training.backend import INTERNAL_BATCH_NORM, carried_state, read_optimizer
from odtpack.package.task import Graphs, LossInfo, Remark, Task, paused_collector, resolve_update
from odtpack.package.training import build_graphs, read_by
from odtpack.package.write import Made, check_folder, write_package
from odtpack.spec import BuildSpec
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.package.manifest import Manifest


@paused_collector()
def import_artifacts(
    artifacts: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    prefix: str | None = None,
    remark: Remark = warnings.warn,
) -> Manifest:
    """Turn artifacts of onnxruntime-training 1.19 into a package that goes on training.

    Parameters, optimizer state (moments, step, learning rate) and properties come from the
    checkpoint. Batch normalization and Dropout train as they did there.

    Args:
        artifacts: Folder that ``generate_artifacts`` wrote.
        folder: Where the package goes: a folder that does not exist, is empty, or holds a
            package, whose files are replaced. Its files have no prefix.
        checkpoint: Checkpoint in the place of the folder's, for example one that a device
            saved.
        prefix: Start of the artifacts' file names; found out if there is one.
        remark: Told what is different in the package; warns by default.

    Returns:
        The manifest as written.

    Raises:
        OdtpackError: The folder does not hold artifacts of one model, the checkpoint is not
            one of this model, or an operator has no gradient. Nothing has been written then.
    """
    destination = check_folder(folder)
    source = Path(artifacts)
    with located(str(source)):
        opened = open_artifacts(
            source, prefix=prefix, checkpoint=None if checkpoint is None else Path(checkpoint)
        )
        optimizer, clip = read_optimizer(opened.optimizer)
        state = carried_state(opened.checkpoint, optimizer, str(opened.checkpoint_path))
        graphs = _differentiate(opened, optimizer, clip, remark)
        resolved = resolve_update(graphs)
    assert resolved is not None  # noqa: S101 - there is an optimizer
    carried = CheckpointData({}, {}, optimizer=state, properties=opened.checkpoint.properties)
    made = Made(resolved, resolved.model(graphs), carried=carried)
    manifest = write_package(graphs, made, destination)
    assert manifest is not None  # noqa: S101 - there is none only without an optimizer
    return manifest


def _differentiate(
    artifacts: Artifacts, optimizer: Optimizer, clip: Clip, remark: Remark
) -> Graphs:
    model = load_source(forward_model(artifacts), artifacts.parameters, as_stored=True)
    refuse_bfloat16(model.graph)
    graph = model.graph
    name = graph.outputs[0].name or ""
    names = [value.name or "" for value in graph.outputs]
    if again := [each for each in names if names.count(each) > 1]:
        remark(f"the artifacts return {again[0]!r} twice, and the package once")
    additional = tuple(dict.fromkeys(names[1:]))
    manifest = artifacts.manifest
    known = None if manifest is None else loss_of(manifest)
    if known is not None and manifest is not None:
        additional = tuple(each.name for each in manifest.outputs[1:])
    found = None if known is not None else take_loss(graph)
    graph.outputs.extend(_predictions(graph))
    read = () if found is None else (found.prediction.name or "", found.target.name or "")
    spec = BuildSpec(
        loss_inputs=read,
        outputs=additional,
        prediction=known is not None,
        clip_norm=clip.norm,
        nominal=artifacts.nominal,
    )
    task = Task(
        model,
        tuple(artifacts.checkpoint.trainable),
        tuple(artifacts.checkpoint.frozen),
        None if found is None else found.loss,
        spec,
        optimizer,
        known,
    )
    graphs = build_graphs(task)
    for each in (graphs.training, graphs.evaluation):
        each.graph.outputs[0].name = name  # its nodes may be new
    return graphs


def _predictions(graph: ir.Graph) -> list[ir.Value]:
    """What artifacts compute from data for inference: what odtpack's loss or no node reads."""
    data = {value.name for value in graph.inputs}
    nodes = [n for n in graph if all((v.name or "").startswith("loss/") for v in n.outputs)]
    read = [v for n in nodes for v in n.inputs if v is not None and v.producer() not in nodes]
    ends = [n for n in graph if not any(v.uses() or v.is_graph_output() for v in n.outputs)]
    found = dict.fromkeys([*(v for v in read if v.producer()), *(n.outputs[0] for n in ends)])
    return [
        value
        for value in found
        if isinstance(value.type, ir.TensorType)
        and not value.is_graph_output()
        and read_by(value) & data
    ]


def loss_of(manifest: Manifest) -> LossInfo | None:
    """What the manifest of a package for onnxruntime-training says of its loss."""
    if manifest.loss == "none":
        return None
    roles: dict[str, losses.TargetRole] = {}
    facts: dict[str, dict[str, int]] = {}
    for each in manifest.inputs:
        if each.role == "data":
            continue
        roles[each.name] = each.role
        known = {"class_count": each.class_count, "ignore_index": each.ignore_index}
        if each.role == "labels":
            facts[each.name] = {k: v for k, v in known.items() if v is not None}
    returned = manifest.evaluation_outputs
    prediction = returned[0].name if returned else ""
    options = manifest.loss_options or {}
    return LossInfo(manifest.loss, options, roles, facts, prediction=prediction)


# The forward model inside artifacts.
#
# The evaluation model holds the nodes of the forward model as they were exported, with its
# loss after them; only modes are changed: Dropout has lost its ``training_mode`` input, and
# BatchNormalization its attribute of that name. The training model has them, among nodes that
# were fused and with gradients after them. So the evaluation model is taken, and the modes are
# taken over from the training model, where a value has kept its name.

_MEAN, _VARIANCE = ".running_mean", ".running_var"
_DROPOUTS = ("Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout")


def forward_model(artifacts: Artifacts) -> Source:
    """Return the forward model with its loss, its modes and the checkpoint's parameters."""
    source = artifacts.evaluation
    proto = onnx.ModelProto()
    proto.CopyFrom(source.proto)
    graph = proto.graph
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    batch_norms, dropouts = _modes(artifacts.training.proto.graph, artifacts.training.where)
    nodes = {node.output[0]: node for node in graph.node if node.output}
    for name in batch_norms:
        _batch_norm_on(_counterpart(nodes, name, "BatchNormalization"), opset)
    for node in graph.node:  # the reference leaves the outputs, which only training mode has
        batch_norm = node.op_type == "BatchNormalization" and node.output
        if batch_norm and node.output[0] not in batch_norms:
            del node.output[1:]
    for name, switch in dropouts.items():
        _dropout_on(graph, _counterpart(nodes, name, "Dropout"), switch)
    arrays = dict(source.arrays)
    parameters = artifacts.parameters
    kept = [value for value in graph.input if value.name not in parameters]
    order = [value.name for value in graph.input if value.name in parameters]
    del graph.input[:]
    graph.input.extend(kept)
    for name in order:
        array = parameters[name]
        tensor = graph.initializer.add()
        tensor.name, tensor.dims[:] = name, [0]
        tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        arrays[name] = array
    return Source(proto, source.where, arrays)


def _modes(
    graph: onnx.GraphProto, where: str
) -> tuple[set[str], dict[str, onnx.TensorProto | str]]:
    """What the training model has in training mode, by output: normalizations and Dropouts."""
    # Of each Dropout the tensor that switches it on, or the name of the input that does.
    batch_norms: set[str] = set()
    dropouts: dict[str, onnx.TensorProto | str] = {}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in (node for node in graph.node if node.output):
        if node.op_type == "Constant":
            constants.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        elif node.op_type == INTERNAL_BATCH_NORM or (
            node.op_type == "BatchNormalization"
            and any(a.name == "training_mode" and a.i for a in node.attribute)
        ):
            batch_norms.add(node.output[0])
        elif node.op_type in _DROPOUTS:
            switch = node.input[-1] if len(node.input) > 2 else ""
            constant = constants.get(switch)
            if constant is not None:
                check_bytes(constant, where)
            off = constant is not None and not onnx.numpy_helper.to_array(constant).any()
            if switch and not off:
                dropouts[node.output[0]] = switch if constant is None else constant
    return batch_norms, dropouts


def _counterpart(nodes: dict[str, onnx.NodeProto], name: str, op_type: str) -> onnx.NodeProto:
    node = nodes.get(name)
    if node is None or node.op_type != op_type:
        raise OdtpackError(
            "artifacts-mixed",
            f"the training model computes {name!r} with a {op_type}, and the evaluation model "
            "does not",
            hint="put the files of one call of generate_artifacts into the folder, or build a "
            "package from the forward model",
        )
    return node


def _batch_norm_on(node: onnx.NodeProto, opset: int) -> None:
    """Let a batch normalization take the statistics of its batch."""
    attributes = [a for a in node.attribute if a.name != "training_mode"]
    del node.attribute[:]
    node.attribute.extend(attributes)
    # Until opset 13 the outputs say so: besides the running statistics two that are not used.
    outputs: tuple[str, ...] = (_MEAN, _VARIANCE, ".saved_mean", ".saved_var")
    if opset >= 14:
        node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
        outputs = outputs[:2]
    del node.output[1:]
    node.output.extend(f"{node.output[0]}{suffix}" for suffix in outputs)


def _dropout_on(
    graph: onnx.GraphProto, node: onnx.NodeProto, switch: onnx.TensorProto | str
) -> None:
    """Give a Dropout the input that switches it on."""
    if isinstance(switch, onnx.TensorProto):
        name = f"{node.output[0]}.training_mode"
        tensor = graph.initializer.add()
        tensor.CopyFrom(switch)
        tensor.name = name
    else:
        name = switch
    ratio = list(node.input[1:2]) or [""]
    node.input[:] = [*node.input[:1], *ratio, name]


# Recognises the losses of onnxruntime-training at the end of a forward graph.


@dataclasses.dataclass(frozen=True)
class FoundLoss:
    """A loss, and the values that it reads."""

    loss: losses.Loss
    prediction: ir.Value
    target: ir.Value


def take_loss(graph: ir.Graph) -> FoundLoss | None:
    """Recognise the loss that a graph's first output is, and cut it off."""
    # Afterwards the first output is the prediction. What stays as it is: a loss that is none of the
    # four, has weights that are not constant, or hands an intermediate result to something else.
    end = graph.outputs[0].producer()
    found = None if end is None else _recognise(end)
    if end is None or found is None or graph.outputs[0].uses():
        return None
    inside = _between(graph, end, found)
    if not graphs.private(inside, end) or graph.outputs[0] in graph.outputs[1:]:
        return None
    graph.outputs[0] = found.prediction
    for node in inside:
        graph.remove(node, safe=True)
    if found.target in graph.inputs and found.loss.name == "cross_entropy":
        # The reference leaves out the last axis of the prediction, and not the classes.
        found.target.shape = found.loss.targets([found.prediction])[0].value().shape
    return found


def _recognise(end: ir.Node) -> FoundLoss | None:
    if graphs.producer(end.outputs[0], "SoftmaxCrossEntropyLoss") is not None:
        return _cross_entropy(end)
    reductions = {"ReduceMean": "mean", "ReduceSum": "sum"}
    if graphs.producer(end.outputs[0], *reductions) is None or len(end.inputs) != 1:
        return None
    if end.attributes.get_int("keepdims", 1) or "axes" in end.attributes:
        return None
    options: dict[str, object] = {"reduction": reductions[end.op_type]}
    terms = graphs.producer(end.inputs[0], "Pow", "Abs", "Neg")
    if terms is None:
        return None
    if terms.op_type == "Neg":
        return _binary_cross_entropy(terms, options)
    difference = graphs.producer(terms.inputs[0], "Sub")
    if difference is None or (terms.op_type == "Pow" and not graphs.is_scalar(terms.inputs[1], 2)):
        return None
    prediction, target = difference.inputs
    if prediction is not None and prediction.is_graph_input():  # the difference the other way round
        prediction, target = target, prediction
    return _found("mse" if terms.op_type == "Pow" else "l1", options, prediction, target)


def _cross_entropy(node: ir.Node) -> FoundLoss | None:
    """Read the options of a SoftmaxCrossEntropyLoss, whose axis of classes is 1."""
    options: dict[str, object] = {
        "layout": "NC",
        "reduction": node.attributes.get_string("reduction", "mean"),
    }
    if "ignore_index" in node.attributes:
        options["ignore_index"] = node.attributes.get_int("ignore_index")
    if len(node.inputs) > 2:
        weight = node.inputs[2]
        values = None if weight is None else ir.convenience.get_const_tensor(weight)
        if values is None or options["reduction"] == "none":
            return None
        options["weight"] = tuple(values.numpy().tolist())
    return _found("cross_entropy", options, *node.inputs[:2])


def _binary_cross_entropy(negated: ir.Node, options: dict[str, object]) -> FoundLoss | None:
    """Match -(t log s + (1 - t) log(1 - s)) with s = Sigmoid(x)."""
    total = graphs.producer(negated.inputs[0], "Add")
    if total is None:
        return None
    positive, negative = (graphs.producer(value, "Mul") for value in total.inputs)
    if positive is None or negative is None:
        return None
    log, target = graphs.producer(positive.inputs[0], "Log"), positive.inputs[1]
    log_rest = graphs.producer(negative.inputs[0], "Log")
    if log is None or log_rest is None:
        return None
    sigmoid = graphs.producer(log.inputs[0], "Sigmoid")
    if (
        sigmoid is None
        or _complement(log_rest.inputs[0]) is not sigmoid.outputs[0]
        or _complement(negative.inputs[1]) is not target
    ):
        return None
    return _found("bce_with_logits", options, sigmoid.inputs[0], target)


def _complement(value: ir.Value | None) -> ir.Value | None:
    """X, where the value is 1 - x."""
    node = graphs.producer(value, "Sub")
    return node.inputs[1] if node is not None and graphs.is_scalar(node.inputs[0], 1) else None


def _found(
    name: str, options: dict[str, object], prediction: ir.Value | None, target: ir.Value | None
) -> FoundLoss | None:
    if prediction is None or target is None or dims_of(prediction) is None:
        return None
    return FoundLoss(losses.make_loss(name, options), prediction, target)


def _between(graph: ir.Graph, end: ir.Node, found: FoundLoss) -> list[ir.Node]:
    """Nodes of the loss, last first: what the end reads, back to prediction and target."""
    stop = (found.prediction.producer(), found.target.producer())
    inside, waiting = {end}, [end]
    while waiting:
        for value in waiting.pop().inputs:
            before = None if value is None else value.producer()
            if before is not None and before not in stop and before not in inside:
                inside.add(before)
                waiting.append(before)
    return [node for node in reversed(graph) if node in inside]
