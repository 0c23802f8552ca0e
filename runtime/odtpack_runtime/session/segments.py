"""A model that runs in segments, on the processor or on a device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array, address, allocate
from odtpack_runtime.files.records import InvalidRecordError
from odtpack_runtime.package.records import SegmentInfo, SegmentsInfo
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.graph_signature import (
    BUFFER_SUFFIX,
    COTANGENT_SUFFIX,
    GRADIENT_SUFFIX,
    RESET_NAME,
    ModelMetadata,
    TensorSpec,
)
from odtpack_runtime.session.mapped_weights import ActivationFile, MappedWeights, segments_invalid
from odtpack_runtime.session.options import manifest_beside
from odtpack_runtime.session.session import UserInputs, bind_here, open_session, run_failed

# The models of a network in segments: their sessions, and what inputs and outputs are called.


class Segments:
    """The sessions of a package's segments, and what their inputs and outputs are called."""

    # `kept`: memory of values between segments, which training and evaluation share.
    # `info`: what that says of segments.

    def __init__(
        self,
        training: Path,
        info: SegmentsInfo,
        options: onnxruntime.SessionOptions,
        evaluation: Path | None,
        inputs: Sequence[str],
        device: Device | None = None,
    ) -> None:
        self.where = str(training)
        folder = training.parent
        self.weights = MappedWeights(
            None if info.weights is None else folder / info.weights, info.tensors
        )
        names = [name for name in info.files() if name != info.weights]
        prefix = options.profile_file_prefix

        def opened(model: Path) -> onnxruntime.InferenceSession:
            if options.enable_profiling:  # sessions of one second would share a file
                options.profile_file_prefix = f"{prefix}.{model.stem}"
            return open_session(model, options, device)

        sessions = {name: opened(folder / name) for name in names}
        self.training = opened(training)
        self.evaluation = None if evaluation is None else opened(evaluation)
        options.profile_file_prefix = prefix
        self.forward = [Part(sessions[each.forward], each) for each in info.segments]
        last = SegmentInfo(forward=training.name)
        self.last = Part(self.training, last)
        self.last_evaluated = None if self.evaluation is None else Part(self.evaluation, last)
        self.backward = [
            None if each.backward is None else Part(sessions[each.backward], each)
            for each in info.segments
        ]
        self.inputs = tuple(inputs)
        self.kept: dict[str, Array] = {}
        self._check()

    def _check(self) -> None:
        """Check that every segment reads what there is, and weights as they are stored."""
        made: set[str] = set(self.inputs)
        for forward, backward in zip(self.forward, self.backward, strict=True):
            for part in (forward, *(() if backward is None else (backward,))):
                for name, node in part.inputs.items():
                    if name in self.weights:
                        self._check_weight(name, node)
                    elif name in made and name.endswith(COTANGENT_SUFFIX):
                        raise segments_invalid(f"'{name}' is a name of a gradient", self.where)
            for name in forward.outputs:
                if name in made or name in self.weights:
                    raise segments_invalid(f"'{name}' is made twice", self.where)
                made.add(name)
        for part in (self.last, self.last_evaluated):
            for name, node in () if part is None else part.inputs.items():
                if name in self.weights:
                    self._check_weight(name, node)

    def check_inputs(self, found: Iterable[Sequence[TensorSpec]]) -> None:
        """Check that what no segment makes, no parameter is and no weight, a caller feeds."""
        for spec in (spec for specs in found for spec in specs):
            if spec.name not in self.inputs:
                raise segments_invalid(f"nothing gives '{spec.name}' to a segment", self.where)

    def _check_weight(self, name: str, node: Any) -> None:
        info = self.weights[name]
        kind = TensorSpec.of_node(node, self.where).dtype.name
        if kind != info.dtype or tuple(node.shape) != info.shape:
            raise segments_invalid(
                f"a model takes '{name}' as {node.type}{node.shape}, and the file holds "
                f"{info.dtype}{list(info.shape)}",
                self.where,
            )

    def end(self, *, training: bool) -> Part:
        """The part that ends the network; for evaluation only where there is such a model."""
        found = self.last if training else self.last_evaluated
        assert found is not None  # noqa: S101 - the caller looks
        return found

    def nodes(self, *, training: bool) -> tuple[list[Any], list[Any]]:
        """Inputs and outputs of the whole, as of one model that would be all of them."""
        # Returns the user inputs, the parameters, and for training their buffers; the outputs of
        # the last segment, and for training all gradients.
        ends = self.end(training=training)
        parts = [*self.forward, *(b for b in self.backward if b is not None and training), ends]
        given = {name for part in self.forward for name in part.outputs}
        found = {name: node for part in parts for name, node in part.inputs.items()}
        user = [found[name] for name in self.inputs if name in found]
        own = [
            node
            for name, node in found.items()
            if not (name in given or name in self.weights or name in self.inputs)
            and not name.endswith(COTANGENT_SUFFIX)
        ]
        own.sort(key=lambda node: node.name.endswith((BUFFER_SUFFIX, RESET_NAME)))
        gradients = (GRADIENT_SUFFIX, COTANGENT_SUFFIX)
        outputs = [node for name, node in ends.outputs.items() if not name.endswith(gradients)]
        if training:
            outputs += [
                node
                for part in parts
                for name, node in part.outputs.items()
                if name.endswith(GRADIENT_SUFFIX)
            ]
        return [*user, *own], outputs


