"""The manifest of a package: ``manifest.json``, which names and describes its files.

The declarations below are its schema: what reads it checks by them, and
``docs/schemas/manifest.schema.json`` is made from them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.records import InvalidRecordError, KeyPath, Part, Rule, parse_json
from odtpack_runtime.package.records import (
    SHA256,
    AdapterInfo,
    ClipInfo,
    DType,
    ExtraFile,
    FixedShape,
    GroupInfo,
    InferenceInfo,
    Kind,
    LayoutInfo,
    Name,
    NonNegativeInt,
    OptimizerInfo,
    PackageFile,
    PackageFiles,
    PositiveInt,
    PrivacyInfo,
    ScheduleInfo,
    SegmentInfo,
    SegmentsInfo,
    SelfCheckInfo,
    SessionInfo,
    Shape,
    WeightInfo,
)
from odtpack_runtime.session.graph_signature import TensorSpec

__all__ = [
    "MEANINGS", "SCHEMA_VERSION", "AdapterInfo", "ClipInfo", "ExtraFile", "GroupInfo",
    "InferenceInfo", "InputInfo", "LayoutInfo", "Manifest", "Operators", "OptimizerInfo",
    "OutputInfo", "PackageFile", "PackageFiles", "ParameterInfo", "PrivacyInfo", "ScheduleInfo",
    "SegmentInfo", "SegmentsInfo", "SelfCheckInfo", "SessionInfo", "WeightInfo",
]  # fmt: skip

SCHEMA_VERSION = 1
_MOST_CHARACTERS = 300
_FEW = Rule(maxItems=1024)
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, kw_only=True)
class InputInfo(Part):
    """A user input of the training model. Sizes that may vary have a name, or null."""

    name: Name
    dtype: DType
    shape: Shape
    role: Literal["data", "labels", "target"]
    class_count: Annotated[int, Rule(minimum=1, maximum=2**31 - 1)] | None = None
    ignore_index: int | None = None

    def spec(self) -> TensorSpec:
        """Return the input as the runtime describes tensors."""
        dtype = np.dtype(object if self.dtype == "string" else self.dtype)
        return TensorSpec(self.name, dtype, self.shape)


@dataclass(frozen=True, kw_only=True)
class OutputInfo(Part):
    """An output for the user; gradients and state updates are not."""

    name: Name
    dtype: DType
    shape: Shape
    role: Literal["loss", "additional", "prediction"]


@dataclass(frozen=True, kw_only=True)
class ParameterInfo(Part):
    """A parameter: trainable, frozen, or state that the step updates without a gradient.

    ``dtype`` is that of the checkpoint and of the models' inputs; where the models compute in
    another type, and an exported model holds the parameter in it, ``model_dtype`` names that.
    ``size_bytes`` are those of its values in the checkpoint.
    A parameter stored as int8 is to be multiplied by the parameter that ``scale`` names, which
    has its rank and one element for each channel. ``offset`` is the place of a trainable one's
    first element in the flat vectors. ``module`` is its name in the module that was exported, where
    the exporter made up another.
    """

    name: Name
    module: Name | None = None
    shape: FixedShape
    dtype: DType
    model_dtype: DType | None = None
    scale: Name | None = None
    role: Literal["trainable", "frozen", "state"]
    size_bytes: NonNegativeInt | None = None
    offset: NonNegativeInt | None = None

    def check(self, path: KeyPath) -> None:
        """Check that its size follows from its shape."""
        itemsize = np.dtype(object if self.dtype == "string" else self.dtype).itemsize
        if self.size_bytes not in (None, math.prod(self.shape) * itemsize):
            raise InvalidRecordError("size_bytes is not that of its shape and dtype", path)


OperatorVersions = dict[Name, dict[Name, PositiveInt]]


@dataclass(frozen=True, kw_only=True)
class Operators(Part):
    """Operators of each model, by domain: what a reduced build of ONNX Runtime must contain.

    The number of an operator is the opset version since which it is what the model's opset
    has, by which ONNX Runtime registers its kernels.
    """

    training_model: OperatorVersions
    eval_model: OperatorVersions
    optimizer_model: OperatorVersions
    step_model: OperatorVersions | None = None

    def by_model(self) -> dict[str, dict[str, dict[str, int]]]:
        """Operators by model, of the models that the package has."""
        found = self.as_dict()
        return {model: domains for model, domains in found.items() if domains is not None}


MEANINGS = {
    "data": "What the forward model takes, prepared as for its first training.",
    "labels": "The right class of each sample: its number, from 0 to class_count - 1.",
    "target": "What the prediction should be, in the prediction's type and shape.",
    "loss": "The mean loss of the batch, a scalar.",
    "additional": "A value of the forward model that was asked for when the package was built.",
    "prediction": "What the loss compares with the labels; the evaluation model returns it.",
    "trainable": "Changed by the optimizer, along the gradient of the loss.",
    "frozen": "Read from the checkpoint, and never changed.",
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


@dataclass(frozen=True, kw_only=True)
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
        loss: The loss by name; ``none`` if the model has its own, ``custom`` for a block.
        loss_options: Options of the loss in force, by name.
        optimizer: Optimizer and hyperparameters.
        parameters: All parameters, in the order of the training model's inputs.
        operators: Operators of each model.
        roles: What each role that occurs among inputs, outputs and parameters means.
        recipe_digest: SHA-256 of the model and every setting that decided the build.
        digest: SHA-256 of everything else in the manifest, see :meth:`sealed`. It detects damage
            from content; who must fear intent needs a signature.
        clip: How the optimizer model clips gradients, if it does.
        privacy: How gradients are made private; a runtime that cannot must refuse the package.
        groups: Parameter groups; none if all parameters are updated in the same way.
        accumulation_steps: Batches accumulated for one optimizer step.
        schedule: Schedule of the learning rate that the recipe proposes.
        session: Options of ONNX Runtime for every session.
        layout: The flat vectors of the parameters, and how the optimizer runs over them.
        inference: What the inference template takes, gives and lacks.
        adapter: The adapter that is trained in place of the model's parameters, if there is one.
        segments: The models that run before the training and the evaluation model; a runtime that
            cannot run them must refuse the package.
        self_check: Training steps whose losses are known.
        release: Number that grows from release to release of one package, for apps that
            refuse to go back to an older one.
    """

    schema_version: Literal[1]
    tool: dict[str, str]
    files: PackageFiles
    target: Literal["ort-training"] | None = None
    minimum_onnxruntime: Annotated[str, Rule(pattern=r"^\d+\.\d+(\.\d+)?$")]
    ir_version: PositiveInt
    opsets: dict[str, PositiveInt]
    inputs: Annotated[tuple[InputInfo, ...], _FEW]
    outputs: Annotated[tuple[OutputInfo, ...], _FEW]
    evaluation_outputs: Annotated[tuple[OutputInfo, ...], _FEW] = ()
    loss: Kind
    loss_options: dict[Name, Any] | None = None
    optimizer: OptimizerInfo
    parameters: Annotated[tuple[ParameterInfo, ...], Rule(maxItems=100_000)]
    operators: Operators
    roles: dict[Name, Name] = field(default_factory=dict)
    recipe_digest: SHA256 | None = None
    clip: ClipInfo | None = None
    privacy: PrivacyInfo | None = None
    groups: tuple[GroupInfo, ...] = ()
    accumulation_steps: Annotated[int, Rule(minimum=1, maximum=2**20)] = 1
    schedule: ScheduleInfo | None = None
    session: SessionInfo | None = None
    layout: LayoutInfo | None = None
    inference: InferenceInfo | None = None
    adapter: AdapterInfo | None = None
    segments: SegmentsInfo | None = None
    self_check: SelfCheckInfo | None = None
    release: NonNegativeInt | None = None
    digest: SHA256 | None = None

    def check(self, path: KeyPath) -> None:
        """Check that the parts go together, and the digest."""
        problem = self._problem()
        if problem is None and self.digest not in (None, self._content_digest()):
            problem = "the digest is not that of the content, which was changed or damaged"
        if problem is not None:
            raise InvalidRecordError(problem, path)

    def _problem(self) -> str | None:
        for what, items in (
            ("inputs", self.inputs),
            ("outputs", (*self.outputs, *self.evaluation_outputs)),
            ("parameters", self.parameters),
        ):
            names = [item.name for item in items]
            if len(set(names)) != len(names):
                return f"two {what} have the same name"
        known = {item.name for item in self.parameters}
        if any(item.scale is not None and item.scale not in known for item in self.parameters):
            return "a scale must be one of the parameters"
        data = self.files.checkpoint_data
        if data is not None and data.path != f"{self.files.checkpoint.path}.data":
            return "checkpoint_data must be named after the checkpoint"
        if not self.outputs or self.outputs[0].role != "loss":
            return "the first output must be the loss"
        trainable = [item.name for item in self.parameters if item.role == "trainable"]
        grouped = [name for group in self.groups for name in group.parameters]
        if grouped and sorted(grouped) != sorted(trainable):
            return "the groups do not hold each trainable parameter once"
        if self.files.step_model is not None and self.operators.step_model is None:
            return "a step model needs its operators"
        if (self.files.inference_template is None) != (self.inference is None):
            return "an inference template needs both its file and the key inference"
        if self.adapter is not None and not set(self.adapter.parameters) <= set(trainable):
            return "adapter names a parameter that is not trainable"
        if self.segments is not None:
            listed = {file.path for file in self.files.extra if file.role.startswith("segment_")}
            if set(self.segments.files()) != listed:
                return "the files of segments are not those that files.extra lists as such"
        if self.inference is not None and not set(self.inference.parameters) <= known:
            return "inference names a parameter that there is none of"
        return self._layout_problem()

    def _layout_problem(self) -> str | None:
        """What is wrong with the places of the trainable parameters in the flat vectors."""
        if self.layout is None:
            return None
        itemsize = np.dtype(self.layout.dtype).itemsize
        aligned = _ALIGNMENT // itemsize
        places = []
        for item in self.parameters:
            if item.role == "trainable":
                if item.offset is None or item.offset % aligned:
                    return f"the offset of {item.name!r} is not a multiple of {aligned} elements"
                places.append((item.offset, math.prod(item.shape)))
        end = 0
        for offset, size in sorted(places):
            if offset < end:
                return "two trainable parameters overlap in the flat vectors"
            end = offset + size
        if self.layout.elements != -(-end // aligned) * aligned:
            return "layout.elements is not where the last trainable parameter ends"
        return None

    def _content_digest(self) -> str:
        content = self.as_dict(defaults=False)
        content.pop("digest", None)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def sealed(self) -> Manifest:
        """Return the manifest with its digest.

        The digest is that of canonical JSON: keys sorted, no spaces, ASCII, and what has its
        default left out.
        """
        return dataclasses.replace(self, digest=self._content_digest())

    @property
    def threads(self) -> int:
        """Threads within an operator: one where the package leaves the choice to ONNX Runtime."""
        return (self.session and self.session.threads) or 1

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
    def fixed_batch(self) -> int | None:
        """The batch size that the models demand; None if they take any."""
        sizes = (item.shape[0] for item in self.inputs if item.shape)
        return next((size for size in sizes if isinstance(size, int)), None)

    @property
    def token_labels(self) -> int | None:
        """Index of the labels of a language model, whose tokens the loss is the mean of."""
        mean = (self.loss_options or {}).get("reduction", "mean") == "mean"
        roles = [item.role for item in self.inputs]
        found = self.loss == "next_token" and mean and "labels" in roles
        return roles.index("labels") if found else None

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
        content = self.sealed().as_dict(defaults=False)
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
            content = parse_json(data)
            version = content.get("schema_version") if isinstance(content, dict) else None
            if type(version) in (int, float) and version != SCHEMA_VERSION:
                raise OdtpackError(
                    "manifest-version",
                    f"The manifest has schema version {version!r}, and this odtpack reads "
                    f"{SCHEMA_VERSION}.",
                    where=where,
                )
            return cls.read(content)
        except InvalidRecordError as error:
            problem = str(error)
            if len(problem) > _MOST_CHARACTERS:  # a hostile key may be of any length
                half = _MOST_CHARACTERS // 2
                problem = f"{problem[:half]} ... {problem[-half:]}"
            what = f"The manifest is not valid: {problem}."
            raise OdtpackError("manifest-invalid", what, where=where) from error


# Comparisons of a file with its manifest entry.


def same(where: Path, what: str, found: object, said: object) -> None:
    """Check that a file holds what the manifest says."""
    if found != said:
        raise contradiction(where, what, *_difference(found, said))


def _difference(found: Any, said: Any) -> tuple[object, object]:
    """The first entries that differ, to keep the message short."""
    if isinstance(found, Mapping) and isinstance(said, Mapping):
        for key in sorted({*found, *said}):
            if found.get(key) != said.get(key):
                return (
                    _difference(found.get(key), said.get(key))
                    if (isinstance(found.get(key), Mapping) and isinstance(said.get(key), Mapping))
                    else (f"{key}: {found.get(key)}", f"{key}: {said.get(key)}")
                )
    if isinstance(found, Sequence) and isinstance(said, Sequence) and not isinstance(found, str):
        for one, other in zip(found, said, strict=False):
            if one != other:
                return one, other
        return f"{len(found)} of them", f"{len(said)}"
    if isinstance(found, set) and isinstance(said, set):
        return sorted(found - said) or "less", sorted(said - found) or "less"
    return found, said


def contradiction(where: Path, what: str, found: object, said: object) -> OdtpackError:
    """Return the error for a file that differs from what the manifest says."""
    return OdtpackError(
        "manifest-contradicts",
        f"{where.name} and the manifest differ in {what}: the file has {_short(found)}, and the "
        f"manifest says {_short(said)}.",
        where=str(where),
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
