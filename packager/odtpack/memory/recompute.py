"""Chooses what is computed again for the backward pass, and writes it into the training model.

The memory of a step is looked at as bytes over time, and counts where it stands above a target. A
candidate is a tensor of the forward pass that waits there for the backward pass; with it goes
whatever must be computed again to get it from what is kept anyway, or else what is kept for
longer. Its worth is what leaves the part above the target, for each second of computing again.
The target falls until nothing is left to gain, or until it is the limit; what turned out to be
superfluous is then kept after all. The choice of one move after the other by worth is that of
R. Kumar et al., "Efficient Rematerialization for Deep Networks", NeurIPS 2019, and of XLA.

Each node that computes again is a copy whose inputs are other copies, or views of what is kept
(:class:`.schedule.ControlEdge`), so that ONNX Runtime neither merges it with the original nor
executes it before the backward pass has come so far.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import onnx_ir as ir

from odtpack.graph.graphs import Ops, ancestors, dims_of, draws, maker, reads, subgraphs
from odtpack.memory import schedule
from odtpack.memory.schedule import (
    AGAIN,
    OPTIONAL_OUTPUTS,
    ControlEdge,
    SizeNames,
    Step,
    Timeline,
    named_values,
)
from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX

_SMALLEST: Final = 4096  # bytes from which on a buffer is worth a decision
_HELD_INSTEAD: Final = (0.0, 0.3, 1.0)
"""What is needed to compute a tensor again may be kept instead up to this part of its size."""

_STEP_DOWN: Final = 0.93  # the next target, of the peak
_MOST_MOVES: Final = 1500
_PATIENCE: Final = 3  # targets in a row that may fail to lower the peak


@dataclasses.dataclass(frozen=True)
class _Move:
    adds: frozenset[str]
    nbytes: int
    worth: float  # what it gains for each second


def choose(step: Step, *, limit: int | None, seconds: float, nameable: Collection[str]) -> Timeline:
    """Choose what to compute again."""
    # limit: Bytes of activations at the peak to come to; as few as the time allows if None.
    # seconds: Time that computing again may take. nameable: Names of values that a control edge can
    # be put on: those of a known rank.
    # Returns the step with the lowest peak within the time; with a limit, the cheapest that was
    # found within it, if one was.
    found = _Search(step, seconds, nameable, step.seconds).lowest(limit)
    if limit is None or found.peak <= limit:
        return found
    # In another order it may come further: as where tensors come from memory.
    values = step.graph.values
    weights = [
        schedule.node_seconds(each, values, schedule.MEMORY_BANDWIDTH) for each in step.graph.nodes
    ]
    other = _Search(step, seconds, nameable, weights).lowest(limit)
    return min(found, other, key=lambda each: each.peak)


class _Search:
    def __init__(
        self, step: Step, seconds: float, nameable: Collection[str], weights: Sequence[float]
    ) -> None:
        self._step, self._weights = step, weights
        self._seconds, self._nameable = seconds, nameable
        self._families: dict[str, list[str]] = defaultdict(list)
        for index in sorted(step.forward):
            for name in step.graph.nodes[index].outputs:
                if name:
                    self._families[step.root(name)].append(name)
        self._outputs = set(step.graph.outputs)

    def lowest(self, limit: int | None) -> Timeline:
        """The step with the lowest peak that is found; with a limit, the first within it."""
        best = current = self._step.timeline()
        failures = 0
        for _ in range(_MOST_MOVES):
            if limit is not None and best.peak <= limit:
                break
            lowest, last = self._lower(current, max(limit or 0, int(best.peak * _STEP_DOWN)))
            if lowest.peak < best.peak:
                best, failures = lowest, 0
            else:
                failures += 1
            if last.again == current.again or failures > _PATIENCE:
                break
            current = last
        return self._without_superfluous(best, max(limit or 0, best.peak))

    def _lower(self, current: Timeline, target: int) -> tuple[Timeline, Timeline]:
        """Add moves until the peak is at the target, or none helps or fits the time."""
        # Returns the lowest step on the way, and the last: the same where the target is reached.
        lowest = current
        for _ in range(_MOST_MOVES):
            if current.peak <= target:
                break
            moves = sorted(self._moves(current, target), key=lambda m: (-m.worth, sorted(m.adds)))
            again, wanted = set(current.again), current.peak - target
            nodes = {self._step.producer[name] for name in again}
            seconds = self._step.time(again)
            for move in moves:
                # Several at a time: what they do to one another, the next look takes in.
                if not again.isdisjoint(move.adds):
                    continue
                new = {self._step.producer[name] for name in move.adds} - nodes
                more = sum(self._step.seconds[index] for index in sorted(new))
                if seconds + more <= self._seconds:
                    again |= move.adds
                    nodes |= new
                    seconds += more
                    wanted -= move.nbytes
                    if wanted <= 0:
                        break
            if again == current.again:
                break
            current = self._step.timeline(frozenset(again))
            lowest = min(lowest, current, key=lambda each: each.peak)
        return lowest, current

    def _without_superfluous(self, chosen: Timeline, peak: int) -> Timeline:
        """Keep again what the peak does not need to be computed again, the costliest first."""
        groups: dict[str, set[str]] = defaultdict(set)
        for name in chosen.again:
            groups[self._step.root(name)].add(name)
        life = _Lives(self._step, chosen, peak)

        def may_be_kept(root: str) -> bool:
            """Whether it would not lie there at the peak: of most a plan need not say so."""
            early = life.early_end(self._families[root])
            return life.most_until_repeated(early, groups[root]) + self._step.nbytes(root) <= peak

        # Many at a time, and half of them where that is too much.
        stack = [sorted(groups, key=lambda r: (-self._step.time(groups[r]), r))]
        while stack:
            roots = [root for root in stack.pop() if may_be_kept(root)]
            if not roots:
                continue
            trial = self._step.timeline(chosen.again.difference(*(groups[r] for r in roots)))
            if trial.peak <= peak:
                chosen, life = trial, _Lives(self._step, trial, peak)
            elif len(roots) > 1:
                half = len(roots) // 2
                stack += [roots[half:], roots[:half]]
        return chosen

    def _moves(self, current: Timeline, target: int) -> Iterator[_Move]:
        life = _Lives(self._step, current, target)
        seen: set[frozenset[str]] = set()
        for root, family in self._families.items():
            if root not in self._step.producer or self._step.nbytes(root) < _SMALLEST:
                continue
            late = [name for name in family if life.late.get(name) and name not in current.again]
            if not late or not self._outputs.isdisjoint(family):
                continue
            first = min(life.late[name][0] for name in late)
            freed = life.above(life.early_end(family), first - 1) * self._step.nbytes(root)
            if freed <= 0:
                continue
            for ratio in _HELD_INSTEAD:
                move = self._closure(late, root, first, ratio, life, freed)
                if move is not None and move.worth > 0 and move.adds not in seen:
                    seen.add(move.adds)
                    yield move

    def _closure(
        self, wanted: list[str], root: str, first: int, ratio: float, life: _Lives, gain: float
    ) -> _Move | None:
        """What goes with some values of one buffer; None if they cannot be computed again."""
        step, adds, stack = self._step, set[str](), list(wanted)
        again, room = life.again, self._seconds - life.seconds
        nodes: set[int] = set()
        spent = weight = 0.0
        while stack:
            name = stack.pop()
            if name in adds or name in again:
                continue
            index = step.producer[name]
            repeats = step.can_repeat(index) and name not in self._outputs
            if not repeats or (name in wanted and name not in self._nameable):
                return None
            adds.add(name)
            if index not in nodes:
                nodes.add(index)
                spent += step.seconds[index]
                weight += self._weights[index]
            if spent > room:
                return None
            for read in step.graph.nodes[index].inputs:
                if read not in step.producer or read in again:
                    continue
                held = self._held(read, root, first, ratio, life)
                if held is None:
                    stack.append(read)
                else:
                    gain -= held
        return _Move(frozenset(adds), step.nbytes(root), gain / (weight + 1e-5))

    def _held(self, name: str, root: str, first: int, ratio: float, life: _Lives) -> float | None:
        """What it costs to keep a value until a place; None if it is to be computed again."""
        source = self._step.root(name)
        if source == root or name not in self._nameable:
            return None
        if source not in self._step.producer:
            return 0.0  # a view of a parameter or of an input
        end, nbytes = life.end(self._families[source]), self._step.nbytes(source)
        if end >= first or nbytes < _SMALLEST:
            return 0.0
        if nbytes <= ratio * self._step.nbytes(root):
            return float(life.above(end, first) * nbytes)
        return None


class _Lives:
    """When values of the forward pass are read, in a timeline, and what lies above a target."""

    def __init__(self, step: Step, current: Timeline, target: int) -> None:
        self.again, self.seconds = current.again, step.time(current.again)
        self.late: dict[str, list[int]] = defaultdict(list)
        self._early: dict[str, int] = {}
        self._repeated: dict[str, int] = {}
        self._uses = current.uses
        for place, node in enumerate(current.nodes):
            name = next(filter(None, node.outputs), "")
            is_early = place not in current.triggers and step.producer.get(name, -1) in step.forward
            for output in node.outputs:
                if is_early and output:
                    self._early[output] = place
                elif output.endswith(AGAIN):
                    self._repeated[output.removesuffix(AGAIN)] = place
            for name in node.reads:
                if name.endswith(AGAIN):
                    continue
                if is_early:
                    self._early[name] = place
                else:
                    self.late[name].append(place)
        self._above = [0, *itertools.accumulate(int(use > target) for use in self._uses)]

    def early_end(self, family: Collection[str]) -> int:
        """Place of the last node of the forward pass that writes or reads a buffer."""
        return max((self._early.get(name, 0) for name in family), default=0)

    def most_until_repeated(self, after: int, names: Collection[str]) -> int:
        """Most memory in use after a place until the first of some values is computed again."""
        until = min((self._repeated[name] for name in names if name in self._repeated), default=0)
        return max(self._uses[after + 1 : until], default=0)

    def end(self, family: Collection[str]) -> int:
        """Place of the last node that reads it."""
        late = (self.late[name][-1] for name in family if self.late.get(name))
        return max(self.early_end(family), max(late, default=0))

    def above(self, after: int, until: int) -> int:
        """Number of nodes after a place up to another during which memory is above the target."""
        return max(0, self._above[max(after, until) + 1] - self._above[after + 1])


def write(
    op: Ops, graph: ir.Graph, step: Step, chosen: Timeline, sizes: SizeNames
) -> dict[str, str]:
    """Write the nodes, and let the backward pass read what they compute."""
    # op: Writer for the training graph; new nodes go to its end, and so it is no longer sorted.
    # step: It as ONNX Runtime executes it. sizes: Names the sizes of what is computed again.
    # Returns names of the copies of values, by the names that they have in the timeline.
    writer = _Writer(op, graph, step, chosen, sizes)
    late = [node for node in graph if node not in writer.forward]
    groups: dict[int, list[str]] = {}
    for place, trigger in chosen.triggers.items():
        groups.setdefault(trigger, []).extend(filter(None, chosen.nodes[place].outputs))
    for trigger, names in sorted(groups.items()):
        writer.group([name.removesuffix(AGAIN) for name in names], writer.latest(trigger))
    for node in late:
        writer.redirect(node)
    return writer.renamed()


class _Writer:
    def __init__(
        self, op: Ops, graph: ir.Graph, step: Step, chosen: Timeline, sizes: SizeNames
    ) -> None:
        self._op, self._step, self._sizes = op, step, sizes
        self._again, self._nodes = chosen.again, chosen.nodes
        self._values = named_values(graph)
        self._parameters = set(graph.inputs)
        self._constant: set[ir.Value] = set()
        for node in graph:
            if not subgraphs(node) and all(map(self._is_constant, reads(node))):
                self._constant.update(node.outputs)
        self._copies: dict[ir.Value, ir.Value] = {}
        self.forward = ancestors(graph.outputs[:1])  # nodes that the loss needs
        nodes = [*enumerate(self._nodes)]
        self._places = {name: i for i, node in nodes for name in node.outputs if name}
        self._last_read = {name: i for i, node in nodes for name in node.reads}
        self._late = [
            name
            for name in self._places
            if name in self._values
            and step.producer[name] not in step.forward
            and self._is_data(self._values[name])
        ]

    def latest(self, trigger: int) -> ir.Value:
        """What is computed last before a node of the timeline, of what it reads if possible."""
        # Of data: sizes exist long before, and what accumulates gradients is not in a step model.
        late = [name for name in self._late if self._places[name] < trigger]
        read = set(self._nodes[trigger].reads).intersection(late)
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
        edge = self._edge(late)
        for name in names:
            if name in self._values:
                self._copy(self._values[name], edge)

    def _edge(self, late: ir.Value) -> ControlEdge:
        return ControlEdge(self._op, lambda: self._op.Size(late), self._sizes.another())

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
        is_inside = value.name not in self._step.graph.values and not draws(node)
        return value.name in self._again or is_inside

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
                inputs.append(edge.view(value, dims_of(value)))
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

    def redirect(self, node: ir.Node) -> None:
        """Let a node that the loss does not need read the copies that come before it."""
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            again = [each for each in self._sources(value) if each.name in self._again]
            copied = [each for each in again if each in self._copies]
            if not copied or any(self._is_early(node, each) for each in copied):
                continue
            if value not in self._copies:
                self._copy(value, self._edge(self._copies[copied[0]]))
            node.replace_input_with(index, self._copies[value])
        for graph in subgraphs(node):
            for inner in graph:
                self.redirect(inner)

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
            elif node is None or draws(node) or self._is_constant(each):
                continue
            elif node in self.forward:
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