class Part:
    """A session as one segment sees it, with the names that inputs and outputs have there."""

    def __init__(self, session: onnxruntime.InferenceSession, info: SegmentInfo) -> None:
        self.session = session
        self.inputs = _renamed(session.get_inputs(), info)
        self.outputs = _renamed(session.get_outputs(), info)


def segment_name(names: Mapping[str, str], own: str) -> str:
    """Return what a segment calls an input or output of its model."""
    # `own`: the name in the model; what belongs to a name (its gradient) goes with it.
    for suffix in (COTANGENT_SUFFIX, BUFFER_SUFFIX, GRADIENT_SUFFIX):
        if own.endswith(suffix):
            stem = own.removesuffix(suffix)
            return names.get(stem, stem) + suffix
    return names.get(own, own)


def _renamed(nodes: Iterable[Any], info: SegmentInfo) -> dict[str, Any]:
    found = ((segment_name(info.names, node.name), node) for node in nodes)
    return {
        name: SimpleNamespace(name=name, own=node.name, type=node.type, shape=node.shape)
        for name, node in found
    }


def segments_beside(model: str | os.PathLike[str]) -> tuple[SegmentsInfo, tuple[str, ...]] | None:
    """Return the segments of the manifest beside a training model, and its user inputs."""
    return segments_of(manifest_beside(Path(model)), Path(model))


def segments_of(
    content: dict[str, Any] | None, model: Path
) -> tuple[SegmentsInfo, tuple[str, ...]] | None:
    """Return the segments in the content of a manifest, and its user inputs."""
    if content is None or content.get("segments") is None:
        return None
    try:
        info = SegmentsInfo.read(content["segments"], ("segments",))
        inputs = tuple(str(each["name"]) for each in content["inputs"])
    except (InvalidRecordError, LookupError, TypeError) as error:
        raise segments_invalid(str(error), str(model)) from error
    return info, inputs


# Run a network segment by segment: models one after the other, and back in reverse.
#
# Between two segments lies one value, which is kept from the way there for the way back; inside a
# segment everything is computed a second time. Weights are inputs of the models, bound where they
# lie in a file that is mapped, so that one model serves all equal segments and the pages of
# weights are the system's to drop. They are given back to it after each run of a segment.


