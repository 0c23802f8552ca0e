"""Reads the user's model and checks everything about it before anything uses it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import onnx
import onnx.checker
import onnx.numpy_helper
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.autodiff import stop_gradient, windows
from odtpack.autodiff.context import Context
from odtpack.contrib import DOMAIN, decompose, needs_blocks
from odtpack.errors import OdtpackError, quoted
from odtpack.graph.fold import MOVED, fold, share_constants, take_squeeze
from odtpack.graph.graphs import (
    TRAINABLE_TYPES,
    Dims,
    InlinePass,
    Names,
    Ops,
    constant,
    defined,
    dims_of,
    is_lifted_constant,
    mark_constant,
    nodes_of,
    operand,
    producer,
    reads,
    redirect,
    replace,
)
from odtpack.graph.inference import contradiction, infer_shapes, is_known
from odtpack.model import exporters, shared_tensors
from odtpack.model.exporters import module_names
from odtpack.model.inputs import fix_sizes
from odtpack.model.source import ModelLike, Source, open_model
from odtpack.passes import opsets

CACHE = "odtpack.cache"
"""Metadata of a loaded model: the inputs that were left out with its key-value cache."""
_NO_NAMES: Final = {"", "?", "-1", "None"}
# ONNX Runtime registers these in the standard domain, which does not have them before an opset.
_MISPLACED = {"LayerNormalization": 17, "SimplifiedLayerNormalization": math.inf}
UNREACHED = "odtpack.unreached"
"""Metadata of a loaded model: weights that no output depends on but the cache's."""
CONVERTED_FROM = "odtpack.converted"
"""Metadata of a loaded model: the opset that its file has, if it was converted."""

SQUEEZED = "odtpack.squeezed"
"""Metadata of a loaded model: values and axes whose size is taken to be 1."""


def load_model(
    model: ModelLike,
    named: Collection[str] = (),
    untie: Sequence[str] = (),
    stop: Sequence[str] = (),
    sizes: Sequence[str] = (),
) -> ir.Model:
    """Return a checked model with local functions inlined and shapes inferred."""
    # Contributed operators are written in standard ones where :mod:`odtpack.contrib` can, and a
    # key-value cache is left out. Large initializers stay where they are, in the file or in memory.
    # model: A path, or a model, which is not changed. named: Initializers that the caller goes by,
    # which are not taken for folded copies of others. untie: Patterns of shared tensors of which
    # each place gets its own copy (see :mod:`odtpack.model.shared_tensors`). stop: Values through
    # which no gradient passes. sizes: Axes that are fixed (see :func:`.inputs.fix_sizes`).
    loaded = load_source(open_model(model), named, untie, stop, sizes)
    refuse_bfloat16(loaded.graph)
    return loaded


def refuse_bfloat16(graph: ir.Graph) -> None:
    """Refuse a type for which ONNX Runtime has no kernels on a processor."""
    values = (*graph.initializers.values(), *graph.inputs)
    for value in (*values, *(y for node in nodes_of(graph) for y in node.outputs)):
        if value.dtype == ir.DataType.BFLOAT16 and (value.uses() or value.is_graph_output()):
            raise OdtpackError(
                "bfloat16-not-supported",
                f"{value.name!r} is of type BFLOAT16, for which ONNX Runtime has no kernels on a "
                "processor",
                hint="export the model in float32",
            )


def _rename_misplaced(proto: onnx.ModelProto) -> None:
    """Move operators that ONNX Runtime writes into the standard domain into its own."""
    moved, standard = False, ("", "ai.onnx")
    opset = max((each.version for each in proto.opset_import if each.domain in standard), default=0)
    for node in proto.graph.node:
        if opset < _MISPLACED.get(node.op_type, 0) and node.domain in standard:
            node.domain, moved = DOMAIN, True
    if moved and all(entry.domain != DOMAIN for entry in proto.opset_import):
        proto.opset_import.add(domain=DOMAIN, version=1)


