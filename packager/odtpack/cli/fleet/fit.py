"""``odtpack fleet fit``: search how a federation is run, within the budgets of its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from odtpack.cli import _console
from odtpack.cli._options import DATA, PACKAGE, RESULT_AS_JSON, option
from odtpack.cli.device.simulate import STRICT
from odtpack.cli.fleet.run import FLEET, TIMES, devices_of

if TYPE_CHECKING:
    from odtpack.fit.federated import FleetFitResult, Tried

NOTHING_FITS: Final = 1


def fit(
    package: Annotated[Path, PACKAGE],
    data: Annotated[Path, DATA],
    fleet_file: Annotated[Path, FLEET],
    clients: Annotated[
        list[int] | None,
        option(
            "Clients per round to try; may be repeated.  [default: the fleet file's, twice and "
            "half]",
            "N",
            min=1,
        ),
    ] = None,
    epochs: Annotated[
        list[int] | None,
        option(
            "Local epochs to try; may be repeated.  [default: the fleet file's, twice and half]",
            "N",
            min=1,
            max=10_000,
        ),
    ] = None,
    lr: Annotated[
        list[float] | None,
        option(
            "Learning rate to try; may be repeated.  [default: the fleet file's, times 3 and "
            "divided by 3]",
            "X",
        ),
    ] = None,
    trials: Annotated[int, option("Candidates to simulate.", "N", min=1)] = 12,
    finalists: Annotated[int, option("Candidates to simulate for all rounds.", "N", min=1)] = 4,
    seeds: Annotated[
        int, option("Seeds for these; budgets must be met with each.", "N", min=1, max=1000)
    ] = 1,
    times: Annotated[Path | None, TIMES] = None,
    jobs: Annotated[
        int, option("Parallel simulations; 0 for one per core.", "N", min=0, max=4096)
    ] = 0,
    strict: Annotated[bool, STRICT] = False,
    as_json: Annotated[bool, RESULT_AS_JSON] = False,
) -> None:
    """Find clients per round, local epochs and a learning rate that meet a fleet's budgets.

    Simulates candidates for a third of the rounds, continues the better ones, and shows the Pareto
    set of accuracy, days, traffic and energy.

    Exit code 0 if a candidate meets every budget that could be judged, 1 if none does, 2 for bad
    input.
    """
    from odtpack.fit.federated import FleetFitRequest, fit_fleet, fleet_space
    from odtpack.fit.study import optuna
    from odtpack_simulator.fleet.federation import Federation
    from odtpack_simulator.fleet.fleet_file import read_fleet
    from odtpack_simulator.replay.executor import default_jobs
    from odtpack_simulator.result.result import load_result

    optuna()  # before anything is read
    fleet = read_fleet(fleet_file)
    space = fleet_space(fleet, clients or (), epochs or (), lr or ())
    before = None if times is None else load_result(times)
    federation = Federation(package, data, fleet)
    with _console.Progress("fit") as progress:
        if fleet.population.devices:
            federation.devices = devices_of(federation, before, progress)
        result = fit_fleet(
            FleetFitRequest(
                package, data, fleet, space, federation.devices, trials, finalists, seeds
            ),
            jobs=jobs or default_jobs(),
            progress=lambda title, done, count: progress.update(done, count, title),
        )
    _console.results(as_json=as_json)
    _show(result)
    _console.json_result(as_json, result.model_dump(mode="json"))
    if not result.best or (strict and not result.judged):
        raise typer.Exit(NOTHING_FITS)


def _show(result: FleetFitResult) -> None:
    """Print what keeps the budgets, what it beats, and what was dropped."""
    finished = len(result.best) + len(result.beaten) + len(result.over_budget)
    way = [
        f"{rung.played} played for {rung.rounds} round{'s' * (rung.rounds != 1)}"
        for rung in result.rungs
    ]
    _console.say(", ".join([*way, f"{finished} to the end, of {result.candidates} candidates"]))
    within = "Within the budgets" if result.judged else "Within the budgets that could be judged"
    for title, rows in (
        (f"{within}, best accuracy first:", result.best),
        (f"{within}, but beaten:", result.beaten),
        ("Over a budget:", result.over_budget),
        ("Stopped early:", result.left),
    ):
        if rows:
            _console.say()
            _console.say(title, style="bold")
            _table(rows)
    if not result.best:
        _console.say()
        _console.say("No candidate meets every budget.", style="bold")
        return
    first = result.best[0]
    for message in first.not_judged:
        _console.say(f"not judged: {message}", style="yellow")
    _console.say()
    _console.say("The best one, for the fleet file:", style="bold")
    _console.lines(f"[training]\nepochs = {first.epochs}\nlearning_rate = {first.learning_rate:g}")
    _console.lines(f"[federation]\nclients = {first.clients}")


def _table(rows: Sequence[Tried]) -> None:
    from odtpack_simulator.values.units import (
        format_bytes,
        format_energy,
        format_number,
        format_percent,
    )

    def cells(each: Tried) -> tuple[str, ...]:
        found = each.figures
        quality = "not finite" if found.loss is None else format_number(found.loss)
        return (
            f"{each.number}",
            f"{each.clients}",
            f"{each.epochs}",
            f"{each.learning_rate:g}",
            f"{each.rounds}",
            quality if found.accuracy is None else format_percent(found.accuracy),
            "never" if found.days is None else f"{found.days:.1f}",
            format_percent(found.took_part),
            format_bytes(found.traffic_bytes),
            "unknown" if found.energy_j is None else format_energy(found.energy_j),
            "; ".join(
                [
                    *each.failed[: 0 if each.reason else None],
                    *([each.reason] if each.reason else []),
                    *([f"beaten by {', '.join(map(str, each.beaten_by))}"] * bool(each.beaten_by)),
                ]
            ),
        )

    quality = "loss" if rows[0].figures.accuracy is None else "accuracy"
    figures = ("clients", "epochs", "rate", "rounds", quality, "days", "took part", "traffic")
    header = ("number", *figures, "energy", "")
    _console.table([cells(each) for each in rows], header, figures=",".join((*figures, "energy")))
