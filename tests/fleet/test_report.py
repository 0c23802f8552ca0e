"""The report says what the result holds, and the command ends as its budgets do."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from odtpack.cli import main
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.devices import devices_of_result, measure_devices
from odtpack_simulator.fleet.fleet_file import FleetBudgets, read_fleet
from odtpack_simulator.fleet.judge import compare_fleets, judge_fleet
from odtpack_simulator.fleet.result import FleetResult, load_fleet_result
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.reports import render_report as render_fleet_report
from odtpack_simulator.reports.fleet import fleet_sections, key_figures, way
from odtpack_simulator.reports.report import FigureRow
from odtpack_simulator.result import load_result
from odtpack_simulator.values.units import format_interval_of
from tests.calibrated import as_it_is
from tests.fleet.fleets import UNJUDGED, command, device, fleet_of, on_digits, played, write_digits
from tests.refused import refused
from tests.reports.page import Page
from tests.simulator.factory import make_result

DEVICE = '[[population.device]]\nprofile = "google/pixel-8a"\n'


@pytest.fixture(scope="module")
def result(folder: Path) -> FleetResult:
    fleet = fleet_of(
        population={
            "clients": 300,
            "lost": 0.2,
            "data": {"samples": [1, 40], "dirichlet": 0.5},
            "availability": {"idle": [0.5] * 24, "charging": [0.7] * 24},
        },
        federation={"clients": 10, "over_selection": 1.5, "rounds": 3, "deadline": "400 ms"},
    )
    devices = [device("acme/<one>", title="One <b>&"), device("acme/two", limit_bytes=1)]
    budgets = FleetBudgets(accuracy=0.99, traffic_per_device="1 GB", learns=False)
    return judge_fleet(played(folder, fleet, devices), budgets)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def losses(row: FigureRow) -> dict[str, str]:
    """How many a stage loses, by the reason."""
    lost = row.figures[1][1]
    return {why: count for count, why in re.findall(r"([\d,]*\d) (.+?)(?=, \d|$)", lost)}


def keep_what_is_not_lost(result: FleetResult) -> None:
    """Every stage keeps what the one before does not lose."""
    counts = [number(row.figures[0][1]) for row in way(result)]
    lost = [sum(map(number, losses(row).values())) for row in way(result)]
    for (before, after), less in zip(itertools.pairwise(counts), lost, strict=False):
        assert before == after + less
    assert counts[-1] == result.ends()["averaged"]
    assert sum(lost) > 0


def test_every_stage_keeps_what_the_one_before_does_not_lose(result):
    keep_what_is_not_lost(result)
    assert {"over memory", "lost"} <= set(result.ends())


def test_the_page_is_whole_and_shows_the_figures(result):
    page = render_fleet_report(result, "html").decode()
    shown = Page(page).text
    assert "<script" not in page
    assert "One <b>&" not in page
    assert "One <b>&" in shown
    text = " ".join(shown.split())
    accuracy = result.rounds[-1].accuracy
    assert f"{100 * accuracy:.1f} %" in text
    for stage in way(result):
        assert stage.figures[0][1] in text
        for reason, count in losses(stage).items():
            assert f"{count} {reason}"[:33] in text
    assert render_fleet_report(result, "html").decode() == page
    assert "10 answers of 15 chosen, at least 1, deadline" in text
    low, _, high = result.devices[0].round_s
    assert text.count(format_interval_of(low, high, "s")) == 2
    other = {"per_round": 1500, "clients": 10_000, "proximal": 0.5}
    plan = result.plan.model_copy(update=other)
    many = Page(render_fleet_report(result.model_copy(update={"plan": plan}), "html").decode()).text
    assert "1500 answers of 2250 chosen" in many
    assert "deadline 400 ms, fedavg" in many
    assert "FedProx with 0.5" in many
    assert "FedProx" not in text


def test_a_loss_that_is_not_finite_is_no_point_of_the_curve(result):
    rounds = [each.model_copy(update={"accuracy": None}) for each in result.rounds]
    known = result.model_copy(update={"accuracy_before": None, "rounds": rounds})
    unknown = known.model_copy(update={"loss_before": None})
    lines = [fleet_sections(each)["curves"][0][2].count("L") for each in (known, unknown)]
    assert lines[0] == lines[1] + 1


def test_other_formats_say_the_same(result):
    assert FleetResult.model_validate_json(render_fleet_report(result, "json")) == result
    suites = ET.fromstring(render_fleet_report(result, "junit"))  # noqa: S314 - our own
    assert suites.attrib["failures"] == "1"
    assert suites.find(".//failure").attrib["type"] == "accuracy"
    github = render_fleet_report(result, "github").decode()
    assert "::error title=Accuracy::the accuracy is" in github
    markdown = render_fleet_report(result, "markdown").decode()
    for stage in way(result):
        assert f"| {stage.title} | {stage.figures[0][1]} |" in markdown
    assert "One &lt;b&gt;&amp;" in markdown


@pytest.fixture
def work(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder / "package", tmp_path / "package")
    shutil.copy(folder / "digits.npz", tmp_path / "digits.npz")
    (tmp_path / "fleet.toml").write_text(UNJUDGED)
    return tmp_path


def run(work: Path, *more: str) -> int:
    return main(command(work, "run", "--fleet", work / "fleet.toml", *more))


def test_the_command_ends_as_the_budgets_do(work, capsys):
    assert run(work, "--json", "--report", f"markdown:{work / 'fleet.md'}") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "pass"
    assert (work / "fleet.md").read_text().startswith("## ")
    (work / "fleet.toml").write_text(UNJUDGED + "accuracy = 1.0\n")
    report = f"json:{work / 'fleet.json'}"
    assert run(work, "--out", str(work / "other"), "--resume", "--report", report) == 2
    assert "fleet-state" in capsys.readouterr().err
    # Budgets are not part of what a run is of: it goes on, and is judged by the new ones.
    assert run(work, "--resume", "--report", report) == 1
    assert "Accuracy" in capsys.readouterr().out
    again = load_fleet_result(work / "fleet.json")
    assert again.rounds == FleetResult.model_validate(printed).rounds
    assert {p.name for p in (work / "package-fleet").iterdir()} == {"state.npz", "federated.ckpt"}


@pytest.mark.parametrize(("arguments", "code"), [
    (["--report", "pdf:x"], "report-format-unknown"),
    (["--report", "html"], "report-path-missing"),
    (["--report", "html:-"], "report-not-text"),
    (["--report", "json:-", "--json"], "report-twice"),
    (["--report", "json:{work}/digits.npz"], "cannot-write"),
    (["--report", "json:{work}/absent/x.json"], "cannot-write"),
    (["--out", "{work}/digits.npz"], "cannot-write"),
    (["--times", "{work}/absent.json"], "result-missing"),
    (["--resume"], "fleet-state"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_before_anything_runs(work, capsys, arguments, code):
    before = (work / "digits.npz").read_bytes()
    assert run(work, *(each.format(work=work) for each in arguments)) == 2
    assert re.search(rf"error\[{code}\]", capsys.readouterr().err)
    assert (work / "digits.npz").read_bytes() == before


def test_rounds_of_more_clients_than_there_are_warn(work, capsys):
    text = UNJUDGED.replace("clients = 6\nminimum = 6\nrounds = 3", "clients = 20\nrounds = 1")
    (work / "fleet.toml").write_text(text)
    assert run(work) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "waits for 20 answers, and the population has 6 clients" in said
    (work / "fleet.toml").write_text(text.replace("rounds = 1", "rounds = 1\nbuffer = 3"))
    assert run(work) == 0
    assert "waits for" not in capsys.readouterr().err


def test_costs_are_those_of_a_simulation(work, capsys):
    """Measured once by simulate, and carried to the fleet's devices."""
    times = work / "times.json"
    simulate = ["simulate", str(work / "package"), "--data", str(work / "digits.npz")]
    simulate += ["--device", "google/pixel-8a", "--device", "samsung/galaxy-a12", "--epochs", "1"]
    simulate += ["--batch-size", "16", "--interruptions", "0", "--report", f"json:{times}"]
    for _ in range(3):  # other tests may keep this machine busy: then a step is not judged
        assert main([*simulate, "--lr", "0.5"]) in (0, 1)
        measured = load_result(times)
        if all(each.latency.step_ms is not None for each in measured.devices):
            break
    models = DEVICE + DEVICE.replace("google/pixel-8a", "samsung/galaxy-a12")
    text = UNJUDGED.replace("[population.data]", models + "[population.data]")
    (work / "fleet.toml").write_text(text)
    assert measured.training.learning_rate == 0.5
    fleet = read_fleet(work / "fleet.toml")
    found = devices_of_result(Package.open(work / "package"), measured, fleet, 16)
    for each, of in zip(found, measured.devices, strict=True):
        assert each.step == round(of.latency.step_ms.typical * 1e6)
        assert each.peak_bytes == of.memory.peak_bytes
    one, other = fleet.population.devices
    twice = fleet.population.model_copy(update={"devices": (one, other, one)})
    with refused("fleet-invalid", "has google/pixel-8a 2 times"):
        devices_of_result(
            Package.open(work / "package"), measured,
            fleet.model_copy(update={"population": twice}), 16,
        )  # fmt: skip
    reports = [f"json:{work / name}" for name in ("one.json", "two.json")]
    for name, report in zip(("one", "two"), reports, strict=True):
        assert run(work, "--times", str(times), "--out", str(work / name), "--report", report) == 0
    one, two = (load_fleet_result(work / name) for name in ("one.json", "two.json"))
    assert one.model_copy(update={"origin": two.origin}) == two
    (work / "fleet.toml").write_text(text.replace("batch_size = 16", "batch_size = 8"))
    assert run(work, "--times", str(times)) == 2
    assert "fleet-times" in capsys.readouterr().err
    (work / "fleet.toml").write_text(UNJUDGED)  # of ideal devices
    assert run(work, "--times", str(times)) == 2
    assert "and the fleet file names none" in capsys.readouterr().err


