"""The manifest of a package: ``manifest.json``, which names and describes its files.

This module imports pydantic; the training core does not import this module.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, JsonValue, StringConstraints, ValidationError, model_validator

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest_base import (
    MAX_RANK,
    SHA256,
    DType,
    Name,
    NonNegativeInt,
    Part,
    PositiveInt,
    Shape,
)
from odtpack_runtime.package.manifest_training import (
    ClipInfo,
    GroupInfo,
    OptimizerInfo,
    ScheduleInfo,
)
from odtpack_runtime.session.graph_signature import TensorSpec

SCHEMA_VERSION = 1
_MOST_CHARACTERS = 300

LossName = Literal[
    "cross_entropy", "mse", "bce_with_logits", "l1", "huber", "smooth_l1", "nll", "kl_div",
    "distillation", "triplet_margin", "contrastive", "info_nce", "ctc", "none", "custom",
]  # fmt: skip


class PackageFile(Part):
    """One file of a package: path relative to the manifest with ``/``, size, SHA-256 in hex."""

    path: Name
    size_bytes: NonNegativeInt
    sha256: SHA256


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
    ]
    of: Name | None = None
    style: Literal["fixed", "runtime"] | None = None
    platform: Literal["arm", "amd64"] | None = None


class PackageFiles(Part):
    """The files of a package, each of them once; the manifest and its signature are not.

    A nominal checkpoint is there if it was asked for, and the checkpoint has a second file
    if its tensors exceed what one file may hold.
    """

    training_model: PackageFile
    eval_model: PackageFile
    optimizer_model: PackageFile
    checkpoint: PackageFile
    checkpoint_data: PackageFile | None = None
    nominal_checkpoint: PackageFile | None = None
    extra: tuple[ExtraFile, ...] = ()

    def named(self) -> dict[str, PackageFile]:
        """Return the files that have an entry of their own, by its name."""
        entries = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: file for name, file in entries.items() if isinstance(file, PackageFile)}

    def all(self) -> tuple[PackageFile, ...]:
        """Return every file."""
        return (*self.named().values(), *self.extra)


class InputInfo(Part):
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


class OutputInfo(Part):
    """An output for the user; gradients and state updates are not."""

    name: Name
    dtype: DType
    shape: Shape
    role: Literal["loss", "additional", "prediction"]


class ParameterInfo(Part):
    """A parameter: trainable, frozen, or state that the step updates without a gradient.

    ``dtype`` is that of the checkpoint and of the models' inputs; where the models compute in
    another type, and an exported model holds the parameter in it, ``model_dtype`` names that.
    ``size_bytes`` are those of its values in the checkpoint.
    A parameter stored as int8 is to be multiplied by the parameter that ``scale`` names, which
    has its rank and one element for each channel. ``module`` is its name in the module that was
    exported, where the exporter made up another.
    """

    name: Name
    module: Name | None = None
    shape: Annotated[tuple[NonNegativeInt, ...], Field(max_length=MAX_RANK)]
    dtype: DType
    model_dtype: DType | None = None
    scale: Name | None = None
    role: Literal["trainable", "frozen", "state"]
    size_bytes: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _check_size(self) -> ParameterInfo:
        itemsize = np.dtype(object if self.dtype == "string" else self.dtype).itemsize
        if self.size_bytes not in (None, math.prod(self.shape) * itemsize):
            raise ValueError("size_bytes is not that of its shape and dtype")
        return self


OperatorVersions = dict[Name, dict[Name, PositiveInt]]


class Operators(Part):
    """Operators of each model, by domain: what a reduced build of ONNX Runtime must contain.

    The number of an operator is the opset version since which it is what the model's opset
    has, by which ONNX Runtime registers its kernels.
    """

    training_model: OperatorVersions
    eval_model: OperatorVersions
    optimizer_model: OperatorVersions


MEANINGS = {
    "data": "What the forward model takes, prepared as for its first training.",
    "labels": "The right class of each sample: its number, from 0 to class_count - 1.",
    "target": "What the prediction should be, in the prediction's type and shape.",
    "loss": "The mean loss of the batch, a scalar.",
    "additional": "A value of the forward model that was asked for when the package was built.",
    "prediction": "What the loss compares with the labels; the evaluation model returns it.",
    "trainable": "Changed by the optimizer, along the gradient of the loss.",
    "frozen": "Read from the checkpoint, and changed by nobody.",
    "state": "Changed by every training step from the data, without a gradient.",
}
"""What each role of an input, an output or a parameter means."""


def _lines(value: object) -> str:
    """JSON with a line for each entry of a list of mappings or a mapping of mappings."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        items = (f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return json.dumps(value)


