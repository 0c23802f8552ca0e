"""Shapes that ONNX Runtime does not write down, found from the shapes it does.

Its optimizers create nodes without inferring what they return: most in its own
blocked layout for convolutions (NCHWc), whose operators have no shape inference
at all. Most of these behave like an ONNX operator of the same name. What comes
after them is inferred again, sizes that the graph itself computes included.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import TensorProto, helper

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_simulator.memory.execution_order import graphs, subgraphs
from odtpack_simulator.memory.kernel_memory import NCHWC_DOMAIN, Shape

Dim = int | str | None  # A size, the name of a size, or None for an unknown one

Dims = tuple[Dim, ...]
Typed = tuple[int, Dims | None]
"""ONNX element type (0 if unknown) and dimensions (None if not even their number is known)."""

Functions = Mapping[tuple[str, str], onnx.FunctionProto]
"""Functions of a model by domain and name."""


class Scope(NamedTuple):
    """What the nodes of a graph see of it, and of the graphs around it."""

    opset: int
    constants: Mapping[str, onnx.TensorProto]
    found: Mapping[str, Typed]


MICROSOFT_DOMAIN = "com.microsoft"

_MOST_SIZES = 64  # Elements of a tensor that may be computed here: shapes are small

_ARITHMETIC = frozenset(
    {
        *("Add", "And", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather"),
        *("Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod"),
        *("Mul", "Neg", "NonZero", "Not", "Or", "Range", "ReduceProd", "Reshape", "Shape", "Size"),
        *("Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
    }
)
"""Operators by which graphs compute sizes, and along which axes they were broadcast."""

# Turns of a Loop that are no bound: exporters write the largest number there is.
_ENDLESS = (1 << 31) - 1

_ALIKE = {"FusedConv": "Conv", "FusedGemm": "Gemm", "Gelu": "Relu", "QuickGelu": "Relu"}
"""Operators of com.microsoft whose output has the shape that an ONNX operator's would have."""


def fill_in(
    nodes: Sequence[onnx.NodeProto],
    opset: int,
    # Besides, the values of small tensors that bodies read are added, where shapes give them.
    constants: MutableMapping[str, onnx.TensorProto],
    found: MutableMapping[str, Typed],
    added: set[str],  # What this added to ``found``, here or in a graph around this one
    *,
    as_planned: bool = False,  # Leave out what ONNX Runtime does not know when it plans memory
    functions: Functions = MappingProxyType({}),  # Those that nodes call, kernels' bodies
) -> None:
    """Add types and shapes of node outputs that ``found`` lacks, where rules give them."""
    if as_planned:
        blocked = (NCHWC_DOMAIN, "Upsample")
        nodes = [node for node in nodes if (node.domain, node.op_type) != blocked]
    scope = Scope(opset, constants, found)
    sizes = _Sizes(nodes, scope, products_with_zero=not as_planned)
    for node in nodes:
        outputs = [name for name in node.output if name]
        if node.op_type in _BODIES and not as_planned:
            constants.update(sizes.read_by(node))
        if all(is_fixed(found.get(name, (0, None))[1]) for name in outputs):
            continue
        inputs = [found.get(name, (0, None)) for name in node.input]
        if (
            node.domain in ("", "ai.onnx")
            and all(found.get(name, (0, None))[1] is not None for name in outputs)
            and node.op_type not in ("If", "Loop", "MaxUnpool", "NonZero", "Scan")
            and not all(is_fixed(dims) for _, dims in inputs)
            and added.isdisjoint(node.input)
            and all(name in constants or sizes.get(name) is None for name in node.input)
        ):
            continue  # ONNX Runtime knows no more from the same
        if node.op_type in _BODIES and not node.domain and not as_planned:
            results = _BODIES[node.op_type](node, scope)
        elif function := functions.get((node.domain, node.op_type)):
            results = _called(node, function, scope, inputs)
        else:
            results = _infer(node, opset, sizes, inputs)
        if node.op_type == "NonZero" and not node.domain:  # as many columns as the value has
            value = sizes.get(node.output[0])
            results = [] if value is None else [(TensorProto.INT64, value.shape)]
        for name, typed in zip(node.output, results, strict=False):
            kind, dims = found.get(name, (0, None))
            if name and not is_fixed(dims) and (dims is None or is_fixed(typed[1])):
                found[name] = (kind or typed[0], typed[1])
                added.add(name)


