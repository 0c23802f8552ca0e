"""The buffers of a forward pass, each of which is kept for the backward pass or computed again.

A buffer and its views are one decision: a view that is kept would keep all of it. Outputs of one
node go together as well, unless the operator can leave them out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection
from functools import cached_property
from typing import Final

from odtpack.memory.timeline import AGAIN, OPTIONAL_OUTPUTS, Step, Timeline
from odtpack_simulator.memory.allocation import allocated_size
from odtpack_simulator.memory.kernel_memory import in_place_input

SMALLEST: Final = 4096
"""Bytes from which on a buffer is worth a decision."""


@dataclasses.dataclass
class Buffer:
    """What one node or several that go together compute, with its views.

    Attributes:
        names: Values in it, in the order of execution.
        nbytes: What it takes.
        roots: Places of the nodes that compute it; the others of ``nodes`` are views of it.
        nodes: Places of all nodes that write it.
        first: Place of the first of them.
        early: Place of the last node of the forward pass during which it must exist.
        late: Places of nodes of the backward pass that read it, in order.
        sources: Indices of the buffers that it is computed from.
        readers: Indices of the buffers that are computed from it.
        is_open: Whether it can be computed again.
        is_held: Whether it can be kept for what is computed again from it.
    """

    names: tuple[str, ...]
    nbytes: int
    roots: tuple[int, ...]
    nodes: tuple[int, ...]
    first: int
    early: int
    late: tuple[int, ...] = ()
    sources: set[int] = dataclasses.field(default_factory=set)
    readers: set[int] = dataclasses.field(default_factory=set)
    is_open: bool = True
    is_held: bool = True


class Buffers:
    """The buffers of a step's forward pass.

    Args:
        step: The step.
        nameable: Names of values that a control edge can be put on: those of a known rank.
    """

    def __init__(self, step: Step, nameable: Collection[str]) -> None:
        self.step = step
        self.all: list[Buffer] = []
        self._index: dict[str, int] = {}
        self._nameable = nameable
        self._gather()
        self._connect()
        self._close()

    @cached_property
    def kept(self) -> Timeline:
        """The step with all kept."""
        return self.step.timeline()

    @cached_property
    def base(self) -> list[int]:
        """Bytes in use at each place of the step besides these buffers, if all are kept.

        With what the planner leaves allocated between two values that share memory.
        """
        change = [0] * (len(self.kept.nodes) + 1)
        for buffer in self.all:
            last = max(buffer.early, buffer.late[-1] if buffer.late else -1)
            change[buffer.first] += buffer.nbytes
            change[last + 1] -= buffer.nbytes
        own = itertools.accumulate(change)
        return [use - each for use, each in zip(self.kept.uses, own, strict=False)]

    @cached_property
    def crossing(self) -> list[int]:
        """The same right before each place: without what is made there."""
        found = list(self.base)
        for place, use in enumerate(self.kept.allocation.uses):
            found[place] -= use.working
        for buffer in self.kept.allocation.buffers:
            if buffer.name not in self._index:
                found[buffer.first] -= buffer.size
        return found

    def index(self, name: str) -> int:
        """The buffer of a value of the forward pass."""
        return self._index[name]

    def working(self, index: int) -> int:
        """Bytes that the kernels which compute a buffer hold besides, at most."""
        uses = self.kept.allocation.uses
        return max(uses[place].working for place in self.all[index].roots)

    def names(self, chosen: Collection[int]) -> frozenset[str]:
        """Values of some buffers."""
        return frozenset(name for index in chosen for name in self.all[index].names)

    def made(self, timeline: Timeline) -> frozenset[str]:
        """The values that a timeline computes again, what it does not need left out."""
        read = {name for node in timeline.nodes for name in node.reads if name.endswith(AGAIN)}
        return frozenset(name.removesuffix(AGAIN) for name in read)

    def chosen(self, again: Collection[str]) -> frozenset[int]:
        """The buffers of some values, of those that can be computed again."""
        found = (self._index[name] for name in again if name in self._index)
        return frozenset(index for index in found if self.all[index].is_open)

    def _gather(self) -> None:
        step = self.step
        families: dict[str, list[str]] = defaultdict(list)
        key_of: dict[str, str] = {}
        for place in sorted(step.forward):
            node = step.graph.nodes[place]
            tied = "" if node.op_type in OPTIONAL_OUTPUTS else next(filter(None, node.outputs), "")
            for name in filter(None, node.outputs):
                root = step.root(name)
                if root not in step.producer:
                    continue
                key = key_of[root] if root != name else tied or name
                key_of[name] = key
                families[key].append(name)
        for names in families.values():
            roots = [name for name in names if step.root(name) == name]
            nodes = sorted({step.producer[name] for name in names})
            index = len(self.all)
            self._index.update(dict.fromkeys(names, index))
            self.all.append(
                Buffer(
                    tuple(names),
                    sum(allocated_size(step.nbytes(name)) for name in roots),
                    tuple(sorted({step.producer[name] for name in roots})),
                    tuple(nodes),
                    nodes[0],
                    nodes[0],
                )
            )

    def _connect(self) -> None:
        step, late = self.step, defaultdict[int, set[int]](set)
        for place, node in enumerate(step.graph.nodes):
            own = {self._index[name] for name in node.outputs if name in self._index}
            for name in node.reads:
                source = self._index.get(name, self._index.get(step.root(name)))
                if source is None:
                    continue
                buffer = self.all[source]
                if place not in step.forward:
                    late[source].add(place)  # views that the backward pass has of it included
                    continue
                buffer.early = max(buffer.early, place)
                for index in own - {source}:
                    buffer.readers.add(index)
                    self.all[index].sources.add(source)
        for source, places in late.items():
            self.all[source].late = tuple(sorted(places))
        for buffer in self.all:
            node = step.graph.nodes[buffer.early]
            position = in_place_input(node.op_type, node.domain)
            if (
                position is not None
                and position < len(node.inputs)
                and buffer.early not in buffer.nodes
                and step.root(node.inputs[position]) in buffer.names
            ):
                buffer.early -= 1  # its reader overwrites it unless it is kept

    def _close(self) -> None:
        """Find what can be computed again: what all it needs can be kept or computed for."""
        step, outputs = self.step, set(self.step.graph.outputs)
        for buffer in self.all:
            read_early = any(
                step.root(name) in buffer.names
                for index in buffer.readers
                for place in self.all[index].nodes
                for name in step.graph.nodes[place].reads
            )
            wanted = self._wanted(buffer)
            buffer.is_held = all(name in self._nameable for name in buffer.names)
            buffer.is_open = (
                all(step.can_repeat(place) for place in buffer.nodes)
                and outputs.isdisjoint(buffer.names)
                and (buffer.nbytes >= SMALLEST or not buffer.is_held)
                and all(name in self._nameable for name in wanted)
                and read_early
            )
        changed = True
        while changed:
            changed = False
            for buffer in self.all:
                sources = (self.all[index] for index in buffer.sources)
                if buffer.is_open and any(not s.is_open and not s.is_held for s in sources):
                    buffer.is_open, changed = False, True

    def _wanted(self, buffer: Buffer) -> set[str]:
        """Values of a buffer that the backward pass reads."""
        nodes = self.step.graph.nodes
        return {name for place in buffer.late for name in nodes[place].reads} & set(buffer.names)
