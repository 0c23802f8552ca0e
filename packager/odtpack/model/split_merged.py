"""Undoes what merges parameters: that fresh ones are equal.

PyTorch's exporters store equal tensors once. Of a model that was not trained yet, all
layer normalizations have a scale of ones and a bias of zeros, so that they come out with
one scale and one bias between them; a scale may even share its ones with a running
variance. Trained as it stands, they would stay one. Such a tensor holds a single value,
and is read in several modules:

    LayerNormalization(x, norm1.weight)        LayerNormalization(x, norm1.weight)
    LayerNormalization(y, norm1.weight)   ->   LayerNormalization(y, norm2.weight)

The older exporter also leaves the merged parameter's name, on the output of an Identity.
A module that is used twice keeps its one parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.graph.graphs import Names, used_names
from odtpack.model.exporters import made_up, origin

_LEFT = re.compile(r"Identity_\d+")


def split(graph: ir.Graph, keep: Collection[str] = ()) -> bool:
    """Give each module its own copy of a merged parameter; return whether there were any.

    Args:
        graph: Forward graph; changed in place. New initializers are named after their
            modules.
        keep: Names of initializers that stay what they are.
    """
    changed = False
    names = Names()
    unnamed = {name for name in made_up(graph) if not name.startswith("onnx::")}
    for name, value in list(graph.initializers.items()):
        uses = value.uses()
        if name in keep or name in unnamed or len(uses) < 2 or value.is_graph_output():
            continue
        if not _is_fill(value):
            continue
        groups: dict[str, list[tuple[ir.Node, int]]] = {}
        for node, index in uses:
            if _stands_for_parameter(node):
                _restore(graph, node, value)
                changed = True
            else:
                groups.setdefault(origin(node, index) or name, []).append((node, index))
        if groups:
            groups.pop(name if name in groups else next(iter(groups)))
        names = names or Names(used_names(graph))
        for label, places in groups.items():
            new = _copy(value, names.fresh(label))
            graph.register_initializer(new)
            for node, index in places:
                node.replace_input_with(index, new)
            changed = True
    return changed


def _stands_for_parameter(node: ir.Node) -> bool:
    """Whether a node is what the older exporter leaves of a merged parameter."""
    output = node.outputs[0]
    return (
        node.op_type == "Identity"
        and _LEFT.fullmatch(node.name or "") is not None
        and "/" not in (output.name or "/")
        and "::" not in (output.name or "")
        and not output.is_graph_output()
    )


def _restore(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Put a parameter in the place of a node, under the name of its output."""
    output = node.outputs[0]
    new = _copy(value, str(output.name))
    output.name = None
    output.replace_all_uses_with(new)
    if node.graph is not None:
        node.graph.remove(node, safe=True)
    graph.register_initializer(new)


def _is_fill(value: ir.Value) -> bool:
    """Whether a float vector or more holds a single value."""
    tensor = value.const_value
    if tensor is None or tensor.dtype not in TRAINABLE_TYPES or len(tensor.shape) == 0:
        return False
    array = tensor.numpy()
    return array.size > 0 and bool(np.ptp(array) == 0)


def _copy(value: ir.Value, name: str) -> ir.Value:
    tensor = value.const_value
    array = np.zeros(0) if tensor is None else tensor.numpy()
    return ir.Value(
        name=name, shape=value.shape, type=value.type, const_value=ir.tensor(array, name=name)
    )
