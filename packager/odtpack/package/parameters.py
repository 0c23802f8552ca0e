"""The parameters of a package: which there are, how they are stored, how models take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from odtpack.choices import Storage
from odtpack.errors import OdtpackError, UnknownNameError
from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.model.exporters import module_names
from odtpack.package import storage
from odtpack.passes import batch_norm
from odtpack_runtime.session.graph_signature import OWN_TYPE_SUFFIX, UNSCALED_SUFFIX

SCALE_SUFFIX = ".int8_scale"
"""Ends the name of the scale of a parameter that is stored as int8."""

Role = Literal["trainable", "frozen", "state"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An initializer of the forward model that became an input.

    Attributes:
        name: As in the forward model.
        role: What training does with it.
        tensor: Its value, in the model's own type.
        dtype: Type of the input: the model's own, for a trainable parameter the master type,
            for a frozen weight that of its storage.
        stored: Frozen weights in another storage: the value as the checkpoint holds it.
        scale: Name of the parameter by which ``stored`` is to be multiplied.
        module: Its name in the exported module, where the exporter made up ``name``.
    """

    name: str
    role: Role
    tensor: ir.TensorProtocol
    dtype: ir.DataType
    stored: ir.TensorProtocol | None = None
    scale: str | None = None
    module: str | None = None

    def value(self) -> np.ndarray:
        """The value as the checkpoint holds it."""
        tensor = self.tensor if self.stored is None else self.stored
        return np.asarray(tensor.numpy(), self.dtype.numpy(), order="C")


def choose_parameters(
    graph: ir.Graph, train: Sequence[str], freeze: Sequence[str]
) -> tuple[Parameter, ...]:
    """Return the initializers that become inputs, with their roles, in initializer order.

    Args:
        graph: The forward graph.
        train: Names of those to train.
        freeze: Names of those that are not trained. Running statistics need no name.

    Raises:
        OdtpackError: A name does not exist, is asked for twice, or cannot be trained.
    """
    state = set(batch_norm.state_names(graph))
    for name in sorted(state - set(graph.initializers)):
        raise OdtpackError(
            "statistic-not-stored",
            f"{name!r}, a running statistic of a batch normalization in training mode, is not an "
            "initializer: nothing can keep its updates",
        )
    for name in (*train, *freeze):
        if name not in graph.initializers:
            raise UnknownNameError("unknown-parameter", f"the model has no initializer {name!r}")
    trained, frozen = set(train), set(freeze)
    wanted = trained | frozen | state
    both = sorted(trained & frozen)
    if both:
        raise OdtpackError("trained-and-frozen", f"{both[0]!r} is to be trained and frozen at once")
    parameters = []
    modules = module_names(graph)
    types = (graph.initializers[name].dtype for name in train)
    master = master_type({dtype for dtype in types if dtype is not None})
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or name not in wanted:
            continue
        if name in trained:
            _check_trainable(name, tensor, state)
        role: Role = "trainable" if name in trained else "state" if name in state else "frozen"
        dtype = master if role == "trainable" else tensor.dtype
        parameters.append(Parameter(name, role, tensor, dtype, module=modules.get(name)))
    return tuple(parameters)


def master_type(dtypes: Collection[ir.DataType]) -> ir.DataType:
    """The type in which parameters of some types are trained."""
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT


def _check_trainable(name: str, tensor: ir.TensorProtocol, state: set[str]) -> None:
    if name in state:
        raise OdtpackError(
            "statistic-trained",
            f"{name!r} is a running statistic of a batch normalization; it follows the data "
            "and takes no gradient",
            hint=f"leave {name!r} out of the parameters to train",
        )
    if tensor.dtype not in TRAINABLE_TYPES:
        names = ", ".join(dtype.name for dtype in TRAINABLE_TYPES)
        raise OdtpackError(
            "dtype-not-trainable",
            f"{name!r} is of type {tensor.dtype.name}; parameters to train must be of one of the "
            f"types {names}",
            hint=f"freeze it (--freeze {name!r})",
        )


def check_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Check that gradients are wanted of existing float32 inputs only.

    Raises:
        OdtpackError: ``unknown-parameter`` or ``dtype-not-trainable``.
    """
    inputs = {value.name: value for value in graph.inputs}
    for name in names:
        if name not in inputs:
            raise UnknownNameError(
                "unknown-parameter", f"the model has no initializer or input {name!r}"
            )
        if inputs[name].dtype != ir.DataType.FLOAT:
            raise OdtpackError(
                "dtype-not-trainable",
                f"the gradient of input {name!r} is asked for; only FLOAT inputs have one",
                hint=f"do not ask for the gradient of {name!r}",
            )


def store_frozen(
    graph: ir.Graph, parameters: Sequence[Parameter], wanted: Storage
) -> tuple[Parameter, ...]:
    """Store large frozen weights in fewer bytes; a scale follows the weight it belongs to."""
    found: list[Parameter] = []
    for parameter in parameters:
        stored = None
        if parameter.role == "frozen" and storage.is_weight(graph.initializers[parameter.name]):
            stored = storage.store(parameter.name, parameter.tensor, wanted)
        if stored is None:
            found.append(parameter)
            continue
        scale = None if stored.scale is None else f"{parameter.name}{SCALE_SUFFIX}"
        found.append(
            dataclasses.replace(
                parameter, dtype=stored.values.dtype, stored=stored.values, scale=scale
            )
        )
        if scale is not None and stored.scale is not None:
            found.append(Parameter(scale, "frozen", stored.scale, stored.scale.dtype))
    if all(parameter.stored is None for parameter in found):
        raise OdtpackError(
            "storage-not-used",
            f"the model has no frozen weight to store as {wanted}",
            hint=f"freeze some of its float32 weights with {storage.SMALLEST} elements or more "
            "(--freeze GLOB), or leave --frozen-dtype out",
        )
    return tuple(found)


def lift_parameters(graph: ir.Graph, parameters: Sequence[Parameter]) -> None:
    """Make initializers inputs, so that no constant folding can swallow them.

    An input of another type than the model's own is brought to that in front of everything.
    """
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
        value = inputs[parameter.name]
        to = {"to": int(parameter.tensor.dtype)}
        if parameter.scale is None:
            made = [_own(parameter, OWN_TYPE_SUFFIX, "Cast", [value], to)]
        else:
            plain = _own(parameter, UNSCALED_SUFFIX, "Cast", [value], to)
            operands = [plain.outputs[0], inputs[parameter.scale]]
            made = [plain, _own(parameter, OWN_TYPE_SUFFIX, "Mul", operands, {})]
        value.replace_all_uses_with(made[-1].outputs[0], replace_graph_outputs=True)
        made[0].replace_input_with(0, value)
        nodes += made
    if nodes and len(graph):
        graph.insert_before(graph[0], nodes)


def _own(
    parameter: Parameter,
    suffix: str,
    op_type: str,
    inputs: Sequence[ir.Value],
    attributes: Mapping[str, int],
) -> ir.Node:
    """A node whose output has the shape of a parameter, in the model's own type."""
    name = f"{parameter.name}{suffix}"
    node = ir.node(op_type, inputs, attributes, name=name)
    output = node.outputs[0]
    output.name, output.shape = name, ir.Shape(parameter.tensor.shape.numpy())
    output.type = ir.TensorType(parameter.tensor.dtype)
    return node
