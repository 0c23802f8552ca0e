"""Appends a loss to a forward graph, with graph inputs for the targets that it lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack import losses
from odtpack.errors import OdtpackError, UnknownNameError
from odtpack.graph.graphs import dims_of, nodes_of, static_dims
from odtpack.graph.ops import Ops


@dataclasses.dataclass(frozen=True)
class LossInfo:
    """What a package says of its loss.

    Attributes:
        name: Name of the loss; "none" if the model came with one, "custom" for a block.
        options: Its options in force.
        roles: Role of each graph input that is one of its targets.
        metadata: What a runtime must know to check the targets.
        fixed: Parameters through which it lets no gradient.
    """

    name: str = "none"
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, losses.TargetRole] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: tuple[str, ...] = ()


def value_names(graph: ir.Graph) -> set[str]:
    """Names of all values of a graph."""
    names = {value.name or "" for value in graph.inputs} | set(graph.initializers)
    return names | {value.name or "" for node in nodes_of(graph) for value in node.outputs}


def _find(graph: ir.Graph, name: str, what: str) -> ir.Value:
    for value in (*graph.outputs, *graph.inputs, *(y for node in graph for y in node.outputs)):
        if value.name == name:
            return value
    outputs = ", ".join(repr(value.name) for value in graph.outputs)
    raise UnknownNameError(
        "unknown-value", f"{what} names {name!r}, which the graph does not have",
        hint=f"its outputs are {outputs}",
    )  # fmt: skip


def attach_loss(
    graph: ir.Graph,
    loss: losses.Loss | None,
    *,
    inputs: Sequence[str] = (),
    additional: Sequence[str] = (),
    attached: LossInfo | None = None,
) -> LossInfo:
    """Append a loss; the graph's outputs become the loss and the additional ones.

    Args:
        graph: Forward graph.
        loss: The loss; None if one of the graph's values is it.
        inputs: Names of what the loss reads, or of the loss itself; the first outputs if
            empty.
        additional: Names of further values to return.
        attached: What is known of a loss that the graph already ends in.

    Returns:
        What is known of the loss.

    Raises:
        OdtpackError: A name does not exist, or the loss does not fit the values it reads.
    """
    extra = [_find(graph, name, "additional_output_names") for name in additional]
    read = [_find(graph, name, "loss_input_names") for name in inputs]
    if loss is None:
        result, info = _own_loss(graph, read, attached), attached or LossInfo()
    else:
        result, info = _write_loss(graph, loss, read)
    if result in extra:
        raise OdtpackError(
            "named-twice",
            f"the loss {result.name!r} is returned anyway",
            hint=f"leave {result.name!r} out of the additional outputs",
        )
    graph.outputs[:] = [result, *extra]
    return info


def _own_loss(graph: ir.Graph, read: Sequence[ir.Value], attached: LossInfo | None) -> ir.Value:
    if len(read) > 1:
        raise OdtpackError(
            "too-many-loss-inputs",
            f"loss_input_names names {len(read)} values, and there is no loss to read them",
            hint="name the value that is the loss, or pass a loss (--loss cross_entropy)",
        )
    loss = read[0] if read else graph.outputs[0]
    dims = static_dims(loss)
    if dims is None or int(np.prod(dims)) != 1:
        raise OdtpackError(
            "loss-not-scalar",
            f"without a loss the first output must be the loss, a scalar; {loss.name!r} is not"
            if attached is None
            else f"the loss must be a scalar; {loss.name!r} is not",
            hint="pass a loss (--loss cross_entropy), or a model whose first output is one"
            if attached is None
            else "take its mean or sum, for example with reduction='mean'",
        )
    return loss


def _write_loss(
    graph: ir.Graph, loss: losses.Loss, read: Sequence[ir.Value]
) -> tuple[ir.Value, LossInfo]:
    """Write a loss over values of the model, with a graph input for each target that it lacks."""
    if loss.reduction == "none":
        raise OdtpackError(
            "loss-not-scalar",
            f"{loss.name} with reduction 'none' gives a number for each sample; training needs one",
        )
    count = len(loss.reads)
    values = [*(read or graph.outputs[:count])]
    if len(values) < count:
        raise OdtpackError(
            "too-few-loss-inputs",
            f"{loss.name} reads {count} values, {', '.join(loss.reads)}; "
            + (f"{len(read)} are named" if read else f"the model has {len(values)} outputs"),
            hint="name them in this order as the loss's inputs (--loss-input NAME, repeated)",
        )
    targets = loss.targets(values[:count])
    if len(values) > count + len(targets):
        wanted = ", ".join([*loss.reads, *(target.name for target in targets)])
        raise OdtpackError(
            "too-many-loss-inputs",
            f"loss_input_names names {len(values)} values; {loss.name} reads at most "
            f"{count + len(targets)}: {wanted}",
            hint="leave some out",
        )
    taken = value_names(graph)
    for target in targets[len(values) - count :]:
        if target.name in taken:
            raise OdtpackError(
                "reserved-name",
                f"the model already has {target.name!r}, the name of the input that the loss adds",
                hint="rename it in the model; if it is the target, name prediction and target "
                "as the loss's inputs",
            )
        values.append(target.value())
        graph.inputs.append(values[-1])
    fixed = loss.fixed(values[:count])
    op = Ops(graph, "loss/")
    result = loss.write(op, *values)
    if result.producer() is None:
        result = op.Identity(result)
    result.name, result.shape = op.fresh_name("loss"), ir.Shape(())
    roles = {
        value.name or "": target.role
        for target, value in zip(targets, values[count:], strict=True)
        if value in graph.inputs
    }
    metadata = loss.metadata(values[:count])
    return result, LossInfo(loss.name, loss.settings(), roles, metadata, fixed)


def return_prediction(graph: ir.Graph, name: str) -> bool:
    """Make the prediction an output, and say so, unless it is one or has no number of classes."""
    values = {value.name: value for node in graph for value in node.outputs}
    value = values.get(name)
    dims = None if value is None or value.is_graph_output() else dims_of(value)
    if value is None or dims is None or len(dims) < 2 or not isinstance(dims[1], int):
        return False
    graph.outputs.append(value)
    return True
