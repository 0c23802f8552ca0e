"""``odtpack fleet fit``: what may vary, what is left behind and why, and what is found."""

import importlib
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from odtpack.cli import main
from odtpack.fit.federated import (
    FleetFitRequest,
    FleetFitResult,
    FleetSettings,
    Tried,
    _rounds,
    figures_of,
    fit_fleet,
    fleet_space,
)
from odtpack_simulator.fleet.fleet_file import FleetFile
from tests.fleet.fleets import UNJUDGED, command, device, fleet_of, on_digits, played
from tests.refused import refused

ROOT = Path(__file__).resolve().parents[2]
DEVICES = [device("acme/one"), device("acme/two", step=50_000_000)]
TABLES: dict[str, Any] = {
    "population": {"clients": 60, "lost": 0.1, "data": {"samples": [20, 60], "dirichlet": 0.5}},
    "federation": {"clients": 6, "minimum": 3, "rounds": 9},
    "training": {"learning_rate": 0.1, "batch_size": 16},
}


def request_of(folder: Path, fleet: FleetFile, **more: Any) -> FleetFitRequest:
    space = more.pop("space", None) or fleet_space(fleet)
    usual = {"devices": DEVICES, "trials": 6, "finalists": 2}
    return FleetFitRequest(
        folder / "package", folder / "digits.npz", fleet, space, **usual | more
    )  # fmt: skip


def everyone(result: FleetFitResult) -> list[Tried]:
    return [*result.best, *result.beaten, *result.over_budget, *result.left]


def test_what_may_vary_lies_around_the_fleet_file():
    fleet = fleet_of(**TABLES)
    space = fleet_space(fleet)
    assert space[0] == FleetSettings(1, 6, 1, 0.1)
    assert {each.clients for each in space} == {6, 12, 3}
    assert {each.epochs for each in space} == {1, 2}
    assert {each.learning_rate for each in space} == {0.1, 0.3, 0.033}
    assert len(space) == 18 == len({str(each.aspects()) for each in space})
    larger = FleetSettings(1, 12, 2, 0.3).of(fleet)
    assert (larger.federation.clients, larger.federation.minimum) == (12, 6)
    assert (larger.training.epochs, larger.training.learning_rate) == (2, 0.3)
    assert larger.population == fleet.population
    buffered = fleet_of(**TABLES | {"federation": {"clients": 8, "buffer": 4}})
    assert FleetSettings(1, 4, 1, 0.1).of(buffered).federation.buffer == 2
    assert fleet_space(fleet, [5], [3], [1.0]) == [FleetSettings(1, 5, 3, 1.0)]
    for clients, rates, code in (
        ([61], [], "bad-fleet-settings"),
        ([], [0.0], "bad-learning-rate"),
        ([], [float("nan")], "bad-learning-rate"),
    ):
        with refused(code):
            fleet_space(fleet, clients, [], rates)


@pytest.mark.parametrize("federation", [{}, {"clients": 6, "buffer": 3}], ids=["rounds", "buffer"])
def test_what_is_found_is_what_its_federation_comes_to(folder, federation):
    """Whatever the number of processes, and though it was stopped after fewer rounds first."""
    tables = TABLES | ({"federation": federation | {"rounds": 9}} if federation else {})
    request = request_of(folder, fleet := fleet_of(**tables | {"budgets": {"learns": False}}))
    result = fit_fleet(request, jobs=1)
    assert fit_fleet(request, jobs=2) == result
    assert [(rung.rounds, rung.played, rung.kept) for rung in result.rungs] == [(3, 6, 2)]
    assert len(everyone(result)) == 6
    assert len({each.number for each in everyone(result)}) == 6
    assert 1 in {each.number for each in everyone(result)}
    by_number = {each.number: each for each in request.space}
    finished = [*result.best, *result.beaten]
    assert len(finished) == 2
    for each in finished:
        own = by_number[each.number].of(fleet)
        found = played(folder, own, DEVICES)
        assert each.rounds == len(found.rounds) == 9
        assert each.figures == figures_of(found, fleet.budgets)
    accuracies = [each.figures.accuracy for each in result.best]
    assert accuracies == sorted(accuracies, reverse=True)
    for each in result.left:
        assert each.rounds == 3
        assert each.reason == "after 3 rounds others did better"


def test_settings_over_a_budget_are_left_early_and_never_among_the_best(folder):
    """Many clients a round choose a device more often, and send more."""
    few = FleetSettings(1, 3, 1, 0.1)
    many = [FleetSettings(2, 50, 1, 0.1), FleetSettings(3, 50, 1, 0.3)]
    payload = on_digits(folder, fleet_of(**TABLES), DEVICES).payload
    budgets = {"traffic_per_device": f"{5 * payload} B", "learns": False}
    fleet = fleet_of(**TABLES, budgets=budgets)
    result = fit_fleet(request_of(folder, fleet, space=[few, *many], trials=3, finalists=1))
    assert [each.number for each in result.best] == [1]
    assert not result.over_budget
    for each in result.left:
        assert each.reason.startswith("after 3 rounds: a device sends and receives up to")
    tight = fleet.model_copy(
        update={"budgets": fleet.budgets.model_copy(update={"traffic_per_device": 1.0})}
    )
    none = fit_fleet(request_of(folder, tight, space=[few, *many], trials=3, finalists=1))
    assert not none.best
    assert [bool(each.failed) for each in none.over_budget] == [True]


