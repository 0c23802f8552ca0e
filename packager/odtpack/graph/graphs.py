"""Reads and writes a graph: what it holds, and new nodes in it, ``op.Mul(x, 0.5)``.

Everything that differs between opsets (axes as attribute or as input) is decided by :class:`Ops`,
so that a gradient rule stays an equation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnx_ir.passes.common import inliner

from odtpack.errors import OdtpackError

TRAINABLE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
"""Kept in float32, or in float64 as soon as one parameter is of that type."""


Dims = tuple[int | str | None, ...]

LOOK_UP = "odtpack.look-up"
"""Metadata of the node that ends a look-up of rows that are stored as codes."""

RANDOM_OPERATORS: Final = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
})  # fmt: skip
"""Operators that give something else when they run again; Dropout where it is in training mode."""

PLAIN_ATTRIBUTES: Final = {
    ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING,
    ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS,
}  # fmt: skip
"""Kinds of attributes whose values can be compared."""

_LIFTED = "odtpack.lifted_constant"
_SETTING = "setting"


def wider(dtype: ir.DataType) -> ir.DataType:
    """The type for sums and statistics: float32 where the values are float16."""
    return ir.DataType.FLOAT if dtype == ir.DataType.FLOAT16 else dtype


def dims_of(value: ir.Value | None) -> Dims | None:
    """Dimensions of a value: an int, a symbol or None each; None if the rank is unknown."""
    if value is None or value.shape is None:
        return None
    return tuple(
        dim if isinstance(dim, int) else (dim.value if isinstance(dim.value, str) else None)
        for dim in value.shape
    )


def static_dims(value: ir.Value | None) -> tuple[int, ...] | None:
    """Dimensions of a value if all of them are known numbers, else None."""
    shape = None if value is None else value.shape
    return None if shape is None or not shape.is_static() else shape.numpy()


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Graphs in a node's attributes: the branches of an If, the body of a Loop."""
    graphs: list[ir.Graph] = []
    # The dictionary inside: going through its wrapper was a tenth of a build.
    attributes = node.attributes.data
    if not attributes:
        return graphs
    for attribute in attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def nodes_of(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of a graph, each before those of its subgraphs."""
    # The same as ``graph.all_nodes()``, in a fraction of the time.
    for node in graph:
        yield node
        for subgraph in subgraphs(node):
            yield from nodes_of(subgraph)


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Values that a node reads: its inputs, and what its subgraphs take from around them."""
    yield from (value for value in node.inputs if value is not None)
    for subgraph in subgraphs(node):
        yield from captures(subgraph)


def ancestors(values: Iterable[ir.Value], graph: ir.Graph | None = None) -> set[ir.Node]:
    """Nodes that some values need: those of ``graph``, if one is given."""
    found: set[ir.Node] = set()
    stack = [value.producer() for value in values]
    while stack:
        node = stack.pop()
        if node is None or node in found or (graph is not None and node.graph is not graph):
            continue
        found.add(node)
        stack += [value.producer() for value in reads(node)]
    return found


def defined(graph: ir.Graph) -> set[ir.Value]:
    """Inputs, initializers and node outputs of a graph, without those of its subgraphs."""
    outputs = (value for node in graph for value in node.outputs)
    return {*graph.inputs, *graph.initializers.values(), *outputs}


def captures(graph: ir.Graph) -> list[ir.Value]:
    """Values that a subgraph, or a graph inside it, takes from around it, each once."""
    own = defined(graph)
    found = dict.fromkeys(value for node in graph for value in reads(node) if value not in own)
    found.update(dict.fromkeys(value for value in graph.outputs if value not in own))
    return list(found)


def used_names(graph: ir.Graph) -> set[str]:
    """Every name of a value or node in the graph and its subgraphs."""
    named: list[ir.Value | ir.Node] = [*graph.inputs, *graph.initializers.values()]
    for node in nodes_of(graph):
        named += (node, *node.outputs)
        for subgraph in subgraphs(node):
            named += (*subgraph.inputs, *subgraph.initializers.values())
    return {each.name for each in named if each.name}


class Names(set[str]):
    """Names that are taken, and new ones beside them."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        super().__init__(taken)
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """Take a name that is free: the stem, or the stem and a number from 2 on."""
        while True:
            count = self._counts[stem] = self._counts.get(stem, 0) + 1
            name = stem if count == 1 else f"{stem}_{count}"
            if name not in self:
                self.add(name)
                return name


class InlinePass(common_passes.InlinePass):
    """onnx-ir's, in time proportional to what it makes."""

    # That one tries ``name_2``, ``name_3`` and so on for every copy of a value from the start, so
    # that the copies of a function that is called n times take n^2 tries.

    def _reset(self, model: ir.Model) -> None:
        super()._reset(model)
        self._used_value_names = Names(self._used_value_names)
        self._used_node_names = Names(self._used_node_names)


def _make_unique_name(name: str, callstack: list[str], used_names: set[str]) -> str:
    """As onnx-ir's: the same names, found sooner where the set remembers how far it got."""
    names = used_names if isinstance(used_names, Names) else Names(used_names)
    made = names.fresh(name)
    used_names.add(made)
    return made


inliner._make_unique_name = _make_unique_name


def is_lifted_constant(value: ir.Value) -> bool:
    """Whether an initializer was a Constant node in the user's model."""
    return _LIFTED in value.meta


def mark_constant(value: ir.Value, *, setting: bool = False) -> None:
    """Let an initializer count as a constant, which is neither trained nor frozen by itself."""
    # setting: Also where all weights of the model are constants.
    value.meta[_LIFTED] = _SETTING if setting else True


def is_setting(value: ir.Value) -> bool:
    """Whether an initializer sets an operator up instead of being a parameter."""
    return value.meta.get(_LIFTED) == _SETTING


CARRIED: Final = "odtpack.carried"
"""Metadata of the initializer that a state became: the output that takes its place."""


def is_training_batch_norm(node: ir.Node) -> bool:
    """Whether a BatchNormalization node uses the statistics of its batch."""
    if node.op_type != "BatchNormalization" or node.domain:
        return False
    # Before opset 14 training mode had no attribute: it was there if outputs were.
    return (
        bool(node.attributes.get_int("training_mode", 0))
        or len([y for y in node.outputs if y.name]) > 1
    )


def running_statistics(graph: ir.Graph) -> list[str]:
    """Initializers that training-mode nodes update: running means and variances."""
    names = []
    for node in graph:
        if is_training_batch_norm(node):
            given = (v for v in node.inputs[3:5] if v is not None and not of_batch(node, v))
            names += [v.name for v in given if v.name is not None]
    return list(dict.fromkeys(names))


def of_batch(norm: ir.Node, statistic: ir.Value) -> bool:
    """Whether a normalization's statistic is computed from its batch: there is nothing to keep."""
    return any(norm.inputs[0] in node.inputs for node in ancestors([statistic]))


def carried(graph: ir.Graph) -> dict[str, str]:
    """States that go from step to step, each with the output that is the next one."""
    states = {str(v.name): v for v in (*graph.initializers.values(), *graph.inputs)}
    return {name: v.meta[CARRIED] for name, v in states.items() if CARRIED in v.meta}


def draws(node: ir.Node) -> bool:
    """Whether a node gives something else when it runs again."""
    if node.op_type != "Dropout":
        return node.op_type in RANDOM_OPERATORS
    training = node.inputs[2] if len(node.inputs) > 2 else None
    known = constant(training, largest=1)
    on = training is not None and (known is None or bool(known.item()))
    return on and scalar(node.inputs[1]) != 0


def turn_dropout_off(graph: ir.Graph) -> None:
    """Drop the training_mode inputs of Dropout, without which it passes its input through."""
    for node in nodes_of(graph):
        if node.op_type == "Dropout" and len(node.inputs) > 2:
            node.resize_inputs(2)


def drop_unused_constants(graph: ir.Graph) -> None:
    """Drop the initializers of subgraphs that nothing reads."""
    for subgraph in graph.subgraphs():
        for value in list(subgraph.initializers.values()):
            if not value.uses() and not value.is_graph_output():
                subgraph.initializers.pop(str(value.name))


def is_sorted(graph: ir.Graph, made: set[ir.Value] | None = None) -> bool:
    """Whether every node stands after those that it reads from, so that sorting changes nothing."""
    # made: What nodes before a subgraph have computed; what its own do is added.
    made = set() if made is None else made
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in made and value.producer() is not None:
                return False
        if not all(is_sorted(subgraph, made) for subgraph in subgraphs(node)):
            return False
        made.update(node.outputs)
    return True


def constant(value: ir.Value | None, largest: int | None = None) -> np.ndarray | None:
    """What a value holds that is known before the model runs, of so many elements at most."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or (largest is not None and tensor.size > largest):
        return None
    return np.asarray(tensor.numpy())


def scalar(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds, else None."""
    array = constant(value, largest=1)
    return None if array is None or array.size != 1 else float(array.item())


def is_scalar(value: ir.Value | None, wanted: float) -> bool:
    """Whether a value is a constant close to ``wanted``, as float32 goes."""
    number = scalar(value)
    return number is not None and bool(np.isclose(number, wanted, rtol=1e-6, atol=0))


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that computes ``value``, if it is a standard operator of one of the types."""
    node = None if value is None else value.producer()
    return None if node is None or node.domain or node.op_type not in op_types else node


def maker(value: ir.Value) -> ir.Node:
    """The node that computes a value of which it is known that one does."""
    node = value.producer()
    assert node is not None  # noqa: S101 - the caller knows
    return node


def operand(node: ir.Node, index: int) -> ir.Value:
    """An input of a node that is known to be there."""
    value = node.inputs[index]
    assert value is not None  # noqa: S101 - the caller knows
    return value


def split_scalar(node: ir.Node | None, wanted: float) -> ir.Value | None:
    """The other operand of a commutative node one of whose operands is the constant ``wanted``."""
    if node is None or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    if is_scalar(right, wanted):
        return left
    return right if is_scalar(left, wanted) else None


def same_rank(left: ir.Value | None, right: ir.Value | None) -> bool:
    """Whether two values are known to have as many axes."""
    # A constant of one element may be written with more axes than what it is combined with, [1, 1,
    # 1], and gives them to the result.
    if left is None or right is None or left.shape is None or right.shape is None:
        return False
    return left.shape.rank() == right.shape.rank()


def private(nodes: Iterable[ir.Node], last: ir.Node) -> bool:
    """Whether only these nodes read what they compute, apart from the result of ``last``."""
    inside = set(nodes) | {last}
    return all(
        not value.is_graph_output() and all(user in inside for user in value.consumers())
        for node in inside - {last}
        for value in node.outputs
    )


def typed(value: ir.Value, like: ir.Value) -> ir.Value:
    """Give a value the type and shape of another; return it."""
    value.type, value.shape = like.type, like.shape
    return value


def redirect(readers: Iterable[tuple[ir.Node, int]], value: ir.Value) -> None:
    """Let nodes read a value at these places among their inputs."""
    for node, index in readers:
        node.replace_input_with(index, value)


def replace(old: ir.Value, new: ir.Value, nodes: Iterable[ir.Node]) -> None:
    """Let ``new`` take the name and the place of ``old``, and remove ``nodes``, last first."""
    name, old.name = old.name, None
    typed(new, old)
    new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    for node in nodes:
        if node.graph is not None:
            node.graph.remove(node, safe=True)


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

    def before(self, node: ir.Node) -> AbstractContextManager[None]:
        """Write in front of ``node`` for the length of a ``with`` block."""
        graph = node.graph or self.graph
        return self._at(graph, lambda new: graph.insert_before(node, new))

    def after(self, node: ir.Node) -> AbstractContextManager[None]:
        """Write after ``node`` for the length of a ``with`` block."""
        graph, last = node.graph or self.graph, node

        def insert(new: ir.Node) -> None:
            nonlocal last
            graph.insert_after(last, new)
            last = new

        return self._at(graph, insert)

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
        sizes = None if dims is None else [d if isinstance(d, int) else -1 for d in dims]
        if sizes is not None and sizes.count(-1) <= 1 and 0 not in sizes:
            return self.reshape(value, *sizes)
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
        if any(want is None or (isinstance(want, str) and want != have) for have, want in pairs):
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
