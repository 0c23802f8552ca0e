"""What differs between two packages, what it means for devices, and how it is shown."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnx.numpy_helper
from pydantic import JsonValue

from odtpack.errors import OdtpackError, some
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.package.checks import read_model
from odtpack_runtime.package.manifest import (
    InputInfo,
    Manifest,
    OutputInfo,
    PackageFile,
    ParameterInfo,
)
from odtpack_runtime.package.package import Package, signature_path
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES
from odtpack_runtime.training.optimizer_contract import StateVector, read_contract
from odtpack_simulator.reports.report import markdown_text
from odtpack_simulator.values.figure import shortened
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.text import clean, markdown_row
from odtpack_simulator.values.units import format_bytes, format_percent

Level = Literal["compatible", "parameters only", "incompatible"]
ModelName = Literal["training_model", "eval_model", "optimizer_model", "step_model"]


class FileChange(Part):
    """A file of either package. Sizes are bytes, and null where the file does not exist."""

    file: str
    old_size: int | None
    new_size: int | None
    changed: bool


class OperatorChange(Part):
    """Operators that a model now needs or no longer needs; all of them if one package lacks it."""

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
    """Whether a device that trained with the old package can continue with the new one.

    Attributes:
        level: ``compatible``: trained parameters and the optimizer's state carry over.
            ``parameters only``: trained parameters do; the optimizer starts again.
            ``incompatible``: some trained parameter has no place in the new package.
        opens_as_is: Whether the new models open the old checkpoint itself. Otherwise, or to
            get new values of frozen parameters, the app loads the new package's checkpoint and
            takes ``carry_over`` over.
        reset_reasons: Why the optimizer's state is lost.
        problems: Trained parameters that have no place.
        carry_over: Names of the parameters that training changed and whose values carry over.
        starts_fresh: Parameters that the new package trains, and that have no trained value.
        new_frozen_values: Frozen parameters whose values a device gets from the new package's
            checkpoint only.
        notes: Other remarks.
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
        calls_change: Whether it must feed or read something else, or make steps otherwise.
        calls: What exactly.
        reduced_runtime_rebuild: Whether a reduced build of ONNX Runtime, made for the old
            package, lacks an operator of the files. What it fuses them to, ``odtpack config NEW
            --check FILE`` compares.
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
        verdict: Whether trained checkpoints can be used.
        app: What the app must do.
        old_size: Bytes of the files that the old manifest lists.
        new_size: Bytes of the files that the new manifest lists.
        files: Files of either package.
        operators: Operators added and removed.
        versions: Opsets, IR version, versions of the tools, and whether there is a signature, where
            they differ.
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


_LARGE = 32
"""Elements of a constant that counts as a weight."""

_TRAINED_ROLES = ("trainable", "state")


def verdict(old: Package, new: Package, changed_values: Collection[str]) -> Verdict:
    """Say whether a checkpoint that was trained with ``old`` can be used with ``new``."""
    before = {item.name: item for item in old.manifest.parameters}
    after = {item.name: item for item in new.manifest.parameters}
    roles = {name: item.role for name, item in before.items()}
    untrained = set(LOSS_SCALE_NAMES) - after.keys()  # nothing is lost with them
    trained = [
        item
        for item in before.values()
        if item.role in _TRAINED_ROLES and item.name not in untrained
    ]
    rescaled = _rescaled(old.manifest, new.manifest)
    problems = tuple(
        Problem(parameter=item.name, why=why)
        for item in trained
        if (why := _misfit(item, after.get(item.name)) or rescaled.get(item.name))
    )
    misfits = {problem.parameter for problem in problems}
    fresh = tuple(
        item.name
        for item in after.values()
        if item.role == "trainable"
        and (item.name in misfits or roles.get(item.name) != "trainable")
    )
    resets = _reset_reasons(old, new, fresh)
    opens = before.keys() == after.keys() and not any(
        _misfit(item, after[name])
        or (item.role == "trainable") != (after[name].role == "trainable")
        for name, item in before.items()
    )
    frozen = tuple(
        item.name
        for item in after.values()
        if item.role == "frozen"
        and roles.get(item.name) not in _TRAINED_ROLES
        and (item.name not in before or item.name in changed_values)
    )
    return Verdict(
        level="incompatible" if problems else "parameters only" if resets else "compatible",
        opens_as_is=opens,
        reset_reasons=resets,
        problems=problems,
        carry_over=tuple(item.name for item in trained if item.name not in misfits),
        starts_fresh=fresh,
        new_frozen_values=frozen,
        notes=tuple(_notes(old, new, frozen)),
    )


