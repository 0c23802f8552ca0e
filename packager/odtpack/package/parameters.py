"""The parameters of a package: how they are stored, and made inputs of its models."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from odtpack.choices import Storage
from odtpack.errors import OdtpackError, UnknownNameError, quoted
from odtpack.graph.graphs import TRAINABLE_TYPES, carried, running_statistics
from odtpack.quantized import to_int8
from odtpack_runtime.session.graph_signature import OWN_TYPE_SUFFIX, UNSCALED_SUFFIX

SMALLEST = 1024
"""Elements from which on a weight is stored in fewer bytes."""

_LEAST_PER_SCALE = 8  # elements that share a scale: fewer would not pay for it

# Inputs that are weights: every output sums over many of their elements, or is one of them.
_WEIGHTS = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "GRU": (1, 2),
    "Gather": (0,),
    "Gemm": (0, 1),
    "LSTM": (1, 2),
    "MatMul": (0, 1),
    "RNN": (1, 2),
}
_VIEWS = ("Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze")


class Stored(NamedTuple):
    """A weight as the checkpoint holds it."""

    values: ir.TensorProtocol  # FLOAT16 or INT8, of the weight's shape
    # FLOAT, of the weight's rank, one element for each channel and axes of length one besides; the
    # weight is values * scale. None for FLOAT16.
    scale: ir.TensorProtocol | None = None


def is_weight(value: ir.Value) -> bool:
    """Whether an initializer is a large float32 weight and nothing else."""
    if value.dtype != ir.DataType.FLOAT or value.shape is None or value.shape.rank() < 2:
        return False
    size = value.const_value.size if value.const_value is not None else 0
    return size >= SMALLEST and bool(value.uses()) and _only_weighs(value)


def _only_weighs(value: ir.Value) -> bool:
    if value.is_graph_output():
        return False
    for node, index in value.uses():
        if node.domain:
            return False
        if node.op_type in _VIEWS and index == 0:
            if not all(_only_weighs(output) for output in node.outputs):
                return False
        elif index not in _WEIGHTS.get(node.op_type, ()):
            return False
    return True


def store(name: str, tensor: ir.TensorProtocol, storage: Storage) -> Stored | None:
    """Convert a weight, rounding to nearest, ties to even."""
    array = tensor.numpy()
    if storage == "float16":
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.array_equal(np.isfinite(half), np.isfinite(array)):
            largest = float(np.abs(array[np.isfinite(array)]).max())
            what = f"frozen parameter {name!r} holds {largest:g}, and float16 ends at 65504"
            hint = "store it as int8 (--frozen-dtype int8), or leave --frozen-dtype out"
            raise OdtpackError("value-out-of-range", what, hint=hint)
        return Stored(ir.tensor(half, name=name))
    if not np.isfinite(array).all():
        what = f"frozen parameter {name!r} holds infinity or NaN, which int8 cannot store"
        raise OdtpackError("value-out-of-range", what, hint="leave --frozen-dtype out")
    axes = [i for i, n in enumerate(array.shape) if n * _LEAST_PER_SCALE <= array.size]
    if not axes:
        return None
    others = (tuple(i for i in range(array.ndim) if i != axis) for axis in axes)
    values, scale = min(
        (to_int8(array, each) for each in others),
        key=lambda q: float(np.sum(np.square(q[0] * q[1] - array), dtype=np.float64)),
    )
    return Stored(ir.tensor(values, name=name), ir.tensor(scale))


SCALE_SUFFIX = ".int8_scale"
"""Ends the name of the scale of a parameter that is stored as int8."""

Role = Literal["trainable", "frozen", "state"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An initializer of the forward model that became an input."""

    name: str  # as in the forward model
    role: Role  # what training does with it
    tensor: ir.TensorProtocol  # its value, in the model's own type
    # type of the input: the model's own, for a trainable parameter the master type, for a frozen
    # weight that of its storage
    dtype: ir.DataType
    # frozen weights in another storage: the value as the checkpoint holds it
    stored: ir.TensorProtocol | None = None
    scale: str | None = None  # name of the parameter that multiplies `stored`
    module: str | None = None  # its name in the exported module, where the exporter made up `name`
    called: tuple[str, ...] = ()  # what patterns may call it besides `name`

    def value(self) -> np.ndarray:
        """The value as the checkpoint holds it."""
        tensor = self.tensor if self.stored is None else self.stored
        return np.asarray(tensor.numpy(), self.dtype.numpy(), order="C")


def choose_parameters(
    graph: ir.Graph,
    train: Sequence[str],
    freeze: Sequence[str],
    modules: Mapping[str, str],
    known: Mapping[str, tuple[str, ...]],
) -> tuple[Parameter, ...]:
    """Return the initializers that become inputs, with their roles, in initializer order."""
    # Of those whose names the exporter made up, modules: names in the exported module; known: what
    # patterns may call them.
    state = {*running_statistics(graph), *carried(graph)}
    for name in sorted(state - set(graph.initializers)):
        raise OdtpackError(
            "statistic-not-stored",
            f"{name!r}, a running statistic of a batch normalization in training mode, is not an "
            "initializer: its updates cannot be stored",
        )
    unknown = [repr(name) for name in (*train, *freeze) if name not in graph.initializers]
    if unknown:
        what = f"the model has no initializer {', '.join(unknown)}"
        raise UnknownNameError("unknown-parameter", what)
    trained, frozen = set(train), set(freeze)
    wanted = trained | frozen | state
    both = sorted(trained & frozen)
    if both:
        raise OdtpackError("trained-and-frozen", f"{both[0]!r} is both trained and frozen")
    _check_trainable(graph, train, state)
    parameters = []
    types = {graph.initializers[name].dtype for name in train}
    master = ir.DataType.DOUBLE if ir.DataType.DOUBLE in types else ir.DataType.FLOAT
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or name not in wanted:
            continue
        role: Role = "trainable" if name in trained else "state" if name in state else "frozen"
        dtype = master if role == "trainable" else tensor.dtype
        called = known.get(name, ())
        parameters.append(
            Parameter(name, role, tensor, dtype, module=modules.get(name), called=called)
        )
    return tuple(parameters)