class Manifest(Part):
    """Everything a runtime, a simulator or a person needs to know without opening a model.

    Attributes:
        schema_version: Version of this schema, 1.
        tool: Versions of the packages that built the package, by name.
        files: The package's files.
        target: ``"ort-training"`` if only onnxruntime-training runs the training and the
            optimizer model; None for ONNX Runtime as it is.
        minimum_onnxruntime: Lowest version of ONNX Runtime that loads the models.
        ir_version: ONNX IR version of the models.
        opsets: Opset version of the models by domain; ``""`` is ai.onnx.
        inputs: User inputs of the training model, in order.
        outputs: User outputs of the training model, in order; the loss is the first.
        evaluation_outputs: Further outputs of the evaluation model, after those.
        loss: The loss by name.
        loss_options: Options of the loss in force, by name.
        optimizer: Optimizer and hyperparameters.
        parameters: All parameters, in the order of the training model's inputs.
        operators: Operators of each model.
        roles: What each role that occurs among inputs, outputs and parameters means.
        recipe_digest: SHA-256 of the model and every setting that decided the build.
        digest: SHA-256 of everything else in the manifest, see :meth:`sealed`. It tells damage
            from content; who must fear intent needs a signature.
        clip: How the optimizer model clips gradients, if it does.
        groups: Parameter groups; none if all parameters are updated alike.
        accumulation_steps: Batches whose gradients make one optimizer step.
        schedule: Schedule of the learning rate that the recipe proposes.
    """

    schema_version: Literal[1]
    tool: dict[str, str]
    files: PackageFiles
    target: Literal["ort-training"] | None = None
    minimum_onnxruntime: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+(\.\d+)?$")]
    ir_version: PositiveInt
    opsets: dict[str, PositiveInt]
    inputs: tuple[InputInfo, ...]
    outputs: tuple[OutputInfo, ...]
    evaluation_outputs: tuple[OutputInfo, ...] = ()
    loss: LossName
    loss_options: dict[Name, JsonValue] | None = None
    optimizer: OptimizerInfo
    parameters: tuple[ParameterInfo, ...]
    operators: Operators
    roles: dict[Name, Name] = Field({})
    recipe_digest: SHA256 | None = None
    clip: ClipInfo | None = None
    groups: tuple[GroupInfo, ...] = ()
    accumulation_steps: PositiveInt = 1
    schedule: ScheduleInfo | None = None
    digest: SHA256 | None = None

    @model_validator(mode="after")
    def _check_digest(self) -> Manifest:
        if self.digest not in (None, self._content_digest()):
            raise ValueError("the digest is not that of the content, which was changed or damaged")
        return self

    def _content_digest(self) -> str:
        content = self.model_dump(mode="json", exclude_defaults=True, exclude={"digest"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def sealed(self) -> Manifest:
        """Return the manifest with its digest.

        The digest is that of canonical JSON: keys sorted, no spaces, ASCII, and what has its
        default left out.
        """
        return self.model_copy(update={"digest": self._content_digest()})

    @model_validator(mode="after")
    def _check_names(self) -> Manifest:
        for what, items in (
            ("inputs", self.inputs),
            ("outputs", (*self.outputs, *self.evaluation_outputs)),
            ("parameters", self.parameters),
        ):
            names = [item.name for item in items]
            if len(set(names)) != len(names):
                raise ValueError(f"two {what} have the same name")
        known = {item.name for item in self.parameters}
        if any(item.scale is not None and item.scale not in known for item in self.parameters):
            raise ValueError("a scale must be one of the parameters")
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

    def module_names(self) -> dict[str, str]:
        """Names of parameters in the exported module, by those that the exporter made up."""
        return {item.name: item.module for item in self.parameters if item.module is not None}

    @property
    def all_outputs(self) -> tuple[OutputInfo, ...]:
        """Every user output of the evaluation model, in order; those of training come first."""
        return self.outputs + self.evaluation_outputs

    @property
    def ignored_label(self) -> int | None:
        """Label of samples that do not count, if there is one."""
        ignored = [item.ignore_index for item in self.inputs if item.role == "labels"]
        return ignored[0] if ignored else None

    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Return the user inputs as the runtime describes tensors."""
        return tuple(item.spec() for item in self.inputs)

    def to_json(self) -> str:
        """Return the text of ``manifest.json``, with its digest; equal manifests give equal text.

        What has its default is left out. An entry of a list or mapping takes a line: long
        enough to be read, and small.
        """
        content = self.sealed().model_dump(mode="json", exclude_defaults=True)
        lines = (f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Parse and check the text of a ``manifest.json``.

        Raises:
            OdtpackError: ``manifest-version`` for a schema version other than 1,
                ``manifest-invalid`` for anything else, naming the key.
        """
        try:
            version = json.loads(data, object_pairs_hook=_unique_keys)["schema_version"]
        except _KeyTwiceError as error:
            raise _invalid(f"the key {error.args[0]!r} occurs twice in one object", where) from None
        except (ValueError, TypeError, KeyError, RecursionError):
            version = SCHEMA_VERSION  # no version to speak of: validation says what is wrong
        if isinstance(version, int) and version != SCHEMA_VERSION:
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
            raise _invalid(f"{key + ': ' if key else ''}{message}", where) from error


class _KeyTwiceError(ValueError):
    """Readers differ in which of two equal keys they take."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _KeyTwiceError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return found


def _invalid(problem: str, where: str) -> OdtpackError:
    if len(problem) > _MOST_CHARACTERS:  # a hostile key may be of any length
        problem = f"{problem[: _MOST_CHARACTERS // 2]} ... {problem[-_MOST_CHARACTERS // 2 :]}"
    return OdtpackError(
        "manifest-invalid",
        f"The manifest is not valid: {problem}.",
        where=where,
        hint="build the package again with odtpack",
    )
