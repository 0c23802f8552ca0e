"""Phases of an app's life in their order, each with what is in use at its worst moment."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from odtpack_runtime.session.graph_signature import GRADIENT_SUFFIX
from odtpack_simulator.memory.allocation import Allocation, allocate
from odtpack_simulator.memory.arena_use import Arenas
from odtpack_simulator.memory.memory_phases import Item
from odtpack_simulator.memory.node_names import Labels
from odtpack_simulator.memory.planning.items import GRADIENT
from odtpack_simulator.memory.runtime_graph import RuntimeGraph
from odtpack_simulator.memory.session_memory import (
    arena_copies,
    constant_bytes,
    loading_bytes,
)
from odtpack_simulator.result.result import TimelinePoint


@dataclass(frozen=True, slots=True)
class Session:
    """A model, loaded; ``arena`` says whether it has one."""

    name: str
    graph: RuntimeGraph
    nbytes: int
    arena: bool = False

    def items(self) -> list[Item]:
        """What it takes from when it is loaded."""
        constants = constant_bytes(self.graph, arena=self.arena)
        return [
            Item(f"{self.name} session", self.nbytes, "session"),
            Item(f"constants of the {self.name} session", constants, "session"),
        ]

    def loading(self) -> Item:
        """What it takes besides, while it is loaded."""
        return Item(
            f"loading constants of the {self.name} session", loading_bytes(self.graph), "session"
        )

    def plan(
        self, threads: int, fresh_outputs: Iterable[str], conditions: Mapping[str, bool]
    ) -> Allocation:
        """Buffers of one run; see :func:`~odtpack_simulator.memory.allocation.allocate`."""
        fresh = set(fresh_outputs)
        outputs = [name for name in self.graph.outputs if name in fresh]
        return allocate(self.graph, threads, fresh_outputs=outputs, conditions=conditions)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a session, and what its nodes and values are called; own names without labels."""

    session: Session
    plan: Allocation
    labels: Labels | None = None

    def at_peak(self, heap: int | None) -> list[Item]:
        """Buffers and working memory at the node that needs most; see :meth:`alive`."""
        uses = self.plan.uses
        if not uses:
            return []
        return self.alive(heap, max(range(len(uses)), key=lambda i: uses[i].total - uses[i].small))

    def alive(self, heap: int | None, index: int) -> list[Item]:
        """Buffers and working memory at a node.

        Without an arena small buffers lie in the heap, which keeps them: it stands at its highest
        throughout. In an arena (``heap`` is None) they count by themselves.
        """
        labels = self.labels
        items = [
            Item(
                stable_name(labels.value(buffer.name) if labels else buffer.name),
                buffer.size if heap is not None else buffer.nbytes,
                "activations",
            )
            for buffer in self.plan.alive(index)
        ]
        node, use = self.session.graph.nodes[index], self.plan.uses[index]
        if use.working:
            name = labels.node(index) if labels else f"{stable_name(node.name)} ({node.op_type})"
            items.append(Item(f"working memory of {name}", use.working, "activations"))
        if heap is not None:
            items.append(Item("kept by the heap", heap - use.small, "activations"))
        return items

    def first_step(self, heap: int, gradients: Sequence[Item]) -> list[Item]:
        """The most of the first step, in which a gradient takes memory once it is written."""
        uses = self.plan.uses
        written = {
            name.removesuffix(GRADIENT_SUFFIX): index
            for index, node in enumerate(self.session.graph.nodes)
            for name in node.outputs
            if name.endswith(GRADIENT_SUFFIX)
        }
        items = [(written.get(item.name.removeprefix(GRADIENT), 0), item) for item in gradients]
        grown = [0] * len(uses)
        for index, item in items:
            grown[index] += item.nbytes
        grown = list(itertools.accumulate(grown))
        index = max(
            range(len(grown)), key=lambda i: grown[i] + uses[i].total - uses[i].small, default=0
        )
        return [*(item for at, item in items if at <= index), *self.alive(heap, index)]

    def points(
        self, base: int, start: int, part: Literal["update"] | None = None
    ) -> Iterable[TimelinePoint]:
        """Memory while each node runs, above ``base`` bytes; needs labels."""
        assert self.labels is not None  # noqa: S101 - what is drawn has names
        nodes = zip(self.session.graph.nodes, self.plan.uses, strict=True)
        for index, (node, use) in enumerate(nodes):
            yield TimelinePoint(
                index=start + index,
                node=self.labels.node(index),
                op_type=node.op_type,
                live_bytes=base + use.total - use.small,
                part=part or ("forward" if self.labels.is_forward(index) else "backward"),
            )


@dataclass(frozen=True, slots=True)
class Pass:
    """What computes a batch once: a run of one session, or of several in turn.

    Attributes:
        runs: In their order.
        kept: Values between them whose memory stays from the first time on.
        passing: Values between them that exist while the pass is under way.
    """

    runs: tuple[Run, ...]
    kept: tuple[Item, ...] = ()
    passing: tuple[Item, ...] = ()

    @property
    def heap(self) -> int:
        """Most bytes of small buffers at once, of any run."""
        return max((run.plan.heap for run in self.runs), default=0)

    @property
    def ends(self) -> int:
        """Inputs and outputs of all runs."""
        graphs = [run.session.graph for run in self.runs]
        return sum(len(graph.inputs) + len(graph.outputs) for graph in graphs)


@dataclass(frozen=True, slots=True)
class Models:
    """The sessions of a network, and what they compute.

    Attributes:
        training: Sessions that training needs, in the order in which they are loaded.
        evaluation: Those that evaluation needs besides.
        afresh: A batch of which gradients begin.
        adding: A batch whose gradients are added to others.
        held_out: An evaluation.
    """

    training: tuple[Session, ...]
    evaluation: tuple[Session, ...]
    afresh: Pass
    adding: Pass
    held_out: Pass


class Life:
    """Phases of an app's life, in their order, with what its arenas have come to hold.

    Args:
        arenas: Those of its sessions.
        heap: Where there are none, bytes of small buffers that the heap keeps; None with arenas.
    """

    def __init__(self, arenas: Arenas, heap: int | None) -> None:
        self.phases: dict[str, tuple[Item, ...]] = {}
        self._arenas, self._heap = arenas, heap

    def load(self, sessions: Iterable[Session]) -> None:
        """Load sessions, some of whose kernels take memory from the arena."""
        for session in sessions:
            if session.arena:
                self._arenas.load(session.name, arena_copies(session.graph))

    def run(self, name: str, items: Sequence[Item], work: Pass) -> None:
        """Compute a batch, with ``items`` around it."""
        most, buffers = 0, list[Item]()
        for run in work.runs:
            outside = self._arenas.run(run.session.name, run.plan)
            most = max(most, self._arenas.resident + outside)
            buffers = max(buffers, run.at_peak(self._heap), key=_sum)
        self._add(name, [*items, *work.passing, *buffers], most - _sum(buffers))

    def add(self, name: str, items: Sequence[Item]) -> None:
        """Add a phase in which nothing is computed, or replace what it was like the first time."""
        self._add(name, items, self._arenas.resident)

    def _add(self, name: str, items: Sequence[Item], held: int) -> None:
        kept = [] if self._heap is not None else [Item("kept by the arena", held, "activations")]
        self.phases[name] = (*items, *kept)


def _sum(items: Iterable[Item]) -> int:
    return sum(item.nbytes for item in items)


def stable_name(name: str) -> str:
    """A name without the number that ONNX Runtime's optimizers append, other in every session."""
    return re.sub(r"_token_\d+$", "", name)
