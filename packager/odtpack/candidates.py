"""Which initializers of a forward model are parameters.

A model file does not say: weights lie beside masks, scales and running statistics. What
is named is trained or frozen as told; this is the guess for what is not named.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.backward import influences
from odtpack.dtypes import TRAINABLE_TYPES
from odtpack.exporters import KIND, made_up
from odtpack.loading import is_lifted_constant
from odtpack.passes import batch_norm

# Inputs that set an operator up: no model trains them, though some have a gradient.
_SETTINGS = {
    "BatchNormalization": (3, 4),
    "CastLike": (1,),
    "Clip": (1, 2),
    "Dropout": (1,),
    "NegativeLogLikelihoodLoss": (2,),
    "OneHot": (2,),
    "Pad": (2,),
    "Range": (0, 1, 2),
    "Resize": (1, 2),
    "SoftmaxCrossEntropyLoss": (2,),
}

_HUGE = 1e30  # beyond lie the values with which masks shut out


def candidates(model: ir.Model) -> list[str]:
    """Initializers that look like parameters, in the order of the model.

    They are float vectors and larger that a gradient reaches, but no running statistics,
    no settings of an operator, no masks, and nothing that the exporter noted as a buffer
    or wrote as a constant (unless the model keeps everything in constants, as some
    converters do). Scalars are left out too. A pattern that is the very name of an
    initializer finds all of these.
    """
    graph = model.graph
    state = set(batch_norm.state_names(graph))
    reaching = influences(graph, graph.outputs)
    unnamed = made_up(graph)
    found = [
        value
        for name, value in graph.initializers.items()
        if name not in state and value in reaching and _looks_trainable(value, name in unnamed)
    ]
    stored = [value for value in found if not is_lifted_constant(value)]
    return [str(value.name) for value in stored or found]


def _looks_trainable(value: ir.Value, unnamed: bool) -> bool:
    if value.dtype not in TRAINABLE_TYPES or value.shape is None or value.shape.rank() == 0:
        return False
    if value.metadata_props.get(KIND, "PARAMETER") != "PARAMETER":
        return False
    uses = value.uses()
    if all(use.idx in _SETTINGS.get(use.node.op_type, ()) for use in uses) and uses:
        return False
    if value.const_value is None:
        return False
    array = value.const_value.numpy()
    if array.size == 0 or not (float(array.max()) < _HUGE and float(array.min()) > -_HUGE):
        return False
    if array.size > 1 and str(value.name).startswith("onnx::"):  # computed from a parameter
        return True
    fill = bool((array == array.flat[0]).all())  # or a factor
    if is_lifted_constant(value):
        return not fill
    counted = bool((array == array.round()).all())  # positions, one-hot rows
    return not (unnamed and (fill or counted))
