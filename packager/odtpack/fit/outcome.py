"""What a search found: the one object between searching and showing.

Units are in the names. A null figure is unknown. Numbers of candidates are their places in
the space, so that the same space gives a candidate the same number in every search.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import Field

from odtpack.fit.space import Candidate
from odtpack_simulator.result import Bytes, Count, Loss, NonNegative, NotJudged
from odtpack_simulator.values.figure import Check, Text, Verdict
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.text import counted
from odtpack_simulator.values.units import Interval, format_value

SCHEMA_VERSION: Final = 2

Stage = Literal["build", "plan", "training", "beaten"]
"""Where a candidate was left: it could not be built; its plan is over a limit; its training failed
or was stopped, since others of its family did better; others that were trained beat it."""


class Choice(Part):
    """What a candidate chose."""

    batch_size: int = Field(ge=1)
    """Samples of an optimizer step."""
    micro_batch: int = Field(ge=1)
    """Samples that the model sees at once."""
    frozen: Text
    """What is frozen besides what the recipe freezes."""
    freeze: list[Text]
    """The patterns of it."""
    trained_parameters: Count
    """Numbers that are trained."""
    optimizer: Text
    learning_rate: NonNegative
    frozen_dtype: Literal["float32", "float16", "int8"]
    """How large frozen weights are stored."""
    memory_budget: Text | None = None
    """What it computes again for, to fit in; null where it fits as it is."""


def choice(candidate: Candidate) -> Choice:
    """A candidate as the result stores it."""
    return Choice(
        batch_size=candidate.batch_size,
        micro_batch=candidate.micro_batch,
        frozen=candidate.freeze.title,
        freeze=list(candidate.freeze.patterns),
        trained_parameters=candidate.freeze.trained,
        optimizer=candidate.optimizer,
        learning_rate=candidate.learning_rate,
        frozen_dtype=candidate.storage or "float32",
        memory_budget=None if candidate.memory is None else candidate.memory.size,
    )


class DeviceFigures(Part):
    """A simulated candidate on one device."""

    name: Text
    verdict: Verdict
    peak_bytes: Bytes
    step_ms: Interval | None
    """One optimizer step."""
    time_s: Interval | None
    """The whole training."""
    energy_j: Interval | None
    """Of the whole training, above idle."""
    failed: list[Check]
    """Checks that did not pass, those of level `warn` too."""
    not_judged: list[Check] = Field(default_factory=list)
    """Limits that could not be judged on the device."""


class Solution(Part):
    """A candidate that was trained for all epochs and simulated on every device."""

    number: int = Field(ge=1)
    choice: Choice
    metric: float | None
    """Accuracy on held-out samples; null where the model has none."""
    loss: Loss
    """Loss on held-out samples, else of the last step."""
    peak_bytes: Bytes
    """On the device where it is largest; as the next two."""
    time_s: NonNegative | None
    energy_j: NonNegative | None
    package_bytes: Bytes
    predicted_peak_bytes: Bytes
    devices: list[DeviceFigures]
    failed: list[Check]
    """Checks of the package as a whole that did not pass."""
    not_judged: list[Check] = Field(default_factory=list)
    """Limits of the package as a whole that could not be judged."""
    beaten_by: list[int] = Field(default_factory=list)
    """Numbers of the Pareto set's members that are nowhere worse and somewhere better."""
    miss: NonNegative | None = None
    """By which share of the limit the worst failed check misses it; null if none failed."""
    recipe: str = ""
    """Text of a recipe.toml that builds it."""

    @property
    def unjudged(self) -> list[tuple[str, Check]]:
        """Each limit that could not be judged, with the device, or "package"."""
        found = [("package", check) for check in self.not_judged]
        return found + [(each.name, check) for each in self.devices for check in each.not_judged]

    @property
    def errors(self) -> list[tuple[str, Check]]:
        """Each failed check of level ``error``, with the device, or "package"."""
        found = [("package", check) for check in self.failed]
        found += [(each.name, check) for each in self.devices for check in each.failed]
        return [(where, check) for where, check in found if check.level == "error"]

    def figures(self, metric: str) -> list[str]:
        """The metric, the peak, the time and the energy for people."""
        quality = (self.metric, "share") if metric == "accuracy" else (self.loss, "1")
        costs = ((self.peak_bytes, "B"), (self.time_s, "s"), (self.energy_j, "J"))
        rows = (quality, *costs)
        return ["unknown" if value is None else format_value(value, unit) for value, unit in rows]


