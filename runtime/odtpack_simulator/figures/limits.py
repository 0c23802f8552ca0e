"""``budgets.toml``: limits that a result must keep, and a budget to start from.

``[budgets]`` holds for every device, ``[class.android]`` for the devices of an
operating system, ``[device."google/pixel-8a"]`` for one; the narrower wins key
by key. The keys are those of :data:`~odtpack_simulator.figures.simulated.METRICS`: a new metric
is a new key, in the file, in its schema and in that of recipes. ``docs/formats/budgets.md``
specifies the format.

A budget to start from has typical figures plus a quarter, and regressions, as TOML to paste.
Devices share limits, those of all of them or of an operating system, as far as it takes to keep the
file short: a few devices have tables of their own, many are grouped together.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    InstanceOf,
    StrictBool,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.app import AppFootprint, default_footprint
from odtpack_simulator.device.kits import Loop
from odtpack_simulator.device.profile import DeviceProfile, OsClass
from odtpack_simulator.figures.metric import Metric
from odtpack_simulator.figures.simulated import METRICS, figures_of
from odtpack_simulator.result import SimulationResult, Subject
from odtpack_simulator.values.figure import CheckLevel, Figure, Unit
from odtpack_simulator.values.part import (
    TAG_PREFIX,
    Part,
    meant,
    shown_value,
    unknown_first,
    wrong_file,
)
from odtpack_simulator.values.text import (
    key_lines,
    nearest_line,
    parse_toml,
    read_bounded,
    toml_key,
    toml_value,
)
from odtpack_simulator.values.units import parse_quantity

MAX_LIMITS: Final = 8  # Most limits in the list of one key

Kind = Literal["absolute", "percent", "difference"]

_DIMENSIONS: Final[dict[Unit, tuple[str, float]]] = {
    "B": ("bytes", 1.0),
    "ms": ("duration", 1e3),
    "s": ("duration", 1.0),
    "J": ("energy", 1.0),
    "%": ("percentage", 100.0),
}
"""Unit of a metric -> dimension of its units in the file, and the metric's units per base unit."""

_LARGEST: Final = 1e300  # whole numbers of TOML have no end; NaN is not at most this either
_SIGNED = re.compile(r"\s*([+-])\s*(\S.*)")


@dataclass(frozen=True)
class Limit:
    """A limit of a metric, in its unit."""

    # `figure` is the limit itself (`absolute`), or how far a figure may be above, or below zero
    # under, that of a baseline: in percent of it (`percent`), or in the metric's unit
    # (`difference`).
    figure: float
    kind: Kind = "absolute"
    level: CheckLevel = "error"  # What exceeding it means
    close: CheckLevel = "error"  # What exceeding it by less than a margin means
    location: str = ""  # Where it was set: file and line


class _Limit(Part):
    """One limit as it stands in a table."""

    limit: InstanceOf[Limit]
    level: CheckLevel = "error"


def _read(value: object, metric: Metric[Subject]) -> Limit:
    """Read the value of a key: absolute, or with a sign against a baseline."""
    signed = _SIGNED.fullmatch(value) if isinstance(value, str) else None
    if signed is None:
        bound = Limit(_absolute(value, metric))
    else:
        sign, text = signed.groups()
        allowed = "-" if metric.better == "higher" else "+"
        if sign != allowed:
            may = "fall" if metric.better == "higher" else "grow"
            msg = f"says by how much it may {may}: write {allowed}{text[:40]}, found {value!r:.60}"
            raise ValueError(msg)
        factor = -1.0 if sign == "-" else 1.0
        if text.rstrip().endswith("%"):
            bound = Limit(factor * parse_quantity(text, "percentage", 100.0), "percent")
        else:
            bound = Limit(factor * _difference(sign, text, metric), "difference")
    most = 100.0 if bound.kind == "percent" else metric.most or math.inf
    floor = metric.better == "higher"
    if floor and (bound.figure < 0 if bound.kind == "absolute" else -bound.figure >= most):
        why = "a floor is not below 0 and falls by less than 100 %"
        raise ValueError(f"can never fail: {why}, found {value!r:.60}")
    if bound.kind == "absolute" and bound.figure < 0 and metric.key != "final_loss":
        raise ValueError(f"can never pass: only a loss may be below 0, found {value!r:.60}")
    if not math.isfinite(bound.figure):
        raise ValueError(f"{value!r:.60} is not a finite number")
    return bound


