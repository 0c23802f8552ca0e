"""A model in segments on a device, where one segment's weights lie at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.graph_signature import RESET_NAME, ModelMetadata, TensorSpec
from odtpack_runtime.session.segments import Part, SegmentedGraph, Segments
from odtpack_runtime.session.session import UserInputs, bind_here, owned_ortvalue, run_failed


class DeviceSegmentedGraph(UserInputs):
    """What :class:`~odtpack_runtime.session.segments.SegmentedGraph` is on the processor."""

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
        last = segments.last if training else segments.last_evaluated
        assert last is not None  # noqa: S101 - the caller looks
        backward = segments.backward if training else []
        parts = [*segments.forward, last, *(part for part in reversed(backward) if part)]
        self._parts = list(zip(parts, _last_read(parts), strict=True))
        self._memory_in: dict[str, Array] = {}
        self._memory_out: dict[str, Array] = {}

    def bind_input(self, name: str, memory: Array) -> None:
        """Let the input ``name`` of every segment that has it be the twin of ``memory``."""
        self._memory_in[name] = memory

    def bind_output(self, name: str, memory: Array) -> None:
        """Let the output ``name`` be written to the twin of ``memory``."""
        self._memory_out[name] = memory

    def feeds(self, values: Sequence[object]) -> dict[str, Array]:
        """What a run with these user inputs reads, as arrays, by name."""
        arrays = self.arrays(values)
        arrays = self.from_ortvalues(values) if arrays is None else arrays
        self._device.asked()
        pairs = zip(self.inputs, arrays, strict=True)
        return {**self._memory_in, **{spec.name: array for spec, array in pairs}}

    def __call__(self, values: Sequence[object]) -> list[Any]:
        """Run all segments once, forth and, in training, back."""
        arrays = self.arrays(values)
        if arrays is None:
            return [owned_ortvalue(each) for each in self(self.from_ortvalues(values))]
        self._device.before_run()
        given: dict[str, Any] = dict(zip((spec.name for spec in self.inputs), arrays, strict=True))
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


def _last_read(parts: Sequence[Part]) -> Iterator[set[str]]:
    """For each of some runs, the inputs that no later one reads."""
    for index, part in enumerate(parts):
        yield set(part.inputs).difference(*(later.inputs for later in parts[index + 1 :]))
