"""Wraps updates, and groups of rows, into functions that a library may have kernels for.

The last stage before a model is written: everything else sees the plain nodes. A function's body is
these nodes, in their order: it is what a session runs that does not know the library, and what the
kernel's program is read from (:mod:`odtpack_runtime.package.native`).

1. A group ends in an output of its graph, or in what a node with branches cuts up: an updated
   parameter, an accumulated gradient. What it reads was there before: nothing lives longer for it.
2. An elementwise node belongs to it if all that read its result do, or come after the end because
   they read that too. An output of the model, as a new moment is, is no obstacle.
3. What may be written over is proven again for the nodes that functions are.
4. All results have one known shape, float32 in and out. Scalars and rows are read repeatedly.

What else is wrapped, :mod:`.native_groups` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import onnx.helper
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.graph.graphs import Dims, Ops, dims_of, drop_unused_constants, reads, subgraphs
from odtpack.graph.inference import NodeInference, type_initializers
from odtpack.passes import aliases, native_groups
from odtpack.passes.compact import all_graphs, drop_types
from odtpack.passes.native_groups import Group, axes_of, row_groups, trial_sizes
from odtpack_runtime.package import native as kernels
from odtpack_runtime.package.native import (
    DEPTHWISE,
    ELEMENTWISE,
    ELEMENTWISE_OPERATORS,
    MOST_INPUTS,
    MOST_NODES,
    SLOTS,
    NotAProgramError,
    depthwise_computes,
    program_of,
)
from odtpack_runtime.session.graph_signature import UPDATE_SUFFIX
from odtpack_runtime.session.native import DOMAIN

VERSION: Final = 1  # of the domain
_LEAST: Final = 256  # elements from which on a kernel is worth its call, as far as they are known
_FUNCTION_IR: Final = 8  # the first IR version that has functions
_EXACT: Final = {*ELEMENTWISE_OPERATORS} - {"Exp", "Erf", "Tanh", "Sigmoid", "Log"}
"""Operators of updates, which are those of the nodes to the bit."""
_KINDS = {ir.DataType.UINT8: "Codes", ir.DataType.INT8: "SignedCodes"}
_NUMBERS = (ir.DataType.FLOAT, ir.DataType.BOOL)


def wrap(model: ir.Model) -> ir.Model:
    """A copy of a finished model with its updates as functions."""
    model = model.clone()
    graphs = list(all_graphs(model.graph))
    _complete_types(model, graphs)
    sizes = trial_sizes(model)
    wrapper = _Wrapper(model)
    for graph in graphs:
        for ways in native_groups.convolution_groups(Ops(model.graph), graph):
            wrapper.wrap_convolution(graph, ways)
        for product in native_groups.product_groups(graph):
            wrapper.wrap_product(graph, product)
        for node in list(native_groups.transposed_products(Ops(model.graph), graph)):
            wrapper.wrap_transposed(graph, node)
    wrapper.wrap_normalizations(model.graph)
    while common_passes.RemoveUnusedNodesPass()(model).modified:
        pass  # what only a branch's nodes read goes after them
    for graph in graphs:
        for group in _groups(graph):
            wrapper.wrap_group(graph, group, dims_of)
    rows = list(row_groups(model.graph, sizes)) if sizes else []
    for group in rows:
        wrapper.wrap_group(model.graph, group, sizes.get)
    if rows:
        model.graph.sort()
    common_passes.RemoveUnusedNodesPass()(model)  # and the constants that lie in bodies now
    drop_unused_constants(model.graph)  # the pass leaves those of subgraphs
    inputs = {str(value.name): value for value in model.graph.inputs}
    for value in model.graph.outputs if wrapper.bodies else ():
        for suffix in (UPDATE_SUFFIX, ".out"):
            source = inputs.get(str(value.name).removesuffix(suffix))
            if source is not None and source is not value:
                aliases.verify(model.graph, source, value)
    model.graph.opset_imports[DOMAIN] = VERSION
    model.ir_version = max(model.ir_version, _FUNCTION_IR)
    drop_types(model.graph)
    return model


def _complete_types(model: ir.Model, graphs: Sequence[ir.Graph]) -> None:
    """Write down types and shapes that follow from those of a node's inputs."""
    inference = NodeInference(dict(model.graph.opset_imports))
    for graph in graphs:
        type_initializers(graph)
        for node in graph:
            for value, found in zip(node.outputs, inference.outputs(node), strict=True):
                if found is not None and (value.type is None or value.shape is None):
                    dtype, dims = found
                    value.type = value.type or ir.TensorType(dtype)
                    value.shape = value.shape or (None if dims is None else ir.Shape(dims))


