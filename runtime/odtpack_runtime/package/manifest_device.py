"""What a runtime must know beside the models: sessions, memory, segments, a check."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np

from odtpack_runtime.files.records import InvalidRecordError, Part, Path, Rule
from odtpack_runtime.package.manifest_base import (
    FixedShape,
    Name,
    NonNegativeInt,
    PositiveInt,
    Rate,
    ShapeRule,
)

OptimizationLevel = Literal["disabled", "basic", "extended", "all"]

MAX_THREADS = 256
SESSION_CONFIG: Mapping[Literal["session.force_spinning_stop"], Literal["1"]] = MappingProxyType(
    {"session.force_spinning_stop": "1"}
)
"""All that a manifest may put into the configuration of a session. It lets the threads of a
session stop to spin as soon as its run ends.

A training has a session for the training model and one for the optimizer, each with
threads of its own. By default they go on to spin for a while after a run, to be there
for the next one, and so take the cores from the other session, whose turn it is.
"""

ArenaBytes = Annotated[int, Rule(minimum=256, maximum=2**30)]
"""Of ONNX Runtime's arena: from what it rounds requests up to, to what it takes at once at most."""


@dataclass(frozen=True, kw_only=True)
class SessionInfo(Part):
    """The options of ONNX Runtime for every session of a package.

    Attributes:
        optimization_level: How far ONNX Runtime rewrites the graphs when it loads them.
        memory_pattern: Whether it plans one block for the memory of a run.
        arena: Whether it keeps freed memory for the next allocation.
        shared_allocator: Whether all sessions take their memory from one allocator of the
            environment.
        initial_chunk_size_bytes: What the shared arena takes from the system first; None for ONNX
            Runtime's choice, a MiB.
        max_dead_bytes_per_chunk: What it leaves of a free chunk that is larger than what is asked
            for, and less than twice as large; what is more becomes a chunk of its own. None for
            ONNX Runtime's choice, 128 MiB.
        prepacking: Whether constant weights are copied into a layout of their kernel's.
        threads: Threads within an operator; None for ONNX Runtime's choice.
        config: Entries of the session's configuration: those of :data:`SESSION_CONFIG` or none.
            Others could make ONNX Runtime read, write or load files that the package names.
    """

    optimization_level: OptimizationLevel
    memory_pattern: bool = True
    arena: bool = True
    shared_allocator: bool = False
    initial_chunk_size_bytes: ArenaBytes | None = None
    max_dead_bytes_per_chunk: ArenaBytes | None = None
    prepacking: bool = True
    threads: Annotated[int, Rule(minimum=1, maximum=MAX_THREADS)] | None = None
    config: dict[Literal["session.force_spinning_stop"], Literal["1"]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StateInfo(Part):
    """A vector that the optimizer keeps; ``axes`` (0 rows, 1 columns) of a matrix's only."""

    name: Name
    axes: Annotated[tuple[Literal[0, 1], ...], Rule(maxItems=2)] | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutInfo(Part):
    """The flat vectors, and how the optimizer model is run over them.

    Attributes:
        dtype: Element type of parameters, gradients and state.
        elements: Length of the vectors of parameters and gradients, with the gaps.
        run: In chunks of ``chunk_elements``, over the whole, or parameter by parameter.
        chunk_elements: Elements of a chunk.
        inputs: Inputs of the optimizer model.
        state: What the optimizer keeps, in the order of a checkpoint's ``momentum0``,
            ``momentum1`` and so on.
    """

    dtype: Literal["float32", "float64"]
    elements: NonNegativeInt
    run: Literal["chunks", "whole", "parameters"]
    chunk_elements: Annotated[int, Rule(minimum=2**10, maximum=2**30)]
    inputs: tuple[Name, ...]
    state: tuple[StateInfo, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InferenceInfo(Part):
    """Inputs and outputs of the inference template, and the parameters that it lacks."""

    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    parameters: tuple[Name, ...]


@dataclass(frozen=True, kw_only=True)
class SelfCheckInput(Part):
    """An input of the self-check; whole numbers in it are below ``bound``."""

    name: Name
    shape: Annotated[tuple[NonNegativeInt, ...], ShapeRule(2**26)]
    bound: PositiveInt | None = None


SELF_CHECK_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class SelfCheckInfo(Part):
    """Five training steps on a made-up batch, and what they gave when the package was built.

    Attributes:
        reason: Why there is no such check; everything else is then missing.
        inputs: The batch.
        learning_rate: Learning rate of the steps.
        losses: Loss of each step.
        evaluation_loss: Loss of the same batch afterwards, in evaluation mode.
        tolerances: How far each loss, and at last the evaluation loss, may be off.
    """

    reason: Name | None = None
    inputs: tuple[SelfCheckInput, ...] = ()
    learning_rate: Rate | None = None
    losses: tuple[float, ...] = ()
    evaluation_loss: float | None = None
    tolerances: tuple[float, ...] = ()

    def check(self, path: Path) -> None:
        """Check that it is complete, or says why there is none."""
        if self.reason is not None:
            good = self == SelfCheckInfo(reason=self.reason)
        else:
            good = (
                bool(self.inputs)
                and None not in (self.learning_rate, self.evaluation_loss)
                and (len(self.losses), len(self.tolerances))
                == (SELF_CHECK_STEPS, SELF_CHECK_STEPS + 1)
            )
        if not good:
            raise InvalidRecordError("it must hold a reason, or everything else", path)


FileName = Annotated[str, Rule(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}$")]


@dataclass(frozen=True, kw_only=True)
class WeightInfo(Part):
    """A weight in the file of weights, from ``offset`` on."""

    name: Name
    dtype: Literal["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
    shape: FixedShape
    offset: NonNegativeInt

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class SegmentInfo(Part):
    """A stretch of the network, which ends where the next one begins.

    Attributes:
        forward: File of the model that computes it.
        backward: File of the model that computes its gradients; None if it has none.
        names: What is called differently in this segment from how its models call it, by the
            name in the models.
    """

    forward: FileName
    backward: FileName | None = None
    names: dict[Name, Name] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SegmentsInfo(Part):
    """The models that run before the training or the evaluation model, which end the network.

    Attributes:
        weights: File of the weights; None if there are none.
        tensors: What lies in it, each where the last one ends or later.
        segments: In the order in which they compute.
    """

    weights: FileName | None = None
    tensors: tuple[WeightInfo, ...] = ()
    segments: tuple[SegmentInfo, ...]

    def files(self) -> Iterator[str]:
        """Yield the names of all files, each once."""
        models = (name for each in self.segments for name in (each.forward, each.backward))
        yield from dict.fromkeys(name for name in (self.weights, *models) if name is not None)

    def check(self, path: Path) -> None:
        """Check that weights have names and places of their own, and aligned ones."""
        end = 0
        for index, weight in enumerate(self.tensors):
            at = (*path, "tensors", index)
            if weight.offset < end or weight.offset % 64:
                raise InvalidRecordError("it must begin where the last one ends, at 64 n", at)
            end = weight.offset + weight.nbytes
        if len({weight.name for weight in self.tensors}) != len(self.tensors):
            raise InvalidRecordError("two weights have the same name", path)
        if not self.segments:
            raise InvalidRecordError("there must be a segment", path)
        if self.tensors and self.weights is None:
            raise InvalidRecordError("weights need a file", path)