class Dropped(Part):
    """A candidate that was not trained to the end."""

    number: int = Field(ge=1)
    choice: Choice
    stage: Stage
    reason: Text
    epochs: Count = 0
    """Epochs that it was trained for."""
    metric: float | None = None
    loss: Loss = None
    predicted_peak_bytes: Bytes | None = None
    measured_peak_bytes: Bytes | None = None
    beaten_by: list[int] = Field(default_factory=list)
    """Candidates that were nowhere worse and somewhere better at that time."""


class Objective(Part):
    """What the Pareto set compares."""

    name: Literal["accuracy", "loss", "peak_bytes", "time_s", "energy_j"]
    better: Literal["larger", "smaller"]
    tolerance: NonNegative
    """Width of the logarithmic grid on which two figures count as equal, as a share."""


class Dimension(Part):
    """The values of one thing that varied."""

    name: Text
    values: list[Text]


class FitResult(Part):
    """A search: the Pareto set of the candidates that keep every budget on every device."""

    schema_version: Literal[2] = SCHEMA_VERSION
    tool_version: Text
    model: Text
    devices: list[Text]
    epochs: int = Field(ge=1)
    seed: int
    samples: Count
    held_out_samples: Count
    space: list[Dimension]
    candidates: Count
    """Candidates in the space."""
    looked_at: Count
    """Those that were built and planned."""
    trained: Count
    """Those that were trained."""
    objectives: list[Objective]
    not_judged: list[NotJudged]
    """Objectives that are unknown on a device, and why; on all devices, if it is none of the
    objectives."""
    pareto: list[Solution]
    """Best metric first."""
    beaten: list[Solution]
    """Within the budgets, and beaten."""
    over_budget: list[Solution]
    """Simulated, and over a limit; the nearest to its limits first."""
    left: list[Dropped]

    def __repr__(self) -> str:
        within = counted(len(self.pareto), "recipe")
        return (
            f"FitResult({within} within the budgets, {len(self.beaten)} "
            f"beaten, {len(self.over_budget)} over a budget, of {self.trained} trained)"
        )

    __str__ = __repr__

    @property
    def found(self) -> bool:
        """Whether any candidate keeps every budget on every device."""
        return bool(self.pareto)

    @property
    def judged(self) -> bool:
        """Whether any candidate keeps every budget, and each of them could be judged."""
        return any(not each.unjudged for each in self.pareto)

    @property
    def nearest(self) -> Solution | None:
        """What misses its limits by least, if nothing keeps them."""
        return None if self.pareto or not self.over_budget else self.over_budget[0]

    def to_json(self) -> str:
        """The result as JSON text in the order of the fields."""
        content = self.model_dump(mode="json")
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


# What beats what: points of costs, each the smaller the better.

Point = tuple[float, ...]


def on_grid(value: float, tolerance: float) -> float:
    """The cell of a cost on a logarithmic grid."""
    # `tolerance`: width of a cell as a share of the value; 0 for no grid.
    if not math.isfinite(value):
        return math.inf
    if tolerance == 0 or value <= 0:
        return value if tolerance == 0 else -math.inf
    return float(math.floor(math.log(value) / math.log1p(tolerance)))


def beats(one: Point, other: Point) -> bool:
    """Whether a point is nowhere worse than another, and somewhere better."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


def beaten_by(points: Sequence[Point]) -> list[list[int]]:
    """For each point the members of the Pareto set that beat it; none for the set's own."""
    # Every other point is beaten by at least one of them: beating is a partial order, and there are
    # finitely many points.
    best = [i for i, point in enumerate(points) if not any(beats(p, point) for p in points)]
    return [[i for i in best if beats(points[i], point)] for point in points]


def ranked(found: Sequence[Any], points: Sequence[Point]) -> tuple[list[Any], list[Any]]:
    """The Pareto set of solutions, best first, and the rest, each with what beats it."""
    best, rest = list[Any](), list[Any]()
    beating = beaten_by(points)
    for i in sorted(range(len(points)), key=lambda i: (points[i], found[i].number)):
        numbers = sorted(found[j].number for j in beating[i])
        (rest if numbers else best).append(found[i].model_copy(update={"beaten_by": numbers}))
    return best, rest


def choose(points: Sequence[Point], count: int) -> list[int]:
    """Indices of the Pareto set, in their order; of a larger one each cost chooses in turns."""
    rest = [i for i, by in enumerate(beaten_by(points)) if not by]
    if len(rest) <= count:
        return rest
    kept: list[int] = []
    while len(kept) < count:
        turn = len(kept) % len(points[0])
        kept.append(min(rest, key=lambda i: (points[i][turn], points[i])))
        rest.remove(kept[-1])
    return sorted(kept)
