"""Plans of whole graphs and of segments: the phases of a training, and the peak of each.

:mod:`odtpack_simulator.memory.memory_plan` makes the plan.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, Protocol, Self

import numpy as np
import onnx

from odtpack_runtime.checkpoint.parameters import CHUNK_ELEMENTS, Layout
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.checks import read_model
from odtpack_runtime.package.manifest import Manifest, ParameterInfo
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SegmentsInfo
from odtpack_runtime.session.graph_signature import (
    COTANGENT_SUFFIX,
    GRADIENT_SUFFIX,
    ORDER_PREFIX,
    RESET_NAME,
)
from odtpack_runtime.session.segments import segment_name
from odtpack_runtime.training.optimizer_contract import OptimizerContract, matrix, read_contract
from odtpack_simulator.device.kits import MAPPING_KITS, Kit
from odtpack_simulator.memory.allocation import Allocation, allocate, allocated_size
from odtpack_simulator.memory.arena import Arenas
from odtpack_simulator.memory.execution_order import reads, rename
from odtpack_simulator.memory.kernel_memory import Shape
from odtpack_simulator.memory.missing_shapes import Dims
from odtpack_simulator.memory.runtime_graph import Labels, RuntimeGraph
from odtpack_simulator.memory.session_memory import (
    arena_copies,
    constant_bytes,
    loading_bytes,
    run_bytes,
)
from odtpack_simulator.result import (
    MemoryBreakdown,
    MemoryKind,
    PeakTensor,
    PhasePeak,
    PredictedMemory,
    TimelinePoint,
)

_SHOWN_TENSORS: Final = 40
_SAME: Final = 0.01
"""Share of a peak by which a phase may be above the one that explains it."""

_KEPT: Final = "kept by the arena"

MEASURED_AS: Final = {
    "loading": (
        "loading the training model",
        "loading the evaluation model",
        "placing the parameters",
    ),
    "evaluation": ("first evaluation", "evaluation"),
    "step": ("first step", "training step", "optimizer step", "accumulating step"),
    "saving": ("saving",),
    "exporting": ("exporting",),
    "resuming": ("resuming",),
}
"""What a replay measures as one phase, and the phases of the plan that it is. It does not export,
and resumes only where it was interrupted."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory: a tensor, or what a session takes."""

    name: str
    nbytes: int
    kind: MemoryKind


