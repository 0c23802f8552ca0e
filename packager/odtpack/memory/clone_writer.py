"""Writes into a training model what is computed again for the backward pass.

Each node that computes again is a copy whose inputs are other copies, or views of what is kept
(:class:`.schedule.ControlEdge`), so that ONNX Runtime neither merges it with the original nor
executes it before the backward pass has come so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from odtpack.graph.graphs import ancestors, maker, reads, subgraphs
from odtpack.graph.ops import Ops
from odtpack.memory.recompute import Choice
from odtpack.memory.schedule import ControlEdge, SizeNames
from odtpack.memory.timeline import AGAIN, OPTIONAL_OUTPUTS, Step, named_values
from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX
from odtpack_simulator.memory.runtime_graph import Node


def write(op: Ops, graph: ir.Graph, step: Step, choice: Choice, sizes: SizeNames) -> dict[str, str]:
    """Write the nodes, and let the backward pass read what they compute."""
    # op: Writer for the training graph; new nodes go to its end, and so it is no longer sorted.
    # step: It as ONNX Runtime executes it. sizes: Names the sizes of what is computed again.
    # Returns names of the copies of values, by the names that they have in the timeline.
    nodes = choice.timeline.nodes
    writer = _Writer(op, graph, step, choice.again, sizes, nodes)
    groups: dict[int, list[str]] = {}
    for place, trigger in choice.timeline.triggers.items():
        groups.setdefault(trigger, []).extend(name for name in nodes[place].outputs if name)
    for trigger, names in sorted(groups.items()):
        copied = [name.removesuffix(AGAIN) for name in names]
        writer.group(copied, writer.latest(nodes, trigger))
    writer.redirect()
    return writer.renamed()


class _Writer:
    def __init__(
        self,
        op: Ops,
        graph: ir.Graph,
        step: Step,
        again: Collection[str],
        sizes: SizeNames,
        nodes: Sequence[Node],
    ) -> None:
        self._op, self._graph, self._step = op, graph, step
        self._again, self._sizes = again, sizes
        self._values = named_values(graph)
        self._parameters = set(graph.inputs)
        self._constant: set[ir.Value] = set()
        for node in graph:
            if not subgraphs(node) and all(map(self._is_constant, reads(node))):
                self._constant.update(node.outputs)
        self._copies: dict[ir.Value, ir.Value] = {}
        self._before = list(graph)
        self._forward = ancestors(graph.outputs[:1])
        self._places = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
        self._last_read = {name: i for i, node in enumerate(nodes) for name in node.reads}
        self._late = [
            name
            for name in self._places
            if name in self._values
            and step.producer[name] not in step.forward
            and self._is_data(self._values[name])
        ]

    def latest(self, nodes: Sequence[Node], trigger: int) -> ir.Value:
        """What is computed last before a node of the timeline, of what it reads if possible."""
        # Of data: sizes exist long before, and what accumulates gradients is not in a step model.
        late = [name for name in self._late if self._places[name] < trigger]
        read = set(nodes[trigger].reads).intersection(late)
        needed = [name for name in late if self._last_read.get(name, -1) >= trigger]
        found = read or needed or late
        if not found:
            found = [n for n, i in self._places.items() if i < trigger and n in self._values]
        return self._values[max(found, key=lambda name: (self._places[name], name))]

    @staticmethod
    def _is_data(value: ir.Value) -> bool:
        node, dtype = value.producer(), value.dtype
        if node is None or dtype is None or not dtype.is_floating_point():
            return False
        accumulates = any(str(each.name).endswith(BUFFER_SUFFIX) for each in reads(node))
        return not accumulates and not value.is_graph_output()

    def group(self, names: Collection[str], late: ir.Value) -> None:
        """Copy what computes some values, to run once ``late`` exists."""
        edge = ControlEdge(self._op, late, self._sizes.another())
        for name in names:
            if name in self._values:
                self._copy(self._values[name], edge)

    def _copy(self, wanted: ir.Value, edge: ControlEdge) -> None:
        stack = [wanted]
        while stack:
            value = stack[-1]
            node = value.producer()
            if value in self._copies or node is None:
                stack.pop()
                continue
            open_inputs = [
                each for each in reads(node) if self._is_copied(each) and each not in self._copies
            ]
            if open_inputs:
                stack += open_inputs
                continue
            stack.pop()
            self._copy_node(node, edge)

    def _is_copied(self, value: ir.Value) -> bool:
        """Whether a node that runs again reads a copy of this value."""
        node = value.producer()
        if node is None or self._is_constant(value):
            return False
        # What is no value of the runtime's graph is inside of one of its nodes.
        return value.name in self._again or value.name not in self._step.graph.values

    def _is_constant(self, value: ir.Value) -> bool:
        if value.producer() is None:
            return value not in self._parameters
        return value in self._constant

    def _copy_node(self, node: ir.Node, edge: ControlEdge) -> None:
        activations = [v for v in node.inputs if v is not None and v.producer() is not None]
        is_bound = any(self._is_copied(v) or not self._is_constant(v) for v in activations)
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            if value is None:
                inputs.append(None)
            elif self._is_copied(value):
                inputs.append(self._copies[value])
            elif self._is_constant(value) or (value in self._parameters and is_bound):
                inputs.append(value)
            else:
                inputs.append(edge.view(value))
        outputs = self._op.emit(
            node.op_type,
            inputs,
            outputs=self._count(node),
            domain=node.domain,
            name=self._op.fresh_name(f"again/{node.outputs[0].name}"),
        )
        maker(outputs[0]).attributes.update(node.attributes)
        for old, new in zip(node.outputs, outputs, strict=False):
            new.type = old.type
            if not old.name:
                new.name = ""
            else:
                self._copies[old] = new

    def _count(self, node: ir.Node) -> int:
        """How many outputs of a node must be copied."""
        if node.op_type not in OPTIONAL_OUTPUTS or node.domain:
            return len(node.outputs)
        used = [i for i, value in enumerate(node.outputs) if value.name in self._again]
        return 1 + max(used, default=0)

    def redirect(self) -> None:
        """Let the nodes that the loss does not need read the copies that come before them."""
        for node in self._before:
            if node not in self._forward:
                self._redirect(node)

    def _redirect(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            again = [each for each in self._sources(value) if each.name in self._again]
            copied = [each for each in again if each in self._copies]
            if not copied or any(self._is_early(node, each) for each in copied):
                continue
            if value not in self._copies:
                self._copy(
                    value, ControlEdge(self._op, self._copies[copied[0]], self._sizes.another())
                )
            node.replace_input_with(index, self._copies[value])
        for graph in subgraphs(node):
            for inner in graph:
                self._redirect(inner)

    def _sources(self, value: ir.Value) -> list[ir.Value]:
        """The values of the runtime's graph that a value of the forward pass stands for: itself."""
        # Or what it is computed from, where the runtime makes it a part of the node that reads it:
        # a transpose within a product.
        found, stack = [], [value]
        while stack:
            each = stack.pop()
            node = each.producer()
            if each.name in self._step.graph.values:
                found.append(each)
            elif node is not None and node in self._forward and not self._is_constant(each):
                stack += reads(node)
        return found

    def _is_early(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node runs before the value is computed again: what asks for its shape may."""
        # The copy may wait for just that node, and would wait for itself.
        own = [self._places[each.name] for each in node.outputs if each.name in self._places]
        copied = self._places.get(f"{value.name}{AGAIN}")
        return bool(own) and copied is not None and max(own) < copied

    def renamed(self) -> dict[str, str]:
        """Names of the copies, by those that they have in the timeline."""
        return {f"{old.name}{AGAIN}": str(new.name) for old, new in self._copies.items()}
