"""What happens around an optimizer's formula: clipping, parameter groups, a schedule.

An :class:`Update` speaks of patterns, as the command line does; :func:`resolve_update`
applies it to the parameters of a model.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Protocol

import onnx_ir as ir

from odtpack.optimizers import Clip, Group, GroupRule, Optimizer, optimizer_model, resolve_groups
from odtpack.optimizers.common.groups import memory_order
from odtpack.optimizers.common.model import NO_CLIP
from odtpack.package.training import Graphs
from odtpack_runtime.training.schedules import ScheduleSpec


@dataclasses.dataclass(frozen=True)
class Update:
    """How an optimizer is applied.

    Attributes:
        clip: How gradients are clipped.
        groups: What holds for which parameters; the first pattern that matches counts.
        decay_vectors: Whether parameters with less than two axes (biases, the scales of
            normalizations) decay as matrices do.
        schedule: Schedule of the learning rate that the package proposes.
    """

    clip: Clip = NO_CLIP
    groups: tuple[GroupRule, ...] = ()
    decay_vectors: bool = True
    schedule: ScheduleSpec | None = None


PLAIN_UPDATE: Final = Update()
"""No clipping, one group, no schedule."""


class OptimizerStep(Protocol):
    """What an optimizer step does: a formula of the packager's, or a model that others write."""

    def describe(self) -> dict[str, Any]:
        """The parts of a manifest that tell of it."""

    def model(self, graphs: Graphs) -> ir.Model:
        """The optimizer model for the parameters of a training model."""


@dataclasses.dataclass(frozen=True)
class ResolvedUpdate:
    """An optimizer and an update, applied to the parameters of one model."""

    optimizer: Optimizer
    clip: Clip
    groups: tuple[Group, ...]
    schedule: ScheduleSpec | None

    def model(self, graphs: Graphs) -> ir.Model:
        """The optimizer model; see :func:`odtpack.optimizers.optimizer_model`."""
        return optimizer_model(
            self.optimizer, graphs.opset, clip=self.clip, groups=self.groups, dtype=graphs.master
        )

    def describe(self) -> dict[str, Any]:
        """The parts of a manifest that describe it."""
        content: dict[str, Any] = {
            "optimizer": {"kind": self.optimizer.kind, **self.optimizer.settings()},
            "groups": [dataclasses.asdict(group) for group in self.groups],
        }
        if self.clip != NO_CLIP:
            content["clip"] = dataclasses.asdict(self.clip)
        if self.schedule is not None:
            content["schedule"] = dataclasses.asdict(self.schedule)
        return content


def resolve_update(optimizer: Optimizer, update: Update, graphs: Graphs) -> ResolvedUpdate:
    """Apply an update to the parameters of a model.

    With several groups the training model gets metadata that ask a runtime to lay the
    parameters out group by group, so that each group is one stretch of memory.

    Raises:
        OdtpackError: A group's pattern holds for no parameter.
    """
    ranks = {
        parameter.name: len(parameter.tensor.shape)
        for parameter in graphs.parameters
        if parameter.role == "trainable"
    }
    groups = resolve_groups(
        ranks, update.groups, optimizer.weight_decay, decay_vectors=update.decay_vectors
    )
    if len(groups) > 1:
        graphs.training.metadata_props["odtpack.parameter_order"] = memory_order(groups)
    elif groups and groups[0] == Group(1.0, optimizer.weight_decay, tuple(ranks)):
        groups = ()
    return ResolvedUpdate(optimizer, update.clip, groups, update.schedule)
