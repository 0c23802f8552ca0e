"""A build on its way: what runs it, what is built for it, its graphs, the step of its optimizer."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import onnx_ir as ir

from odtpack import choices, losses
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Ops, dims_of
from odtpack.optimizers import Clip, Group, GroupRule, Optimizer, optimizer_model, resolve_groups
from odtpack.optimizers.common.base import memory_order
from odtpack.optimizers.common.model import NO_CLIP
from odtpack.ort import kernel_needs, webgpu
from odtpack.package.parameters import Parameter, master_type
from odtpack.passes import aliases
from odtpack.passes.gradient_buffers import accumulate
from odtpack.spec import BuildSpec, MemorySpec
from odtpack_runtime.package.manifest import AdapterInfo, SegmentInfo
from odtpack_runtime.training.optimizer_contract import Privacy
from odtpack_runtime.training.schedules import ScheduleSpec

if TYPE_CHECKING:
    from odtpack.memory.compile import MemoryReport


@dataclasses.dataclass(frozen=True)
class LossInfo:
    """A package's entries about its loss."""

    name: str = "none"  # name of the loss; "none" if the model came with one, "custom" for a block
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)  # its options in force
    # role of each graph input that is one of its targets
    roles: Mapping[str, losses.TargetRole] = dataclasses.field(default_factory=dict)
    # what a runtime must know to check labels, by input: `class_count`, `ignore_index`
    labels: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    fixed: tuple[str, ...] = ()  # parameters through which it lets no gradient
    prediction: str = ""  # of a loss that the model came with: the value to return for evaluation


@dataclasses.dataclass(frozen=True)
class InferenceTemplate:
    """The model, the names of its inputs and outputs, and of the parameters that it lacks."""

    model: ir.Model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


Remark = Callable[[str], None]
"""Takes a sentence about what was done or assumed without being asked for."""


def silent(_sentence: str) -> None:
    """Take a remark and drop it."""


Accumulator = Callable[[ir.Value, ir.Value, ir.Value], ir.Value]
"""Takes a parameter, its gradient and the buffer; returns what the training model returns."""


class Backend:
    """Stock ONNX Runtime, whose callers bind one buffer as input and output."""

    runtime: ClassVar[choices.Runtime] = choices.STOCK  # its name
    # Whether a GPU runs the models: it waits for the condition of an If, and its kernels do not
    # shift bits.
    on_gpu: ClassVar[bool] = False
    # Passes over a training graph, after its gradient, that write operators of its own.
    passes: ClassVar[tuple[Callable[[Ops, ir.Graph], None], ...]] = ()

    @property
    def is_stock(self) -> bool:
        """Whether this ONNX Runtime runs the models, and the runtimes of this project."""
        return self.runtime != choices.ORT_TRAINING

    def lower(self, model: ir.Model) -> ir.Model:
        """Write a finished model with operators that it has kernels for."""
        return model

    def require_opset(self, opset: int) -> None:
        """Check that the runtime loads an opset; stock releases for all of them exist."""

    def oldest_runtime(self, models: Iterable[ir.Model]) -> kernel_needs.Need:
        """The oldest release that runs all of some models."""
        return kernel_needs.oldest_runtime(models)

    def accumulator(self, op: Ops, reset: ir.Value) -> Accumulator:
        """How gradients are accumulated, see :mod:`odtpack.passes.gradient_buffers`."""
        flag = op.squeeze(reset, 0)

        def write(parameter: ir.Value, gradient: ir.Value, buffer: ir.Value) -> ir.Value:
            out = accumulate(op, gradient, buffer, flag, branches=not self.on_gpu)
            out.type, out.shape = parameter.type, parameter.shape
            aliases.verify(op.graph, buffer, out)
            return out

        return write

    def step(self, update: OptimizerStep) -> OptimizerStep:
        """The optimizer step as the runtime makes it."""
        return update


STOCK = Backend()


class WebGpu(Backend):
    """Stock ONNX Runtime with its WebGPU provider; the models run on the processor as well."""

    runtime: ClassVar[choices.Runtime] = choices.WEBGPU
    on_gpu: ClassVar[bool] = True

    def lower(self, model: ir.Model) -> ir.Model:
        """Write what the provider lacks with what it has."""
        return webgpu.lower(model)