def _shape(node: ir.Node) -> Dims | None:
    """The shape of what a node computes, if it may belong to a group; None if not."""
    if node.domain or node.op_type not in _EXACT or len(node.outputs) != 1:
        return None
    dims, values = dims_of(node.outputs[0]), (*node.inputs, *node.outputs)
    if any(v is None or v.dtype not in _NUMBERS for v in values) or not dims:
        return None
    if any(dim is None or str(dim).startswith("unk__") for dim in dims):
        return None  # equal names of inference are not equal sizes
    sizes = [dim for dim in dims if isinstance(dim, int)]
    if math.prod(sizes) < _LEAST and len(sizes) == len(dims):
        return None
    if node.op_type == "Gemm":  # k x + y
        shapes = [dims_of(value) for value in node.inputs if value is not None]
        return dims if shapes == [(1, 1), dims, dims] else None
    return dims


def _groups(graph: ir.Graph) -> list[list[ir.Node]]:
    """Groups of two or more nodes of a graph, each in topological order."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        for value in {*reads(node)}:
            readers.setdefault(value, []).append(node)
    ends: dict[ir.Node, ir.Node] = {}
    members: dict[ir.Node, list[ir.Node]] = {}
    for node in reversed(graph):
        dims = _shape(node)
        if dims is None:
            continue
        (value,) = node.outputs
        found = readers.get(value, [])
        end = next((ends[reader] for reader in found if reader in ends), None)
        if end is not None:
            after = readers.get(end.outputs[0], ())
            fits = dims == _shape(end) and len(members[end]) < MOST_NODES
            if fits and all(ends.get(reader) is end or reader in after for reader in found):
                ends[node] = end
                members[end].append(node)
        elif value in graph.outputs or (found and all(subgraphs(reader) for reader in found)):
            ends[node], members[node] = node, [node]
    return [group[::-1] for group in members.values() if len(group) > 1]


class _Wrapper:
    """Replaces groups of nodes of a model by calls of functions."""

    def __init__(self, model: ir.Model) -> None:
        self._model, self._opset = model, model.graph.opset_imports[""]
        self.bodies: dict[tuple[object, ...], ir.Function] = {}
        self._op = Ops(model.graph)
        self._products: dict[tuple[bytes, str], list[int] | None] = {}

    def wrap_group(
        self, graph: ir.Graph, group: Sequence[ir.Node], dims_of: Callable[[ir.Value], Dims | None]
    ) -> None:
        """Replace a group by a node, where it has the form of a program."""
        own = {node.outputs[0]: node for node in group}
        axes = [*dict.fromkeys(found for node in group if (found := axes_of(node)) is not None)]
        dims = max((dims_of(node.outputs[0]) or () for node in group), key=len)
        read = [
            v for n in group for v in n.inputs if v is not None and v not in own and v not in axes
        ]
        # What comes first may give its memory to a result: what nothing reads afterwards.
        read = sorted(
            dict.fromkeys(read),
            key=lambda v: (dims_of(v) != dims, any(n not in group for n, _ in v.uses())),
        )
        kept = [
            value
            for value, node in own.items()
            if value in graph.outputs
            or node is group[-1]
            or any(reader.graph is not graph or reader not in group for reader, _ in value.uses())
        ]
        kept.sort(key=lambda value: dims_of(value) != dims)
        types = {value.dtype for value in (*read, *kept)}
        if len(read) > MOST_INPUTS or types != {ir.DataType.FLOAT}:
            return
        body = _body(group, read, kept, self._opset, axes)
        proto = ir.to_proto(body)
        try:
            program = program_of(proto.node, proto.input, proto.output)
        except NotAProgramError:
            return
        first, out = read[0], kept[0]
        if (
            first.producer() is not None
            and first.shape is not None
            and dims_of(first) == dims_of(out) == dims
            and all(isinstance(size, int) or size.value for size in first.shape)
            and not any(value.is_graph_output() for value in (first, out))
            and all(reader in group for reader, _ in first.uses())
        ):
            # ONNX Runtime compares the names of sizes: where they are the same, the result is
            # written over the input, which nothing reads afterwards.
            out.shape = ir.Shape(first.shape)
        if self._replace(graph, group[-1], body, (ELEMENTWISE, program, read), kept):
            for each in reversed(group):
                graph.remove(each, safe=True)

    def _replace(
        self,
        graph: ir.Graph,
        end: ir.Node,
        body: ir.Function,
        call: tuple[str, Sequence[int], Sequence[ir.Value]],
        kept: Sequence[ir.Value],
    ) -> bool:
        """Write a call of a body before the end of its group, if there is a name left for it."""
        kernel, program, read = call
        key = (kernel, ir.to_proto(body).SerializeToString(deterministic=True))
        if key not in self.bodies:
            kind = _KINDS.get(read[0].dtype or ir.DataType.FLOAT, "Kernel")
            taken = sum(each.name.rstrip("0123456789") == kind for each in self.bodies.values())
            if taken == SLOTS[kind]:
                return False
            body.name = f"{kind}{taken}"
            self.bodies[key] = self._model.functions[body.identifier()] = body
        node = ir.node(
            self.bodies[key].name, read, {"kernel": kernel, "program": program}, domain=DOMAIN,
            num_outputs=len(kept), name=end.name,
        )  # fmt: skip
        graph.insert_before(end, node)
        for old, new in zip(kept, node.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        return True

    def wrap_convolution(self, graph: ir.Graph, ways: Sequence[Group]) -> None:
        """Replace the nodes of a convolution, or of its gradient, by one that computes the same."""
        for way in ways:
            read, end = (*way.read, *way.fixed), way.nodes[-1]
            body = _body(way.nodes, read, end.outputs, self._opset, way.constants)
            (program,) = way.programs
            values = [native_groups.value_of(value) for value in way.fixed]
            if depthwise_computes(ir.to_proto(body), program, values):
                self._replace(graph, end, body, (DEPTHWISE, program, read), end.outputs)
                return

    def wrap_product(self, graph: ir.Graph, group: Group) -> None:
        """Replace a product, and what unpacks its matrix, by a node that computes the same."""
        end = group.nodes[-1]
        body = _body(group.nodes, group.read, end.outputs, self._opset, group.constants)
        proto = ir.to_proto(body)
        key = proto.SerializeToString(deterministic=True), str(group.programs)
        if key not in self._products:
            self._products[key] = next(
                (p for p in group.programs if kernels.product_computes(proto, p)), None
            )
        program = self._products[key]
        if program is not None:
            call = (kernels.PRODUCT, program, group.read)
            self._replace(graph, end, body, call, end.outputs)

    def wrap_normalizations(self, graph: ir.Graph) -> None:
        """Replace the nodes of each batch normalization by one that computes the same."""
        for group in native_groups.normalization_groups(graph):
            del group.body.attribute[:]
            group.body.attribute.extend(["kernel", "program"])
            group.body.opset_import.extend([onnx.helper.make_opsetid("", self._opset)])
            body = ir.serde.deserialize_function(group.body)
            first, *read = group.read
            if group.dims is not None:
                with self._op.before(group.nodes[-1]):
                    first = self._op.Reshape(first, group.dims)
            call = (kernels.NORMALIZATION, group.program, [first, *read])
            if self._replace(graph, group.nodes[-1], body, call, group.kept):
                for each in reversed(group.nodes):
                    if each not in group.stays or not each.outputs[0].uses():
                        graph.remove(each, safe=True)
        graph.sort()  # some results are read before their node's place

    def wrap_transposed(self, graph: ir.Graph, node: ir.Node) -> None:
        """Replace a product whose first operand is transposed."""
        read = [value for value in node.inputs if value is not None]
        body = _body([node], read, node.outputs, self._opset)
        self._replace(graph, node, body, (kernels.TRANSPOSED, [0], read), node.outputs)


def _body(
    group: Sequence[ir.Node],
    read: Sequence[ir.Value],
    kept: Sequence[ir.Value],
    opset: int,
    constants: Sequence[ir.Value] = (),
) -> ir.Function:
    """A function of copies of a group's nodes, whose names say only their place."""
    values = {value: ir.val(f"i{place}") for place, value in enumerate(read)}
    nodes = []
    for place, value in enumerate(constants):
        nodes.append(ir.node("Constant", [], {"value": ir.tensor(native_groups.value_of(value))}))
        nodes[-1].outputs[0].name = f"c{place}"
        values[value] = nodes[-1].outputs[0]
    for place, each in enumerate(group):
        inputs = [values[value] for value in each.inputs if value is not None]
        node = ir.Node("", each.op_type, inputs, list(each.attributes.values()), num_outputs=1)
        node.outputs[0].name = f"v{place}"
        values[each.outputs[0]] = node.outputs[0]
        nodes.append(node)
    inner = ir.Graph(
        [values[value] for value in read], [values[value] for value in kept], nodes=nodes,
        opset_imports={"": opset},
    )  # fmt: skip
    attributes = [
        ir.Attr(name, kind, None)
        for name, kind in (("kernel", ir.AttributeType.STRING), ("program", ir.AttributeType.INTS))
    ]
    return ir.Function(DOMAIN, "Kernel", graph=inner, attributes=attributes)
