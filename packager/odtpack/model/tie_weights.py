"""Undoes what separates tied weights: the transpose that an exporter folded.

A module whose embedding is also its output projection reads one weight twice, once as it
is and once transposed. PyTorch's exporters compute the transpose and store it as a second
initializer: trained as it stands, the model would no longer be tied. The copy is told by
its made-up name and by its values, which are those of another initializer bit by bit:

    y = MatMul(x, copy)   ->   copy = Transpose(weight)  y = MatMul(x, copy)
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.model.exporters import made_up


def tie(graph: ir.Graph, keep: Collection[str] = ()) -> bool:
    """Replace folded transposes of initializers by nodes; return whether there were any.

    Args:
        graph: Forward graph; changed in place.
        keep: Names of initializers that stay what they are.
    """
    originals: dict[tuple[tuple[int, ...], bytes], list[tuple[ir.Value, np.ndarray]]] = {}
    copies, unnamed = [], made_up(graph)
    for value in graph.initializers.values():
        array = _matrix(value)
        if array is None:
            continue
        if value.name not in unnamed:
            key = (array.shape[::-1], array[0].tobytes())
            originals.setdefault(key, []).append((value, array))
        elif value.name not in keep and not value.is_graph_output():
            copies.append((value, array))
    changed = False
    for copy, array in copies:
        for original, values in originals.get((array.shape, array[:, 0].tobytes()), ()):
            # A matrix of zeros equals others by chance.
            if np.array_equal(values.T, array) and np.ptp(array) > 0:
                _replace(graph, copy, original)
                changed = True
                break
    return changed


def _matrix(value: ir.Value) -> np.ndarray | None:
    """The values of a float matrix; None for anything else, and for a vector in disguise."""
    tensor = value.const_value
    if tensor is None or tensor.dtype not in TRAINABLE_TYPES or len(tensor.shape) != 2:
        return None
    array = tensor.numpy()
    return array if min(array.shape) > 1 else None


def _replace(graph: ir.Graph, copy: ir.Value, original: ir.Value) -> None:
    name = str(copy.name)
    node = ir.node("Transpose", [original], {"perm": [1, 0]}, name=f"{name}/Transpose")
    graph.initializers.pop(name)
    tied = node.outputs[0]
    tied.type, tied.shape = copy.type, copy.shape
    copy.replace_all_uses_with(tied)
    copy.name, tied.name = None, name
    first = next(iter(graph), None)
    if first is None:
        graph.append(node)
    else:
        graph.insert_before(first, node)