def _open_axes(graph: onnx.GraphProto) -> None:
    """Read a size of -1 as ONNX Runtime does, and as exporters mean it: any number."""
    # The same for what stands there for want of a name: axes of one name have one size.
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value < 0:
                dim.ClearField("dim_value")
            if dim.HasField("dim_param") and dim.dim_param.strip() in _NO_NAMES:
                dim.ClearField("dim_param")


def load_source(
    given: Source,
    named: Collection[str] = (),
    untie: Sequence[str] = (),
    stop: Sequence[str] = (),
    sizes: Sequence[str] = (),
    *,
    as_stored: bool = False,
) -> ir.Model:
    """:func:`load_model` of a model that is open already."""
    # as_stored: Whether equal parameters that were stored once stay one.
    _rename_misplaced(given.proto)
    _open_axes(given.proto.graph)
    if sizes:
        fix_sizes(given.proto.graph, sizes)
    given.check()
    converted = opsets.convert(given.proto, given.arrays, given.where)
    loaded = given.model()
    if converted is not None:
        loaded.meta[CONVERTED_FROM] = converted
    name_standard_domain(loaded.graph.opset_imports)
    for function in loaded.functions.values():
        name_standard_domain(function.opset_imports)
    # The passes that make initializers of Constant nodes leave a trace of it.
    bodies = (n for f in loaded.functions.values() for n in f.all_nodes())
    for node in (*nodes_of(loaded.graph), *bodies):
        if node.op_type == "Constant" and not node.domain:
            mark_constant(node.outputs[0])
    name_nodes(loaded.graph)
    for transform in (
        InlinePass(),
        common_passes.RemoveInitializersFromInputsPass(),
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0),
    ):
        transform(loaded)
    _lift_parameters(loaded.graph)
    _write_conditions(loaded.graph)
    check_loops(loaded.graph, given.where)
    common_passes.NameFixPass()(loaded)
    _drop_trailing_absent(loaded.graph)
    if not as_stored:
        exporters.restore(loaded.graph)
        _write_log_sigmoids(loaded.graph)
        constants = {n for n, v in loaded.graph.initializers.items() if is_lifted_constant(v)}
        shared_tensors.split(loaded.graph, constants)
    shared_tensors.tie(loaded.graph, named)
    shared_tensors.untie(loaded.graph, untie)
    _open_declared_sizes(loaded.graph)
    _gather_elements(loaded.graph)
    loaded = _infer_open_sizes(_decide_branches(_infer_windows(loaded)))
    if stop:
        stop_gradient.stop_at(loaded.graph, stop)
    inputs = [value for value in loaded.graph.inputs if value.uses()]
    cache = () if as_stored else drop(loaded.graph)
    if needs_blocks(loaded.graph):
        opsets.to_blocks(loaded.graph)
        # Codes of a weight without a name of its own are called what the weight was.
        for name, module in exporters.module_names(loaded.graph).items():
            value = loaded.graph.initializers[name]
            if all(node.op_type == "MatMulNBits" for node, _ in value.uses()):
                value.name = module
    loaded = decompose(loaded)
    if cache:  # inputs go, too, that were read with the cache, and are not without it
        weights = _weights(loaded.graph)
        common_passes.RemoveUnusedNodesPass()(loaded)
        kept = _weights(loaded.graph)
        loaded.meta[UNREACHED] = tuple(name for name in weights if name not in kept)
        unread = {v for v in inputs if not v.uses() and not v.is_graph_output()}
        gone = [v for v in loaded.graph.inputs if v in unread]
        loaded.graph.inputs[:] = [v for v in loaded.graph.inputs if v not in gone]
        loaded.meta[CACHE] = (*cache, *(str(value.name) for value in gone))
    return loaded


