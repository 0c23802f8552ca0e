"""Optimizers: one file each, with one frozen dataclass whose fields are its hyperparameters.

An optimizer is a formula (:class:`~odtpack.optimizers.common.base.Optimizer`); around it
:func:`~odtpack.optimizers.common.model.optimizer_model` puts clipping and parameter groups. To
add one, write ``odtpack/optimizers/<kind>.py``; ``lion.py`` is the one to copy from. Everything
else follows from the declaration: the command line, recipes, the manifest, the documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from odtpack.choices import declared_classes
from odtpack.errors import OdtpackError
from odtpack.optimizers.adafactor import Adafactor
from odtpack.optimizers.adam import Adam
from odtpack.optimizers.adamw import AdamW
from odtpack.optimizers.common.base import (
    FIRST,
    SECOND,
    Group,
    GroupRule,
    Optimizer,
    resolve_groups,
)
from odtpack.optimizers.common.model import Clip, optimizer_model
from odtpack.optimizers.lion import Lion
from odtpack.optimizers.sgd import SGD

__all__ = [
    "FIRST",
    "OPTIMIZERS",
    "SECOND",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Clip",
    "Group",
    "GroupRule",
    "Lion",
    "Optimizer",
    "make_optimizer",
    "optimizer_model",
    "resolve_groups",
]

# mypy does not take an abstract class as type[T]: https://github.com/python/mypy/issues/4717
OPTIMIZERS: dict[str, type[Optimizer]] = declared_classes(__name__, Optimizer, "kind")  # type: ignore[type-abstract]

_BOOLEANS = {"true": True, "false": False}


def make_optimizer(kind: str, options: Mapping[str, str | float]) -> Optimizer:
    """Make an optimizer from options as a command line has them.

    Args:
        kind: Key in :data:`OPTIMIZERS`.
        options: Hyperparameters by name; text is read as the type of the default.

    Raises:
        OdtpackError: There is no such optimizer, or an option is unknown, cannot be read, or is
            out of range.
    """
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise OdtpackError(
            "bad-argument",
            f"optimizer cannot be {kind!r:.60}",
            hint=f"pass one of {', '.join(map(repr, OPTIMIZERS))}",
        )
    chosen = OPTIMIZERS[kind]
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(chosen)}
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name not in defaults:
            raise OdtpackError(
                "option-not-used",
                f"the optimizer {kind} has no option {name!r}",
                hint=f"it has {', '.join(sorted(defaults))}",
            )
        given[name] = _read(name, value, defaults[name]) if isinstance(value, str) else value
    return chosen(**given)


def _read(name: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            return _BOOLEANS[text.lower()]
        return text if isinstance(default, str) else float(text)
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise OdtpackError(
            "bad-hyperparameter", f"{name} is {text!r}; it must be {kind}",
            hint=f"write for example: {name}={str(default).lower()}",
        ) from None  # fmt: skip