class _Run:
    """One run of a segment: what never changes is bound once."""

    def __init__(self, part: Part, weights: MappedWeights) -> None:
        self.part = part
        self.binding = part.session.io_binding()
        self.bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.order: dict[str, int] = {}  # outputs come back in that in which they are bound first
        used = [name for name in part.inputs if name in weights]
        for name in used:
            weights.bind(self.binding, part.inputs[name].own, name)
        self.pages = weights.range_of(used)

    def bind_input(self, name: str, memory: Array) -> None:
        place = (address(memory), memory.shape)
        if self.bound.get(name) != place:
            bind_here(self.binding.bind_input, self.part.inputs[name].own, memory)
            self.bound[name] = place

    def bind_output(self, name: str, memory: Array) -> None:
        place = (address(memory), memory.shape)
        key = f"{name} "  # an accumulated gradient's input and output have one memory
        if self.bound.get(key) != place:
            bind_here(self.binding.bind_output, self.part.outputs[name].own, memory)
            self.bound[key] = place
            self.order.setdefault(key, len(self.order))

    def let_allocate(self, name: str) -> None:
        """Let ONNX Runtime find memory for an output."""
        self.binding.bind_output(self.part.outputs[name].own)
        self.order.setdefault(f"{name} ", len(self.order))

    def result(self, name: str) -> Array:
        """Return an output that ONNX Runtime found memory for; the next run may replace it."""
        result: Array = self.binding.get_outputs()[self.order[f"{name} "]].numpy()
        return result

    def __call__(self) -> None:
        try:
            self.part.session.run_with_iobinding(self.binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise run_failed(error) from error


class SegmentedGraph(UserInputs):
    """Segments with the face of :class:`~odtpack_runtime.session.session.BoundGraph`."""

    # `activations`: folder for a file in which values between segments wait for the way back; None
    # for memory.

    def __init__(
        self,
        segments: Segments,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        metadata: ModelMetadata | None = None,
        *,
        training: bool,
        activations: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(inputs, outputs, metadata)
        self._segments = segments
        weights = segments.weights
        last = segments.end(training=training)
        self._forward = [_Run(part, weights) for part in segments.forward]
        self._last = _Run(last, weights)
        self._backward = [
            None if part is None else _Run(part, weights)
            for part in (segments.backward if training else ())
        ]
        self._turn = False
        self._file: ActivationFile | None = None
        self._waiting: set[str] = set()  # names of what the file takes
        if training and activations is not None:
            self._file = ActivationFile(activations)
            self._waiting = self._between()
        self._loss = np.zeros((), self.outputs[0].dtype)
        self._last.bind_output(self.outputs[0].name, self._loss)

    def bind_input(self, name: str, memory: Array) -> None:
        """Let the input ``name`` of every segment that has it be ``memory``, from now on."""
        self._memory_in[name] = memory
        for run in self._runs():
            if name in run.part.inputs:
                run.bind_input(name, memory)

    def bind_output(self, name: str, memory: Array) -> None:
        """Let the output ``name`` be written to ``memory``, from now on."""
        self._memory_out[name] = memory
        for run in self._runs():
            if name in run.part.outputs:
                run.bind_output(name, memory)

    def _results(self, arrays: Sequence[Array]) -> list[Any]:
        given = self._named(arrays)
        file = self._file
        if file is not None:
            file.clear()
        for run in self._forward:
            self._run(run, given)
            if file is not None:
                for name in self._waiting.intersection(run.part.outputs):
                    file.write(name, given[name])
        fresh = [spec.name for spec in self.outputs[1:]]
        self._run(self._last, given, fresh)
        results = [self._loss.copy(), *(given[name] for name in fresh)]
        for back in reversed(self._backward):
            if back is not None:
                if file is not None:
                    for name in self._waiting.intersection(back.part.inputs):
                        file.read(name, given[name])
                self._run(back, given)
        return results

    def _between(self) -> set[str]:
        """Names of what one segment hands to the next, and reads again on the way back."""
        reads = [name for run in (*self._forward, self._last) for name in run.part.inputs]
        again = [run.part for run in self._backward if run is not None]
        return {
            name
            for part in again
            for name in part.inputs
            if f"{name}{COTANGENT_SUFFIX}" in part.outputs and reads.count(name) == 1
        }

    def _runs(self) -> Iterator[_Run]:
        yield from self._forward
        yield self._last
        yield from (run for run in self._backward if run is not None)

    def _run(self, run: _Run, given: dict[str, Array], fresh: Sequence[str] = ()) -> None:
        """Run a segment; ``given`` takes what it makes."""
        sizes: dict[str, int] = {}
        for name, node in run.part.inputs.items():
            if name in given:
                run.bind_input(name, given[name])
                dims = zip(node.shape, given[name].shape, strict=bool(node.shape))
                sizes |= {dim: size for dim, size in dims if isinstance(dim, str)}
        unknown = []
        for name, node in run.part.outputs.items():
            if name in self._memory_out or name == self.outputs[0].name:
                continue
            shape = None if name in fresh else _shape(name, node, sizes, given)
            if shape is None:
                run.let_allocate(name)
                unknown.append(name)
            else:
                dtype = TensorSpec.of_node(node, self._segments.where).dtype
                given[name] = self._room(name, shape, dtype)
                run.bind_output(name, given[name])
        with self._segments.weights.in_use(run.pages):
            run()
        for name in unknown:
            result = run.result(name)
            if name in fresh:
                given[name] = np.array(result)
            else:
                given[name] = self._room(name, result.shape, result.dtype)
                given[name][...] = result
            run.let_allocate(name)  # which gives the memory of the last run back

    def _room(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory for a value between segments, the same as the last time if its size is."""
        key = name
        if name.endswith(COTANGENT_SUFFIX) or name in self._waiting:
            # The next run reads it, and makes the next one: two take turns.
            self._turn = not self._turn
            key = f"{COTANGENT_SUFFIX if name.endswith(COTANGENT_SUFFIX) else ''} {self._turn}"
        kept = self._segments.kept.get(key)
        if kept is None or kept.shape != shape or kept.dtype != dtype:
            kept = allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
            self._segments.kept[key] = kept
        return kept


def _shape(
    name: str, node: Any, sizes: Mapping[str, int], given: Mapping[str, Array]
) -> tuple[int, ...] | None:
    """Shape of what a run makes, as far as it follows from those of its inputs."""
    like = given.get(name.removesuffix(COTANGENT_SUFFIX))
    if name.endswith(COTANGENT_SUFFIX) and like is not None:
        return like.shape
    if not node.shape or not all(isinstance(dim, int) or dim in sizes for dim in node.shape):
        return None
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in node.shape)


class DeviceSegmentedGraph(UserInputs):
    """What :class:`SegmentedGraph` is on the processor."""

    # A binding copies a segment's weights there from the mapped file, as they are stored, and is
    # gone after the run, with the copies. Values between segments stay there as long as one reads
    # them.

    def __init__(
        self,
        segments: Segments,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        metadata: ModelMetadata | None = None,
        *,
        device: Device,
        training: bool,
    ) -> None:
        super().__init__(inputs, outputs, metadata)
        self._device = device
        self._segments = segments
        self._weights = segments.weights
        last = segments.end(training=training)
        backward = segments.backward if training else []
        parts = [*segments.forward, last, *(part for part in reversed(backward) if part)]
        self._parts = [  # each with the inputs that no later one reads
            (part, set(part.inputs).difference(*(later.inputs for later in parts[place:])))
            for place, part in enumerate(parts, 1)
        ]

    def bind_input(self, name: str, memory: Array) -> None:
        """Let the input ``name`` of every segment that has it be the twin of ``memory``."""
        self._memory_in[name] = memory

    def bind_output(self, name: str, memory: Array) -> None:
        """Let the output ``name`` be written to the twin of ``memory``."""
        self._memory_out[name] = memory

    def _results(self, arrays: Sequence[Array]) -> list[Any]:
        self._device.before_run()
        given = self._named(arrays)
        for part, read in self._parts:
            self._run(part, given)
            for name in read:
                given.pop(name, None)
        self._device.ran = True
        return [given[spec.name].numpy() for spec in self.outputs]

    def once(
        self, feeds: Mapping[str, Array], processor: Segments | None = None
    ) -> dict[str, Array]:
        """What a training run of these values makes, or the processor's segments; by name."""
        ends = self.inputs, self.outputs
        graph: DeviceSegmentedGraph | SegmentedGraph
        device = Device(self._device.name)  # its twins go with it
        if processor is None:
            graph = DeviceSegmentedGraph(self._segments, *ends, device=device, training=True)
        else:
            graph = SegmentedGraph(processor, *ends, training=True)
        made = {name: np.zeros_like(memory) for name, memory in self._memory_out.items()}
        for name in self._memory_in:
            graph.bind_input(name, feeds[name])
        for name, memory in made.items():
            graph.bind_output(name, memory)
        results = graph([feeds[spec.name] for spec in self.inputs])
        device.asked()
        return dict(zip((spec.name for spec in self.outputs), results, strict=True)) | made

    def _run(self, part: Part, given: dict[str, Any]) -> None:
        """Run a segment; ``given`` takes what it makes."""
        binding = part.session.io_binding()
        used = [name for name in part.inputs if name in self._weights]
        made = [name for name in part.outputs if name not in self._memory_out]
        returned = {spec.name for spec in self.outputs}
        try:
            with self._weights.in_use(self._weights.range_of(used)):
                for name, node in part.inputs.items():
                    self._bind_input(binding, name, node.own, given)
                for name in made:
                    where = ("cpu", 0) if name in returned else self._device.place
                    binding.bind_output(part.outputs[name].own, *where)
                for name, memory in self._memory_out.items():
                    if name in part.outputs:
                        self._device.bind_output(binding, part.outputs[name].own, memory)
                part.session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise run_failed(error) from error
        # A result keeps its binding, and with it the weights: a copy does not.
        for name, value in zip(made, binding.get_outputs(), strict=False):
            given[name] = value if name in returned else self._device.copied(value)

    def _bind_input(self, binding: Any, name: str, own: str, given: Mapping[str, Any]) -> None:
        if name in self._weights:
            self._weights.bind(binding, own, name)
            return
        value = given[name] if name in given else self._memory_in[name]
        if not isinstance(value, np.ndarray):
            binding.bind_ortvalue_input(own, value)
        elif name in given or name == RESET_NAME:
            bind_here(binding.bind_input, own, value)
        else:
            self._device.bind_input(binding, own, value)