def _absolute(value: object, metric: Metric[Subject]) -> float:
    if metric.unit == "1":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _LARGEST:  # type: ignore[arg-type]
            shown = shown_value(value)
            msg = f"needs a finite number without quotes, such as {metric.example}, found {shown}"
            raise ValueError(msg)
        if metric.most is not None and value > metric.most:  # type: ignore[operator]
            raise ValueError(f"must be at most {metric.most:g}, found {value}: 0.9 is 90 %")
        return float(value)  # type: ignore[arg-type]
    if not isinstance(value, str):
        what = "a percentage" if metric.unit == "%" else "a number with a unit"
        msg = f'needs {what} in quotes, such as "{metric.example}", found {shown_value(value)}'
        raise ValueError(msg)
    dimension, per_base = _DIMENSIONS[metric.unit]
    figure = parse_quantity(value, dimension, per_base)
    if metric.below is not None and figure >= metric.below:
        raise ValueError(f"must be below {metric.below:g} {metric.unit}, found {value!r:.60}")
    return figure


def _difference(sign: str, text: str, metric: Metric[Subject]) -> float:
    """How much a figure may change, in its unit, from the text after the sign."""
    if metric.unit == "1":
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip()) is None:
            such = f'such as "{sign}2 %" or "{sign}0.01"'
            raise ValueError(f"{sign + text[:40]!r} is neither a percentage nor a number, {such}")
        return float(text)
    dimension, per_base = _DIMENSIONS[metric.unit]
    if dimension == "percentage":
        such = f'such as "{sign}5 %"'
        raise ValueError(f"needs a percentage of the baseline, {such}, found {sign + text[:40]!r}")
    return parse_quantity(text, dimension, per_base)


_KIND: Final = "$limit"  # Stands in a schema for the reference to a definition


