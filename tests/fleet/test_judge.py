"""What a federation must do without any budget, and what its checks say."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic import ValidationError

from odtpack.build import build_package
from odtpack.cli import main
from odtpack.fit.federated import figures_of
from odtpack.optimizers import OPTIMIZERS
from odtpack_simulator.figures.compare import Change
from odtpack_simulator.fleet import federation as federation_module
from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.fleet_file import FleetBudgets
from odtpack_simulator.fleet.judge import compare_fleets, fleet_figures, join_seeds, judge_fleet
from odtpack_simulator.fleet.result import FleetResult, RoundRecord, seed_runs
from odtpack_simulator.reports import render_report
from odtpack_simulator.reports.fleet import headline
from odtpack_simulator.values.figure import Check
from tests.fleet.fleets import IDEAL, command, device, fleet_of, ideal, on_digits, played


@pytest.fixture(scope="module")
def learned(folder: Path) -> FleetResult:
    """Six clients with labels of all kinds, which learn in three rounds."""
    return played(folder, ideal(
        ("dirichlet = 0.5\n", ""), ("rate = 0.1", "rate = 0.3"), ("epochs = 2", "epochs = 4"),
    ))  # fmt: skip


def broken(result: FleetResult, count: int = 1, **figures: Any) -> FleetResult:
    """The same, with the last rounds' models not finite."""
    changes = {"loss": None, "accuracy": 0.05} | figures
    rounds = [each.model_copy(update=changes) for each in result.rounds[-count:]]
    update = {"rounds": [*result.rounds[:-count], *rounds], "held_out_fall": None}
    return result.model_copy(update=update)


def check_of(result: FleetResult, metric: str) -> Check:
    return next(check for check in result.checks if check.metric == metric)


def test_the_last_round_counts_whatever_its_loss(learned):
    before = learned.rounds[-1].accuracy
    assert before > 0.05
    result = judge_fleet(broken(learned), FleetBudgets(accuracy=before))
    assert result.verdict == "fail"
    assert check_of(result, "finite_loss").message.startswith("after 2 of 3 evaluated rounds")
    assert check_of(result, "accuracy").actual == 0.05
    assert [c.metric for c in result.checks if c.metric == "learns"] == []
    assert headline(result) == "The loss is not finite after 3 rounds"
    assert b"no round took place" not in render_report(result, "html").lower()
    assert figures_of(result, FleetBudgets()).costs()[0] == math.inf


def test_a_loss_that_was_not_finite_once_does_not_ask_for_a_higher_rate(learned):
    first = learned.rounds[0].model_copy(update={"loss": None})
    found = judge_fleet(
        learned.model_copy(update={"rounds": [first, *learned.rounds[1:]]}), FleetBudgets()
    )
    assert check_of(found, "finite_loss").advice == "lower training.learning_rate"
    accuracy = learned.rounds[0].accuracy
    assert accuracy is not None
    point = seed_runs(found)[0].reached(accuracy)
    assert point is None or point.round > 1


def test_fewer_held_out_samples_than_a_fixed_batch_are_not_judged(folder, tmp_path, learned):
    model = onnx.load(folder / "model.onnx")
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.shape.dim[0].dim_value = 64
    build_package(model, tmp_path / "fixed", loss="cross_entropy", optimizer=OPTIMIZERS["sgd"]())
    digits = np.load(folder / "digits.npz")
    np.savez(tmp_path / "few.npz", **{name: digits[name][:100] for name in digits})
    fleet = ideal(("[20, 40]", 70))
    found, _ = Federation(tmp_path / "fixed", tmp_path / "few.npz", fleet).simulate()
    assert [each.evaluated for each in found.rounds] == [False] * 3
    result = judge_fleet(found, FleetBudgets(final_loss=1.0, accuracy=0.5, rounds=2))
    why = "20 held-out samples are fewer than a batch of 64"
    assert check_of(result, "answers").status == "pass"
    for metric in ("finite_loss", "learns", "final_loss", "accuracy", "rounds"):
        check = check_of(result, metric)
        assert (check.status, check.message) == ("not judged", why)
    for pair, direction in (((learned, found), "unknown now"), ((found, learned), "known now")):
        compared = change(compare_fleets(*pair, accuracy=0.01), "final_loss")
        assert (compared.direction, compared.reason) == (direction, why)
    assert headline(result) == "No loss is known after 3 rounds"
    assert why in render_report(result, "html").decode()