def test_what_follows_from_disturbed_times_is_not_judged(folder):
    """Where a client comes too late, that is all; where all are in time, only days and energy."""
    budgets = FleetBudgets(
        accuracy=0.01, days=1e-9, energy_per_device="0.1 J", traffic_per_device="1 GB",
        learns=False,
    )  # fmt: skip
    always = "answers", "finite_loss"
    for deadline, judged in (("10 h", {"accuracy", "traffic_per_device"}), ("1 s", set())):
        fleet = fleet_of(
            population={"clients": 20, "device": [{"profile": "google/pixel-8a"}]},
            federation={"clients": 5, "deadline": deadline},
        )
        for why in (None, "this machine was busy: <tests>"):
            found = played(folder, fleet, [device(step=200_000_000, disturbed=why)])
            result = judge_fleet(found, budgets)
            checks = {each.metric: each for each in result.checks if each.metric not in always}
            known = {name for name, check in checks.items() if check.status != "not judged"}
            assert known == (set(checks) if why is None else judged)
            said = render_fleet_report(result, "markdown").count(b"this machine was busy")
            assert (said > 0) == (why is not None)
    assert compare_fleets(found, found).notes[0].startswith("days and energy of the baseline")


@pytest.mark.sweep
@as_it_is()
def test_a_fleet_beside_a_load_has_the_same_figures_or_is_not_judged(work):
    """Run alone, and beside as many busy processes as there are cores."""
    fleet = UNJUDGED.replace("[population.data]", DEVICE + "[population.data]")
    (work / "fleet.toml").write_text(fleet + "energy_per_device = '1 kJ'\n")
    found = []
    for load in (0, os.cpu_count() or 1):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            report = work / f"load-{load}.json"
            assert run(work, "--out", str(work / str(load)), "--report", f"json:{report}") == 0
        finally:
            for process in busy:
                process.kill()
                process.wait()
        found.append(load_fleet_result(report))
    judged = [result for result in found if result.disturbed is None]
    for result in found:
        if result.disturbed is not None:
            check = next(each for each in result.checks if each.metric == "energy_per_device")
            assert check.status == "not judged"
    if len(judged) == 2:
        energies = [result.energy_j.mean for result in judged if result.energy_j is not None]
        assert max(energies) <= 1.25 * min(energies)