def app_impact(old: Manifest, new: Manifest) -> AppImpact:
    """Say what the app must do besides replacing the package."""
    calls = [
        *_calls("input", old.inputs, new.inputs),
        *_calls("output", old.all_outputs, new.all_outputs),
    ]
    batches = old.accumulation_steps, new.accumulation_steps
    if batches[0] != batches[1]:
        calls.append(f"the batches of a step change from {batches[0]} to {batches[1]}")
    if new.privacy is not None and old.privacy is None:
        calls.append("a step now takes private gradients only: make it with train_step")
    missing = _new_operators(old, new)
    least = old.minimum_onnxruntime, new.minimum_onnxruntime
    return AppImpact(
        calls_change=bool(calls),
        calls=tuple(calls),
        reduced_runtime_rebuild=bool(missing),
        reduced_runtime=tuple(missing),
        old_minimum_onnxruntime=least[0],
        new_minimum_onnxruntime=least[1],
        newer_onnxruntime_needed=_version(least[1]) > _version(least[0]),
    )


def _misfit(old: ParameterInfo, new: ParameterInfo | None) -> str | None:
    """Why the value of a parameter has no place, None if it has."""
    if new is None:
        return "the new package does not have it"
    if old.shape != new.shape:
        return f"its shape changes from {list(old.shape)} to {list(new.shape)}"
    if old.dtype != new.dtype:
        return f"its type changes from {old.dtype} to {new.dtype}"
    return None


def _rescaled(old: Manifest, new: Manifest) -> dict[str, str]:
    """Parameters of an adapter that counts otherwise than it did, and why."""
    before, after = old.adapter, new.adapter
    if before is None or after is None or before.alpha == after.alpha:
        return {}
    why = f"the adapter's alpha changes from {before.alpha} to {after.alpha}"
    return dict.fromkeys(before.parameters, why)


def _changed_matrices(old: Package, new: Package) -> int:
    """How many frozen tensors inside the models, such as matrices of few bits, have new values."""
    if old.manifest.segments is not None or new.manifest.segments is not None:
        weights = [
            {entry.path: entry.sha256 for entry in each.manifest.files.all()
             if entry.path.endswith(".weights")}
            for each in (old, new)
        ]  # fmt: skip
        return sum(weights[1].get(path, digest) != digest for path, digest in weights[0].items())
    before, after = (_large_constants(each) for each in (old, new))
    return sum(after.get(name, content) != content for name, content in before.items())


def _large_constants(package: Package) -> dict[str, bytes]:
    model = read_model(package.eval_model)
    return {
        each.name: hashlib.sha256(onnx.numpy_helper.to_array(each).tobytes()).digest()
        for each in model.graph.initializer
        if math.prod(each.dims) >= _LARGE
    }


def _computes(package: Package) -> dict[str, str] | None:
    """A digest of what each output for inference computes, whatever lies between is called."""
    file = package.manifest.files.inference_template
    if file is None:
        return None
    graph = read_model(package.path / file.path).graph
    known = _digests(graph, {})
    return {value.name: known.get(value.name, value.name) for value in graph.output}


def _digests(graph: onnx.GraphProto, outer: Mapping[str, str]) -> dict[str, str]:
    """A digest of each value of a graph, of its operator and of what that reads."""
    known = dict(outer)
    for tensor in graph.initializer:
        is_large = math.prod(tensor.dims) >= _LARGE  # those are compared by themselves
        content = list(tensor.dims) if is_large else onnx.numpy_helper.to_array(tensor).tolist()
        known[tensor.name] = repr((tensor.data_type, content))
    for node in graph.node:
        parts = [node.domain, node.op_type, *(known.get(name, name) for name in node.input)]
        for each in sorted(node.attribute, key=lambda attribute: str(attribute.name)):
            bodies = [each.g] if each.HasField("g") else each.graphs
            for body in bodies:
                places = {value.name: f"input {place}" for place, value in enumerate(body.input)}
                inside = _digests(body, known | places)
                parts += [each.name, *(inside.get(value.name, "") for value in body.output)]
            if not bodies:
                parts.append(each.SerializeToString(deterministic=True).hex())
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        known |= {name: f"{digest}.{place}" for place, name in enumerate(node.output)}
    return known