class OptimizerStep(Protocol):
    """What an optimizer step does: a formula of the packager's, or a model that others write."""

    def describe(self) -> dict[str, Any]:
        """The parts of a manifest that describe it."""

    def model(self, graphs: Graphs) -> ir.Model:
        """The optimizer model for the parameters of a training model."""

    def step_model(self, graphs: Graphs) -> ir.Model | None:
        """The training model that also makes the step; None if there is no such model."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A loaded model, the specification of its build, and what that resolves to for this model."""

    model: ir.Model  # as load_model returns it
    train: tuple[str, ...]  # names of the initializers to train
    frozen: tuple[str, ...]  # names of the initializers that become inputs, but are not trained
    loss: losses.Loss | None  # loss to attach, or None if the model's first output is the loss
    # what is asked for, unchanged
    spec: BuildSpec = dataclasses.field(default_factory=lambda: BuildSpec(prediction=False))
    # formula, or what writes an optimizer model; None for no optimizer
    optimizer: Optimizer | OptimizerStep | None = None
    attached: LossInfo | None = None  # what is known of a loss that the model already ends in
    # names of inputs whose gradients the training model accumulates, like those of parameters
    input_gradients: tuple[str, ...] = ()
    # rows of parameters that stay as they are, by name
    frozen_rows: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    # for which shapes, and how far, the training model's memory is made small; None to leave it as
    # it is differentiated
    memory: MemorySpec | None = dataclasses.field(default_factory=MemorySpec)
    # the model with the inputs that are settled for training, for inference; None if it is `model`
    served: ir.Model | None = None
    # the manifest's entry about the model's adapter
    adapter: AdapterInfo | None = None
    decoder: ir.Model | None = None  # the model for generation, in packages of segments
    backend: Backend = STOCK  # what runs the package
    prefix: str = ""  # start of every file name
    # shared library with custom operators, for the conversion to ORT format
    custom_op_library: Path | None = None