@dataclass(frozen=True, slots=True)
class Phase:
    """The most memory in use during one part of a training."""

    name: str
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        """Sum of the items in bytes."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The predicted memory of training a package."""

    phases: tuple[Phase, ...]  # What is in use at the worst moment of each phase
    # Memory while each node of the training model runs, then each node of the optimizer model.
    timeline: tuple[TimelinePoint, ...]
    unknown: tuple[str, ...]  # Tensors whose size depends on data; they are estimates
    unbounded: bool = False  # Whether what a Loop keeps does: nothing stands for it

    def bounded(self) -> Self:
        """The plan, if it says what a training takes at most."""
        if self.unbounded:
            raise OdtpackError(
                "memory-not-planned",
                "a Loop keeps values, and neither constants nor the shapes of the inputs say how "
                "many or how large",
                hint="give the Loop a trip count that is a constant or a size of an input, and one "
                "shape to what it carries; 'odtpack simulate' measures the model as it is",
            )
        return self

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def explained(self) -> Phase:
        """The phase that is the reason of the peak, with what the highest takes besides."""
        # An arena keeps what a phase took: others stand as high and, by what is theirs, a little
        # higher. The reason is the one that uses most of it.
        peak = self.peak
        high = [phase for phase in self.phases if phase.nbytes >= (1 - _SAME) * peak.nbytes]
        kept = {p: sum(i.nbytes for i in p.items if i.name == _KEPT) for p in high}
        reason = min(high, key=lambda phase: (kept[phase], -phase.nbytes))
        more = Item(f"more in '{peak.name}'", peak.nbytes - reason.nbytes, "activations")
        return Phase(reason.name, (*reason.items, more) if more.nbytes else reason.items)

    def phase_peaks(self, measured: Mapping[str, int] | None = None) -> list[PhasePeak]:
        """The peak of every phase that a replay distinguishes, in their order."""
        # `measured`: Bytes by phase as a replay measured them; none if it did not.
        planned = {phase.name: phase.nbytes for phase in self.phases}
        return [
            PhasePeak(
                phase=phase,
                predicted_bytes=max(planned.get(name, 0) for name in names),
                measured_bytes=(measured or {}).get(phase),
            )
            for phase, names in MEASURED_AS.items()
            if planned.keys() & names
        ]

    @property
    def highest_phase(self) -> str:
        """The phase that explains the peak, as a replay calls it."""
        return next(name for name, own in MEASURED_AS.items() if self.explained.name in own)

    def predicted(self) -> PredictedMemory:
        """The peak and its parts, as the result of a simulation stores it."""
        parts = dict.fromkeys(MemoryBreakdown.model_fields, 0)
        for item in self.explained.items:
            parts[item.kind] += item.nbytes
        return PredictedMemory(peak_bytes=self.peak.nbytes, breakdown=MemoryBreakdown(**parts))

    def tensors_at_peak(self) -> list[PeakTensor]:
        """What is alive at the peak, largest first; the small ones of a kind as one."""
        ordered = sorted(self.explained.items, key=lambda item: (-item.nbytes, item.name))
        ordered = [item for item in ordered if item.nbytes > 0]
        shown, rest = ordered[:_SHOWN_TENSORS], ordered[_SHOWN_TENSORS:]
        for kind in MemoryBreakdown.model_fields:
            small = [item for item in rest if item.kind == kind]
            if small:
                total = sum(item.nbytes for item in small)
                shown.append(Item(f"{len(small)} smaller", total, small[0].kind))
        return [PeakTensor(name=item.name, bytes=item.nbytes, kind=item.kind) for item in shown]


# What lies in memory throughout a training or a part of it: parameters, moments, a batch.

GRADIENT: Final = "gradient of "  # Begins the name of the item that is a parameter's gradient


def vectors(contract: OptimizerContract, layout: Layout) -> dict[str, tuple[int, ...]]:
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


