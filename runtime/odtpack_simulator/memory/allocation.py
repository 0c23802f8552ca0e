"""Which buffers ONNX Runtime allocates for a graph, and from which node to which they live.

A reimplementation of its sequential allocation planner. Going through the nodes
in execution order, an output

1. that is a graph output lies in memory of the caller, or stays to the end of the run;
2. of an operator that only looks at its input otherwise (``Reshape``) is its
   input's buffer;
3. of an operator that may work in place takes its input's buffer, if this node
   is the last to read it and sizes agree;
4. takes the most recently freed buffer of the same shape and element size,
   symbolic sizes compared by name;
5. gets a buffer of its own.

A buffer is allocated when its first tensor is computed, and freed after the last
node that reads any tensor in it: between two tensors that share it by rule 4 it
stays allocated. What is not read is freed only at the end of the run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from odtpack_simulator.memory.kernel_memory import (
    ALIASES,
    BEFORE_OUTPUT,
    FROM_HEAP,
    in_place_input,
    workspaces,
)
from odtpack_simulator.memory.process_memory import MAPPED_FROM, PAGE
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value

LARGE = MAPPED_FROM
"""Allocations from this size on are mapped from the system one by one, and gone when freed."""

_HEADER = 64 + 32  # alignment asked for by ONNX Runtime, and the allocator's own header


def allocated_size(nbytes: int) -> int:
    """Bytes that an allocation of ``nbytes`` takes from the system."""
    if nbytes <= 0:
        return 0
    if nbytes < LARGE:
        return -(-nbytes // 64) * 64 + _HEADER
    return -(-(nbytes + _HEADER) // PAGE) * PAGE


@dataclass(slots=True)
class Buffer:
    """Memory that one or more tensors share, one after the other or as views.

    Attributes:
        name: The tensor it was allocated for.
        nbytes: Bytes that its tensors need.
        first: Index of the node that writes its first tensor.
        last: Index of the last node during which it exists.
        tensors: The tensors in it, by name, with the node that writes each.
    """

    name: str
    nbytes: int
    first: int
    last: int
    tensors: dict[str, int]

    @property
    def size(self) -> int:
        """Bytes taken from the system."""
        return allocated_size(self.nbytes)


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Memory while one node runs: all buffers that exist, and the node's working memory.

    ``small`` is the part of ``live`` that lies in the heap: buffers below :data:`LARGE`.
    ``scratch`` are the buffers of the working memory, in bytes that the kernel asks for, and
    ``outside`` is the part of it that comes from the heap even where there is an arena.
    ``scratch_first`` says that the kernel asks for them before it asks for its output.
    """

    live: int
    working: int
    small: int = 0
    scratch: tuple[int, ...] = ()
    outside: int = 0
    scratch_first: bool = False

    @property
    def total(self) -> int:
        """Both together, in bytes."""
        return self.live + self.working


@dataclass(frozen=True, slots=True)
class Allocation:
    """The buffers of a graph and the memory in use during each node.

    Attributes:
        buffers: In the order of allocation.
        uses: One per node, in execution order.
        unknown: Tensors whose size depends on data, taken to be as large as
            the largest input of the node that writes them.
        results: Names of the buffers that are handed to the caller.
    """

    buffers: tuple[Buffer, ...]
    uses: tuple[NodeUse, ...]
    unknown: tuple[str, ...]
    results: frozenset[str] = frozenset()

    @property
    def peak(self) -> int:
        """Most bytes in use at once."""
        return max((use.total for use in self.uses), default=0)

    @property
    def heap(self) -> int:
        """Most bytes of small buffers at once: the heap keeps them when they are freed."""
        return max((use.small for use in self.uses), default=0)

    def at_peak(self) -> list[int]:
        """Bytes of each buffer at the node that needs most, those of its kernel included."""
        if not self.uses:
            return []
        index = max(range(len(self.uses)), key=lambda i: self.uses[i].total)
        return [*(buffer.nbytes for buffer in self.alive(index)), *self.uses[index].scratch]

    def alive(self, index: int) -> list[Buffer]:
        """Buffers that exist while node ``index`` runs."""
        return [buffer for buffer in self.buffers if buffer.first <= index <= buffer.last]