def body_inputs(node: onnx.NodeProto, scope: Scope) -> dict[str, Typed]:
    """What the body of a Loop or a Scan reads in a turn, where the shape of the whole is known."""
    if node.op_type == "Loop":
        return _turn(node, scope)[0]
    if node.op_type != "Scan":
        return {}
    body, count = _body(node), _attribute(node, "num_scan_inputs", 0)
    states = len(body.input) - count
    axes = next((a.ints for a in node.attribute if a.name == "scan_input_axes"), [0] * count)
    inputs: dict[str, Typed] = {}
    for place, (value, name) in enumerate(zip(body.input, node.input, strict=True)):
        kind, dims = scope.found.get(name, (0, None))
        if is_fixed(dims):
            taken = axes[place - states] % len(dims) if place >= states else len(dims)
            inputs[value.name] = kind, (*dims[:taken], *dims[taken + 1 :])
    return inputs


def _body(node: onnx.NodeProto) -> onnx.GraphProto:
    return next(body for _, body in subgraphs(node))


def _inside(body: onnx.GraphProto, scope: Scope, given: Mapping[str, Typed]) -> dict[str, Typed]:
    """Types in a body, whose inputs are given where they are known."""
    ends = {v.name: tensor_type(v.type) for v in (*body.input, *body.output)}
    inside = {**scope.found, **ends}
    inside |= {t.name: (t.data_type, tuple(t.dims)) for t in body.initializer}
    inside |= given
    constants = {**scope.constants, **{t.name: t for t in body.initializer}}
    fill_in(body.node, scope.opset, constants, inside, set())
    return inside


def _scan(node: onnx.NodeProto, scope: Scope) -> list[Typed]:
    """Results of a Scan: its states, and what a turn gives, as often as there are turns."""
    body = _body(node)
    states = len(body.input) - _attribute(node, "num_scan_inputs", 0)
    inside = _inside(body, scope, body_inputs(node, scope))
    whole = scope.found.get(node.input[states], (0, None))[1]
    axes = next((a.ints for a in node.attribute if a.name == "scan_input_axes"), [0])
    length = whole[axes[0] % len(whole)] if whole else None
    stacks = len(body.output) - states
    where = next((a.ints for a in node.attribute if a.name == "scan_output_axes"), [0] * stacks)
    results = [inside[value.name] for value in body.output[:states]]
    for value, axis in zip(body.output[states:], where, strict=True):
        kind, dims = inside[value.name]
        if dims is not None:
            place = axis % (len(dims) + 1)
            dims = (*dims[:place], length, *dims[place:])
        results.append((kind, dims))
    return results


def _turn(node: onnx.NodeProto, scope: Scope) -> tuple[dict[str, Typed], list[Typed]]:
    """What the body of a Loop reads in every turn, where that is known, and what it returns."""
    body = _body(node)
    given: dict[str, Typed] = {
        body.input[0].name: (TensorProto.INT64, ()),
        body.input[1].name: (TensorProto.BOOL, ()),
    }
    rows = list(zip(body.input[2:], node.input[2:], body.output[1:], strict=False))
    first = {before.name: scope.found.get(name, (0, None)) for before, name, _ in rows}
    given |= {name: typed for name, typed in first.items() if is_fixed(typed[1])}
    while True:
        inside = _inside(body, scope, given)
        # What has another shape after the turn than before it has no shape in every turn.
        changed = [
            before.name
            for before, _, after in rows
            if before.name in given and inside[after.name][1] != given[before.name][1]
        ]
        if not changed:
            return given, [inside[value.name] for value in body.output[1:]]
        for name in changed:
            del given[name]


def _loop(node: onnx.NodeProto, scope: Scope) -> list[Typed]:
    """Results of a Loop: its states, and what a turn gives, as often as there may be turns."""
    _, results = _turn(node, scope)
    states = len(node.input) - 2
    most = scope.constants.get(node.input[0])
    turns = None if most is None else onnx.numpy_helper.to_array(most).item()
    length = None if turns is None or turns >= _ENDLESS else max(turns, 0)
    results[states:] = [
        (kind, None if dims is None else (length, *dims)) for kind, dims in results[states:]
    ]
    return results


def _if(node: onnx.NodeProto, scope: Scope) -> list[Typed]:
    """Results of an If: of what its branches give the larger one, where both are known."""
    branches = []
    for _, body in subgraphs(node):
        inside = _inside(body, scope, {})
        branches.append([inside[value.name] for value in body.output])
    results: list[Typed] = []
    for one, other in zip(*branches, strict=True):
        shapes = [dims for _, dims in (one, other) if is_fixed(dims)]
        results.append((one[0], max(shapes, key=math.prod) if len(shapes) == 2 else None))
    return results


