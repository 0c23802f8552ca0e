"""Writes plain ONNX nodes into a graph: ``op.Mul(x, 0.5)``.

Everything that differs between opsets (axes as attribute or as input) is decided here,
so that a gradient rule stays an equation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Dims, Names, dims_of, static_dims, typed, used_names

Scalar = int | float
Operand = ir.Value | Scalar | None

_BOOLEAN = {
    "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Not", "And", "Or", "IsNaN",
}  # fmt: skip
_INT64 = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
_LARGEST_EXPONENT = 126  # of the powers of two that float32 holds
MOST_JOINED = 7
MARK: Final = "odtpack.mark"
"""Entry of a node's ``meta``: what it was written for; see :meth:`Ops.marked`."""


def _attribute(name: str, value: Any) -> Any:
    """An attribute of a common kind; onnx_ir takes longer to find out which one a value is."""
    kind = type(value)
    if kind is int:
        return ir.AttrInt64(name, value)
    if kind is float:
        return ir.AttrFloat32(name, value)
    if kind is str:
        return ir.AttrString(name, value)
    if kind in (list, tuple) and value and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    return value


SHAPE: Final = "odtpack.shape"
"""Key of a value's ``meta``: the value with its shape, which is known without computing it."""


class Ops:
    """A cursor in a graph; attribute access names the operator to write there."""

    # graph: Graph to write into; new nodes go to its end unless :meth:`before` is used. prefix:
    # Start of the names of new values, so that a reader sees where they come from. outer: Writer
    # for the graph around ``graph``, if that is a subgraph: names differ from all names there, and
    # opsets are the same.

    FLOAT: Final = ir.DataType.FLOAT
    INT64: Final = ir.DataType.INT64

    def __init__(self, graph: ir.Graph, prefix: str = "", outer: Ops | None = None) -> None:
        if outer is not None:
            graph.opset_imports.update(outer.graph.opset_imports)
        self.graph: ir.Graph = graph
        self.outer = outer
        self.opset = graph.opset_imports[""]
        self._prefix = prefix
        self._constants: dict[tuple[ir.Graph, str, tuple[int, ...], bytes], ir.Value] = {}
        self._home = graph  # of constants
        self._place: Callable[[ir.Node], None] = graph.append
        self._mark: object = None  # of the nodes that are written

    def inside(self, graph: ir.Graph) -> Ops:
        """A writer for a subgraph of a node in this writer's graph."""
        return Ops(graph, self._prefix, self)

    @functools.cached_property
    def _names(self) -> Names:
        """Names that are taken. Not every writer writes: they are collected when one does."""
        return Names(used_names(self.graph)) if self.outer is None else self.outer._names

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """Names of sizes that the inputs of the model have: one number each in a run."""
        if self.outer is not None:
            return self.outer.symbols
        dims = (dim for value in self.graph.inputs for dim in dims_of(value) or ())
        return frozenset(dim for dim in dims if isinstance(dim, str))

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if op_type.startswith("_") or not op_type[0].isupper():
            raise AttributeError(op_type)

        def emit(*inputs: Operand, **attributes: Any) -> ir.Value:
            return self.emit(op_type, inputs, **attributes)[0]

        return emit

    def emit(
        self,
        op_type: str,
        inputs: Sequence[Operand],
        *,
        outputs: int = 1,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """Write one node and return its outputs."""
        # Numbers among ``inputs`` become constants of the type of the other inputs. Attributes that
        # are None are left out.
        dtype = next((v.dtype for v in inputs if isinstance(v, ir.Value) and v.dtype), None)
        if op_type == "Where":
            dtype = next((v.dtype for v in inputs[1:] if isinstance(v, ir.Value) and v.dtype), None)
        operands = [
            value
            if value is None or isinstance(value, ir.Value)
            else self.constant(np.asarray(value, (dtype or ir.DataType.FLOAT).numpy()))
            for value in inputs
        ]
        label = name or self.fresh_name(f"{self._prefix}{op_type}")
        node = ir.node(
            op_type,
            operands,
            {key: _attribute(key, v) for key, v in attributes.items() if v is not None},
            domain=domain,
            num_outputs=outputs,
            name=label,
        )
        if self._mark is not None:
            node.meta[MARK] = self._mark
        writer: Ops | None = self
        while domain and writer is not None:
            writer.graph.opset_imports.setdefault(domain, 1)
            writer = writer.outer
        result = self._result_type(op_type, dtype, attributes)
        for index, output in enumerate(node.outputs):
            output.name = label if index == 0 else self.fresh_name(f"{label}_{index}")
            output.type = None if result is None else ir.TensorType(result)
        self._place(node)
        return tuple(node.outputs)

    def again(self, node: ir.Node, inputs: Sequence[Operand]) -> tuple[ir.Value, ...]:
        """Write a node that does the same with other inputs; return its outputs."""
        settings = {key: each.value for key, each in node.attributes.items()}
        count = len(node.outputs)
        return self.emit(node.op_type, inputs, outputs=count, domain=node.domain, **settings)

    @staticmethod
    def _result_type(
        op_type: str, dtype: ir.DataType | None, attributes: dict[str, Any]
    ) -> ir.DataType | None:
        if op_type in _BOOLEAN:
            return ir.DataType.BOOL
        if op_type in _INT64:
            return ir.DataType.INT64
        # A copy of a node gets its attributes, and with them its type, once it stands.
        if op_type == "Cast" and "to" in attributes:
            return ir.DataType(attributes["to"])
        if op_type == "ConstantOfShape" and "value" in attributes:
            return ir.DataType(attributes["value"].dtype)
        return dtype

    @contextmanager
    def before(self, node: ir.Node) -> Iterator[None]:
        """Write in front of ``node`` for the length of a ``with`` block."""
        graph = node.graph or self.graph
        with self._at(graph, lambda new: graph.insert_before(node, new)):
            yield

    @contextmanager
    def after(self, node: ir.Node) -> Iterator[None]:
        """Write after ``node`` for the length of a ``with`` block."""
        graph, last = node.graph or self.graph, node

        def insert(new: ir.Node) -> None:
            nonlocal last
            graph.insert_after(last, new)
            last = new

        with self._at(graph, insert):
            yield

    @contextmanager
    def marked(self, mark: object) -> Iterator[None]:
        """Give the nodes that are written in a ``with`` block an entry of their ``meta``."""
        self._mark = mark
        try:
            yield
        finally:
            self._mark = None

    @contextmanager
    def _at(self, graph: ir.Graph, place: Callable[[ir.Node], None]) -> Iterator[None]:
        """Write elsewhere, in a graph that may be another than the writer's."""
        before = self._home, self._place
        self._home, self._place = graph, place
        try:
            yield
        finally:
            self._home, self._place = before

    def run_before(self, early: ir.Value, late: ir.Value, readers: Sequence[ir.Node]) -> None:
        """Make the runtime compute ``early`` before ``readers``, which read ``late``."""
        # ONNX Runtime executes depth first from the outputs, so a value that only the backward pass
        # reads is computed there, and what it is computed from stays in memory until then. Both
        # values must have the same shape at run time: the readers get a view of ``late`` whose
        # shape is taken from ``early``, at no cost.
        view = typed(self.Reshape(late, self.Shape(early)), late)
        for node in readers:
            for index, value in enumerate(node.inputs):
                if value is late:
                    node.replace_input_with(index, view)

    def fresh_name(self, stem: str) -> str:
        """Return a name that nothing in the graph has; the same stems give the same names."""
        return self._names.fresh(stem)

    # Constants and shapes

    def constant(self, array: np.ndarray | np.generic) -> ir.Value:
        """An initializer with these values; equal ones are stored once."""
        array = np.asarray(array)
        key = (self._home, array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh_name(f"{self._prefix}constant")
            # Made directly: ir.tensor would find out again what kind of array this is.
            tensor = ir.Tensor(array, name=name) if array.dtype.kind in "biuf" else None
            value = ir.val(name, const_value=tensor or ir.tensor(array, name=name))
            self._home.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """A constant INT64 vector."""
        return self.constant(np.array(values, np.int64))

    def shape_of(self, value: ir.Value) -> ir.Value:
        """INT64 vector with the shape of ``value``, constant where it is known."""
        static = static_dims(value)
        if static is not None:
            return self.ints(*static)
        noted: ir.Value | None = value.meta.get(SHAPE)
        return self.Shape(value) if noted is None else noted

    def places(self, value: ir.Value, axis: int) -> ir.Value:
        """INT64 vector 0, 1, ... with a number for each element along an axis."""
        length = self.squeeze(self.slice(self.Shape(value), [0], [axis], [axis + 1]), 0)
        return self.Range(0, length, 1)

    def reshape(self, value: ir.Value, *dims: int) -> ir.Value:
        """Reshape to static dimensions, one of which may be -1."""
        result: ir.Value = self.Reshape(value, self.ints(*dims))
        if all(dim > 0 for dim in dims):
            result.type, result.shape = value.type, ir.Shape(dims)
        return result

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape to the shape of ``like``."""
        # With at most one unknown dimension the shape is written as a constant with a -1: a Shape
        # node would keep ``like`` alive until the backward pass reads its shape.
        dims = dims_of(like)
        if (
            dims is not None
            and sum(not isinstance(dim, int) for dim in dims) <= 1
            and 0 not in dims
        ):
            return self.reshape(value, *(dim if isinstance(dim, int) else -1 for dim in dims))
        return self.Reshape(value, self.shape_of(like))

    def zeros(self, shape: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Zeros of a shape that is given as an INT64 vector."""
        return self.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype.numpy())))

    def type_of(self, value: ir.Value) -> ir.DataType:
        """Element type of a value; FLOAT where it is unknown."""
        return value.dtype or ir.DataType.FLOAT

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Cast, unless the value already has the type."""
        return value if value.dtype == dtype else self.Cast(value, to=int(dtype))

    def transpose(self, value: ir.Value, *perm: int) -> ir.Value:
        """Transpose to the given order of axes; nothing is written for the identity."""
        return value if list(perm) == sorted(perm) else self.Transpose(value, perm=perm)

    # Operators whose axes moved from attribute to input

    def _axes(
        self, op_type: str, since: int, value: ir.Value, axes: Sequence[int], **attributes: Any
    ) -> ir.Value:
        if self.opset >= since:
            return self.emit(op_type, [value, self.ints(*axes)], **attributes)[0]
        return self.emit(op_type, [value], axes=list(axes), **attributes)[0]

    def reduce_sum(self, value: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        """Sum over ``axes``."""
        return self._axes("ReduceSum", 13, value, axes, keepdims=int(keepdims))

    def reduce_mean(self, value: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        """Mean over ``axes``."""
        return self._axes("ReduceMean", 18, value, axes, keepdims=int(keepdims))

    def reduce_max(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Maximum over ``axes``, which stay as axes of length one."""
        return self._axes("ReduceMax", 18, value, axes)

    def reduce_prod(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Product over ``axes``, which stay as axes of length one."""
        return self._axes("ReduceProd", 18, value, axes, keepdims=1)

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """Insert axes of length one."""
        return self._axes("Unsqueeze", 13, value, axes)

    def squeeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """Remove axes of length one."""
        return self._axes("Squeeze", 13, value, axes)

    def join(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        """Concatenate small values, a few at a time: on WebGPU eight inputs are too many."""
        while len(parts) > 1:
            groups = [parts[i : i + MOST_JOINED] for i in range(0, len(parts), MOST_JOINED)]
            parts = [self.Concat(*g, axis=axis) if len(g) > 1 else g[0] for g in groups]
        return parts[0]

    def split(self, value: ir.Value, axis: int, sizes: Sequence[int]) -> tuple[ir.Value, ...]:
        """Cut along ``axis`` into parts of the given sizes."""
        if self.opset >= 13:
            inputs = [value, self.ints(*sizes)]
            return self.emit("Split", inputs, outputs=len(sizes), axis=axis)
        return self.emit("Split", [value], outputs=len(sizes), axis=axis, split=list(sizes))

    def slice(
        self,
        value: ir.Value,
        axes: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        steps: Sequence[int] | None = None,
    ) -> ir.Value:
        """Cut ``starts:ends:steps`` along ``axes``."""
        inputs = [value, self.ints(*starts), self.ints(*ends), self.ints(*axes)]
        if steps is not None and any(step != 1 for step in steps):
            inputs.append(self.ints(*steps))
        return self.Slice(*inputs)

    def pad(self, value: ir.Value, before: Sequence[int], after: Sequence[int]) -> ir.Value:
        """Pad with zeros; one number an axis. Nothing is written where all are zero."""
        if not any(before) and not any(after):
            return value
        return self.Pad(value, self.ints(*before, *after))

    # Compound steps that several rules share

    def heaviside(self, value: ir.Value) -> ir.Value:
        """1 where ``value`` is positive, 0 where it is not, in the type of ``value``."""
        # For float32 a HardSigmoid of slope 2^126 does it in one pass, four times faster than
        # Greater and Cast. It is exact for every number that is not denormal.
        if value.dtype == ir.DataType.FLOAT:
            return self.HardSigmoid(value, alpha=2.0**_LARGEST_EXPONENT, beta=0.0)
        return self.cast(self.Greater(value, 0), value.dtype or ir.DataType.FLOAT)

    def sum_to(self, value: ir.Value, dims: Dims | None, target: ir.Value) -> ir.Value:
        """Sum a broadcast result of dimensions ``dims`` back to the shape of ``target``."""
        wanted = dims_of(target)
        if dims is None or wanted is None:
            return self._sum_to_runtime_shape(value, None, target)
        lead = len(dims) - len(wanted)
        if lead < 0:
            raise OdtpackError(
                "shape-conflict",
                f"{target.name!r} is declared with {len(wanted)} axes, more than the result that "
                "is computed from it has",
            )
        pairs = list(zip(dims[lead:], wanted, strict=True))
        if any(want not in (have, 1) and not isinstance(want, int) for have, want in pairs):
            return self._sum_to_runtime_shape(value, len(dims), target)
        if any(want is None for want in wanted):
            return self._sum_to_runtime_shape(value, len(dims), target)
        axes = [lead + i for i, (have, want) in enumerate(pairs) if want == 1 and have != 1]
        if not axes and not lead:
            return value
        if not axes:
            return self.reduce_sum(value, range(lead), keepdims=False)
        value = self.reduce_sum(value, [*range(lead), *axes])
        return self.reshape_like(value, target) if lead else value

    def _sum_to_runtime_shape(
        self, value: ir.Value, rank: int | None, target: ir.Value
    ) -> ir.Value:
        """The same where the shapes are known only when the model runs."""
        shape, wanted = self.Shape(value), self.Shape(target)
        ones = self.Expand(self.ints(1), self.Sub(self.Shape(shape), self.Shape(wanted)))
        padded = self.Concat(ones, wanted, axis=0)
        if self.opset < 13 and rank is not None:  # its axes are attributes: split each into two
            sizes = self.Concat(padded, self.Div(shape, self.Max(padded, 1)), axis=0)
            pairs = self.reshape(self.Transpose(self.reshape(sizes, 2, rank)), 2 * rank)
            split = self.Reshape(value, pairs)
            return self.Reshape(self.reduce_sum(split, range(1, 2 * rank, 2)), wanted)
        axes = self.reshape(self.NonZero(self.Sub(shape, padded)), -1)  # a size differs, or is 1
        if self.opset < 13:
            raise OdtpackError(
                "unknown-shape",
                f"the ranks of {value.name!r} and {target.name!r} must be known to sum a "
                "gradient back to the shape that was broadcast",
                hint="export the model with opset 13 or newer, or with static shapes",
            )
        summed = self.ReduceSum(value, axes, keepdims=1, noop_with_empty_axes=1)
        return self.Reshape(summed, wanted)


# Codes of 4 bits, two in a byte: no kernel but DequantizeLinear takes them apart.

FOUR_BITS = {ir.DataType.INT4: 8, ir.DataType.UINT4: 0}
"""Types, and what is added to their numbers."""


def four_bit_codes(tensor: ir.TensorProtocol) -> np.ndarray:
    """The numbers, from 0 on, as UINT8."""
    return (tensor.numpy().astype(np.int8) + FOUR_BITS[tensor.dtype]).astype(np.uint8)


def packed_four_bits(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor as a model takes it that unpacks it: of 4 bits as UINT8 [n / 2]."""
    # In the order of MatMulNBits, which reads the same bytes of the file in an inference model.
    if tensor.dtype not in FOUR_BITS:
        return tensor

    def read() -> ir.TensorProtocol:
        flat = four_bit_codes(tensor).reshape(-1)
        both = flat[::2].copy()
        both[: flat.size // 2] |= flat[1::2] << 4
        return ir.tensor(both, name=tensor.name)

    shape = ir.Shape([-(-math.prod(tensor.shape.numpy()) // 2)])
    return ir.LazyTensor(read, dtype=ir.DataType.UINT8, shape=shape, name=tensor.name)


def unpack_four_bits(op: Ops, value: ir.Value, shift: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Write what makes numbers from 0 on of packed ones; ``shift`` is 4, or 1/16 as FLOAT."""
    if shift.dtype == ir.DataType.FLOAT:  # where there are no kernels for bits
        both = op.cast(value, ir.DataType.FLOAT)
        high = op.Floor(op.Mul(both, shift))
        low = op.Sub(both, op.Mul(high, 16.0))
    else:
        all_bits = op.constant(np.full((), 255, np.uint8))
        low = op.BitwiseAnd(value, op.BitShift(all_bits, shift, direction="RIGHT"))
        high = op.BitShift(value, shift, direction="RIGHT")
    # A Transpose puts them in turn faster than a Concat of columns does.
    rows = op.Concat(op.unsqueeze(low, 0), op.unsqueeze(high, 0), axis=0)
    both = op.reshape(op.transpose(rows, 1, 0), -1)
    if math.prod(shape) % 2:
        both = op.slice(both, [0], [0], [math.prod(shape)])
    found = op.reshape(both, *shape)
    return op.cast(found, ir.DataType.UINT8) if shift.dtype == ir.DataType.FLOAT else found
