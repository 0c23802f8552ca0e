"""Folds an adapter into the weights of a forward model."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx.checker
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.adapters import low_rank
from odtpack.adapters.layers import Layer, find_layers, packed_layers, transposed
from odtpack.adapters.low_rank import FACTORS, MAGNITUDE, A, B
from odtpack.adapters.modules import by_layer, merged, modules_of
from odtpack.contrib.quantized import store_matrix, stored_matrix
from odtpack.errors import OdtpackError, UnknownNameError, located
from odtpack.graph.graphs import InlinePass, Names, maker, operand, used_names
from odtpack.graph.inference import infer_shapes
from odtpack.model import exporters, shared_tensors
from odtpack.model.exporters import noted_architecture
from odtpack.model.loading import load_model
from odtpack.model.shared_tensors import weight_array
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
    InlinePass()(model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(model)
    graph = model.graph
    graph.metadata_props.update(noted_architecture(path))
    put_back = _as_loaded(graph)
    with located(str(path)):
        rounded = _fold_in(graph, adapter)
    if rounded and remark is not None:
        error, weights, change = (math.sqrt(sum(column)) for column in zip(*rounded, strict=True))
        remark(
            f"{len(rounded)} quantized matrices are rounded again: the error is {error:.3g}, of "
            f"weights of {weights:.3g} that the adapter changes by {change:.3g} (Frobenius norms)"
        )
    put_back()
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]  # what shape inference found
    if proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        raise OdtpackError("model-too-large", "the merged model would exceed 2 GB", where=str(path))
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


def _fold_in(graph: ir.Graph, adapter: PeftAdapter) -> list[tuple[float, float, float]]:
    """Change the weights of a graph; return what is known of those that were rounded again."""
    places = _places(graph)
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
    tables = {table.name: table for table in low_rank.find_tables(graph)}
    _check_whole(adapter, pending, {*modules, *tables})
    for name, given in pending.items():
        if name in tables and low_rank.TABLE_A in given:
            _merge_table(tables[name], given, adapter)
            continue
        if name not in modules:
            raise UnknownNameError(
                "unknown-layer",
                f"the adapter is on {name!r:.200}, which is no linear layer of the model",
            )
        if not _fits(modules[name].shape, given, adapter):
            raise _mismatch(name, modules[name].shape, given, adapter)
        on.append((modules[name], given))
    for layer, pieces in by_layer(on):
        values = merged(layer, pieces)
        if layer.uses[0].node.op_type == "MatMulNBits":
            rounded.append(_merge_packed(layer, values, adapter))
        else:
            _merge(layer, values, adapter)
    for name, value in whole.items():
        _replace(places, name, value)
    return rounded


def _check_whole(adapter: PeftAdapter, given: Collection[str], names: Collection[str]) -> None:
    """Refuse an adapter without tensors for a layer of the model that its configuration names."""
    # PEFT takes ends of names, and names that the model lacks. What a regular expression matches is
    # not looked for: the file is a stranger's, and an expression may take forever.
    listed = () if isinstance(adapter.layers, str) else adapter.layers
    ends = collections.defaultdict[str, list[str]](list)
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            ends[".".join(parts[first:])].append(name)
    wanted = {name for each in listed for name in ([each] if each in names else ends.get(each, ()))}
    saved = tuple(f".{each}" for each in adapter.saved)
    missing = sorted(n for n in wanted - {*given} if not f".{n}".endswith(saved))
    if missing or not adapter.tensors:
        what = f"for {missing[0]!r}, which its target_modules name" if missing else "at all"
        raise OdtpackError(
            "adapter-mismatch",
            f"the adapter has no tensors {what}",
            hint="save the adapter again, all of it: model.save_pretrained(folder)",
        )


def _fits(shape: Sequence[int], given: Mapping[str, np.ndarray], adapter: PeftAdapter) -> bool:
    """Whether the tensors are those of the adapter's kind on a layer of a shape."""
    shapes = {name: array.shape for name, array in given.items()}
    if adapter.kind == "ia3":
        return [*shapes] == [FACTORS]  # whose size is checked where they are used
    ones = (1,) * len(shape[2:])
    wanted = {A: (adapter.rank, *shape[1:]), B: (shape[0], adapter.rank, *ones)}
    if adapter.kind == "dora":
        wanted[MAGNITUDE] = (1, shape[0], *ones) if ones else (shape[0],)
    return shapes == wanted


