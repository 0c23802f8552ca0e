"""Folds an adapter into the weights of a forward model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx.checker
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.adapters import low_rank
from odtpack.adapters.layers import Layer, find_layers, packed_layers
from odtpack.adapters.low_rank import FACTORS, MAGNITUDE, A, B
from odtpack.adapters.modules import by_layer, merged, modules_of
from odtpack.contrib.quantized import store_matrix, stored_matrix
from odtpack.errors import OdtpackError, UnknownNameError
from odtpack.graph.inference import infer_shapes
from odtpack.model.exporters import noted_architecture
from odtpack.model.loading import load_model
from odtpack_runtime.package.adapter import PREFIX, PeftAdapter

_ENDS = (A, B, MAGNITUDE, FACTORS, low_rank.TABLE_A, low_rank.TABLE_B)


def merge_adapter(
    path: Path,
    adapter: PeftAdapter,
    *,
    beside: bool = True,
    remark: Callable[[str], None] | None = None,
) -> bytes:
    """Return the serialized model with the weights that the adapter makes of its own."""
    # Computed in float64, and rounded to the type that the model stores.
    # beside: Whether the result goes to the folder of the model, where it may go on reading the
    # model's external data. Otherwise all of them become part of it. remark: Takes a sentence about
    # the rounding of a quantized model's weights: matrices of ``MatMulNBits`` are rounded to their
    # bits again, by blocks as they were.
    if adapter.kind == "prompt":
        raise OdtpackError(
            "adapter-not-mergeable",
            "prompt vectors belong to no weight, so they cannot be merged",
            where=str(path),
            hint="write the model that puts them there: odtpack export",
        )
    load_model(path)  # says what is wrong with it
    model = infer_shapes(ir.load(path))
    if not beside:
        ir.external_data.load_to_model(model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(model)
    graph = model.graph
    graph.metadata_props.update(noted_architecture(path))
    found = (*find_layers(graph), *packed_layers(graph))
    split = adapter.kind == "lora"
    modules = {module.name: module for module in modules_of(graph, found, split=split)}
    on = []
    rounded: list[tuple[float, float, float]] = []
    pending: dict[str, dict[str, np.ndarray]] = {}
    whole: dict[str, np.ndarray] = {}
    for key, value in adapter.tensors.items():
        name = key.removeprefix(PREFIX)
        end = next((end for end in _ENDS if name.endswith(f".{end}")), None)
        if end is None:
            whole[name] = value
        else:
            pending.setdefault(name.removesuffix(f".{end}"), {})[end] = value
    tables = {table.name: table for table in low_rank.find_tables(model.graph)}
    for name, given in pending.items():
        if name in tables and low_rank.TABLE_A in given:
            _merge_table(tables[name], given, adapter, path)
            continue
        if name not in modules:
            raise UnknownNameError(
                "unknown-layer",
                f"the adapter is on {name!r}, which is no linear layer of the model",
                where=str(path),
            )
        shape = modules[name].shape
        if split and (A not in given or B not in given or len(given[B]) != shape[0]):
            raise _mismatch(name, shape, path)
        on.append((modules[name], given))
    for layer, pieces in by_layer(on):
        values = merged(layer, pieces)
        if layer.uses[0].node.op_type == "MatMulNBits":
            rounded.append(_merge_packed(layer, values, adapter, path))
        else:
            _merge(layer, values, adapter, path)
    if rounded and remark is not None:
        error, weights, change = (math.sqrt(sum(column)) for column in zip(*rounded, strict=True))
        remark(
            f"{len(rounded)} quantized matrices are rounded again: the error is {error:.3g}, of "
            f"weights of {weights:.3g} that the adapter changes by {change:.3g} (Frobenius norms)"
        )
    for name, value in whole.items():
        _replace(model.graph, name, value, path)
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]  # what shape inference found
    if proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        raise OdtpackError("model-too-large", "the merged model would exceed 2 GB", where=str(path))
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


def _merge(layer: Layer, given: Mapping[str, np.ndarray], adapter: PeftAdapter, path: Path) -> None:
    """Replace the weight of a layer, and its bias where that changes too."""
    first = layer.uses[0]
    nodes = {id(use.node) for use in layer.uses} | {id(use.weight.producer()) for use in layer.uses}
    tensor = layer.source.const_value
    if (
        tensor is None
        or not tensor.dtype.is_floating_point()
        or any(id(node) not in nodes for node, _ in layer.source.uses())
        or len({(use.outputs_first, use.swapped) for use in layer.uses}) > 1
    ):
        raise _not_mergeable(layer.source, layer.name, path)
    transposes = len(layer.shape) == 2 and first.outputs_first == first.swapped
    stored = tensor.numpy().astype(np.float64)
    weight = stored.T if transposes else stored
    factors = given.get(FACTORS)
    if factors is not None:
        feedforward = len(layer.shape) == 2 and factors.shape == (1, layer.inputs)
        feedforward |= layer.name in adapter.feedforward
        line = factors.astype(np.float64).reshape(-1)
        _check(line.size == (layer.inputs if feedforward else layer.outputs), layer, path)
        ones = [1] * (weight.ndim - 2)
        merged = weight * line.reshape((1, -1, *ones) if feedforward else (-1, 1, *ones))
        if not feedforward:
            for bias in {use.bias for use in layer.uses if use.bias is not None}:
                _set(bias, _array(bias) * line)
    else:
        merged = _low_rank(layer, weight, given, adapter, path)
    _set(layer.source, merged.T if transposes else merged)


def _merge_packed(
    layer: Layer, given: Mapping[str, np.ndarray], adapter: PeftAdapter, path: Path
) -> tuple[float, float, float]:
    """Replace a matrix of few bits; return the squares of its error, of it and of the change."""
    (use,) = layer.uses
    before = stored_matrix(use.node)
    if before is None or FACTORS in given:
        raise _not_mergeable(layer.source, layer.name, path)
    wanted = _low_rank(layer, before, given, adapter, path)
    store_matrix(use.node, wanted)
    found = stored_matrix(use.node)
    assert found is not None  # noqa: S101 - it was stored
    squares = (float(np.sum(x**2)) for x in (found - wanted, wanted, wanted - before))
    error, size, change = squares
    return error, size, change


def _not_mergeable(source: ir.Value, name: str, path: Path) -> OdtpackError:
    return OdtpackError(
        "adapter-not-mergeable",
        f"the weight {source.name!r} of {name!r} is quantized in a form that odtpack cannot write, "
        "or is shared with other places",
        where=str(path),
        hint="merge into the model in float32, and quantize that; or let ONNX Runtime apply "
        "the adapter (odtpack adapter export --onnxruntime)",
    )


def _merge_table(
    table: low_rank.Table, given: Mapping[str, np.ndarray], adapter: PeftAdapter, path: Path
) -> None:
    """Replace the table of an embedding by W + s (B A)^T."""
    own = table.source.is_initializer() and not table.source.is_graph_output()
    if not own or len(table.source.uses()) != len(table.uses):
        raise _not_mergeable(table.source, table.name, path)
    a, b = given[low_rank.TABLE_A], given.get(low_rank.TABLE_B, np.empty(0))
    if a.shape[1:] != (table.rows,) or b.shape != (table.width, len(a)):
        raise _mismatch(table.name, (table.rows, table.width), path)
    added = a.T.astype(np.float64) @ b.T.astype(np.float64)
    _set(table.source, _array(table.source) + adapter.scaling * added)


def _low_rank(
    layer: Layer,
    weight: np.ndarray,
    given: Mapping[str, np.ndarray],
    adapter: PeftAdapter,
    path: Path,
) -> np.ndarray:
    """W + s B A, with rows of the lengths that DoRA gives them."""
    _check(A in given and B in given, layer, path)
    a, b = (given[name].astype(np.float64) for name in (A, B))
    _check(a.shape[1:] == layer.shape[1:] and b.shape[:1] == layer.shape[:1], layer, path)
    flat = b.reshape(layer.outputs, -1) @ a.reshape(a.shape[0], -1)
    merged = weight + adapter.scaling * flat.reshape(layer.shape)
    if MAGNITUDE in given:
        rows = merged.reshape(layer.outputs, -1)
        lengths = given[MAGNITUDE].astype(np.float64).reshape(-1, 1)
        _check(lengths.size == layer.outputs, layer, path)
        rows = rows * lengths / np.linalg.norm(rows, axis=1, keepdims=True)
        merged = rows.reshape(layer.shape)
    return np.asarray(merged)


def _check(fits: bool, layer: Layer, path: Path) -> None:
    if not fits:
        raise _mismatch(layer.name, layer.shape, path)


def _mismatch(name: str, shape: Sequence[int], path: Path) -> OdtpackError:
    return OdtpackError(
        "adapter-mismatch",
        f"the adapter does not fit {name!r}, whose weight is {list(shape)}",
        where=str(path),
        hint="merge it into the model that it was trained on",
    )


def _replace(graph: ir.Graph, name: str, value: np.ndarray, path: Path) -> None:
    """Replace a parameter that was trained as a whole."""
    own = graph.initializers.get(name)
    if own is None or own.const_value is None or tuple(own.const_value.shape) != value.shape:
        raise OdtpackError(
            "adapter-mismatch",
            f"the adapter brings {name!r} {list(value.shape)}, which the model does not have",
            where=str(path),
            hint="merge it into the model that it was trained on",
        )
    _set(own, value.astype(np.float64))


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None  # noqa: S101 - it is an initializer
    return value.const_value.numpy().astype(np.float64)


def _set(value: ir.Value, array: np.ndarray) -> None:
    assert value.const_value is not None  # noqa: S101 - it is an initializer
    dtype = value.const_value.dtype.numpy()
    value.const_value = ir.tensor(np.ascontiguousarray(array.astype(dtype)), name=value.name)
