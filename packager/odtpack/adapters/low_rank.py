"""LoRA, DoRA and (IA)3, on linear layers and embeddings."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.adapters.layers import Layer, Stored, Use, home_of, layer_name
from odtpack.autodiff.stop_gradient import stop
from odtpack.graph.graphs import LOOK_UP, Ops, dims_of, is_lifted_constant, maker, redirect, typed
from odtpack.model.exporters import module_names
from odtpack.spec import AdapterSpec

# LoRA and DoRA: the product of two thin matrices beside a frozen weight.
#
#     y = W x + s B A x                                LoRA, Hu et al., 2021
#     y = m / |W + s B A| (W x + s B A x)              DoRA, Liu et al., 2024, rows of length m
#
# A is [rank, in], B is [out, rank], and s = alpha / rank. A is drawn as ``torch.nn.Linear`` draws a
# weight, uniformly up to 1 / sqrt(in), and B is zero, as in PEFT. DoRA's norm of each row takes no
# part in the gradient, as in its section 4.3; it is computed without the sum of the weights:
#
#     |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B        (. sums over the rank)
#
# A bias is not scaled.

A, B = "lora_A.weight", "lora_B.weight"
MAGNITUDE = "lora_magnitude_vector"


def parameters(
    shape: Sequence[int], spec: AdapterSpec, random: np.random.Generator, weight: np.ndarray | None
) -> dict[str, np.ndarray]:
    """First values of the parameters on a layer, by the end of their names, float64."""
    # weight: The layer's weight, [out, in, ...], of which DoRA takes the lengths.
    outputs, kernel = shape[0], shape[2:]
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    found = {
        A: random.uniform(-bound, bound, (spec.rank, *shape[1:])),
        B: np.zeros((outputs, spec.rank, *(1 for _ in kernel))),
    }
    if weight is not None:
        rows = weight.astype(np.float64).reshape(outputs, -1)
        norms = np.sqrt(np.square(rows).sum(axis=1))
        found[MAGNITUDE] = norms.reshape(1, -1, *(1 for _ in kernel)) if kernel else norms
    return found


def apply(
    op: Ops, layer: Layer, use: Use, given: Mapping[str, ir.Value], spec: AdapterSpec
) -> None:
    """Let a node's readers read the sum; the cursor stands after the node."""
    node, base = use.node, use.result
    readers = [*base.uses()]
    data = use.data
    if spec.dropout:  # some elements are zero in training steps
        ratio, training = (op.constant(v) for v in (np.float32(spec.dropout), np.array(True)))
        # Without a seed of its own each has another mask, also in another session.
        data = op.Dropout(data, ratio, training)
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
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None and node.op_type == "Conv":
            bias = op.reshape(bias, 1, -1, *(1 for _ in (dims_of(use.weight) or ())[2:]))
        plain = base if bias is None else op.Sub(base, bias)
        total = op.Mul(op.Add(plain, added), factor)
        if bias is not None:  # which the node adds itself, and which stays as it is
            total = op.Add(total, bias)
    else:
        total = op.Add(base, added)
    take_place(base, total, readers)


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


def take_place(old: ir.Value, new: ir.Value, readers: Iterable[tuple[ir.Node, int]]) -> None:
    """Let readers of a value, and the graph's outputs, have another under its name."""
    redirect(readers, typed(new, old))
    graph = old.graph
    if graph is not None and old.is_graph_output():
        graph.outputs[:] = [new if value is old else value for value in graph.outputs]
    name = old.name
    old.name = f"{name}.base"
    new.name = name


TABLE_A, TABLE_B = "lora_embedding_A", "lora_embedding_B"


# LoRA on embeddings: the product of two thin matrices beside a frozen table.
#
#     y = W[ids] + s (A^T)[ids] B^T
#
# A is [rank, rows of the table] and zero, B is [width, rank] and drawn from a normal distribution,
# as in PEFT, whose names they have. There is no dropout.


@dataclasses.dataclass(frozen=True)
class Table(Stored):
    """An embedding; its uses share the table."""

    rows: int  # how many there are
    width: int  # numbers in a row
    uses: tuple[tuple[ir.Value, ir.Value], ...]  # what is looked up, and the rows that are found