def _as_loaded(graph: ir.Graph) -> Callable[[], None]:
    """Give each parameter its own tensor; return what stores them as the file does again."""
    stored = {name: value.const_value for name, value in graph.initializers.items()}
    exporters.restore(graph)
    shared_tensors.split(graph)
    shared_tensors.tie(graph)
    before = {value: value.const_value for value in graph.initializers.values()}

    def is_as_before(value: ir.Value) -> bool:
        return value in before and before[value] is value.const_value

    def put_back() -> None:
        for node in list(graph):
            copy = str(node.name).removesuffix("/Transpose")
            if copy == node.name or stored.get(copy) is None or copy in graph.initializers:
                continue
            source, turned = operand(node, 0), node.outputs[0]
            tensor = stored[copy]
            if not is_as_before(source):
                tensor = ir.tensor(np.ascontiguousarray(weight_array(source).T), name=copy)
            new = ir.val(None, type=turned.type, shape=turned.shape, const_value=tensor)
            turned.replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
            turned.name, new.name = None, copy
            graph.register_initializer(new)
            if not source.uses() and not source.is_graph_output():
                graph.initializers.pop(str(source.name))
        for value in [*graph.initializers.values()]:
            first = graph.initializers.get(shared_tensors.separated_from(value))
            known = first is not None and first is not value
            if first is not None and known and is_as_before(first) and is_as_before(value):
                value.replace_all_uses_with(first)
                graph.initializers.pop(str(value.name))

    return put_back


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a parameter of the module is in the file."""

    stored: ir.Value
    uses: tuple[tuple[ir.Node, int], ...]  # that read it as this parameter
    turned: bool = False  # whether the exporter transposed it


def _places(graph: ir.Graph) -> dict[str, _Place]:
    """The parameters of the module, by name."""
    modules, turned = exporters.module_names(graph), transposed(graph)
    found = {
        modules.get(name, name): _Place(value, tuple(value.uses()), name in turned)
        for name, value in graph.initializers.items()
    }
    for value in graph.initializers.values():
        homes = exporters.homes(value)
        others = homes.pop("", [])
        for path, uses in homes.items():
            found[f"{path}.weight"] = _Place(value, (*uses, *others), value.name in turned)
    return found


def _own(value: ir.Value, places: Iterable[tuple[ir.Node, int]]) -> ir.Value:
    """An initializer that nothing but some places reads: the one that they read, or a copy."""
    places = [*places]
    graph = value.graph
    assert graph is not None  # noqa: S101 - it is an initializer
    if value.is_graph_output() or any(use not in places for use in value.uses()):
        name = Names(used_names(graph)).fresh(str(value.name))
        return shared_tensors.separate(graph, value, places, name)
    return value


def _merge(layer: Layer, given: Mapping[str, np.ndarray], adapter: PeftAdapter) -> None:
    """Replace the weight of a layer, and its bias where that changes too."""
    first = layer.uses[0]
    ways = [use.node if use.weight is layer.source else use.weight.producer() for use in layer.uses]
    tensor = layer.source.const_value
    if (
        tensor is None
        or not tensor.dtype.is_floating_point()
        or any(way is None or layer.source not in way.inputs for way in ways)
        or len({(use.outputs_first, use.swapped) for use in layer.uses}) > 1
    ):
        raise _not_mergeable(layer.source, layer.name)
    transposes = len(layer.shape) == 2 and first.outputs_first == first.swapped
    stored = tensor.numpy().astype(np.float64)
    weight = stored.T if transposes else stored
    factors = given.get(FACTORS)
    if factors is not None:
        feedforward = len(layer.shape) == 2 and factors.shape == (1, layer.inputs)
        feedforward |= layer.name in adapter.feedforward
        line = factors.astype(np.float64).reshape(-1)
        if line.size != (layer.inputs if feedforward else layer.outputs):
            raise _mismatch(layer.name, layer.shape, given, adapter)
        ones = [1] * (weight.ndim - 2)
        merged = weight * line.reshape((1, -1, *ones) if feedforward else (-1, 1, *ones))
        if not feedforward:
            ends = {node for use in layer.uses for node in (use.node, maker(use.end))}
            for bias in {use.bias for use in layer.uses if use.bias is not None}:
                _set(_own(bias, [u for u in bias.uses() if u.node in ends]), _array(bias) * line)
    else:
        merged = _low_rank(layer, weight, given, adapter)
    source = _own(layer.source, [use for use in layer.source.uses() if use.node in ways])
    _set(source, merged.T if transposes else merged)


def _merge_packed(
    layer: Layer, given: Mapping[str, np.ndarray], adapter: PeftAdapter
) -> tuple[float, float, float]:
    """Replace a matrix of few bits; return the squares of its error, of it and of the change."""
    (use,) = layer.uses
    before = stored_matrix(use.node)
    if before is None or FACTORS in given:
        raise _not_mergeable(layer.source, layer.name)
    wanted = _low_rank(layer, before, given, adapter)
    store_matrix(use.node, wanted)
    found = stored_matrix(use.node)
    assert found is not None  # noqa: S101 - it was stored
    squares = (float(np.sum(x**2)) for x in (found - wanted, wanted, wanted - before))
    error, size, change = squares
    return error, size, change


def _not_mergeable(source: ir.Value, name: str) -> OdtpackError:
    return OdtpackError(
        "adapter-not-mergeable",
        f"the weight {source.name!r} of {name!r} is quantized in a form that odtpack cannot write, "
        "or is shared with other places",
        hint="merge into the model in float32, and quantize that; or let ONNX Runtime apply "
        "the adapter (odtpack adapter export --onnxruntime)",
    )


def _merge_table(
    table: low_rank.Table, given: Mapping[str, np.ndarray], adapter: PeftAdapter
) -> None:
    """Replace the table of an embedding by W + s (B A)^T."""
    if not table.source.is_initializer():
        raise _not_mergeable(table.source, table.name)
    shapes = {name: array.shape for name, array in given.items()}
    rank = adapter.rank
    wanted = {low_rank.TABLE_A: (rank, table.rows), low_rank.TABLE_B: (table.width, rank)}
    if shapes != wanted or adapter.kind != "lora":
        raise _mismatch(table.name, (table.rows, table.width), given, adapter)
    a, b = given[low_rank.TABLE_A], given[low_rank.TABLE_B]
    added = a.T.astype(np.float64) @ b.T.astype(np.float64)
    source = _own(table.source, [u for u in table.source.uses() if u.node.op_type == "Gather"])
    _set(source, _array(source) + adapter.scaling * added)


def _low_rank(
    layer: Layer, weight: np.ndarray, given: Mapping[str, np.ndarray], adapter: PeftAdapter
) -> np.ndarray:
    """W + s B A, with rows of the lengths that DoRA gives them."""
    a, b = (given[name].astype(np.float64) for name in (A, B))
    flat = b.reshape(layer.outputs, -1) @ a.reshape(a.shape[0], -1)
    merged = weight + adapter.scaling * flat.reshape(layer.shape)
    if MAGNITUDE in given:
        rows = merged.reshape(layer.outputs, -1)
        lengths = given[MAGNITUDE].astype(np.float64).reshape(-1, 1)
        rows = rows * lengths / np.linalg.norm(rows, axis=1, keepdims=True)
        merged = rows.reshape(layer.shape)
    return np.asarray(merged)


def _mismatch(
    name: str, shape: Sequence[int], given: Mapping[str, np.ndarray], adapter: PeftAdapter
) -> OdtpackError:
    kind = f"{adapter.kind} of rank {adapter.rank}" if adapter.rank else adapter.kind
    found = ", ".join(f"{end} {list(array.shape)}" for end, array in sorted(given.items()))
    return OdtpackError(
        "adapter-mismatch",
        f"the adapter, {kind}, does not fit {name!r}, whose weight is {list(shape)}: "
        f"it has {found}",
        hint="merge it into the model that it was trained on",
    )


def _replace(places: Mapping[str, _Place], name: str, value: np.ndarray) -> None:
    """Replace a parameter that was trained as a whole."""
    place = places.get(name)
    tensor = None if place is None else place.stored.const_value
    wanted = value.T if place is not None and place.turned else value
    if place is None or tensor is None or tuple(tensor.shape) != wanted.shape:
        raise OdtpackError(
            "adapter-mismatch",
            f"the adapter brings {name!r:.200} {list(value.shape)}, which the model does not have",
            hint="merge it into the model that it was trained on",
        )
    _set(_own(place.stored, place.uses), wanted.astype(np.float64))


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None  # noqa: S101 - it is an initializer
    return value.const_value.numpy().astype(np.float64)


def _set(value: ir.Value, array: np.ndarray) -> None:
    assert value.const_value is not None  # noqa: S101 - it is an initializer
    dtype = value.const_value.dtype.numpy()
    value.const_value = ir.tensor(np.ascontiguousarray(array.astype(dtype)), name=value.name)
