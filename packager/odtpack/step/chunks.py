"""Updates of an optimizer in chunks, made only where loss and gradients are finite.

Where the loss or a gradient is not finite, the old values are kept. A value is selected, never
multiplied by 0, which leaves NaN what it is. Selecting costs no pass over the parameters: an update
is one branch of an If, and the other hands over what there was. What is left is one pass over each
gradient, whose magnitudes are summed: a sum is finite only if all that is summed is. (That of
finite magnitudes is not, if it is more than the type holds.)

1. An update of one parameter lies in the branch, and writes over its parameter as it would without.
2. Where the gradient is a product that exists in parts only, the factors are looked at: each of
   its elements is at most the product of their sums.
3. Small parameters that are joined are looked at together, and updated as ever; what is selected is
   whether the result is cut up for them as it is, or with old values in place of some. Only then
   is it found out of which.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import onnx_ir as ir

from odtpack.graph import graphs
from odtpack.graph.graphs import Ops, dims_of, operand, reads, static_dims, typed
from odtpack.passes import aliases
from odtpack.passes.gradient_buffers import BUFFER_SUFFIX, OUTPUT_SUFFIX, product_of
from odtpack.spec import MemorySpec


class Keeper:
    """Writes what decides about updates into a graph."""

    # op: Writer for the main graph. loss: The loss, a scalar. finite: Whether all gradients are, if
    # that decides about all updates, BOOL[1]. branches: Whether an If chooses; on a
    # GPU, which would wait for its condition, each element is selected.

    def __init__(
        self, op: Ops, loss: ir.Value, branches: bool = True, finite: ir.Value | None = None
    ) -> None:
        self._op, self._branches, self._known = op, branches, finite is not None
        dtype = op.type_of(loss)
        if dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            dtype = ir.DataType.FLOAT
        magnitude = op.Abs(op.cast(loss, dtype))
        if finite is not None:
            magnitude = op.Where(finite, magnitude, np.inf)
        self._good_loss = op.Less(magnitude, op.constant(np.array([np.inf], dtype.numpy())))
        self._limits: dict[ir.DataType, ir.Value] = {}
        self._updated: list[tuple[list[str], ir.Value]] = []
        self._totals: dict[ir.Value, ir.Value] = {}  # what a flag was decided by

    def good(self, *factors: ir.Value) -> ir.Value:
        """Whether loss and gradient are finite, BOOL[1]."""
        # factors: The gradient, or two whose product it is.
        op = self._op
        if self._known:
            return self._good_loss
        dtype = op.type_of(factors[0])
        if dtype not in self._limits:  # nothing is below the limit where the loss is not finite
            ends = (op.constant(np.array([end], dtype.numpy())) for end in (np.inf, -1))
            self._limits[dtype] = op.Where(self._good_loss, *ends)
        sums = [op.ReduceL1(value, keepdims=0) for value in factors]
        for value in sums:
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([])
        total = sums[0] if len(sums) == 1 else op.Mul(*sums)
        good = op.Less(total, self._limits[dtype])
        self._totals[good] = total
        return good

    def alone(
        self,
        name: str,
        good: ir.Value,
        vectors: Mapping[str, ir.Value],
        gradient: Sequence[ir.Value],
        write: Callable[[Ops], Mapping[str, ir.Value]],
    ) -> dict[str, ir.Value]:
        """Write an update of one parameter, or of none."""
        # vectors: The parameter and its state, by name. gradient: What the update reads besides, of
        # the main graph, that is not the same for other parameters. write: Writes the update with
        # the writer that it is given; new values by name.
        # Returns the new values, by name.
        self._updated.append(([name], good))
        if not self._branches:
            return {k: self._op.Where(good, v, vectors[k]) for k, v in write(self._op).items()}
        then = ir.Graph([], [], nodes=[], name=self._op.fresh_name("update/made"))
        results = write(self._op.inside(then))
        hoist(self._op, then, {*vectors.values(), *gradient})
        other = ir.Graph([], [], nodes=[], name=self._op.fresh_name("update/kept"))
        inner = self._op.inside(other)
        for key, value in results.items():
            value.shape = vectors[key].shape
            then.outputs.append(value)
            other.outputs.append(typed(inner.Identity(vectors[key]), value))
        return dict(zip(results, self._choose(good, then, other), strict=True))

    def together(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        old: Mapping[str, ir.Value],
        new: Mapping[str, ir.Value],
    ) -> dict[str, Sequence[ir.Value]]:
        """Cut updated vectors of several parameters up, with old values for some of them."""
        # old: Vectors of parameters, state and gradients, by name.
        # Returns new values of each parameter, by name.
        good = self.good(old["gradients"])
        then, other = (
            ir.Graph([], [], nodes=[], name=self._op.fresh_name(f"update/{kind}"))
            for kind in ("made", "kept")
        )
        made, kept = self._op.inside(then), self._op.inside(other)
        updated = made.Expand(good, made.ints(len(names)))
        mask, which = self._mask(kept, old["gradients"], sizes)
        for op, result, flags in ((made, then, updated), (kept, other, which)):
            flags.shape = ir.Shape([len(names)])
            result.outputs.append(flags)
            for key, value in new.items():
                chosen = value if op is made else op.Where(mask, value, old[key])
                pieces = op.split(chosen, 0, sizes)
                for piece, size in zip(pieces, sizes, strict=True):
                    piece.type, piece.shape = value.type, ir.Shape([size])
                result.outputs.extend(pieces)
        flags, *cut = self._choose(good, then, other)
        self._updated.append(([*names], flags))
        count = len(names)
        return {key: cut[i * count : (i + 1) * count] for i, key in enumerate(new)}

    def report(self, names: Sequence[str], output: str) -> ir.Value:
        """Say which parameters kept their values."""
        # names: All of them, in the order of the result. output: Name of the result, BOOL with an
        # element for each.
        op = self._op
        if not self._branches:
            # No kernel joins flags there.
            if self._known:
                updated = op.Expand(op.cast(self._good_loss, op.FLOAT), op.ints(len(names)))
            else:
                own = {each: flag for [each], flag in self._updated}
                totals = [op.reshape(self._totals[own[name]], 1) for name in names]
                limit = self._limits[op.type_of(totals[0])]
                updated = op.cast(op.Less(op.join(totals, 0), limit), op.FLOAT)
            kept = op.Less(updated, 0.5)
        else:
            flags = [value for _, value in self._updated]
            updated = flags[0] if len(flags) == 1 else op.Concat(*flags, axis=0)
            order = [name for own, _ in self._updated for name in own]
            if order != [*names]:
                updated = op.Gather(updated, op.ints(*map(order.index, names)), axis=0)
            kept = op.Not(updated)
        kept.name, kept.type = output, ir.TensorType(ir.DataType.BOOL)
        kept.shape = ir.Shape([len(names)])
        return kept

    def _choose(self, good: ir.Value, then: ir.Graph, other: ir.Graph) -> tuple[ir.Value, ...]:
        results = self._op.emit("If", [good], outputs=len(then.outputs),
            then_branch=ir.AttrGraph("then_branch", then),
            else_branch=ir.AttrGraph("else_branch", other))  # fmt: skip
        return tuple(map(typed, results, then.outputs))

    def _mask(self, op: Ops, gradient: ir.Value, sizes: Sequence[int]) -> tuple[ir.Value, ir.Value]:
        """Whether each element's parameter is updated, and whether each parameter is."""
        ends = np.cumsum(sizes)
        int32 = ir.DataType.INT32
        limit = op.constant(np.array(np.inf, op.type_of(gradient).numpy()))
        finite = op.Cast(op.Less(op.Abs(gradient), limit), to=int(int32))
        # How many are finite up to the end of each parameter, and so in each.
        sums = op.Gather(op.CumSum(finite, op.constant(np.array(0))), op.ints(*(ends - 1)), axis=0)
        before = op.Concat(
            op.constant(np.zeros(1, np.int32)), op.slice(sums, [0], [0], [len(sizes) - 1]), axis=0
        )
        whole = op.Equal(op.Sub(sums, before), op.constant(np.array(sizes, np.int32)))
        updated = op.And(whole, self._good_loss)
        # The parameter of each element: a step at each start, summed. Not computed from constants
        # alone: ONNX Runtime would do that when it loads the model, and keep the result.
        starts = op.ints(*(ends - np.array(sizes))[1:])
        steps = op.ScatterElements(
            op.Sub(finite, finite), starts, op.constant(np.ones(len(sizes) - 1, np.int32)), axis=0
        ) if len(sizes) > 1 else op.Sub(finite, finite)  # fmt: skip
        owner = op.CumSum(steps, op.constant(np.array(0)))
        return op.Gather(updated, owner, axis=0), updated