def allocate(
    graph: RuntimeGraph,
    threads: int = 1,
    *,
    fresh_outputs: Iterable[str] = (),
    conditions: Mapping[str, bool] | None = None,
) -> Allocation:
    """Plan the buffers of a graph whose inputs lie in memory of the caller.

    Args:
        graph: The graph in execution order.
        threads: Intra-operator threads: some kernels' working memory grows with them.
        fresh_outputs: Graph outputs that get memory of their own in every run; the
            others lie in memory of the caller, too.
        conditions: Values of Boolean graph inputs. An ``If`` on one of them takes
            that branch; of any other ``If`` the more demanding branch counts.
    """
    planner = _Planner(graph, threads, {}, conditions or {})
    return planner.run(frozenset(fresh_outputs))


class _Planner:
    def __init__(
        self,
        graph: RuntimeGraph,
        threads: int,
        outer: Mapping[str, Value],
        conditions: Mapping[str, bool],
    ) -> None:
        self._graph = graph
        self._threads = threads
        self._outer = outer
        self._conditions = dict(conditions)
        self._values = {**outer, **graph.values}
        self._outputs = frozenset(graph.outputs)
        self._bound = self._outputs
        self._origin: dict[str, str] = {}  # tensor -> tensor whose buffer it is in
        # What is not read takes a buffer of its own, until the end.
        self._read = {name for node in graph.nodes for name in node.reads}
        self._uses = self._count_uses()
        self._free: dict[object, list[str]] = {}  # by size, most recently freed last
        self._buffers: dict[str, Buffer] = {}
        self._unknown: list[str] = []

    def run(self, fresh_outputs: frozenset[str] = frozenset()) -> Allocation:
        """Plan all nodes."""
        self._bound = self._outputs - fresh_outputs
        for index, node in enumerate(self._graph.nodes):
            if node.op_type in ALIASES and node.inputs[0] in self._conditions:
                self._conditions[node.outputs[0]] = self._conditions[node.inputs[0]]
            for position, name in enumerate(node.outputs):
                if name:
                    self._place(index, node, position, name)
            for name in (*node.inputs, *node.implicit, *node.outputs):
                if name:
                    self._release(name)
        self._find_ends()
        return Allocation(
            tuple(self._buffers.values()),
            tuple(self._measure()),
            tuple(self._unknown),
            self._outputs.intersection(self._buffers),
        )

    def _count_uses(self) -> dict[str, int]:
        uses: dict[str, int] = defaultdict(int)
        for name in (*self._graph.inputs, *self._graph.initializers):
            uses[name] += 1  # the caller's: never free
        for node in self._graph.nodes:
            for name in (*node.inputs, *node.implicit, *node.outputs):
                if name:
                    uses[name] += 1
        for name in self._graph.outputs:
            uses[name] += 1
        for name in uses.keys() & self._outer.keys():
            uses[name] += 1  # the same: of the graph around
        return uses

    def _root(self, name: str) -> str:
        return self._origin.get(name, name)

    def _place(self, index: int, node: Node, position: int, name: str) -> None:
        """Choose the buffer of one output."""
        if name in self._bound:
            return
        source = None
        if name not in self._outputs:
            is_view = node.op_type in ALIASES and node.domain in ("", "ai.onnx")
            if name in self._read or is_view:
                source = self._shared_input(node, position, name) or self._freed(name)
        if source is None:
            self._buffers[name] = Buffer(
                name, self._nbytes(node, name), index, index, {name: index}
            )
            return
        root = self._root(source)
        self._origin[name] = root
        self._uses[root] += self._uses[name]
        if root in self._buffers:
            self._buffers[root].tensors[name] = index

    def _shared_input(self, node: Node, position: int, name: str) -> str | None:
        if position != 0 or not node.inputs:
            return None
        if node.op_type in ALIASES and node.domain in ("", "ai.onnx"):
            return node.inputs[0] or None
        index = in_place_input(node.op_type, node.domain)
        if index is None or index >= len(node.inputs) or not node.inputs[index]:
            return None
        source = node.inputs[index]
        last = self._uses[self._root(source)] == 1
        size = self._size_key(source)
        return source if last and size is not None and size == self._size_key(name) else None

    def _freed(self, name: str) -> str | None:
        if not self._values[name].dims:  # unknown rank, or a scalar
            return None
        freed = self._free.get(self._size_key(name))
        return freed.pop() if freed else None

    def _size_key(self, name: str) -> object:
        """What values have in common whose sizes are known to be equal: by number or by name.

        None if nothing is known to be as large.
        """
        value = self._values[name]
        if value.itemsize == 0 or value.dims is None or None in value.dims:
            return None
        return value.itemsize, value.dims

    def _release(self, name: str) -> None:
        root = self._root(name)
        self._uses[root] -= 1
        if self._uses[root] == 0 and root in self._buffers and name in self._read:
            size = self._size_key(root)
            if size is not None:
                self._free.setdefault(size, []).append(root)

    def _nbytes(self, node: Node, name: str) -> int:
        nbytes = self._values[name].nbytes
        if nbytes is None:
            self._unknown.append(name)
            nbytes = max((self._values[i].nbytes or 0 for i in node.inputs if i), default=0)
        return nbytes

    def _find_ends(self) -> None:
        """Let every buffer live until its last reader; without one, until the end."""
        last: dict[str, int] = {}
        for index, node in enumerate(self._graph.nodes):
            for name in node.reads:
                last[self._root(name)] = index
        end = len(self._graph.nodes) - 1
        for name, buffer in self._buffers.items():
            buffer.last = end if name in self._outputs else last.get(name, end)

    def _measure(self) -> list[NodeUse]:
        """Memory in use during each node."""
        count = len(self._graph.nodes)
        change, small_change = [0] * (count + 1), [0] * (count + 1)
        for buffer in self._buffers.values():
            for changes in (change, small_change) if buffer.nbytes < LARGE else (change,):
                changes[buffer.first] += buffer.size
                changes[buffer.last + 1] -= buffer.size
        lives, smalls = itertools.accumulate(change), itertools.accumulate(small_change)
        uses = []
        for node, live, small in zip(self._graph.nodes, lives, smalls, strict=False):
            if node.subgraphs:  # which count what their allocations add already
                working, outside, scratch = self._subgraphs(node)
            else:
                scratch = self._scratch(node)
                working, outside = sum(map(allocated_size, scratch)), 0
                if node.op_type in FROM_HEAP and node.domain in ("", "ai.onnx"):
                    scratch, outside = (), working
            first = node.op_type in BEFORE_OUTPUT and node.domain in ("", "ai.onnx")
            uses.append(NodeUse(live, working, small, scratch, outside, first))
        return uses

    def _scratch(self, node: Node) -> tuple[int, ...]:
        inputs = [self._values[name] for name in node.inputs if name]
        outputs = [self._values[name] for name in node.outputs if name]
        return workspaces(
            node.op_type,
            node.attributes,
            [(value.shape, value.itemsize) for value in inputs],
            [(value.shape, value.itemsize) for value in outputs],
            self._threads,
            domain=node.domain,
        )

    def _subgraphs(self, node: Node) -> tuple[int, int, tuple[int, ...]]:
        """Memory inside the subgraphs of a node: one branch, or one iteration and its results.

        A branch of ``If`` writes straight into the node's outputs. A loop keeps the state that
        an iteration returns while it computes the next; ``Loop`` also keeps the slices of its
        scan outputs until it joins them, where ``Scan`` writes them straight into its outputs.

        Returns:
            Bytes in all, those of them that no arena gives, and the others, buffer by buffer.
        """
        subgraphs = node.subgraphs
        taken = self._conditions.get(node.inputs[0]) if node.op_type == "If" else None
        if taken is not None:
            branch = "then_branch" if taken else "else_branch"
            subgraphs = {branch: subgraphs[branch]}
        peak = outside = 0
        pieces: tuple[int, ...] = ()
        for graph in subgraphs.values():
            inner = _Planner(graph, self._threads, self._values, self._conditions).run()
            self._unknown += inner.unknown
            around = []
            if node.op_type in ("Loop", "Scan"):
                names = graph.outputs
                if node.op_type == "Scan":  # what it stacks, a turn writes where it belongs
                    names = names[: len(graph.inputs) - node.attributes["num_scan_inputs"]]
                returned = [graph.values[name] for name in names if name in graph.values]
                around += 2 * [value.nbytes or 0 for value in returned]
            if node.op_type == "Loop":
                around += [self._values[name].nbytes or 0 for name in node.outputs if name]
            own = inner.peak + sum(map(allocated_size, around))
            if own > peak:
                peak, pieces = own, (*inner.at_peak(), *around)
            outside = max(outside, *(use.outside for use in inner.uses), 0)
        return peak, outside, pieces
