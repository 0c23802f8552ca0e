"""``odtpack fit``: search what a recipe leaves open for the trade-offs that keep the budgets."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import odtpack_simulator as sim
from odtpack.cli import _completion, _console
from odtpack.cli._options import Count, Json, LossName, OptimizerName, PositiveCount

if TYPE_CHECKING:
    from odtpack.fit import FitResult
    from odtpack.fit.outcome import Solution

RESULT: Final = "fit.json"
PAGE: Final = "fit.html"


def fit(
    model: Path | None = None,
    *,
    data: Path | None = None,
    device: Annotated[list[str] | None, ("autocompletion", _completion.devices)] = None,
    budget: Path | None = None,
    recipe: Path | None = None,
    loss: LossName | None = None,
    loss_option: list[str] | None = None,
    freeze: list[str] | None = None,
    batch_size: list[PositiveCount] | None = None,
    optimizer: list[OptimizerName] | None = None,
    lr: list[float] | None = None,
    epochs: PositiveCount = 3,
    trials: PositiveCount = 24,
    finalists: PositiveCount = 6,
    seed: Count = 0,
    holdout: float | None = None,
    evaluation: Path | None = None,
    threads: PositiveCount | None = None,
    jobs: Annotated[Count, ("max", 4096)] = 1,
    ray: str | None = None,
    study: Path | None = None,
    out: Path | None = None,
    strict: bool = False,
) -> tuple[Json, int]:
    r"""Find recipes that meet the budgets on every device.

    Searches batch and micro-batch, what is frozen, optimizer, learning rate and the storage of
    frozen weights by real training, and shows the Pareto set of metric, memory, time and energy.
    Candidates that take too much memory are built with a memory budget, if they then fit.

    Exit code 0 if a candidate meets every budget that could be judged, 1 if none does, 2 for bad
    input.

    Parameters:
        model MODEL.onnx: Forward model. Default: that of the recipe.
        device NAME|FILE: Device profile; may be repeated.
        budget budgets.toml: Limits that a candidate must meet.
        recipe recipe.toml: Recipe. Its keys are fixed, other settings vary. Options override its
            budgets and devices. Default: recipe.toml, if there is no MODEL.onnx.
        freeze GLOB: Parameters that every candidate freezes. May be repeated.
        batch_size: Batch size to try, whole and as micro-batches. May be repeated. [default: 16, 32
            and 64]
        optimizer: Optimizer to try. May be repeated. [default: adamw, sgd with momentum, lion and
            adafactor]
        lr X: Learning rate to try; may be repeated. [default: three for each optimizer]
        trials: Candidates to train.
        finalists: Candidates to simulate on every device, at most.
        seed: Seed of the candidates, the sample order and the held-out split.
        threads: Threads within an operator. [default: the recipe's, or 1]
        jobs: Parallel build and training processes, 0 for one per core. Timings run alone.
        ray ADDRESS: Ray cluster that trains; local for one on this machine.
        study FILE: Journal of the search; an interrupted search continues from it.
        out FOLDER: Write recipe-1.toml, recipe-2.toml, ..., fit.json and the page fit.html here.
        json: Print the result as JSON on stdout.

    Examples:
        odtpack fit model.onnx --data digits.npz --loss cross_entropy --device pixel-8a \
            --budget budgets.toml --out fitted
        odtpack fit --recipe recipe.toml --data digits.npz --device galaxy-a12 --epochs 9 \
            --trials 40 --jobs 4
    """
    from odtpack.cli._files import check_share, find_recipe
    from odtpack.cli._options import overlay
    from odtpack.cli.data import as_samples
    from odtpack.cli.device.simulate import load_devices
    from odtpack.errors import OdtpackError
    from odtpack.fit import FitRequest
    from odtpack.fit import fit as search
    from odtpack.fit.space import SearchConstraints
    from odtpack.fit.study import optuna
    from odtpack_simulator.replay.executor import default_jobs, make_executor

    optuna()  # before anything is read
    if data is None:
        hint = "odtpack fit --help"
        raise OdtpackError("usage", "--data is missing: candidates are trained for real", hint=hint)
    read = find_recipe(recipe, wanted=model is None)
    options = {"model": model, "loss": loss, "loss_option": loss_option, "freeze": freeze}
    settings = overlay(options, read, "fit")
    if threads is not None:
        settings = dataclasses.replace(settings, threads=threads)
    names = device or ([] if read is None else read.devices())
    profiles = load_devices(names)
    budgets = sim.Budgets() if budget is None else sim.read_budgets(budget)
    source = budget
    if budget is None and read is not None:
        budgets = read.budgets() or budgets
        limits = read.content.get("budgets")
        source = read.path.parent / limits if isinstance(limits, str) else limits
    budgets.check_devices([profile.name for profile in profiles] + sim.list_profiles())
    previous = [] if out is None else _check_folder(out)
    request = FitRequest(
        settings,
        data,
        tuple(profiles),
        recipe=read,
        wishes=SearchConstraints(
            tuple(batch_size or ()), tuple(name.value for name in optimizer or ()), tuple(lr or ())
        ),
        budgets=budgets,
        budget_source=source,
        device_names=tuple(names),
        folder=out or Path(),
        epochs=epochs,
        trials=trials,
        finalists=finalists,
        seed=seed,
        study=study,
        evaluation=evaluation,
        holdout=check_share(holdout, other=evaluation),
    )
    executor = make_executor(jobs, ray)
    with (
        as_samples(read, data, evaluation) as (given, others),
        _console.Progress("fit") as progress,
    ):
        result = search(
            dataclasses.replace(request, data=given, evaluation=others),
            executor=executor,
            jobs=jobs or default_jobs(),
            progress=lambda now: progress.update(now.done, now.count, now.title),
        )
    _console.results()
    _show(result)
    if out is not None:
        _write(result, out, previous)
        _console.wrote(out)
    elif result.found:
        _console.say()
        _console.say("The recipe of the first (--out FOLDER writes them all):", style="bold")
        _console.say()
        _console.say(result.pareto[0].recipe)
    return result.model_dump(mode="json"), not result.found or (strict and not result.judged)


def _show(result: FitResult) -> None:
    """Print the Pareto set and what it beats, or what comes nearest to the budgets."""
    from odtpack_simulator.values.units import format_percent

    finished = len(result.pareto) + len(result.beaten) + len(result.over_budget)
    planned = f"{result.looked_at} of {result.candidates} candidates planned"
    _console.say(f"{planned}, {result.trained} trained, {finished} simulated")
    over = sum(each.stage == "plan" for each in result.left)
    if over:
        _console.say(f"not trained, because planned memory or package size is over a limit: {over}")
    _console.say()
    if result.found:
        _table(result, result.pareto, first="recipe")
        open_limits = {(w, c.metric): c for each in result.pareto for w, c in each.unjudged}
        for (where, metric), check in open_limits.items():
            _console.say(f"not judged on {where}: {metric}: {check.message}", style="yellow")
    if result.beaten:
        _console.say()
        _console.say("Within the budgets, but beaten:", style="bold")
        _table(result, result.beaten, first="beaten by")
    nearest = result.nearest
    if nearest is not None:
        _console.say("No candidate meets every budget. The closest is:", style="bold")
        _table(result, [nearest], first=None)
    elif not result.found:
        _console.say("No candidate could be trained to the end.", style="bold")
        for left in result.left[:5]:
            _console.say(f"  candidate {left.number}: {left.reason}")
    for each in result.over_budget if result.found else result.over_budget[:1]:
        for where, check in each.errors:
            _console.say(f"candidate {each.number} on {where}: {check.metric}: {check.message}")
        if each.miss is not None and each.miss < 1e6:
            _console.say(f"  its worst figure is beyond its limit by {format_percent(each.miss)}")
    for unknown in result.not_judged:
        title = unknown.figure.partition("_")[0]  # as in the table
        _console.say(f"unknown: {title}: {unknown.reason}", style="yellow")


def _table(
    result: FitResult, solutions: list[Solution], *, first: Literal["recipe", "beaten by"] | None
) -> None:
    """Print candidates: those of the Pareto set with their recipes, others with what beats them."""
    metric = result.objectives[0].name
    rows = []
    budgets = any(each.choice.memory_budget for each in solutions)
    for index, each in enumerate(solutions, 1):
        choice = each.choice
        cut = choice.micro_batch != choice.batch_size
        stored = "" if choice.frozen_dtype == "float32" else f", {choice.frozen_dtype}"
        beating = ", ".join(f"{number}" for number in each.beaten_by)
        rows.append(
            (
                *((f"{index}" if first == "recipe" else beating,) if first else ()),
                f"{each.number}",
                *each.figures(metric),
                f"{choice.batch_size}" + (f" in batches of {choice.micro_batch}" if cut else ""),
                choice.frozen + stored,
                f"{choice.optimizer}, rate {choice.learning_rate:g}",
                *((choice.memory_budget or "none",) if budgets else ()),
            )
        )
    figures = (metric, "peak memory", "time", "energy")
    header = (*((first,) if first else ()), "candidate", *figures)
    header += ("batch", "frozen", "optimizer", *(("memory budget",) if budgets else ()))
    _console.table(rows, header, figures=",".join(figures))


def _check_folder(out: Path) -> list[str]:
    """Refuse a folder that holds other things; return the files of an earlier search in it."""
    from odtpack.cli._files import check_creatable
    from odtpack.errors import OdtpackError
    from odtpack.fit.outcome import FitResult
    from odtpack_runtime.files.atomic import open_regular
    from odtpack_runtime.files.folder_update import finish_update, is_stage

    check_creatable(out, "--out")
    finish_update(out)
    if not out.is_dir() or all(is_stage(path.name) for path in out.iterdir()):
        return []
    try:
        with open_regular(out / RESULT) as stream:
            old = FitResult.model_validate_json(stream.read())
    except (OSError, ValueError) as error:
        what = f"the folder {str(out)!r} holds files that are not the result of a search"
        hint = "choose an empty or a new folder (--out FOLDER)"
        raise OdtpackError("folder-not-empty", what, hint=hint) from error
    recipes = {f"recipe-{index}.toml": each.recipe for index, each in enumerate(old.pareto, 1)}
    found = sorted(path for path in out.iterdir() if re.fullmatch(r"recipe-\d+\.toml", path.name))
    for path in found:
        written = recipes.get(path.name)
        if not path.is_file() or path.read_text("utf-8", "replace") != written:
            what = f"{str(path)!r} is not as a search wrote it, and a new one may write over it"
            hint = "move it, or choose an empty or a new folder (--out FOLDER)"
            raise OdtpackError("folder-not-empty", what, hint=hint)
    return [path.name for path in found]


def _write(result: FitResult, out: Path, previous: list[str]) -> None:
    """Write the recipes and the result, all of them or none."""
    from odtpack.fit.page import render_fit
    from odtpack.recipe.draft import SCHEMA_NAME, schema_text
    from odtpack_runtime.files.folder_update import update_folder

    with update_folder(out, last=RESULT, obsolete=previous) as stage:
        for index, each in enumerate(result.pareto, 1):
            (stage / f"recipe-{index}.toml").write_text(each.recipe, encoding="utf-8")
        (stage / SCHEMA_NAME).write_text(schema_text(), encoding="utf-8")
        (stage / PAGE).write_bytes(render_fit(result))
        (stage / RESULT).write_text(result.to_json(), encoding="utf-8")
