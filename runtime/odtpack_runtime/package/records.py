"""Records of the manifest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import numpy as np

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.files.records import (
    WHOLE_MAX,
    InvalidRecordError,
    KeyPath,
    Part,
    Rule,
    read_value,
)
from odtpack_runtime.training.schedules import ScheduleSpec

# The kinds of values that the parts of a manifest are made of.

Name = Annotated[str, Rule(minLength=1)]
Kind = Annotated[str, Rule(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
"""Name of a loss or an optimizer: a builder may have more of them."""
SHA256 = Annotated[str, Rule(pattern=r"^[0-9a-f]{64}$")]
DType = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "string",
]  # fmt: skip
NonNegativeInt = Annotated[int, Rule(minimum=0, maximum=WHOLE_MAX)]
PositiveInt = Annotated[int, Rule(minimum=1, maximum=WHOLE_MAX)]

MAX_MANIFEST_BYTES = 4 * 2**20
MAX_RANK = 32
MAX_ELEMENTS = 2**40


class ShapeRule(Rule):
    """Bounds of a shape: its rank, and the product of its fixed sizes."""

    def __init__(self, elements: int = MAX_ELEMENTS) -> None:
        super().__init__(maxItems=MAX_RANK)
        self._elements = elements

    def check(self, value: Any, path: KeyPath) -> None:
        """Check a shape."""
        super().check(value, path)
        # A size of 0 makes no other one harmless: readers multiply in their own order.
        if math.prod(max(size, 1) for size in value if isinstance(size, int)) > self._elements:
            raise InvalidRecordError(f"it must have {self._elements} elements or fewer", path)


class Float32Rule(Rule):
    """A number above 0 that is also a float32 above 0, as the optimizer takes it."""

    def __init__(self) -> None:
        super().__init__(exclusiveMinimum=0)

    def check(self, value: Any, path: KeyPath) -> None:
        """Check a number."""
        with np.errstate(all="ignore"):
            if not 0 < np.float32(value) < np.inf:
                raise InvalidRecordError("it must be a finite float32 above 0", path)


Shape = Annotated[tuple[NonNegativeInt | Name | None, ...], ShapeRule()]
FixedShape = Annotated[tuple[NonNegativeInt, ...], ShapeRule()]
Rate = Annotated[float, Float32Rule()]
"""A learning rate, or what one is multiplied by."""


# The files of a package, as its manifest lists them.


@dataclass(frozen=True, kw_only=True)
class PackageFile(Part):
    """One file of a package: path relative to the manifest with ``/``, size, SHA-256 in hex."""

    path: Name
    size_bytes: NonNegativeInt
    sha256: SHA256

    @classmethod
    def describe(cls, path: Path, **more: Any) -> Self:
        """Return the entry of a file that lies in the package's folder."""
        size = path.stat().st_size
        return cls(path=path.name, size_bytes=size, sha256=file_sha256(path), **more)


@dataclass(frozen=True, kw_only=True)
class ExtraFile(PackageFile):
    """A file that was made from the others, or says how they were made.

    Attributes:
        role: What it is.
        of: The entry of ``files`` that it was made from, or None.
        style: ORT format: optimized ahead of time for good, or with optimizations left to
            the runtime.
        platform: ORT format: processors that it was optimized for; None for all.
    """

    role: Literal[
        "ort_model",
        "inference_model",
        "operators_config",
        "operators_and_types_config",
        "recipe",
        "segment_model",
        "segment_weights",
        "decoder_model",
        "decoder_weights",
    ]
    of: Name | None = None
    style: Literal["fixed", "runtime"] | None = None
    platform: Literal["arm", "amd64"] | None = None


@dataclass(frozen=True, kw_only=True)
class PackageFiles(Part):
    """The files of a package, each of them once; the manifest and its signature are not.

    A nominal checkpoint is there if it was asked for, and the checkpoint has a second file
    if its tensors exceed what one file may hold. ``inference_template`` is the forward model
    without its parameters, which :mod:`odtpack_runtime.package.verify` appends to it.
    ``step_model`` is the training model that also updates the parameters, in packages that have
    one; a runtime may train with the training and the optimizer model all the same.
    """

    training_model: PackageFile
    eval_model: PackageFile
    optimizer_model: PackageFile
    checkpoint: PackageFile
    checkpoint_data: PackageFile | None = None
    step_model: PackageFile | None = None
    inference_template: PackageFile | None = None
    nominal_checkpoint: PackageFile | None = None
    extra: tuple[ExtraFile, ...] = ()

    def named(self) -> dict[str, PackageFile]:
        """Return the files that have an entry of their own, by its name."""
        entries = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: file for name, file in entries.items() if isinstance(file, PackageFile)}

    def all(self) -> tuple[PackageFile, ...]:
        """Return every file."""
        return (*self.named().values(), *self.extra)


# What a runtime must know beside the models: sessions, memory, segments, a check.

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

    def check(self, path: KeyPath) -> None:
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

    def check(self, path: KeyPath) -> None:
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


