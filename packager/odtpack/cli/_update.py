"""Options that say how parameters are updated, from text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from odtpack.errors import OdtpackError

if TYPE_CHECKING:
    from odtpack.optimizers import GroupRule, Optimizer
    from odtpack.update import Update


def read_optimizer(
    kind: str, settings: Mapping[str, float | None], options: Iterable[str]
) -> Optimizer:
    """Make the optimizer that options describe.

    Args:
        kind: Its name.
        settings: Settings with an option of their own; None where it was not given.
        options: Texts of ``--optimizer-option``.

    Raises:
        OdtpackError: A setting is given twice, unknown, not of this optimizer, or out of range.
    """
    from odtpack.optimizers import OPTIMIZERS, make_optimizer

    given: dict[str, str | float] = {}
    for name, value in settings.items():
        if value is None:
            continue
        fields = [field.name for field in dataclasses.fields(OPTIMIZERS[kind])]
        if name not in fields:
            option = f"--{name.replace('_', '-')}"
            raise OdtpackError(
                "option-not-used",
                f"{option} is no setting of the optimizer {kind}",
                hint=f"leave {option} out; {kind} has {', '.join(sorted(fields))}",
            )
        given[name] = value
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name in given:
            raise OdtpackError(
                "bad-option",
                f"--optimizer-option {option!r} "
                + ("is a second value" if equals else "is no KEY=VALUE"),
                hint="write for example: --optimizer-option nesterov=true",
            )
        given[name] = text
    return make_optimizer(kind, given)


def read_update(
    *,
    clip_norm: float | None,
    clip_value: float | None,
    groups: Iterable[str],
    decay_vectors: bool,
    schedule: str | None,
) -> Update:
    """Make the update that options describe.

    Raises:
        OdtpackError: A text cannot be read, or a number is out of range.
    """
    from odtpack.optimizers import Clip
    from odtpack.update import Update
    from odtpack_runtime.schedules import ScheduleSpec

    return Update(
        Clip(clip_norm, clip_value),
        tuple(_read_group(text) for text in groups),
        decay_vectors,
        None if schedule is None else ScheduleSpec.parse(schedule),
    )


def _read_group(text: str) -> GroupRule:
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
        raise OdtpackError(
            "bad-group",
            f"--group {text!r} is no GLOB:lr=X,decay=X",
            hint="write for example: --group 'head.*:lr=10,decay=0'",
        ) from None
    return GroupRule(pattern, numbers.get("lr", 1.0), numbers.get("decay"))