def master_type(parameters: Iterable[Parameter]) -> ir.DataType:
    """Type of the trainable parameters, their gradients and moments."""
    return next((p.dtype for p in parameters if p.role == "trainable"), ir.DataType.FLOAT)


def _check_trainable(graph: ir.Graph, names: Sequence[str], state: Collection[str]) -> None:
    followed = [name for name in names if name in state]
    if followed:
        raise OdtpackError(
            "statistic-trained",
            "running statistics and carried states have no gradient and cannot be trained: "
            f"{', '.join(map(repr, followed))}",
            hint="leave them out of the parameters to train",
        )
    types = {name: graph.initializers[name].dtype for name in names}
    others = {n: "?" if t is None else t.name for n, t in types.items() if t not in TRAINABLE_TYPES}
    if others:
        allowed = ", ".join(dtype.name for dtype in TRAINABLE_TYPES)
        raise OdtpackError(
            "dtype-not-trainable",
            f"{', '.join(f'{name!r} is of type {kind}' for name, kind in others.items())}; "
            f"parameters to train must be of one of the types {allowed}",
            hint=f"freeze it ({' '.join(f'--freeze {quoted(name)}' for name in others)})",
        )


def store_frozen(
    graph: ir.Graph, parameters: Sequence[Parameter], wanted: Storage, base: str | None = None
) -> tuple[Parameter, ...]:
    """Store large frozen weights in fewer bytes; a scale follows the weight it belongs to."""
    # base: How matrices are stored inside the models already, if they are.
    found: list[Parameter] = []
    for parameter in parameters:
        name, stored = parameter.name, None
        if parameter.role == "frozen" and is_weight(graph.initializers[name]):
            stored = store(name, parameter.tensor, wanted)
        if stored is None:
            found.append(parameter)
            continue
        values, scales = stored
        scale = None if scales is None else f"{name}{SCALE_SUFFIX}"
        found.append(dataclasses.replace(parameter, dtype=values.dtype, stored=values, scale=scale))
        if scale is not None and scales is not None:
            found.append(Parameter(scale, "frozen", scales, scales.dtype))
    if all(parameter.stored is None for parameter in found):
        raise OdtpackError(
            "storage-not-used",
            f"the model has no frozen weight to store as {wanted}"
            + (f": --base {base} stores them already" if base else ""),
            hint="leave --frozen-dtype out"
            if base
            else f"freeze some of its float32 weights with {SMALLEST} elements or more "
            "(--freeze GLOB), or leave --frozen-dtype out",
        )
    return tuple(found)


def without_float16(
    parameters: Sequence[Parameter], storage: Storage | None
) -> tuple[Parameter, ...]:
    """Store as float32 what is float16: onnxruntime-training loads no checkpoint that holds it."""
    if storage == "float16":
        what = "onnxruntime-training loads no float16 values from a checkpoint"
        hint = "leave --frozen-dtype out, or store them as int8 (--frozen-dtype int8)"
        raise OdtpackError("target-cannot", what, hint=hint)
    return tuple(
        dataclasses.replace(p, dtype=ir.DataType.FLOAT) if p.dtype == ir.DataType.FLOAT16 else p
        for p in parameters
    )


def lift_parameters(graph: ir.Graph, parameters: Sequence[Parameter]) -> None:
    """Make initializers inputs, so that no constant folding can swallow them."""
    inputs: dict[str, ir.Value] = {}
    for parameter in parameters:
        value = graph.initializers.pop(parameter.name, None) or ir.val(parameter.name)
        value.const_value = None
        value.shape = ir.Shape(parameter.tensor.shape.numpy())
        value.type = ir.TensorType(parameter.dtype)
        graph.inputs.append(value)
        inputs[parameter.name] = value
    nodes: list[ir.Node] = []
    for parameter in parameters:
        if parameter.dtype == parameter.tensor.dtype:
            continue
        value, own = inputs[parameter.name], parameter.tensor.dtype
        first = last = ir.node("Cast", [value], {"to": int(own)})
        made = {OWN_TYPE_SUFFIX: first}
        if parameter.scale is not None:
            last = ir.node("Mul", [first.outputs[0], inputs[parameter.scale]])
            made = {UNSCALED_SUFFIX: first, OWN_TYPE_SUFFIX: last}
        for suffix, node in made.items():
            output = node.outputs[0]
            node.name = output.name = f"{parameter.name}{suffix}"
            output.shape, output.type = value.shape, ir.TensorType(own)
        value.replace_all_uses_with(last.outputs[0], replace_graph_outputs=True)
        first.replace_input_with(0, value)
        nodes += made.values()
    if nodes and len(graph):
        graph.insert_before(graph[0], nodes)
