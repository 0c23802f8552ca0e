"""What runs a package and its optimizer step: clipping, groups, a schedule around a formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import onnx_ir as ir

from odtpack import choices
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops
from odtpack.optimizers import Clip, Group, GroupRule, Optimizer, optimizer_model, resolve_groups
from odtpack.optimizers.common.groups import memory_order
from odtpack.optimizers.common.model import NO_CLIP
from odtpack.ort import kernel_needs
from odtpack.passes import aliases
from odtpack.passes.accumulate import OUTPUT_SUFFIX, accumulate
from odtpack_runtime.training.private import Privacy
from odtpack_runtime.training.schedules import ScheduleSpec

if TYPE_CHECKING:
    from odtpack.package.parameters import Parameter
    from odtpack.package.training import Graphs, Task

Accumulator = Callable[[ir.Value, ir.Value, ir.Value], ir.Value]
"""Takes a parameter, its gradient and the buffer; returns what the training model returns."""


class Backend:
    """Stock ONNX Runtime, whose callers bind one buffer as input and output.

    Attributes:
        runtime: Its name.
    """

    runtime: ClassVar[choices.Runtime] = choices.STOCK

    @property
    def is_stock(self) -> bool:
        """Whether this ONNX Runtime runs the models, and the runtimes of this project."""
        return self.runtime == choices.STOCK

    def require_opset(self, opset: int) -> None:
        """Check that the runtime loads an opset; stock releases for all of them exist."""

    def oldest_runtime(self, models: Iterable[ir.Model]) -> kernel_needs.Need:
        """The oldest release that runs all of some models."""
        return kernel_needs.oldest_runtime(models)

    def lower_batch_norms(self, op: Ops, graph: ir.Graph) -> None:
        """Replace batch normalizations in training mode by an operator of the runtime's own."""

    def accumulator(self, op: Ops, reset: ir.Value) -> Accumulator:
        """How gradients are accumulated, see :mod:`odtpack.passes.accumulate`."""
        flag = op.squeeze(reset, 0)

        def write(parameter: ir.Value, gradient: ir.Value, buffer: ir.Value) -> ir.Value:
            out = accumulate(op, gradient, buffer, flag)
            out.type, out.shape = parameter.type, parameter.shape
            aliases.verify(op.graph, buffer, out)
            return out

        return write

    def optimizer_model(self, step: OptimizerStep, graphs: Graphs) -> ir.Model:
        """The model that makes an optimizer step."""
        return step.model(graphs)


STOCK = Backend()


def optimization_level(graph: ir.Graph, parameters: Sequence[Parameter]) -> str:
    """The level of ONNX Runtime that suits a training graph, for the runtime to use."""
    if any(parameter.dtype == ir.DataType.DOUBLE for parameter in parameters):
        # Beyond it scales become attributes of fused products, which are float32.
        return "basic"
    return "all" if any(_has_constant_weight(node) for node in graph) else "extended"


def _has_constant_weight(node: ir.Node) -> bool:
    """Whether ONNX Runtime would repack a convolution's weight at its highest level."""
    if node.op_type != "Conv" or len(node.inputs) < 2:
        return False
    weight = node.inputs[1]
    return weight is not None and weight.is_initializer()


class OptimizerStep(Protocol):
    """What an optimizer step does: a formula of the packager's, or a model that others write."""

    def describe(self) -> dict[str, Any]:
        """The parts of a manifest that describe it."""

    def model(self, graphs: Graphs) -> ir.Model:
        """The optimizer model for the parameters of a training model."""

    def step_model(self, graphs: Graphs) -> ir.Model | None:
        """The training model that also makes the step; None if there is no such model."""


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
            dtype=graphs.master,
        )

    def step_model(self, graphs: Graphs) -> ir.Model | None:
        """The training model that updates each parameter with its gradient."""
        from odtpack.step.model import can_update, step_model

        names = {p.name for p in graphs.parameters}
        wanted = any(
            str(value.name).removesuffix(OUTPUT_SUFFIX) not in names
            for value in graphs.training.graph.outputs
            if str(value.name).endswith(OUTPUT_SUFFIX)
        )
        if wanted or graphs.task.spec.accumulation_steps > 1 or self.privacy is not None:
            return None
        if not graphs.backend.is_stock or not can_update(self.optimizer, self.clip):
            return None
        return step_model(
            graphs.training, names, self.optimizer, clip=self.clip, groups=self.groups
        )

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


def resolve_update(task: Task, graphs: Graphs) -> OptimizerStep | None:
    """Apply the optimizer, and what goes around its formula, to the parameters of a model."""
    optimizer, spec = task.optimizer, task.spec
    if not isinstance(optimizer, Optimizer):
        return optimizer
    clip = Clip(spec.clip_norm, spec.clip_value)
    privacy = None
    if spec.privacy_clip is not None:
        privacy = Privacy(spec.privacy_clip, spec.privacy_noise)
        _check_private(clip, graphs)
    ranks = {
        parameter.name: len(parameter.tensor.shape)
        for parameter in graphs.parameters
        if parameter.role == "trainable"
    }
    rules = [GroupRule(*group) for group in spec.groups]
    decay = optimizer.weight_decay
    groups = resolve_groups(ranks, rules, decay, decay_vectors=spec.decay_vectors)
    if len(groups) > 1:
        graphs.training.metadata_props["odtpack.parameter_order"] = memory_order(groups)
    elif groups and groups[0] == Group(1.0, decay, tuple(ranks)):
        groups = ()
    return ResolvedUpdate(optimizer, clip, groups, spec.schedule, privacy)


def _check_private(clip: Clip, graphs: Graphs) -> None:
    """Check that gradients of single samples can be had, and that nothing else reveals samples."""
    parameters = {parameter.name for parameter in graphs.parameters}
    shapes = {
        value.name: dims_of(value) or ()
        for value in graphs.evaluation.graph.inputs
        if value.name not in parameters
    }
    fixed = [
        name
        for name, dims in shapes.items()
        if not dims or (isinstance(dims[0], int) and dims[0] != 1)
    ]
    statistics = [p.name for p in graphs.parameters if p.role == "state"]
    problem, hint = None, ""
    if not graphs.backend.is_stock:
        problem = "private gradients need stock ONNX Runtime"
        hint = "leave --target out"
    elif statistics:
        problem = f"{statistics[0]!r} is a statistic of whole batches, which no noise protects"
        hint = "use group or layer normalization, or freeze the batch normalizations"
    elif fixed:
        problem = f"the model's input {fixed[0]!r} does not take single samples"
        hint = "export the model with a free batch size"
    elif graphs.task.spec.accumulation_steps > 1:
        problem = "a private step goes through its batch sample by sample as it is"
        hint = "leave --accumulate out"
    elif clip != NO_CLIP:
        problem = "gradients are clipped sample by sample, and not once more"
        hint = "leave --clip-norm and --clip-value out"
    if problem is not None:
        raise OdtpackError("private-training", problem, hint=hint or None)
