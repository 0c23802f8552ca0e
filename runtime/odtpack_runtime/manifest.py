"""The manifest of a package: ``manifest.json``, which names and describes its files.

This module imports pydantic; the training core does not import this module.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.signature import TensorSpec

SCHEMA_VERSION = 1

Name = Annotated[str, StringConstraints(min_length=1)]
DType = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "string",
]  # fmt: skip
LossName = Literal[
    "cross_entropy", "mse", "bce_with_logits", "l1", "huber", "smooth_l1", "nll", "kl_div",
    "distillation", "triplet_margin", "contrastive", "info_nce", "ctc", "none", "custom",
]  # fmt: skip
Shape = tuple[NonNegativeInt | Name | None, ...]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PackageFile(_Model):
    """One file of a package: path relative to the manifest with ``/``, size, SHA-256 in hex."""

    path: Name
    size_bytes: NonNegativeInt
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PackageFiles(_Model):
    """The files of a package.

    A nominal checkpoint is there if it was asked for, and the checkpoint has a second file
    if its tensors exceed what one file may hold.
    """

    training_model: PackageFile
    eval_model: PackageFile
    optimizer_model: PackageFile
    checkpoint: PackageFile
    checkpoint_data: PackageFile | None = None
    nominal_checkpoint: PackageFile | None = None


class InputInfo(_Model):
    """A user input of the training model. Sizes that may vary have a name, or null."""

    name: Name
    dtype: DType
    shape: Shape
    role: Literal["data", "labels", "target"]
    class_count: PositiveInt | None = None
    ignore_index: int | None = None

    def spec(self) -> TensorSpec:
        """Return the input as the runtime describes tensors."""
        dtype = np.dtype(object if self.dtype == "string" else self.dtype)
        return TensorSpec(self.name, dtype, self.shape)


class OutputInfo(_Model):
    """An output of the training model for the user; gradients and state updates are not."""

    name: Name
    dtype: DType
    shape: Shape
    role: Literal["loss", "additional"]


class AdamWInfo(_Model):
    """Hyperparameters of AdamW."""

    kind: Literal["adamw"]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    formula: Literal["reference", "pytorch"] = "reference"
    bias_correction: bool = True


class AdamInfo(_Model):
    """Hyperparameters of Adam with an L2 penalty."""

    kind: Literal["adam"]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    bias_correction: bool = True


class CustomOptimizerInfo(_Model):
    """An optimizer that is described by its model only."""

    kind: Literal["custom"]


class SGDInfo(_Model):
    """Hyperparameters of SGD."""

    kind: Literal["sgd"]
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


class LionInfo(_Model):
    """Hyperparameters of Lion."""

    kind: Literal["lion"]
    beta1: float
    beta2: float
    weight_decay: float


class AdafactorInfo(_Model):
    """Hyperparameters of Adafactor."""

    kind: Literal["adafactor"]
    beta2_decay: float
    epsilon2: float
    clip_threshold: float
    weight_decay: float


OptimizerInfo = Annotated[
    AdamWInfo | AdamInfo | SGDInfo | LionInfo | AdafactorInfo | CustomOptimizerInfo,
    Field(discriminator="kind"),
]


class ClipInfo(_Model):
    """How gradients are clipped: by the norm of all of them, or each element by its value."""

    norm: float | None = None
    value: float | None = None


class GroupInfo(_Model):
    """Parameters with a learning rate and a weight decay of their own."""

    learning_rate_scale: float
    weight_decay: float
    parameters: tuple[Name, ...]


class ScheduleInfo(_Model):
    """The schedule of the learning rate that the recipe proposes.

    ``settings`` are those of the class of this kind in
    :data:`odtpack_runtime.schedules.SCHEDULES`; without ``total_steps`` a schedule that ends
    runs over the whole training.
    """

    kind: Name
    settings: dict[str, int | float | tuple[int, ...]] = {}
    learning_rate: float | None = None


class ParameterInfo(_Model):
    """A parameter: trainable, frozen, or state that the step updates without a gradient.

    ``dtype`` is that of the checkpoint and of the models' inputs; where the models compute in
    another type, and an exported model holds the parameter in it, ``model_dtype`` names that.
    """

    name: Name
    shape: tuple[NonNegativeInt, ...]
    dtype: DType
    model_dtype: DType | None = None
    role: Literal["trainable", "frozen", "state"]


class Operators(_Model):
    """Operators of each model, by domain: what a reduced build of ONNX Runtime must contain."""

    training_model: dict[str, tuple[Name, ...]]
    eval_model: dict[str, tuple[Name, ...]]
    optimizer_model: dict[str, tuple[Name, ...]]


class Manifest(_Model):
    """Everything a runtime, a simulator or a person needs to know without opening a model.

    Attributes:
        schema_version: Version of this schema, 1.
        tool: Versions of the packages that built the package, by name.
        files: The package's files.
        minimum_onnxruntime: Lowest version of ONNX Runtime that loads the models.
        ir_version: ONNX IR version of the models.
        opsets: Opset version of the models by domain; ``""`` is ai.onnx.
        inputs: User inputs of the training model, in order.
        outputs: User outputs of the training model, in order; the loss is the first.
        loss: The loss by name.
        loss_options: Options of the loss in force, by name.
        optimizer: Optimizer and hyperparameters.
        parameters: All parameters, in the order of the training model's inputs.
        operators: Operators of each model.
        clip: How the optimizer model clips gradients, if it does.
        groups: Parameter groups; none if all parameters are updated alike.
        accumulation_steps: Batches whose gradients make one optimizer step.
        schedule: Schedule of the learning rate that the recipe proposes.
    """

    schema_version: Literal[1]
    tool: dict[str, str]
    files: PackageFiles
    minimum_onnxruntime: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+(\.\d+)?$")]
    ir_version: PositiveInt
    opsets: dict[str, PositiveInt]
    inputs: tuple[InputInfo, ...]
    outputs: tuple[OutputInfo, ...]
    loss: LossName
    loss_options: dict[Name, JsonValue] | None = None
    optimizer: OptimizerInfo
    parameters: tuple[ParameterInfo, ...]
    operators: Operators
    clip: ClipInfo | None = None
    groups: tuple[GroupInfo, ...] = ()
    accumulation_steps: PositiveInt = 1
    schedule: ScheduleInfo | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Manifest:
        for what, items in (
            ("inputs", self.inputs),
            ("outputs", self.outputs),
            ("parameters", self.parameters),
        ):
            names = [item.name for item in items]
            if len(set(names)) != len(names):
                raise ValueError(f"two {what} have the same name")
        data = self.files.checkpoint_data
        if data is not None and data.path != f"{self.files.checkpoint.path}.data":
            raise ValueError("checkpoint_data must be named after the checkpoint")
        if not self.outputs or self.outputs[0].role != "loss":
            raise ValueError("the first output must be the loss")
        trainable = [item.name for item in self.parameters if item.role == "trainable"]
        grouped = [name for group in self.groups for name in group.parameters]
        if grouped and sorted(grouped) != sorted(trainable):
            raise ValueError("the groups do not hold each trainable parameter once")
        return self

    @property
    def class_count(self) -> int | None:
        """Number of classes that the labels may name, if the model fixes it."""
        counts = [item.class_count for item in self.inputs if item.role == "labels"]
        return counts[0] if counts else None

    @property
    def ignored_label(self) -> int | None:
        """Label of samples that do not count, if there is one."""
        ignored = [item.ignore_index for item in self.inputs if item.role == "labels"]
        return ignored[0] if ignored else None

    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Return the user inputs as the runtime describes tensors."""
        return tuple(item.spec() for item in self.inputs)

    def to_json(self) -> str:
        """Return the text of ``manifest.json``; equal manifests give equal text.

        What has its default is left out.
        """
        return self.model_dump_json(indent=2, exclude_defaults=True) + "\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Parse and check the text of a ``manifest.json``.

        Raises:
            OdtpackError: ``manifest-version`` for a schema version other than 1,
                ``manifest-invalid`` for anything else, naming the key.
        """
        try:
            version = json.loads(data)["schema_version"]
        except (ValueError, TypeError, KeyError, RecursionError):
            version = SCHEMA_VERSION  # no version to speak of: validation says what is wrong
        if version != SCHEMA_VERSION:
            raise OdtpackError(
                "manifest-version",
                f"The manifest has schema version {version!r}, and this odtpack reads "
                f"{SCHEMA_VERSION}.",
                where=where,
                hint="update odtpack, or build the package again",
            )
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in problem["loc"]))
            message = str(problem["msg"]).removeprefix("Value error, ")
            raise OdtpackError(
                "manifest-invalid",
                f"The manifest is not valid: {key + ': ' if key else ''}{message}.",
                where=where,
                hint="build the package again with odtpack",
            ) from error
