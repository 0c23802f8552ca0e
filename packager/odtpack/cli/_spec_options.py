"""The options of ``odtpack build``, from the fields of :class:`odtpack.build_spec.BuildSpec`.

This module imports nothing large.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import typer

from odtpack.build_spec import options
from odtpack.cli._options import LOSS, LOSS_OPTION, LossName, OptimizerName
from odtpack.cli._ort import ORT_PLATFORM, ORT_STYLE, StyleChoice
from odtpack.ort.choices import Platform
from odtpack.spec.option import Option

_Command = TypeVar("_Command", bound=Callable[..., None])

OPTIMIZER_SETTINGS: Final = {
    "weight_decay": "Weight decay; adam and sgd: an L2 penalty.  [default: 0]",
    "momentum": "SGD: momentum.  [default: 0]",
    "beta1": "Adam, AdamW, Lion: decay of the first moment.  [default: 0.9]",
    "beta2": "Adam, AdamW: decay of the second moment.  [default: 0.999; Lion 0.99]",
    "epsilon": "Adam, AdamW: added to the denominator.  [default: AdamW 1e-6, Adam 1e-8]",
}
"""Settings of optimizers that have an option of their own, and its help."""

# Fields that are given by several options, or by one whose choices come from a registry.
_SEVERAL: Final[dict[str, dict[str, tuple[Any, Any]]]] = {
    "loss": {"loss": (LossName | None, LOSS)},
    "loss_options": {"loss_option": (list[str] | None, LOSS_OPTION)},
    "optimizer": {
        "optimizer": (OptimizerName | None, typer.Option(help="Optimizer.  [default: adamw]"))
    },
    "optimizer_options": {
        **{
            name: (float | None, typer.Option(metavar="X", help=text))
            for name, text in OPTIMIZER_SETTINGS.items()
        },
        "optimizer_option": (
            list[str] | None,
            typer.Option(
                metavar="KEY=VALUE",
                help="Further setting of the optimizer; may be repeated. adamw: formula "
                "(reference, pytorch), bias_correction; sgd: dampening, nesterov; adafactor: "
                "beta2_decay, epsilon2, clip_threshold.",
            ),
        ),
    },
    "ort_format": {
        "ort_format": (
            bool,
            typer.Option(
                "--ort-format", help="Also write ORT format and the operators for a reduced build."
            ),
        ),
        "ort_style": (StyleChoice | None, ORT_STYLE),
        "ort_platform": (list[Platform] | None, ORT_PLATFORM),
    },
}


def takes_spec(before: str) -> Callable[[_Command], _Command]:
    """Give a command the options of a build, which it takes as keywords.

    Args:
        before: Parameter of the command in front of which they are listed.
    """

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        place = [parameter.name for parameter in own].index(before)
        own[place:place] = _parameters()
        all_named = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
        command.__signature__ = signature.replace(parameters=all_named)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own} | {"return": None}
        return command

    return decorate


def _parameters() -> Iterator[inspect.Parameter]:
    """The parameters of a command that takes every option, in the order of the fields."""
    for field, option in options():
        kinds = _SEVERAL.get(field.name, {})
        if option.flag:
            kinds = {field.name: _single(field, option)}
        for name, (kind, given) in kinds.items():
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if kind is bool else None,
                annotation=Annotated[kind, given],
            )


def _single(field: dataclasses.Field[Any], option: Option) -> tuple[Any, Any]:
    """Type and option of a field that one option gives."""
    given = typer.Option(option.flag, metavar=option.metavar, help=option.help)
    kind: Any = field.type
    if kind is bool:
        return kind, given
    parts = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is tuple:
        return list[str] | None, given
    if get_origin(kind) is not Literal and len(parts) == 1:
        kind = parts[0]
    if get_origin(kind) is Literal:
        make: Any = StrEnum
        kind = make(field.name, {each: each for each in get_args(kind)})
    elif not isinstance(kind, type):
        kind = str  # a text that _build_options reads
    return kind | None, given
