"""LoRA and DoRA: the product of two thin matrices beside a frozen weight.

    y = W x + s B A x                                LoRA, Hu et al., 2021
    y = m / |W + s B A| (W x + s B A x)              DoRA, Liu et al., 2024, rows of length m

A is [rank, in], B is [out, rank], and s = alpha / rank. A is drawn as ``torch.nn.Linear`` draws a
weight, uniformly up to 1 / sqrt(in), and B is zero, as in PEFT. DoRA's norm of each row takes no
part in the gradient, as in its section 4.3; it is computed without the sum of the weights:

    |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B        (. sums over the rank)

A bias is not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from odtpack.adapters.layers import Layer, Use
from odtpack.autodiff.stop_gradient import stop
from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops
from odtpack.spec import AdapterSpec

A, B = "lora_A.weight", "lora_B.weight"
MAGNITUDE = "lora_magnitude_vector"


def parameters(
    layer: Layer, spec: AdapterSpec, random: np.random.Generator, weight: np.ndarray | None
) -> dict[str, np.ndarray]:
    """First values of the parameters on a layer, by the end of their names, float64.

    Args:
        layer: The layer.
        spec: The adapter.
        random: Where A is drawn from.
        weight: The layer's weight, [out, in, ...], of which DoRA takes the lengths.
    """
    kernel = layer.shape[2:]
    bound = 1 / math.sqrt(math.prod(layer.shape[1:]))
    found = {
        A: random.uniform(-bound, bound, (spec.rank, *layer.shape[1:])),
        B: np.zeros((layer.outputs, spec.rank, *(1 for _ in kernel))),
    }
    if weight is not None:
        rows = weight.astype(np.float64).reshape(layer.outputs, -1)
        norms = np.sqrt(np.square(rows).sum(axis=1))
        found[MAGNITUDE] = norms.reshape(1, -1, *(1 for _ in kernel)) if kernel else norms
    return found


def apply(
    op: Ops, layer: Layer, use: Use, given: Mapping[str, ir.Value], spec: AdapterSpec
) -> None:
    """Let a node's readers read the sum; the cursor stands after the node."""
    node, base = use.node, use.node.outputs[0]
    readers = [*base.uses()]
    data = _dropped(op, use.data, spec)
    if node.op_type == "Conv":
        # B's kernel is of size one, so that it sees what A's gives.
        settings = {k: a.value for k, a in node.attributes.items() if k != "group"}
        through = op.emit("Conv", [data, given[A]], **settings)[0]
        added = op.Conv(through, given[B])
    else:
        through = op.MatMul(data, op.transpose(given[A], 1, 0))
        added = op.MatMul(through, op.transpose(given[B], 1, 0))
    added = op.Mul(added, spec.scaling)
    if MAGNITUDE in given:
        factor = op.Div(given[MAGNITUDE], stop(op, _norm(op, layer, use, given, spec)))
        total = _scaled(op, use, added, factor)
    else:
        total = op.Add(base, added)
    take_place(base, total, readers)


def _dropped(op: Ops, data: ir.Value, spec: AdapterSpec) -> ir.Value:
    """The data with some elements zero in training steps."""
    if not spec.dropout:
        return data
    ratio = op.constant(np.array(spec.dropout, np.float32))
    dropped: ir.Value = op.emit(
        "Dropout", [data, ratio, op.constant(np.array(True))], seed=spec.seed
    )[0]
    return dropped


def _norm(
    op: Ops, layer: Layer, use: Use, given: Mapping[str, ir.Value], spec: AdapterSpec
) -> ir.Value:
    """|W + s B A| of each row, in the shape of the magnitudes."""
    rank, weight = spec.rank, use.weight
    a, b = (op.reshape(given[name], size, -1) for name, size in ((A, rank), (B, layer.outputs)))
    if use.outputs_first:
        rows = op.reshape(weight, layer.outputs, -1) if len(layer.shape) > 2 else weight
        cross = op.MatMul(rows, op.transpose(a, 1, 0))
        squares = op.reduce_sum(op.Mul(rows, rows), [1])
    else:
        cross = op.transpose(op.MatMul(a, weight), 1, 0)
        squares = op.reshape(op.reduce_sum(op.Mul(weight, weight), [0]), -1, 1)
    inner = op.MatMul(b, op.MatMul(a, op.transpose(a, 1, 0)))
    mixed = op.Add(op.Mul(cross, 2 * spec.scaling), op.Mul(inner, spec.scaling**2))
    square = op.Add(squares, op.reduce_sum(op.Mul(mixed, b), [1]))
    return op.reshape_like(op.Sqrt(square), given[MAGNITUDE])


def _scaled(op: Ops, use: Use, added: ir.Value, factor: ir.Value) -> ir.Value:
    """The sum times the factor; a bias that the node adds itself stays as it is."""
    base = use.node.outputs[0]
    bias = use.node.inputs[2] if len(use.node.inputs) > 2 else None
    if bias is None:
        return op.Mul(op.Add(base, added), factor)
    if use.node.op_type == "Conv":
        bias = op.reshape(bias, 1, -1, *(1 for _ in (dims_of(use.weight) or ())[2:]))
    return op.Add(op.Mul(op.Add(op.Sub(base, bias), added), factor), bias)


def take_place(old: ir.Value, new: ir.Value, readers: Iterable[tuple[ir.Node, int]]) -> None:
    """Let readers of a value, and the graph's outputs, have another under its name."""
    new.type, new.shape = old.type, old.shape
    for reader, index in readers:
        reader.replace_input_with(index, new)
    graph = old.graph
    if graph is not None and old.is_graph_output():
        outputs = [new if value is old else value for value in graph.outputs]
        graph.outputs[:] = outputs
    name = old.name
    old.name = f"{name}.base"
    new.name = name
