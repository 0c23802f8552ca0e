"""``odtpack judge`` and ``odtpack compare``: results judged and compared without measuring."""

import json
from pathlib import Path

import pytest

from odtpack_simulator.figures.compare import Comparison, compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets, suggest_budget
from odtpack_simulator.result import SimulationResult, load_result
from tests.cli.conftest import assert_refused, tree
from tests.simulator.factory import make_result

NAMES = ["google/pixel-8a", "raspberrypi/pi-5"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return stored(tmp_path / "base.json", make_result(NAMES))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return stored(tmp_path / "head.json", make_result(NAMES, scale=1.4))


def stored(path: Path, result: SimulationResult) -> Path:
    path.write_text(result.to_json())
    return path


@pytest.fixture
def budget(tmp_path: Path) -> Path:
    path = tmp_path / "budgets.toml"
    path.write_text('[budgets]\npeak_memory = "+5 %"\npackage_size = "10 MB"\n')
    return path


class TestJudge:
    def test_over_budget_against_a_baseline(self, run, base, head, budget, tmp_path):
        before = {path: path.read_bytes() for path in (base, head, budget)}
        html, report = tmp_path / "r.html", tmp_path / "r.json"
        options = "--budget", budget, "--baseline", base, "--json"
        reports = "--report", f"html:{html}", "--report", f"json:{report}"
        outcome = run("judge", head, *options, *reports, code=1)
        result = SimulationResult.model_validate_json(outcome.out)
        budgets = parse_budgets(budget.read_bytes(), str(budget))
        expected = judge(load_result(head), budgets, baseline=load_result(base))
        assert result == expected == load_result(report)
        assert html.read_bytes().startswith(b"<!doctype html>")
        assert "No budget was given" not in outcome.err
        assert {path: path.read_bytes() for path in before} == before

    def test_within_budget(self, run, base, budget):
        outcome = run("judge", base, "--budget", budget, "--baseline", base, code=0)
        assert "Both devices pass" in outcome.out
        assert outcome.err == ""

    def test_a_suggested_budget_fails_no_device(self, run, base, tmp_path):
        budget = tmp_path / "suggested.toml"
        budget.write_text(suggest_budget(load_result(base)))
        outcome = run("judge", base, "--budget", budget, code=0)
        assert "No device fails" in outcome.out
        assert "2 have a warning" in outcome.out

    @pytest.mark.parametrize(("limit", "remark"), [
        ('"+5 %"', ""), ('["900 MB", "+5 %"]', ""), ('"900 MB"', "--baseline is not used"),
    ])  # fmt: skip
    def test_a_baseline_that_no_limit_refers_to(self, run, base, budget, limit, remark):
        budget.write_text(f"[class.android]\npeak_memory = {limit}\n")
        outcome = run("judge", base, "--budget", budget, "--baseline", base, code=0)
        assert remark in outcome.err
        assert bool(remark) == bool(outcome.err)

    def test_without_a_baseline(self, run, base, budget):
        """Nothing fails, and nothing passes that was not judged."""
        outcome = run("judge", base, "--budget", budget, "--json", code=0)
        assert outcome.json()["verdict"] == "not judged"

    def test_strict(self, run, base, budget):
        """What was not judged fails a strict job; what passes without it passes with it."""
        assert run("judge", base, "--budget", budget, "--strict").code == 1
        assert run("judge", base, "--budget", budget, "--baseline", base, "--strict").code == 0

    def test_without_a_budget(self, run, base):
        outcome = run("judge", base, code=0)
        text = outcome.err.partition("No budget was given.")[2].partition("\n")[2]
        budgets = parse_budgets(text.encode())
        result = load_result(base)
        assert judge(result, budgets, baseline=result).verdict in ("pass", "warn")

    def test_a_failing_result_is_not_said_to_keep_a_budget(self, run, tmp_path):
        failing = make_result(["raspberrypi/zero-2-w"], scale=5)
        outcome = run("judge", stored(tmp_path / "failing.json", failing), code=1)
        assert "This result fails without any budget" in outcome.out
        assert "No budget was given" not in outcome.out
        assert "keep" not in outcome.out.partition("This result fails")[2].partition("\n")[0]

    def test_a_report_never_takes_the_place_of_the_result(self, run, base):
        """Only JSON, which is the result again."""
        before = base.read_bytes()
        outcome = run("judge", base, "--report", f"html:{base}")
        assert_refused(outcome, "cannot-write", "read by the same command")
        assert base.read_bytes() == before
        assert run("judge", base, "--report", f"json:{base}").code == 0
        assert load_result(base).verdict == "pass"

    @pytest.mark.parametrize("reports", [
        ("html:a", "json:./a"), ("json:-", "markdown:-"), ("json:-",),
    ], ids=["one file", "standard output", "with --json"])  # fmt: skip
    def test_two_reports_in_one_place(self, run, base, reports, monkeypatch):
        monkeypatch.chdir(base.parent)
        options = [each for report in reports for each in ("--report", report)]
        outcome = run("judge", base, *options, *(() if len(reports) > 1 else ("--json",)))
        assert_refused(outcome, "report-twice", f"--report {reports[-1]}")
        assert not (base.parent / "a").exists()

    def test_judging_again_gives_the_same(self, run, base, head, budget, tmp_path):
        outputs = []
        source = head
        for name in ("first.json", "second.json"):
            path = tmp_path / name
            options = "--budget", budget, "--baseline", base, "--report", f"json:{path}"
            assert run("judge", source, *options).code == 1
            outputs.append(path.read_bytes())
            source = path  # what was judged before does not matter
        assert outputs[0] == outputs[1]


class TestCompare:
    def test_text(self, run, base, head):
        outcome = run("compare", base, head, code=0)
        assert outcome.err == ""
        assert "Google Pixel 8a *, Raspberry Pi 5 (8 GB) *  Peak memory" in outcome.out
        assert "+34.3 %" in outcome.out

    def test_two_formats_are_refused(self, run, base, head):
        both = run("compare", base, head, "--json", "--format", "markdown")
        assert_refused(both, "option-not-used", "exclude each other")

    def test_json(self, run, base, head, budget):
        outcome = run("compare", base, head, "--budget", budget, "--format", "json", code=1)
        assert run("compare", base, head, "--budget", budget, "--json", code=1).out == outcome.out
        comparison = Comparison.model_validate_json(outcome.out)
        budgets = parse_budgets(budget.read_bytes(), str(budget))
        assert comparison == compare(load_result(base), load_result(head), budgets)

    def test_better_is_within_budget(self, run, base, head, budget):
        assert "Within budget" in run("compare", head, base, "--budget", budget, code=0).out

    @pytest.mark.parametrize("form", ["text", "markdown", "json"])
    def test_a_file_has_what_is_printed(self, run, base, head, tmp_path, form):
        out = tmp_path / "comparison"
        printed = run("compare", base, head, "--format", form)
        outcome = run("compare", base, head, "--format", form, "--out", out)
        assert outcome.code == printed.code == 0
        assert outcome.out == ""
        assert out.read_text() == printed.out
        again = tmp_path / "again"
        run("compare", base, head, "--format", form, "--out", again)
        assert again.read_bytes() == out.read_bytes()


def broken(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "broken.json"
    content = json.loads(make_result(NAMES).to_json())
    if kind == "version":
        content["schema_version"] = 1
    elif kind == "key":
        content["devices"][0]["memory"]["peek"] = 1
    elif kind == "twice":
        content["devices"].append(content["devices"][0])
    elif kind == "interval":
        content["devices"][0]["campaign"]["active_s"] = {"low": 2, "typical": 1, "high": 3}
    text = json.dumps(content)
    if kind == "cut":
        text = text[:1000]
    elif kind == "infinite":
        text = text.replace('"eval_loss_after": 0.1142', '"metric_after": 1e999', 1)
    elif kind == "empty":
        text = ""
    path.write_text(text)
    return path


class TestBadInput:
    @pytest.mark.parametrize(
        "kind", ["version", "key", "twice", "interval", "cut", "infinite", "empty"]
    )
    @pytest.mark.parametrize("place", ["judge", "baseline", "base", "head"])
    def test_a_broken_result(self, run, base, tmp_path, kind, place):
        path = broken(tmp_path, kind)
        arguments = {
            "judge": ("judge", path), "baseline": ("judge", base, "--baseline", path),
            "base": ("compare", path, base), "head": ("compare", base, path),
        }[place]  # fmt: skip
        before = tree(tmp_path)
        code = "result-version" if kind == "version" else "result-invalid"
        assert_refused(run(*arguments), code, str(path), "odtpack simulate")
        assert tree(tmp_path) == before

    def test_an_absent_result(self, run, base):
        assert_refused(run("judge", "no.json"), "result-missing", "no.json")
        assert_refused(run("compare", base, "no.json"), "result-missing", "no.json")

    @pytest.mark.parametrize("command", ["judge", "compare"])
    def test_a_wrong_budget(self, run, base, tmp_path, command):
        budget = tmp_path / "budgets.toml"
        results = (base,) if command == "judge" else (base, base)
        budget.write_text('[budgets]\npeak_memory = "-5 %"\n')
        outcome = run(command, *results, "--budget", budget)
        assert_refused(outcome, "budgets-invalid", "budgets.toml:2", "may grow: write +5 %")
        budget.write_text('[device."acme/one"]\nsessions = 3\n')
        outcome = run(command, *results, "--budget", budget)
        assert_refused(outcome, "budgets-unknown-device", "acme/one", "budgets.toml:1")

    def test_places_that_cannot_be_written(self, run, base, budget):
        before = tree(base.parent)
        for path in ("no/such/folder/c.md", base.parent):
            outcome = run("compare", base, base, "--out", path)
            assert_refused(outcome, "cannot-write", "--out", str(path))
        outcome = run("compare", base, base, "--out", base)
        assert_refused(outcome, "cannot-write", "--out", "it is read by the same command")
        outcome = run("judge", base, "--budget", budget, "--report", f"json:{budget}")
        assert_refused(outcome, "cannot-write", "--report", "it is read by the same command")
        outcome = run("judge", base, "--report", "pdf:x.pdf")
        assert_refused(outcome, "report-format-unknown", "html")
        assert tree(base.parent) == before

    def test_an_unknown_format(self, run, base):
        outcome = run("compare", base, base, "--format", "pdf")
        assert_refused(outcome, "usage", "--format", "markdown")
