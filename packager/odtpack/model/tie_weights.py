"""Undoes what separates tied weights: the transpose that an exporter folded.

A module whose embedding is also its output projection reads one weight twice, once as it
is and once transposed. PyTorch's exporters compute the transpose and store it as a second
initializer: trained as it stands, the model would no longer be tied. The copy is known by
its made-up name and by its values, which are those of another initializer bit by bit:

    y = MatMul(x, copy)   ->   copy = Transpose(weight)  y = MatMul(x, copy)

Values may be equal because one module was copied from the other. What the exporter noted
distinguishes them, see :mod:`odtpack.model.exported_parameters`. Where it noted that two copies are
of one parameter, which a module that is used twice may leave, one copy takes the place of
both.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.model.exported_parameters import ExportedParameters
from odtpack.model.exporters import fixed_role, made_up


def tie(graph: ir.Graph, keep: Collection[str] = ()) -> bool:
    """Replace folded transposes of initializers by nodes; return whether there were any.

    Args:
        graph: Forward graph; changed in place.
        keep: Names of initializers that stay what they are.
    """
    originals: dict[tuple[tuple[int, ...], bytes], list[tuple[ir.Value, np.ndarray]]] = {}
    copies, unnamed = [], made_up(graph)
    parameters = ExportedParameters(graph)
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
    kept: dict[str, tuple[ir.Value, np.ndarray]] = {}
    for copy, array in copies:
        label = _only_label(copy, parameters)
        if label in kept and np.array_equal(kept[label][1], array):
            copy.replace_all_uses_with(kept[label][0])
            graph.initializers.pop(str(copy.name))
            changed = True
            continue
        for original, values in originals.get((array.shape, array[:, 0].tobytes()), ()):
            # A matrix of zeros equals others by chance.
            same = np.array_equal(values.T, array) and np.ptp(array) > 0
            if same and not _are_apart(original, label, parameters):
                _replace(graph, copy, original)
                changed = True
                break
        else:
            if label is not None and parameters.named(label):
                kept.setdefault(label, (copy, array))
    return changed


def _only_label(copy: ir.Value, parameters: ExportedParameters) -> str | None:
    """The parameter of the module that all places that read a copy read."""
    labels = {parameters.read(*use) for use in copy.uses()}
    return labels.pop() if len(labels) == 1 else None


def _are_apart(original: ir.Value, label: str | None, parameters: ExportedParameters) -> bool:
    """Whether a matrix and the copy that the exporter made of a parameter are two parameters."""
    if label is None or label == original.name:
        return False
    reads = [(parameters.read(*use), fixed_role(*use)) for use in original.uses()]
    if label in [read for read, _ in reads]:
        return False
    # An embedding may be tied to a layer of another name; a layer has a copy of its own.
    return parameters.named(label) or any(read and kind for read, kind in reads)


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
