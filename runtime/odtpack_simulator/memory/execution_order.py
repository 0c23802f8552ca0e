"""The order in which ONNX Runtime executes a graph, also in layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from odtpack_runtime.package.manifest import Manifest, ParameterInfo
from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX, GRADIENT_SUFFIX

if TYPE_CHECKING:  # a timing run does not load it
    import onnx

# Which trained parameters lie near the input, and a training model that leaves some of them out.
#
# A layer begins at every trained matrix or filter, in the order in which data first meet them;
# vectors (biases, scales of normalizations) belong to the layer before them.

_MATRIX_RANK = 2

Layer = tuple[ParameterInfo, ...]


def trained_layers(graph: onnx.GraphProto, manifest: Manifest) -> list[Layer]:
    """The trained parameters by layer, that nearest to the input first."""
    trained = {p.name: p for p in manifest.parameters if p.role == "trainable"}
    data = {item.name for item in manifest.inputs}
    carried: dict[str, list[str]] = {name: [name] for name in trained}
    met: dict[str, None] = {}
    for node in graph.node:
        names = list(reads(node))
        parameters = list(dict.fromkeys(each for name in names for each in carried.get(name, ())))
        if data.isdisjoint(names):  # a weight may be transposed before it meets the data
            carried.update(dict.fromkeys(node.output, parameters))
            continue
        data.update(node.output)
        met.update(dict.fromkeys(parameters))
    ordered = [trained[name] for name in (*met, *(name for name in trained if name not in met))]
    layers: list[list[ParameterInfo]] = []
    for parameter in ordered:
        if not layers or (
            len(parameter.shape) >= _MATRIX_RANK
            and any(len(each.shape) >= _MATRIX_RANK for each in layers[-1])
        ):
            layers.append([])
        layers[-1].append(parameter)
    return [tuple(layer) for layer in layers]


def drop_gradients(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Take the gradients of some parameters out of a training model, and what only they need."""
    dropped = {name + suffix for name in names for suffix in (GRADIENT_SUFFIX, BUFFER_SUFFIX)}
    _keep(graph.output, [value for value in graph.output if value.name not in dropped])
    _keep(graph.input, [value for value in graph.input if value.name not in dropped])
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(reads(node))
    _keep(graph.node, kept[::-1])
    _keep(graph.initializer, [each for each in graph.initializer if each.name in needed])


def _keep(field: object, items: Iterable[object]) -> None:
    """Let a repeated field hold these of its items."""
    copies = list(items)
    del field[:]  # type: ignore[attr-defined]
    field.extend(copies)  # type: ignore[attr-defined]


# The order in which ONNX Runtime executes the nodes of a graph.
#
# ONNX Runtime numbers nodes as they stand in the file and walks depth first from
# the nodes whose outputs are not read, the last of them first, to what they need,
# the producer with the highest number first; a node comes after everything that
# it needs (``GraphViewer``, its default order). The order in the file matters only
# through the numbers.
#
# An optimized model that ONNX Runtime saves has its nodes in this order, if the
# optimizers changed anything. If not, it is saved as it was. Names of values may
# appear in it twice, outside and inside a body.


def execution_order(graph: onnx.GraphProto) -> list[int]:
    """Return the indices of a graph's nodes in the order of execution."""
    producers = {
        name: index for index, node in enumerate(graph.node) for name in node.output if name
    }
    needs = [
        sorted({producers[name] for name in reads(node) if name in producers})
        for node in graph.node
    ]
    read = {index for indices in needs for index in indices}
    stack = [(index, False) for index in range(len(needs)) if index not in read]
    seen: set[int] = set()
    order = []
    while stack:
        index, is_done = stack.pop()
        if is_done:
            order.append(index)
        elif index not in seen:
            seen.add(index)
            stack.append((index, True))
            stack += [(needed, False) for needed in needs[index] if needed not in seen]
    return order


def sort_saved_model(saved: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Bring the nodes of a graph that ONNX Runtime saved into the order of execution."""
    originals = {name: node for node in original.node for name in node.output if name}
    for node in saved.node:
        twin = next((originals[name] for name in node.output if name in originals), None)
        bodies = {} if twin is None else dict(subgraphs(twin))
        for name, graph in subgraphs(node):
            if name in bodies:
                sort_saved_model(graph, bodies[name])
    if [list(node.output) for node in saved.node] == [list(node.output) for node in original.node]:
        _keep(saved.node, [saved.node[index] for index in execution_order(saved)])


_CAST: Final = "InsertedPrecisionFreeCast_"


def rename_casts(saved: onnx.GraphProto) -> None:
    """Call what ONNX Runtime computes in float32 as the model does; no name twice."""
    # A node without a kernel for float16 gives a value of a new name, and the model's is gone where
    # only such nodes read it. Inside a body the new names are those outside, and ONNX Runtime does
    # not load such a model again.
    given = {name for graph in graphs(saved) for name in _given(graph)}
    plain = {name: name.removeprefix(_CAST) for name in given if name.startswith(_CAST)}
    names = {name: own for name, own in plain.items() if own not in given}
    for graph in graphs(saved):  # the types of what is gone
        _keep(graph.value_info, [v for v in graph.value_info if v.name in given])
    rename(saved, names, frozenset())


def rename(graph: onnx.GraphProto, names: Mapping[str, str], outer: frozenset[str]) -> None:
    """Use new names for values of the graphs around, and for those of its own that clash."""
    own = {name for name in _given(graph) if name}
    taken = own | outer
    names = dict(names)
    for name in sorted(own & outer):
        new = f"{name}/inner"
        while new in taken:
            new += "/inner"
        names[name] = new
        taken |= {new}
    if names:
        for each in (*graph.input, *graph.initializer, *graph.value_info, *graph.output):
            each.name = names.get(each.name, each.name)
    around = frozenset(taken)
    for node in graph.node:
        if names:
            for field in (node.input, node.output):
                field[:] = [names.get(name, name) for name in field]
        for _, body in subgraphs(node):
            rename(body, names, around)


def _given(graph: onnx.GraphProto) -> Iterator[str]:
    """Names of the values that a graph has: inputs, constants, and outputs of its nodes."""
    yield from (each.name for each in (*graph.input, *graph.initializer))
    yield from (name for node in graph.node for name in node.output)


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all that are inside it."""
    yield graph
    for node in graph.node:
        for _, body in subgraphs(node):
            yield from graphs(body)


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Bodies of a node, by the names of its attributes."""
    for attribute in node.attribute:
        if attribute.type == attribute.GRAPH:
            yield attribute.name, attribute.g


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, in its subgraphs too; values inside those may be among them."""
    yield from node.input
    for _, graph in subgraphs(node):
        for inner in graph.node:
            yield from reads(inner)
        for value in graph.output:
            yield value.name