def test_a_model_that_is_never_finite_was_still_evaluated(learned):
    result = judge_fleet(broken(learned, 3, accuracy=None), FleetBudgets())
    assert headline(result) == "The loss is not finite after 3 rounds"
    assert check_of(result, "finite_loss").actual == 3
    assert result.over_budget


def test_a_round_says_whether_it_was_evaluated(learned):
    row = learned.rounds[0].model_dump(exclude={"evaluated"})
    with pytest.raises(ValidationError, match="evaluated"):
        RoundRecord.model_validate(row)


def test_a_fleet_that_learns_passes(learned):
    result = judge_fleet(learned, FleetBudgets())
    assert {check.metric: check.status for check in result.checks} == dict.fromkeys(
        ("answers", "finite_loss", "learns"), "pass"
    )
    fall = learned.held_out_fall
    assert fall.fall == pytest.approx(learned.loss_before - learned.rounds[-1].loss, rel=1e-3)
    assert fall.samples == learned.plan.held_out_samples


@pytest.mark.parametrize(
    ("rate", "hint"),
    [("0", "raise training.learning_rate"), ("30", "lower training.learning_rate")],
)
def test_a_fleet_that_learns_nothing_fails(folder, rate, hint):
    found = played(folder, ideal(("rate = 0.1", f"rate = {rate}")))
    result = judge_fleet(found, FleetBudgets())
    assert result.verdict == "fail"
    learns = check_of(result, "learns")
    assert (learns.status, learns.advice) == ("fail", hint)
    left_out = judge_fleet(found, FleetBudgets(learns=False))
    assert "learns" not in {check.metric for check in left_out.checks}


def refusing(result: FleetResult, refused: int) -> FleetResult:
    """The same, with all answers of so many last rounds refused."""
    why = ["client 1: it holds NaN or infinity"]
    rounds = [
        each.model_copy(update={"ends": {"refused": each.ends["averaged"]}, "refused": why})
        for each in result.rounds[-refused:]
    ]
    return result.model_copy(update={"rounds": [*result.rounds[:-refused], *rounds]})


def test_most_answers_refused_fails_and_is_no_deadline(learned):
    one = judge_fleet(refusing(learned, 1), FleetBudgets())
    assert check_of(one, "refused").state == "warn"
    two = judge_fleet(refusing(learned, 2), FleetBudgets())
    assert check_of(two, "refused").state == "fail"
    assert [check_of(each, "refused").limit for each in (one, two)] == [0.01, 0.5]
    assert check_of(two, "refused").message.startswith("12 of 18 answers were refused")
    said = check_of(two, "answers").message
    assert said == "1 of 3 rounds changed the model; in 2 all answers were refused"
    nan = check_of(judge_fleet(broken(refusing(learned, 2)), FleetBudgets()), "answers").message
    assert nan.endswith("were refused, and the model is not finite")


def change(comparison: Any, metric: str) -> Change:
    return next(each for each in comparison.package if each.metric == metric)


def test_the_final_loss_is_a_budget_and_is_compared(learned):
    loss = learned.rounds[-1].loss
    assert loss is not None
    kept = judge_fleet(learned, FleetBudgets(final_loss=loss))
    assert check_of(kept, "final_loss").status == "pass"
    assert judge_fleet(learned, FleetBudgets(final_loss=loss * 0.99)).over_budget
    nan = judge_fleet(broken(learned), FleetBudgets(final_loss=100.0))
    assert check_of(nan, "final_loss").status == "fail"
    found = compare_fleets(kept, nan)
    assert change(found, "final_loss").direction == "worse"
    assert change(found, "accuracy").direction == "worse"
    assert change(compare_fleets(nan, kept), "final_loss").direction == "better"


