"""Says whether what a device trained with one package goes on with another."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from odtpack.update.diff_model import AppImpact, Problem, Verdict
from odtpack_runtime.package.manifest import InputInfo, Manifest, OutputInfo, ParameterInfo
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.optimizer_contract import StateVector, read_contract

_TRAINED_ROLES = ("trainable", "state")


def verdict(old: Package, new: Package, changed_values: Collection[str]) -> Verdict:
    """Say whether a checkpoint that was trained with ``old`` goes on with ``new``.

    Args:
        old: The package that the checkpoint was trained with.
        new: The package to go on with.
        changed_values: Names of the parameters whose values in the packages differ.
    """
    before = {item.name: item for item in old.manifest.parameters}
    after = {item.name: item for item in new.manifest.parameters}
    trained = [item for item in before.values() if item.role in _TRAINED_ROLES]
    problems = tuple(
        Problem(parameter=item.name, why=why)
        for item in trained
        if (why := _misfit(item, after.get(item.name)))
    )
    misfits = {problem.parameter for problem in problems}
    fresh = tuple(
        item.name
        for item in after.values()
        if item.role == "trainable"
        and (item.name in misfits or _role(before.get(item.name)) != "trainable")
    )
    resets = _reset_reasons(old, new, fresh)
    opens = before.keys() == after.keys() and not any(
        _misfit(item, after[name])
        or (item.role == "trainable") != (_role(after[name]) == "trainable")
        for name, item in before.items()
    )
    frozen = tuple(
        item.name
        for item in after.values()
        if item.role == "frozen"
        and _role(before.get(item.name)) not in _TRAINED_ROLES
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
        notes=tuple(_notes(old.manifest, new.manifest, frozen)),
    )


def app_impact(old: Manifest, new: Manifest) -> AppImpact:
    """Say what the app must do besides replacing the package.

    Args:
        old: Manifest of the old package.
        new: Manifest of the new one.
    """
    calls = [
        *_calls("input", old.inputs, new.inputs),
        *_calls("output", old.all_outputs, new.all_outputs),
    ]
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


def _role(parameter: ParameterInfo | None) -> str | None:
    return None if parameter is None else parameter.role


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
        reasons.append(f"there are no moments for {_listed(fresh)}")
    return tuple(reasons)


def _state(package: Package) -> tuple[StateVector, ...]:
    """What the optimizer keeps for every parameter."""
    model = onnx.load_model(str(package.optimizer_model))
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    inputs = [value.name for value in model.graph.input]
    return read_contract(metadata, inputs, str(package.optimizer_model)).state


def _named(state: tuple[StateVector, ...]) -> str:
    return ", ".join(vector.name for vector in state) or "nothing"


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:3]
    rest = len(names) - len(shown)
    return ", ".join(f"'{name}'" for name in shown) + (f" and {rest} more" if rest else "")


def _notes(old: Manifest, new: Manifest, frozen: Collection[str]) -> list[str]:
    notes = []
    if frozen:
        notes.append(
            f"{len(frozen)} frozen parameters have new values; trained parameters were fitted "
            "to the old ones"
        )
    if old.loss != new.loss:
        notes.append(
            f"the loss changes from {old.loss} to {new.loss}: moments that go over were gathered "
            "with the old one"
        )
    same_kind = old.optimizer.kind == new.optimizer.kind
    if same_kind and old.optimizer != new.optimizer:
        notes.append("the optimizer goes on with other settings")
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
    if (old.dtype, old.role, len(old.shape)) != (new.dtype, new.role, len(new.shape)):
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
    """What is said of a tensor beyond its type and shape, such as the number of classes."""
    known = ("name", "dtype", "shape", "role")
    return {k: v for k, v in item.as_dict().items() if k not in known and v is not None}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
