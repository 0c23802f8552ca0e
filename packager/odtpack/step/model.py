"""Writes the step model: a training model that updates each parameter with its gradient.

Inputs are those of the training model but for gradient buffers and ``lazy_reset_grad``, then for
each trainable parameter p and each vector s that the optimizer keeps ``p.s``, then
``update.learning_rate`` and ``update.step``. An output ``X.update.out`` is the new value of the
input X and may lie in its memory: whoever else reads X is an ancestor of the node that writes it
(:mod:`odtpack.passes.aliases`), by control edges where it is not by itself.

- A matrix of :data:`.chunks.LARGE` elements or more is updated in parts.
- An update is not made where the loss or its gradient is not finite (:mod:`.chunks`); the output
  ``update.kept`` says of which parameters.
- What has :data:`OWN` elements or more is updated as soon as its gradient is complete.
- The others of a group, in the order of their gradients, are joined to vectors of up to
  :data:`JOINED` elements, each of which is updated when it is complete: a node takes more memory in
  a session than their gradients. ONNX Runtime would compute these gradients only then, and keep
  until then what they are computed from. It starts from nodes that nothing reads: so each has such
  a node, its Size, which is an output ``update.order.N`` that no caller asks for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack import targets
from odtpack.graph.fold import merge_equal
from odtpack.graph.graphs import Ops, static_dims, used_names
from odtpack.memory.schedule import arrange
from odtpack.optimizers.common.base import Group, Optimizer
from odtpack.optimizers.common.model import Clip, clipped
from odtpack.passes import aliases, precision
from odtpack.passes.compact import compact
from odtpack.spec import MemorySpec
from odtpack.step import chunks
from odtpack.step.chunks import Keeper, Readers, after, fresh_gradients
from odtpack_runtime.session.graph_signature import (
    KEPT_NAME,
    ORDER_PREFIX,
    RATE_NAME,
    RESET_NAME,
    STEP_NAME,
    UPDATE_SUFFIX,
)
from odtpack_simulator.memory.execution_order import execution_order

OWN: Final = 1 << 16
"""Elements from which on a parameter's gradient is worth the nodes of an update of its own."""

JOINED: Final = 1 << 16
"""Most elements of small parameters that are updated together. What is joined, and what the formula
computes between, are some eight vectors of so many elements."""

_PREFIX: Final = "update/"


def can_update(optimizer: Optimizer, clip: Clip) -> bool:
    """Whether each gradient is all that the update of its parameter needs."""
    return clip.norm is None and all(vector.axes is None for vector in optimizer.state)


def step_model(
    training: ir.Model,
    parameters: Collection[str],
    optimizer: Optimizer,
    *,
    clip: Clip,
    groups: Sequence[Group] = (),
    branches: bool = True,
    memory: MemorySpec | None = None,
) -> ir.Model | None:
    """Write the step model of a training model."""
    # training: The training model as it is written, in topological order. parameters: Names of
    # those of its inputs that are parameters, trained or not. optimizer: Formula and
    # hyperparameters, for which :func:`can_update` holds. clip: How gradients are clipped, not by
    # their norm. groups: Parameter groups; their decays take the place of the optimizer's.
    # branches: Whether an If may choose; without, each parameter is updated by itself. memory: For
    # which sizes memory is made small.
    # Returns the model; None where the model has values of the names that it needs.
    model = training.clone()
    graph = model.graph
    if used_names(graph) & {RATE_NAME, STEP_NAME, KEPT_NAME}:
        return None
    # When each value of the training model is computed.
    proto = ir.to_proto(training).graph
    outputs = (proto.node[index].output for index in execution_order(proto))
    places = {n: float(place) for place, names in enumerate(outputs) for n in names if n}
    # Updates wait for the loss, which the training model computes at the very end. Here it comes as
    # early as it can, with what only it needs: else all that gradients are computed from is kept.
    early = [node for node in [graph.outputs[0].producer()] if node is not None]
    for node in early:
        for value in node.outputs:
            places.pop(str(value.name), None)
        early += (n for n in node.predecessors() if {*n.successors()} <= {*early})
    op = Ops(graph, _PREFIX)
    reset = next(value for value in graph.inputs if value.name == RESET_NAME)
    writer = _Writer(op, optimizer, clip, groups, branches, memory or MemorySpec())
    gradients = fresh_gradients(op, graph, reset)
    writer.write(gradients, [value for value in graph.inputs if value.name in parameters], places)
    common_passes.RemoveUnusedNodesPass()(model)
    writer.take_place_of(reset)
    common_passes.DeduplicateInitializersPass()(model)
    # Scalars of the formula that several updates compute alike.
    merge_equal(graph, (node for node in graph if str(node.name).startswith(_PREFIX)))
    arrange(graph, places)
    inputs = {str(value.name): value for value in graph.inputs}
    for value in graph.outputs:
        name = str(value.name)
        if name.endswith(UPDATE_SUFFIX):
            aliases.verify(graph, inputs[name.removesuffix(UPDATE_SUFFIX)], value)
    graph.name = "step"
    targets.stamp(model)
    return compact(model, keep_names=False)