def hoist(op: Ops, graph: ir.Graph, own: set[ir.Value]) -> None:
    """Move nodes of a subgraph, and its constants, to the end of the graph around it."""
    # graph: The subgraph, not yet of a node; changed in place. own: What the nodes that stay are
    # computed from, directly or not, as well as those that compute its outputs.
    outputs = set(graph.outputs)
    for name, value in list(graph.initializers.items()):
        graph.initializers.pop(name)
        op.graph.register_initializer(value)
    own = set(own)
    for node in list(graph):
        if any(value in own for value in node.inputs) or any(v in outputs for v in node.outputs):
            own.update(node.outputs)
            continue
        graph.remove(node)
        op.graph.append(node)


# Writes k x + y, with a scalar k, in one node: ``Gemm([[k]], x, y)``, one pass over memory.
#
# Add and Mul, or Sub and Mul, are two, and ONNX Runtime's kernels for them are not as wide as those
# for products. A Gemm may be written over its third factor, not over the second.

Values: TypeAlias = "Mapping[str, ir.Value]"

Write: TypeAlias = "Callable[[Ops, Values], dict[str, ir.Value]]"
"""Writes an update: new values, by name, of some of the values that it gets by name."""


FAST_TYPE: Final = ir.DataType.FLOAT
"""The type whose products have a kernel for a row that is faster than two passes."""


