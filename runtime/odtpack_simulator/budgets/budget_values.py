"""What the keys of ``budgets.toml`` mean: limits, absolute or against a baseline.

The keys are those of :data:`~odtpack_simulator.budgets.metrics.METRICS`: a new metric
is a new key, in the file, in its schema and in that of recipes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    InstanceOf,
    Tag,
    WithJsonSchema,
    create_model,
)

from odtpack_simulator.budgets.budget_metric import BudgetMetric
from odtpack_simulator.budgets.metrics import METRICS
from odtpack_simulator.result.result import CheckUnit
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.schema_errors import TAG_PREFIX
from odtpack_simulator.values.units import parse_quantity

MAX_LIMITS: Final = 8
"""Most limits in the list of one key."""

Level = Literal["error", "warn"]
Kind = Literal["absolute", "percent", "difference"]

_DIMENSIONS: Final[dict[CheckUnit, tuple[str, float]]] = {
    "B": ("bytes", 1.0),
    "ms": ("duration", 1e3),
    "s": ("duration", 1.0),
    "J": ("energy", 1.0),
    "%": ("ratio", 100.0),
}
"""Unit of a metric -> dimension of its units in the file, and the metric's units per base unit."""

_LARGEST: Final = 1e300  # whole numbers of TOML have no end; NaN is not at most this either
_SIGNED = re.compile(r"\s*([+-])\s*(\S.*)")


@dataclass(frozen=True, slots=True)
class Bound:
    """The value of a limit, in the unit of its metric.

    ``figure`` is the limit itself (``absolute``), or how far a figure may be above, or
    below zero under, that of a baseline: in percent of it (``percent``), or in the
    metric's unit (``difference``).
    """

    figure: float
    kind: Kind = "absolute"


class Limit(Part):
    """One limit of one metric, and what exceeding it means."""

    limit: InstanceOf[Bound]
    level: Level = "error"


def _read(value: object, metric: BudgetMetric) -> Bound:
    """Read the value of a key: absolute, or with a sign against a baseline."""
    signed = _SIGNED.fullmatch(value) if isinstance(value, str) else None
    if signed is None:
        bound = Bound(_absolute(value, metric))
    else:
        sign, text = signed.groups()
        allowed = "-" if metric.better == "higher" else "+"
        if sign != allowed:
            may = "fall" if metric.better == "higher" else "grow"
            msg = f"says by how much it may {may}: write {allowed}{text[:40]}, found {value!r:.60}"
            raise ValueError(msg)
        factor = -1.0 if sign == "-" else 1.0
        if text.rstrip().endswith("%"):
            bound = Bound(factor * parse_quantity(text, "ratio", 100.0), "percent")
        else:
            bound = Bound(factor * _difference(text, metric), "difference")
    if not math.isfinite(bound.figure):
        msg = f"{value!r:.60} is not a finite number"
        raise ValueError(msg)
    return bound


def _absolute(value: object, metric: BudgetMetric) -> float:
    if metric.unit == "1":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _LARGEST:  # type: ignore[arg-type]
            shown = str(value)[:40]
            msg = f"needs a finite number without quotes, such as {metric.example}, found {shown!r}"
            raise ValueError(msg)
        return float(value)  # type: ignore[arg-type]
    if not isinstance(value, str):
        what = "a percentage" if metric.unit == "%" else "a number with a unit"
        msg = f'needs {what} in quotes, such as "{metric.example}", found {value!r:.60}'
        raise ValueError(msg)
    dimension, per_base = _DIMENSIONS[metric.unit]
    figure = parse_quantity(value, dimension, per_base)
    if metric.below is not None and figure >= metric.below:
        msg = f"must be below {metric.below:g} {metric.unit}, found {value!r:.60}"
        raise ValueError(msg)
    return figure


def _difference(text: str, metric: BudgetMetric) -> float:
    """How much a figure may change, in its unit, from the text after the sign."""
    if metric.unit == "1":
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip()) is None:
            msg = f'{text[:40]!r} is neither a percentage nor a number, such as "2 %" or "0.01"'
            raise ValueError(msg)
        return float(text)
    dimension, per_base = _DIMENSIONS[metric.unit]
    if dimension == "ratio":
        msg = f'needs a percentage of the baseline, such as "5 %", found {text[:40]!r}'
        raise ValueError(msg)
    return parse_quantity(text, dimension, per_base)


