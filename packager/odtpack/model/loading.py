"""Reads the user's model; everything about it is checked here, before anything uses it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.numpy_helper
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack import targets
from odtpack.errors import OdtpackError
from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.graph.graphs import defined, dims_of, is_lifted_constant, mark_constant, nodes_of
from odtpack.graph.inference import infer_shapes
from odtpack.graph.inline import InlinePass
from odtpack.model import (
    drop_cache,
    endless,
    external_data,
    functions,
    restore_bias,
    shared_tensors,
    source,
    split_merged,
    tie_weights,
)
from odtpack.model.source import ModelLike
from odtpack.passes import upgrade_opset

__all__ = [
    "CACHE",
    "ModelLike",
    "check_texts",
    "infer_shapes",
    "is_lifted_constant",
    "load_model",
    "load_source",
    "mark_constant",
]
CACHE = "odtpack.cache"
"""Metadata of a loaded model: the inputs that were left out with its key-value cache."""


def load_model(
    model: ModelLike, named: Collection[str] = (), untie: Sequence[str] = ()
) -> ir.Model:
    """Return a checked model with local functions inlined and shapes inferred.

    Contributed operators are written in standard ones where :mod:`odtpack.contrib` can, and a
    key-value cache is left out (see :mod:`odtpack.model.drop_cache`).
    Large initializers stay where they are, in the file or in the given model's memory.

    Args:
        model: Path of an ONNX file (external data beside it), or a model in memory,
            which is not changed.
        named: Initializers that the caller goes by, which are not taken for folded copies of
            others (see :mod:`odtpack.model.tie_weights`).
        untie: Patterns of shared tensors of which each place gets its own copy (see
            :mod:`odtpack.model.shared_tensors`).

    Raises:
        OdtpackError: Not an ONNX model, invalid, an opset that no runtime loads, external
            data outside the model's folder, or an initializer with missing bytes; or a
            pattern matches no shared tensor.
    """
    return load_source(source.open_model(model), named, untie)


def load_source(
    given: source.Source,
    named: Collection[str] = (),
    untie: Sequence[str] = (),
    *,
    as_stored: bool = False,
) -> ir.Model:
    """:func:`load_model` of a model that is open already.

    Args:
        given: The model.
        named: As :func:`load_model`.
        untie: As :func:`load_model`.
        as_stored: Whether equal parameters that were stored once stay one.

    Raises:
        OdtpackError: As :func:`load_model`.
    """
    from odtpack.contrib import decompose, needs_blocks, rename_misplaced

    rename_misplaced(given.proto)
    _open_negative_sizes(given.proto.graph)
    functions.check_functions(given.proto, given.where)
    _check(given.proto, given.where)
    try:
        loaded = ir.from_proto(given.proto)
    except ir.serde.SerdeError as error:
        raise OdtpackError(
            "invalid-model",
            f"the model is damaged: {str(error).splitlines()[0]}",
            where=given.where,
        ) from error
    _name_standard_domain(loaded.graph.opset_imports)
    for function in loaded.functions.values():
        _name_standard_domain(function.opset_imports)
    given.restore(loaded.graph)
    _mark_constants(loaded)
    for transform in (
        InlinePass(),
        common_passes.RemoveInitializersFromInputsPass(),
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0),
    ):
        transform(loaded)
    _lift_parameters(loaded.graph)
    _write_conditions(loaded.graph)
    endless.check_loops(loaded.graph, given.where)
    common_passes.NameFixPass()(loaded)
    _drop_trailing_absent(loaded.graph)
    if not as_stored:
        restore_bias.restore(loaded.graph)
        constants = {n for n, v in loaded.graph.initializers.items() if is_lifted_constant(v)}
        split_merged.split(loaded.graph, constants)
    tie_weights.tie(loaded.graph, named)
    shared_tensors.untie(loaded.graph, untie)
    _open_declared_sizes(loaded.graph)
    loaded = infer_shapes(loaded)
    inputs = [value for value in loaded.graph.inputs if value.uses()]
    cache = () if as_stored else drop_cache.drop(loaded.graph)
    if needs_blocks(loaded.graph):
        upgrade_opset.to_blocks(loaded.graph)
    loaded = decompose(loaded)
    if cache:
        loaded.meta[CACHE] = (*cache, *_drop_unread(loaded, inputs))
    return loaded


def _drop_unread(model: ir.Model, read: Sequence[ir.Value]) -> list[str]:
    """Leave out inputs that were read with the cache, and are not without it."""
    names = {value.name for value in read}
    common_passes.RemoveUnusedNodesPass()(model)
    inputs = model.graph.inputs
    gone = [value for value in inputs if value.name in names and not value.uses()]
    gone = [value for value in gone if not value.is_graph_output()]
    inputs[:] = [value for value in inputs if value not in gone]
    return [str(value.name) for value in gone]


def _open_negative_sizes(graph: onnx.GraphProto) -> None:
    """Read a size of -1 as ONNX Runtime does, and as exporters mean it: any number."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value < 0:
                dim.ClearField("dim_value")