def optimizer_contract(package: Package) -> OptimizerContract:
    """How the optimizer model is run."""
    model = read_model(package.optimizer_model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    names = [value.name for value in model.graph.input]
    return read_contract(metadata, names, str(package.optimizer_model))


def flat_layout(manifest: Manifest) -> Layout:
    """Layout of all trainable parameters."""
    trainable = [p for p in manifest.parameters if p.role == "trainable"]
    return Layout.pack((p.name, p.shape, np.dtype(p.dtype)) for p in trainable)


def moved(layout: Layout, copies: int) -> Iterable[Item]:
    """What is moved into a flat buffer exists twice, one parameter's after the other's."""
    largest = max(layout.slots, key=lambda slot: slot.nbytes, default=None)
    if largest is not None and copies:
        nbytes = copies * allocated_size(largest.nbytes)
        yield Item(f"{largest.name} as it was read", nbytes, "parameters")


def flat_bytes(parameter: ParameterInfo) -> int:
    """The bytes that a parameter takes in a flat buffer, the gap after it included."""
    return Layout.pack([(parameter.name, parameter.shape, np.dtype(parameter.dtype))]).nbytes


def exported(manifest: Manifest) -> Iterable[Item]:
    """The inference template, three times while its outputs are chosen, and a parameter's copy."""
    # That is the largest of those that the model holds in another type.
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


# Frozen weights of segments that a kit holds in memory, as it cannot map their file.


def held_weights(package: Package, kit: Kit, *, fetched: bool) -> int:
    """Bytes of frozen weights that a training holds in memory."""
    # `package`: The package; of one with one training model its constants are in the sessions.
    # `kit`: What the app trains with. JavaScript's reads the weights of a segment when it runs,
    # into memory for the segment with the most.
    # `fetched`: Whether all of them lie in memory as well, as in a page.
    # Returns: 0 where they are mapped from their file.
    info = package.manifest.segments
    if info is None or kit in MAPPING_KITS:
        return 0
    sizes = {each.name: each.nbytes for each in info.tensors}
    inputs: dict[str, list[str]] = {}

    def read_by(model: str, names: Mapping[str, str]) -> int:
        if model not in inputs:
            inputs[model] = [value.name for value in read_model(package.path / model).graph.input]
        return sum(sizes.get(segment_name(names, own), 0) for own in inputs[model])

    runs = [(each.forward, each.names) for each in info.segments]
    runs += [(each.backward, each.names) for each in info.segments if each.backward is not None]
    runs += [(model.name, {}) for model in (package.training_model, package.eval_model)]
    most = max(read_by(model, names) for model, names in runs)
    return most + (sum(sizes.values()) if fetched else 0)


# Phases of an app's life in their order, each with what is in use at its worst moment.


@dataclass(frozen=True)
class Session:
    """A model, loaded; ``arena`` says whether it has one."""

    name: str
    graph: RuntimeGraph
    nbytes: int
    arena: bool = False

    @cached_property
    def items(self) -> list[Item]:
        """What it takes from when it is loaded."""
        constants = constant_bytes(self.graph, arena=self.arena)
        return [
            Item(f"{self.name} session", self.nbytes, "session"),
            Item(f"constants of the {self.name} session", constants, "session"),
        ]

    @cached_property
    def loading(self) -> Item:
        """What it takes besides, while it is loaded."""
        return Item(
            f"loading constants of the {self.name} session", loading_bytes(self.graph), "session"
        )

    @cached_property
    def copies(self) -> list[int]:
        """Bytes of each copy that its kernels take from an arena, as long as it is loaded."""
        return arena_copies(self.graph) if self.arena else []

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
        """Buffers and working memory at a node."""
        # Without an arena small buffers lie in the heap, which keeps them: it stands at its highest
        # throughout. In an arena (`heap` is None) they count by themselves.
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


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What computes a batch once: a run of one session, or of several in turn."""

    runs: tuple[Run, ...]  # In their order
    kept: tuple[Item, ...] = ()  # Values between them whose memory stays from the first time on
    passing: tuple[Item, ...] = ()  # Values between them that exist while the pass is under way

    @property
    def heap(self) -> int:
        """Most bytes of small buffers at once, of any run."""
        return max((run.plan.heap for run in self.runs), default=0)

    def at_peak(self, heap: int | None) -> list[Item]:
        """What the run needs that needs most; see :meth:`Run.alive`."""
        return max((run.at_peak(heap) for run in self.runs), key=_sum, default=[])

    @property
    def ends(self) -> int:
        """Inputs and outputs of all runs, but for outputs that only order nodes."""
        graphs = [run.session.graph for run in self.runs]
        names = itertools.chain(*(graph.inputs + graph.outputs for graph in graphs))
        return sum(not name.startswith(ORDER_PREFIX) for name in names)

    @property
    def values(self) -> int:
        """Bytes of the heap for what is no tensor, in the run that takes most."""
        return max(run_bytes(run.session.graph, run.plan) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Models:
    """The sessions of a network, and what they compute."""

    # Sessions that training needs, in the order in which they are loaded.
    training: tuple[Session, ...]
    evaluation: tuple[Session, ...]  # Those that evaluation needs besides
    afresh: Pass  # A batch of which gradients begin
    adding: Pass  # A batch whose gradients are added to others
    left: tuple[Pass, ...]  # Smaller batches, with which passes end
    held_out: tuple[Pass, ...]  # The batches of an evaluation: a whole one, and what is left


@dataclass(frozen=True, slots=True)
class Life:
    """An app's life, part by part, with what its arenas come to hold."""

    arenas: Arenas
    # Where there are none, bytes of small buffers that the heap keeps; None with arenas.
    heap: int | None
    buffers: Mapping[Pass, Sequence[Item]]  # What each pass needs at its peak

    def load(self, sessions: Iterable[Session]) -> None:
        """Load sessions, some of whose kernels take memory from the arena."""
        for session in sessions:
            self.arenas.load(session.name, session.copies)

    def run(self, name: str, items: Sequence[Item], work: Pass) -> Phase:
        """Compute a batch, with ``items`` around it."""
        most = 0
        for run in work.runs:
            outside = self.arenas.run(run.session.name, run.plan)
            most = max(most, self.arenas.resident + outside)
        buffers = self.buffers[work]
        return self._phase(name, [*items, *work.passing, *buffers], most - _sum(buffers))

    def add(self, name: str, items: Sequence[Item]) -> Phase:
        """Do something in which nothing is computed."""
        return self._phase(name, items, self.arenas.resident)

    def _phase(self, name: str, items: Sequence[Item], held: int) -> Phase:
        kept = [] if self.heap is not None else [Item(_KEPT, held, "activations")]
        return Phase(name, (*items, *kept))


def _sum(items: Iterable[Item]) -> int:
    return sum(item.nbytes for item in items)


def stable_name(name: str) -> str:
    """A name without the number that ONNX Runtime's optimizers append, other in every session."""
    return re.sub(r"_token_\d+$", "", name)


# The passes of a network that is trained segment by segment.
#
# What :class:`~odtpack_runtime.session.segments.SegmentedGraph` does is played through: the models
# run in their order and, in training, back. A value between two of them has memory of the caller's,
# which stays, and which training and evaluation share. If its size does not follow from those of
# the inputs, ONNX Runtime finds memory in its arena first, and it is copied. Two cotangents take
# turns. Weights are pages of a mapped file and no part of the plan.


class OpenSession(Protocol):
    """Reads a model with these shapes of its inputs."""

    def __call__(self, name: str, path: Path, sizes: Mapping[str, Sequence[int]]) -> Session:
        """Return its session."""


def plan_segments(
    package: Package,
    info: SegmentsInfo,
    trained: Sequence[Mapping[str, Sequence[int]]],
    evaluated: Sequence[Mapping[str, Sequence[int]]],
    threads: int,
    load: OpenSession,
) -> Models:
    """Plan the passes of a package of segments, of batches of these shapes."""
    models = _Models(package, info, threads, load)

    def through(shapes: Mapping[str, Sequence[int]], afresh: bool | None = None) -> Pass:
        """Forth and back; forth alone in an evaluation, which has no gradients to begin."""
        last = (package.eval_model if afresh is None else package.training_model).name
        steps = [*((each.forward, each.names, False) for each in info.segments), (last, {}, False)]
        back = () if afresh is None else reversed(info.segments)
        steps += [(each.backward, each.names, True) for each in back if each.backward is not None]
        return models.run(shapes, {} if afresh is None else {RESET_NAME: afresh}, steps, last)

    afresh, adding = through(trained[0], True), through(trained[0], False)
    alone = package.manifest.accumulation_steps == 1
    left = tuple(through(shapes, alone) for shapes in trained[1:])
    held_out = tuple(map(through, evaluated))
    names = [name for name in info.files() if name != info.weights]
    training = [models.sessions[name] for name in (*names, package.training_model.name)]
    evaluation = models.sessions[package.eval_model.name]
    return Models(tuple(training), (evaluation,), afresh, adding, left, held_out)


class _Models:
    """The models, each read once for every set of sizes."""

    # `sessions`: A session of each model that was asked for, by its file.

    def __init__(
        self, package: Package, info: SegmentsInfo, threads: int, load: OpenSession
    ) -> None:
        self._threads = threads
        self.sessions: dict[str, Session] = {}
        self._folder, self._load = package.path, load
        self._inputs: dict[str, set[str]] = {}
        self._read: dict[object, Session] = {}
        manifest = package.manifest
        self._modules = manifest.module_names()
        self._parameters = {p.name for p in manifest.parameters} | {t.name for t in info.tensors}

    def session(
        self, file: str, names: Mapping[str, str], known: Mapping[str, Shape]
    ) -> tuple[Session, dict[str, Shape]]:
        """The session of a segment, and the shapes of what it is fed by the model's names."""
        if file not in self._inputs:
            graph = read_model(self._folder / file).graph
            self._inputs[file] = {value.name for value in graph.input}
        called = {own: segment_name(names, own) for own in self._inputs[file]}
        fed = {own: known[name] for own, name in sorted(called.items()) if name in known}
        key = file, tuple(fed.items())
        if key not in self._read:
            self._read[key] = self._load(Path(file).stem, self._folder / file, fed)
            self.sessions.setdefault(file, self._read[key])
        return self._read[key], fed

    def labels(self, session: Session, names: Mapping[str, str], *, gradient: bool) -> Labels:
        """What the nodes of a segment are called: by the layers that this segment is."""
        called = {own: segment_name(names, own) for own in session.graph.inputs}
        own = {own: name for own, name in called.items() if name in self._parameters}
        shown = {own: self._modules.get(name, name) for own, name in own.items()}
        return Labels(session.graph, own, shown=shown, later="grad/", gradient=gradient)

    def run(
        self,
        shapes: Mapping[str, Sequence[int]],
        conditions: Mapping[str, bool],
        # The file of each model, what is called differently in it, and whether it goes back.
        steps: Iterable[tuple[str, Mapping[str, str], bool]],
        last: str,  # The file that returns the outputs of all
    ) -> Pass:
        """A pass through models."""
        known: dict[str, Shape] = {name: tuple(shape) for name, shape in shapes.items()}
        runs: list[Run] = []
        kept: dict[str, int] = {}
        passing: dict[str, int] = {}
        turn = 1
        for file, names, gradient in steps:
            session, fed = self.session(file, names, known)
            values = session.graph.values
            sizes: dict[str, int] = {}
            for own, given in fed.items():
                dims = zip(values[own].dims or (), given, strict=False)
                sizes |= {dim: size for dim, size in dims if isinstance(dim, str)}
            fresh: list[str] = []
            for index, own in enumerate(session.graph.outputs):
                name, value = segment_name(names, own), values[own]
                if name.endswith(GRADIENT_SUFFIX) or (file == last and index == 0):
                    continue  # in memory of its own
                shape: Shape | None
                returned = file == last and not name.endswith(COTANGENT_SUFFIX)
                if name.endswith(COTANGENT_SUFFIX):
                    shape = known.get(name.removesuffix(COTANGENT_SUFFIX))
                    turn = 3 - turn
                    called = f"gradient between segments {turn}"
                else:
                    shape = None if returned else _sized(value.dims, sizes)
                    called = f"value {name}"
                if shape is None:
                    shape = value.shape
                    fresh.append(own)
                if shape is not None:
                    known[name] = shape
                    nbytes = allocated_size(math.ceil(math.prod(shape) * value.itemsize))
                    held = passing if returned else kept
                    held[called] = max(held.get(called, 0), nbytes)
            plan = session.plan(self._threads, fresh, conditions)
            runs.append(Run(session, plan, self.labels(session, names, gradient=gradient)))
        items = (
            tuple(Item(name, nbytes, "activations") for name, nbytes in held.items())
            for held in (kept, passing)
        )
        return Pass(tuple(runs), *items)


def _sized(dims: Dims | None, sizes: Mapping[str, int]) -> Shape | None:
    """The shape that follows from the sizes of inputs; None if it does not."""
    shape = [sizes.get(dim) if isinstance(dim, str) else dim for dim in dims or (None,)]
    known = tuple(size for size in shape if size is not None)
    return known if len(known) == len(shape) else None


# The nodes of a network in one graph, be it one model or several.


def whole_graph(package: Package) -> onnx.GraphProto:
    """Return the graph of the training model, behind the nodes of the segments before it."""
    # It is there to be walked through. Without segments it is the training model's; with them it
    # has no gradients but those of the last, and neither inputs nor constants.
    last = read_model(package.training_model).graph
    info = package.manifest.segments
    if info is None:
        return last
    whole = onnx.GraphProto()
    for number, segment in enumerate(info.segments):
        graph = read_model(package.path / segment.forward).graph
        ends = {value.name for value in (*graph.input, *graph.output)}
        names = {
            name: segment_name(segment.names, name) if name in ends else f"{number}/{name}"
            for node in graph.node
            for name in (*reads(node), *node.output)
            if name
        }
        rename(graph, names, frozenset())
        whole.node.extend(graph.node)
    whole.node.extend(last.node)
    return whole
