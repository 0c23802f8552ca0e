"""What happens around an optimizer's formula: clipping, parameter groups, a schedule, privacy."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import dims_of
from odtpack.optimizers import Clip, Group, GroupRule, Optimizer, optimizer_model, resolve_groups
from odtpack.optimizers.common.base import memory_order
from odtpack.optimizers.common.model import NO_CLIP
from odtpack.package.parameters import master_type
from odtpack.package.task import Graphs, OptimizerStep
from odtpack.passes.gradient_buffers import OUTPUT_SUFFIX
from odtpack_runtime.training.optimizer_contract import Privacy
from odtpack_runtime.training.schedules import ScheduleSpec


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

        names = {p.name for p in graphs.parameters}
        wanted = any(
            str(value.name).removesuffix(OUTPUT_SUFFIX) not in names
            for value in graphs.training.graph.outputs
            if str(value.name).endswith(OUTPUT_SUFFIX)
        )
        if wanted or graphs.task.spec.accumulation_steps > 1 or self.privacy is not None:
            return None
        if not graphs.task.backend.is_stock or not can_update(self.optimizer, self.clip):
            return None
        return step_model(
            graphs.training, names, self.optimizer, clip=self.clip, groups=self.groups,
            branches=graphs.task.backend.branches,
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
    return backend.step(ResolvedUpdate(optimizer, clip, groups, spec.schedule, privacy))


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
    if problem is not None:
        raise OdtpackError("private-training", problem, hint=hint or None)
