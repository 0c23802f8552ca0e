"""Reads a graph: dimensions of values, what nodes and subgraphs hold and take, names."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnx_ir.passes.common import inliner

TRAINABLE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
"""Kept in float32, or in float64 as soon as one parameter is of that type."""


# Nothing is written here: :mod:`odtpack.graph.ops` does that.

Dims = tuple[int | str | None, ...]

LOOK_UP = "odtpack.look-up"
"""Metadata of the node that ends a look-up of rows that are stored as codes."""

RANDOM_OPERATORS: Final = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
})  # fmt: skip
"""Operators that give something else when they run again; Dropout where it is in training mode."""

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
    dims = dims_of(value)
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        return None
    return tuple(int(dim) for dim in dims if dim is not None)


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
    names = {value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name}
    for node in nodes_of(graph):
        names.update(value.name for value in node.outputs if value.name)
        if node.name:
            names.add(node.name)
        for subgraph in subgraphs(node):
            names.update(
                v.name for v in (*subgraph.inputs, *subgraph.initializers.values()) if v.name
            )
    return names


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


# Merges nodes that compute the same, as ONNX Runtime's optimizers do.

PLAIN_ATTRIBUTES: Final = {
    ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING,
    ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS,
}  # fmt: skip


def merge(graph: ir.Graph, nodes: Iterable[ir.Node] | None = None) -> None:
    """Let the first of several equal nodes do for all."""
    # graph: A sorted graph, whose subgraphs stay as they are. nodes: Those of it to merge, in its
    # order; all if None.
    found: dict[Hashable, ir.Node] = {}
    for node in list(graph if nodes is None else nodes):
        key = _key(node)
        if key is None:
            continue
        first = found.setdefault(key, node)
        if first is node or any(value.is_graph_output() for value in node.outputs):
            continue
        for kept, value in zip(first.outputs, node.outputs, strict=True):
            if kept.shape is None:
                kept.shape = value.shape
        ir.convenience.replace_all_uses_with(node.outputs, first.outputs)
        graph.remove(node, safe=True)


def _key(node: ir.Node) -> Hashable:
    """A key that equal nodes share; None for a node that must not be merged."""
    attributes = sorted(node.attributes.items())
    if node.domain or node.op_type in RANDOM_OPERATORS:
        return None
    if any(attribute.type not in PLAIN_ATTRIBUTES for _, attribute in attributes):
        return None
    return (
        node.op_type,
        tuple(node.inputs),
        tuple(bool(value.name) for value in node.outputs),
        tuple((name, str(attribute.value)) for name, attribute in attributes),
    )


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


class _Collector:
    """What is known of the collector."""

    # `left_behind`: whether an earlier graph may still wait to be freed.
    # `frozen`: Whether the program froze objects of its own. It is asked until it has: to count
    # them takes as long as a small build.

    left_behind = False
    frozen = False


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running inside a ``with`` block, or a function so decorated."""
    # A graph is hundreds of thousands of small objects that all stay alive. Each collection walked
    # through them to find nothing: a third of the time of a build, which was not linear for that
    # reason. What is left is handed to the collector as old objects: as young ones all would be
    # walked through at the next allocation, a fifth of the time of a build. A program that froze
    # its own objects keeps them frozen; the build's cannot be told from them and stay young.
    was_enabled = gc.isenabled()
    if was_enabled and _Collector.left_behind:
        gc.collect()
        _Collector.left_behind = False
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _Collector.frozen = _Collector.frozen or gc.get_freeze_count() > 0
            if not _Collector.frozen:
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
                _Collector.left_behind = True
            gc.enable()