# How a package is trained, as its manifest says it: optimizer, clipping, groups, schedule.


@dataclass(frozen=True, kw_only=True)
class OptimizerInfo(Part):
    """Kind and hyperparameters of the optimizer, which stand beside each other in the file.

    The optimizer model holds the formula, so that a runtime needs to know neither. ``custom``
    is an optimizer that is described by its model only.
    """

    kind: Kind
    settings: dict[Name, float | bool | str] = field(default_factory=dict)

    @classmethod
    def read(cls, content: object, path: KeyPath = ()) -> Self:
        """Check what a JSON text held, and return it as a record."""
        if not isinstance(content, dict):
            raise InvalidRecordError("it must be an object", path)
        kind = {key: value for key, value in content.items() if key == "kind"}
        found = super().read(kind, path)
        settings = {
            read_value(Name, key, path): read_value(
                Rate if key == "learning_rate" else float | bool | str, value, (*path, key)
            )
            for key, value in content.items()
            if key != "kind"
        }
        return dataclasses.replace(found, settings=settings)

    def as_dict(self, *, defaults: bool = True) -> dict[str, Any]:
        """Return the content as JSON has it."""
        return {"kind": self.kind, **self.settings}


@dataclass(frozen=True, kw_only=True)
class ClipInfo(Part):
    """How gradients are clipped: by the norm of all of them, or each element by its value."""

    norm: float | None = None
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrivacyInfo(Part):
    """How gradients are made private: each sample's is clipped, and noise is added to their sum.

    Attributes:
        clip_norm: The norm that the gradient of one sample is scaled down to.
        noise_multiplier: Standard deviation of the noise as a multiple of it.
    """

    clip_norm: Annotated[float, Rule(exclusiveMinimum=0)]
    noise_multiplier: Annotated[float, Rule(minimum=0)]


@dataclass(frozen=True, kw_only=True)
class GroupInfo(Part):
    """Parameters with a learning rate and a weight decay of their own."""

    learning_rate_scale: Rate
    weight_decay: float
    parameters: tuple[Name, ...]


_COUNTS = ("warmup_steps", "total_steps", "period")


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo(Part):
    """The schedule of the learning rate that the recipe proposes.

    ``settings`` are those of the class of this kind in
    :data:`odtpack_runtime.training.schedules.SCHEDULES`; without ``total_steps`` a schedule that
    ends runs over the whole training.
    """

    kind: Name
    settings: dict[str, int | float | tuple[int, ...]] = field(default_factory=dict)
    learning_rate: Rate | None = None

    @classmethod
    def read(cls, content: object, path: KeyPath = ()) -> Self:
        """Check what a JSON text held, and return it as a record."""
        found = super().read(content, path)
        counts = {
            name: int(value)
            for name, value in found.settings.items()
            if name in _COUNTS and type(value) is float and value.is_integer()
        }
        found = dataclasses.replace(found, settings=found.settings | counts)
        try:
            ScheduleSpec(found.kind, found.settings, found.learning_rate)
        except OdtpackError as error:
            raise InvalidRecordError(error.what.rstrip("."), path) from error
        return found


@dataclass(frozen=True, kw_only=True)
class PeftInfo(Part):
    """What PEFT's files of an adapter hold beside the values, for kits that write and read them.

    Attributes:
        config: The text of ``adapter_config.json``.
        names: PEFT's name of a trained parameter, by the parameter's, where they differ.
    """

    config: Name
    names: dict[Name, Name] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdapterInfo(Part):
    """The adapter that is trained in place of the model's parameters.

    Attributes:
        kind: What it is.
        rank: ``lora``, ``dora``: rows of A and columns of B.
        alpha: ``lora``, ``dora``: B A counts ``alpha / rank`` times.
        tokens: ``prompt``: vectors before the tokens of a sequence.
        layers: The layers that it is on, as the exported module names them; of ``prompt`` the
            embedding.
        feedforward: ``ia3``: those of them whose input is scaled.
        parameters: The parameters that are the adapter's; others may be trained besides.
        absent: Layers of those that the architecture's module in transformers does not have under
            their names, where that is known: PEFT drops what is trained on them.
        transposed: Parameters that are trained besides, and that the exporter transposed.
        tied: Names in the exported module of a parameter that several of its modules share, which
            is trained besides.
        peft: How PEFT has it; None if PEFT has no place for all that is trained.
    """

    kind: Literal["lora", "dora", "ia3", "bitfit", "prompt"]
    rank: PositiveInt | None = None
    alpha: float | None = None
    tokens: PositiveInt | None = None
    layers: tuple[Name, ...]
    feedforward: tuple[Name, ...] = ()
    parameters: tuple[Name, ...]
    absent: tuple[Name, ...] = ()
    transposed: tuple[Name, ...] = ()
    tied: dict[Name, tuple[Name, ...]] = field(default_factory=dict)
    peft: PeftInfo | None = None