def test_every_key_of_the_fleet_file_that_differs_is_noted(folder):
    tables: dict[str, Any] = {
        "population": {"clients": 12, "data": {"samples": [16, 24], "dirichlet": 1.0}},
        "federation": {"clients": 4, "rounds": 1},
    }
    other: dict[str, Any] = {
        "population": {
            "clients": 12,
            "lost": 0.1,
            "data": {"samples": [16, 30], "dirichlet": 0.5},
            "device": [{"profile": "acme/one", "share": 3}, {"profile": "/home/me/two.toml"}],
        },
        "federation": {
            "clients": 4, "rounds": 1, "strategy": "fedavgm", "server_momentum": 0.5,
            "most_times_median": 5,
        },
        "traffic": {"compression": 0.5},
    }  # fmt: skip
    devices = device("acme/one"), device("acme/two")
    base, head = (played(folder, fleet_of(**each), devices) for each in (tables, other))
    assert FleetResult.model_validate_json(head.to_json()) == head
    assert "/home/me" not in head.to_json()
    notes = compare_fleets(base, head).notes
    for note in (
        "population.lost: 0 before, 0.1 now",
        "population.data.samples: 16, 24 before, 16, 30 now",
        "population.data.dirichlet: 1 before, 0.5 now",
        "population.device.0.share: 1 before, 3 now",
        "federation.strategy: fedavg before, fedavgm now",
        "federation.server_momentum: none before, 0.5 now",
        "federation.most_times_median: 10 before, 5 now",
        "traffic.compression: 1 before, 0.5 now",
    ):
        assert note in notes


def test_the_clients_of_each_model_are_counted(folder, monkeypatch):
    profiles = [("acme/one", 50), ("acme/two", 50), ("acme/rare", 1)]
    fleet = fleet_of(
        population={
            "clients": 60,
            "device": [{"profile": name, "share": share} for name, share in profiles],
        },
        federation={"clients": 60, "rounds": 1},
    )
    devices = [device(name, share=share) for name, share in profiles]
    federation = on_digits(folder, fleet, devices)
    monkeypatch.setattr(federation_module, "_BLOCK", 7)
    result, _ = federation.simulate()
    models = [federation.population.client(number).model for number in range(60)]
    counts = np.bincount(models, minlength=3).tolist()
    assert [each.clients for each in result.devices] == counts
    assert counts != [30, 30, 1]
    for each in result.devices:
        assert each.took_part <= each.clients
    monkeypatch.setattr(federation_module, "_MOST_COUNTED", 59)
    estimated, _ = federation.simulate()
    assert [each.clients for each in estimated.devices] == [30, 30, 1]
    assert any("not counted one by one" in text for text in estimated.unknown)


def test_checks_of_seeds_show_the_figure_of_the_worst(learned):
    def seeded(seed: int, accuracy: float) -> FleetResult:
        last = learned.rounds[-1].model_copy(update={"accuracy": accuracy})
        plan = learned.plan.model_copy(update={"seed": seed})
        update = {"rounds": [*learned.rounds[:-1], last], "plan": plan}
        return judge_fleet(learned.model_copy(update=update), FleetBudgets(accuracy=0.5))

    for accuracies, said in (
        ((0.40, 0.30, 0.35), "(worst of 3 seeds: seed 4; all 3 fail)"),
        ((0.60, 0.55, 0.70), "(worst of 3 seeds: seed 4; all 3 pass)"),
        ((0.60, 0.30, 0.70), "(worst of 3 seeds: seed 4; 1 fails)"),
    ):
        joined = join_seeds([seeded(3 + at, each) for at, each in enumerate(accuracies)])
        check = check_of(joined, "accuracy")
        assert check.actual == min(accuracies)
        assert check.message.endswith(said)


