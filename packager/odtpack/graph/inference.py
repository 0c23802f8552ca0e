"""Types and shapes of a model's values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
import onnx_ir as ir

from odtpack.graph.graphs import (
    PLAIN_ATTRIBUTES,
    Dims,
    constant,
    defined,
    dims_of,
    nodes_of,
    producer,
    scalar,
    static_dims,
    subgraphs,
)
from odtpack_simulator.memory.missing_shapes import infer_node, tensor_type

# ``onnx_ir``'s own pass does the same by way of a second model, built from the result and then
# thrown away; most of a build was spent there.

_LONGEST_VECTOR = 1 << 24
_LARGEST_CONSTANT: Final = 1000  # bytes of an initializer that may be a shape or another small one


def infer_shapes(model: ir.Model, *, new_only: bool = False) -> ir.Model:
    """Infer types and shapes of every value, with data propagation; return the model."""
    # Values of subgraphs are among them, and what loops carry.
    # What is known stays. Where inference fails, nothing is added: a rule that needs what is
    # missing says so.
    # The onnx library propagates vectors element by element, so data propagation is left out where
    # a model declares one so long that it could exhaust the memory.
    # model: Changed in place. new_only: What is known in full was inferred before, and nothing that
    # it depends on has changed since.
    if _complete_by_node(model, new_only):
        return model
    return _infer_whole(model)


def _complete_by_node(model: ir.Model, new_only: bool) -> bool:
    """Infer node by node, as long as each one's outputs become fully known."""
    # Most models are known in full already, but for a few new nodes. What is found is what
    # inference of the whole model finds: with every size a number or a name, data propagation has
    # nothing to add.
    # Returns whether every value is known now. Otherwise the rest is for the whole.
    inference = NodeInference(dict(model.graph.opset_imports))
    type_initializers(model.graph)
    known = _is_known if new_only else _is_static
    for node in model.graph:
        if subgraphs(node):
            return False
        if all(v.dtype is not None and known(v.shape) for v in node.outputs if v.name):
            continue
        for value, found in zip(node.outputs, inference.outputs(node), strict=True):
            if value.name and not _complete(value, found):
                return False
    return True


def _complete(value: ir.Value, found: Found | None) -> bool:
    """Take over what was found about a value; whether it is fully known then."""
    # What is declared stays, but that a number found wins over a name.
    dtype, dims = found or (None, None)
    known = dims_of(value)
    if dims is not None and known is not None:
        if len(known) != len(dims):
            return False
        pairs = zip(known, dims, strict=True)
        dims = tuple(
            old if isinstance(old, int) else new if isinstance(new, int) else old or new
            for old, new in pairs
        )
    dims = dims if dims is not None else known
    if value.dtype is None and dtype is not None:
        value.type = ir.TensorType(dtype)
    if dims is not None and dims != known:
        value.shape = ir.Shape(dims)
    return value.dtype is not None and _is_known(value.shape)


def _infer_by_standard(model: ir.Model) -> None:
    """The same as far as the onnx library goes, which treats no loop bodies."""
    while (inferred := inferred_proto(model)) is not None:
        _merge(model.graph, inferred.graph)
        if not (_give_ranks(model.graph) | _give_sizes(model.graph)):
            return


def _give_ranks(graph: ir.Graph) -> bool:
    """Give the result of a Reshape as many axes as its new shape has elements."""
    # The standard's inference does not, where a size is computed. Sizes that are constants are
    # taken over. Returns whether there was one.
    found = False
    for node in nodes_of(graph):
        if node.op_type != "Reshape" or node.domain or len(node.inputs) < 2:
            continue
        output, wanted = node.outputs[0], node.inputs[1]
        length = static_dims(wanted) if wanted is not None and output.shape is None else None
        if wanted is None or length is None or len(length) != 1:
            continue
        joined = producer(wanted, "Concat")
        parts = [] if joined is None else [scalar(value) for value in joined.inputs]
        sizes = parts if len(parts) == length[0] else [None] * length[0]
        output.shape = ir.Shape([None if size is None or size < 1 else int(size) for size in sizes])
        found = True
    return found