def _called(
    node: onnx.NodeProto, function: onnx.FunctionProto, scope: Scope, inputs: Sequence[Typed]
) -> list[Typed]:
    """Results of a function, by the nodes of its body."""
    formal = dict(zip(function.input, node.input, strict=False))
    known = scope.constants
    given = {inner: known[name] for inner, name in formal.items() if name in known}
    given |= {each.output[0]: each.attribute[0].t for each in function.node
              if each.op_type == "Constant" and each.attribute[0].name == "value"}  # fmt: skip
    inside = dict(zip(function.input, inputs, strict=False))
    fill_in(function.node, scope.opset, given, inside, set())
    return [inside.get(name, (0, None)) for name in function.output]


def is_fixed(dims: Dims | None) -> TypeGuard[Shape]:
    """Whether every size is a number."""
    return dims is not None and all(isinstance(dim, int) for dim in dims)


class _Sizes:
    """Values of small integer tensors that are constants, or computed from shapes alone."""

    def __init__(
        self, nodes: Iterable[onnx.NodeProto], scope: Scope, *, products_with_zero: bool
    ) -> None:
        self._products_with_zero = products_with_zero
        self._producers = {name: node for node in nodes for name in node.output if name}
        self._opset, self._constants, self._found = scope
        self._known: dict[str, Array | None] = {}

    def get(self, name: str) -> Array | None:
        """The value of a tensor; None if it depends on data, is large, or no integer."""
        waiting = {name: None}  # no recursion: chains of nodes may be long
        while waiting:
            last = next(reversed(waiting))
            operand = None if last in self._known else self._needed(last)
            if operand in waiting:  # they wait for each other
                self._known[operand] = None
            elif operand is not None:
                waiting[operand] = None
            else:
                waiting.popitem()
                if last not in self._known:
                    self._known[last] = self._compute(last)
        return self._known[name]

    def _needed(self, name: str) -> str | None:
        """The next tensor whose value has to be known for another's; None if there is no more."""
        node = None if name in self._constants else self._producers.get(name)
        if node is None or node.domain or node.op_type not in _ARITHMETIC - {"Shape", "Size"}:
            return None
        either = self._products_with_zero and node.op_type == "Mul"
        operands: list[str] = [*filter(None, node.input)]
        for operand in operands:
            if operand not in self._known:
                return operand
            if self._known[operand] is None and not either:
                return None
        return None

    def read_by(self, node: onnx.NodeProto) -> dict[str, onnx.TensorProto]:
        """Those that a node with bodies reads, its bodies included, and that are no constants."""
        inner = [graph for _, body in subgraphs(node) for graph in graphs(body)]
        names = {*node.input, *(name for g in inner for each in g.node for name in each.input)}
        computed = {name: self.get(name) for name in names.difference(self._constants)}
        return {
            name: onnx.numpy_helper.from_array(value, name)
            for name, value in computed.items()
            if value is not None
        }

    def between(self, start: str, end: str) -> Array | None:
        """What is added to one tensor to get the other, if that is known."""
        node = self._producers.get(end)
        if node is None or node.op_type != "Add" or start not in node.input:
            return None
        return next((self.get(name) for name in node.input if name != start), None)

    def _compute(self, name: str) -> Array | None:
        constant = self._constants.get(name)
        if constant is not None:
            small = math.prod(constant.dims) <= _MOST_SIZES
            return onnx.numpy_helper.to_array(constant) if small else None
        node = self._producers.get(name)
        if node is None or node.domain or node.op_type not in _ARITHMETIC:
            return None
        if node.op_type in ("Shape", "Size"):
            shape = self._found.get(node.input[0], (0, None))[1]
            if not is_fixed(shape):
                return None
            if node.op_type == "Size":
                return np.array(math.prod(shape), np.int64)
            start, end = _attribute(node, "start", 0), _attribute(node, "end", len(shape))
            return np.array(shape[start:end], np.int64)
        if self._products_with_zero and node.op_type == "Mul":
            zeros = self._zeros(node)
            if zeros is not None:
                return zeros
        feeds: dict[str, Array] = {}
        for operand in filter(None, node.input):
            value = self._known.get(operand)
            if value is None:
                return None
            feeds[operand] = value
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(node, opsets={"": self._opset})
        try:
            (found,) = evaluator.run([name], feeds)
        except Exception:  # sizes that the model does not allow: there is no value
            return None
        result = np.asarray(found)
        return result if result.size <= _MOST_SIZES else None

    def _zeros(self, node: onnx.NodeProto) -> Array | None:
        """A product one factor of which is all zeros, where the other's shape is known."""
        for one, other in (tuple(node.input), tuple(node.input)[::-1]):
            value, (kind, shape) = self._known.get(one), self._found.get(other, (0, None))
            if value is None or value.any() or kind != TensorProto.INT64 or not is_fixed(shape):
                continue
            result = np.zeros(np.broadcast_shapes(value.shape, shape), np.int64)
            return result if result.size <= _MOST_SIZES else None
        return None


