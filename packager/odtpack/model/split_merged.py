"""Undoes what merges parameters: that they were equal when the model was exported.

PyTorch's exporters store equal tensors once. Of a model that was not trained yet, all
layer normalizations have a scale of ones and a bias of zeros, and all layers of an
nn.TransformerEncoder, which copies the one that it is given, have the same weights. Trained
as it stands, they would stay one. What the exporter noted distinguishes the places, see
:mod:`odtpack.model.exported_parameters`:

    LayerNormalization(x, norm1.weight)        LayerNormalization(x, norm1.weight)
    LayerNormalization(y, norm1.weight)   ->   LayerNormalization(y, norm2.weight)

The older exporter leaves the merged parameter's name on the output of an Identity; a
parameter that is tied in the module has one name there, and no Identity. A module that is
used twice keeps its one parameter, and what is tied in the module stays tied: without a note
of the exporter, only tensors that hold a single value are separated by the modules around
their nodes, since nothing but chance would tie them. :func:`untie` separates the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.graph.graphs import Names, used_names
from odtpack.model.exported_parameters import ExportedParameters, noted
from odtpack.model.exporters import COMPUTED, beside, made_up, origin, place

_LEFT = re.compile(r"Identity_\d+")
_SEPARATED = "odtpack.separated_from"

Use = tuple[ir.Node, int]


def split(graph: ir.Graph, keep: Collection[str] = ()) -> bool:
    """Give each place its own copy of a merged parameter; return whether there were any.

    Args:
        graph: Forward graph; changed in place. New initializers are named after their
            modules.
        keep: Names of initializers that stay what they are.
    """
    changed = False
    parameters = ExportedParameters(graph)
    values = [v for n, v in graph.initializers.items() if n not in keep and _is_merged(v)]
    for computed in (False, True):  # the names of biases give the products beside them
        for value in values:
            changed |= _restore_left(graph, value, parameters, computed)
    unnamed = made_up(graph)
    names = Names()
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
        groups.pop(base, None)
        for label, places in groups.items():
            separate(graph, value, places, names.fresh(_name(value, label, unnamed)))
        changed = True
    return changed


def separate(graph: ir.Graph, value: ir.Value, places: Iterable[Use], name: str) -> ir.Value:
    """Give places a copy of an initializer, under a name that is free; return it."""
    tensor = value.const_value
    array = np.zeros(0) if tensor is None else tensor.numpy()
    new = ir.Value(
        name=name, shape=value.shape, type=value.type, const_value=ir.tensor(array, name=name)
    )
    new.metadata_props.update(value.metadata_props)
    new.meta[_SEPARATED] = separated_from(value)
    graph.register_initializer(new)
    for node, index in places:
        node.replace_input_with(index, new)
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


def _restore_left(
    graph: ir.Graph, value: ir.Value, parameters: ExportedParameters, computed: bool
) -> bool:
    """Put parameters in the places of the nodes that the older exporter left of them."""
    changed = False
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
                found[label] = _without_notes(separate(graph, value, uses, name))
        else:
            output.name = None
            _without_notes(separate(graph, value, uses, name))
        if node.graph is not None:
            node.graph.remove(node, safe=True)
        changed = True
    return changed


def _without_notes(value: ir.Value) -> ir.Value:
    value.metadata_props.clear()
    return value


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
    if all(parameters.named(label) for label in groups if label != name):
        return True  # the exporter's own list has them all
    computed = name.startswith(COMPUTED)
    factor = name in unnamed and not computed and _is_fill(value)
    if not value.shape or factor:
        return False
    if _is_fill(value):
        return True
    if untold or _owner(name) in [_owner(label) for label in groups][1:]:
        return False  # equal tensors are stored under the first name, a tied one under the last
    if computed:
        return True
    uses = [use for places in groups.values() for use in places]
    return all(noted(node) for node, _ in uses) and len({(n.op_type, i) for n, i in uses}) == 1


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_fill(value: ir.Value) -> bool:
    """Whether a tensor holds a single value."""
    tensor = value.const_value
    array = np.zeros(0) if tensor is None else tensor.numpy()
    return array.size > 0 and bool(np.ptp(array) == 0)


def _name(value: ir.Value, label: str, unnamed: Collection[str]) -> str:
    """The stem of a name: that in the module, if the tensor is as it was there."""
    return str(value.name) if value.name in unnamed else label
