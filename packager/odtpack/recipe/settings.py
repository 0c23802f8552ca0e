"""What a build is asked for, be it by a recipe, by options, or by both."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odtpack.ort.choices import OrtFormat, Platform, Style
from odtpack.recipe.file import Recipe
from odtpack.recipe.schema import FormatsTable
from odtpack_runtime.training.schedules import ScheduleSpec, Setting

if TYPE_CHECKING:
    from odtpack.package.storage import Storage
    from odtpack.targets import Runtime
    from odtpack_runtime.package.manifest import Manifest

Group = tuple[str, float, float | None]
"""Pattern, factor of the learning rate, and weight decay or None for the optimizer's."""

_NO_OPTIONS = frozenset({"kind", "inputs", "decay_vectors"})


@dataclasses.dataclass(frozen=True)
class BuildSettings:
    """Everything that decides a package, in plain values.

    Attributes:
        model: Path of the forward model.
        loss: Name of the loss; ``none`` if the first output is the loss.
        loss_options: Its options that are not the defaults.
        loss_inputs: Values that the loss reads.
        outputs: Further values that the models return.
        prediction: Whether the evaluation model returns the prediction, too.
        train: Patterns of the parameters to train.
        freeze: Patterns of the parameters to freeze.
        untie: Patterns of shared tensors of which each place gets its own.
        optimizer: Name of the optimizer.
        optimizer_options: Its settings that are not the defaults.
        decay_vectors: Whether parameters with less than two axes decay.
        clip_norm: Norm that gradients are clipped to.
        clip_value: Magnitude that elements of gradients are clipped to.
        groups: Parameter groups.
        accumulation_steps: Batches whose gradients make one optimizer step.
        schedule: Schedule of the learning rate.
        runtime: What runs the package, see :data:`odtpack.targets.Runtime`.
        frozen_storage: How large frozen weights are stored.
        ort_format: Which files in ORT format to write too.
        nominal: Also write a checkpoint without values.
        self_check: Whether to run the first steps, for devices to compare theirs with.
        onnxruntime: Version of ONNX Runtime that must load the package.
    """

    model: Path
    loss: str
    loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    prediction: bool = True
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    untie: tuple[str, ...] = ()
    optimizer: str = "adamw"
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    decay_vectors: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    groups: tuple[Group, ...] = ()
    accumulation_steps: int = 1
    schedule: ScheduleSpec | None = None
    runtime: Runtime = "onnxruntime"
    frozen_storage: Storage | None = None
    ort_format: OrtFormat | None = None
    nominal: bool = False
    self_check: bool = True
    onnxruntime: str | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> BuildSettings:
        """The settings of a recipe."""
        table = recipe.table
        loss, optimizer = (
            part.model_dump(exclude_defaults=True) for part in (table.loss, table.optimizer)
        )
        schedule = None
        if table.schedule is not None:
            given = table.schedule.model_dump(exclude_defaults=True)
            settings: dict[str, Setting] = {
                key: value for key, value in given.items() if key not in ("kind", "learning_rate")
            }
            schedule = ScheduleSpec(table.schedule.kind, settings, table.schedule.learning_rate)
        return cls(
            model=recipe.model,
            loss=table.loss.kind,
            loss_options=_options(loss),
            loss_inputs=tuple(loss.get("inputs", ())),
            outputs=table.outputs,
            prediction=table.prediction,
            train=table.parameters.train,
            freeze=table.parameters.freeze,
            untie=table.parameters.untie,
            optimizer=table.optimizer.kind,
            optimizer_options=_options(optimizer),
            decay_vectors=table.optimizer.decay_vectors,
            clip_norm=None if table.clip is None else table.clip.norm,
            clip_value=None if table.clip is None else table.clip.value,
            groups=tuple(
                (group.parameters, group.learning_rate_scale, group.weight_decay)
                for group in table.groups
            ),
            accumulation_steps=table.batch.accumulation_steps,
            schedule=schedule,
            runtime=table.target.runtime,
            frozen_storage=table.formats.frozen_dtype,
            ort_format=_ort_format(table.formats),
            nominal=table.formats.nominal,
            self_check=table.formats.self_check,
            onnxruntime=table.target.onnxruntime,
        )

    def canonical_json(self) -> str:
        """The settings as text: equal settings give equal text, wherever the model lies."""
        content = dataclasses.asdict(self)
        del content["model"]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def build(
        self, folder: str | os.PathLike[str], *, remark: Callable[[str], None] | None = None
    ) -> Manifest:
        """Build the package.

        Args:
            folder: Where it goes, see :func:`odtpack.build.build_package`.
            remark: Takes sentences about parameters that will not train.

        Raises:
            OdtpackError: Bad input; nothing has been written then.
        """
        from odtpack.build import build_package
        from odtpack.optimizers import Clip, GroupRule, make_optimizer
        from odtpack.package.optimizer_update import Update

        return build_package(
            self.model,
            folder,
            loss=None if self.loss == "none" else self.loss,
            loss_options=self.loss_options,
            optimizer=make_optimizer(self.optimizer, self.optimizer_options),
            update=Update(
                Clip(self.clip_norm, self.clip_value),
                tuple(GroupRule(*group) for group in self.groups),
                self.decay_vectors,
                self.schedule,
            ),
            accumulation_steps=self.accumulation_steps,
            train=self.train,
            freeze=self.freeze,
            untie=self.untie,
            loss_inputs=self.loss_inputs,
            outputs=self.outputs,
            prediction=self.prediction,
            runtime=self.runtime,
            frozen_storage=self.frozen_storage,
            ort_format=self.ort_format,
            nominal=self.nominal,
            self_check=self.self_check,
            onnxruntime=self.onnxruntime,
            remark=remark,
        )


def _ort_format(table: FormatsTable) -> OrtFormat | None:
    if not table.ort:
        return None
    styles = tuple(Style(name) for name in table.ort_styles)
    return OrtFormat(styles, tuple(Platform(name) for name in table.ort_platforms) or (None,))


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _NO_OPTIONS}