def _definition(*values: str) -> dict[str, Any]:
    """A value of one of these types, a table with it and its level, or a list of these."""
    plain = [{"type": each} for each in values]
    table = {
        "type": "object",
        "properties": {
            "limit": {"anyOf": plain} if plain[1:] else plain[0],
            "level": {"enum": ["error", "warn"]},
        },
        "required": ["limit"],
        "additionalProperties": False,
    }
    one = [*plain, table]
    several = {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": MAX_LIMITS}
    return {"anyOf": [*one, several]}


def name_limits(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON Schema with its two kinds of limits: with a unit in quotes, and plain numbers."""
    text = json.dumps(schema).replace(f'"{_KIND}": "', '"$ref": "#/$defs/')
    kinds = {"Limit": _definition("string"), "NumberLimit": _definition("number", "string")}
    named: dict[str, Any] = json.loads(text)
    return {**named, "$defs": {**named.get("$defs", {}), **kinds}}


def _field(metric: Metric[Subject]) -> Any:
    """One limit, which is a value or a table with it and its level; or a list of them."""

    def build(value: object) -> object:
        if not isinstance(value, dict):
            return {"limit": _read(value, metric)}
        if "limit" not in value:
            return value
        return {**value, "limit": _read(value["limit"], metric)}

    def few(value: object) -> object:
        if isinstance(value, list) and not 1 <= len(value) <= MAX_LIMITS:
            raise ValueError(f"must be a list of 1 to {MAX_LIMITS} limits, found {len(value)}")
        return value

    relative = "-5 %" if metric.better == "higher" else "+5 %"
    example = json.loads(metric.example) if metric.unit == "1" else metric.example
    one = Annotated[_Limit, BeforeValidator(build)]
    several = Annotated[tuple[one, ...], BeforeValidator(few)]
    tags = f"{TAG_PREFIX}one", f"{TAG_PREFIX}several"
    return (
        Annotated[
            Annotated[one, Tag(tags[0])] | Annotated[several, Tag(tags[1])],
            Discriminator(lambda value: tags[isinstance(value, list | tuple)]),
            WithJsonSchema({_KIND: "NumberLimit" if metric.unit == "1" else "Limit"}),
        ],
        Field(default=None, description=metric.meaning, examples=[example, relative]),
    )  # fmt: skip


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        msg = f'needs a number with a unit in quotes, such as "120 MB", found {shown_value(value)}'
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


MAX_BUDGET_BYTES: Final = 64 * 1024


class _Overall(Section):
    """The limits of the package and every device. An absent key sets no limit."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    learns: StrictBool = True
    """Whether the loss on held-out samples must fall beyond its noise."""
    too_close: CheckLevel = "error"
    """What it means that a planned peak is within a memory limit, but not with the plan's margin of
    3 % (below 13 MB: 8 % or 0.4 MB, whichever is smaller): `"error"` fails as a peak over the limit
    does, `"warn"` warns."""
    loop: Loop = "step"
    """How the app makes its steps, for `odtpack simulate` without `--loop`: `"step"` with the step
    model where package and kit have one, `"train"` with the training and the optimizer model."""


class _File(Part):
    """Limits that a simulation result must keep; the narrower table wins, key by key."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    budgets: _Overall = Field(default_factory=_Overall)
    """For the package and every device."""
    classes: dict[OsClass, Section] = Field(default_factory=dict, alias="class")
    """`[class.android]`: for the devices of an operating system."""
    device: dict[str, Section] = Field(default_factory=dict)
    """`[device."google/pixel-8a"]`: for one device."""


@dataclass(frozen=True)
class Budgets:
    """A budget file that was read. Without a file: no limits."""

    source: str = "budgets.toml"
    defaults: _Overall = field(default_factory=_Overall)
    classes: Mapping[str, Section] = field(default_factory=dict)
    devices: Mapping[str, Section] = field(default_factory=dict)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def overall(self) -> dict[str, tuple[Limit, ...]]:
        """Limits of ``[budgets]`` by key."""
        return self._placed(("budgets",), self.defaults)

    def narrowed(self, device: str, os_class: str) -> dict[str, tuple[Limit, ...]]:
        """Only what the class and the device override, by key; the device wins."""
        placed: dict[str, tuple[Limit, ...]] = {}
        for table, section in self._tables(device, os_class)[1:]:
            placed |= self._placed(table, section)
        return placed

    def for_device(self, device: str, os_class: str) -> dict[str, tuple[Limit, ...]]:
        """All limits that hold for a device by key."""
        return self.overall() | self.narrowed(device, os_class)

    def needs_baseline(self) -> bool:
        """Whether a limit of any table is against a baseline."""
        tables = (self.defaults, *self.classes.values(), *self.devices.values())
        placed = (limits for each in tables for limits in self._placed((), each).values())
        return any(limit.kind != "absolute" for limits in placed for limit in limits)

    def footprint(self, device: str, os_class: OsClass) -> AppFootprint | None:
        """What the app holds on a device by the narrowest table that says so; None without."""
        found = None
        for table, section in self._tables(device, os_class):
            if section.app_footprint is not None:
                where = self._location((*table, "app_footprint"))
                found = AppFootprint(int(section.app_footprint), None, where)
        return found

    def footprint_of(self, profile: DeviceProfile) -> AppFootprint:
        """The same, or what is taken for an app of the device's system."""
        return self.footprint(profile.name, profile.os) or default_footprint(profile)

    def only(self, devices: Iterable[str]) -> Self:
        """The same without the tables of other devices."""
        return replace(self, devices={k: self.devices[k] for k in devices if k in self.devices})

    def check_devices(self, known: list[str]) -> None:
        """Refuse a device table that names no known device: it would never be applied.

        Raises:
            OdtpackError: With the file, the line and the near name.
        """
        for name in self.devices:
            if name not in known:
                raise OdtpackError(
                    "budgets-unknown-device",
                    f"the budgets name a device {name[:100]!r} that does not exist"
                    + meant(name, known),
                    where=self._location(("device", name)),
                )

    def _tables(self, device: str, os_class: str) -> list[tuple[tuple[str, ...], Section]]:
        """The tables that hold for a device, the narrowest last."""
        narrower = (("class", os_class, self.classes), ("device", device, self.devices))
        own = [((kind, name), tables[name]) for kind, name, tables in narrower if name in tables]
        return [(("budgets",), self.defaults), *own]

    def _placed(self, table: tuple[str, ...], section: Section) -> dict[str, tuple[Limit, ...]]:
        placed = {}
        for key in METRICS:
            found = getattr(section, key)
            if found is not None:
                where = self._location((*table, key))
                placed[key] = tuple(
                    replace(
                        each.limit,
                        level=each.level,
                        close=self.defaults.too_close if each.level == "error" else each.level,
                        location=where,
                    )
                    for each in ([found] if isinstance(found, _Limit) else found)
                )
        return placed

    def _location(self, path: tuple[str, ...]) -> str:
        line = nearest_line(self.lines, path)
        return f"{self.source}:{line}" if line else f"{self.source} ({'.'.join(path)})"


def parse_budgets(data: bytes, source: str = "budgets.toml") -> Budgets:
    """Read budgets from the bytes of a TOML file.

    Args:
        data: Content of the file.
        source: Its name, for messages and for the location of each check.

    Raises:
        OdtpackError: Not TOML, an unknown key, or a value without the unit it needs.
    """
    content = parse_toml(data, code="budgets", what="budget file", where=source)
    return make_budgets(content, source, key_lines(data.decode("utf-8")))


def make_budgets(
    content: Mapping[str, Any], source: str, lines: Mapping[tuple[str, ...], int]
) -> Budgets:
    """Read budgets from the tables of a TOML file."""
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        # Of a limit that is a table the line of its key.
        keys = {
            path[: 2 if path[:1] == ("budgets",) else 3]: line
            for path, line in reversed([*lines.items()])
        }
        says = "the budget file is wrong"
        found = wrong_file(error, _File, "budgets-invalid", says, source, keys)
        first = unknown_first(error)[0]
        known = tuple(part for part in first["loc"] if part in _Overall.model_fields)
        for key in known if first["type"] != "extra_forbidden" else ():
            field = _Overall.model_fields[key]
            example = toml_value((field.examples or [field.default])[0])
            found.hint = f"write for example: {key} = {example}"
        if first["loc"] in (("budgets", "class"), ("budgets", "device")):
            found.hint = f"write [{first['loc'][1]}.NAME]: only a recipe has it below [budgets]"
        elif first["loc"] == known:
            found.hint = "write it below [budgets]"
        raise found from error
    classes = {str(name): section for name, section in file.classes.items()}
    return Budgets(source, file.budgets, classes, file.device, lines)


def budget_schema() -> dict[str, Any]:
    """The JSON Schema of a budget file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **name_limits(_File.model_json_schema()),
        "title": "odtpack budgets",
    }


def read_budgets(path: str | os.PathLike[str]) -> Budgets:
    """Read a budget file.

    Raises:
        OdtpackError: Absent, larger than 64 KiB, or as :func:`parse_budgets`.
    """
    file = Path(path)
    data = read_bounded(file, limit=MAX_BUDGET_BYTES, code="budgets", what="budget file")
    return parse_budgets(data, str(file))


_ROOM: Final = 1.25
_MOST: Final = 1e15  # in any unit: beyond, a limit limits nothing
_UNITS: Final[dict[str, tuple[tuple[str, float, float], ...]]] = {
    "B": (("MB", 1e6, 1e6), ("kB", 1e3, 1e3), ("B", 0.0, 1.0)),
    "ms": (("s", 1e4, 1e3), ("ms", 0.0, 1.0)),
    "s": (("h", 36_000.0, 3600.0), ("min", 600.0, 60.0), ("s", 0.0, 1.0)),
    "J": (("kJ", 1e4, 1e3), ("J", 0.0, 1.0)),
    "%": (("%", 0.0, 1.0),),
}
"""Unit of a metric -> units in the file: each from how many of the metric's unit on, and how many
of them it is."""
_REGRESSION: Final = "+10 %"
_REGRESSIONS: Final = ("package_size", "peak_memory", "step_latency")
"""Metrics that are limited against a baseline as well."""
_BOTH: Final = rf'\[("[^"]+"), "{re.escape(_REGRESSION)}"\]'
_HEAD: Final = f'# "{_REGRESSION}" is judged against --baseline RESULT.json, and only with one.'
_MOST_LINES: Final = 60
_ALIKE: Final = (1.0, 1.5, 2.0, 3.0)
"""Factors by which figures that share a limit may differ: the first that gives few enough lines."""


def suggest_budget(result: SimulationResult, *, baseline: bool = False) -> str:
    """``budgets.toml``: each limit a quarter above the figure, some also ``"+10 %"`` of a baseline.

    The latter are comments unless there is a ``baseline``: they could not be judged.

    Intervals give their typical figure: no such limit fails this result, but where the high end
    is above it, it warns. The peak is limited once, for all devices. A metric may
    lose a quarter of what it gained, and its floor lies below its 95 % interval. What is
    unknown gets no limit; nor does what follows from other limits, nor the loss of a training
    that failed, nor a final loss that would be allowed to be as high as the untrained model's.

    With many devices, those of an operating system share the limit that the worst of them
    keeps, if their figures are alike: equal, or within a factor of up to three, as it takes to
    keep to sixty lines. Where that is not enough, each of the others takes one line.
    """
    head = [_HEAD, "[budgets]"]
    failed = any(
        c.status == "fail" and c.metric in ("finite_loss", "learns") for c in result.checks
    )
    for figure in figures_of(result):
        metric = METRICS[figure.metric]
        if not metric.suggested or (metric.key == "final_loss" and failed):
            continue
        if metric.better == "higher":
            head += _floor(figure, result.training.metric_before)
        elif metric.key != "final_loss" or _learnt(figure, result.training.eval_loss_before):
            head += _line(metric, figure.value)
    peaks = [device.memory.peak_bytes for device in result.devices]
    peaks.append(result.memory.predicted.peak_bytes)
    head += _line(METRICS["peak_memory"], max(peaks))
    figures: dict[str, dict[str, float]] = {}
    for device in result.devices:
        for figure in figures_of(result, device):
            metric = METRICS[figure.metric]
            window = metric.key == "sessions" and result.policy.state == "foreground"
            known = figures.setdefault(metric.key, {})
            limited = metric.suggested and figure.high is not None and not window
            if limited and figure.value is not None and _line(metric, figure.value):
                known[device.name] = figure.value
    for factor in _ALIKE:
        limits = _shared_limits(result, figures, factor)
        tables = [*head, *limits.everywhere, *limits.tables()]
        if len(tables) <= _MOST_LINES:
            break
    else:
        tables = [*head, *limits.everywhere, *limits.tables(inline=True)]
    text = "\n".join(tables) + "\n"
    if baseline:
        return text
    text = re.sub(rf"{_BOTH}(?=.)", r"\1", text)  # no comment ends inside of a line
    return re.sub(_BOTH, rf'\1  # with a baseline: [\1, "{_REGRESSION}"]', text)


@dataclass(frozen=True)
class _Limits:
    """Lines such as ``step_latency = "20 ms"``, by what they hold for."""

    everywhere: list[str]
    classes: dict[str, list[str]]
    devices: dict[str, list[str]]

    def tables(self, *, inline: bool = False) -> list[str]:
        """Lines of the tables; ``inline`` takes one for each device."""
        lines: list[str] = []
        for name, own in self.classes.items():
            lines += ["", f"[class.{name}]", *own] if own else []
        devices = {toml_key(name): own for name, own in self.devices.items() if own}
        if inline and devices:
            lines += ["", "[device]"]
            return lines + [f"{name} = {{ {', '.join(own)} }}" for name, own in devices.items()]
        for name, own in devices.items():
            lines += ["", f"[device.{name}]", *own]
        return lines


def _shared_limits(
    result: SimulationResult, figures: Mapping[str, Mapping[str, float]], factor: float
) -> _Limits:
    """The limits of all devices: one for all, or for a class, where ``factor`` allows it."""
    classes: dict[str, list[str]] = {}
    for device in result.devices:
        classes.setdefault(device.os, []).append(device.name)
    names = [device.name for device in result.devices]
    found = _Limits([], {name: [] for name in classes}, {name: [] for name in names})
    for key, known in figures.items():
        metric = METRICS[key]
        if len(_alike(known, names, factor)) == len(names) > 0:
            found.everywhere.extend(_line(metric, max(known.values())))
            continue
        for name, members in classes.items():
            shared = _alike(known, members, factor)
            if shared:
                found.classes[name].extend(_line(metric, max(known[each] for each in shared)))
            for each in members:
                if each in known and each not in shared:
                    found.devices[each].extend(_line(metric, known[each]))
    return found


def _alike(known: Mapping[str, float], members: list[str], factor: float) -> list[str]:
    """The most devices of a group whose figures lie within ``factor``, and may share a limit."""
    # None where they are fewer than two, or where the figure of a member is unknown: a limit for
    # the group would hold for that member too, and could not be judged.
    if any(each not in known for each in members):
        return []
    ranked = sorted(members, key=lambda each: -known[each])
    best: list[str] = []
    for start, slowest in enumerate(ranked):
        run = [each for each in ranked[start:] if known[each] * factor >= known[slowest]]
        best = run if len(run) > len(best) else best
    return best if len(best) > 1 else []


def _line(metric: Metric[Subject], measured: float | None) -> list[str]:
    """A limit that is at most; none for what is unknown, negative or without bounds."""
    if measured is None or not 0 <= measured * _ROOM <= _MOST:
        return []
    value = measured * _ROOM
    if metric.unit == "1":
        return [f"{metric.key} = {math.ceil(value) if metric.noun else _up(value)}"]
    units = _UNITS[metric.unit]
    unit, factor = next((name, factor) for name, least, factor in units if value >= least)
    shown = math.ceil(value) if unit == "B" else _up(value / factor)
    limit = f'"{shown} {unit}"'
    if metric.key in _REGRESSIONS:
        limit = f'[{limit}, "{_REGRESSION}"]'
    return [f"{metric.key} = {limit}"]


def _learnt(loss: Figure, before: float | None) -> bool:
    """Whether a limit a quarter above the final loss, rounded up, is below that before."""
    limit = loss.value or 0.0
    return before is None or (limit * _ROOM < before and float(_up(limit * _ROOM)) < before)


def _floor(figure: Figure, before: float | None) -> list[str]:
    """A floor that keeps three quarters of what was gained; none for what is unknown."""
    if figure.value is None or abs(figure.value) > _MOST:
        return []
    gained = max(0.0, figure.value - (before or 0.0))
    floor = figure.value - gained * (_ROOM - 1.0)
    if figure.noise is not None:
        floor = min(floor, figure.noise[0])
    if floor > 1.0 or floor < -_MOST:  # no share is above 1
        return []
    steps = math.floor(floor * 1000)
    steps -= steps / 1000 > floor  # the product was rounded up
    if steps <= 0:
        return []  # a share of right answers is never below zero: such a floor holds nothing
    return [f"{figure.metric} = {steps / 1000:.3f}"]


def _up(value: float) -> str:
    """Rounded up to two significant digits, written without an exponent."""
    if value <= 0:
        return "0"
    value = max(value, 1e-9)
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{math.ceil(value / step - 1e-9) * step:.{decimals}f}"