def test_an_asynchronous_federation_is_reported_like_any_other(folder):
    fleet = fleet_of(
        population={"clients": 60, "lost": 0.2, "data": {"samples": [10, 60], "dirichlet": 0.5}},
        federation={
            "clients": 12, "buffer": 4, "most_staleness": 1, "rounds": 6, "deadline": "3 s",
        },
        traffic={"up": ["0.01 MB/s", "1 MB/s"]},
    )  # fmt: skip
    devices = [device("acme/fast"), device("acme/slow", step=200_000_000)]
    judged = judge_fleet(played(folder, fleet, devices), FleetBudgets())
    assert {"stale", "unfinished", "lost"} <= set(judged.ends())
    keep_what_is_not_lost(judged)
    assert sum(judged.staleness()) == judged.ends()["averaged"] == 24
    figures = {name: (value, remark) for name, value, remark in key_figures(judged)}
    late = judged.staleness()[1]
    assert figures["Staleness"] == (f"{late / 24:.1f}", "1 at most")
    page = Page(render_fleet_report(judged, "html").decode())
    assert "from a model that is too old" in page.text
    assert "after rounds of 4 answers" in page.text
    assert "4 answers each, of 12 clients at a time, at most 1 rounds old" in page.text


def test_fedprox_takes_steps_that_give_gradients(tmp_path, monkeypatch):
    """Its term changes them, and a step model keeps none: memory and times are of the others."""
    write_digits(tmp_path, step_model="always")
    uses: list[SessionUse] = []

    def plan(package: Package, shapes: object, use: SessionUse, **_: object) -> None:
        uses.append(use)
        raise OdtpackError("fleet-device", "Enough.")

    monkeypatch.setattr("odtpack_simulator.fleet.devices.plan_memory", plan)
    result = make_result(["google/pixel-8a"])
    package = SimpleNamespace(manifest_sha256=result.package.manifest_sha256)
    models = {"clients": 9, "device": [{"profile": "google/pixel-8a"}]}
    for weight, steps in ((0.0, True), (0.1, False)):
        fleet = fleet_of(population=models, training={"proximal": weight})
        federation = on_digits(tmp_path, fleet)
        with refused("fleet-device", "Enough"):
            measure_devices(federation.package, federation.data, fleet, 8)
        assert (uses[-1].step_model, uses[-1].switches) == (steps, not steps)
    with refused("fleet-times", "FedProx"):
        devices_of_result(package, result, fleet, 64)
    known = result.devices[0]
    memory = known.memory.model_copy(update={"loop": "train"})
    result.devices[:] = [known.model_copy(update={"memory": memory})]
    assert devices_of_result(package, result, fleet, 64)
