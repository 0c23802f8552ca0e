"""Tensors that several places of a model read: tied, merged and transposed weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx.reference
import onnx_ir as ir

from odtpack.autodiff.stop_gradient import has_stand_in
from odtpack.errors import OdtpackError, UnknownNameError, quoted
from odtpack.graph.graphs import TRAINABLE_TYPES, Names, redirect, subgraphs, typed, used_names
from odtpack.model.exporters import (
    COMPUTED,
    KIND,
    SCOPES,
    ExportedParameters,
    beside,
    fixed_role,
    is_generated,
    known_names,
    made_up,
    matching,
    module_of,
    note_folded,
    origin,
    place,
)


@dataclasses.dataclass(frozen=True)
class SharedTensor:
    """A tensor that is read in several places."""

    name: str  # the initializer
    places: tuple[str, ...]  # who reads it: names of nodes, or what they compute
    one_parameter: bool  # whether the exporter noted that it is one parameter of the module

    def sentence(self) -> str:
        """What ``build`` says of it."""
        shown = ", ".join(self.places[:3]) + (", ..." if self.places[3:] else "")
        return (
            f"{self.name} is read in {len(self.places)} places ({shown}) and trains as one "
            f"tensor; --untie {quoted(self.name)} gives each place its own"
        )


def shared_tensors(graph: ir.Graph, names: Iterable[str]) -> list[SharedTensor]:
    """Those of some initializers that several nodes read."""
    # names: The initializers to look at, in the order of the result.
    parameters = ExportedParameters(graph)
    found = []
    for name in names:
        value = graph.initializers[name]
        nodes = {
            id(node): node
            for node, _ in value.uses()
            if node.op_type != "Shape" and not has_stand_in(node)
        }
        if len(nodes) > 1:
            labels = {_label(parameters, use) for use in value.uses()}
            places = tuple(_place(node) for node in nodes.values())
            one = len(labels) == 1 and None not in labels
            # One module may read it in several nodes, as a GRU that is written as slices.
            modules = {module_of(node) for node in nodes.values()}
            one |= not is_generated(name) and len(modules) == 1 and None not in modules
            found.append(SharedTensor(name, places, one))
    return found


def untie(graph: ir.Graph, patterns: Sequence[str]) -> None:
    """Give each place that reads a shared tensor its own copy."""
    # Places that the exporter noted as one parameter of the module stay together, unless all do.
    # graph: Graph of a loaded model; changed in place. patterns: Of the names of the initializers,
    # as ``--train`` takes them.
    if not patterns:
        return
    parameters, known = ExportedParameters(graph), known_names(graph)
    names = Names(used_names(graph))
    candidates = [n for n, v in graph.initializers.items() if v.dtype in TRAINABLE_TYPES]
    shared = [each.name for each in shared_tensors(graph, candidates)]
    for pattern in patterns:
        hits = matching(pattern, candidates, known)
        # Loading may have separated already what was stored together.
        merged = (separated_from(graph.initializers[n]) != n or len(copies_of(graph, [n])) > 1
                  for n in hits)  # fmt: skip
        if not any(map(shared.__contains__, hits)) and not any(merged):
            several = ", ".join(map(repr, shared[:4])) + (", ..." if shared[4:] else "")
            raise UnknownNameError(
                "unknown-parameter",
                f"--untie {pattern!r} matches no tensor that several places of the model read",
                hint=f"those are {several}; odtpack inspect MODEL.onnx lists them"
                if shared
                else "the model has none: leave it out",
            )
    for name in shared:
        if any(matching(pattern, [name], known) for pattern in patterns):
            _separate_places(graph, graph.initializers[name], parameters, names)


def copies_of(graph: ir.Graph, names: Sequence[str]) -> tuple[str, ...]:
    """Some initializers, and those that were one with them in the file."""
    # names: Names as they are in the file. What was separated stands after its origin, unless it is
    # named, too.
    separated: dict[str, list[str]] = {}
    for name, value in graph.initializers.items():
        if separated_from(value) != name:
            separated.setdefault(separated_from(value), []).append(name)
    return tuple(dict.fromkeys(n for name in names for n in (name, *separated.get(name, ()))))


def _separate_places(
    graph: ir.Graph, value: ir.Value, parameters: ExportedParameters, names: Names
) -> None:
    groups: dict[object, list[Use]] = {}
    for use in value.uses():
        groups.setdefault(_label(parameters, use) or id(use[0]), []).append(use)
    if len(groups) == 1:
        groups = {id(use[0]): [use] for use in value.uses()}
    groups.pop(value.name if value.name in groups else next(iter(groups)))
    for label, places in groups.items():
        separate(
            graph, value, places, names.fresh(label if isinstance(label, str) else str(value.name))
        )


def _label(parameters: ExportedParameters, use: Use) -> str | None:
    """The parameter of the module that a place reads, if need be through a transposition."""
    node, _ = use
    if node.op_type not in ("Identity", "Transpose"):
        return parameters.read(*use)
    labels = {parameters.read(*reader) for reader in node.outputs[0].uses()}
    return labels.pop() if len(labels) == 1 else None


def _place(node: ir.Node) -> str:
    if node.op_type in ("Identity", "Transpose") and (readers := node.outputs[0].consumers()):
        node = readers[0]
    return node.name or f"{node.op_type} of {node.outputs[0].name}"


# Undoes what merges parameters: that they were equal when the model was exported.
#
# PyTorch's exporters store equal tensors once. Of a model that was not trained yet, all
# layer normalizations have a scale of ones and a bias of zeros, and all layers of an
# nn.TransformerEncoder, which copies the one that it is given, have the same weights. Trained
# as it stands, they would stay one. What the exporter noted distinguishes the places, see
# :mod:`odtpack.model.exporters`:
#
#     LayerNormalization(x, norm1.weight)        LayerNormalization(x, norm1.weight)
#     LayerNormalization(y, norm1.weight)   ->   LayerNormalization(y, norm2.weight)
#
# The older exporter leaves the merged parameter's name on the output of an Identity; a
# parameter that is tied in the module has one name there, and no Identity. A module that is
# used twice keeps its one parameter, and what is tied in the module stays tied: without a note
# of the exporter, only tensors that hold a single value are separated by the modules around
# their nodes, since nothing but chance would tie them. :func:`untie` separates the rest.

_LEFT = re.compile(r"Identity_\d+")
_SEPARATED = "odtpack.separated_from"

Use = tuple[ir.Node, int]


def split(graph: ir.Graph, keep: Collection[str] = ()) -> None:
    """Give each place its own copy of a merged parameter."""
    # graph: Forward graph; changed in place. New initializers are named after their modules. keep:
    # Names of initializers that stay what they are.
    parameters = ExportedParameters(graph)
    _split_tiles(graph, parameters)
    values = [v for n, v in graph.initializers.items() if n not in keep and _is_merged(v)]
    for computed in (False, True):  # the names of biases give the products beside them
        for value in values:
            _restore_left(graph, value, computed)
    unnamed, names = made_up(graph), Names()
    for value in values:
        if not _is_merged(value):
            continue
        groups: dict[str, list[Use]] = {}
        for node, index in value.uses():
            if not _is_left(node):
                label = parameters.read(node, index) or ""
                groups.setdefault(label, []).append((node, index))
        untold = groups.pop("", [])
        base = str(value.name) if value.name in groups or untold else next(iter(groups), "")
        if not {*groups} - {base} or not _are_apart(value, groups, untold, parameters, unnamed):
            continue
        names = names or Names(used_names(graph))
        if groups.pop(base, None):
            note_folded(value, base)
        for label, places in groups.items():
            # The name is that in the module, if the tensor is as it was there.
            stem = str(value.name) if value.name in unnamed else label
            copy = separate(graph, value, places, names.fresh(stem))
            note_folded(copy, label)
            if parameters.kind(label) == "BUFFER":
                copy.metadata_props[KIND] = "BUFFER"


def _split_tiles(graph: ir.Graph, parameters: ExportedParameters) -> None:
    """Give each tensor of the module its own Tile, where the exporter merged theirs."""
    # A fresh InstanceNormalization has one Tile of ones for its scale and its variance.
    for node in list(graph):
        if node.op_type != "Tile":
            continue
        groups: dict[str, list[Use]] = {}
        for use in node.outputs[0].uses():
            groups.setdefault(parameters.read(*use) or "", []).append(use)
        if not all(map(parameters.kind, groups)):
            continue
        for places in list(groups.values())[1:]:
            twin = ir.node("Tile", node.inputs)
            typed(twin.outputs[0], node.outputs[0])
            twin.metadata_props.update(node.metadata_props)
            graph.insert_after(node, twin)
            redirect(places, twin.outputs[0])


def separate(graph: ir.Graph, value: ir.Value, places: Iterable[Use], name: str) -> ir.Value:
    """Give places a copy of an initializer, under a name that is free; return it."""
    tensor = ir.tensor(_array(value), name=name)
    new = ir.Value(name=name, shape=value.shape, type=value.type, const_value=tensor)
    new.metadata_props.update(value.metadata_props)
    new.meta[_SEPARATED] = separated_from(value)
    graph.register_initializer(new)
    redirect(places, new)
    return new


def separated_from(value: ir.Value) -> str:
    """Name of the initializer in the file that a value was part of; its own if it is that."""
    return str(value.meta.get(_SEPARATED, value.name))


def _is_merged(value: ir.Value) -> bool:
    """Whether a float tensor is read in several places."""
    tensor = value.const_value
    if tensor is None or tensor.dtype not in TRAINABLE_TYPES or value.is_graph_output():
        return False
    return len(value.uses()) > 1


def _restore_left(graph: ir.Graph, value: ir.Value, computed: bool) -> None:
    """Put parameters in the places of the nodes that the older exporter left of them."""
    found: dict[str | None, ir.Value] = {}
    if str(value.name).startswith(COMPUTED):  # two calls of one module leave what two modules do
        found = {_computed(value, use): value for use in value.uses() if not _is_left(use[0])}
    for node, _ in value.uses():
        if not _is_left(node):
            continue
        output = node.outputs[0]
        name, uses = str(output.name), output.uses()
        if name.startswith(COMPUTED) != computed:
            continue
        if computed:
            labels = {_computed(value, use) for use in uses}
            label = labels.pop() if len(labels) == 1 else None
            if label is None:
                continue
            if label in found:
                output.replace_all_uses_with(found[label])
            else:
                output.name = None
                found[label] = separate(graph, value, uses, name)
                found[label].metadata_props.clear()
        else:
            output.name = None
            separate(graph, value, uses, name).metadata_props.clear()
        if node.graph is not None:
            node.graph.remove(node, safe=True)


def _computed(value: ir.Value, use: Use) -> str | None:
    """Where the older exporter computed a tensor for: one name for all calls of a module."""
    node, index = use
    # Parts of one parameter are equal only by holding a single value.
    return beside(node) or (place(node) if _is_fill(value) else origin(node, index))


def _is_left(node: ir.Node) -> bool:
    """Whether a node is what the older exporter leaves of a merged parameter."""
    output = node.outputs[0]
    return (
        node.op_type == "Identity"
        and _LEFT.fullmatch(node.name or "") is not None
        and "/" not in (output.name or "/")
        and not output.is_graph_output()
    )


def _are_apart(
    value: ir.Value,
    groups: Mapping[str, list[Use]],
    untold: Sequence[Use],
    parameters: ExportedParameters,
    unnamed: Collection[str],
) -> bool:
    """Whether the groups of places that read a tensor are parameters of their own."""
    name = str(value.name)
    if all(parameters.kind(label) for label in groups if label != name):
        return True  # the exporter's own list has them all
    computed = name.startswith(COMPUTED)
    factor = name in unnamed and not computed and _is_fill(value)
    if not value.shape or factor:
        return False
    if _is_fill(value):
        return True
    owner, *others = (each.rpartition(".")[0] for each in (name, *groups))
    if untold or owner in others[1:]:
        return False  # equal tensors are stored under the first name, a tied one under the last
    if computed:
        return True
    uses = [use for places in groups.values() for use in places]
    noted = all(SCOPES in node.metadata_props for node, _ in uses)
    return noted and len({(n.op_type, i) for n, i in uses}) == 1


def _is_fill(value: ir.Value) -> bool:
    """Whether a tensor holds a single value."""
    array = _array(value)
    return array.size > 0 and bool(np.ptp(array) == 0)


def _array(value: ir.Value) -> np.ndarray:
    return np.zeros(0) if value.const_value is None else value.const_value.numpy()


# Undoes what separates tied weights: the transpose that an exporter folded.
#
# A module whose embedding is also its output projection reads one weight twice, once as it
# is and once transposed. PyTorch's exporters compute the transpose and store it as a second
# initializer: trained as it stands, the model would no longer be tied. The copy is known by
# its made-up name and by its values, which are those of another initializer bit by bit:
#
#     y = MatMul(x, copy)   ->   copy = Transpose(weight)  y = MatMul(x, copy)
#
# Values may be equal because one module was copied from the other. What the exporter noted
# distinguishes them, see :mod:`odtpack.model.exporters`. Where it noted that two copies are
# of one parameter, which a module that is used twice may leave, one copy takes the place of
# both.


def tie(graph: ir.Graph, keep: Collection[str] = ()) -> None:
    """Replace folded transposes of initializers by nodes."""
    # graph: Forward graph; changed in place. keep: Names of initializers that stay what they are.
    originals: dict[tuple[tuple[int, ...], bytes], list[tuple[ir.Value, np.ndarray]]] = {}
    copies, unnamed = [], made_up(graph)
    parameters = ExportedParameters(graph)
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in TRAINABLE_TYPES or len(tensor.shape) != 2:
            continue
        array = tensor.numpy()
        if min(array.shape) < 2:  # a vector in disguise
            continue
        if value.name not in unnamed:
            key = (array.shape[::-1], array[0].tobytes())
            originals.setdefault(key, []).append((value, array))
        elif value.name not in keep and not value.is_graph_output():
            copies.append((value, array))
    kept: dict[str, tuple[ir.Value, np.ndarray]] = {}
    for copy, array in copies:
        labels = {parameters.read(*use) for use in copy.uses()}
        label = labels.pop() if len(labels) == 1 else None  # of all places that read the copy
        if label in kept and np.array_equal(kept[label][1], array):
            copy.replace_all_uses_with(kept[label][0])
            graph.initializers.pop(str(copy.name))
            continue
        for original, values in originals.get((array.shape, array[:, 0].tobytes()), ()):
            # A matrix of zeros equals others by chance.
            same = np.array_equal(values.T, array) and np.ptp(array) > 0
            if same and not _trained_apart(original, label, parameters):
                _replace(graph, copy, original)
                break
        else:
            if label is not None and parameters.kind(label):
                kept.setdefault(label, (copy, array))


def _trained_apart(original: ir.Value, label: str | None, parameters: ExportedParameters) -> bool:
    """Whether a matrix and the copy that the exporter made of a parameter are two parameters."""
    if label is None or label == original.name:
        return False
    reads = [(parameters.read(*use), fixed_role(*use)) for use in original.uses()]
    if label in [read for read, _ in reads]:
        return False
    # An embedding may be tied to a layer of another name; a layer has a copy of its own.
    return parameters.kind(label) is not None or any(read and kind for read, kind in reads)


def _replace(graph: ir.Graph, copy: ir.Value, original: ir.Value) -> None:
    name = str(copy.name)
    node = ir.node("Transpose", [original], {"perm": [1, 0]}, name=f"{name}/Transpose")
    graph.initializers.pop(name)
    tied = typed(node.outputs[0], copy)
    copy.replace_all_uses_with(tied)
    copy.name, tied.name = None, name
    if len(graph):
        graph.insert_before(graph[0], node)
    else:
        graph.append(node)


# Values of a stored weight, however it is stored: as it is, transposed, cast or quantized.

_GROWING = {
    "CenterCropPad", "Col2Im", "ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad",
    "RandomNormal", "RandomUniform", "Range", "Resize", "Tile", "Upsample",
}  # fmt: skip


def weight_array(value: ir.Value) -> np.ndarray:
    """What a value that follows from initializers alone holds."""
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is None or any(each is None for each in node.inputs):
        raise OdtpackError("unknown-weight", f"the value of {value.name!r} is not stored")
    if node.op_type in _GROWING or next(iter(subgraphs(node)), None) is not None:
        raise OdtpackError(
            "unknown-weight",
            f"the value of {value.name!r} is computed by {node.op_type}, which may make any size",
        )
    arrays = [weight_array(each) for each in node.inputs if each is not None]
    opset = node.graph.opset_imports.get("", 21) if node.graph is not None else 21
    proto = ir.to_proto(node)
    evaluator = onnx.reference.ReferenceEvaluator(proto, opsets={"": opset})
    (found,) = evaluator.run(None, dict(zip(proto.input, arrays, strict=True)))
    return np.asarray(found)