def _open_declared_sizes(graph: ir.Graph) -> None:
    """Leave it to inference whether an output has as many of something as an input.

    Exporters write down the name that they are given: ``[batch, vocabulary]`` for what a
    Reshape makes ``[batch * sequence, vocabulary]``. A target of that shape would be refused.
    """
    names = {dim for value in graph.inputs for dim in dims_of(value) or () if isinstance(dim, str)}
    for value in graph.outputs:
        dims = dims_of(value)
        if dims is not None and value.producer() is not None and names.intersection(dims):
            value.shape = ir.Shape([None if dim in names else dim for dim in dims])


def _name_standard_domain(imports: dict[str, int]) -> None:
    """The standard operators' domain has two names; here it is ""."""
    if "ai.onnx" in imports:
        imports.setdefault("", imports.pop("ai.onnx"))


def _lift_parameters(graph: ir.Graph) -> None:
    """Move what may be a parameter from subgraphs to the main graph, where it can be trained.

    Constants of other types stay: shape inference reads axes and sizes only where they are.
    """
    names = {value.name for value in defined(graph)}
    for subgraph in list(graph.subgraphs()):
        for name, value in list(subgraph.initializers.items()):
            kept = value.is_graph_input() or value.is_graph_output()
            if kept or value.dtype not in TRAINABLE_TYPES or not value.shape:
                continue
            subgraph.initializers.pop(name)
            count = 1
            while value.name in names:
                count += 1
                value.name = f"{name}_{count}"
            names.add(value.name)
            graph.register_initializer(value)


def _mark_constants(model: ir.Model) -> None:
    """Let the passes that make initializers of Constant nodes leave a trace of it."""
    nodes = [
        *nodes_of(model.graph),
        *(n for f in model.functions.values() for n in f.all_nodes()),
    ]
    for node in nodes:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            mark_constant(node.outputs[0])


def _drop_trailing_absent(graph: ir.Graph) -> None:
    """Remove absent inputs at the end of a node: some kernels crash on their empty names."""
    for node in nodes_of(graph):
        present = [i for i, value in enumerate(node.inputs) if value is not None]
        wanted = present[-1] + 1 if present else 0
        if wanted < len(node.inputs):
            node.resize_inputs(wanted)


def _write_conditions(graph: ir.Graph) -> None:
    """Give a Loop that carries nothing its condition, which may be absent but not left out.

    Its place is lost as soon as a pass removes absent inputs at the end of nodes.
    """
    true: ir.Value | None = None
    for node in nodes_of(graph):
        if node.op_type == "Loop" and node.domain in ("", "ai.onnx") and not any(node.inputs[1:]):
            if true is None:
                true = ir.val("loop.condition", const_value=ir.tensor(np.array(True)))
                while true.name in graph.initializers:
                    true.name = f"{true.name}_"
                graph.register_initializer(true)
            node.resize_inputs(2)
            node.replace_input_with(1, true)


def _check(proto: onnx.ModelProto, where: str) -> None:
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
    if opset is None:
        raise OdtpackError("no-opset", "the model imports no standard operators", where=where)
    targets.lowest_target(opset)
    check_texts(proto, where)
    try:
        if proto.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
            onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        first = str(error).strip().splitlines()[0]
        raise OdtpackError(
            "invalid-model",
            f"the ONNX checker refuses the model: {first}",
            where=where,
            hint="python -m onnx.checker, or onnx.checker.check_model(), says more",
        ) from None
    if not proto.graph.output:
        raise OdtpackError("no-output", "the model's graph has no output", where=where)
    for sparse in proto.graph.sparse_initializer:
        raise OdtpackError(
            "sparse-initializer",
            f"initializer {sparse.values.name!r} is sparse, which odtpack does not read",
            where=where,
        )
    for tensor in external_data.tensors(proto):
        source.check_bytes(tensor, where)


def check_texts(proto: onnx.ModelProto, where: str) -> None:
    """Check that every name in a model is text.

    Raises:
        OdtpackError: One is not UTF-8 (``invalid-model``).
    """
    for text in _texts(proto):
        if not isinstance(text, str):
            raise OdtpackError(
                "invalid-model",
                f"the model is damaged: it holds a name that is not UTF-8 text, {text!r}",
                where=where,
            )


def _texts(message: Any) -> Iterator[str | bytes]:
    """Every text in a protobuf message; bytes where it is not UTF-8."""
    if isinstance(message, onnx.TensorProto):  # its values may be gigabytes
        yield message.name
        yield from (text for entry in message.external_data for text in (entry.key, entry.value))
        return
    for field, value in message.ListFields():
        values = (
            [value] if isinstance(value, str | bytes) or hasattr(value, "ListFields") else value
        )
        if field.type == field.TYPE_STRING:
            yield from values
        elif field.type == field.TYPE_MESSAGE:
            for inner in values:
                yield from _texts(inner)
