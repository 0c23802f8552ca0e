"""The forward model inside artifacts.

The evaluation model holds the nodes of the forward model as they were exported, with its
loss after them; only modes are changed: Dropout has lost its ``training_mode`` input, and
BatchNormalization its attribute of that name. The training model has them, among nodes that
were fused and with gradients after them. So the evaluation model is taken, and the modes are
taken over from the training model, where a value has kept its name.
"""

from __future__ import annotations

import onnx
import onnx.helper
import onnx.numpy_helper

from odtpack.errors import OdtpackError
from odtpack.model.source import Source, check_bytes
from odtpack.ort_training.artifacts import Artifacts
from odtpack.ort_training.in_place import INTERNAL_BATCH_NORM

_MEAN, _VARIANCE = ".running_mean", ".running_var"
_DROPOUTS = ("Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout")


def forward_model(artifacts: Artifacts) -> Source:
    """Return the forward model with its loss, its modes and the checkpoint's parameters."""
    source = artifacts.evaluation
    proto = onnx.ModelProto()
    proto.CopyFrom(source.proto)
    graph = proto.graph
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    modes = _Modes(artifacts.training.proto.graph, artifacts.training.where)
    nodes = {node.output[0]: node for node in graph.node if node.output}
    for name in modes.batch_norms:
        _batch_norm_on(_counterpart(nodes, name, "BatchNormalization"), opset)
    for node in graph.node:  # the reference leaves the outputs, which only training mode has
        batch_norm = node.op_type == "BatchNormalization" and node.output
        if batch_norm and node.output[0] not in modes.batch_norms:
            del node.output[1:]
    for name, switch in modes.dropouts.items():
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


class _Modes:
    """What the training model has in training mode, by output."""

    # `batch_norms`: batch normalizations that take the statistics of their batch.
    # `dropouts`: for each Dropout the tensor that switches it on, or the name of the input that
    # does.

    def __init__(self, graph: onnx.GraphProto, where: str) -> None:
        self.batch_norms: set[str] = set()
        self.dropouts: dict[str, onnx.TensorProto | str] = {}
        constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if not node.output:
                continue
            if node.op_type == "Constant":
                constants.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
            elif node.op_type == INTERNAL_BATCH_NORM:
                self.batch_norms.add(node.output[0])
            elif node.op_type == "BatchNormalization":
                if any(a.name == "training_mode" and a.i for a in node.attribute):
                    self.batch_norms.add(node.output[0])
            elif node.op_type in _DROPOUTS:
                switch = node.input[-1] if len(node.input) > 2 else ""
                constant = constants.get(switch)
                if constant is not None:
                    check_bytes(constant, where)
                off = constant is not None and not onnx.numpy_helper.to_array(constant).any()
                if switch and not off:
                    self.dropouts[node.output[0]] = switch if constant is None else constant


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
