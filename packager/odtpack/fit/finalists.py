"""Trains what is left to the end, as odtpack simulate does, and puts what was found together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from odtpack.build import build
from odtpack.fit import outcome
from odtpack.fit.search_context import FitRequest, SearchContext
from odtpack.fit.space import Candidate, Space
from odtpack.option import options_of
from odtpack.recipe import BuildSpec, read_recipe
from odtpack.recipe.draft import SCHEMA_NAME, one_line, relative
from odtpack.spec import TextSpec
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.result import DeviceResult, NotJudged, SimulationResult, tool_version
from odtpack_simulator.simulation import simulate
from odtpack_simulator.values.figure import Check
from odtpack_simulator.values.text import toml_key, toml_value
from odtpack_simulator.values.units import Interval, format_bytes, format_percent

MEMORY_TOLERANCE: Final = 0.01
TIME_TOLERANCE: Final = 0.05


def run(candidate: Candidate, request: FitRequest, folder: Path) -> SimulationResult:
    """Build a finalist from its recipe, in a new folder, simulate it, and judge it."""
    folder.mkdir()
    text = recipe_text(
        candidate.settings(request.settings), candidate.batch_size, Surroundings(folder, "package")
    )
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    recipe = read_recipe(folder / "recipe.toml")
    build(BuildSpec.of(recipe), folder / "package")
    measured = simulate(
        folder / "package",
        request.data,
        request.profiles,
        batch_size=recipe.table.batch.at_once,
        epochs=request.epochs,
        seed=request.seed,
        footprint=request.budgets.footprint_of,
        evaluation=request.evaluation,
        holdout=request.holdout,
    )
    return judge(measured, request.budgets)


def solution(candidate: Candidate, result: SimulationResult) -> outcome.Solution:
    """The figures of a simulated candidate, still without its recipe."""
    training = result.training
    loss = training.eval_loss_after
    if loss is None and result.data.held_out_samples == 0 and training.losses:
        loss = training.losses[-1]
    missed = misses(result)
    peaks = [device.memory.peak_bytes for device in result.devices]
    return outcome.Solution(
        number=candidate.number,
        choice=outcome.choice(candidate),
        metric=training.metric_after,
        loss=loss,
        peak_bytes=max(peaks),
        time_s=_worst(device.campaign.active_s for device in result.devices),
        energy_j=_worst(device.campaign.energy_j for device in result.devices),
        package_bytes=result.package.package_bytes,
        predicted_peak_bytes=result.memory.predicted.peak_bytes,
        devices=[
            outcome.DeviceFigures(
                name=device.name,
                verdict=device.verdict,
                peak_bytes=device.memory.peak_bytes,
                step_ms=device.latency.step_ms,
                time_s=device.campaign.active_s,
                energy_j=device.campaign.energy_j,
                failed=[check for check in device.checks if check.status == "fail"],
                not_judged=_not_judged(device.checks),
            )
            for device in result.devices
        ],
        failed=[check for check in result.checks if check.status == "fail"],
        not_judged=_not_judged(result.checks),
        miss=max(missed.values(), default=None),
    )


def _not_judged(checks: Iterable[Check]) -> list[Check]:
    return [each for each in checks if each.status == "not judged" and each.level == "error"]


def _worst(intervals: Iterable[Interval | None]) -> float | None:
    return max((each.typical for each in intervals if each is not None), default=None)


def misses(result: SimulationResult) -> dict[str, float]:
    """By which share of its limit each failed metric misses it where it is worst."""
    found: dict[str, float] = {}
    for device, check in result.all_checks():
        if check.status == "fail" and check.level == "error":
            miss = _miss(check, result if device is None else device)
            found[check.metric] = max(miss, found.get(check.metric, 0.0))
    return found


def _miss(check: Check, of: DeviceResult | SimulationResult) -> float:
    """By which share of its limit a failed check misses it."""
    # A training that was killed has no peak of its own: what was predicted stands for it.
    actual = check.actual
    if actual is None and check.metric == "memory_limit" and isinstance(of, DeviceResult):
        actual = of.memory.predicted_peak_bytes
    if actual is None or not check.limit:
        return _FAR
    return min(abs(actual - check.limit) / abs(check.limit), _FAR)


_FAR: Final = 1e9
"""Where no share can be computed, as of a loss that is not finite: farther than all others."""


def objectives(
    solutions: Sequence[outcome.Solution], reasons: Sequence[NotJudged]
) -> tuple[list[outcome.Objective], list[NotJudged]]:
    """What can be compared, and what is unknown on some device or on all."""
    has_metric = any(each.metric is not None for each in solutions)
    found = [
        outcome.Objective(name="accuracy", better="larger", tolerance=0)
        if has_metric
        else outcome.Objective(name="loss", better="smaller", tolerance=0),
        outcome.Objective(name="peak_bytes", better="smaller", tolerance=MEMORY_TOLERANCE),
    ]
    unknown = list[NotJudged]()
    for name in ("time_s", "energy_j"):
        known = any(getattr(each, name) is not None for each in solutions)
        if known:
            found.append(outcome.Objective(name=name, better="smaller", tolerance=TIME_TOLERANCE))
        why = {each.reason: each for each in reasons if each.figure == name}
        if not known and not why:
            why = {"": NotJudged(figure=name, reason="no device says")}
        unknown += why.values()
    return found, unknown


def reasons(results: Iterable[SimulationResult]) -> list[NotJudged]:
    """Why a device has no time or energy, as far as it says."""
    names = {"active_s": "time_s", "energy_j": "energy_j"}
    return [
        NotJudged(figure=names[each.figure], reason=f"{device.title}: {each.reason}"[:4000])
        for result in results
        for device in result.devices
        for each in device.campaign.not_judged
        if each.figure in names
    ]


def costs(each: outcome.Solution, wanted: Sequence[outcome.Objective]) -> outcome.Point:
    """A solution as a point of costs on the objectives' grids; what is unknown is worst."""
    point = []
    for objective in wanted:
        value = each.metric if objective.name == "accuracy" else getattr(each, objective.name)
        if value is None:
            point.append(math.inf)
        elif objective.better == "larger":
            point.append(-value)
        else:
            point.append(outcome.on_grid(value, objective.tolerance))
    return tuple(point)