def _reset_reasons(old: Package, new: Package, fresh: Collection[str]) -> tuple[str, ...]:
    reasons = []
    kinds = old.manifest.optimizer.kind, new.manifest.optimizer.kind
    states = _state(old), _state(new)
    if kinds[0] != kinds[1]:
        reasons.append(f"the optimizer changes from {kinds[0]} to {kinds[1]}")
    elif states[0] != states[1]:
        reasons.append(
            f"the optimizer keeps {_named(states[1])} per parameter, and kept {_named(states[0])}"
        )
    # Without moments there is a step count and a learning rate, which go with any parameters.
    if fresh and any(states):
        shown = some([f"'{name}'" for name in sorted(fresh)], 3)
        reasons.append(f"the optimizer has no moments for {shown}")
    return tuple(reasons)


def _state(package: Package) -> tuple[StateVector, ...]:
    """What the optimizer keeps for every parameter."""
    model = read_model(package.optimizer_model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    inputs = [value.name for value in model.graph.input]
    return read_contract(metadata, inputs, str(package.optimizer_model)).state


def _named(state: tuple[StateVector, ...]) -> str:
    return ", ".join(vector.name for vector in state) or "nothing"


def _notes(before: Package, after: Package, frozen: Collection[str]) -> list[str]:
    old, new, notes = before.manifest, after.manifest, []
    if inside := _changed_matrices(before, after):
        notes.append(
            f"{inside} frozen tensors inside the models have new values; trained parameters were "
            "fitted to the old ones"
        )
    if frozen:
        notes.append(
            f"{len(frozen)} frozen parameters have new values; trained parameters were fitted "
            "to the old ones"
        )
    if old.loss != new.loss:
        notes.append(
            f"the loss changes from {old.loss} to {new.loss}: the optimizer's moments were "
            "gathered with the old one"
        )
    elif old.loss_options != new.loss_options:
        notes.append(
            "the loss has other options: the optimizer's moments were gathered with the old ones"
        )
    was, now = _computes(before) or {}, _computes(after) or {}
    if any(was[name] != now[name] for name in was.keys() & now.keys()):
        notes.append(
            "the model computes something else; trained parameters were fitted to what it computed"
        )
    same_kind = old.optimizer.kind == new.optimizer.kind
    if same_kind and old.optimizer != new.optimizer:
        notes.append("the optimizer continues with other settings")
    return notes


def _new_operators(old: Manifest, new: Manifest) -> list[str]:
    """Operators that some new model needs and no old model did, or not in that version."""
    known, needed = (
        {
            (f"{domain}.{name}", version)
            for domains in manifest.operators.by_model().values()
            for domain, names in domains.items()
            for name, version in names.items()
        }
        for manifest in (old, new)
    )
    names = {name for name, _ in known}
    return sorted(
        f"{name} of opset {version}" if name in names else name for name, version in needed - known
    )


def _calls(
    what: str,
    old: tuple[InputInfo, ...] | tuple[OutputInfo, ...],
    new: tuple[InputInfo, ...] | tuple[OutputInfo, ...],
) -> list[str]:
    """How the inputs or outputs differ for a caller."""
    before, after = {item.name: item for item in old}, {item.name: item for item in new}
    found = [f"{what} '{name}' is gone" for name in before if name not in after]
    found += [
        f"{what} '{item.name}' is new: {_text(item)}" for item in new if item.name not in before
    ]
    for name, item in before.items():
        if name in after and _differs(item, after[name]):
            found.append(f"{what} '{name}' changes from {_text(item)} to {_text(after[name])}")
    common = [name for name in before if name in after]
    if common != [name for name in after if name in before]:
        found.append(f"the {what}s are in another order: {', '.join(after)}")
    return found


def _differs(old: InputInfo | OutputInfo, new: InputInfo | OutputInfo) -> bool:
    """Whether a tensor that fitted the old description may not fit the new one."""
    # An output that an evaluation takes for its accuracy, too, is read as before.
    same_role = old.role == new.role or (old.role, new.role) == ("additional", "prediction")
    if not same_role or (old.dtype, len(old.shape)) != (new.dtype, len(new.shape)):
        return True
    if _details(old) != _details(new):
        return True
    return any(
        isinstance(after, int) and before != after
        for before, after in zip(old.shape, new.shape, strict=True)
    )


def _text(item: InputInfo | OutputInfo) -> str:
    dims = ", ".join("?" if dim is None else str(dim) for dim in item.shape)
    parts = [item.role, *(f"{key} {value}" for key, value in _details(item).items())]
    return f"{item.dtype}[{dims}] ({', '.join(parts)})"


def _details(item: InputInfo | OutputInfo) -> dict[str, object]:
    """A tensor's further properties, such as the number of classes."""
    known = ("name", "dtype", "shape", "role")
    return {k: v for k, v in item.as_dict().items() if k not in known and v is not None}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


# What the other parts of the comparison look at; all other keys are settings.
_STRUCTURE = {
    "schema_version", "tool", "files", "minimum_onnxruntime", "ir_version", "opsets", "inputs",
    "outputs", "evaluation_outputs", "parameters", "operators", "roles", "digest", "recipe_digest",
    "layout", "inference", "self_check",
}  # fmt: skip


def diff_packages(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> PackageDiff:
    """Compare the package that devices have with the one that they would get."""
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
        versions=tuple(_changes(_versions(first), _versions(second))),
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


def _versions(package: Package) -> dict[str, Any]:
    manifest = package.manifest
    signed = os.path.lexists(signature_path(package.path / package.manifest_name))
    return {
        "signature": "present" if signed else None,
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
            what = f"The manifest and the checkpoint disagree about parameter '{item.name}'."
            raise OdtpackError("package-inconsistent", what, where=str(package.path))
    return values


def _spec(parameter: ParameterInfo | None) -> ParameterSpec | None:
    if parameter is None:
        return None
    return ParameterSpec(**{name: getattr(parameter, name) for name in ParameterSpec.model_fields})


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


_MOST_NAMES = 10
_WIDEST = 60  # characters of a setting in a table; the JSON format has all of them


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table, or lines where it has no header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: str = ""


def headline(verdict: Verdict) -> str:
    """Say the verdict in one sentence."""
    if verdict.level == "incompatible":
        return "incompatible: a trained checkpoint cannot be used with the new package"
    how = (
        "can be used unchanged"
        if verdict.opens_as_is
        else "can be used after its parameters are copied to the new one"
    )
    if verdict.level == "parameters only":
        how = how.replace("unchanged", "once its optimizer state is removed")
        return f"parameters only: a trained checkpoint {how}, without its optimizer state"
    return f"compatible: a trained checkpoint {how}, with its optimizer state"


def sections(diff: PackageDiff) -> Iterator[Section]:
    """Yield what there is to say, the most important first."""
    for title, lines in (
        ("Trained checkpoints", _verdict_lines(diff.verdict)), ("App", _app_lines(diff.app))
    ):  # fmt: skip
        yield Section(title, (), tuple((line,) for line in lines))
    files = [(each.file, each.old_size, each.new_size) for each in diff.files if each.changed]
    rows = tuple(
        (file, _size(old), _size(new), _change(old, new))
        for file, old, new in (*files, ("together", diff.old_size, diff.new_size))
    )
    yield Section("Files", ("File", "Old", "New", "Change"), rows, "Old,New,Change")
    if diff.operators:
        yield Section(
            "Operators",
            ("Model", "Domain", "Added", "Removed"),
            tuple(
                (change.model, change.domain, ", ".join(change.added), ", ".join(change.removed))
                for change in diff.operators
            ),
        )
    for title, changes in (("Settings", diff.settings), ("Versions", diff.versions)):
        if changes:
            yield Section(title, (title[:-1], "Old", "New"), tuple(map(_change_row, changes)))
    if diff.parameters:
        yield Section(
            "Parameters",
            ("Parameter", "Old", "New", "Elements that differ", "Largest change"),
            tuple(_parameter_row(item) for item in diff.parameters),
            "Elements that differ,Largest change",
        )


def markdown(diff: PackageDiff) -> str:
    """Return the difference as Markdown for a comment, without HTML."""
    lines = [f"**{markdown_text(headline(diff.verdict))}**", ""]
    for section in sections(diff):
        lines += [f"### {section.title}", ""]
        if section.header:
            flush = section.figures.split(",")
            rules = ("---:" if title in flush else "---" for title in section.header)
            lines += [markdown_row(section.header), markdown_row(rules)]
            lines += [markdown_row(map(markdown_text, row)) for row in section.rows]
        else:
            lines += [f"- {markdown_text(row[0])}" for row in section.rows]
        lines.append("")
    return "\n".join(lines)


def plain(diff: PackageDiff) -> str:
    """Return the difference as text in columns."""
    lines = [clean(headline(diff.verdict))]
    for section in sections(diff):
        rows = [[clean(cell) for cell in row] for row in (section.header, *section.rows) if row]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(section.title.lower())
        cells = (
            (f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)) for row in rows
        )
        lines += [f"  {'  '.join(row)}".rstrip() for row in cells]
    return "\n".join(lines) + "\n"


def _verdict_lines(verdict: Verdict) -> list[str]:
    lines = [f"'{problem.parameter}': {problem.why}" for problem in verdict.problems]
    lines += [f"the state of the optimizer is reset: {reason}" for reason in verdict.reset_reasons]
    if verdict.level != "incompatible" and not verdict.opens_as_is:
        lines.append(f"carried over: {_names(verdict.carry_over)}")
    if verdict.starts_fresh:
        fresh = _names(verdict.starts_fresh)
        lines.append(f"from the new checkpoint, and trained from there: {fresh}")
    if verdict.new_frozen_values:
        lines.append(f"from the new checkpoint only: {_names(verdict.new_frozen_values)}")
    lines += verdict.notes
    if verdict.opens_as_is and not verdict.reset_reasons and not verdict.notes:
        lines.append("nothing to do")
    return lines


def _app_lines(app: AppImpact) -> list[str]:
    operators = (
        f"a reduced build of ONNX Runtime must be made again for {_names(app.reduced_runtime)}"
        if app.reduced_runtime_rebuild
        else "the files need no further operator; for a reduced build of ONNX Runtime see "
        "odtpack config NEW --check FILE"
    )
    calls = "calls must change" if app.calls_change else "calls stay as they are"
    lines = [calls, *app.calls, operators]
    if app.newer_onnxruntime_needed:
        lines.append(
            f"ONNX Runtime {app.new_minimum_onnxruntime} or newer is needed, and was "
            f"{app.old_minimum_onnxruntime}"
        )
    return lines


def _parameter_row(item: ParameterChange) -> tuple[str, ...]:
    differ = "" if item.changed_elements is None else f"{item.changed_elements} of {item.elements}"
    largest = "" if item.largest_change is None else f"{item.largest_change:.3g}"
    if item.changed_elements and item.largest_change is None:
        largest = "not finite"
    return item.name, _spec_text(item.old), _spec_text(item.new), differ, largest


def _spec_text(spec: ParameterSpec | None) -> str:
    if spec is None:
        return "none"
    computed = f", computed in {spec.model_dtype}" if spec.model_dtype else ""
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}] {spec.role}{computed}"


def _names(names: Sequence[str]) -> str:
    return some(names, _MOST_NAMES) or "none"


def _json(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _change_row(item: ValueChange) -> tuple[str, str, str]:
    """A setting and its values, which are cut around what differs where they are long."""
    old, new = (" ".join(_json(value).split()) for value in (item.old, item.new))
    if max(len(old), len(new)) > _WIDEST:
        pairs = enumerate(zip(old, new, strict=False))
        same = min(len(old), len(new))  # characters, where one begins with the other
        start = max(0, next((at for at, (a, b) in pairs if a != b), same) - _WIDEST // 2)
        dots = "…" if start else ""
        old, new = (f"{dots}{shortened(text[start:], _WIDEST)}" for text in (old, new))
    return item.name, old, new


def _size(size: int | None) -> str:
    return "none" if size is None else format_bytes(size)


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return "added" if old is None else "removed"
    if old == new:
        return "same size"
    sign = "+" if new > old else "-"
    share = f" ({sign}{format_percent(abs(new - old) / old)})" if old else ""
    return f"{sign}{format_bytes(abs(new - old))}{share}"
