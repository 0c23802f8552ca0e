"""Which initializers of a forward model are parameters.

A model file does not say: weights lie beside masks, scales and running statistics. What
is named is trained or frozen as requested; this is the guess for what is not named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import influences
from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.model.exporters import KIND, made_up
from odtpack.model.loading import is_lifted_constant
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

# A name as a module gives it; converters write slashes, colons and running numbers.
_PATH = re.compile(r"(?!.*__\d+$)[A-Za-z_]\w*(\.\w+)*")
_GUARD = 1e-3  # up to here a number keeps a division or a root from its pole
# The second input and those beyond are settings, where they are scalars.
_ARITHMETIC_SETTINGS = ("DequantizeLinear", "Pow", "QuantizeLinear")

_HUGE = 1e30  # beyond lie the values with which masks shut out
_CHUNK = 1 << 20  # elements that are looked at at once: an initializer may have billions


def candidates(model: ir.Model, read: Sequence[str] = ()) -> list[str]:
    """Initializers that look like parameters, in the order of the model.

    They are float tensors that a gradient reaches, but no running statistics, no settings
    of an operator, no masks, and nothing that the exporter noted as a buffer or wrote as a
    constant (unless the model keeps everything in constants, as some converters do). A
    scalar is one where the exporter noted it as a parameter, or where it has a name as a
    module gives it and is neither an exponent, nor a whole factor, nor a small number that
    guards a division or a root. A pattern that is the very name of an initializer finds all
    of these.

    Args:
        model: As :func:`odtpack.model.loading.load_model` returns it.
        read: Names of the values from which a gradient starts; all outputs if empty.
    """
    return reached(model, look_alikes(model), read)


def reached(model: ir.Model, names: Sequence[str], read: Sequence[str] = ()) -> list[str]:
    """Those of some initializers that a gradient reaches."""
    graph = model.graph
    values = [*graph.outputs, *graph.inputs, *(y for node in graph for y in node.outputs)]
    starts = [value for value in values if value.name in read] if read else graph.outputs
    reaching = influences(graph, starts)
    return [name for name in names if graph.initializers[name] in reaching]


def look_alikes(model: ir.Model) -> list[str]:
    """As :func:`candidates`, whether a gradient reaches them or not.

    It reads the values of all initializers, which may take gigabytes.
    """
    graph = model.graph
    state = set(batch_norm.state_names(graph))
    unnamed = made_up(graph)
    found = [
        value
        for name, value in graph.initializers.items()
        if name not in state and _looks_trainable(value, name in unnamed)
    ]
    stored = [value for value in found if not is_lifted_constant(value)]
    return [str(value.name) for value in stored or found]


def _looks_trainable(value: ir.Value, unnamed: bool) -> bool:
    if value.dtype not in TRAINABLE_TYPES or value.shape is None:
        return False
    if value.shape.rank() == 0 and not _is_named_scalar(value):
        return False
    if value.metadata_props.get(KIND, "PARAMETER") != "PARAMETER":
        return False
    uses = value.uses()
    if all(use.idx in _SETTINGS.get(use.node.op_type, ()) for use in uses) and uses:
        return False
    if value.const_value is None:
        return False
    array = value.const_value.numpy()
    if array.size == 0 or not all(_is_within(part) for part in _parts(array)):
        return False
    if array.size > 1 and str(value.name).startswith("onnx::"):  # computed from a parameter
        return True
    lifted = is_lifted_constant(value)
    if not lifted and not unnamed:
        return True
    fill = all((part == array.flat[0]).all() for part in _parts(array))  # or a factor
    if lifted:
        return not fill
    counted = all((part == part.round()).all() for part in _parts(array))  # positions, one-hot
    return not (fill or counted)


def _is_within(part: np.ndarray) -> bool:
    """Whether numbers are finite and shut nothing out; NaN is the largest and the smallest."""
    return float(part.max()) < _HUGE and float(part.min()) > -_HUGE


def _is_named_scalar(value: ir.Value) -> bool:
    """Whether a scalar is a parameter of a module, as ``logit_scale`` is in CLIP."""
    if value.metadata_props.get(KIND) == "PARAMETER":
        return True
    name = str(value.name)
    if is_lifted_constant(value) or value.const_value is None or not _PATH.fullmatch(name):
        return False
    if name.rpartition(".")[2].lower().startswith(("const", "eps")):
        return False
    number = float(value.const_value.numpy())
    if 0 < abs(number) <= _GUARD or (number > 1 and number.is_integer()):
        return False
    uses = value.uses()
    return all(use.node.op_type not in _ARITHMETIC_SETTINGS or use.idx == 0 for use in uses)


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array piece by piece, as flat views."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]