def summarize(
    simulated: Sequence[tuple[Candidate, SimulationResult]],
    request: FitRequest,
    ground: SearchContext,
    space: Space,
    *,
    candidates: int,
    looked_at: int,
    trained: int,
    left: Sequence[outcome.Dropped],
) -> outcome.FitResult:
    """The result of a search from its judged finalists."""
    solutions = {c.number: solution(c, result) for c, result in simulated}
    wanted, unknown = objectives(
        list(solutions.values()), reasons(result for _, result in simulated)
    )
    kept = [solutions[c.number] for c, result in simulated if not result.over_budget]
    best, beaten = outcome.ranked(kept, [costs(each, wanted) for each in kept])
    # The nearest to the budgets first. No other one misses each of them by less.
    far = {c.number: sum(misses(result).values()) for c, result in simulated if result.over_budget}
    over = [solutions[number] for number in far]
    over.sort(key=lambda each: (far[each.number], costs(each, wanted), each.number))
    by_number = {candidate.number: candidate for candidate, _ in simulated}

    def recipe(found: outcome.Solution, index: int) -> str:
        metric = "" if found.metric is None else f"accuracy {format_percent(found.metric)}, "
        remark = (
            f"Found by odtpack fit, candidate {found.number}: {metric}"
            f"peak memory {format_bytes(found.peak_bytes)}."
        )
        around = Surroundings(
            request.folder,
            f"package-{index}",
            request.device_names,
            request.budget_source,
            (remark,),
            None if request.recipe is None else request.recipe.texts(),
        )
        candidate = by_number[found.number]
        return recipe_text(candidate.settings(ground.base), candidate.batch_size, around)

    def with_recipes(found: Sequence[outcome.Solution]) -> list[outcome.Solution]:
        return [
            each.model_copy(update={"recipe": recipe(each, index)})
            for index, each in enumerate(found, 1)
        ]

    micro = {size for sizes in space.micro_batches.values() for size in sizes}
    dimensions: dict[str, list[str]] = {
        "batch_size": [str(size) for size in space.batch_sizes],
        "micro_batch": [str(size) for size in sorted(micro)],
        "frozen": [each.title for each in space.freezes],
        "optimizer": [kind for kind, _, _ in space.optimizers],
        "learning_rate": [
            f"{kind}: {', '.join(f'{rate:g}' for rate in rates)}"
            for kind, _, rates in space.optimizers
        ],
        "frozen_dtype": [each or "float32" for each in space.storages],
    }
    return outcome.FitResult(
        tool_version=tool_version(),
        model=str(request.settings.model),
        devices=[profile.name for profile in request.profiles],
        epochs=request.epochs,
        seed=ground.seed,
        samples=ground.samples,
        held_out_samples=ground.whole.held_out_samples,
        space=[outcome.Dimension(name=name, values=values) for name, values in dimensions.items()],
        candidates=candidates,
        looked_at=looked_at,
        trained=trained,
        objectives=wanted,
        not_judged=unknown,
        pareto=with_recipes(best),
        beaten=with_recipes(beaten),
        over_budget=with_recipes(over),
        left=sorted(left, key=lambda each: each.number),
    )


