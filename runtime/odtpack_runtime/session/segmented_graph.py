"""Run a network segment by segment: models one after the other, and back in reverse.

Between two segments lies one value, which is kept from the way there for the way back; inside a
segment everything is computed a second time. Weights are inputs of the models, bound where they
lie in a file that is mapped, so that a model serves all segments that are alike and the pages of
weights are the system's to drop. They are given back to it after each run of a segment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.layout import Array, address, allocate
from odtpack_runtime.session.activation_file import ActivationFile
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX, TensorSpec
from odtpack_runtime.session.mapped_weights import MappedWeights
from odtpack_runtime.session.segments import Part, Segments
from odtpack_runtime.session.session import UserInputs, owned_ortvalue, run_failed


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
            own = self.part.inputs[name].own
            self.binding.bind_input(own, "cpu", 0, memory.dtype.type, memory.shape, place[0])
            self.bound[name] = place

    def bind_output(self, name: str, memory: Array) -> None:
        place = (address(memory), memory.shape)
        key = f"{name} "  # an accumulated gradient's input and output have one memory
        if self.bound.get(key) != place:
            own = self.part.outputs[name].own
            self.binding.bind_output(own, "cpu", 0, memory.dtype.type, memory.shape, place[0])
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
    """Segments with the face of :class:`~odtpack_runtime.session.session.BoundGraph`.

    Args:
        segments: The segments.
        training: Whether to compute gradients.
        inputs, class_count, ignored_label: As :class:`UserInputs` takes them.
        outputs: The user outputs, in the order in which they are returned.
        activations: Folder for a file in which values between segments wait for the way back;
            None for memory.

    Raises:
        OdtpackError: ``file-not-written`` if no such file can be made there.
    """

    def __init__(
        self,
        segments: Segments,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        training: bool,
        class_count: int | None = None,
        ignored_label: int | None = None,
        activations: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(inputs, class_count, ignored_label)
        self.outputs = tuple(outputs)
        self._segments = segments
        weights = segments.weights
        last = segments.last if training else segments.last_evaluated
        assert last is not None  # noqa: S101 - the caller looks
        self._forward = [_Run(part, weights) for part in segments.forward]
        self._last = _Run(last, weights)
        self._backward = [
            None if part is None else _Run(part, weights)
            for part in (segments.backward if training else ())
        ]
        self._memory: dict[str, Array] = {}
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
        self._memory[name] = memory
        for run in self._runs():
            if name in run.part.inputs:
                run.bind_input(name, memory)

    def bind_output(self, name: str, memory: Array) -> None:
        """Let the output ``name`` be written to ``memory``, from now on."""
        self._memory[f"{name} "] = memory
        for run in self._runs():
            if name in run.part.outputs:
                run.bind_output(name, memory)

    def __call__(self, values: Sequence[object]) -> list[Any]:
        """Run all segments once, forth and, in training, back.

        Raises:
            OdtpackError: As :class:`UserInputs`; ``run-failed`` with ONNX Runtime's reason.
        """
        arrays = self.arrays(values)
        if arrays is None:
            return [owned_ortvalue(each) for each in self(self.from_ortvalues(values))]
        given = dict(zip((spec.name for spec in self.inputs), arrays, strict=True))
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
            if f"{name} " in self._memory or name == self.outputs[0].name:
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