def _weights(graph: ir.Graph) -> dict[str, None]:
    """Names of the matrices that linear layers store."""
    places = {("MatMul", 1), ("Gemm", 1), ("DequantizeLinear", 0)}
    return {
        name: None
        for name, value in graph.initializers.items()
        if any((node.op_type, index) in places for node, index in value.uses())
    }


def name_nodes(graph: ir.Graph) -> None:
    """Call a node that has no name what it computes."""
    for node in nodes_of(graph):
        node.name = node.name or next((v.name for v in node.outputs if v.name), None)


def _open_declared_sizes(graph: ir.Graph) -> None:
    """Leave it to inference whether an output has as many of something as an input."""
    # Exporters write down the name that they are given: ``[batch, vocabulary]`` for what a Reshape
    # makes ``[batch * sequence, vocabulary]``. A target of that shape would be refused.
    sizes = _input_sizes(graph)
    for value in graph.outputs:
        dims = dims_of(value)
        if dims is not None and value.producer() is not None and sizes.intersection(dims):
            value.shape = ir.Shape([None if dim in sizes else dim for dim in dims])


def _input_sizes(graph: ir.Graph) -> set[str]:
    return {dim for v in graph.inputs for dim in dims_of(v) or () if isinstance(dim, str)}


def _infer_anew(model: ir.Model) -> ir.Model:
    """Infer types and shapes from inputs and weights; annotations fill in what stays unknown.

    An annotation that contradicts the graph would give a wrong gradient: ONNX Runtime ignores it.
    """
    declared, names = {}, _input_sizes(model.graph)
    for value in [output for node in nodes_of(model.graph) for output in node.outputs]:
        declared[value] = value.type, _meant(dims_of(value), names)
        value.type, value.shape = None, None
    model = _fold_branches(infer_shapes(model))
    guessed = _after_branches(model.graph)
    filled = False
    for value, (type_, dims) in declared.items():
        if value.type is None and type_ is not None:
            value.type, filled = type_, True
        found = dims_of(value)
        if value in guessed or value.type != type_ or dims is None:
            continue
        if len(found or dims) != len(dims):
            continue
        pairs = zip(found or (None,) * len(dims), dims, strict=True)
        merged = [new if is_known(new) else old for new, old in pairs]
        if merged != list(found or ()) or found is None:
            value.shape, filled = ir.Shape(merged), True
    return infer_shapes(model) if filled else model


def _after_branches(graph: ir.Graph) -> set[ir.Value]:
    """What follows a branch that was moved: it may be annotated as if the other one ran."""
    found: set[ir.Value] = set()
    for node in nodes_of(graph):
        found.update(value for value in node.outputs if value.meta.get(MOVED))
        read = [*reads(node)] if found else []
        if not found.isdisjoint(read):
            # Of an operator without inference, as a foreign one, only the annotation is known.
            known = all(dims_of(value) is not None for value in read)
            found.update(v for v in node.outputs if not known or dims_of(v) is not None)
    return found


def _meant(dims: Dims | None, names: Collection[str]) -> Dims | None:
    """Dimensions without the names that inference or an exporter made up."""
    # PyTorch's gives axes of different sizes one name, as in ``[Reluoutput_dim_0, 3,
    # Reluoutput_dim_0]``.
    # names: Those that inputs have.
    if dims is None:
        return None
    single = [dim for dim in dims if dims.count(dim) == 1]
    return tuple(
        dim if isinstance(dim, int) or dim in names or (dim in single and is_known(dim)) else None
        for dim in dims
    )


def _write_log_sigmoids(graph: ir.Graph) -> None:
    """Write log(sigmoid(x)), an exporter's logsigmoid, as -softplus(-x), which is always finite."""
    for log in list(nodes_of(graph)):
        sigmoid = producer(log.inputs[0], "Sigmoid") if log.op_type == "Log" else None
        if sigmoid is None or log.domain:
            continue
        op = Ops(graph, "sigmoid/")
        with op.before(log):
            y = op.Neg(op.Softplus(op.Neg(sigmoid.inputs[0])))
        replace(log.outputs[0], y, [log])