def write_axpy(
    op: Ops, kept: Mapping[str, ir.Value], gradient: ir.Value, update: Write
) -> dict[str, ir.Value]:
    """Write an update, with sums like these in one node."""
    # kept: The parameter and its state, by name, which results may be written over; [1, N] if they
    # are of :data:`FAST_TYPE`. gradient: The gradient, of the same shape. update: Writes it;
    # ``gradients`` is among what it gets.
    # Returns the new values, by name.
    last = next(reversed(op.graph), None)
    results = update(op, {**kept, "gradients": gradient})
    if op.type_of(gradient) != FAST_TYPE:
        return results
    nodes = list(itertools.takewhile(lambda node: node is not last, reversed(op.graph)))
    # Rows, each [1, N], those of them that may be written over, and what takes a result's place.
    reused = {*kept.values()}
    found, instead = {*reused, gradient}, {value: value for value in results.values()}
    for node in reversed(nodes):
        if found.isdisjoint(node.inputs):
            continue
        found.update(node.outputs)
        if node.op_type in ("Add", "Sub") and found.issuperset(node.inputs):
            total = _fuse_sum(op, node, found, reused, instead)
            if total is not None:
                found.add(total)
                if node.outputs[0] in instead:
                    instead[node.outputs[0]] = total
    return {name: instead[value] for name, value in results.items()}


def _fuse_sum(
    op: Ops,
    node: ir.Node,
    rows: Collection[ir.Value],
    kept: Collection[ir.Value],
    results: Collection[ir.Value],
) -> ir.Value | None:
    """Write y + k x or y - k x as one node, if ``node`` is one of them."""
    for place in (1, 0) if node.op_type == "Add" else (1,):
        product = graphs.producer(node.inputs[place], "Mul")
        if product is None or not graphs.private([product], node):
            continue
        if product.outputs[0] in results:
            continue
        scalars = [value for value in product.inputs if value not in rows]
        factors = [value for value in product.inputs if value in rows and value not in kept]
        if len(scalars) != 1 or len(factors) != 1 or scalars[0] is None:
            continue
        known, negative = graphs.constant(scalars[0]), node.op_type == "Sub"
        with op.before(node):
            if known is not None:
                size = op.constant((np.negative(known) if negative else known).reshape(1, 1))
            else:
                size = op.reshape(op.Neg(scalars[0]) if negative else scalars[0], 1, 1)
            total: ir.Value = op.Gemm(size, factors[0], node.inputs[1 - place])
        graphs.replace(node.outputs[0], total, [node, product])
        return total
    return None