def _give_sizes(graph: ir.Graph) -> bool:
    """Give results of Reshape and Tile the sizes that follow from those before."""
    # The standard's inference divides and multiplies numbers only, even where a name cancels out.
    # Returns whether there was one.
    found: dict[str, int | str] = {}
    changed = False
    for node in nodes_of(graph):
        if node.op_type not in ("Reshape", "Tile") or node.domain or len(node.inputs) < 2:
            continue
        before, output = node.inputs[0], node.outputs[0]
        old, dims = None if before is None else dims_of(before), dims_of(output)
        if old is None or dims is None or None in old or all(is_known(dim) for dim in dims):
            continue
        new = _reshaped(old, dims) if node.op_type == "Reshape" else _tiled(old, dims, node)
        if new != dims:
            pairs = zip(dims, new, strict=True)
            found |= {a: b for a, b in pairs if isinstance(a, str) and b is not None and a != b}
            output.shape, changed = ir.Shape(new), True
    for value in [v for node in nodes_of(graph) for v in node.outputs] if found else ():
        dims = dims_of(value)
        if dims is not None and not found.keys().isdisjoint(dims):
            value.shape = ir.Shape([found.get(d, d) if isinstance(d, str) else d for d in dims])
    return changed


def _reshaped(old: Dims, dims: Dims) -> Dims:
    """Dimensions with the only unknown one: there are as many elements as before."""
    before, after = Counter(old), Counter(dims)
    rest, wanted = before - after, [*(after - before).elements()]
    numbers = [dim for dim in wanted if isinstance(dim, int)]
    unknown = [dim for dim in wanted if not isinstance(dim, int)]
    names = [dim for dim in rest.elements() if isinstance(dim, str)]
    size = math.prod(dim for dim in rest.elements() if isinstance(dim, int))
    if len(unknown) != 1 or is_known(unknown[0]) or 0 in old or 0 in dims:
        return dims
    size, remainder = divmod(size, math.prod(numbers))
    if remainder or len(names) > 1 or (names and (size != 1 or not is_known(names[0]))):
        return dims
    axis = dims.index(unknown[0])
    return (*dims[:axis], names[0] if names else size, *dims[axis + 1 :])


def _tiled(old: Dims, dims: Dims, node: ir.Node) -> Dims:
    """Dimensions with those that are repeated once, and so stay as they are."""
    times = constant(node.inputs[1], largest=len(old))
    if times is None or not len(times) == len(old) == len(dims):
        return dims
    rows = zip(old, dims, times.tolist(), strict=True)
    return tuple(a if count == 1 and is_known(a) and not is_known(b) else b for a, b, count in rows)


def inferred_proto(model: ir.Model, *, sizes: bool = True) -> onnx.ModelProto | None:
    """What the onnx library makes of a model, without the values of large initializers."""
    # sizes: Follow the values of shapes through the graph, which is slow where long vectors are
    # joined. Types do not depend on it.
    # Returns the model with types and shapes; None if its inference fails. Initializers are inputs.
    try:
        return _inferred(model, sizes=sizes, strict=False)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return None