def join(op: Ops, values: Sequence[ir.Value]) -> ir.Value:
    """Values of known shapes, one after the other, as a vector."""
    flat = [
        value if len(static_dims(value) or ()) == 1 else op.reshape(value, -1) for value in values
    ]
    if len(flat) == 1:
        return flat[0]
    vector: ir.Value = op.Concat(*flat, axis=0)
    size = sum(math.prod(static_dims(value) or ()) for value in values)
    vector.type, vector.shape = values[0].type, ir.Shape([size])
    return vector


class _Writer:
    """Writes updates to the end of a graph."""

    def __init__(
        self,
        op: Ops,
        optimizer: Optimizer,
        clip: Clip,
        groups: Sequence[Group],
        branches: bool,
        memory: MemorySpec,
    ) -> None:
        self._branches, self._memory = branches, memory
        self._op, self._optimizer, self._clip = op, optimizer, clip
        self._groups = groups or (Group(1.0, optimizer.weight_decay, ()),)
        self._rate = ir.val(RATE_NAME, dtype=ir.DataType.FLOAT, shape=[len(self._groups)])
        self._step = ir.val(STEP_NAME, dtype=ir.DataType.INT64, shape=[1])
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._orders: list[ir.Value] = []
        self._group = {name: i for i, g in enumerate(self._groups) for name in g.parameters}
        self._rates: dict[tuple[int, ir.DataType], ir.Value] = {}
        finite = precision.all_finite(op, op.graph)
        self._keeper = Keeper(op, op.graph.outputs[0], branches, finite)

    def take_place_of(self, reset: ir.Value) -> None:
        """Let what reads ``lazy_reset_grad`` read that gradients start afresh."""
        graph = self._op.graph
        if reset.uses():
            with self._op.before(graph[0]):
                fresh = self._op.Greater(self._step, 0)
            fresh.shape = reset.shape
            reset.replace_all_uses_with(fresh)
        graph.inputs.remove(reset)

    def write(
        self,
        gradients: Mapping[str, ir.Value],
        inputs: Sequence[ir.Value],
        places: Mapping[str, float],
    ) -> None:
        """Write the updates of all parameters, and name inputs and outputs."""
        # gradients: The gradient of each trainable parameter. places: When each value of the
        # training model is computed, by name.
        graph = self._op.graph
        readers = Readers(graph, inputs)
        parameters = {str(value.name): value for value in inputs}
        sizes = {name: math.prod(static_dims(parameters[name]) or ()) for name in gradients}
        large = {name for name, size in sizes.items() if size >= OWN}
        groups = {name: self._group.get(name, 0) for name in gradients}
        counts = Counter(groups[name] for name in gradients if name not in large)
        large |= {n for n in gradients if counts[groups[n]] == 1 or not self._branches}
        joined: dict[int, list[list[str]]] = defaultdict(lambda: [[]])
        for name in sorted(gradients, key=lambda each: places[str(gradients[each].name)]):
            parameter, gradient = parameters[name], gradients[name]
            gradient.type, gradient.shape = parameter.type, parameter.shape
            if name in large:
                late = readers.late(readers.of(parameter), [gradient])
                self._alone(name, parameter, gradient, late)
            else:
                vectors = joined[groups[name]]
                if sum(sizes[each] for each in (*vectors[-1], name)) > JOINED:
                    vectors.append([])
                vectors[-1].append(name)
                # What is used at the end is computed as soon as it can be.
                value = self._op.Size(gradient)
                value.name, value.shape = f"{ORDER_PREFIX}{len(self._orders)}", ir.Shape([])
                self._orders.append(value)
        for index, names in ((index, each) for index, all_ in joined.items() for each in all_):
            values = [gradients[name] for name in names]
            found = {node for name in names for node in readers.of(parameters[name])}
            late = readers.late(found, values)
            self._together(index, [parameters[name] for name in names], values, late)
        graph.inputs.extend([*self._inputs, self._rate, self._step])
        trained = [name for name in parameters if name in gradients]
        kept = self._keeper.report(trained, KEPT_NAME)
        graph.outputs.extend([*self._outputs, kept, *self._orders])

    def _alone(
        self, name: str, parameter: ir.Value, gradient: ir.Value, late: set[ir.Node]
    ) -> None:
        """Update one parameter."""
        op, dims = self._op, static_dims(parameter) or ()
        parts = chunks.cut(dims) if self._branches else None
        # Not of [O, C, 1, 1]: with a scalar ONNX Runtime computes that one element at a time.
        shape: tuple[int, ...] = (math.prod(dims),) if parts is None else parts.shape
        if op.type_of(parameter) == chunks.FAST_TYPE and self._branches:
            shape = (1, *shape) if parts is None else parts.flat.shape
        vectors = {
            "params": parameter
            if shape == dims and not late
            else after(op, late, parameter, shape),
            **{s.name: self._state(name, s.name, parameter, shape) for s in self._optimizer.state},
        }
        update = self._formula(self._group.get(name, 0))
        source: ir.Value | ir.Node = gradient
        if parts is not None:
            product = chunks.product_in_parts(gradient, math.prod(dims), self._memory)
            source = gradient if product is None else product
        read = [gradient]
        if isinstance(source, ir.Node):
            read = [value for value in source.inputs if value is not None]

        def write(inner: Ops) -> dict[str, ir.Value]:
            if parts is not None:
                return chunks.write_chunks(inner, parts, vectors, source, update)
            flat = gradient if shape == dims else inner.reshape(gradient, *shape)
            flat.type, flat.shape = parameter.type, ir.Shape(shape)
            if not self._branches:
                return update(inner, {**vectors, "gradients": flat})
            return chunks.write_axpy(inner, vectors, flat, update)

        good = self._keeper.good(*read)
        results = self._keeper.alone(name, good, vectors, read, write)
        for key, value in results.items():
            self._output(value, name, key, shape)

    def _together(
        self,
        index: int,
        parameters: Sequence[ir.Value],
        gradients: Sequence[ir.Value],
        late: set[ir.Node],
    ) -> None:
        """Update small parameters of a group as one vector."""
        op = self._op
        sizes = [math.prod(static_dims(parameter) or ()) for parameter in parameters]
        params = join(op, parameters)
        vectors = {
            "params": after(op, late, params, (sum(sizes),)) if late else params,
            "gradients": join(op, gradients),
        }
        for state in self._optimizer.state:
            vectors[state.name] = join(
                op,
                [
                    self._state(str(p.name), state.name, p, (size,))
                    for p, size in zip(parameters, sizes, strict=True)
                ],
            )
        results = self._formula(index)(op, vectors)
        names = [str(parameter.name) for parameter in parameters]
        pieces = self._keeper.together(names, sizes, vectors, results)
        for key, values in pieces.items():
            for name, parameter, piece in zip(names, parameters, values, strict=True):
                piece.type = parameter.type
                self._output(piece, name, key, (sizes[names.index(name)],))

    def _formula(self, index: int) -> chunks.Write:
        group = self._groups[index]
        decays = {each.weight_decay for each in self._groups}

        def write(op: Ops, values: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
            dtype = op.type_of(values["params"])
            given = {**values, "learning_rate": self._rate_of(index, dtype), "step": self._step}
            given["gradients"] = clipped(op, given, self._clip)
            decay: ir.Value | float = group.weight_decay
            if len(decays) > 1:  # as the optimizer model, which takes it as an input
                decay = op.constant(dtype.numpy().type(decay).reshape(1))
            results = self._optimizer.write(op, given, decay)
            return {k: results[k] for k in ("params", *(s.name for s in self._optimizer.state))}

        return write

    def _rate_of(self, index: int, dtype: ir.DataType) -> ir.Value:
        """The learning rate of a group, of the parameters' type, [1]."""
        if (index, dtype) not in self._rates:
            op, rate = self._op, self._rate
            if len(self._groups) > 1:
                rate = op.slice(rate, [0], [index], [index + 1])
                rate.shape = ir.Shape([1])
            self._rates[index, dtype] = op.cast(rate, dtype)
        return self._rates[index, dtype]

    def _state(self, name: str, key: str, parameter: ir.Value, shape: Sequence[int]) -> ir.Value:
        value = ir.val(f"{name}.{key}", type=parameter.type, shape=shape)
        self._inputs.append(value)
        return value

    def _output(self, value: ir.Value, name: str, key: str, shape: Sequence[int]) -> None:
        value.name = f"{name}{UPDATE_SUFFIX}" if key == "params" else f"{name}.{key}{UPDATE_SUFFIX}"
        value.shape = ir.Shape(shape)
        self._outputs.append(value)