# Updates of large parameters, a part of the rows after the other, in one Scan.
#
# The temporaries of an update are as large as what it updates. A Scan cuts its inputs into views
# and has its body write into views of its outputs, so that an update that is bound in place takes
# the temporaries of one part, and its vectors stay in the processor's caches. Where one product
# of factors that are smaller computes the gradient, the body computes its rows, and the gradient
# never exists as a whole.

LARGE: Final = 1 << 18  # elements from which on a parameter is updated in parts
PART: Final = 1 << 17  # most elements of a part, see ``CHUNK_ELEMENTS``: half a MiB of each vector
LEAST_PART: Final = 1 << 14  # fewest elements of a part: running a body costs some ten microseconds


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a tensor is cut: ``parts`` times ``rows`` rows of ``width`` elements."""

    parts: int
    rows: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tensor whose first axis counts the parts."""
        return self.parts, self.rows, self.width

    @property
    def flat(self) -> Cut:
        """The same parts, each a single row."""
        return Cut(self.parts, 1, self.rows * self.width)


def cut(dims: Sequence[int]) -> Cut | None:
    """How to cut a tensor; None if it is small, or its rows cannot be divided evenly."""
    size = math.prod(dims)
    if size < LARGE or len(dims) < 2:
        return None
    width = size // dims[0]
    fitting = [n for n in range(1, dims[0] + 1) if dims[0] % n == 0 and n * width <= PART]
    rows = max(fitting, default=0)
    if rows * width < LEAST_PART:
        return None
    return Cut(dims[0] // rows, rows, width)


def product_in_parts(gradient: ir.Value, size: int, memory: MemorySpec) -> ir.Node | None:
    """The product that computes a gradient, if its factors take less memory; else None."""
    # size: Elements of the gradient. memory: For which sizes the model is made.
    # The factors of many tokens are larger than what comes of them: they would wait for the
    # update, which waits for who reads the parameter.
    node = product_of(gradient)
    if node is None or any(_elements(value, memory) > size for value in node.inputs[:2]):
        return None
    return node


def _elements(value: ir.Value | None, memory: MemorySpec) -> int:
    """How many elements a value has, by that of which it is a view; 0 if that is not known."""
    while (node := graphs.producer(value, "Reshape")) is not None:
        value = node.inputs[0]
    dims = None if value is None else dims_of(value)
    usual = (memory.batch if axis == 0 else memory.other for axis in itertools.count())
    return math.prod(
        dim if isinstance(dim, int) else memory.sizes.get(str(dim), size)
        for dim, size in zip(dims or [0], usual, strict=False)
    )


def write_chunks(
    op: Ops,
    parts: Cut,
    vectors: Mapping[str, ir.Value],
    gradient: ir.Value | ir.Node,
    update: Write,
) -> dict[str, ir.Value]:
    """Write an update in parts."""
    # vectors: The parameter and its state, by name, of the shape of ``parts`` or, each part a row,
    # of that of ``parts.flat``. gradient: Its gradient, or the product that computes it, which
    # nothing but the update reads. update: Writes the update of one part; ``gradients`` is among
    # what it gets.
    # Returns the new values, by name, of the shape of ``vectors``.
    shape = static_dims(vectors["params"]) or ()
    dtype = op.type_of(vectors["params"])
    body = ir.Graph([], [], nodes=[], name=op.fresh_name("update/part"))
    inner = op.inside(body)
    kept = {name: _input(op, body, name, dtype, shape[1:]) for name in vectors}
    if isinstance(gradient, ir.Value):
        flat = op.reshape(gradient, *shape)
        rows = _input(op, body, "gradients", dtype, shape[1:])
    else:
        flat, rows = _rows_of_product(op, inner, gradient, parts)
        if shape != parts.shape:
            rows = inner.reshape(rows, *shape[1:])
    results = write_axpy(inner, kept, rows, update)
    for value in results.values():
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape[1:])
        body.outputs.append(value)
    hoist(op, body, set(body.inputs))  # what is the same for every part: scalars of the formula
    scanned = [*vectors.values(), flat]
    outputs = op.emit("Scan", scanned, outputs=len(results),
        body=ir.AttrGraph("body", body), num_scan_inputs=len(scanned))  # fmt: skip
    for value in outputs:
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
    return dict(zip(results, outputs, strict=True))


