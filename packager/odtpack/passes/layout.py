"""Chooses the order of axes and the form of convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from odtpack.autodiff import windows
from odtpack.autodiff.context import Context
from odtpack.autodiff.windows import conv_windows
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops, static_dims
from odtpack_runtime.session.graph_signature import OWN_TYPE_SUFFIX

# Keeps channels in front through what lies between convolutions written as products.
#
# A convolution on a small plane is a product with channels first, [C, N, P], and transposes its
# result to [N, C, h, w] (:mod:`odtpack.autodiff.windows`); the next one transposes it
# back. What lies between them, activations, masks, residual sums, normalizations, does not mind:
#
# 1. An elementwise node whose operands are such results, numbers or [C, 1, 1] works on what
#    they were before their transposes.
# 2. So does an inference-mode normalization, as [1, C, N P].
# 3. A sum over space, and then over samples, is one over both, which lie together.
# 4. A transpose back to channels first is gone.
#
# A node is left as it is if its result is read by others alone: then it would be transposed
# instead of its operand.

_ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Div", "Clip", "Relu", "HardSigmoid", "HardSwish", "Sigmoid"),
    *("Cast", "Greater", "Less", "And"),
}
_SWAP = (1, 0, 2)


@dataclasses.dataclass(frozen=True)
class _Lying:
    """A value [N, C, size...] and the same with channels first, [C, N, P]."""

    first: ir.Value
    channels: int
    size: tuple[int, ...]


def keep_channels_first(op: Ops, graph: ir.Graph) -> None:
    """Rewrite ``graph``, in topological order; what is not read any more stays for others."""
    nodes = [node for node in graph if not node.domain]
    wanted = _wanted(nodes)
    lying: dict[ir.Value, _Lying] = {}
    for node in nodes:
        output = node.outputs[0]
        found = _result(node)
        if found is not None:
            lying[output] = found
            continue
        with op.before(node):
            back, summed = _back(node, lying), _summed(node, lying)
            if back is not None:
                graphs.replace(output, op.Identity(back.first), [node])
            elif summed is not None:  # over samples and space, which lie together
                # The node stays: its result may be a gradient.
                node.replace_input_with(0, summed.first)
                if len(node.inputs) > 1:
                    node.replace_input_with(1, op.ints(1, 2))
                else:
                    node.attributes["axes"] = ir.AttrInt64s("axes", [1, 2])
            elif _is(node, "Size") and node.inputs[0] in lying:
                graphs.replace(output, op.Size(lying[node.inputs[0]].first), [node])
            elif output in wanted:
                _move(op, node, lying)


def _result(node: ir.Node) -> _Lying | None:
    """What a convolution on a small plane ends in: Reshape(Transpose(first))."""
    swap = graphs.producer(node.inputs[0], "Transpose") if _is(node, "Reshape") else None
    if swap is None or not _swaps(swap):
        return None
    shape, first = _ints(node.inputs[1]), swap.inputs[0]
    if first is None or len(shape) != 4 or shape[0] != -1 or min(shape[1:]) < 1:
        return None
    return _Lying(first, shape[1], tuple(shape[2:]))


def _wanted(nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """Results of nodes that can be moved, and that no one else would have to transpose."""
    # Where one reader takes channels first, others may be left: there is one transpose either way.
    able: dict[ir.Value, _Lying] = {}
    for node in nodes:
        found = _result(node) or _operand(node, able)
        if found is not None:
            able[node.outputs[0]] = found
    wanted: set[ir.Value] = set()
    for node in reversed(nodes):
        output = node.outputs[0]
        if output not in able or _result(node) or output.is_graph_output():
            continue
        readers = list(output.consumers())
        if any(_all_users(each, "Reshape", _back, able) for each in readers) or (
            readers
            and all(
                reader.outputs[0] in wanted
                or _all_users(reader, "ReduceSum", _summed, able)
                or _is(reader, "Size")
                for reader in readers
            )
        ):
            wanted.add(output)
    return wanted


def _all_users(
    reader: ir.Node,
    op_type: str,
    taken: Callable[[ir.Node, Mapping[ir.Value, _Lying]], _Lying | None],
    able: Mapping[ir.Value, _Lying],
) -> bool:
    """Whether all that reads a node of a type takes what lies channels first."""
    users = list(reader.outputs[0].consumers()) if _is(reader, op_type) else []
    return bool(users) and all(taken(user, able) is not None for user in users)


def _operand(node: ir.Node, lying: Mapping[ir.Value, _Lying]) -> _Lying | None:
    """How the operands of a node lie that can be moved; None if it cannot."""
    found = next((lying[v] for v in node.inputs if v is not None and v in lying), None)
    if found is None:
        return None
    if _is(node, "BatchNormalization"):
        first = node.inputs[0] in lying and not any(v in lying for v in node.inputs[1:])
        return found if first and len(node.outputs) == 1 else None
    if not _is(node, *_ELEMENTWISE):
        return None
    for value in node.inputs:
        view = graphs.producer(value, "Reshape")  # to [C, 1, 1], which both layouts take alike
        per_channel = view is not None and _ints(view.inputs[1]) == [-1, 1, 1]
        if value is None or graphs.scalar(value) is not None or per_channel:
            continue
        other = lying.get(value)
        if other is None or (other.channels, other.size) != (found.channels, found.size):
            return None
    return found


def _move(op: Ops, node: ir.Node, lying: dict[ir.Value, _Lying]) -> None:
    """Write a node anew with channels first, and its result transposed for who wants it so."""
    found = _operand(node, lying)
    if found is None:
        return
    output, (height, width) = node.outputs[0], found.size
    inputs = [lying[v].first if v is not None and v in lying else v for v in node.inputs]
    if _is(node, "BatchNormalization"):
        inputs[0] = op.reshape(found.first, 1, found.channels, -1)
    (first,) = op.again(node, inputs)
    if _is(node, "BatchNormalization"):
        first = op.reshape(first, found.channels, -1, height * width)
    first.type = output.type
    result = op.reshape(op.transpose(first, *_SWAP), -1, found.channels, height, width)
    graphs.replace(output, result, [node])
    lying[result] = _Lying(first, found.channels, found.size)


def _back(node: ir.Node, lying: Mapping[ir.Value, _Lying]) -> _Lying | None:
    """What a Transpose(Reshape(value)) gives channels first that has them first already."""
    if not _is(node, "Transpose") or not _swaps(node):
        return None
    flat = graphs.producer(node.inputs[0], "Reshape")
    found = None if flat is None or flat.inputs[0] is None else lying.get(flat.inputs[0])
    if flat is None or found is None:
        return None
    wanted = [-1, found.channels, found.size[0] * found.size[1]]
    return found if _ints(flat.inputs[1]) == wanted else None


def _summed(node: ir.Node, lying: Mapping[ir.Value, _Lying]) -> _Lying | None:
    """What is summed over space and then, by this node, over samples."""
    over_space = graphs.producer(node.inputs[0], "ReduceSum") if _is(node, "ReduceSum") else None
    if over_space is None or over_space.inputs[0] is None:
        return None
    for each, wanted in ((over_space, [2, 3]), (node, [0])):
        axes = list(each.attributes.get_ints("axes", ()) or ())
        axes = _ints(each.inputs[1]) if len(each.inputs) > 1 else axes
        if each.attributes.get_int("keepdims", 1) or axes != wanted:
            return None
    return lying.get(over_space.inputs[0])


def _is(node: ir.Node, *op_types: str) -> bool:
    return node.op_type in op_types and not node.domain


def _swaps(node: ir.Node) -> bool:
    return list(node.attributes.get_ints("perm", ()) or ()) == list(_SWAP)


def _ints(value: ir.Value | None) -> list[int]:
    array = graphs.constant(value)
    return [] if array is None else [int(i) for i in array.reshape(-1)]


# Rewrites forward convolutions on small planes as matrix products (autodiff.windows).
#
# Runs after differentiation, whose rule for Conv takes the same form there. Convolutions
# whose weight is a constant are left alone: the runtime repacks those for its own kernels.


def small_convolutions(op: Ops, graph: ir.Graph) -> None:
    """Rewrite every convolution that :mod:`odtpack.autodiff.windows` suits."""
    for node in list(graph):
        if node.op_type != "Conv" or node.domain or not _known(node):
            continue
        ctx = Context(node, op, [], [])
        win = conv_windows(ctx)
        if not (windows.suits_pointwise(win) or windows.suits_depthwise(win)):
            continue
        product = windows.pointwise if windows.suits_pointwise(win) else windows.depthwise
        with op.before(node), windows.region(op, "forward", win):
            y = product(op, win, ctx.x(), ctx.x(1))
            bias = ctx.maybe_x(2)
            if bias is not None:
                y = op.Add(y, op.reshape(bias, win.features, 1, 1))
            y = windows.samples_first(op, y, win.features, win.out)
        graphs.replace(node.outputs[0], y, [node])


def _known(node: ir.Node) -> bool:
    """Whether the weight is an input, widened maybe, and everything but the batch is known."""
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None:
        return False
    if not (w.is_graph_input() or str(w.name).endswith(OWN_TYPE_SUFFIX)):
        return False
    if x.dtype != ir.DataType.FLOAT or x.shape is None or static_dims(w) is None:
        return False
    return all(isinstance(dim, int) for dim in x.shape[1:])
