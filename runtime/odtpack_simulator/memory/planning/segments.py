"""The passes of a network that is trained segment by segment.

What :class:`~odtpack_runtime.session.segmented_graph.SegmentedGraph` does is played through: the
models run in their order and, in training, back. A value between two of them has memory of the
caller's, which stays, and which training and evaluation share. If its size does not follow from
those of the inputs, ONNX Runtime finds memory in its arena first, and it is copied. Two cotangents
take turns. Weights are pages of a mapped file and no part of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import onnx

from odtpack_runtime.package.manifest_device import SegmentsInfo
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX, GRADIENT_SUFFIX, RESET_NAME
from odtpack_runtime.session.segments import segment_name
from odtpack_simulator.memory.allocation import allocated_size
from odtpack_simulator.memory.kernel_memory import Shape
from odtpack_simulator.memory.memory_phases import Item
from odtpack_simulator.memory.missing_shapes import Dims
from odtpack_simulator.memory.node_names import Labels
from odtpack_simulator.memory.planning.life import Models, Pass, Run, Session


class OpenSession(Protocol):
    """Reads a model with these shapes of its inputs."""

    def __call__(self, name: str, path: Path, sizes: Mapping[str, Sequence[int]]) -> Session:
        """Return its session."""


def plan_segments(
    package: Package,
    info: SegmentsInfo,
    shapes: Mapping[str, Sequence[int]],
    threads: int,
    load: OpenSession,
) -> Models:
    """Plan the passes of a package of segments.

    Args:
        package: The package.
        info: What its manifest says of segments.
        shapes: Shape of one batch of each user input.
        threads: Intra-operator threads of the sessions.
        load: Reads a model.

    Raises:
        OdtpackError: A model does not load, or a shape does not fit.
    """
    models = _Models(package, info, threads, load)
    afresh, adding = (
        _trained(models, info, package.training_model.name, shapes, afresh=afresh)
        for afresh in (True, False)
    )
    held_out = _PassOf(models, shapes)
    for segment in info.segments:
        held_out.run(segment.forward, segment.names)
    held_out.run(package.eval_model.name, {}, ends=True)
    names = [name for name in info.files() if name != info.weights]
    training = [models.sessions[name] for name in (*names, package.training_model.name)]
    evaluation = models.sessions[package.eval_model.name]
    return Models(tuple(training), (evaluation,), afresh, adding, held_out.done())


def _trained(
    models: _Models,
    info: SegmentsInfo,
    training: str,
    shapes: Mapping[str, Sequence[int]],
    *,
    afresh: bool,
) -> Pass:
    """A batch forth and back."""
    work = _PassOf(models, shapes, {RESET_NAME: afresh})
    for segment in info.segments:
        work.run(segment.forward, segment.names)
    work.run(training, {}, ends=True)
    for segment in reversed(info.segments):
        if segment.backward is not None:
            work.run(segment.backward, segment.names, gradient=True)
    return work.done()


class _Models:
    """The models, each read once for every set of sizes.

    Attributes:
        sessions: A session of each model that was asked for, by its file.
    """

    def __init__(
        self, package: Package, info: SegmentsInfo, threads: int, load: OpenSession
    ) -> None:
        self.threads = threads
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
            graph = onnx.load(str(self._folder / file), load_external_data=False).graph
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


class _PassOf:
    """A pass as it is put together.

    Args:
        models: The models.
        shapes: Shapes of the user inputs.
        conditions: Values of Boolean inputs.
    """

    def __init__(
        self,
        models: _Models,
        shapes: Mapping[str, Sequence[int]],
        conditions: Mapping[str, bool] | None = None,
    ) -> None:
        self._models, self._conditions = models, conditions or {}
        self._known: dict[str, Shape] = {name: tuple(shape) for name, shape in shapes.items()}
        self._runs: list[Run] = []
        self._kept: dict[str, int] = {}
        self._passing: dict[str, int] = {}
        self._turn = 1

    def done(self) -> Pass:
        """The pass."""
        return Pass(tuple(self._runs), _items(self._kept), _items(self._passing))

    def run(
        self, file: str, names: Mapping[str, str], *, gradient: bool = False, ends: bool = False
    ) -> None:
        """Add a run of a segment.

        Args:
            file: Its model.
            names: What is called differently in the segment.
            gradient: It is a backward model.
            ends: It is the last one, which returns the outputs of all.
        """
        session, fed = self._models.session(file, names, self._known)
        values = session.graph.values
        sizes: dict[str, int] = {}
        for own, given in fed.items():
            sizes |= {
                dim: size
                for dim, size in zip(values[own].dims or (), given, strict=False)
                if isinstance(dim, str)
            }
        fresh: list[str] = []
        for index, own in enumerate(session.graph.outputs):
            name, value = segment_name(names, own), values[own]
            if name.endswith(GRADIENT_SUFFIX) or (ends and index == 0):
                continue  # in memory of its own
            shape: Shape | None
            returned = ends and not name.endswith(COTANGENT_SUFFIX)
            if name.endswith(COTANGENT_SUFFIX):
                shape = self._known.get(name.removesuffix(COTANGENT_SUFFIX))
                self._turn = 3 - self._turn
                called = f"gradient between segments {self._turn}"
            else:
                shape = None if returned else _sized(value.dims, sizes)
                called = f"value {name}"
            held = self._passing if returned else self._kept
            if shape is None:
                shape = value.shape
                fresh.append(own)
            if shape is not None:
                self._known[name] = shape
                nbytes = allocated_size(math.prod(shape) * value.itemsize)
                held[called] = max(held.get(called, 0), nbytes)
        plan = session.plan(self._models.threads, fresh, self._conditions)
        labels = self._models.labels(session, names, gradient=gradient)
        self._runs.append(Run(session, plan, labels))


def _sized(dims: Dims | None, sizes: Mapping[str, int]) -> Shape | None:
    """The shape that follows from the sizes of inputs; None if it does not."""
    shape = [sizes.get(dim) if isinstance(dim, str) else dim for dim in dims or (None,)]
    known = tuple(size for size in shape if size is not None)
    return known if len(known) == len(shape) else None


def _items(values: Mapping[str, int]) -> tuple[Item, ...]:
    return tuple(Item(name, nbytes, "activations") for name, nbytes in values.items())
