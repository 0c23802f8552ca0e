"""Compares two packages: files, models, settings, parameters, and what it means for devices."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np

from odtpack.errors import OdtpackError
from odtpack.update.compatibility import app_impact, verdict
from odtpack.update.diff_model import (
    FileChange,
    ModelName,
    OperatorChange,
    PackageDiff,
    ParameterChange,
    ParameterSpec,
    ValueChange,
)
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.package.manifest import Manifest, PackageFile, ParameterInfo
from odtpack_runtime.package.package import Package

# What the other parts of the comparison look at; all other keys are settings.
_STRUCTURE = {
    "schema_version", "tool", "files", "minimum_onnxruntime", "ir_version", "opsets", "inputs",
    "outputs", "evaluation_outputs", "parameters", "operators", "roles", "digest", "recipe_digest",
    "layout", "inference", "self_check",
}  # fmt: skip


def diff_packages(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> PackageDiff:
    """Compare two packages.

    Args:
        old: The package that devices have: its folder or its manifest.
        new: The package that they would get.

    Raises:
        OdtpackError: One of them is not a complete package, as
            :meth:`odtpack_runtime.package.package.Package.open` says.
    """
    first, second = Package.open(old), Package.open(new)
    before, after = first.manifest, second.manifest
    parameters = tuple(_parameters(first, second))
    changed = {item.name for item in parameters if item.changed_elements != 0}
    return PackageDiff(
        same=before == after,
        verdict=verdict(first, second, changed),
        app=app_impact(before, after),
        old_size=sum(file.size_bytes for file in before.files.all()),
        new_size=sum(file.size_bytes for file in after.files.all()),
        files=tuple(_files(before, after)),
        operators=tuple(_operators(before, after)),
        versions=tuple(_changes(_versions(before), _versions(after))),
        settings=tuple(_changes(_settings(before), _settings(after))),
        parameters=parameters,
        unchanged_parameters=len({p.name for p in after.parameters} - {p.name for p in parameters}),
    )


def _files(old: Manifest, new: Manifest) -> Iterator[FileChange]:
    before, after = _by_kind(old), _by_kind(new)
    for kind in dict.fromkeys((*before, *after)):
        first, second = before.get(kind), after.get(kind)
        yield FileChange(
            file=kind,
            old_size=first.size_bytes if first else None,
            new_size=second.size_bytes if second else None,
            changed=first is None or second is None or first.sha256 != second.sha256,
        )


def _by_kind(manifest: Manifest) -> dict[str, PackageFile]:
    """The files by what they are: a name of one package means nothing in another."""
    files = manifest.files.named()
    for file in manifest.files.extra:
        parts = (file.role, file.of, file.style, file.platform)
        kind = " ".join(part for part in parts if part is not None)
        files[kind if kind not in files else f"{kind} {file.path}"] = file
    return files


def _operators(old: Manifest, new: Manifest) -> Iterator[OperatorChange]:
    models = old.operators.by_model(), new.operators.by_model()
    for model in get_args(ModelName):
        before, after = (each.get(model, {}) for each in models)
        for domain in sorted({*before, *after}):
            names = set(before.get(domain, ())), set(after.get(domain, ()))
            if names[0] != names[1]:
                yield OperatorChange(
                    model=model,
                    domain=domain,
                    added=tuple(sorted(names[1] - names[0])),
                    removed=tuple(sorted(names[0] - names[1])),
                )


def _versions(manifest: Manifest) -> dict[str, Any]:
    return {
        "minimum ONNX Runtime": manifest.minimum_onnxruntime,
        "IR version": manifest.ir_version,
        **{f"opset {domain or 'ai.onnx'}": v for domain, v in manifest.opsets.items()},
        **manifest.tool,
    }


def _settings(manifest: Manifest) -> dict[str, Any]:
    content = manifest.as_dict()
    return dict(_flat("", {key: content[key] for key in content if key not in _STRUCTURE}))


def _flat(prefix: str, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        elif value is not None:
            yield f"{prefix}{key}", value


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[ValueChange]:
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield ValueChange(name=name, old=old.get(name), new=new.get(name))


def _parameters(old: Package, new: Package) -> Iterator[ParameterChange]:
    before = {item.name: item for item in old.manifest.parameters}
    after = {item.name: item for item in new.manifest.parameters}
    values = None
    if _checkpoint(old) != _checkpoint(new):
        values = _values(old), _values(new)
    for name in dict.fromkeys((*before, *after)):
        first, second = _spec(before.get(name)), _spec(after.get(name))
        elements = changed = largest = None
        if first and second and (first.shape, first.dtype) == (second.shape, second.dtype):
            elements, changed = math.prod(first.shape), 0
            if values is not None:
                changed, largest = _compared(values[0][name], values[1][name])
        if first != second or changed != 0:
            yield ParameterChange(
                name=name,
                old=first,
                new=second,
                elements=elements,
                changed_elements=changed,
                largest_change=largest,
            )


def _checkpoint(package: Package) -> list[str]:
    files = package.manifest.files
    return [file.sha256 for file in (files.checkpoint, files.checkpoint_data) if file]


def _values(package: Package) -> dict[str, Array]:
    """The parameters of a package's checkpoint, once they are those of its manifest."""
    data = read_checkpoint(package.checkpoint)
    values = {**data.trainable, **data.frozen}
    for item in package.manifest.parameters:
        array = values.get(item.name)
        if array is None or (array.shape, array.dtype.name) != (item.shape, item.dtype):
            raise OdtpackError(
                "package-inconsistent",
                f"The manifest and the checkpoint disagree about parameter '{item.name}'.",
                where=str(package.path),
            )
    return values


def _spec(parameter: ParameterInfo | None) -> ParameterSpec | None:
    if parameter is None:
        return None
    return ParameterSpec(
        shape=parameter.shape,
        dtype=parameter.dtype,
        model_dtype=parameter.model_dtype,
        role=parameter.role,
    )


def _compared(old: Array, new: Array) -> tuple[int, float | None]:
    """How many elements differ, and the largest absolute difference."""
    different = old != new
    if old.dtype.kind == "f":
        different &= ~(np.isnan(old) & np.isnan(new))
    count = int(np.count_nonzero(different))
    if not count:
        return 0, None
    first, second = (array[different].astype(np.float64) for array in (old, new))
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.abs(second - first).max())
    return count, largest if np.isfinite(largest) else None
