"""Optimizers, in order of increasing complexity: one file each.

An optimizer is a formula (:class:`~odtpack.optimizers.base.Optimizer`); around it
:func:`~odtpack.optimizers.model.optimizer_model` puts clipping and parameter groups. To add
one, write its class and name it in :data:`OPTIMIZERS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from odtpack.errors import OdtpackError
from odtpack.optimizers.adafactor import Adafactor
from odtpack.optimizers.adam import Adam, AdamW
from odtpack.optimizers.base import FIRST, SECOND, Optimizer
from odtpack.optimizers.groups import Group, GroupRule, resolve_groups
from odtpack.optimizers.lion import Lion
from odtpack.optimizers.model import Clip, optimizer_model
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

OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.kind: kind for kind in (SGD, Lion, Adam, AdamW, Adafactor)
}

_BOOLEANS = {"true": True, "false": False}


def make_optimizer(kind: str, options: Mapping[str, str | float]) -> Optimizer:
    """Make an optimizer from options as a command line has them.

    Args:
        kind: Key in :data:`OPTIMIZERS`.
        options: Hyperparameters by name; text is read as the type of the default.

    Raises:
        OdtpackError: An option is unknown, cannot be read, or is out of range.
    """
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