def _gather_elements(graph: ir.Graph) -> None:
    """Let loops gather the elements of split tensors that they read, one in a turn."""
    for node in list(nodes_of(graph)):
        if node.op_type == "SplitToSequence" and not node.attributes.get_int("keepdims", 1):
            given = constant(node.inputs[1], largest=1) if len(node.inputs) > 1 else None
            # Beside lengths the standard ignores keepdims. ONNX Runtime does not beside a constant
            # scalar of 1.
            if given is not None and given.ndim == 0 and given.item() == 1:
                node.resize_inputs(1)
            if node.graph is graph:
                _gather_elements_of(node, graph)


def _gather_elements_of(split: ir.Node, graph: ir.Graph) -> None:
    x = split.inputs[0]
    users = [use.node for use in split.outputs[0].uses()]
    kinds, inner = {user.op_type for user in users}, any(u.graph is not graph for u in users)
    others = kinds - {"SequenceAt", "SequenceLength"} or split.outputs[0].is_graph_output()
    if len(split.inputs) > 1 or not inner or others:
        return
    op, axis = Ops(graph, "sequence/"), split.attributes.get_int("axis", 0)
    for user in users:
        with op.before(user):
            if user.op_type == "SequenceAt":
                result = op.Gather(x, user.inputs[1], axis=axis)
            else:
                result = op.Gather(op.Shape(x), op.constant(np.array(axis, np.int64)))
        replace(user.outputs[0], result, [user])
    graph.remove(split, safe=True)


def _infer_windows(model: ir.Model) -> ir.Model:
    """:func:`_infer_anew`, with the sizes that ONNX Runtime has where the standard has others."""
    model = _infer_anew(model)
    for node in list(nodes_of(model.graph)):
        write = None if node.domain else _AS_RUN.get(node.op_type)
        if write is None:
            continue
        try:
            changed = write(Context(node, Ops(model.graph, "windows/"), [], []))
        except OdtpackError as error:
            error.hint = "change the node in the model"  # freezing does not help: sizes are wrong
            raise
        if changed:
            model = _infer_anew(model)  # the sizes after it were wrong
    return model


def _write_pool(ctx: Context) -> bool:
    """Write a pool with explicit padding, where the standard's inference has another size."""
    # With ceil_mode it counts a window that would begin behind the end, where ONNX Runtime and
    # PyTorch have none. With auto_pad ONNX Runtime pads as without ceil_mode and dilations.
    read = ctx.node.attributes
    known = dims_of(ctx.x()) is not None and not windows.is_open(ctx, ctx.x())
    if not known or 0 in ctx.ints("strides", ()):
        return False
    win = windows.pool_windows(ctx)
    other = max(win.dilations) > 1 and ctx.string("auto_pad", "NOTSET").startswith("SAME")
    if not other and (dims_of(ctx.y()) or ())[2:] == win.out:
        return False
    windows.check_gaps(ctx, win.kernel, win.strides, win.size)
    _, pads = windows.padding(ctx, win.kernel, win.strides, win.size)
    if pads == win.after:
        read.pop("ceil_mode", None)
    else:  # it adds a window inside along an axis; along the others goes what no window reads
        ends = [after - rest for after, rest in zip(win.after, win.unread(), strict=True)]
        pads = tuple(max(0, min(pair)) for pair in zip(pads, ends, strict=True))
        if min(ends) < 0:
            if len(ctx.node.outputs) > 1:
                raise ctx.unsupported("its indices would be those of a smaller plane")
            ends = [n + min(0, end) for n, end in zip(win.size, ends, strict=True)]
            with ctx.op.before(ctx.node):
                cut = ctx.op.slice(ctx.x(), win.spatial, [0] * win.rank, ends)
            ctx.node.replace_input_with(0, cut)
    read.pop("auto_pad", None)
    read["pads"] = ir.AttrInt64s("pads", [*win.before, *pads])
    return True


