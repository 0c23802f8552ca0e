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

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from odtpack_simulator.memory.kernel_memory import (
    ALIASES,
    BEFORE_OUTPUT,
    FROM_HEAP,
    in_place_input,
    workspaces,
)
from odtpack_simulator.memory.missing_shapes import is_fixed
from odtpack_simulator.memory.process_memory import MAPPED_FROM, PAGE
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value

LARGE = MAPPED_FROM
"""Allocations from this size on are mapped from the system one by one, and gone when freed."""

_SOME_TURNS: Final = 3  # Of a loop where it is not known how many: later turns are alike
_MOST_TURNS: Final = 10_000  # That are played one by one

_LARGE_RESULT: Final = 1 << 16  # Bytes of a result that no app keeps longer than it must

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
    """Memory that one or more tensors share, one after the other or as views."""

    name: str  # The tensor it was allocated for
    nbytes: int  # Bytes that its tensors need
    first: int  # Index of the node that writes its first tensor
    last: int  # Index of the last node during which it exists
    tensors: dict[str, int]  # The tensors in it, by name, with the node that writes each

    @property
    def size(self) -> int:
        """Bytes taken from the system."""
        return allocated_size(self.nbytes)


Request = tuple[Hashable, int]
"""A key and the bytes that are asked for by it: 0 gives them back, and less than 0 comes from the
heap while a kernel runs. The name of a node's output stands for that output."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Memory while one node runs: all buffers that exist, and the node's working memory."""

    # `small` is the part of `live` that lies in the heap: buffers below LARGE. `scratch` are the
    # buffers of the working memory, in bytes that the kernel asks for, and `outside` is the part of
    # it that comes from the heap even where there is an arena. `scratch_first` says that the kernel
    # asks for them before it asks for its output. `inside` is what subgraphs ask for, in its order.
    live: int
    working: int
    small: int = 0
    scratch: tuple[int, ...] = ()
    outside: int = 0
    scratch_first: bool = False
    inside: tuple[Request, ...] = ()

    @property
    def total(self) -> int:
        """Both together, in bytes."""
        return self.live + self.working