def test_one_round_is_not_many():
    said = [_rounds(SimpleNamespace(rounds=count)) for count in (1, 3)]
    assert said == ["1 round", "3 rounds"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_budget_that_cannot_be_judged_is_not_kept(
    strict, folder, tmp_path, capsys,
    monkeypatch,
):  # fmt: skip
    """The power of the devices is unknown, and so is the energy."""
    devices = [device("web/phone", watts=None)]
    command_file = importlib.import_module("odtpack.cli.fleet")
    monkeypatch.setattr(command_file, "devices_of", lambda *_: devices)
    path = tmp_path / "fleet.toml"
    tables = UNJUDGED.replace("clients = 6", 'clients = 6\ndevice = [{ profile = "web/phone" }]', 1)
    path.write_text(tables + 'energy_per_device = "1 J"\n')
    more = ["--fleet", path, "--trials", 1, *["--strict"] * strict]
    assert main(command(folder, "fit", *more)) == (1 if strict else 0)
    shown = capsys.readouterr().out
    assert "Within the budgets that could be judged" in shown
    assert "not judged: the power of web/phone is unknown" in shown


def test_every_seed_must_keep_the_budgets(folder):
    fleet = fleet_of(**TABLES, budgets={"accuracy": 0.15})
    settings = [FleetSettings(1, 6, 2, 0.1)]
    found = {}
    for seeds in (1, 3):
        result = fit_fleet(request_of(folder, fleet, space=settings, seeds=seeds))
        assert result.seeds == seeds
        assert result.rungs == []
        (found[seeds],) = everyone(result)
    seeded = [settings[0].of(fleet.model_copy(update={"seed": seed})) for seed in range(3)]
    runs = [played(folder, each, DEVICES) for each in seeded]
    accuracies = [run.rounds[-1].accuracy or 0.0 for run in runs]
    assert found[1].figures.accuracy == accuracies[0]
    assert found[3].figures.accuracy == pytest.approx(sum(accuracies) / 3)
    assert bool(found[3].failed) == (min(accuracies) < 0.15)


def test_the_command_prints_what_to_write(folder, tmp_path, capsys):
    path = tmp_path / "fleet.toml"
    path.write_text(UNJUDGED + "accuracy = 0.05\n")
    asked = ("--clients", 6, "--lr", 0.1, "--lr", 0.2, "--epochs", 1)
    words = command(folder, "fit", "--fleet", path, "--trials", 2, "--finalists", 2, *asked)
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    result = FleetFitResult.model_validate_json(shown.out)
    schema = json.loads((ROOT / "docs/schemas/fleet-fit.schema.json").read_text())
    jsonschema.validate(json.loads(shown.out), schema)
    first = result.best[0]
    assert f"learning_rate = {first.learning_rate:g}" in shown.err
    assert re.search(r"\[federation\]\s+clients = 6", shown.err)
    path.write_text(UNJUDGED + "accuracy = 1.0\n")
    assert main(words) == 1
    assert "No candidate meets every budget" in capsys.readouterr().out
    assert main([*words, "--clients", "7"]) == 2
    assert "more than the 6" in capsys.readouterr().err


@pytest.mark.parametrize(("federation", "clients", "wanted"), [
    ("clients = 6\nminimum = 5", 3, {"clients": 3, "minimum": 2}),
    ("clients = 4\nbuffer = 2", 6, {"clients": 6, "buffer": 3}),
], ids=["rounds", "buffer"])  # fmt: skip
def test_what_is_printed_is_what_was_played(
    federation, clients, wanted, folder, tmp_path,
    capsys,
):  # fmt: skip
    """Pasted over the fleet file's, it is valid."""
    path = tmp_path / "fleet.toml"
    tables = UNJUDGED.replace("clients = 6\nminimum = 6", federation)
    path.write_text(tables)
    asked = ("--clients", clients, "--lr", 0.1234567, "--epochs", 1)
    assert main(command(folder, "fit", "--fleet", path, "--trials", 1, "--json", *asked)) == 0
    shown = capsys.readouterr()
    printed = tomllib.loads(shown.err.partition("for the fleet file:\n")[2])
    assert printed == {"training": {"epochs": 1, "learning_rate": 0.1234567}, "federation": wanted}
    first = FleetFitResult.model_validate_json(shown.out).best[0]
    assert (first.minimum, first.buffer) == (wanted.get("minimum"), wanted.get("buffer"))
    fleet = FleetFile.model_validate(tomllib.loads(tables))
    pasted = FleetFile.model_validate(
        {**fleet.model_dump(exclude_unset=True), "federation": {"rounds": 3, **wanted}}
    )
    own = FleetSettings(1, clients, 1, 0.1234567).of(fleet)
    assert pasted.federation.model_dump() == own.federation.model_dump()