def _write_dilated(ctx: Context) -> bool:
    """Write auto_pad with dilations as padding: ONNX Runtime refuses it."""
    # With a stride the padding follows from the size, which may be open.
    dilations, mode = ctx.ints("dilations", (1,)), ctx.string("auto_pad", "NOTSET")
    if not mode.startswith("SAME") or max(dilations) == 1 or max(ctx.ints("strides", (1,))) > 1:
        return False
    totals = [(ctx.size(ctx.x(1), axis) - 1) * d for axis, d in enumerate(dilations, 2)]
    _write_same(ctx, totals)
    return True


def _write_same(ctx: Context, totals: Sequence[int]) -> None:
    """Write auto_pad as pads, of which there are so many along each axis."""
    upper, read = ctx.string("auto_pad", "NOTSET") == "SAME_UPPER", ctx.node.attributes
    before = [total // 2 if upper else total - total // 2 for total in totals]
    after = [total - b for total, b in zip(totals, before, strict=True)]
    read.pop("auto_pad")
    read["pads"] = ir.AttrInt64s("pads", [*before, *after])


def _write_transposed(ctx: Context) -> bool:
    """Write output_padding with auto_pad as padding: ONNX Runtime's size does not grow by it."""
    read, w, extra = ctx.node.attributes, ctx.x(1), ctx.ints("output_padding", ())
    mode = ctx.string("auto_pad", "NOTSET")
    if not mode.startswith("SAME") or not any(extra) or "output_shape" in read:
        return False
    kernel = [ctx.size(w, axis) for axis in range(2, ctx.rank(w))]
    strides, _, reach = windows.spacing(ctx, kernel, len(extra))
    totals = [max(0, r + e - s) for r, e, s in zip(reach, extra, strides, strict=True)]
    _write_same(ctx, totals)
    return True


def _write_kept(ctx: Context) -> bool:
    """Leave out a Resize whose axes are negative: with a policy ONNX Runtime keeps their size."""
    axes = ctx.ints("axes", ())
    if ctx.string("keep_aspect_ratio_policy", "stretch") == "stretch" or min(axes, default=0) >= 0:
        return False
    if max(axes) >= 0:
        raise ctx.unsupported(
            "with keep_aspect_ratio_policy ONNX Runtime resizes along positive axes alone (write "
            "all axes as positive numbers)"
        )
    ctx.node.op_type = "Identity"
    ctx.node.attributes.clear()
    ctx.node.resize_inputs(1)
    return True


_AS_RUN: Final[dict[str, Callable[[Context], bool]]] = {
    "AveragePool": _write_pool,
    "Conv": _write_dilated,
    "ConvTranspose": _write_transposed,
    "LpPool": _write_pool,
    "MaxPool": _write_pool,
    "Resize": _write_kept,
}
"""Change a node so that the standard means what ONNX Runtime does; whether it was changed."""


def _infer_open_sizes(model: ir.Model) -> ir.Model:
    """Infer sizes of outputs that follow from what can be computed before the model runs."""
    # With a copy, as the model stays as it is.
    names = _input_sizes(model.graph)

    def is_open(value: ir.Value) -> bool:
        dims = dims_of(value)
        return dims is None or any(not isinstance(dim, int) and dim not in names for dim in dims)

    if not any(map(is_open, model.graph.outputs)):
        return model
    twin, filled = model.clone(), False
    kept = {n for n, value in twin.graph.initializers.items() if value.dtype in TRAINABLE_TYPES}
    while fold(twin.graph, kept):
        twin = _infer_anew(twin)
    for value, other in zip(model.graph.outputs, twin.graph.outputs, strict=True):
        found = dims_of(other)
        if found is None or not is_open(value):
            continue
        pairs = zip(dims_of(value) or (None,) * len(found), found, strict=True)
        dims = tuple(new if is_known(new) else old for old, new in pairs)
        if dims != dims_of(value):
            value.shape, filled = ir.Shape(dims), True
    return infer_shapes(model) if filled else model


def _decide_branches(model: ir.Model) -> ir.Model:
    """Leave out the branches that no shape lets run, and the weights that only they read."""
    model, squeezed = _fold_branches(model), list[tuple[str, int]]()
    while _has_branches(model) and (new := take_squeeze(model.graph)) is not None:
        squeezed.append(new)
        model = _fold_branches(infer_shapes(model))
    if squeezed:
        model.meta[SQUEEZED] = tuple(squeezed)
    return model


def _has_branches(model: ir.Model) -> bool:
    return any(node.op_type == "If" for node in nodes_of(model.graph))


def _fold_branches(model: ir.Model) -> ir.Model:
    """Leave out the branches of which shapes that are known say that they do not run."""
    if not _has_branches(model):
        return model
    kept = {n for n, value in model.graph.initializers.items() if value.dtype in TRAINABLE_TYPES}
    if share_constants(model.graph, kept):
        model = infer_shapes(model)
    while fold(model.graph, kept):
        model = infer_shapes(model)
    return model


def name_standard_domain(imports: dict[str, int]) -> None:
    """The standard operators' domain has two names; here it is ""."""
    if "ai.onnx" in imports:
        imports.setdefault("", imports.pop("ai.onnx"))


def _lift_parameters(graph: ir.Graph) -> None:
    """Move what may be a parameter from subgraphs to the main graph, where it can be trained."""
    # Constants of other types stay: shape inference reads axes and sizes only where they are.
    names = Names(str(value.name) for value in defined(graph))
    for subgraph in list(graph.subgraphs()):
        for name, value in list(subgraph.initializers.items()):
            kept = value.is_graph_input() or value.is_graph_output()
            if kept or value.dtype not in TRAINABLE_TYPES or not value.shape:
                continue
            subgraph.initializers.pop(name)
            value.name = names.fresh(name)
            graph.register_initializer(value)


def _drop_trailing_absent(graph: ir.Graph) -> None:
    """Remove absent inputs at the end of a node: some kernels crash on their empty names."""
    for node in nodes_of(graph):
        present = [i for i, value in enumerate(node.inputs) if value is not None]
        wanted = present[-1] + 1 if present else 0
        if wanted < len(node.inputs):
            node.resize_inputs(wanted)


def _write_conditions(graph: ir.Graph) -> None:
    """Give a Loop that carries nothing its condition, which may be absent but not left out."""
    # Its place is lost as soon as a pass removes absent inputs at the end of nodes.
    true: ir.Value | None = None
    for node in nodes_of(graph):
        if node.op_type == "Loop" and not node.domain and not any(node.inputs[1:]):
            if true is None:
                true = ir.val("loop.condition", const_value=ir.tensor(np.array(True)))
                while true.name in graph.initializers:
                    true.name = f"{true.name}_"
                graph.register_initializer(true)
            node.resize_inputs(2)
            node.replace_input_with(1, true)


# Refuses loops of which the graph itself says that they do not end.
#
# Whether any other loop ends is found out by running it, under a limit of time.

_MOST_TRIPS: Final = 2**24
"""Without another end: at a microsecond a trip, which no operator is quicker than, 17 seconds."""


_WHOLE: Final = {np.dtype(np.bool_), np.dtype(np.int32), np.dtype(np.int64)}


def check_loops(graph: ir.Graph, where: str) -> None:
    """Check that no Loop goes on for ever because its condition is always true."""
    # A trip count that is only a bound, as exporters write 2^63 - 1 for ``while``, is fine where
    # the condition is computed.
    for node in nodes_of(graph):
        if node.op_type != "Loop" or node.domain or len(node.inputs) < 2:
            continue
        trips, condition = node.inputs[0], node.inputs[1]
        if condition is not None and not _constant(condition):
            continue
        body = node.attributes["body"].as_graph()
        # Whether the condition for another trip is true whenever that of its own was.
        goes_on = _origin(body.outputs[0]) if body.outputs else None
        if goes_on is None or not (goes_on in body.inputs[1:2] or _constant(goes_on)):
            continue
        number = None if trips is None else _constant(trips)
        if trips is not None and (number is None or number <= _MOST_TRIPS):
            continue
        name = node.name or f"the one that computes {node.outputs[0].name}"
        raise OdtpackError(
            "endless-loop",
            f"the loop {name!r} does not end: its condition is always true, and "
            + ("it has no trip count" if number is None else f"its trip count is {number:,}"),
            where=where,
        )


def _origin(value: ir.Value) -> ir.Value:
    """What a value is a copy of."""
    for _ in range(1000):
        node = value.producer()
        if node is None or node.op_type not in ("Identity", "Cast") or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def _constant(value: ir.Value) -> int | None:
    """The only element of a constant; None for what is computed, or has more."""
    array = constant(_origin(value), largest=1)
    return int(array.item()) if array is not None and array.dtype in _WHOLE and array.size else None


# Leaves out the key-value cache of a decoder: in training every sequence starts empty.
#
# Exporters give a decoder the keys and values of earlier tokens as inputs, one pair for each block,
# and the longer ones as outputs. Attention reads them, or a Concat puts them before the new ones:
#
#     present = Concat(past, new)     ->  new
#     GroupQueryAttention(q, k, v, past_key, past_value, ...)  ->  without the two
#
# What else reads the past, be it the number of its tokens, reads an empty one.

_PAST = {  # inputs with past keys and values, and outputs with them and the new ones
    (DOMAIN, "GroupQueryAttention"): ((3, 4), (1, 2)),
    (DOMAIN, "MultiHeadAttention"): ((6, 7), (1, 2)),
    ("", "Attention"): ((4, 5), (1, 2)),
}
_TOKENS = 2  # axis of [batch, heads, tokens, size]


def drop(graph: ir.Graph) -> tuple[str, ...]:
    """Leave out the inputs and outputs of a graph that are a cache."""
    # An input is one if a node reads it as past keys or values, or a Concat, whose result is an
    # output, puts it in front along the tokens, whose number is open.
    # Returns names of the inputs that are left out.
    found = [
        value
        for value in graph.inputs
        if len(dims := dims_of(value) or ()) == 4
        and not isinstance(dims[_TOKENS], int)
        and not (value.is_initializer() or value.is_graph_output())
        and any(_present(node, index) is not None for node, index in value.uses())
    ]
    kept = [value for value in graph.inputs if value not in found]
    if not found or not kept:
        return ()
    op = Ops(graph, "cache/")
    for past in found:
        presents = _take_out(past)
        outputs = [value for value in graph.outputs if value not in presents]
        graph.outputs[:] = outputs or [*graph.outputs]
        if past.uses():
            _make_empty(op, graph, past, kept[0])
    graph.inputs[:] = kept
    return tuple(str(value.name) for value in found)


def _present(node: ir.Node, index: int) -> tuple[ir.Value, ...] | None:
    """The values that hold the past and new tokens, if a node reads its input as the past."""
    if node.op_type == "Concat" and not node.domain:
        ahead = index == 0 and len(node.inputs) == 2
        along = node.attributes.get_int("axis", 0) % 4 == _TOKENS
        return (node.outputs[0],) if ahead and along and node.outputs[0].is_graph_output() else None
    inputs, outputs = _PAST.get((node.domain, node.op_type), ((), ()))
    if index not in inputs:
        return None
    return tuple(node.outputs[i] for i in outputs if i < len(node.outputs))


def _take_out(past: ir.Value) -> set[ir.Value]:
    """Let the nodes that read a past go without it; return what held it with the new tokens."""
    presents: set[ir.Value] = set()
    for node, index in [*past.uses()]:
        held = _present(node, index)
        if held is None:
            continue
        presents.update(held)
        if node.op_type == "Concat":
            new = operand(node, 1)
            redirect([*node.outputs[0].uses()], new)
            node.replace_input_with(0, new)
        else:
            node.replace_input_with(index, None)
            # An empty cache that slides holds what the window lets a token see.
            node.attributes.pop("sliding_window_cache", None)
    return presents


def _make_empty(op: Ops, graph: ir.Graph, past: ir.Value, first: ir.Value) -> None:
    """Put keys or values of no tokens in the place of an input: [batch, heads, 0, size]."""
    dims = dims_of(past) or ()
    readers = [*past.uses()]
    shape = [dim if isinstance(dim, int) else 1 for dim in dims]
    shape[_TOKENS] = 0
    dtype = past.dtype or ir.DataType.FLOAT
    with op.before(graph[0]):
        empty = op.constant(np.zeros(shape, dtype.numpy()))
        if not isinstance(dims[0], int):  # as many samples as the first input has
            batch = op.slice(op.Shape(first), [0], [0], [1])
            empty = op.Expand(empty, op.Concat(batch, op.ints(*shape[1:]), axis=0))
    empty.type = past.type
    redirect(readers, empty)


_DOUBTFUL: Final = {
    "unknown-rank", "unknown-shape", "unknown-type", "ambiguous-shape", "models-do-not-run",
    "ort-conversion-failed",
}  # fmt: skip
"""Codes of errors that a model may cause which contradicts itself."""
_SAID: Final = re.compile(
    r"\(op_type:([^,]*), node name: (.*?)\): (?:\[\w+\] )?([^\n]*)", re.DOTALL
)
_QUOTED: Final = re.compile(r"'([^']+)'")
_SOFT_LABELS: Final = (
    "labels are class numbers, as ArgMax gives them; for probabilities leave the loss out of the "
    "model: --loss cross_entropy --loss-option labels=probabilities is PyTorch's"
)


@contextmanager
def named_cause(model: ModelLike) -> Iterator[None]:
    """Let errors name what is in the user's model, and what contradicts itself there."""
    # Only then: what the onnx library refuses may still run.
    try:
        yield
    except OdtpackError as error:
        given = None
        with suppress(OdtpackError):  # it cannot be read: that is the error
            given = open_model(model).model()
            name_nodes(given.graph)
        if given is None:
            raise
        found = _SAID.search(contradiction(given) or "") if error.code in _DOUBTFUL else None
        if found is None:
            _speak_of(given.graph, error)
            raise
        operator, name, said = found.groups()
        raise OdtpackError(
            "invalid-model",
            f"the node {name!r} ({operator}) cannot be computed: {said}",
            where=error.where,
            hint=_SOFT_LABELS
            if operator in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
            else "correct the types and shapes of what it reads, and export the model again",
        ) from error


def _speak_of(graph: ir.Graph, error: OdtpackError) -> None:
    """Put the node of a graph in the place of one that was made of it, and names of modules."""
    nodes = {node.name for node in nodes_of(graph)}
    known = nodes | set(graph.initializers) | {v.name for n in nodes_of(graph) for v in n.outputs}

    def own(found: re.Match[str]) -> str:
        name = found[1]
        parts = [] if name in known else name.split("/")
        starts = ("/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        return f"'{next((start for start in starts if start in nodes), name)}'"

    error.what = _QUOTED.sub(own, error.what)
    error.where = error.where and _QUOTED.sub(own, error.where)
    modules = module_names(graph) if error.hint else {}
    error.hint = error.hint and _QUOTED.sub(
        lambda found: quoted(modules.get(found[1], found[1])), error.hint
    )