# Writes settings as a recipe that ``odtpack build --recipe`` reads back to the same settings.


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a recipe holds besides what decides the package."""

    folder: Path  # where it will lie; paths in it are from there
    package: str  # folder of the package, from the recipe's folder
    devices: tuple[str, ...] = ()  # names of device profiles, or paths of files
    # path of a budget file, or the tables of one; None for none
    budgets: Path | Mapping[str, Any] | None = None
    remark: tuple[str, ...] = ()  # lines of comments at the top
    texts: TextSpec | None = None  # how texts become samples


def recipe_text(settings: BuildSpec, batch_size: int, around: Surroundings) -> str:
    """The text of ``recipe.toml``."""
    content = _content(settings, batch_size, around)
    lines = [f"#:schema {SCHEMA_NAME}", *(f"# {one_line(text)}" for text in around.remark), ""]
    lines += _table((), content)
    return "\n".join(lines) + "\n"


def _content(settings: BuildSpec, batch_size: int, around: Surroundings) -> dict[str, Any]:
    """The tables of the recipe; what is at its default is left out."""
    limits = around.budgets
    budgets = relative(limits, around.folder) if isinstance(limits, Path) else limits
    loss = {"kind": settings.loss, **settings.said("loss"), **settings.loss_options}
    optimizer = {"kind": settings.optimizer, **settings.optimizer_options}
    micro_batch = batch_size // settings.accumulation_steps
    schedule = settings.schedule
    formats = settings.ort_format
    content: dict[str, Any] = {
        "model": relative(settings.model, around.folder),
        "package": around.package,
        **settings.said(""),
        "inputs": dict(each.split("=", 1) for each in settings.inputs),
        "budgets": budgets,
        "head": {} if settings.head is None else dataclasses.asdict(settings.head),
        "loss": loss,
        "parameters": settings.said("parameters")
        | ({"like": relative(Path(settings.like), around.folder)} if settings.like else {}),
        "adapter": settings.said("adapter"),
        "optimizer": {**optimizer, **settings.said("optimizer")},
        "clip": settings.said("clip"),
        "privacy": settings.said("privacy"),
        "groups": [
            {"parameters": pattern, "learning_rate_scale": scale, "weight_decay": decay}
            for pattern, scale, decay in settings.groups
        ],
        "losses": [
            dict(zip(("name", "kind", "weight", "inputs", "options"), part, strict=True))
            for part in settings.losses
        ],
        "schedule": {}
        if schedule is None
        else {"kind": schedule.kind, **schedule.settings, "learning_rate": schedule.learning_rate},
        "batch": {
            "size": batch_size,
            "micro_batch": None if micro_batch == batch_size else micro_batch,
        },
        "data": _texts(around.texts, around.folder),
        "memory": settings.said("memory"),
        "formats": {
            "ort": True if formats else None,
            "ort_styles": [style.value for style in formats.styles] if formats else (),
            "ort_platforms": [p.value for p in formats.platforms if p] if formats else (),
            **settings.said("formats"),
        },
        "target": {
            **settings.said("target"),
            "devices": [
                relative(Path(name), around.folder) if name.endswith(".toml") else name
                for name in around.devices
            ],
        },
    }
    return _without_nothing(content)


def _texts(texts: TextSpec | None, folder: Path) -> dict[str, Any]:
    """What is not at its default; files are named from the folder."""
    if texts is None:
        return {}
    given = {each.name: getattr(texts, each.name) for each in options_of(TextSpec)}
    given["tokenizer"] = relative(Path(texts.tokenizer), folder)
    if Path(texts.template).suffix:
        given["template"] = relative(Path(texts.template), folder)
    defaults = {each.name: each.default for each in options_of(TextSpec)}
    return {name: value for name, value in given.items() if value != defaults[name]}


def _without_nothing(content: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is None or empty, tables of nothing included."""
    kept = {}
    for key, value in content.items():
        plain = _without_nothing(value) if isinstance(value, Mapping) else value
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            plain = [_without_nothing(each) for each in value]
        if plain is not None and plain not in ((), [], {}):
            kept[key] = plain
    return kept


def _table(path: tuple[str, ...], content: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a table: its own keys first, then the tables in it."""
    tables = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    arrays = {
        key: value
        for key, value in content.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping)
    }
    own = {key: v for key, v in content.items() if key not in tables and key not in arrays}
    if path and (own or not (tables or arrays)):
        yield from ("", f"[{toml_key(*path)}]")
    for key, value in own.items():
        yield f"{toml_key(key)} = {toml_value(value)}"
    for key, array in arrays.items():
        for each in array:
            yield from ("", f"[[{toml_key(*path, key)}]]")
            yield from (f"{toml_key(name)} = {toml_value(value)}" for name, value in each.items())
    for key, table in tables.items():
        yield from _table((*path, key), table)
