"""Two federations side by side, and one with several seeds."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from odtpack.cli import main
from odtpack_simulator.figures.compare import Change, Comparison
from odtpack_simulator.fleet.fleet_file import FleetBudgets
from odtpack_simulator.fleet.judge import compare_fleets, join_seeds, judge_fleet
from odtpack_simulator.fleet.result import FleetResult, SeedPoint, band, load_fleet_result, seed_run
from odtpack_simulator.reports import render_report as render_fleet_report
from tests.fleet.fleets import command, device, fleet_of, played

ROOT = Path(__file__).resolve().parents[2]


def play(
    folder: Path, seed: int, budgets: FleetBudgets | None = None, **tables: Any
) -> FleetResult:
    fleet = fleet_of(seed=seed, **tables)
    found = played(folder, fleet, [device("acme/one"), device("acme/two")])
    return judge_fleet(found, budgets or FleetBudgets())


@pytest.fixture(scope="module")
def short(folder: Path) -> list[FleetResult]:
    return [play(folder, seed, training={"learning_rate": 0.02}) for seed in range(3)]


@pytest.fixture(scope="module")
def longer(folder: Path) -> list[FleetResult]:
    tables = {
        "training": {"learning_rate": 0.2, "epochs": 4},
        "population": {"data": {"samples": [60, 100]}},
    }
    return [play(folder, seed, FleetBudgets(accuracy=0.3), **tables) for seed in range(3)]


def figure(found: Comparison, metric: str) -> Change:
    return next(each for each in found.package if each.metric == metric)


def test_more_training_is_better_and_costs_more_energy(short, longer):
    found = compare_fleets(short[0], longer[0])
    assert found.accuracy == 0.3
    better = figure(found, "accuracy")
    assert better.base == pytest.approx(short[0].rounds[-1].accuracy)
    assert better.direction == "better"
    assert better.noise_percent is None
    assert figure(found, "energy").direction == "worse"
    assert figure(found, "traffic").direction == "same"
    reached = figure(found, "rounds")
    first = seed_run(longer[0]).reached(0.3)
    assert seed_run(short[0]).reached(0.3) is None
    assert (reached.base, reached.head, reached.direction) == (None, first.round, "better")
    assert "training.epochs: 1 before, 4 now" in found.notes
    assert "both results are of the same package" in found.notes
    turned = compare_fleets(longer[0], short[0], 0.3)
    for (_, one), (_, other) in zip(found.figures(), turned.figures(), strict=True):
        assert other.metric == one.metric
        opposite = {"better": "worse", "worse": "better"}
        assert other.direction == opposite.get(one.direction, one.direction)


def test_a_result_is_the_same_as_itself(longer):
    joined = join_seeds(longer)
    for result in (longer[0], joined):
        found = compare_fleets(result, result)
        assert {each.direction for _, each in found.figures()} == {"same"}
        assert found.notes[0] == "both results are of the same package"
        assert len(found.notes) == 2  # and of how many seeds


def with_accuracies(result: FleetResult, *accuracies: float) -> FleetResult:
    run = seed_run(result)
    point = run.points[-1]
    seeds = [
        run.model_copy(update={"points": [point.model_copy(update={"accuracy": each})]})
        for each in accuracies
    ]
    return result.model_copy(update={"seeds": seeds})


@pytest.mark.parametrize(("head", "direction"), [
    ((0.51, 0.53, 0.55), "within noise"),
    ((0.60, 0.62, 0.64), "better"),
    ((0.40, 0.42, 0.44, 0.46), "worse"),
    ((0.51, 0.55), "better"),  # two seeds do not say what is chance
])  # fmt: skip
def test_what_the_seeds_leave_open_is_within_their_spread(longer, head, direction):
    base = 0.50, 0.52, 0.54
    found = figure(
        compare_fleets(with_accuracies(longer[0], *base), with_accuracies(longer[0], *head)),
        "accuracy",
    )
    assert found.direction == direction
    assert (found.base, found.head) == pytest.approx((0.52, statistics.fmean(head)))
    if len(head) > 2:
        errors = [statistics.variance(each) / len(each) for each in (base, head)]
        assert found.noise_percent == pytest.approx(200 * math.sqrt(sum(errors)) / 0.52)


def test_checks_are_those_of_the_worst_seed(longer):
    ends = [result.rounds[-1].accuracy or 0 for result in longer]
    budgets = FleetBudgets(accuracy=sorted(ends)[1], traffic_per_device="1 GB")
    joined = join_seeds([judge_fleet(result, budgets) for result in longer])
    assert joined.verdict == "fail"
    check = next(check for check in joined.checks if check.metric == "accuracy")
    assert check.actual == pytest.approx(min(ends))
    assert f"(worst of 3 seeds: seed {ends.index(min(ends))}; 1 fails)" in check.message
    assert [check.status for check in joined.checks if check.metric != "accuracy"] == ["pass"] * 4
    assert [run.seed for run in joined.seeds] == [0, 1, 2]
    assert joined.rounds == longer[0].rounds


def test_the_band_holds_every_seed(longer):
    runs = [seed_run(result) for result in longer]
    whole = band(runs, by_day=False, by_accuracy=True)
    assert [place for place, _, _ in whole] == [0, 1, 2, 3]
    for place, low, high in whole[1:]:
        values = [result.rounds[int(place) - 1].accuracy for result in longer]
        assert (low, high) == (min(values), max(values))
    # Until a seed's next round its last value counts.
    late = runs[1].model_copy(
        update={"points": [SeedPoint(round=1, day=5.0, loss=0.5, accuracy=1.0)]}
    )
    by_day = band([runs[0], late], by_day=True, by_accuracy=True)
    assert by_day[-1] == (5.0, runs[0].accuracy, 1.0)
    assert by_day[-2][1] == late.accuracy_before
    assert 'class="area"' in render_fleet_report(join_seeds(longer), "html").decode()
    assert 'class="area"' not in render_fleet_report(longer[0], "html").decode()


def test_a_band_of_many_rounds_keeps_its_extremes(longer):
    run = seed_run(longer[0])
    points = [
        SeedPoint(round=number, day=number / 10, loss=0.5, accuracy=0.9 if number == 777 else 0.5)
        for number in range(1, 2001)
    ]
    many = band([run.model_copy(update={"points": points})], by_day=False, by_accuracy=True)
    assert 200 <= len(many) <= 250
    assert max(high for _, _, high in many) == 0.9
    assert many[-1] == (2000, 0.5, 0.5)
    assert band([], by_day=False, by_accuracy=True) == []


@pytest.fixture
def work(folder: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "fleet.toml").write_text(
        "seed = 5\n[population]\nclients = 8\n[training]\nlearning_rate = 0.1\n"
        "[federation]\nclients = 4\nrounds = 2\n"
    )
    files = ("--fleet", tmp_path / "fleet.toml", "--out", tmp_path / "run")
    return command(folder, "run", *files)


def test_seeds_are_played_one_after_the_other_and_resumed(work, tmp_path):
    one, three, again = (tmp_path / f"{name}.json" for name in ("one", "three", "again"))
    assert main([*work, "--report", f"json:{one}"]) == 0
    # What was played with one seed goes on with three.
    assert main([*work, "--resume", "--seeds", "3", "--report", f"json:{three}"]) == 0
    first, all_three = load_fleet_result(one), load_fleet_result(three)
    assert all_three.rounds == first.rounds
    assert [run.seed for run in all_three.seeds] == [5, 6, 7]
    assert seed_run(first) == all_three.seeds[0]
    assert len({run.points[-1].loss for run in all_three.seeds}) == 3
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"state.npz", "state-6.npz", "state-7.npz", "federated.ckpt"}
    assert main([*work, "--resume", "--seeds", "3", "--report", f"json:{again}"]) == 0
    assert load_fleet_result(again).seeds == all_three.seeds


def test_the_command_compares(
    short, longer, tmp_path,
    capsys,
):  # fmt: skip
    for name, results in (("base", short), ("head", longer)):
        (tmp_path / f"{name}.json").write_text(join_seeds(results).to_json())
    both = [str(tmp_path / "base.json"), str(tmp_path / "head.json")]
    assert main(["fleet", "compare", *both]) == 0
    text = capsys.readouterr().out
    assert "until an accuracy of 30.0 %" in text
    assert "never" in text
    assert "means over 3 and 3 seeds" in text
    assert main(["fleet", "compare", *both, "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    assert markdown.startswith("### odtpack fleet: ")
    assert "| Federation | Accuracy |" in markdown
    assert main(["fleet", "compare", *both, "--format", "json", "--accuracy", "0.2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["accuracy"] == 0.2
    schema = (ROOT / "docs" / "schemas" / "comparison.schema.json").read_text()
    jsonschema.validate(printed, json.loads(schema))
    assert main(["fleet", "compare", *both, "--format", "html"]) == 0
    assert "Accuracy, federation" in capsys.readouterr().out
    assert main(["fleet", "compare", *both, "--out", both[0]]) == 2
    assert main(["fleet", "compare", both[0], str(tmp_path / "absent.json")]) == 2


def test_what_the_untrained_model_has_takes_no_time(short):
    start = short[0].accuracy_before
    assert start is not None
    found = compare_fleets(short[0], short[0], start)
    for metric in ("rounds", "days"):
        assert (figure(found, metric).base, figure(found, metric).head) == (0, 0)
    assert any("the untrained model already has that accuracy" in note for note in found.notes)
