"""Finds the linear layers of a forward model: products and convolutions with a stored weight."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from odtpack.autodiff.stop_gradient import STRAIGHT_THROUGH
from odtpack.graph.graphs import dims_of, operand
from odtpack.model.exporters import RECURRENT, folded, homes, known_names, module_names

# What stands between a stored weight and the product that reads it; the weight is its first input.
_VIEWS = ("Cast", "DequantizeLinear", "Identity", "Transpose")

# And where its codes are looked up in a table, see :mod:`odtpack.quantized`, or have zero
# points between them, see :mod:`odtpack.contrib.quantized`.
_LOOKED_UP = (*_VIEWS, "Div", "Gather", "Mul", "Reshape", "Sub")

# Codes of few bits. Those with a sign are not looked up in a table.
_CODES = (ir.DataType.INT4, ir.DataType.INT8, ir.DataType.UINT4, ir.DataType.UINT8)

# What exporters and quantizers append to the name of a layer.
_ENDINGS = re.compile(r"(_Transposed|_quantized|_bytes|_DQ_Q\d+|_Q\d+(G\d+)?|_fp16)*$")
_WEIGHT = re.compile(r"(\.MatMul(NBits|4Bits)?)?\.(q?weight|kernel)$")

# How onnxruntime-genai's builder shortens the name of Hugging Face's attention modules.
_ATTENTION = re.compile(r"^(model\.layers\.\d+)\.attn\.")


@dataclasses.dataclass(frozen=True)
class Use:
    """A node that applies a layer."""

    node: ir.Node  # MatMul, Gemm or Conv
    weight: ir.Value  # what it reads as its weight, the stored one or made of it
    outputs_first: bool  # whether the weight is [out, in, ...] and not [in, out]
    swapped: bool  # whether it is the transpose of what is stored
    # What holds the layer's result: the node's output, or the sum with a bias after it.
    end: ir.Value
    bias: ir.Value | None  # the bias that is added, if there is one

    @property
    def result(self) -> ir.Value:
        """What its readers read: the node's output, or what stands in for it."""
        return _result(self.node)

    @property
    def data(self) -> ir.Value:
        """What the layer is applied to."""
        return operand(self.node, 0)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A layer or an embedding, whose weight is stored."""

    name: str  # that of the weight in the exported module, without ``.weight``
    source: ir.Value  # the initializer with the weight, or with its codes
    # What patterns may call it, too, where an exporter named it.
    called: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether a pattern matches its name, or that of the stored weight."""
        # The name of a tied weight may be that of another module.
        others = () if homes(self.source) else (str(self.source.name), *self.called)
        names = (self.name, *others)
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


class Linear:
    """What has the shape of a linear layer."""

    shape: tuple[int, ...]  # [out, in], of a convolution [out, in, *kernel]

    @property
    def outputs(self) -> int:
        """Width of what it gives."""
        return self.shape[0]

    @property
    def inputs(self) -> int:
        """Width of what it takes."""
        return self.shape[1]


@dataclasses.dataclass(frozen=True)
class Layer(Stored, Linear):
    """A linear layer; its uses share the weight."""

    shape: tuple[int, ...]
    uses: tuple[Use, ...]  # where it is applied


def find_layers(graph: ir.Graph) -> list[Layer]:
    """The linear layers of a graph, in the order in which they are applied first."""
    # A layer is a MatMul or a Gemm of data with a stored matrix, or a convolution that is not
    # grouped. Its weight may be transposed, cast or dequantized on the way.
    modules, known = module_names(graph), known_names(graph)
    found: dict[ir.Value, list[Use]] = {}
    for node in graph:
        weight = _weight(node)
        if weight is None:
            continue
        source, swapped = _source(weight)
        if source is None or source.const_value is None:
            continue
        end, bias = _end(node)
        transposes = node.attributes.get_int("transB", 0) == 1 and node.op_type == "Gemm"
        outputs_first = node.op_type == "Conv" or transposes
        found.setdefault(source, []).append(Use(node, weight, outputs_first, swapped, end, bias))
    layers = []
    for source, uses in found.items():
        shapes = {_shape(use) for use in uses}
        shape = shapes.pop() if len(shapes) == 1 else None
        if shape is not None:
            name = home_of(source, uses[0].node, 1) or layer_name(str(source.name), modules)
            called = tuple(layer_name(each, {}) for each in known.get(str(source.name), ()))
            layers.append(Layer(name, source, shape, tuple(uses), called=called))
    return layers