def _one_limit(metric: BudgetMetric) -> Any:
    """The type of one limit: a value, or a table with it and its level."""

    def build(value: object) -> object:
        if not isinstance(value, dict):
            return {"limit": _read(value, metric)}
        if "limit" not in value:
            return value
        return {**value, "limit": _read(value["limit"], metric)}

    return Annotated[Limit, BeforeValidator(build)]


def _few(value: object) -> object:
    if isinstance(value, list) and not 1 <= len(value) <= MAX_LIMITS:
        msg = f"must be a list of 1 to {MAX_LIMITS} limits, found {len(value)}"
        raise ValueError(msg)
    return value


def _variant(value: object) -> str:
    return f"{TAG_PREFIX}{'several' if isinstance(value, list | tuple) else 'one'}"


def _schema(metric: BudgetMetric) -> dict[str, Any]:
    """What stands in the file: a value, a table with it and its level, or a list of these."""
    values: list[dict[str, Any]] = [{"type": "string"}]
    if metric.unit == "1":
        values.insert(0, {"type": "number"})
    table = {
        "type": "object",
        "properties": {
            "limit": {"anyOf": values} if values[1:] else values[0],
            "level": {"enum": ["error", "warn"]},
        },
        "required": ["limit"],
        "additionalProperties": False,
    }
    one = [*values, table]
    several = {
        "type": "array",
        "items": {"anyOf": one},
        "minItems": 1,
        "maxItems": MAX_LIMITS,
    }
    return {"anyOf": [*one, several]}


_NAMED: Final = {
    "Limit": _schema(METRICS["peak_memory"])["anyOf"],
    "NumberLimit": _schema(METRICS["final_loss"])["anyOf"],
}
"""Definitions in a schema: limits with a unit in quotes, and plain numbers."""


def name_limits(schema: dict[str, Any]) -> dict[str, Any]:
    """The same JSON Schema with the two kinds of limits written once, as definitions."""

    def walk(part: Any) -> Any:
        if isinstance(part, list):
            return [walk(each) for each in part]
        if not isinstance(part, dict):
            return part
        for name, kind in _NAMED.items():
            if part.get("anyOf") == kind:
                rest = {key: value for key, value in part.items() if key != "anyOf"}
                return {"$ref": f"#/$defs/{name}", **rest}
        return {key: walk(value) for key, value in part.items()}

    named: dict[str, Any] = walk(schema)
    definitions = {name: {"anyOf": kind} for name, kind in _NAMED.items()}
    return {**named, "$defs": {**named.get("$defs", {}), **definitions}}


def _examples(metric: BudgetMetric) -> list[object]:
    relative = "-5 %" if metric.better == "higher" else "+5 %"
    return [float(metric.example) if metric.unit == "1" else metric.example, relative]


def _field(metric: BudgetMetric) -> Any:
    one = _one_limit(metric)
    several = tuple[one, ...]  # type: ignore[valid-type]
    return (
        Annotated[
            Annotated[one, Tag(f"{TAG_PREFIX}one")]
            | Annotated[several, BeforeValidator(_few), Tag(f"{TAG_PREFIX}several")],
            Discriminator(_variant),
            WithJsonSchema(_schema(metric)),
        ],
        Field(default=None, description=metric.meaning, examples=_examples(metric)),
    )  # fmt: skip


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        msg = f'needs a number with a unit in quotes, such as "120 MB", found {value!r:.60}'
        raise ValueError(msg)
    return parse_quantity(value, "bytes")


AppBytes = Annotated[float, BeforeValidator(_bytes), WithJsonSchema({"type": "string"})]
"""Bytes that an app holds, written with a unit."""

_FOOTPRINT: Final = (
    "Not a limit: what the app's process holds besides the training and ONNX Runtime's library. It "
    "is added to both before they are compared with the device's memory limit."
)

if TYPE_CHECKING:

    class Section(Part):
        """The limits of one table. An absent key sets no limit."""

        app_footprint: AppBytes | None = None
else:
    Section = create_model(
        "Section",
        __base__=Part,
        __doc__="The limits of one table. An absent key sets no limit.",
        __module__=__name__,
        app_footprint=(
            AppBytes | None,
            Field(default=None, description=_FOOTPRINT, examples=["120 MB"]),
        ),
        **{metric.key: _field(metric) for metric in METRICS.values()},
    )