def contradiction(model: ir.Model) -> str | None:
    """What the onnx library says of types and shapes that contradict each other in a model."""
    try:
        _inferred(model, sizes=True, strict=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return str(error)
    return None


def _inferred(model: ir.Model, *, sizes: bool, strict: bool) -> onnx.ModelProto:
    vectors = (v for g in model.graphs() for v in defined(g) if len(dims_of(v) or ()) == 1)
    data_prop = sizes and all(
        not isinstance(n, int) or n <= _LONGEST_VECTOR for v in vectors for n in dims_of(v) or ()
    )
    with _without_large_initializers(model.graph):
        proto = ir.to_proto(model)
    return onnx.shape_inference.infer_shapes(
        proto, check_type=strict, strict_mode=strict, data_prop=data_prop
    )


def type_initializers(graph: ir.Graph) -> None:
    """Write down types and shapes of initializers, as their values have them."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and value.shape is None:
            value.shape = ir.Shape(tensor.shape.numpy())
        if tensor is not None and value.type is None:
            value.type = ir.TensorType(tensor.dtype)


@contextmanager
def _without_large_initializers(graph: ir.Graph) -> Iterator[None]:
    """Make initializers inputs, and leave the values of the large ones out, for a while."""
    type_initializers(graph)
    initializers = dict(graph.initializers)
    inputs = list(graph.inputs)
    known = set(inputs)
    for name, value in initializers.items():
        tensor = value.const_value
        if value not in known:
            graph.inputs.append(value)
        if tensor is None or tensor.nbytes > _LARGEST_CONSTANT:
            del graph.initializers[name]
    try:
        yield
    finally:
        graph.initializers.clear()
        graph.initializers.update(initializers)
        graph.inputs[:] = inputs


def _merge(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Take over what inference found out about a graph and its subgraphs."""
    found = {info.name: info.type for info in (*proto.value_info, *proto.output)}
    for node, described in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            inferred = found.get(value.name or "")
            if inferred is not None and not (value.dtype is not None and _is_static(value.shape)):
                _refine(value, inferred)
        bodies = [
            body for a in described.attribute for body in ([a.g] if a.HasField("g") else a.graphs)
        ]
        for body, inner in zip(subgraphs(node), bodies, strict=True):
            for value, info in zip(body.inputs, inner.input, strict=True):
                _refine(value, info.type)
            _merge(body, inner)


def _refine(value: ir.Value, inferred: onnx.TypeProto) -> None:
    if inferred.HasField("tensor_type"):  # as nearly every value is one: most of a merge is here
        kind, dims = tensor_type(inferred)
        if kind and (value.dtype is None or int(value.dtype) != kind):
            value.type = ir.TensorType(ir.DataType(kind))
        if dims is not None and dims_of(value) != dims:
            value.shape = ir.Shape(dims)
        return
    type_ = ir.serde.deserialize_type_proto_for_type(inferred)
    shape = ir.serde.deserialize_type_proto_for_shape(inferred)
    if type_ is not None and value.type != type_:
        value.type = type_
    if shape is not None and value.shape != shape:
        value.shape = shape


def _is_static(shape: ir.Shape | None) -> bool:
    return shape is not None and all(isinstance(dim, int) for dim in shape)


def is_known(dim: int | str | None) -> bool:
    """Whether a size is a number or has a name, other than what inference makes up."""
    return isinstance(dim, int) or (dim is not None and not dim.startswith("unk__"))


def _is_known(shape: ir.Shape | None) -> bool:
    return shape is not None and all(
        isinstance(dim, int) or is_known(dim.value or None) for dim in shape
    )


# What the standard finds out about one node's outputs from its inputs alone.
#
# Training graphs repeat themselves: the same operator with the same attributes meets inputs
# of the same types and shapes in every layer. So each such node is inferred once, and the
# whole takes a fraction of what inference of the model takes.


Found = tuple[ir.DataType, Dims | None]
"""Element type and dimensions; None for an unknown rank, and for each unknown dimension."""

_Input = tuple[ir.DataType | None, Dims | None, bytes | None]
"""Type, dimensions and, of a small initializer, the bytes of its elements."""
_Key = tuple[
    tuple[tuple[str, int], ...], str, str, tuple[object, ...], tuple[_Input | None, ...], int
]

_KNOWN: Final[dict[_Key, list[Found | None]]] = {}
"""What was found before. A training model repeats most of its forward model."""

_MOST_KNOWN: Final = 10_000


class NodeInference:
    """Infers nodes of one model in topological order, without data propagation between them."""

    # Where a value has no type or shape, what was found of it before takes its place.
    # opsets: Versions of the operator sets by domain.

    def __init__(self, opsets: dict[str, int]) -> None:
        self._opsets = opsets
        self._imports = [onnx.helper.make_opsetid(*each) for each in opsets.items()]
        self._of_opsets = tuple(sorted(opsets.items()))
        self._found: dict[ir.Value, Found] = {}
        self._descriptions: dict[ir.Value, _Input] = {}  # most values are read several times

    def outputs(self, node: ir.Node) -> list[Found | None]:
        """Type and shape of each output, as far as they follow from the inputs'."""
        # None for an output of which nothing is found out, and for every output of a node with
        # subgraphs, whose types come from inside.
        if subgraphs(node):
            return [None] * len(node.outputs)
        inputs = tuple([self._described(value) for value in node.inputs])
        attributes = node.attributes.data.values()  # see odtpack.graph.graphs.subgraphs
        if any(attribute.type not in PLAIN_ATTRIBUTES for attribute in attributes):
            found = self._infer(node, inputs)
        else:
            plain = tuple(
                [
                    (a.name, a.type, tuple(a.value) if isinstance(a.value, list) else a.value)
                    for a in attributes
                ]
            )
            key = (self._of_opsets, node.op_type, node.domain, plain, inputs, len(node.outputs))
            known = _KNOWN.get(key)  # once: another thread may clear it
            if known is None:
                if len(_KNOWN) >= _MOST_KNOWN:
                    _KNOWN.clear()
                known = _KNOWN[key] = self._infer(node, inputs)
            found = known
        for value, each in zip(node.outputs, found, strict=True):
            if each is not None:
                self._found[value] = each
                self._descriptions.pop(value, None)
        return found

    def _described(self, value: ir.Value | None) -> _Input | None:
        if value is None:
            return None
        known = self._descriptions.get(value)
        if known is None:
            known = self._descriptions[value] = self._describe(value)
        return known

    def _describe(self, value: ir.Value) -> _Input:
        tensor = value.const_value if value.is_initializer() else None
        if tensor is not None:
            small = tensor.nbytes <= _LARGEST_CONSTANT and tensor.dtype != ir.DataType.STRING
            return tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes() if small else None
        dtype, dims = self._found.get(value, (None, None))
        return value.dtype or dtype, dims if value.shape is None else dims_of(value), None

    def _infer(self, node: ir.Node, inputs: tuple[_Input | None, ...]) -> list[Found | None]:
        nothing: list[Found | None] = [None] * len(node.outputs)
        version = self._opsets.get(node.domain, 1)
        if not onnx.defs.has(node.op_type, version, node.domain):
            return nothing
        given: list[tuple[int, Dims | None, onnx.TensorProto | None] | None] = []
        for each in inputs:
            if each is None:
                given.append(None)
                continue
            dtype, dims, value = each
            if dtype is None:
                return nothing
            tensor = None
            if value is not None:
                sizes = [dim for dim in dims or () if isinstance(dim, int)]
                tensor = onnx.TensorProto(data_type=int(dtype), dims=sizes, raw_data=value)
            given.append((int(dtype), dims, tensor))
        proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
        proto.output.extend(f"output{index}" for index in range(len(node.outputs)))
        proto.attribute.extend(map(ir.serde.serialize_attribute, node.attributes.values()))
        try:
            found = infer_node(proto, version, given, self._imports)
        except (
            onnx.shape_inference.InferenceError,
            onnx.checker.ValidationError,
            RuntimeError,
            ValueError,
        ):
            return nothing
        return [(ir.DataType(kind), dims) if kind else None for kind, dims in found]


# Shapes of what a Loop carries, which the standard's shape inference leaves open.
#
# The standard lets a carried value change its shape from turn to turn, so that inference
# forgets it even where it stays the same. Here it is assumed to stay that of the first value,
# and the assumption is given up, axis by axis, where the body contradicts it.

_ROUNDS = 10
_SIZE = 5040  # of an axis that is known only when the model runs: it has many divisors
VARIES = "odtpack.shape_varies"
"""Set in the meta data of an input of a body that is known to change its shape."""

_OPEN = "odtpack.shape_open"  # the same where nothing is known, lest it is tried again


class _State(NamedTuple):
    """The same carried value before the loop, in a turn, after the turn, and after the loop."""

    first: ir.Value
    before: ir.Value
    after: ir.Value
    last: ir.Value


def _infer_whole(model: ir.Model) -> ir.Model:
    """Infer shapes of a model, changed in place, those of carried values included."""
    _infer_by_standard(model)
    states = [
        state
        for state in _states(model)
        if not state.before.meta.get(_OPEN)
        and isinstance(state.first.type, ir.TensorType)
        and (state.before.shape is None or state.last.shape is None)
    ]
    if not states:
        return model
    known = {value: value.shape for graph in model.graphs() for value in defined(graph)}
    guesses: dict[_State, Dims | None] = {}
    judged = False
    for _ in range(_ROUNDS):
        # Of a loop inside a loop the first value gets its shape from a guess about the other.
        new = [s for s in states if s not in guesses and s.first.shape is not None]
        guesses |= {state: dims_of(state.first) for state in new}
        if not new:
            for state in () if judged else states:  # the shapes of the first turn, assumed or not
                first, after = dims_of(state.first), dims_of(state.after)
                if first is None or after is None or dims_of(state.before) != first:
                    continue
                sizes = [
                    p for p in zip(first, after, strict=False) if all(type(d) is int for d in p)
                ]
                if len(first) != len(after) or any(a != b for a, b in sizes):
                    state.before.meta[VARIES] = True
            judged = True
            found = {state: _common(state, guess) for state, guess in guesses.items()}
            if found == guesses:
                break
            guesses = found
        _restore(known)
        for state, dims in guesses.items():
            if dims is not None:
                if state.before.shape is None:
                    state.before.shape = ir.Shape(dims)
                state.last.shape = ir.Shape(dims)
        _infer_by_standard(model)
    else:
        _restore(known)
        guesses = dict.fromkeys(states)
    for state, dims in guesses.items():
        if dims is None:
            state.before.meta[_OPEN] = True
    return model


def _restore(shapes: Mapping[ir.Value, ir.Shape | None]) -> None:
    for value, shape in shapes.items():
        value.shape = shape


def _states(model: ir.Model) -> Iterator[_State]:
    for node in nodes_of(model.graph):
        if node.op_type != "Loop" or node.domain:
            continue
        body = node.attributes["body"].as_graph()
        rows = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
        for first, before, after, last in rows:
            if first is not None:
                yield _State(first, before, after, last)


def may_change(graph: ir.Graph, value: ir.Value) -> bool:
    """Whether a carried value may have another shape in another turn."""
    # Sizes that are known only when the model runs are set to numbers for that: then inference
    # separates what has as many elements as before from what has more.
    # graph: The main graph; not changed. value: Input of the body of a Loop in it.
    model = ir.Model(graph, ir_version=8)
    twin = model.clone()
    numbers: dict[str, int] = {}
    for given in twin.graph.inputs:
        given.shape = _with_numbers(given, numbers, new=True)
    # Exporters may call one size by two names: a name counts where inference finds nothing.
    named: dict[ir.Value, ir.Shape | None] = {}
    for inner in twin.graphs():
        for each in defined(inner) - set(twin.graph.inputs):
            if static_dims(each) is None:
                named[each], each.shape = _with_numbers(each, numbers, new=False), None
    states, twins = list(_states(model)), list(_states(twin))
    for _ in range(_ROUNDS):  # a loop inside a loop begins with what the outer one carries
        _infer_by_standard(twin)
        unknown = [s for s in twins if static_dims(s.before) is None and static_dims(s.first)]
        if not unknown:
            break
        for state in unknown:
            state.before.shape = state.last.shape = state.first.shape
    known = next(other for state, other in zip(states, twins, strict=True) if state.before is value)
    if static_dims(known.first) is None or static_dims(known.after) is None:
        for each, shape in named.items():
            each.shape = each.shape or shape
        _infer_by_standard(twin)
    dims = static_dims(known.first)
    return dims is None or dims != static_dims(known.before) or dims != static_dims(known.after)


def _with_numbers(value: ir.Value, numbers: dict[str, int], *, new: bool) -> ir.Shape | None:
    """The shape with a number for each size, and None where one is not known."""
    dims = dims_of(value)
    if dims is None:
        return None
    found = []
    for axis, dim in enumerate(dims):
        name = f"{value.name}:{axis}" if dim is None else str(dim)
        if not isinstance(dim, int) and new:
            numbers.setdefault(name, _SIZE * (len(numbers) + 1))
        found.append(dim if isinstance(dim, int) else numbers.get(name))
    return None if None in found else ir.Shape([dim for dim in found if dim is not None])


def _common(state: _State, guess: Dims | None) -> Dims | None:
    """The guess without what the values before and after a turn contradict."""
    for value in (state.before, state.after):
        dims = dims_of(value)
        if guess is None or dims is None or len(dims) != len(guess):
            return None
        pairs = zip(guess, dims, strict=True)
        guess = tuple(dim if dim == other else None for dim, other in pairs)
    return guess