def _input(
    op: Ops, body: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int | str]
) -> ir.Value:
    value = ir.val(op.fresh_name(f"update/{name}"), dtype=dtype, shape=shape)
    body.inputs.append(value)
    return value


def _rows_of_product(op: Ops, inner: Ops, node: ir.Node, parts: Cut) -> tuple[ir.Value, ir.Value]:
    """What to cut, and the rows of the gradient that a product computes in the body."""
    left, right = operand(node, 0), node.inputs[1]
    dtype = op.type_of(node.outputs[0])
    left.type = ir.TensorType(dtype)
    depth = op.fresh_name("depth")  # known when the model runs
    attributes = dict(node.attributes)
    if node.attributes.get_int("transA", 0):
        # Scan cuts first axes only, and turning the whole factor would take its memory once more.
        columns = op.reshape(left, -1, parts.parts, parts.rows)
        flat = op.constant(np.arange(parts.parts))
        index = _input(op, inner.graph, "part", ir.DataType.INT64, ())
        own = inner.Gather(columns, index, axis=1)
        own.type, own.shape = ir.TensorType(dtype), ir.Shape((depth, parts.rows))
    else:
        flat = op.reshape(left, parts.parts, parts.rows, -1)
        own = _input(op, inner.graph, "factor", dtype, (parts.rows, depth))
    product = ir.node("Gemm", [own, right], attributes, name=op.fresh_name("update/product"))
    rows = product.outputs[0]
    rows.name, rows.type = product.name, ir.TensorType(dtype)
    rows.shape = ir.Shape(parts.shape[1:])
    inner.graph.append(product)
    assert node.graph is not None  # noqa: S101 - it was found there
    node.graph.remove(node, safe=True)
    return flat, rows


# Who still reads a parameter when its gradient is complete.
#
# The gradient of a layer's input is a product with its weight, which the weight's own gradient does
# not wait for; a weight that is used twice, a value that is computed again, may be read later
# still. An update that is written over the parameter has to wait for all of them.


class Readers:
    """The nodes of a graph by what they read, and what each needs."""

    # graph: A training graph without updates; nodes that are added later are not known. parameters:
    # Those of its inputs that are parameters, trained or not.

    def __init__(self, graph: ir.Graph, parameters: Iterable[ir.Value]) -> None:
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        self._needs: dict[ir.Node, int] = {}  # a bit for a node and for each that it needs
        self._bits = {node: 1 << place for place, node in enumerate(graph)}
        for node in graph:
            for value in set(reads(node)):
                self._readers.setdefault(value, []).append(node)
            stack = [node]
            while stack:
                before = [v.producer() for v in aliases.awaited(stack[-1])]
                known = [each for each in before if each in self._bits]
                if missing := [each for each in known if each not in self._needs]:
                    stack += missing
                    continue
                each = stack.pop()
                needs = (self._needs[source] for source in known)
                self._needs[each] = functools.reduce(operator.or_, needs, self._bits[each])
        self._forms = {*parameters, *graph.initializers.values()}
        for node in graph:
            is_view = node.op_type in aliases.VIEWS and node.inputs[0] in self._forms
            if is_view or all(value in self._forms for value in reads(node)):
                self._forms.update(node.outputs)

    def of(self, parameter: ir.Value) -> set[ir.Node]:
        """All nodes that read a parameter, or what is made of it and of other parameters only."""
        # A form of a parameter, as its transpose, may lie in its memory, and ONNX Runtime may let
        # what reads the form read the parameter in its place.
        found: set[ir.Node] = set()
        stack = [parameter]
        while stack:
            for node in self._readers.get(stack.pop(), ()):
                if node in found:
                    continue
                found.add(node)
                stack += (value for value in node.outputs if value in self._forms)
        return found

    def late(self, wanted: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Node]:
        """Those of the wanted nodes that some values are not computed from."""
        producers = (value.producer() for value in values)
        early = functools.reduce(operator.or_, (self._needs[n] for n in producers if n), 0)
        return {node for node in wanted if not self._bits[node] & early}


