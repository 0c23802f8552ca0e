"""Makes the memory of a training step small: plan it, choose, write, look again.

The plan is made for the model as ONNX Runtime will execute it, which is asked for that: the
knowledge of its order, its buffers and its kernels is the simulator's
(:mod:`odtpack_simulator.memory`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.fold import fold, merge_equal
from odtpack.graph.graphs import Dims, Ops, ancestors, dims_of
from odtpack.graph.inference import infer_shapes
from odtpack.memory import early_masks, recompute, schedule
from odtpack.memory.recompute import choose
from odtpack.memory.schedule import (
    SizeNames,
    Step,
    arrange,
    nameable,
    named_values,
    places_of,
    take_ranks,
)
from odtpack.passes.compact import inferred_left_out
from odtpack.spec import MemorySpec
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_simulator.memory.runtime_graph import Labels, RuntimeGraph, load_runtime_graph

_SMALLEST: Final = 1 << 21
"""Bytes that a forward pass computes from which on it is worth to look where they go."""

_SURE: Final = 0.15
"""Part of the activations from which on a saving need not be looked at once more: of ten networks,
what is planned was at most 7 % below what ONNX Runtime makes of it."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """One tensor that is not kept for the backward pass."""

    name: str  # what it is, for people: ``layers.0.linear1/Gelu``
    nbytes: int  # its size for the shapes that were asked for
    seconds: float  # estimated time of computing it again


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What the compiler did to a training model."""

    before: int  # bytes of activations at the peak of a step as differentiated
    after: int  # the same as emitted
    seconds: float  # estimated time of a step as differentiated
    spec: MemorySpec  # what it was asked for
    decisions: tuple[Decision, ...] = ()  # what is computed again, the largest first

    @property
    def slowdown(self) -> float:
        """Estimated part of the time of a step that computing again adds."""
        return sum(each.seconds for each in self.decisions) / self.seconds if self.seconds else 0.0


def compile_memory(
    model: ir.Model, parameters: Mapping[str, str], spec: MemorySpec
) -> MemoryReport | None:
    """Let a training model compute again what need not be kept."""
    # model: The training model, sorted; changed in place. parameters: Names of the parameters among
    # its inputs, with what to call each. spec: For which shapes, and how far.
    # Returns what was done; None where no limit is asked for and there is next to nothing to gain,
    # or no way to look at the model.
    if spec.limit is None and _values_bytes(model.graph, spec) < _SMALLEST:
        return None
    try:
        return _compile(model, parameters, spec)
    except OdtpackError as error:
        if spec.limit is not None or error.code != "model-not-loadable":
            raise
        return None  # operators of the user's, which this process does not have


def _compile(model: ir.Model, parameters: Mapping[str, str], spec: MemorySpec) -> MemoryReport:
    shapes = input_shapes(model.graph, spec)
    trial = model.clone()
    # ONNX Runtime merges equal nodes: what is chosen for its step would miss a duplicate.
    merge_equal(trial.graph)
    before = Step(_load(trial, shapes))
    total = sum(before.seconds)
    peak = before.timeline().peak
    op, sizes = Ops(trial.graph, "again/"), SizeNames()
    early = early_masks.compute_early(op, trial.graph, before)
    schedule.rename_sizes(op, trial.graph, before, sizes)
    arrange(trial.graph, places_of(trial.graph, before.timeline(), {}, early))
    executed = _load(trial, shapes)
    take_ranks(trial.graph, executed)
    step = Step(weights_late(gradients_at_once(executed), parameters))
    chosen = choose(
        step, limit=spec.limit, seconds=total * spec.slowdown, nameable=nameable(trial.graph)
    )
    renamed = recompute.write(op, trial.graph, step, chosen, sizes)
    common_passes.RemoveUnusedNodesPass()(trial)  # copies of what ONNX Runtime merges with others
    arrange(trial.graph, places_of(trial.graph, chosen, renamed, early))
    after = chosen.peak
    sure = peak - after >= _SURE * peak and spec.limit is None and spec.budget is None
    if not sure:
        after = Step(_load(trial, shapes)).timeline().peak
    if peak - after < spec.worth * peak:
        return MemoryReport(peak, peak, total, spec)
    model.graph = trial.graph
    decisions = _decisions(step, chosen.again, parameters)
    return MemoryReport(peak, after, total, spec, decisions)


def _values_bytes(graph: ir.Graph, spec: MemorySpec) -> int:
    """Bytes of all that the forward pass computes, as far as sizes are known."""
    values = (value for node in ancestors(graph.outputs[:1]) for value in node.outputs)
    return int(
        sum(
            math.prod(_sizes(dims, spec, dict(spec.sizes)))
            * (value.dtype or ir.DataType.FLOAT).itemsize
            for value in values
            if (dims := dims_of(value))
        )
    )


def _sizes(dims: Dims, spec: MemorySpec, named: dict[str, int]) -> tuple[int, ...]:
    """A size for each axis; what has a name that is not known is added to ``named``."""
    usual = [spec.other if axis else spec.batch for axis in range(len(dims))]
    return tuple(
        named.setdefault(dim, size) if isinstance(dim, str) else size if dim is None else dim
        for dim, size in zip(dims, usual, strict=True)
    )


def input_shapes(graph: ir.Graph, spec: MemorySpec) -> dict[str, tuple[int, ...]]:
    """A shape for every input that leaves sizes open."""
    named = dict(spec.sizes)
    shapes: dict[str, tuple[int, ...]] = {}
    for value in graph.inputs:
        dims = dims_of(value)
        if dims is None or all(isinstance(dim, int) for dim in dims):
            continue
        if shapes and any(isinstance(dim, str) and dim not in named for dim in dims):
            named |= _following(graph, named)
        shapes[str(value.name)] = _sizes(dims, spec, named)
    return shapes