def _infer(node: onnx.NodeProto, opset: int, sizes: _Sizes, inputs: Sequence[Typed]) -> list[Typed]:
    if node.op_type == "Slice" and len(node.input) == 4 and sizes.get(node.input[1]) is None:
        # A window: where it begins depends on data, or on the turn of a loop.
        length, axes = sizes.between(*node.input[1:3]), sizes.get(node.input[3])
        kind, dims = inputs[0]
        if length is not None and axes is not None and dims is not None:
            places = (axes % len(dims)).tolist()
            cut = dict(zip(places, np.atleast_1d(length).tolist(), strict=True))
            return [(kind, tuple(cut.get(axis, dim) for axis, dim in enumerate(dims)))]
    known = _KNOWN.get((node.domain, node.op_type))
    if known is not None:
        kind, dims = inputs[0]
        return [(kind, None if dims is None else known(node, dims))]
    if node.op_type == "MaxUnpool" and len(node.input) == 3:  # ONNX does not look at the input
        shape_input = sizes.get(node.input[2])
        if shape_input is not None:
            return [(inputs[0][0], tuple(int(size) for size in shape_input))]
    if (node.domain, node.op_type) == (MICROSOFT_DOMAIN, "FusedMatMul"):
        return _fused_matmul(node, inputs)
    alike = node.op_type if node.domain in ("", "ai.onnx", NCHWC_DOMAIN) else ""
    if node.domain == MICROSOFT_DOMAIN:
        alike = _ALIKE.get(node.op_type, "")
    try:
        return _infer_alike(node, alike, opset, sizes, inputs) if alike else []
    except Exception:  # no such operator, or not with these inputs: the shape stays unknown
        return []


def _fused_matmul(node: onnx.NodeProto, inputs: Sequence[Typed]) -> list[Typed]:
    """A product of matrices that it transposes first; ``transBatch`` takes their first axis."""
    operands: list[Shape] = []
    for (_, dims), letter in zip(inputs, "AB", strict=True):
        if not is_fixed(dims) or len(dims) < 2:
            return []
        *batch, rows, columns = dims
        if batch and _attribute(node, f"transBatch{letter}", 0):
            *batch, rows = *batch[1:], rows, batch[0]
        swapped = _attribute(node, f"trans{letter}", 0)
        operands.append((*batch, columns, rows) if swapped else (*batch, rows, columns))
    left, right = operands
    return [(inputs[0][0], (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1]))]


def _infer_alike(
    node: onnx.NodeProto, alike: str, opset: int, sizes: _Sizes, inputs: Sequence[Typed]
) -> list[Typed]:
    """Infer the outputs of ``node`` as if it were the ONNX operator ``alike``."""
    schema = onnx.defs.get_schema(alike, opset, "")
    count = min(len(node.input), schema.max_input)
    # Layers repeat, and so do the readings of a model: by place, not by name.
    given: list[tuple[int, Dims, bytes | None] | None] = []
    for name, (kind, dims) in zip(node.input[:count], inputs, strict=False):
        if name and dims is None:
            return []
        value = sizes.get(name) if name else None
        data = None if value is None else onnx.numpy_helper.from_array(value).SerializeToString()
        given.append((kind or TensorProto.FLOAT, dims, data) if name and dims is not None else None)
    outputs = tuple(bool(name) for name in (node.output if not node.domain else node.output[:1]))
    attributes = tuple(
        each.SerializeToString() for each in node.attribute if each.name in schema.attributes
    )
    return _inferred_alike(alike, opset, attributes, outputs, tuple(given))


