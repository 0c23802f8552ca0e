"""Inputs that are not samples: constants, states, samples on another axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from odtpack.errors import OdtpackError, UnknownNameError, near_names
from odtpack.graph.graphs import (
    CARRIED,
    TRAINABLE_TYPES,
    Ops,
    ancestors,
    dims_of,
    mark_constant,
    reads,
    redirect,
    static_dims,
    typed,
)
from odtpack.graph.inference import infer_shapes


def settle(model: ir.Model, settings: Sequence[str]) -> ir.Model | None:
    """Write into a model what is said of its inputs, so that whoever feeds it need not know it."""
    # model: Changed in place. A constant input is one no longer; one whose samples lie on another
    # axis takes them on the first. settings: ``NAME=NUMBERS``, ``NAME=zeros``, ``NAME=axis:K`` or
    # ``NAME=carry:OUTPUT`` each.
    # Returns the model as it was; None without settings.
    if not settings:
        return None
    before, graph = model.clone(), model.graph
    op = Ops(graph, "input/")
    for text in settings:
        name, _, wanted = text.rpartition("=")
        known = {value.name or "": value for value in graph.inputs}
        if name not in known:
            raise UnknownNameError(
                "unknown-value", f"--input {text!r} names an input that the model does not have",
                hint=near_names(name, known, f"its inputs are {', '.join(known)}"),
            )  # fmt: skip
        value = known[name]
        kind, _, axis = wanted.partition(":")
        rank = len(dims_of(value) or ())
        if kind == "axis" and axis.isdecimal() and int(axis) < rank:
            _turn(op, value, int(axis))
        elif kind == "carry" and len(known) > 1:
            _carry(graph, value, axis, text)
        elif (array := _numbers(value, wanted)) is not None and len(known) > 1:
            _fix(op, value, array, text)
        else:
            raise OdtpackError(
                "bad-input-setting",
                f"--input {text!r} is not NAME=zeros, NAME=carry:OUTPUT, NAME=axis:K with an axis "
                f"of its {rank}, or NAME=NUMBERS of {value.dtype} for some of several inputs",
            )
    infer_shapes(model)
    return before


def fix_sizes(graph: onnx.GraphProto, settings: Sequence[str]) -> None:
    """Fix axes of inputs, and what has their names, by ``AXIS=N``, or ``INPUT=N,N,...`` for all."""
    inputs = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    named = {dim.dim_param for dims in inputs.values() for dim in dims if dim.dim_param}
    fixed: dict[str, int] = {}
    for text in settings:
        name, _, given = text.rpartition("=")
        sizes = [int(part) for part in given.split(",") if part.isascii() and part.isdecimal()]
        dims = inputs.get(name, ())
        if name in named and len(sizes) == 1:
            dims = [onnx.TensorShapeProto.Dimension(dim_param=name)]
        fits = bool(dims) and len(dims) == len(sizes) == given.count(",") + 1 and min(sizes) > 0
        for dim, size in zip(dims, sizes, strict=False):
            if dim.dim_param:
                fits &= fixed.setdefault(dim.dim_param, size) == size
            elif dim.HasField("dim_value"):
                fits &= dim.dim_value == size
            else:
                dim.dim_value = size
        if not fits:
            shapes = (
                f"{key} [{', '.join(d.dim_param or str(d.dim_value or '?') for d in each)}]"
                for key, each in inputs.items()
            )
            raise OdtpackError(
                "bad-input-setting",
                f"--size {text!r} does not name a dynamic axis or an input with one",
                hint=f"AXIS=N, or INPUT=N,N,...; the inputs are {', '.join(shapes)}",
            )
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in fixed:
                dim.dim_value = fixed[dim.dim_param]


def _numbers(value: ir.Value, text: str) -> np.ndarray | None:
    """What an input always holds: a number, or one for each element."""
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    try:
        found = np.array([0.0] if text == "zeros" else [float(part) for part in text.split(",")])
    except ValueError:
        return None
    same = np.array_equal(found.astype(dtype).astype(np.float64), found) or dtype.kind == "f"
    count = 1 if (dims := static_dims(value)) is None else int(np.prod(dims))
    return found.astype(dtype) if same and found.size in (1, count) else None


def _fix(op: Ops, value: ir.Value, array: np.ndarray, text: str) -> None:
    graph, dims = op.graph, dims_of(value) or ()
    graph.inputs.remove(value)
    if (sizes := static_dims(value)) is not None:
        array = (
            np.full(sizes, array.item(), array.dtype) if array.size == 1 else array.reshape(sizes)
        )
        value.const_value = ir.tensor(array, dtype=value.dtype, name=value.name)
        graph.register_initializer(value)
        mark_constant(value)
        return
    found: dict[str | None, tuple[ir.Value, int]] = {
        dim: (other, axis)
        for other in graph.inputs
        for axis, dim in enumerate(dims_of(other) or ())
        if isinstance(dim, str)
    }
    # A size without a name is the number of samples.
    others = [other for other in graph.inputs if dims_of(other)]
    found |= {None: (others[0], 0)} if others else {}
    readers = [*value.uses()]
    with op.before(graph[0]):
        parts = []
        for dim in dims:
            if isinstance(dim, int):
                parts.append(op.ints(dim))
            elif dim in found:
                other, axis = found[dim]
                parts.append(op.slice(op.Shape(other), [0], [axis], [axis + 1]))
            else:
                raise OdtpackError(
                    "bad-input-setting",
                    f"--input {text!r}: the size {dim or '?'} of {value.name!r} is that of no "
                    "other input",
                    hint="give the axis the name of another input's axis in the export",
                )
        full = op.Expand(op.constant(array.reshape(())), op.Concat(*parts, axis=0))
    redirect(readers, typed(full, value))


def _carry(graph: ir.Graph, value: ir.Value, output: str, text: str) -> None:
    outputs, sizes = {str(v.name): v for v in graph.outputs}, static_dims(value)
    if output not in outputs:
        raise UnknownNameError(
            "unknown-value", f"--input {text!r} names an output that the model does not have",
            hint=near_names(output, outputs, f"its outputs are {', '.join(outputs)}"),
        )  # fmt: skip
    new = outputs[output]
    follows = any(value in reads(node) for node in ancestors([new]))
    if sizes is None or static_dims(new) not in (None, sizes):
        problem, hint = "it needs fixed sizes, those of the output", "fix its axes: --size batch=4"
    elif new.dtype != value.dtype or value.dtype not in TRAINABLE_TYPES:
        problem, hint = "both must be of one floating-point type", "change that in the export"
    elif not follows:
        problem, hint = (
            f"{output!r} does not depend on it",
            "name the output that is its next value",
        )
    else:
        graph.inputs.remove(value)
        zeros = np.zeros(sizes, value.dtype.numpy())
        value.const_value = ir.tensor(zeros, dtype=value.dtype, name=value.name)
        graph.register_initializer(value)
        value.meta[CARRIED] = output
        return
    what = f"--input {text!r}: {value.name!r} cannot be carried over: {problem}"
    raise OdtpackError("bad-input-setting", what, hint=hint)


def _turn(op: Ops, value: ir.Value, axis: int) -> None:
    graph, dims = op.graph, list(dims_of(value) or ())
    # A name, so that the shape tells that it is turned.
    dims[0] = dims[0] or f"{value.name}.0"
    first = ir.Shape([dims[axis], *dims[:axis], *dims[axis + 1 :]])
    given = ir.val(value.name, type=value.type, shape=first)
    graph.inputs[graph.inputs.index(value)] = given
    readers = [*value.uses()]
    with op.before(graph[0]):
        turned = op.transpose(given, *range(1, axis + 1), 0, *range(axis + 1, len(dims)))
    redirect(readers, typed(turned, value))
