"""Stores the weights of frozen linear layers and look-up tables of a model in few bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from odtpack.adapters.layers import Layer, find_layers
from odtpack.autodiff.unpack_late import SMALLEST
from odtpack.choices import BaseKind
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import LOOK_UP
from odtpack.graph.inference import infer_shapes
from odtpack.graph.ops import Ops
from odtpack.model.exporters import matching, module_names
from odtpack.model.loading import mark_constant
from odtpack.model.source import release_pages
from odtpack.passes.upgrade_opset import to_blocks
from odtpack.quantized.codes import Codes, quantize, write

_BLOCKED_OPSET = 21  # of DequantizeLinear with 4 bits and blocks


def quantize_base(
    model: ir.Model, kind: BaseKind, trained: Sequence[str] = (), newest_opset: int = 21
) -> ir.Model:
    """Store the matrices of linear layers, and look-up tables, as codes with scales.

    The codes are constants of the model, and no parameters. Everything that reads a weight reads
    what its codes stand for, be it the layer, its gradient or DoRA's norms. A table that Gather
    reads, tied to a layer or not, is stored as int8, since its rows are looked up before they are
    unpacked.

    Args:
        model: As :func:`odtpack.model.loading.load_model` returns it; changed in place.
        kind: ``int8``, ``int4`` or ``nf4``.
        trained: Patterns of parameters that stay as they are, for training.
        newest_opset: The newest opset that the loading runtime knows.

    Returns:
        The model, with shapes inferred.

    Raises:
        OdtpackError: There is no weight to store so (``base-not-used``), a weight is infinite or
            NaN (``value-out-of-range``), or 4 bits are asked for and the model cannot be
            expressed in opset 21 or that is too new for the target (``base-needs-opset``).
    """
    graph = model.graph
    opset = graph.opset_imports[""]
    new_enough = kind == "int8" or opset >= _BLOCKED_OPSET
    if not new_enough and (newest_opset < _BLOCKED_OPSET or not to_blocks(graph)):
        raise OdtpackError(
            "base-needs-opset",
            f"weights of 4 bits need opset {_BLOCKED_OPSET}, and the model has {opset}",
            hint="export the model with opset 21, choose a newer --onnxruntime, or --base int8",
        )
    op, count = Ops(graph, "base/"), 0
    modules = module_names(graph)
    layers = {layer.source: layer for layer in find_layers(graph) if len(layer.shape) == 2}
    for name, source in [*graph.initializers.items()]:
        tensor, layer = source.const_value, layers.get(source)
        lookups = [node for node, i in source.uses() if node.op_type == "Gather" and i == 0]
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < SMALLEST:
            continue
        if len(tensor.shape) != 2 or not (layer or lookups):
            continue
        if any(matching(pattern, [name], modules) for pattern in trained):
            continue
        if not _is_all(source, layer, lookups):
            continue
        array = tensor.numpy()
        if not np.isfinite(array).all():
            raise OdtpackError(
                "value-out-of-range",
                f"{name!r} holds infinity or NaN, which {kind} cannot store",
                hint="leave --base out, or train it (--train)",
            )
        outputs_first = layer is None or layer.uses[0].outputs_first != layer.uses[0].swapped
        codes = quantize(array, "int8" if lookups else kind, axis=int(outputs_first))
        _replace(op, source, codes, lookups, layer.name if layer else name.removesuffix(".weight"))
        release_pages(array)
        count += 1
    if not count:
        raise OdtpackError(
            "base-not-used",
            f"the model has no frozen matrix to store as {kind}",
            hint=f"it needs one of {SMALLEST} elements or more that is not trained; leave --base "
            "out otherwise",
        )
    return infer_shapes(model)


def _is_all(source: ir.Value, layer: Layer | None, lookups: Sequence[ir.Node]) -> bool:
    """Whether nothing else reads a weight."""
    known = {id(node) for node in lookups}
    for use in layer.uses if layer is not None else ():
        known |= {id(use.node), id(use.weight.producer())}
    direct = all(id(node) in known for node, _ in source.uses())
    return direct and not source.is_graph_output()


def _replace(
    op: Ops, source: ir.Value, codes: Codes, lookups: Sequence[ir.Node], layer: str
) -> None:
    """Put codes in the place of an initializer."""
    graph = op.graph
    values = _constant(graph, f"{layer}.weight_quantized", ir.tensor(codes.values))
    scales = _constant(graph, f"{layer}.weight_scale", ir.tensor(codes.scales))
    for node in lookups:
        with op.before(node):
            axis, ids = node.attributes.get_int("axis", 0), node.inputs[1]
            rows = op.cast(op.emit("Gather", [values, ids], axis=axis)[0], op.FLOAT)
            rows.type = ir.TensorType(op.FLOAT)
            factors = op.emit("Gather", [scales, ids], axis=0)[0]
            unpacked = op.Mul(rows, op.unsqueeze(factors, -1))
        end = unpacked.producer()
        assert end is not None  # noqa: S101 - a Mul
        end.metadata_props[LOOK_UP] = layer
        unpacked.shape, unpacked.type = node.outputs[0].shape, ir.TensorType(op.FLOAT)
        old = node.outputs[0]
        name, old.name = old.name, None
        unpacked.name = name
        old.replace_all_uses_with(unpacked, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    readers = [*source.uses()]
    if readers:
        order = {id(node): place for place, node in enumerate(graph)}
        with op.before(min((node for node, _ in readers), key=lambda node: order[id(node)])):
            unpacked = write(op, codes, values, scales)
        unpacked.type, unpacked.shape = source.type, source.shape
        for node, index in readers:
            node.replace_input_with(index, unpacked)
    graph.initializers.pop(str(source.name))


def _constant(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.val(name, const_value=tensor)
    while value.name in graph.initializers:
        value.name = f"{value.name}_"
    tensor.name = value.name
    graph.register_initializer(value)
    mark_constant(value)
    return value