def test_the_worst_state_of_any_seed_is_that_of_all(learned):
    """A warning does not hide what could not be judged."""
    check = Check(metric="accuracy", status="fail", level="warn", actual=0.1, message="low")
    open_ = Check(metric="accuracy", status="not judged", message="unknown")
    one, two = (
        learned.model_copy(update={"checks": [each], "verdict": each.state})
        for each in (check, open_)
    )
    assert join_seeds([one, two]).verdict == "not judged"


def costly(result: FleetResult, disturbed: str | None) -> FleetResult:
    """The same, with a device that takes energy, and answers that were not needed any more."""
    ends = result.rounds[0].ends | {"surplus": 4, "lost": 8}
    first = result.rounds[0].model_copy(update={"ends": ends})
    outcome = result.devices[0].model_copy(update={"device": device(disturbed=disturbed)})
    update = {"rounds": [first, *result.rounds[1:]], "devices": [outcome]}
    return result.model_copy(update=update)


@pytest.mark.parametrize("disturbed", [None, "this machine was busy"])
def test_advice_does_not_ask_for_more_of_what_costs_too_much(learned, disturbed):
    budgets = FleetBudgets(traffic_per_device="1 B", accuracy=1.0, participation="100 %")
    spent = learned.energy_j
    result = costly(learned, disturbed).model_copy(
        update={"energy_j": spent.model_copy(update={"most": 9.0})}
    )
    judged = judge_fleet(result, budgets.model_copy(update={"energy_per_device": 1.0}))
    if disturbed is not None:
        limited = [check for check in judged.checks if check.budget_location is None]
        open_ = [check for check in limited if check.status == "not judged"]
        assert {check.metric for check in open_} >= {"traffic_per_device", "energy_per_device"}
        assert {check.advice for check in open_} == {None}
        return
    assert "over_selection" in (check_of(judged, "accuracy").advice or "")
    for metric, word in (("traffic_per_device", "send less"), ("energy_per_device", "compute")):
        advice = check_of(judged, metric).advice or ""
        assert advice.startswith(word)
        assert "fewer rounds, fewer clients" in advice
        assert "over_selection" not in advice  # it is 1
    quiet = judge_fleet(
        learned, FleetBudgets(traffic_per_device="1 B", days=1e-9, accuracy=0.05)
    )  # fmt: skip
    assert "longer" not in (check_of(quiet, "traffic_per_device").advice or "")


def test_what_several_seeds_have_no_figure_of_says_so(learned):
    joined = join_seeds([learned, learned])
    reasons = {figure.metric: figure.reason for figure in fleet_figures(joined)}
    assert reasons["energy_per_device"] == "several seeds were played"
    assert reasons["traffic_per_device"] == "several seeds were played"
    found = compare_fleets(learned, joined)
    assert "the power of  is" not in found.to_json()


def test_annotations_name_the_line_of_the_budget(
    folder, tmp_path, capsys,
    monkeypatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    text = IDEAL.replace("rounds = 3", "rounds = 1") + "[budgets]\n# at the end\naccuracy = 1.0\n"
    Path("fleet.toml").write_text(text)
    line = text.splitlines().index("accuracy = 1.0") + 1
    more = ("--fleet", "fleet.toml", "--out", "out", "--report", "github:-")
    assert main(command(folder, "run", *more)) == 1
    assert f"::error file=fleet.toml,line={line},title=Accuracy::" in capsys.readouterr().out


def test_reports_count_checks_in_words(learned):
    result = judge_fleet(learned, FleetBudgets(accuracy=1.0, traffic_per_device="1 B"))
    markdown = render_report(result, "markdown").decode()
    assert "2 checks fail" in markdown
    assert "2 checks that did not pass" in markdown
    one = judge_fleet(learned, FleetBudgets(accuracy=1.0))
    assert "1 check fails" in render_report(one, "markdown").decode()
    assert "1 check that did not pass" in render_report(one, "markdown").decode()