@dataclass(frozen=True, eq=False)
class Allocation:
    """The buffers of a graph and the memory in use during each node."""

    buffers: tuple[Buffer, ...]  # In the order of allocation
    uses: tuple[NodeUse, ...]  # One per node, in execution order
    # Tensors whose size depends on data, taken to be as large as the largest input of the node that
    # writes them.
    unknown: tuple[str, ...]
    unbounded: bool = False  # Whether a Loop keeps something of any number of turns, or of any size
    results: frozenset[str] = frozenset()  # Names of the buffers that are handed to the caller

    @property
    def peak(self) -> int:
        """Most bytes in use at once."""
        return max((use.total for use in self.uses), default=0)

    @property
    def heap(self) -> int:
        """Most bytes of small buffers at once: the heap keeps them when they are freed."""
        return max((use.small for use in self.uses), default=0)

    @cached_property
    def requests(self) -> tuple[list[Request], list[Request]]:
        """What a run asks of an arena, in its order; the second keeps small results."""
        found = self.asked({})
        small = {
            (key, 0)
            for key, buffer in enumerate(self.buffers)
            if buffer.name in self.results and buffer.nbytes < _LARGE_RESULT
        }
        return found, [each for each in found if each not in small]

    def asked(self, before: Mapping[int, Sequence[Request]]) -> list[Request]:
        """What a run asks of an arena, in its order, and something else before some nodes."""
        begun: dict[int, dict[str, Request]] = defaultdict(dict)
        ended: dict[int, list[Request]] = defaultdict(list)
        for key, buffer in enumerate(self.buffers):
            if buffer.nbytes > 0:
                begun[buffer.first][buffer.name] = key, buffer.nbytes
                ended[buffer.last].append((key, 0))
        found: list[Request] = []
        for index, use in enumerate(self.uses):
            found += before.get(index, ())
            own = begun[index]
            scratch: list[Request] = [((index, i), n) for i, n in enumerate(use.scratch)]
            if use.inside:
                scratch = [
                    own.pop(key, (-1, 0)) if isinstance(key, str) else ((index, key), nbytes)
                    for key, nbytes in use.inside
                ]
            new = [*own.values()]
            found += scratch + new if use.scratch_first else new + scratch
            if not use.inside:
                found += [(key, 0) for key, _ in scratch]
                if use.outside:
                    found.append((-1, -use.outside))
            found += ended[index]
        return found

    @cached_property
    def in_pattern(self) -> list[Request]:
        """The same in a run of which ONNX Runtime knows the memory pattern, as its options have it.

        One block then holds all buffers but results, each in the gap that fits best.
        """
        placed: dict[Hashable, tuple[int, int]] = {}  # Where each begins and ends that is in use
        size, rest = 0, list[Request]()
        for key, nbytes in self.requests[0]:
            if not isinstance(key, int) or key < 0 or self.buffers[key].name in self.results:
                rest.append((key, nbytes))
            elif nbytes == 0:
                del placed[key]
            else:
                end, gaps = 0, []
                for first, last in sorted(placed.values()):
                    gaps.append((first - end, end))
                    end = max(end, last)
                fitting = [gap for gap in [*gaps, (size - end, end)] if gap[0] >= nbytes]
                start = min(fitting)[1] if fitting else end
                placed[key] = start, start + -(-nbytes // 64) * 64
                size = max(size, placed[key][1])
        return [("pattern", size), *rest, ("pattern", 0)]

    def at_peak(self) -> list[int]:
        """Bytes of each buffer at the node that needs most, those of its kernel included."""
        if not self.uses:
            return []
        index = max(range(len(self.uses)), key=lambda i: self.uses[i].total)
        return [*(buffer.nbytes for buffer in self.alive(index)), *self.uses[index].scratch]

    def alive(self, index: int) -> list[Buffer]:
        """Buffers that exist while node ``index`` runs."""
        return [buffer for buffer in self.buffers if buffer.first <= index <= buffer.last]


Working = tuple[int, int, tuple[int, ...], tuple[Request, ...]]
"""Working memory of a node: in all, the part of it from the heap, the buffers of the others, and
what its subgraphs ask for, in their order."""
Known = dict[int, tuple[Node, Working]]
"""It by the identity of nodes, with the node, so that no other is mistaken for it."""


def allocate(
    graph: RuntimeGraph,
    threads: int = 1,  # Intra-operator threads: some kernels' working memory grows with them
    *,
    fresh_outputs: Iterable[str] = (),
    conditions: Mapping[str, bool] | None = None,
    known: Known | None = None,
    device: bool = False,
) -> Allocation:
    """Plan the buffers of a graph whose inputs lie in memory of the caller."""
    # `fresh_outputs`: Graph outputs that get memory of their own in every run; the others lie in
    # memory of the caller, too.
    # `conditions`: Values of Boolean graph inputs. An `If` on one of them takes that branch; of any
    # other `If` the more demanding branch counts.
    # `known`: What nodes work in, from earlier plans of the same nodes; it is added to.
    # `device`: The kernels are those of a GPU: none works in place, and none asks for more.
    known = {} if known is None else known
    return _Planner(graph, threads, {}, conditions or {}, known, fresh_outputs, device).run()


class _Planner:
    def __init__(
        self,
        graph: RuntimeGraph,
        threads: int,
        outer: Mapping[str, Value],
        conditions: Mapping[str, bool],
        known: Known,
        fresh_outputs: Iterable[str] = (),
        device: bool = False,
    ) -> None:
        self._graph = graph
        self._device = device
        self._known = known
        self._threads = threads
        self._conditions = dict(conditions)
        self._values = {**outer, **graph.values}
        self._outputs = frozenset(graph.outputs)
        self._bound = self._outputs.difference(fresh_outputs)
        self._origin: dict[str, str] = {}  # tensor -> tensor whose buffer it is in
        # What is not read takes a buffer of its own, until the end.
        self._read = {name for node in graph.nodes for name in node.reads}
        # What is the caller's is never free, nor is what is of the graph around.
        self._uses = Counter((*graph.inputs, *graph.initializers, *graph.outputs))
        for node in graph.nodes:
            self._uses.update(node.names)
        self._uses.update(self._uses.keys() & outer.keys())
        self._free: dict[object, list[str]] = {}  # by size, most recently freed last
        self._buffers: dict[str, Buffer] = {}
        self._unknown: list[str] = []
        self._unbounded = False

    def run(self) -> Allocation:
        """Plan all nodes."""
        for index, node in enumerate(self._graph.nodes):
            if node.op_type in ALIASES and node.inputs[0] in self._conditions:
                self._conditions[node.outputs[0]] = self._conditions[node.inputs[0]]
            for position, name in enumerate(node.outputs):
                if name:
                    self._place(index, node, position, name)
            for name in node.names:
                self._release(name)
        # Every buffer lives until its last reader; without one, until the end.
        last = {
            self._root(name): index
            for index, node in enumerate(self._graph.nodes)
            for name in node.reads
        }
        end = len(self._graph.nodes) - 1
        for name, buffer in self._buffers.items():
            buffer.last = end if name in self._outputs else last.get(name, end)
        return Allocation(
            tuple(self._buffers.values()),
            tuple(self._measure()),
            tuple(self._unknown),
            self._unbounded,
            self._outputs.intersection(self._buffers),
        )

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
                source = self._shared_input(node, position, name)
                # Of unknown rank, or a scalar, nothing is used again.
                if source is None and self._values[name].dims:
                    freed = self._free.get(self._size_key(name))
                    source = freed.pop() if freed else None
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
        if not node.inputs:
            return None
        if position == 0 and node.op_type in ALIASES and node.domain in ("", "ai.onnx"):
            return node.inputs[0] or None
        index = None
        if not self._device:
            index = in_place_input(node.op_type, node.domain, position)
        if index is None or index >= len(node.inputs) or not node.inputs[index]:
            return None
        source = node.inputs[index]
        last = self._uses[self._root(source)] == 1
        size = self._size_key(source)
        return source if last and size is not None and size == self._size_key(name) else None

    def _size_key(self, name: str) -> object:
        """What values have in common whose sizes are known to be equal: by number or by name."""
        # None if nothing is known to be as large.
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
            nbytes = max(map(self._estimate, filter(None, node.inputs)), default=0)
        return nbytes

    def _estimate(self, name: str) -> int:
        """Bytes of a value, as its buffer has it where its shape depends on data."""
        nbytes = self._values[name].nbytes
        buffer = self._buffers.get(self._root(name))
        return nbytes if nbytes is not None else buffer.nbytes if buffer else 0

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
            if id(node) not in self._known:
                self._known[id(node)] = node, self._working(node)
            _, (working, outside, scratch, inside) = self._known[id(node)]
            first = node.op_type in BEFORE_OUTPUT and node.domain in ("", "ai.onnx")
            uses.append(NodeUse(live, working, small, scratch, outside, first, inside))
        return uses

    def _working(self, node: Node) -> Working:
        if self._device:
            return 0, 0, (), ()
        if node.subgraphs:  # which count what their allocations add already
            return self._subgraphs(node)
        # No kernel that takes any computes with 4 bits.
        inputs, outputs = (
            [(self._values[n].shape, math.ceil(self._values[n].itemsize)) for n in names if n]
            for names in (node.inputs, node.outputs)
        )
        scratch = workspaces(
            node.op_type, node.attributes, inputs, outputs, self._threads, domain=node.domain
        )
        working = sum(map(allocated_size, scratch))
        if node.op_type in FROM_HEAP and node.domain in ("", "ai.onnx"):
            return working, working, (), ()
        return working, 0, scratch, ()

    def _subgraphs(self, node: Node) -> Working:
        """Memory inside the subgraphs of a node: one branch, or one iteration and its results."""
        # A branch of `If` writes straight into the node's outputs. A loop keeps the state that an
        # iteration returns while it computes the next; `Loop` also keeps the slices of its scan
        # outputs until it joins them, where `Scan` writes them straight into its outputs.
        subgraphs = node.subgraphs
        taken = self._conditions.get(node.inputs[0]) if node.op_type == "If" else None
        if taken is not None:
            branch = "then_branch" if taken else "else_branch"
            subgraphs = {branch: subgraphs[branch]}
        peak = outside = 0
        pieces: tuple[int, ...] = ()
        inside: tuple[Request, ...] = ()
        for graph in subgraphs.values():
            inner = _Planner(graph, self._threads, self._values, self._conditions, {}).run()
            self._unknown += inner.unknown
            self._unbounded |= inner.unbounded
            around, late = [], 0
            if node.op_type == "Loop":
                turns, carried, slices = self._returned(node, graph)
                around = [*carried.values()] * 2 + [*slices.values()] * turns
                # Its results have no memory before the last turn is over, and one set of states.
                own = [self._buffers[name].size for name in node.outputs if name in self._buffers]
                late = min(sum(own), inner.peak + sum(map(allocated_size, carried.values())))
            if node.op_type == "Scan":  # what it stacks, a turn writes where it belongs
                states = graph.outputs[: len(graph.inputs) - node.attributes["num_scan_inputs"]]
                values = [graph.values[name] for name in states if name in graph.values]
                # The results are there from the beginning, but no turn writes them before its
                # peak: until then their pages stand for those of one buffer.
                buffers = max(min(self._turns(node, graph) - 1, 2) - 1, 0)
                around = [value.nbytes or 0 for value in values] * buffers
            needed = inner.peak + sum(map(allocated_size, around)) - late
            if needed > peak:
                peak, pieces = needed, (*inner.at_peak(), *around)
                inside = self._inside(node, graph, inner)
            outside = max(outside, *(use.outside for use in inner.uses), 0)
        return peak, outside, pieces, inside

    def _returned(
        self, node: Node, graph: RuntimeGraph
    ) -> tuple[int, dict[str, int], dict[str, int]]:
        """How often a Loop turns at most, and bytes of what a turn returns: states and slices."""
        states, names = len(node.inputs) - 2, graph.outputs[1:]
        stacks = [self._values.get(name) for name in node.outputs[states:]]
        turns = next((each.shape[0] for each in stacks if each and each.shape), None)
        self._unbounded |= turns is None and len(names) > states
        turns = _SOME_TURNS if turns is None else turns
        found: dict[str, int] = {}
        for name, whole in itertools.zip_longest(names, [*itertools.repeat(None, states), *stacks]):
            value = graph.values.get(name)  # None for what it reads around it, and returns
            nbytes = value.nbytes if value else 0
            if nbytes is None and whole and whole.nbytes is not None:
                nbytes = whole.nbytes // max(turns, 1)
            self._unbounded |= nbytes is None
            found[name] = nbytes or 0
        # Of very many turns, each stands for several.
        each = max(-(-turns // _MOST_TURNS), 1)
        slices = {name: each * found[name] for name in names[states:]}
        return -(-turns // each), {name: found[name] for name in names[:states]}, slices

    def _turns(self, node: Node, graph: RuntimeGraph) -> int:
        """How often a Scan runs its body."""
        states = len(graph.inputs) - node.attributes["num_scan_inputs"]
        shape = self._values[node.inputs[states]].shape
        axis = node.attributes.get("scan_input_axes", (0,))[0]
        return _SOME_TURNS if shape is None else shape[axis]

    def _inside(self, node: Node, graph: RuntimeGraph, inner: Allocation) -> tuple[Request, ...]:
        """What a subgraph asks for, in its order."""
        if node.op_type == "If":
            return tuple(inner.requests[0])
        writers = {name: i for i, each in enumerate(graph.nodes) for name in each.outputs}
        later: dict[int, list[Request]] = defaultdict(list)
        if node.op_type == "Loop":
            return self._turning(node, graph, inner, writers)
        # Scan has two buffers for each state besides that of its result. Results of a size that is
        # not known are asked for by the first turn. From the second on all turns are alike.
        states = len(graph.inputs) - node.attributes["num_scan_inputs"]
        turns = self._turns(node, graph)
        kept = [
            ((name, i), graph.values[name].nbytes or 0)
            for name in graph.outputs[:states]
            for i in range(min(turns - 1, 2))
        ]
        for name, outer in zip(graph.outputs[states:], node.outputs[states:], strict=True):
            if name in writers and not is_fixed(graph.values[name].dims):
                later[writers[name]].append((outer, 1))
        again = inner.requests[0] if turns > 1 else []
        return (*kept, *inner.asked(later), *again, *((key, 0) for key, _ in kept))

    def _turning(
        self, node: Node, graph: RuntimeGraph, inner: Allocation, writers: Mapping[str, int]
    ) -> tuple[Request, ...]:
        """What the body of a Loop asks for in all its turns, and then the Loop for its results."""
        turns, states, slices = self._returned(node, graph)
        before: dict[int, list[Request]] = defaultdict(list)
        for name, nbytes in (states | slices).items():
            if name in writers:
                before[writers[name]].append((name, nbytes))
        whole = inner.asked(before)
        # What a turn works in it takes again in the next: of many turns, the last ask only for
        # what they return.
        short = [request for request in whole if isinstance(request[0], str)]
        full = max(_SOME_TURNS, _MOST_TURNS // max(len(whole), 1))
        found: list[Request] = []
        for turn in range(turns):
            for key, nbytes in whole if turn < full else short:
                found.append(((turn, key) if isinstance(key, str) else key, nbytes))
            found += [((turn - 1, name), 0) for name in states]
        found += [(name, 1) for name in node.outputs if name]
        found += [((turn, name), 0) for turn in range(turns) for name in slices]
        return (*found, *(((turns - 1, name), 0) for name in states))