# What onnxruntime-genai's builder looks up, where the embedding is tied to another module's matrix.
_OUTPUT = re.compile(r"/(.+)/\w+/output_0")


def find_tables(graph: ir.Graph) -> list[Table]:
    """The embeddings of a graph, in the order in which they are read first."""
    modules = module_names(graph)
    found: dict[ir.Value, list[tuple[ir.Value, ir.Value]]] = {}
    for node in graph:
        gather = _gather(node)
        source = None if gather is None else gather.inputs[0]
        ids = None if gather is None else gather.inputs[1]
        if source is not None and ids is not None:
            found.setdefault(source, []).append((ids, node.outputs[0]))
    tables = []
    for source, uses in found.items():
        widths = {(dims_of(rows) or (None,))[-1] for _, rows in uses}
        width, count = widths.pop(), (dims_of(source) or (None,))[0]
        if not widths and isinstance(width, int) and isinstance(count, int):
            name = home_of(source, maker(uses[0][1]), 0) or layer_name(str(source.name), modules)
            scope = _OUTPUT.fullmatch(name)
            name = scope[1].replace("/", ".") if scope else name
            tables.append(Table(name, source, count, width, tuple(uses)))
    return tables


def _gather(node: ir.Node) -> ir.Node | None:
    """The look-up of rows of a stored matrix that ends in a node."""
    marked = LOOK_UP in node.metadata_props
    end: ir.Node | None = node
    while marked and end is not None and end.op_type != "Gather":
        end = None if end.inputs[0] is None else end.inputs[0].producer()
    if end is None or end.op_type != "Gather" or end.domain:
        return None
    source = stored = end.inputs[0]
    if source is None or len(dims_of(source) or ()) != 2:
        return None
    turned = source.producer()  # of a product's matrix, that the embedding is tied to
    if turned is not None and turned.op_type == "Transpose":
        stored = turned.inputs[0]
    if stored is None or not stored.is_initializer():
        return None
    floats = stored.dtype is not None and stored.dtype.is_floating_point()
    plain = floats and not is_lifted_constant(stored)
    return end if end.attributes.get_int("axis", 0) == 0 and (plain or marked) else None


def apply_to_table(op: Ops, table: Table, given: Mapping[str, ir.Value], spec: AdapterSpec) -> None:
    """Let the nodes that read rows of the table read the sum."""
    for ids, rows in table.uses:
        readers = [*rows.uses()]
        with op.after(maker(rows)):
            through = op.Gather(op.transpose(given[TABLE_A], 1, 0), ids, axis=0)
            added = op.MatMul(through, op.transpose(given[TABLE_B], 1, 0))
            total = op.Add(rows, op.Mul(added, spec.scaling))
        take_place(rows, total, readers)


# (IA)3: a factor for each channel of a layer (Liu et al., 2022).
#
#     y = l * (W x + b)        or, on feedforward layers,        y = W (l * x) + b
#
# l begins as one. Its shape is PEFT's: [out, 1], and [1, in] on feedforward layers; of a
# convolution [1, out, 1, 1] and [1, in, 1, 1].

FACTORS = "ia3_l"


def apply_ia3(
    op: Ops, layer: Layer, use: Use, given: Mapping[str, ir.Value], spec: AdapterSpec
) -> None:
    """Scale what a layer reads, or what it gives."""
    feedforward = layer.matches(spec.feedforward)
    what, readers = use.data if feedforward else use.end, [*use.end.uses()]
    with op.before(use.node) if feedforward else op.after(maker(use.end)):
        factors = given[FACTORS] if layer.shape[2:] else op.reshape(given[FACTORS], -1)
        scaled = op.Mul(what, factors)
    if not feedforward:
        take_place(use.end, scaled, readers)
        return
    standing = use.result.producer()
    if standing is not None and standing is not use.node:  # its actual value lacks the factors
        standing.replace_input_with(0, use.node.outputs[0])
    use.node.replace_input_with(0, scaled)