@dataclasses.dataclass(frozen=True)
class Segments:
    """The models that compute a network up to its last segment, see :mod:`.segments.build`."""

    models: Mapping[str, ir.Model]  # each model by its name in the package
    plan: tuple[SegmentInfo, ...]  # which of them run for which segment, in order
    # weights outside of the models, by name, in the order in which they are stored
    tensors: Mapping[str, ir.TensorProtocol]
    inputs: tuple[ir.Value, ...]  # what a caller feeds
    decoder: ir.Model | None = None  # the model for generation that takes the adapter as inputs


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The training and evaluation models, the parameters that both take, and their loss."""

    # `task`: what they were made for. `scores`: the output of the evaluation model that has the
    # scores of classes, on axis 1; "" if there is none. `inference` is the forward model without
    # its parameters; None if it computes nothing but its loss. `memory`: what was done to keep the
    # training model's memory small; None if nothing was. `segments`: what runs before `training`
    # and `evaluation`, which are then the last segment.

    training: ir.Model
    evaluation: ir.Model
    parameters: tuple[Parameter, ...]
    task: Task
    loss: LossInfo = dataclasses.field(default_factory=LossInfo)
    scores: str = ""
    inference: InferenceTemplate | None = None
    memory: MemoryReport | None = None
    segments: Segments | None = None

    @property
    def opset(self) -> int:
        """Opset of the training model."""
        return self.training.graph.opset_imports[""]


# What happens around an optimizer's formula: clipping, parameter groups, a schedule, privacy.


@dataclasses.dataclass(frozen=True)
class ResolvedUpdate:
    """An optimizer and an update, applied to the parameters of one model."""

    optimizer: Optimizer
    clip: Clip
    groups: tuple[Group, ...]
    schedule: ScheduleSpec | None
    privacy: Privacy | None = None

    def model(self, graphs: Graphs) -> ir.Model:
        """The optimizer model; see :func:`odtpack.optimizers.optimizer_model`."""
        return optimizer_model(
            self.optimizer,
            graphs.opset,
            clip=self.clip,
            groups=self.groups,
            privacy=self.privacy,
            dtype=master_type(graphs.parameters),
        )

    def step_model(self, graphs: Graphs) -> ir.Model | None:
        """The training model that updates each parameter with its gradient."""
        # Not where a step needs all gradients at once (clipping by their norm, privacy, Adafactor),
        # those of several batches, or those of inputs.
        from odtpack.step.model import can_update, step_model

        task = graphs.task
        if task.input_gradients or task.spec.accumulation_steps > 1 or self.privacy is not None:
            return None
        if not task.backend.is_stock or not can_update(self.optimizer, self.clip):
            return None
        names = {p.name for p in graphs.parameters}
        return step_model(
            graphs.training, names, self.optimizer, clip=self.clip, groups=self.groups,
            branches=not task.backend.on_gpu, memory=task.memory,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """The parts of a manifest that describe it."""
        content: dict[str, Any] = {
            "optimizer": {"kind": self.optimizer.kind, **self.optimizer.settings()},
            "groups": [dataclasses.asdict(group) for group in self.groups],
        }
        if self.clip != NO_CLIP:
            content["clip"] = dataclasses.asdict(self.clip)
        if self.privacy is not None:
            content["privacy"] = dataclasses.asdict(self.privacy)
        if self.schedule is not None:
            content["schedule"] = dataclasses.asdict(self.schedule)
        return content


def resolve_update(graphs: Graphs) -> OptimizerStep | None:
    """Apply the optimizer, and what goes around its formula, to the parameters of a model."""
    optimizer, spec, backend = graphs.task.optimizer, graphs.task.spec, graphs.task.backend
    if not isinstance(optimizer, Optimizer):
        return None if optimizer is None else backend.step(optimizer)
    clip = Clip(spec.clip_norm, spec.clip_value)
    privacy = None
    if spec.privacy_clip is not None:
        noise = 1.0 if spec.privacy_noise is None else spec.privacy_noise
        privacy = Privacy(spec.privacy_clip, noise)
        _check_private(clip, graphs)
    ranks = {p.name: len(p.tensor.shape) for p in graphs.parameters if p.role == "trainable"}
    rules = [GroupRule(*group) for group in spec.groups]
    decay = optimizer.weight_decay
    called = {p.name: p.called for p in graphs.parameters}
    groups = resolve_groups(ranks, rules, decay, decay_vectors=spec.decay_vectors, called=called)
    if len(groups) > 1:
        graphs.training.metadata_props["odtpack.parameter_order"] = memory_order(groups)
    elif groups and groups[0] == Group(1.0, decay, tuple(ranks)):
        groups = ()
    return backend.step(ResolvedUpdate(optimizer, clip, groups, spec.schedule, privacy))


def _check_private(clip: Clip, graphs: Graphs) -> None:
    """Check that gradients of single samples can be had, and that nothing else reveals samples."""
    parameters = {parameter.name for parameter in graphs.parameters}
    batches = {
        value.name: (dims_of(value) or (0,))[0]  # the first axis
        for value in graphs.evaluation.graph.inputs
        if value.name not in parameters
    }
    fixed = [name for name, size in batches.items() if isinstance(size, int) and size != 1]
    statistics = [p.name for p in graphs.parameters if p.role == "state"]
    problem = hint = ""
    if not graphs.task.backend.is_stock:
        problem = "private gradients need stock ONNX Runtime"
        hint = "leave --target out"
    elif statistics:
        problem = f"{statistics[0]!r}, a state or statistic of whole batches, has no noise"
        hint = "use group or layer normalization, freeze the batch normalizations, carry no state"
    elif fixed:
        problem = f"the model's input {fixed[0]!r} does not take single samples"
        hint = "export the model with a free batch size"
    elif graphs.task.spec.accumulation_steps > 1:
        problem = "a private step goes through its batch sample by sample as it is"
        hint = "leave --accumulate out"
    elif clip != NO_CLIP:
        problem = "gradients are clipped sample by sample, and not a second time"
        hint = "leave --clip-norm and --clip-value out"
    if problem:
        raise OdtpackError("private-training", problem, hint=hint)


class _Collector:
    """What is known of the collector."""

    # `left_behind`: whether an earlier graph may still wait to be freed.
    # `frozen`: Whether the program froze objects of its own. It is asked until it has: to count
    # them takes as long as a small build.

    left_behind = False
    frozen = False


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running inside a ``with`` block, or a function so decorated."""
    # A graph is hundreds of thousands of small objects that all stay alive. Each collection walked
    # through them to find nothing: a third of the time of a build, which was not linear for that
    # reason. What is left is handed to the collector as old objects: as young ones all would be
    # walked through at the next allocation, a fifth of the time of a build. A program that froze
    # its own objects keeps them frozen; the build's cannot be told from them and stay young.
    was_enabled = gc.isenabled()
    if was_enabled and _Collector.left_behind:
        gc.collect()
        _Collector.left_behind = False
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _Collector.frozen = _Collector.frozen or gc.get_freeze_count() > 0
            if not _Collector.frozen:
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
                _Collector.left_behind = True
            gc.enable()
