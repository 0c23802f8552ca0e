"""Updates that are not made where the loss or a gradient is not finite: the old values are kept.

A value is selected, never multiplied by 0, which leaves NaN what it is. Selecting costs no pass
over the parameters: an update is one branch of an If, and the other hands over what there was.
What is left is one pass over each gradient, whose magnitudes are summed: a sum is finite only if
all that is summed is. (That of finite magnitudes is not, if it is more than the type holds.)

1. An update of one parameter lies in the branch, and writes over its parameter as it would without.
2. Where the gradient is a product that exists in parts only, the factors are looked at: each of
   its elements is at most the product of their sums.
3. Small parameters that are joined are looked at together, and updated as ever; what is selected is
   whether the result is cut up for them as it is, or with old values in place of some. Only then
   is it found out of which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import typed
from odtpack.graph.ops import Ops


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
