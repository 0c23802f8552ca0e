"""Predict the peak memory of training before anything runs.

Eleven phases are planned, and one more where gradients of several batches are added
up: loading the training model and the evaluation model, moving the parameters of the
checkpoint into one buffer, and the moments too where a training is resumed, a first
evaluation, the first training step, in which gradients take memory as they are written,
the steps after it, one run of the optimizer model, an evaluation in between, saving, and
exporting a model. A step is planned node by node as ONNX Runtime executes it; parameters,
gradients and moments lie in flat buffers that exist throughout, so the step's peak is
theirs, plus one batch, plus the sessions, plus the most that is alive at a node.

The plan is for the session options of the package. Where sessions have an arena, every
request of a training's life is played through it (:mod:`odtpack_simulator.memory.arena_use`):
loading, an evaluation, steps, an evaluation in between. What the arena holds and does not use
is an item of every phase from then on. Memory patterns are off.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
import onnx

from odtpack_runtime.checkpoint.layout import CHUNK_ELEMENTS, Layout
from odtpack_runtime.package.manifest import Manifest, ParameterInfo
from odtpack_runtime.package.manifest_device import OptimizationLevel
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import GRADIENT_SUFFIX, RESET_NAME
from odtpack_runtime.training.optimizer_contract import OptimizerContract, matrix, read_contract
from odtpack_runtime.training.optimizer_state import state_layout
from odtpack_simulator.device.kits import Sharing
from odtpack_simulator.memory.allocation import Allocation, allocate, allocated_size
from odtpack_simulator.memory.arena_use import Arenas, sharing_of
from odtpack_simulator.memory.memory_phases import Item, MemoryPlan, Phase
from odtpack_simulator.memory.node_names import Labels
from odtpack_simulator.memory.runtime_graph import RuntimeGraph, load_runtime_graph
from odtpack_simulator.memory.session_memory import (
    BYTES_PER_SAVED_TENSOR,
    FIRST_RUN_BYTES,
    LOADED_BYTES,
    constant_bytes,
    loading_bytes,
    session_bytes,
    thread_bytes,
)
from odtpack_simulator.result.result import TimelinePoint

_GRADIENT: Final = "gradient of "


class LoadGraph(Protocol):
    """Reads a model as :func:`~odtpack_simulator.memory.runtime_graph.load_runtime_graph` does."""

    def __call__(
        self,
        model: Path,
        shapes: Mapping[str, Sequence[int]],
        *,
        threads: int,
        level: OptimizationLevel,
    ) -> RuntimeGraph:
        """Return the graph of a model with these shapes of its inputs."""


def plan_memory(
    package: Package,
    shapes: Mapping[str, Sequence[int]],
    *,
    threads: int = 1,
    sharing: Sharing | None = None,
    step_model: bool = False,
    load: LoadGraph = load_runtime_graph,
) -> MemoryPlan:
    """Plan the memory of training a package. Nothing is run.

    Args:
        package: The package.
        shapes: Shape of one batch of each user input.
        threads: Intra-operator threads of the sessions.
        sharing: How sessions come by their memory; the package's choice if None. Of a kit:
            :func:`~odtpack_simulator.memory.arena_use.sharing_of`.
        step_model: Plan steps of the package's step model, which keeps no gradients, and not those
            of the training and the optimizer model; of a kit:
            :func:`~odtpack_simulator.memory.arena_use.session_use`.
        load: Reads the models, so that who plans many times may read each once.

    Raises:
        OdtpackError: A model does not load, or a shape does not fit.
    """
    manifest = package.manifest
    sharing = sharing or sharing_of(manifest.session)
    level = manifest.session.optimization_level if manifest.session else "all"
    layout = _flat_layout(manifest)
    contract = _contract(package)
    additional = frozenset(o.name for o in manifest.outputs if o.role == "additional")
    returned = additional | {output.name for output in manifest.evaluation_outputs}
    steps = package.step_model if step_model and package.step_model else package.training_model
    is_whole = steps == package.step_model
    training, evaluation, optimizer = (
        _Session(name, load(path, sizes, threads=threads, level=level), session_bytes(path))
        for name, path, sizes in (
            ("training", steps, shapes),
            ("evaluation", package.eval_model, shapes),
            ("optimizer", package.optimizer_model, _vectors(contract, layout)),
        )
    )
    process = Item("ONNX Runtime and Python", LOADED_BYTES, "session")
    runs = Item("first runs", FIRST_RUN_BYTES + thread_bytes(threads), "session")
    parameters = list(_parameter_items(manifest.parameters))
    gradients = [] if is_whole else list(_gradient_items(manifest.parameters))
    moments = list(_state_items(contract, layout))
    # Moments are zeros at first, which take no memory before they are written.
    started = [
        *(process, runs, *training.items(), *evaluation.items(), *optimizer.items()),
        *(*parameters, *gradients, *_batch_items(manifest, shapes)),
    ]
    ungraded = [item for item in started if item.kind != "gradients"]
    running = [*started, *moments]
    if is_whole:  # writes them in the first step
        started = running
    # A step starts its gradients afresh; only the further batches of a step add to them.
    afresh = training.plan(threads, additional, {RESET_NAME: True})
    adding = training.plan(threads, additional, {RESET_NAME: False})
    held_out = evaluation.plan(threads, returned, {})
    update = optimizer.plan(threads, frozenset(), {})
    run = (afresh, held_out) if is_whole else (afresh, held_out, update)
    heap = max(plan.heap for plan in run) if sharing == "none" else None
    loaded = [process, *parameters, *training.items()]
    placed = [*loaded, *evaluation.items()]
    names = {p.name for p in manifest.parameters}
    shown = manifest.module_names()
    step_labels = Labels(training.graph, names, shown=shown, later="grad/")
    update_labels = Labels(optimizer.graph)
    saved = len(manifest.parameters) + len(moments) * len(layout.slots)
    tables = max(heap or 0, saved * BYTES_PER_SAVED_TENSOR)
    life = _Life(Arenas(sharing), heap)
    life.add("loading the training model", [*loaded, training.loading()])
    life.add("loading the evaluation model", [*placed, evaluation.loading()])
    life.add("placing the parameters", [*placed, *_moved(layout, 1)])
    resumed = [*placed, *optimizer.items(), *moments, *_moved(layout, len(moments))]
    life.add("resuming", resumed)
    life.run("first evaluation", ungraded, evaluation, held_out)
    if heap is None:
        life.run("first step", started, training, afresh, step_labels)
    else:
        first = _first_step(training.graph, afresh, heap, step_labels, gradients)
        life.add("first step", [*(moments if is_whole else ()), *ungraded, *first])
    if not is_whole:
        life.run("optimizer step", running, optimizer, update, update_labels)
    life.run("training step", running, training, afresh, step_labels)
    if manifest.accumulation_steps > 1:
        life.run("accumulating step", running, training, adding, step_labels)
    if not is_whole:
        life.run("optimizer step", running, optimizer, update, update_labels)
    life.run("evaluation", running, evaluation, held_out)
    life.run("training step", running, training, afresh, step_labels)
    # Tensors are written from where they lie.
    life.add("saving", [*running, Item("checkpoint tables", tables, "activations")])
    life.add("exporting", [*running, *_exported(manifest)])
    base = sum(item.nbytes for item in running) + (heap or 0)
    points = [*_points(training.graph, afresh, base, 0, step_labels)]
    if not is_whole:
        points += _points(optimizer.graph, update, base, len(points), update_labels, "update")
    return MemoryPlan(
        tuple(Phase(name, items) for name, items in life.phases.items()),
        tuple(points),
        tuple(dict.fromkeys(n for plan in run for n in plan.unknown)),
    )


class _Life:
    """Phases of an app's life, in their order, with what its arenas have come to hold.

    Args:
        arenas: Those of its sessions.
        heap: Where there are none, bytes of small buffers that the heap keeps; None with arenas.
    """

    def __init__(self, arenas: Arenas, heap: int | None) -> None:
        self.phases: dict[str, tuple[Item, ...]] = {}
        self._arenas, self._heap = arenas, heap

    def run(
        self,
        name: str,
        items: Sequence[Item],
        session: _Session,
        plan: Allocation,
        labels: Labels | None = None,
    ) -> None:
        """Run a session once, with ``items`` around it."""
        outside = self._arenas.run(session.name, plan)
        self.add(name, items, _alive_at_peak(session.graph, plan, self._heap, labels), outside)

    def add(
        self, name: str, items: Sequence[Item], buffers: Sequence[Item] = (), outside: int = 0
    ) -> None:
        """Add a phase, or replace what it was like the first time."""
        kept: list[Item] = []
        if self._heap is None:
            held = self._arenas.resident + outside - sum(item.nbytes for item in buffers)
            kept.append(Item("kept by the arena", held, "activations"))
        self.phases[name] = (*items, *buffers, *kept)


@dataclass(frozen=True, slots=True)
class _Session:
    """One of the three models, loaded."""

    name: str
    graph: RuntimeGraph
    nbytes: int

    def items(self) -> list[Item]:
        return [
            Item(f"{self.name} session", self.nbytes, "session"),
            Item(f"constants of the {self.name} session", constant_bytes(self.graph), "session"),
        ]

    def loading(self) -> Item:
        return Item(
            f"loading constants of the {self.name} session", loading_bytes(self.graph), "session"
        )

    def plan(
        self, threads: int, fresh_outputs: frozenset[str], conditions: Mapping[str, bool]
    ) -> Allocation:
        fresh = [name for name in self.graph.outputs if name in fresh_outputs]
        return allocate(self.graph, threads, fresh_outputs=fresh, conditions=conditions)


def _vectors(contract: OptimizerContract, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of the vectors in the largest run of the optimizer model."""
    if contract.by_parameter:
        largest = max((slot.shape for slot in layout.slots), key=math.prod)
        shapes = {vector.name: vector.bound_shape(largest) for vector in contract.state}
        return {**shapes, **dict.fromkeys(("params", "gradients"), matrix(largest))}
    dtype = layout.slots[0].dtype if layout.slots else np.dtype(np.float32)
    elements = max(1, layout.nbytes // dtype.itemsize)
    if not contract.whole:
        elements = min(CHUNK_ELEMENTS, elements)
    names = (vector.name for vector in contract.state)
    return dict.fromkeys(("params", "gradients", *names), (elements,))


def _contract(package: Package) -> OptimizerContract:
    """How the optimizer model is run."""
    model = onnx.load(str(package.optimizer_model), load_external_data=False)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    names = [value.name for value in model.graph.input]
    return read_contract(metadata, names, str(package.optimizer_model))


def _flat_layout(manifest: Manifest) -> Layout:
    """Layout of all trainable parameters."""
    trainable = [p for p in manifest.parameters if p.role == "trainable"]
    return Layout.pack((p.name, p.shape, np.dtype(p.dtype)) for p in trainable)


def _state_items(contract: OptimizerContract, layout: Layout) -> Iterable[Item]:
    for index in range(len(contract.state)):
        nbytes = state_layout(layout, contract, index).nbytes
        yield Item(f"moment {index + 1} of all parameters", nbytes, "optimizer_state")


def _moved(layout: Layout, copies: int) -> Iterable[Item]:
    """What is moved into a flat buffer exists twice, one parameter's after the other's."""
    largest = max(layout.slots, key=lambda slot: slot.nbytes, default=None)
    if largest is not None and copies:
        nbytes = copies * allocated_size(largest.nbytes)
        yield Item(f"{largest.name} as it was read", nbytes, "parameters")


def _slots(parameters: Iterable[ParameterInfo]) -> Iterable[tuple[str, int]]:
    """Each parameter with the bytes it takes in a flat buffer, the gap after it included."""
    for parameter in parameters:
        dtype = np.dtype(parameter.dtype)
        yield parameter.name, Layout.pack([(parameter.name, parameter.shape, dtype)]).nbytes


def _parameter_items(parameters: Iterable[ParameterInfo]) -> Iterable[Item]:
    return (Item(name, nbytes, "parameters") for name, nbytes in _slots(parameters))


def _gradient_items(parameters: Iterable[ParameterInfo]) -> Iterable[Item]:
    trainable = (p for p in parameters if p.role == "trainable")
    return (Item(f"{_GRADIENT}{name}", nbytes, "gradients") for name, nbytes in _slots(trainable))


def _exported(manifest: Manifest) -> Iterable[Item]:
    """The inference template, three times while its outputs are chosen, and a parameter's copy.

    That is the largest of those that the model holds in another type.
    """
    template = manifest.files.inference_template
    if template is None or manifest.inference is None:
        return
    yield Item("inference template", 3 * template.size_bytes, "activations")
    converted = (
        math.prod(p.shape) * 4
        for p in manifest.parameters
        if p.name in manifest.inference.parameters and (p.scale or p.model_dtype)
    )
    yield Item("a parameter in the model's type", max(converted, default=0), "activations")


def _batch_items(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> Iterable[Item]:
    """One batch of every input."""
    for spec in manifest.input_specs():
        nbytes = int(np.prod(shapes[spec.name], dtype=np.int64)) * spec.dtype.itemsize
        yield Item(spec.name, allocated_size(nbytes), "inputs")


def _first_step(
    graph: RuntimeGraph, plan: Allocation, heap: int, labels: Labels, gradients: Sequence[Item]
) -> list[Item]:
    """The most of the first step, in which a gradient takes memory once it is written."""
    written = {
        name.removesuffix(GRADIENT_SUFFIX): index
        for index, node in enumerate(graph.nodes)
        for name in node.outputs
        if name.endswith(GRADIENT_SUFFIX)
    }
    items = [(written.get(item.name.removeprefix(_GRADIENT), 0), item) for item in gradients]
    grown = [0] * len(plan.uses)
    for index, item in items:
        grown[index] += item.nbytes
    grown = list(itertools.accumulate(grown))
    index = max(
        range(len(grown)),
        key=lambda i: grown[i] + plan.uses[i].total - plan.uses[i].small,
        default=0,
    )
    return [
        *(item for at, item in items if at <= index),
        *_alive(graph, plan, heap, labels, index),
    ]


def _alive_at_peak(
    graph: RuntimeGraph, plan: Allocation, heap: int | None, labels: Labels | None
) -> list[Item]:
    """Buffers and working memory at the node that needs most; its own names without labels."""
    if not plan.uses:
        return []
    index = max(range(len(plan.uses)), key=lambda i: plan.uses[i].total - plan.uses[i].small)
    return _alive(graph, plan, heap, labels, index)


def _alive(
    graph: RuntimeGraph, plan: Allocation, heap: int | None, labels: Labels | None, index: int
) -> list[Item]:
    """Buffers and working memory at a node.

    Without an arena small buffers lie in the heap, which keeps them: it stands at its highest
    throughout. In an arena (``heap`` is None) they count by themselves.
    """
    items = [
        Item(
            stable_name(labels.value(buffer.name) if labels else buffer.name),
            buffer.size if heap is not None else buffer.nbytes,
            "activations",
        )
        for buffer in plan.alive(index)
    ]
    node = graph.nodes[index]
    working = plan.uses[index].working
    if working:
        name = labels.node(index) if labels else f"{stable_name(node.name)} ({node.op_type})"
        name = f"working memory of {name}"
        items.append(Item(name, working, "activations"))
    if heap is not None:
        items.append(Item("kept by the heap", heap - plan.uses[index].small, "activations"))
    return items


def _points(
    graph: RuntimeGraph,
    plan: Allocation,
    base: int,
    start: int,
    labels: Labels,
    part: Literal["update"] | None = None,
) -> Iterable[TimelinePoint]:
    for index, (node, use) in enumerate(zip(graph.nodes, plan.uses, strict=True)):
        yield TimelinePoint(
            index=start + index,
            node=labels.node(index),
            op_type=node.op_type,
            live_bytes=base + use.total - use.small,
            part=part or ("forward" if labels.is_forward(index) else "backward"),
        )


def stable_name(name: str) -> str:
    """A name without the number that ONNX Runtime's optimizers append, other in every session."""
    return re.sub(r"_token_\d+$", "", name)