def _following(graph: ir.Graph, named: Mapping[str, int]) -> dict[str, int]:
    """Sizes that follow from those that have names, as a target's do from its prediction's."""
    twin = ir.Model(graph, ir_version=8).clone()
    for value in twin.graph.inputs:
        if (dims := dims_of(value)) is not None:
            value.shape = ir.Shape([named.get(d, d) if isinstance(d, str) else d for d in dims])
    changed = True
    while changed:
        for value in (v for node in twin.graph for v in node.outputs):
            if graphs.static_dims(value) is None:
                value.shape = None
        infer_shapes(twin)
        changed = fold(twin.graph)
    found, values = dict[str, int](), named_values(twin.graph)
    for name, value in named_values(graph).items():
        sizes, dims = graphs.static_dims(values.get(name)), dims_of(value)
        if sizes is not None and dims is not None and len(sizes) == len(dims):
            pairs = zip(dims, sizes, strict=True)
            found |= {d: n for d, n in pairs if isinstance(d, str) and d not in named}
    return found


def _load(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> RuntimeGraph:
    with scratch_folder("memory") as folder:
        path = Path(folder) / "training.onnx"
        with inferred_left_out(model.graph):
            ir.save(model, path)
        return load_runtime_graph(path, shapes)


def _decisions(
    step: Step, again: Collection[str], parameters: Mapping[str, str]
) -> tuple[Decision, ...]:
    """What is computed again, of each buffer the largest, with what goes along."""
    labels = Labels(step.graph, parameters.keys(), shown=parameters)
    found: dict[str, tuple[int, float]] = {}
    counted: set[int] = set()
    for name in sorted(again, key=lambda each: (step.producer[each], each)):
        index = step.producer[name]
        label = labels.node(index)
        nbytes, time = found.get(label, (0, 0.0))
        own = 0 if step.root(name) != name else step.nbytes(name)
        found[label] = nbytes + own, time + (0.0 if index in counted else step.seconds[index])
        counted.add(index)
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(Decision(label, nbytes, time) for label, (nbytes, time) in ordered)


# The order in which a training step needs least memory: gradients of parameters at once.
#
# ONNX Runtime comes to the gradients of parameters in the order of the model's outputs, and what
# one of them is computed from waits until then: the gradients of all layers for those of the
# biases, where an exporter has put biases in front of weights. Here what only the gradient of one
# parameter needs is computed as soon as it can be.


def gradients_at_once(graph: RuntimeGraph) -> RuntimeGraph:
    """The graph with the nodes that only one gradient needs right after what they need."""
    nodes = graph.nodes
    producer = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    needs = [{producer[n] for n in node.reads if n in producer} for node in nodes]
    owner = _owners(graph, needs)
    parts: dict[int, list[int]] = defaultdict(list)
    missing: dict[int, set[int]] = defaultdict(set)
    for index, own in enumerate(owner):
        if own is not None:
            parts[own].append(index)
            missing[own].update(each for each in needs[index] if owner[each] != own)
    waiting: dict[int, list[int]] = defaultdict(list)
    for own, sources in missing.items():
        for source in sources:
            waiting[source].append(own)
    order: list[int] = [index for own in parts if not missing[own] for index in parts[own]]

    def ran(index: int) -> None:
        order.append(index)
        for own in waiting[index]:
            missing[own].discard(index)
            if not missing[own]:
                for each in parts[own]:
                    ran(each)

    for index, own in enumerate(owner):
        if own is None:
            ran(index)
    return dataclasses.replace(graph, nodes=tuple(nodes[index] for index in order))


def weights_late(graph: RuntimeGraph, parameters: Collection[str]) -> RuntimeGraph:
    """The graph with the nodes that only need parameters right before what reads them."""
    # ONNX Runtime computes them as soon as it can: the weights of all layers in the form that a
    # product takes, long before the last layers run.
    # graph: In the order of execution. parameters: Names of its inputs that are parameters.
    known = {*parameters, *graph.initializers, ""}
    nodes = graph.nodes
    early: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if not node.subgraphs and all(name in known for name in node.reads):
            known.update(node.outputs)
            early.update(dict.fromkeys(node.outputs, index))
    placed: dict[int, None] = {}
    waiting = set(early.values())
    late = [index for index in range(len(nodes)) if index not in waiting]
    for index in (*late, *sorted(waiting)):  # at the end what nothing else reads
        stack = [index]
        while stack:
            needs = [early[name] for name in nodes[stack[-1]].reads if name in early]
            missing = [each for each in needs if each not in placed]
            if missing:
                stack += reversed(missing)
            else:
                placed[stack.pop()] = None
    return dataclasses.replace(graph, nodes=tuple(nodes[index] for index in placed))


def _owners(graph: RuntimeGraph, needs: list[set[int]]) -> list[int | None]:
    """For each node the last node of the one gradient that needs it; None if several things do."""
    owner: list[int | None] = [None] * len(needs)
    of_readers: list[set[int | None]] = [set() for _ in needs]
    for index in range(len(needs) - 1, -1, -1):
        own, found = set(graph.nodes[index].outputs), of_readers[index]
        if not found and own.isdisjoint(graph.outputs[:1]):
            owner[index] = index
        elif len(found) == 1 and own.isdisjoint(graph.outputs):
            (owner[index],) = found
        for source in needs[index]:
            of_readers[source].add(owner[index])
    return owner
