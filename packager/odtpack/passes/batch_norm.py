"""Batch normalization in training mode, written out.

BatchNormalization with training_mode=1 is reported to give wrong numbers in stock ONNX
Runtime (microsoft/onnxruntime 29790), and does not return what its gradient needs. Before
differentiation :func:`mark` replaces such nodes by an internal operator that names the
batch statistics; the gradient rule uses them. After it :func:`lower` writes plain nodes:

    mean = mean of x over N and space;  variance = mean of (x - mean)^2
    y = (x - mean) scale / sqrt(variance + epsilon) + bias
    running <- momentum running + (1 - momentum) batch statistic

The running variance takes the unbiased batch variance (n / (n - 1)), as PyTorch does; the
ONNX text has the biased one, but no framework trains so.

A network has dozens of such layers, and a node takes some kilobytes of a session and some
microseconds of a step, however short its vectors are. So layers of one size share n and
n / (n - 1), and the statistics of all layers are updated as one vector.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Hashable

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.autodiff.rules.norm import per_channel, sum_per_channel
from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.graphs import (
    Ops,
    dims_of,
    is_training_batch_norm,
    nodes_of,
    of_batch,
    static_dims,
    wider,
)

OP_TYPE = "BatchNormTraining"


@dataclasses.dataclass(frozen=True)
class RunningStatistic:
    """A state parameter, and the value that replaces it after each training step."""

    name: str
    update: ir.Value


def check(graph: ir.Graph) -> None:
    """Refuse what the update of running statistics does not bear."""
    layers = [node for node in graph if is_training_batch_norm(node)]
    for node in nodes_of(graph):
        if is_training_batch_norm(node) and node not in layers:
            raise OdtpackError(
                "batch-norm-in-body",
                f"node {node.name!r} (BatchNormalization) is in training mode inside the body of "
                "an If, Loop or Scan, where its running statistics cannot be kept",
            )
    for node in layers:
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            raise OdtpackError(
                "batch-norm-statistics-used",
                f"node {node.name!r} (BatchNormalization) hands its statistics to other nodes "
                "or to the caller",
            )
        for value in filter(None, node.inputs[3:5]):
            if not of_batch(node, value) and any(
                use.node not in layers or use.idx not in (3, 4) for use in value.uses()
            ):
                raise OdtpackError(
                    "statistic-shared",
                    f"the running statistic {value.name!r} of node {node.name!r} "
                    "(BatchNormalization) is also read by another node",
                )


def to_evaluation(graph: ir.Graph) -> None:
    """Turn every training-mode node into inference mode."""
    for node in graph:
        if is_training_batch_norm(node):
            node.attributes.pop("training_mode", None)
            node.resize_outputs(1)


def mark(graph: ir.Graph) -> None:
    """Replace training-mode nodes by the internal operator."""
    check(graph)
    layers = [node for node in graph if is_training_batch_norm(node)]
    if not layers:
        return
    names = Ops(graph)
    for node in layers:
        x, scale = node.inputs[:2]
        new = ir.node(
            OP_TYPE,
            node.inputs[:5],
            {
                "epsilon": node.attributes.get_float("epsilon", 1e-5),
                "momentum": node.attributes.get_float("momentum", 0.9),
            },
            domain=INTERNAL_DOMAIN,
            num_outputs=6,
            name=node.name,
        )
        y = node.outputs[0]
        for output, part in zip(
            new.outputs, ("", "mean.update", "var.update", "mean", "inv_std", "count"), strict=True
        ):
            output.name = names.fresh_name(f"{y.name}.{part}") if part else y.name
            if scale is not None and x is not None:
                output.type = ir.TensorType(wider(x.dtype or ir.DataType.FLOAT))
                output.shape = scale.shape if part != "count" else ir.Shape([])
        new.outputs[0].type, new.outputs[0].shape = y.type, y.shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], [new], [y], [new.outputs[0]])


def count_per_channel(op: Ops, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Number of elements of each channel of [N, C, ...], a scalar."""
    channels = _channels(x)
    if channels is None:
        raise OdtpackError("unknown-shape", f"the channels of {x.name!r} are unknown")
    return op.Mul(op.cast(op.Size(x), dtype), 1 / channels)


def _channels(x: ir.Value) -> int | None:
    """Size of the second axis; None if that is unknown, or there is no such axis."""
    dims = dims_of(x)
    if dims is None or len(dims) < 2 or not isinstance(dims[1], int):
        return None
    return dims[1]