def after(op: Ops, nodes: Iterable[ir.Node], value: ir.Value, dims: tuple[int, ...]) -> ir.Value:
    """A view of a parameter, of the shape ``dims``, that exists once some nodes have run."""
    found = [next(value for value in node.outputs if value.name) for node in nodes]
    shape = op.ints(*dims)
    if found:
        sizes = [op.Size(late) for late in sorted(found, key=lambda each: str(each.name))]
        zeros = op.Mul(functools.reduce(op.Add, sizes), op.constant(np.zeros(len(dims), np.int64)))
        # A zero stands for the size that the axis has.
        shape = zeros if dims == static_dims(value) else op.Add(zeros, shape)
    view: ir.Value = op.Reshape(value, shape)
    view.type, view.shape = value.type, ir.Shape(dims)
    return view


# A training model whose gradients start afresh in every run: without what accumulates them.


def fresh_gradients(op: Ops, graph: ir.Graph, reset: ir.Value) -> dict[str, ir.Value]:
    """Take accumulation out of a training graph."""
    # graph: The graph; changed in place. Gradient buffers and accumulated gradients are no longer
    # among its inputs and outputs. reset: The input ``lazy_reset_grad``, which nothing is left to
    # choose by.
    # Returns the gradient of each trainable parameter, by its name, in the order of the outputs.
    flags = _views(reset)
    for node in list(graph):
        if node.op_type == "If" and node.inputs[0] in flags:
            _inline(op, node)
    gradients: dict[str, ir.Value] = {}
    for index, value in reversed(list(enumerate(graph.outputs))):
        name = str(value.name)
        if name.endswith(OUTPUT_SUFFIX):
            del graph.outputs[index]
            gradients[name.removesuffix(OUTPUT_SUFFIX)] = _gradient(value, flags)
    for index, value in reversed(list(enumerate(graph.inputs))):
        if str(value.name).endswith(BUFFER_SUFFIX):
            for node in {node for node, _ in value.uses()}:
                _remove_unread(node)
            del graph.inputs[index]
    return dict(reversed(gradients.items()))


def _views(reset: ir.Value) -> set[ir.Value]:
    """The flag, and the scalars that are made of it."""
    found = [reset]
    for value in found:
        found += [n.outputs[0] for n in value.consumers() if n.op_type in ("Squeeze", "Reshape")]
    return {*found}


def _inline(op: Ops, node: ir.Node) -> None:
    """Put the nodes of the branch for fresh gradients in the place of an If of the main graph."""
    branch = node.attributes["then_branch"].as_graph()
    result = branch.outputs[0]
    branch.outputs.clear()
    for name, value in list(branch.initializers.items()):
        branch.initializers.pop(name)
        value.name = op.fresh_name(f"update/{name}")
        op.graph.register_initializer(value)
    nodes = list(branch)
    branch.remove(nodes)
    for each in nodes:
        for value in each.outputs:
            if value.name:
                value.name = op.fresh_name(f"update/{value.name}")
        each.name = each.outputs[0].name
    op.graph.insert_before(node, nodes)
    graphs.replace(node.outputs[0], result, [node])
    other = node.attributes["else_branch"].as_graph()
    other.outputs.clear()
    for each in reversed(list(other)):
        other.remove(each, safe=True)  # what it read from around it is no longer read


def _gradient(accumulated: ir.Value, flags: set[ir.Value]) -> ir.Value:
    """What Add(Where(reset, 0, buffer), gradient) adds; a value that nothing adds to, itself."""
    add = graphs.producer(accumulated, "Add")
    kept = None if add is None else graphs.producer(add.inputs[0], "Where")
    if add is None or kept is None or kept.inputs[0] not in flags:
        return accumulated
    return operand(add, 1)


def _remove_unread(node: ir.Node) -> None:
    """Remove a node that nothing needs, and the nodes that read it, which nothing needs either."""
    for value in node.outputs:
        for reader in {reader for reader, _ in value.uses()}:
            _remove_unread(reader)
    if node.graph is not None:
        node.graph.remove(node, safe=True)