@functools.lru_cache(10_000)
def _inferred_alike(
    alike: str,
    opset: int,
    attributes: tuple[bytes, ...],
    outputs: tuple[bool, ...],
    given: tuple[tuple[int, Dims, bytes | None] | None, ...],
) -> list[Typed]:
    copy = onnx.NodeProto(op_type=alike)
    copy.output.extend(f"output{place}" if wanted else "" for place, wanted in enumerate(outputs))
    copy.attribute.extend(map(onnx.AttributeProto.FromString, attributes))
    inputs = (
        each and (*each[:2], None if each[2] is None else TensorProto.FromString(each[2]))
        for each in given
    )
    return infer_node(copy, opset, inputs)


def infer_node(
    node: onnx.NodeProto,  # Without inputs: they are named here, by place
    opset: int,
    # Element type, dimensions and, where it is known, the value; None for an absent one
    inputs: Iterable[tuple[int, Dims | None, onnx.TensorProto | None] | None],
    imports: list[onnx.OperatorSetIdProto] | None = None,
) -> list[Typed]:
    """What the standard finds out about a node's outputs from its inputs alone."""
    types, data = {}, {}
    for place, given in enumerate(inputs):
        node.input.append("" if given is None else f"input{place}")
        if given is not None:
            kind, dims, value = given
            types[node.input[place]] = helper.make_tensor_type_proto(kind, dims)
            if value is not None:
                data[node.input[place]] = value
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    infer = onnx.shape_inference.infer_node_outputs
    found = infer(schema, node, types, data, opset_imports=imports)
    return [tensor_type(found[name]) if name in found else (0, None) for name in node.output]


def tensor_type(proto: onnx.TypeProto) -> Typed:
    """Element type and dimensions of a type; type 0 for what is not a tensor."""
    tensor = proto.tensor_type
    if not proto.HasField("tensor_type"):
        return 0, None
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    dims = [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in tensor.shape.dim
    ]
    return tensor.elem_type, tuple(dims)  # faster than from a generator, which a build would feel


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _reorder_output(node: onnx.NodeProto, dims: Dims) -> Dims:
    last = _attribute(node, "channels_last", 0)
    channels = _attribute(node, "channels", 0) or dims[1]
    return (dims[0], *dims[2:], channels) if last else (dims[0], channels, *dims[2:])


def _reorder_input(node: onnx.NodeProto, dims: Dims) -> Dims:
    if _attribute(node, "channels_last", 0):
        dims = (dims[0], dims[-1], *dims[1:-1])
    block = nchwc_block()
    channels = dims[1]
    if isinstance(channels, int):
        channels = math.ceil(channels / block) * block
    return (dims[0], channels, *dims[2:])


def _upsample(node: onnx.NodeProto, dims: Dims) -> Dims:
    scales = next((a.ints for a in node.attribute if a.name == "scales"), [1] * len(dims))
    return tuple(
        d * by if isinstance(d, int) else d if by == 1 else None
        for d, by in zip(dims, scales, strict=True)
    )


_BODIES = {"If": _if, "Loop": _loop, "Scan": _scan}
"""What gives the results of operators that have bodies."""

_KNOWN: dict[tuple[str, str], Callable[[onnx.NodeProto, Dims], Dims]] = {
    (NCHWC_DOMAIN, "ReorderInput"): _reorder_input,
    (NCHWC_DOMAIN, "ReorderOutput"): _reorder_output,
    (NCHWC_DOMAIN, "Upsample"): _upsample,
    (MICROSOFT_DOMAIN, "BiasGelu"): lambda _, dims: dims,
    (MICROSOFT_DOMAIN, "FastGelu"): lambda _, dims: dims,
    (MICROSOFT_DOMAIN, "SkipLayerNormalization"): lambda _, dims: dims,
}


@functools.cache
def nchwc_block() -> int:
    """Channels per block of ONNX Runtime's blocked layout on this processor: 8 or 16."""
    # Found by optimizing a convolution with 24 output channels and looking to how many its weight
    # was padded.
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]>
        probe (float[1, 16, 8, 8] x) => (float[] y) { y = Conv (x, w) }"""
    )
    weight = onnx.numpy_helper.from_array(np.ones((24, 16, 3, 3), np.float32), "w")
    model.graph.initializer.append(weight)
    with scratch_folder("plan") as folder:
        path = Path(folder) / "probe.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        saved = onnx.load(str(path))
    channels = [tensor.dims[0] for tensor in saved.graph.initializer if len(tensor.dims) == 4]
    return 16 if channels and channels[0] % 16 == 0 else 8
