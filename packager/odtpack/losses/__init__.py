"""Losses: one file each, with one frozen dataclass whose fields are its options.

To add one, write ``odtpack/losses/<name>.py``; ``mse.py`` is the one to copy from. Everything
else follows from the declaration: the command line, recipes, the manifest, the documentation.
What several losses share lies in ``common``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from odtpack.choices import declared_classes
from odtpack.errors import OdtpackError
from odtpack.losses.common.base import Loss, Target, TargetRole, same_type
from odtpack.option import parse_value

__all__ = ["LOSSES", "Loss", "Target", "TargetRole", "make_loss", "parse_options"]

# mypy does not take an abstract class as type[T]: https://github.com/python/mypy/issues/4717
LOSSES: dict[str, type[Loss]] = declared_classes(__name__, Loss)  # type: ignore[type-abstract]


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
    usual = LOSSES[name].defaults()
    given = {key: same_type(value, usual.get(key)) for key, value in (options or {}).items()}
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
    """Read options of a loss as the command line has them, ``key=value`` each."""
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
        options[key] = parse_value(value)
    usual = LOSSES[name].defaults() if name in LOSSES else {}
    return {key: same_type(value, usual.get(key)) for key, value in options.items()}