def lower(op: Ops, graph: ir.Graph) -> list[RunningStatistic]:
    """Write the internal operators as plain nodes; return the updates of the statistics."""
    # A layer that is used twice updates its statistics twice, the second time from the result of
    # the first.
    layers = [n for n in graph if n.op_type == OP_TYPE and n.domain == INTERNAL_DOMAIN]
    uses = Counter(value for node in layers for value in node.inputs[3:5])
    writer = _Writer(op)
    for node in layers:
        with op.before(node):
            writer.write(node)
    return writer.updates(uses)


class _Writer:
    """Writes layers, and remembers what they found."""

    def __init__(self, op: Ops) -> None:
        self._op = op
        self._counts: dict[Hashable, tuple[ir.Value, ir.Value]] = {}
        # Running statistics, what a layer found in its batch, and how much of the first stays.
        self._found: list[tuple[ir.Value, ir.Value, float]] = []

    def write(self, node: ir.Node) -> None:
        """Write a layer before its node, and remove the node."""
        op = self._op
        x, scale, bias, running_mean, running_variance = (v for v in node.inputs if v is not None)
        epsilon = node.attributes.get_float("epsilon")
        momentum = node.attributes.get_float("momentum")
        dims, dtype, channels = dims_of(x), x.dtype, _channels(x)
        if dims is None or dtype is None or channels is None:
            raise OdtpackError(
                "unknown-shape", f"the channels of {x.name!r}, read by {node.name!r}, are unknown"
            )
        rank = len(dims)
        # Statistics of float16 values are computed, and may be kept, in float32.
        wide = wider(dtype)
        count, correction = self._count(x, wide)
        x, scale, bias = (op.cast(value, wide) for value in (x, scale, bias))
        mean = op.Div(sum_per_channel(op, x, rank), count)
        centered = op.Sub(x, per_channel(op, mean, rank))
        variance = op.Div(sum_per_channel(op, op.Mul(centered, centered), rank), count)
        zeros = op.constant(np.zeros(channels, wide.numpy()))
        y = op.BatchNormalization(centered, scale, bias, zeros, variance, epsilon=epsilon)
        inv_std = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
        if not of_batch(node, running_mean):
            self._found.append((running_mean, mean, momentum))
        if not of_batch(node, running_variance):
            self._found.append((running_variance, op.Mul(variance, correction), momentum))
        results = (op.cast(y, dtype), None, None, mean, inv_std, count)
        for old, new in zip(node.outputs, results, strict=True):
            if new is not None:
                graphs.replace(old, new, [])
        if node.graph is not None:
            node.graph.remove(node, safe=True)

    def _count(self, x: ir.Value, wide: ir.DataType) -> tuple[ir.Value, ir.Value]:
        """Elements n of each channel, and n / (n - 1), once for layers of one size."""
        op, dims = self._op, dims_of(x) or ()
        sizes = (dims[0], *dims[2:])
        key = len(self._counts) if None in sizes else (sizes, wide)  # unknown sizes equal no others
        if key not in self._counts:
            count = count_per_channel(op, x, wide)
            # For a single element n / (n - 1) would divide by zero.
            self._counts[key] = count, op.Div(count, op.Max(op.Sub(count, 1.0), 1.0))
        return self._counts[key]

    def updates(self, uses: Counter[ir.Value | None]) -> list[RunningStatistic]:
        """Write the new running statistics at the end of the graph."""
        # uses: How many layers update each statistic.
        op, latest = self._op, dict[ir.Value, ir.Value]()
        together: dict[tuple[float, Hashable], dict[ir.Value, ir.Value]] = defaultdict(dict)
        for running, statistic, momentum in self._found:
            if uses[running] == 1 and static_dims(running) is not None:
                together[momentum, (running.dtype, statistic.dtype)][running] = statistic
            else:
                previous = latest.get(running, running)
                latest[running] = self._moved(previous, statistic, momentum)
        for (momentum, _), found in together.items():
            # One vector of all, and not one after the other.
            old, new = (op.join([*each], 0) for each in (found, found.values()))
            moved = self._moved(old, new, momentum)
            sizes = [math.prod(static_dims(each) or ()) for each in found]
            parts = op.split(moved, 0, sizes) if len(found) > 1 else (moved,)
            latest |= zip(found, parts, strict=True)
        return [RunningStatistic(source.name or "", update) for source, update in latest.items()]

    def _moved(self, running: ir.Value, batch: ir.Value, momentum: float) -> ir.Value:
        op, wide = self._op, self._op.type_of(batch)
        moved = op.Add(op.Mul(op.cast(running, wide), momentum), op.Mul(batch, 1 - momentum))
        return op.cast(moved, running.dtype or wide)