def without_adapter(graph: ir.Graph, patterns: Sequence[str]) -> list[str]:
    """Layers that patterns name and that no adapter goes on: grouped and recurrent ones."""
    known, found = known_names(graph), dict[str, None]()
    for node in graph:
        weight = node.inputs[1] if node.op_type in ("Conv", "ConvTranspose", *RECURRENT) else None
        if weight is not None and weight.is_initializer() and _weight(node) is None:
            name = str(weight.name)
            first, *others = (layer_name(each, {}) for each in (*known.get(name, ()), name))
            if Stored(first, weight, called=tuple(others)).matches(patterns):
                found[first] = None
    return [*found]


def transposed(graph: ir.Graph) -> frozenset[str]:
    """Names of the matrices that an exporter transposed."""
    computed = {*module_names(graph), *folded(graph)}
    return frozenset(
        str(layer.source.name)
        for layer in find_layers(graph)
        if len(layer.shape) == 2
        and (layer.source.name in computed or homes(layer.source))
        and all(use.outputs_first == use.swapped for use in layer.uses)
    )


def home_of(source: ir.Value, reader: ir.Node, index: int) -> str:
    """The module around a node that reads a tied weight; nothing if that is not known."""
    node, value = reader, reader.inputs[index]
    while value is not source:
        before = None if value is None else value.producer()
        if before is None or not before.inputs:
            return ""
        node, value = before, before.inputs[0]
    found = homes(source).items()
    return next((path for path, uses in found if any(n is node for n, _ in uses)), "")


def packed_layers(graph: ir.Graph) -> list[Layer]:
    """The products with a matrix of few bits that ONNX Runtime's own operator makes."""
    modules = module_names(graph)
    layers = []
    for node in graph:
        codes = node.inputs[1] if node.op_type == "MatMulNBits" else None
        if codes is not None:
            use = Use(node, codes, True, False, node.outputs[0], None)
            shape = node.attributes.get_int("N", 0), node.attributes.get_int("K", 0)
            layers.append(Layer(layer_name(str(codes.name), modules), codes, shape, (use,)))
    return layers


def _weight(node: ir.Node) -> ir.Value | None:
    """What a node reads as its weight, if it is a linear layer's."""
    if node.domain or len(node.inputs) < 2:
        return None
    attributes = node.attributes
    if node.op_type == "Gemm":
        plain = attributes.get_float("alpha", 1.0) == 1 and not attributes.get_int("transA", 0)
        return node.inputs[1] if plain else None
    if node.op_type == "Conv":
        return node.inputs[1] if attributes.get_int("group", 1) == 1 else None
    return node.inputs[1] if node.op_type == "MatMul" else None


def _source(weight: ir.Value) -> tuple[ir.Value | None, bool]:
    """The initializer that a weight is made of, and whether it is transposed on the way."""
    value: ir.Value | None = weight
    swaps, passed = False, set[str]()
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.op_type not in _LOOKED_UP or node.domain:
            return None, False
        passed.add(node.op_type)
        swaps ^= node.op_type == "Transpose"
        first, *others = node.inputs
        swapped = node.op_type == "Mul" and first is not None and first.is_initializer()
        value = others[0] if swapped or node.op_type == "Gather" else first
    codes = value is not None and value.dtype in _CODES
    return (value, swaps) if codes or passed.issubset(_VIEWS) else (None, False)


def _shape(use: Use) -> tuple[int, ...] | None:
    """Shape of a weight with the outputs first; None if it is not that of a layer."""
    tensor = use.weight.const_value
    dims = dims_of(use.weight) or (() if tensor is None else tuple(tensor.shape.numpy()))
    rank = len(dims)
    if not all(isinstance(dim, int) for dim in dims) or (
        rank < 3 if use.node.op_type == "Conv" else rank != 2
    ):
        return None
    sizes = tuple(int(dim) for dim in dims if dim is not None)
    return sizes if use.outputs_first else sizes[::-1]


def _result(node: ir.Node) -> ir.Value:
    output = node.outputs[0]
    readers = [*output.consumers()]
    held = bool(readers) and readers[0].op_type == STRAIGHT_THROUGH
    return readers[0].outputs[0] if held else output


def _end(node: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """Where the result of a layer is, and its bias."""
    end = _result(node)
    if node.op_type in ("Gemm", "Conv"):
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return end, bias if bias is not None and bias.is_initializer() else None
    consumers = [*end.consumers()]
    if len(consumers) == 1 and consumers[0].op_type == "Add" and not end.is_graph_output():
        add = consumers[0]
        for bias in add.inputs:
            stored = bias is not None and bias is not end and bias.is_initializer()
            if stored and len(dims_of(bias) or ()) == 1:
                return add.outputs[0], bias
    return end, None


def layer_name(weight: str, modules: dict[str, str]) -> str:
    """Name of a layer by that of its weight."""
    plain = _ENDINGS.sub("", modules.get(weight, weight))
    end = _WEIGHT.search(plain)
    if end is None:
        return plain
    name = plain[: end.start()]
    return _ATTENTION.sub(r"\1.self_attn.", name) if end[1] else name
