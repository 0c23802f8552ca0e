"""What ``odtpack diff`` says, as data; ``docs/schemas/diff.schema.json`` is made from it."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from odtpack_simulator.values.part import Part

Level = Literal["compatible", "parameters only", "incompatible"]
ModelName = Literal["training_model", "eval_model", "optimizer_model", "step_model"]


class FileChange(Part):
    """A file of either package. Sizes are bytes, and null where the file does not exist."""

    file: str
    old_size: int | None
    new_size: int | None
    changed: bool


class OperatorChange(Part):
    """Operators of a domain that a model needs anew, or no longer; all if one package lacks it."""

    model: ModelName
    domain: str
    added: tuple[str, ...]
    removed: tuple[str, ...]


class ValueChange(Part):
    """A setting or version by name. Null where it does not exist."""

    name: str
    old: JsonValue
    new: JsonValue


class ParameterSpec(Part):
    """A parameter as a manifest describes it.

    Attributes:
        shape: Its shape.
        dtype: Its type in the checkpoint.
        model_dtype: Type that the models compute in, if it is another.
        role: Whether it is trained, frozen, or changed by training without a gradient.
    """

    shape: tuple[int, ...]
    dtype: str
    model_dtype: str | None = None
    role: Literal["trainable", "frozen", "state"]


class ParameterChange(Part):
    """A parameter that is not the same in both packages.

    Attributes:
        name: Its name.
        old: What it is in the old package; null if it is new.
        new: What it is in the new package; null if it was removed.
        elements: Number of elements, if both have the same shape and type.
        changed_elements: How many of them differ in value.
        largest_change: Largest absolute difference of an element; null if there is none, or
            if one of the values is not finite.
    """

    name: str
    old: ParameterSpec | None
    new: ParameterSpec | None
    elements: int | None = None
    changed_elements: int | None = None
    largest_change: float | None = None


class Problem(Part):
    """A trained parameter that has no place in the new package, and why."""

    parameter: str
    why: str


class Verdict(Part):
    """Whether a device that trained with the old package goes on with the new one.

    Attributes:
        level: ``compatible``: trained parameters and the optimizer's state go over.
            ``parameters only``: trained parameters do; the optimizer starts afresh.
            ``incompatible``: some trained parameter has no place in the new package.
        opens_as_is: Whether the new models open the old checkpoint itself. Otherwise, or to
            get new values of frozen parameters, the app loads the new package's checkpoint and
            takes ``carry_over`` over.
        reset_reasons: Why the optimizer starts afresh.
        problems: Trained parameters that have no place.
        carry_over: Names of the parameters that training changed and whose values go over.
        starts_fresh: Parameters that the new package trains, and that have no trained value.
        new_frozen_values: Frozen parameters whose values a device gets from the new package's
            checkpoint only.
        notes: What else to think of.
    """

    level: Level
    opens_as_is: bool
    reset_reasons: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    carry_over: tuple[str, ...] = ()
    starts_fresh: tuple[str, ...] = ()
    new_frozen_values: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class AppImpact(Part):
    """What the app must do besides replacing the package.

    Attributes:
        calls_change: Whether it must feed or read something else.
        calls: What exactly.
        reduced_runtime_rebuild: Whether a reduced build of ONNX Runtime, made for the old
            package, lacks something.
        reduced_runtime: What exactly.
        old_minimum_onnxruntime: Lowest version that loads the old models.
        new_minimum_onnxruntime: Lowest version that loads the new models.
        newer_onnxruntime_needed: Whether the latter is higher.
    """

    calls_change: bool
    calls: tuple[str, ...]
    reduced_runtime_rebuild: bool
    reduced_runtime: tuple[str, ...]
    old_minimum_onnxruntime: str
    new_minimum_onnxruntime: str
    newer_onnxruntime_needed: bool


class PackageDiff(Part):
    """The difference between two packages.

    Attributes:
        schema_version: Version of this schema.
        same: Whether the manifests say the same, digests of all files included.
        verdict: Whether trained checkpoints go on.
        app: What the app must do.
        old_size: Bytes of the files that the old manifest lists.
        new_size: Bytes of the files that the new manifest lists.
        files: Files of either package.
        operators: Operators added and removed.
        versions: Opsets, IR version and versions of the tools that differ.
        settings: Settings of loss, optimizer and schedule that differ.
        parameters: Parameters that differ.
        unchanged_parameters: Number of those that do not.
    """

    schema_version: Literal[1] = 1
    same: bool
    verdict: Verdict
    app: AppImpact
    old_size: int
    new_size: int
    files: tuple[FileChange, ...]
    operators: tuple[OperatorChange, ...]
    versions: tuple[ValueChange, ...]
    settings: tuple[ValueChange, ...]
    parameters: tuple[ParameterChange, ...]
    unchanged_parameters: int
