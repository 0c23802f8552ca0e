"""Options that say what to build, laid over a recipe or standing alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from odtpack.build_spec import BuildSpec, options
from odtpack.cli._ort import read_formats
from odtpack.cli._spec_options import OPTIMIZER_SETTINGS
from odtpack.errors import OdtpackError
from odtpack.spec.option import Group


def overlay(given: Mapping[str, Any], recipe: BuildSpec | None) -> BuildSpec:
    """What to build: each option that was given takes the place of the recipe's key.

    Another loss or optimizer than the recipe's drops the options of the recipe's.

    Args:
        given: Options as typer reads them, by parameter; None, empty or false if not given.
        recipe: What the recipe asks for, if there is one.

    Raises:
        OdtpackError: An option cannot be read, is unknown or out of range; or model or loss
            are neither given nor in a recipe.
    """
    given = {key: _plain(value) for key, value in given.items() if value not in (None, (), [])}
    if recipe is None:
        for name, key in (("MODEL.onnx", "model"), ("--loss", "loss")):
            if key not in given:
                raise OdtpackError(
                    "usage",
                    f"{name} is missing, and there is no --recipe to name it",
                    hint="odtpack build --help",
                )
        recipe = BuildSpec(model=Path(), loss="")
    values: dict[str, Any] = {"model": given.get("model", recipe.model)}
    for field, option in options():
        value = given.get(field.name)
        if not option.flag or value is None:
            continue
        read: Callable[[Any], Any] = _READERS.get(field.name) or (lambda plain: plain)
        if isinstance(value, bool):
            if value:  # a switch turns the default
                values[field.name] = not field.default
        elif isinstance(value, list | tuple):
            values[field.name] = tuple(read(each) for each in value)
        else:
            values[field.name] = read(value)
    if values.keys() & {"clip_norm", "clip_value"}:
        values = {"clip_norm": None, "clip_value": None, **values}
    formats = read_formats(
        bool(given.get("ort_format")), given.get("ort_style"), given.get("ort_platform")
    )
    if formats is not None:
        values["ort_format"] = formats
    return dataclasses.replace(recipe, **_loss(given, recipe), **_optimizer(given, recipe) | values)


def _plain(value: Any) -> Any:
    """The text of a choice that stands for a text."""
    return value.value if isinstance(value, StrEnum) else value


def _loss(given: Mapping[str, Any], recipe: BuildSpec) -> dict[str, Any]:
    name = given.get("loss", recipe.loss)
    kept = name == recipe.loss
    loss_options = dict(recipe.loss_options) if kept else {}
    if "loss_option" in given:
        from odtpack.losses import parse_options

        loss_options |= parse_options(name, list(given["loss_option"]))
    found = {"loss": name, "loss_options": loss_options}
    return found if kept or "loss_inputs" in given else found | {"loss_inputs": ()}


def _optimizer(given: Mapping[str, Any], recipe: BuildSpec) -> dict[str, Any]:
    kind = given.get("optimizer", recipe.optimizer)
    settings = dict(recipe.optimizer_options) if kind == recipe.optimizer else {}
    own = {name: given.get(name) for name in OPTIMIZER_SETTINGS}
    settings |= read_optimizer_options(kind, own, given.get("optimizer_option", ()))
    return {"optimizer": kind, "optimizer_options": settings}


def read_optimizer_options(
    kind: str, settings: Mapping[str, float | None], options: Iterable[str]
) -> dict[str, str | float]:
    """Read the options about an optimizer.

    Args:
        kind: Its name.
        settings: Settings with an option of their own; None where it was not given.
        options: Texts of ``--optimizer-option``.

    Raises:
        OdtpackError: A setting is given twice, or not of this optimizer.
    """
    given: dict[str, str | float] = {}
    for name, value in settings.items():
        if value is None:
            continue
        from odtpack.optimizers import OPTIMIZERS

        fields = [field.name for field in dataclasses.fields(OPTIMIZERS[kind])]
        if name not in fields:
            option = f"--{name.replace('_', '-')}"
            raise OdtpackError(
                "option-not-used",
                f"{option} is not a setting of the optimizer {kind}",
                hint=f"leave {option} out; {kind} has {', '.join(sorted(fields))}",
            )
        given[name] = value
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name in given:
            raise OdtpackError(
                "bad-option",
                f"--optimizer-option {option!r} "
                + ("is a second value" if equals else "is not KEY=VALUE"),
            )
        given[name] = text
    return given


def _read_group(text: str) -> Group:
    """Read ``GLOB:lr=X,decay=X``; names may hold colons, so the last one counts."""
    from odtpack.optimizers import GroupRule

    pattern, colon, rest = text.rpartition(":")
    numbers: dict[str, float] = {}
    try:
        for part in rest.split(","):
            key, _, value = part.partition("=")
            if key not in ("lr", "decay") or key in numbers:
                raise ValueError(key)
            numbers[key] = float(value)
        if not pattern or not colon:
            raise ValueError(pattern)
    except ValueError:
        raise OdtpackError("bad-group", f"--group {text!r} is not GLOB:lr=X,decay=X") from None
    rule = GroupRule(pattern, numbers.get("lr", 1.0), numbers.get("decay"))
    return rule.pattern, rule.learning_rate_scale, rule.weight_decay


def _read_schedule(text: str) -> Any:
    from odtpack_runtime.training.schedules import ScheduleSpec

    return ScheduleSpec.parse(text)


# How the text of an option becomes the value of its field, where it is not that.
_READERS: dict[str, Callable[[str], Any]] = {"groups": _read_group, "schedule": _read_schedule}
