"""Losses: one frozen dataclass each, whose fields are its options.

To add one, write it in the file of its family, list it here, and add its name to the
manifest's schema and to the command line; a test holds the three together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from odtpack.errors import OdtpackError
from odtpack.losses.base import Loss, Target, TargetRole
from odtpack.losses.classification import CrossEntropy, NegativeLogLikelihood
from odtpack.losses.ctc import CTC
from odtpack.losses.distillation import Distillation, KLDivergence
from odtpack.losses.elementwise import (
    BinaryCrossEntropyWithLogits,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    SmoothL1,
)
from odtpack.losses.metric import Contrastive, InfoNCE, TripletMargin
from odtpack.losses.options import parse, same_type

__all__ = ["LOSSES", "Loss", "Target", "TargetRole", "make_loss", "parse_options"]

LOSSES: dict[str, type[Loss]] = {
    loss.name: loss
    for loss in (
        CrossEntropy,
        MeanSquaredError,
        BinaryCrossEntropyWithLogits,
        MeanAbsoluteError,
        Huber,
        SmoothL1,
        NegativeLogLikelihood,
        KLDivergence,
        Distillation,
        TripletMargin,
        Contrastive,
        InfoNCE,
        CTC,
    )
}


def make_loss(name: str, options: Mapping[str, object] | None = None) -> Loss:
    """Make a loss from its name and options.

    Args:
        name: Key of :data:`LOSSES`.
        options: Values by option, as docs/losses.md lists them.

    Raises:
        OdtpackError: There is no such loss or option, or a value is out of range.
    """
    if name not in LOSSES:
        raise OdtpackError(
            "unknown-loss", f"there is no loss {name!r}", hint=f"choose one of {', '.join(LOSSES)}"
        )
    kind: Callable[..., Loss] = LOSSES[name]
    given = dict(options or {})
    known = LOSSES[name].option_names()
    for option in given:
        if option not in known:
            raise OdtpackError(
                "unknown-loss-option",
                f"{name} has no option {option!r}",
                hint=f"its options are {', '.join(known)}" if known else "it has none",
            )
    return kind(**given)


def parse_options(name: str, texts: list[str]) -> dict[str, object]:
    """Read options of a loss as the command line has them.

    Args:
        name: Name of the loss.
        texts: ``key=value`` each; numbers, words, or numbers separated by commas.

    Raises:
        OdtpackError: A text has no ``=``, or names an option twice.
    """
    options: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise OdtpackError(
                "bad-loss-option",
                f"--loss-option {text!r} is not key=value",
                hint="for example --loss-option label_smoothing=0.1",
            )
        if key in options:
            raise OdtpackError(
                "named-twice", f"--loss-option gives {key!r} more than once", hint="give it once"
            )
        options[key] = parse(value)
    usual = LOSSES[name].defaults() if name in LOSSES else {}
    return {key: same_type(value, usual.get(key)) for key, value in options.items()}
