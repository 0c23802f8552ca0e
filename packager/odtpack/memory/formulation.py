"""What is computed again, as a mixed-integer linear program: the least time within a limit.

For each buffer of the forward pass that can be computed again there is one decision. What else a
step does with memory follows from these decisions, as :class:`.timeline.Step` has it: a copy is
made in front of the first node of the backward pass that needs it, for itself or for another copy,
and stays until the last one; what is kept stays until the last node that reads it, copies among
them. Nodes in front of which a copy can be made are events. So all other columns are continuous
and come out as 0 or 1:

- C(b, e): the copy of b has been made when event e is over. C(b, e) >= C(w, e) for each w that is
  computed from b, where b is computed again.
- H(b, e): b is kept until event e or longer because a copy is made from it there.
- J(b, e): the copy of b is.

A copy is made at most :data:`REACH` events before the backward pass reads it, which leaves out
choices that would keep it for long. That each buffer is computed again at most once makes this
smaller by far than the program of P. Jain et al., "Checkmate", MLSys 2020.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

from odtpack.memory.buffers import Buffers
from odtpack.memory.mixed_integer import Program
from odtpack.memory.timeline import AGAIN, EDGE_NODES, Timeline
from odtpack_simulator.memory.session_memory import BYTES_PER_NODE

REACH: Final = 10
"""Events by which a copy may be made before the backward pass reads it."""

MILLISECONDS: Final = 1e3
_FORWARD_STRETCH: Final = 8
"""Nodes of the forward pass of which the highest gets a row at a time."""

_MB: Final = 1e-6

Terms = dict[int, float]
Place = tuple[int, int]
"""The place of a node of the step and -1; of a copy, its buffer and the event."""


class Formulation:
    """The program; the rows that hold memory to the limit are those that are asked for.

    Attributes:
        program: Its objective is in milliseconds.
        again: The column of each decision, by the index of its buffer.

    Args:
        buffers: What to decide.
        limit: Bytes of activations at the peak.
    """

    def __init__(self, buffers: Buffers, limit: int) -> None:
        self.buffers, self.limit = buffers, limit
        self.step = buffers.step
        self.program = Program()
        self.extra = self.program.column(upper=1e6)
        self.again = {
            index: self.program.column(is_integer=True)
            for index, buffer in enumerate(buffers.all)
            if buffer.is_open
        }
        self.events = sorted({buffers.all[i].late[0] for i in self.again if buffers.all[i].late})
        self._windows: dict[int, tuple[int, int]] = {}
        self._copied: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], int | None] = {}
        self._copy_held: dict[tuple[int, int], int | None] = {}
        for index in self._readers_first():
            self._windows[index] = self._window(index)
            for event in range(*self._windows[index]):
                self.copied(index, event)
        self._closures()
        self._costs()

    # Places and events

    def limit_all(self, timeline: Timeline, known: set[Place]) -> bool:
        """Limit memory where a timeline is above it; whether any such place was not known yet."""
        new = [place for place in self.peaks(timeline, self.limit) if place not in known]
        known.update(new)
        for place, event in new:
            if event < 0:
                self.limit_at(place)
            else:
                self.limit_at_copy(place, event)
        return bool(new)

    def peaks(self, timeline: Timeline, limit: float) -> list[Place]:
        """Where memory is above a limit: the highest node of each stretch between two events."""
        producer, nodes = self.step.producer, timeline.nodes
        found: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}
        for place, use in enumerate(timeline.uses):
            name = next(filter(None, nodes[place].outputs), "")
            if use <= limit or not name:
                continue
            if place in timeline.triggers:
                trigger = next(filter(None, nodes[timeline.triggers[place]].outputs))
                buffer = self.buffers.index(name.removesuffix(AGAIN))
                if buffer not in self.again:
                    continue  # a copy of the greedy search's, which is none of these decisions
                where = buffer, self.event(producer[trigger])
                stretch = 1, where[1]
            else:
                where = producer[name], -1
                event = self.event(where[0])
                stretch = 0, -where[0] // _FORWARD_STRETCH if event < 0 else event
            if use > found.get(stretch, (0, where))[0]:
                found[stretch] = use, where
        return [where for _, where in found.values()]

    def event(self, place: int) -> int:
        """The last event at a place or before it; -1 before all."""
        return bisect.bisect_right(self.events, place) - 1

    def _readers_first(self) -> Iterator[int]:
        """Every decision, once those that are computed from it were yielded.

        A buffer may be computed from one that begins later: its view, from that one's shape.
        """
        left = dict.fromkeys(sorted(self.again, key=lambda i: -self.buffers.all[i].first))
        while left:
            ready = (index for index in left if left.keys().isdisjoint(self._readers(index)))
            index = next(ready, next(iter(left)))
            del left[index]
            yield index

    def _window(self, index: int) -> tuple[int, int]:
        """The events at which the copy of a buffer may be made: from one to another."""
        late = self.buffers.all[index].late
        readers = [self._windows[w] for w in self._readers(index) if w in self._windows]
        first = min((first for first, _ in readers), default=len(self.events))
        if not late:
            return first, max((last for _, last in readers), default=first)
        last = self.event(late[0])
        return min(last, max(first, last - REACH)), last

    def _readers(self, index: int) -> list[int]:
        return sorted(w for w in self.buffers.all[index].readers if w in self.again)

    # Columns

    def copied(self, index: int, event: int) -> int | None:
        """C(b, e); None where it is 0."""
        if event >= self._windows[index][1]:
            return self.again[index]
        if event < self._windows[index][0]:
            return None
        if (index, event) in self._copied:
            return self._copied[index, event]
        program, again = self.program, self.again[index]
        column = self._copied[index, event] = program.column()
        program.at_most([(column, 1), (again, -1)], 0)
        before = self.copied(index, event - 1)
        if before is not None:
            program.at_most([(before, 1), (column, -1)], 0)
        readers = (w for w in self._readers(index) if w in self._windows)
        made = [c for c in (self.copied(w, event) for w in readers) if c is not None]
        for each in made:
            program.at_most([(each, 1), (again, 1), (column, -1)], 1)
        program.at_most([(column, 1), *((each, -1) for each in made)], 0)
        return column

    def held(self, index: int, event: int) -> int | None:
        """H(b, e); None where nothing can need it."""
        if (index, event) not in self._held:
            self._held[index, event] = self._needed_later(index, event, None)
        return self._held[index, event]

    def copy_held(self, index: int, event: int) -> int | None:
        """J(b, e), for a copy made before e."""
        if (index, event) not in self._copy_held:
            made = self.copied(index, event - 1)
            self._copy_held[index, event] = (
                None if made is None else self._needed_later(index, event, made)
            )
        return self._copy_held[index, event]

    def _needed_later(
        self, index: int, event: int, made: int | None, during: int | None = None
    ) -> int | None:
        """Whether something is computed again from a buffer, or its copy, at an event or later.

        With ``during``, what is computed before that place of the forward pass has been at the
        event.
        """
        if event >= len(self.events):
            return None
        column = None
        for reader in self._readers(index):
            done = during is not None and self.buffers.all[reader].first < during
            before = self.copied(reader, event if done else event - 1)
            if before == self.again[reader]:
                continue
            column = self.program.column() if column is None else column
            terms = [(self.again[reader], 1.0), (column, -1.0)]
            if before is not None:
                terms.append((before, -1.0))
            self._unless(terms, index, made)
        return column

    def _unless(self, terms: list[tuple[int, float]], index: int, made: int | None) -> None:
        """Add what a buffer's or a copy's being needed depends on besides."""
        if made is not None:
            self.program.at_most([*terms, (made, 1.0)], 1)
        elif index in self.again:
            self.program.at_most([*terms, (self.again[index], -1.0)], 0)
        else:
            self.program.at_most(terms, 0)

    # Rows

    def _closures(self) -> None:
        for index, column in self.again.items():
            buffer = self.buffers.all[index]
            for source in sorted(buffer.sources):
                if source not in self.again:
                    continue
                if not self.buffers.all[source].is_held:
                    self.program.at_most([(column, 1), (self.again[source], -1)], 0)
                early = self.copied(index, self._windows[source][0] - 1)
                if early is not None:
                    self.program.at_most([(early, 1), (self.again[source], 1)], 1)
            if not buffer.late:
                readers = ((self.again[w], -1.0) for w in self._readers(index))
                self.program.at_most([(column, 1.0), *readers], 0)

    def _costs(self) -> None:
        """The objective, and what sessions hold for the nodes that are added."""
        step, program = self.step, self.program
        extra: list[tuple[int, float]] = [(self.extra, -1.0)]
        for place, causes in sorted(self._causes().items()):
            column = program.column(step.seconds[place] * MILLISECONDS)
            for cause in causes:
                program.at_most([*((c, 1.0) for c in cause), (column, -1.0)], len(cause) - 1)
            extra.append((column, BYTES_PER_NODE * _MB))
        for event in range(len(self.events)):
            made = [i for i, (_, last) in self._windows.items() if last == event]
            edge = program.column()
            for index in sorted(made):
                before = self.copied(index, event - 1)
                terms = [(self.again[index], 1.0), (edge, -1.0)]
                program.at_most(terms if before is None else [*terms, (before, -1.0)], 0)
            extra.append((edge, EDGE_NODES * BYTES_PER_NODE * _MB))
        program.at_most(extra, 0)

    def _causes(self) -> dict[int, set[tuple[int, ...]]]:
        """For each node the decisions, one or two at once, that make it run again."""
        step, causes = self.step, defaultdict[int, set[tuple[int, ...]]](set)
        nodes = step.graph.nodes
        reading: dict[str, set[int]] = defaultdict(set)
        for reader in self.again:
            for place in self.buffers.all[reader].nodes:
                for name in nodes[place].inputs:
                    reading[name].add(reader)
        late = {
            name
            for place, node in enumerate(nodes)
            if place not in step.forward
            for name in (*node.inputs, *node.implicit)
        }
        for index, again in self.again.items():
            buffer = self.buffers.all[index]
            for place in buffer.roots:
                causes[place].add((again,))
            wanted: dict[str, set[tuple[int, ...]]] = defaultdict(set)
            for name in reversed(buffer.names):
                place = step.producer[name]
                if place in buffer.roots:
                    continue
                if name in late:
                    wanted[name].add((again,))
                for reader in reading[name] - {index}:
                    wanted[name].add((again, self.again[reader]))
                causes[place] |= wanted[name]
                wanted[nodes[place].inputs[0]] |= wanted[name]
        return causes

    def at(self, place: int) -> tuple[Terms, float]:
        """Bytes in use at a node: of columns, and in any case."""
        terms: Terms = defaultdict(float)
        constant = 0.0
        event = self.event(place)
        for index, buffer in enumerate(self.buffers.all):
            if buffer.first > place:
                continue
            last = buffer.late[-1] if buffer.late else -1
            if place <= max(buffer.early, last):
                constant += buffer.nbytes
                if place > buffer.early and index in self.again:
                    terms[self.again[index]] -= buffer.nbytes
            else:
                self._add(terms, self.held(index, event + 1), buffer.nbytes)
            if index in self.again:
                copy = self.copied(index, event)
                if place > last and copy is not None:
                    copy = self.copy_held(index, event + 1)
                self._add(terms, copy, buffer.nbytes)
        return terms, constant

    @staticmethod
    def _add(terms: Terms, column: int | None, nbytes: float) -> None:
        if column is not None:
            terms[column] += nbytes

    def at_copy(self, copy: int, event: int) -> tuple[Terms, float]:
        """Bytes in use while a copy is made at an event: of columns, and in any case."""
        place, first = self.events[event], self.buffers.all[copy].first
        terms: Terms = defaultdict(float)
        constant = float(self.buffers.crossing[place] + self.buffers.working(copy))
        constant += self.buffers.all[copy].nbytes
        for index, buffer in enumerate(self.buffers.all):
            if buffer.first > place:
                continue
            last = buffer.late[-1] if buffer.late else -1
            if place <= max(buffer.early, last):
                constant += buffer.nbytes
                if place > buffer.early and index in self.again:
                    terms[self.again[index]] -= buffer.nbytes
            else:
                self._add(terms, self._needed_later(index, event, None, first), buffer.nbytes)
            if index in self.again and index != copy:
                made = self.copied(index, event - (buffer.first > first))
                if place > last and made is not None:
                    made = self._needed_later(index, event, made, first)
                self._add(terms, made, buffer.nbytes)
        return terms, constant

    def limit_at(self, place: int) -> None:
        """Let memory be within the limit at a node of the step."""
        terms, constant = self.at(place)
        self._row(terms, self.buffers.base[place] + constant)

    def limit_at_copy(self, copy: int, event: int) -> None:
        """The same while a copy is made, if it is made at that event."""
        terms, constant = self.at_copy(copy, event)
        most = constant + sum(max(0.0, factor) for factor in terms.values())
        unless = max(0.0, most + self._most_extra() - self.limit)
        after, before = self.copied(copy, event), self.copied(copy, event - 1)
        self._add(terms, after, unless)
        self._add(terms, before, -unless)
        self._row(terms, constant - unless)

    def _row(self, terms: Terms, constant: float) -> None:
        scaled = [(column, factor * _MB) for column, factor in terms.items()]
        self.program.at_most([*scaled, (self.extra, 1.0)], (self.limit - constant) * _MB)

    def _most_extra(self) -> int:
        nodes = sum(len(self.buffers.all[index].nodes) for index in self.again)
        return (nodes + EDGE_NODES * len(self.events)) * BYTES_PER_NODE

    def forbid(self, chosen: Collection[int]) -> None:
        """Let just these decisions not be the solution."""
        terms = [(c, 1.0 if i in chosen else -1.0) for i, c in self.again.items()]
        self.program.at_most(terms, len(chosen) - 1)
