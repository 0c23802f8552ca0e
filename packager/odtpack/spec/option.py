"""What the fields of :class:`odtpack.build_spec.BuildSpec` are made of, and how a recipe is read.

This module imports nothing large, for the command line; its annotations are types, not text.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from odtpack.choices import Pool
from odtpack.ort.choices import OrtFormat, Platform, Style

Group = tuple[str, float, float | None]
"""Pattern, factor of the learning rate, and weight decay or None for the optimizer's."""


@dataclasses.dataclass(frozen=True)
class Head:
    """A classification head for an encoder, see :func:`odtpack.model.head.add_head`."""

    pool: Pool
    classes: int
    seed: int = 0
    input: str | None = None


_VERSION = re.compile(r"\d{1,4}\.\d{1,4}(\.\d{1,4})?")


@dataclasses.dataclass(frozen=True)
class Option:
    """How people give a field.

    Attributes:
        key: Its key in a recipe, below its tables: ``"formats.nominal"``.
        flag: Its option on the command line; of a switch that one that turns the default.
            Empty if it is made of several, see :mod:`odtpack.cli._spec_options`, or of none.
        help: What the command line says of it.
        doc: What the reference of recipes says of it.
        metavar: What stands for its value on the command line.
        check: Raises ``ValueError`` for a text that is none of its values.
        read: Makes the field of what a recipe has there, where that is not the field itself.
    """

    key: str
    flag: str = ""
    help: str = ""
    doc: str = ""
    metavar: str | None = None
    check: Callable[[str], str] | None = None
    read: Callable[[Any], Any] | None = None


def given(*texts: Any, **more: Any) -> dict[str, Option]:
    """Metadata of a field: the attributes of :class:`Option`, key, flag, help and doc first."""
    return {"option": Option(*texts, **more)}


def check_version(text: str) -> str:
    """A version of ONNX Runtime, as it is; ``ValueError`` for anything else."""
    if not _VERSION.fullmatch(text):
        msg = f'must be a version such as "1.20", found {text[:40]!r}'
        raise ValueError(msg)
    return text


def check_size(text: str) -> str:
    """A size with its unit, as it is; ``ValueError`` for anything else."""
    from odtpack_simulator.values.units import parse_quantity

    parse_quantity(text, "bytes")
    return text


def read_options(table: Any) -> dict[str, Any]:
    """Options of a loss or an optimizer that are not the defaults."""
    given = table.model_dump(exclude_defaults=True)
    return {k: v for k, v in given.items() if k not in ("kind", "inputs", "decay_vectors")}


def read_groups(tables: Any) -> tuple[Group, ...]:
    """Parameter groups, as :data:`Group`."""
    return tuple((each.parameters, each.learning_rate_scale, each.weight_decay) for each in tables)


def read_schedule(table: Any) -> Any:
    """The schedule of a recipe, or None."""
    if table is None:
        return None
    from odtpack_runtime.training.schedules import ScheduleSpec

    settings = table.model_dump(exclude_defaults=True, exclude={"kind", "learning_rate"})
    return ScheduleSpec(table.kind, settings, table.learning_rate)


def read_head(table: Any) -> Head | None:
    """The head of a recipe, or None."""
    return None if table is None else Head(**table.model_dump())


def read_ort_format(table: Any) -> OrtFormat | None:
    """The variants in ORT format that a recipe asks for, or None."""
    if not table.ort:
        return None
    styles = tuple(Style(name) for name in table.ort_styles)
    return OrtFormat(styles, tuple(Platform(name) for name in table.ort_platforms) or (None,))
