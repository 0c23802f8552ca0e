"""``odtpack simulate`` and ``odtpack demo``: real replays, judged."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from odtpack.cli.device import demo as demo_module
from odtpack.cli.device.demo import _finish, budget_that_one_breaks, exit_words
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.reports.html_report import Again, render_html
from odtpack_simulator.result import SimulationResult, load_result
from odtpack_simulator.values.units import Interval, format_percent
from tests.cli.conftest import Outcome, Run, Shared, assert_refused, tree
from tests.simulator.changed import changed
from tests.simulator.factory import make_result


@pytest.fixture
def simulate(run: Run, shared: Shared) -> Run:
    def call(*more: object) -> Outcome:
        schedule = "--epochs", 2, "--batch-size", 8, "--lr", 0.02
        return run("simulate", shared.package, "--data", shared.data, *schedule, *more)

    return call


class TestSimulate:
    def test_over_budget(self, simulate, shared, tmp_path):
        """Exit code 1, the culprit on stderr, the whole result on stdout and in both reports."""
        before = tree(shared.package)
        budget = tmp_path / "budgets.toml"
        limits = 'peak_memory = "1 kB"\npackage_size = "1 MB"\nloop = "train"'
        budget.write_text(f"[budgets]\n{limits}\n")
        html, report = tmp_path / "r.html", tmp_path / "r.json"
        outcome = simulate(
            *("--device", "pixel-8a", "--device", "google/pixel-8a", "--device", "pi-5"),
            *("--budget", budget, "--report", f"html:{html}", "--report", f"json:{report}"),
            *("--session-options", "default", "--json"),
        )
        assert outcome.code == 1, outcome.err
        content = outcome.json()
        assert content == json.loads(report.read_text())
        policy = content["policy"]
        assert (policy["loop"], policy["session_options"]) == ("train", "default")
        assert "ONNX Runtime's default options" in " ".join(outcome.err.split())
        result = load_result(report)
        assert [device.name for device in result.devices] == ["google/pixel-8a", "raspberrypi/pi-5"]
        assert result.verdict == "fail"
        checks = {check.metric: check for check in result.devices[0].checks}
        assert checks["peak_memory"].status == "fail"
        assert checks["peak_memory"].budget_location == f"{budget}:2"
        assert checks["memory_limit"].status == "pass"
        sizes = [check.status for check in result.checks if check.metric == "package_size"]
        assert sizes == ["pass"]
        assert "Google Pixel 8a" in outcome.err
        assert "0 of 2 devices pass" in outcome.err
        assert "replay" not in outcome.out.partition("{")[0]
        assert html.read_bytes().startswith(b"<!doctype html>")
        assert "No budget was given" not in outcome.err
        assert tree(shared.package) == before

    def test_without_a_budget(self, simulate, run, shared, tmp_path):
        """Exit code 0, a budget to start from, and the losses that ``train`` has, step by step."""
        outcome = simulate("--device", "zero-2-w", "--seed", 7, "--json")
        assert outcome.code == 0, outcome.err
        result = SimulationResult.model_validate_json(outcome.out)
        text = outcome.err.partition("No budget was given.")[2].partition("\n")[2]
        budgets = parse_budgets(text.encode())
        assert {"package_size", "peak_memory", "final_loss"} <= set(budgets.overall())
        assert judge(result, budgets, baseline=result).verdict in ("pass", "warn")

        schedule = "--epochs", 2, "--batch-size", 8, "--lr", 0.02, "--seed", 7
        train = "train", shared.package, "--data", shared.data, "--out", tmp_path / "replayed.ckpt"
        trained = run(*train, *schedule, "--json").json()
        losses = np.array(result.training.losses, float).reshape(2, -1).mean(axis=1)
        expected = [epoch["loss"] for epoch in trained["epochs"]]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        ends = [result.training.eval_loss_before, result.training.eval_loss_after]
        expected = [trained["eval_loss_before"], trained["eval_loss_after"]]
        assert ends == pytest.approx(expected, rel=1e-5)

    def test_profiles_that_contradict_each_other(self, run, shared, tmp_path):
        source = Path(demo_module.__file__).parents[4] / "device_profiles/google/pixel-8a.toml"
        profile = tmp_path / "mine.toml"
        profile.write_text(source.read_text().replace("Google Pixel 8a", "My Pixel"))
        data = "simulate", shared.package, "--data", shared.data
        outcome = run(*data, "--device", "pixel-8a", "--device", profile)
        assert_refused(outcome, "device-twice", "google/pixel-8a", str(profile))


class TestDemo:
    def test_the_whole_way(self, run, tmp_path):
        pytest.importorskip("sklearn")
        outcome = run("demo", "--out", tmp_path / "demo", "--epochs", 2, "--json", code=0)
        content = outcome.json()
        # The factory model cannot name three of ten digits, and learns them.
        assert 0.5 < content["accuracy_before"] < 0.8
        assert content["accuracy_after"] > 0.9
        out = tmp_path / "demo"
        result = load_result(out / "report.json")
        # The replay holds out the same digits: its accuracy is that of the exported models.
        assert result.training.metric_before == pytest.approx(content["accuracy_before"], abs=1e-6)
        assert result.training.metric_after == pytest.approx(content["accuracy_after"], abs=0.006)
        assert content["held_out_samples"] == result.data.held_out_samples == 359
        for name, key in (("before", "accuracy_before"), ("after", "accuracy_after")):
            assert self.accuracy(out / f"inference-{name}.onnx", out) == pytest.approx(content[key])
        assert {device.os for device in result.devices} == {"android", "ios", "linux"}
        for device in result.devices:
            assert device.title in outcome.err.replace("\n", "")
            assert device.latency.step_ms is not None
            assert device.memory.outcome == "fits"
        last = outcome.err[outcome.err.index("accuracy  ") :]
        assert f"{format_percent(content['accuracy_before'])} before" in last
        assert f"{format_percent(content['accuracy_after'])} after" in last
        assert str(out / "report.html") in last
        assert (out / "report.html").is_file()

    @staticmethod
    def accuracy(model: Path, folder: Path) -> float:
        with np.load(folder / "digits.npz") as data:
            images, labels = data["input"], data["labels"]
        held_out = np.random.default_rng([0, 0]).permutation(1797)[1438:]
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        right = 0
        for index in held_out:
            (scores,) = session.run(None, {"input": images[index : index + 1]})
            right += int(np.argmax(scores[0]) == labels[index])
        return right / len(held_out)

    def test_without_its_extra(self, run, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        outcome = run("demo", "--out", tmp_path / "demo")
        assert_refused(outcome, "demo-extra-missing", "scikit-learn", "pip install scikit-learn")
        assert not (tmp_path / "demo").exists()

    def test_place_that_cannot_be_a_folder(self, run, tmp_path):
        pytest.importorskip("sklearn")
        (tmp_path / "demo").write_text("a file")
        assert_refused(run("demo", "--out", tmp_path / "demo"), "cannot-write", "demo")


# What ``odtpack demo`` tells to paste.


def test_the_command_to_go_on_can_be_pasted(capsys):
    out = Path("my demo's folder")
    _finish([0.5, 0.9], 100, [], out, 5, 1.0)
    lines = "".join(capsys.readouterr()).splitlines()
    words = shlex.split(next(line for line in lines if "odtpack simulate" in line))
    assert words[2] == str(out / "package")
    assert words[words.index("--data") + 1] == str(out / "digits.npz")
    assert words[words.index("--budget") + 1] == str(out / "budgets.toml")


@pytest.mark.parametrize(
    "others", [(1.0, 2.0, 3.0), (1.0, 20.0, 90.0), (0.0004, 0.0005, 0.0006), (200.0, 210.0, 220.0)]
)
def test_the_failing_budget_is_broken_by_one_device(others):
    names = ["samsung/galaxy-a12", "apple/iphone-16-pro", "raspberrypi/zero-2-w"]
    slow = tuple(40 * end for end in (others[1], others[1], others[2]))
    spans = [others, others, slow]
    result = make_result(names)
    devices = []
    for device, (low, typical, high) in zip(result.devices, spans, strict=True):
        step = Interval(low=low, typical=typical, high=high)
        memory = {"limit_bytes": 10**12, "measured_peak_bytes": 10**6, "outcome": "fits"}
        memory["warning_bytes"], done = None, {"outcome": "completed"}
        devices.append(changed(device, latency={"step_ms": step}, memory=memory, training=done))
    result = changed(result, devices=devices)
    judged = judge(result, parse_budgets(budget_that_one_breaks(result).encode()))
    assert [device.verdict for device in judged.devices] == ["pass", "pass", "fail"]
    assert "exit code 1" in exit_words(judged)
    assert "exit code 0" in exit_words(judge(result))
    page = render_html(judge(result), again=Again(judged, "step_latency", exit_words(judged)))
    text = page.decode()
    assert "3 devices pass" in text
    assert "2 of 3 devices pass" in text
    assert "exit code 1" in text


def test_without_two_step_times_there_is_no_failing_budget():
    assert budget_that_one_breaks(make_result(["google/pixel-8a"])) == ""
