"""Recognises the losses of onnxruntime-training at the end of a forward graph."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from odtpack import losses
from odtpack.graph import graphs
from odtpack.graph.graphs import dims_of


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
    return _found("mse" if terms.op_type == "Pow" else "l1", options, *difference.inputs)


def _cross_entropy(node: ir.Node) -> FoundLoss | None:
    """Read the options of a SoftmaxCrossEntropyLoss, whose axis of classes is 1."""
    options: dict[str, object] = {"reduction": node.attributes.get_string("reduction", "mean")}
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
    name: str,
    options: dict[str, object],
    prediction: ir.Value | None,
    target: ir.Value | None,
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
