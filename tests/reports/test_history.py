"""Many results: one page of trends, verdicts of all at once, and a badge."""

import json
import re
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from odtpack_simulator.figures.compare import compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.reports.badge import badge_text, render_badge
from odtpack_simulator.reports.history import render_history
from odtpack_simulator.reports.markdown_report import render_markdown
from odtpack_simulator.reports.simulation_page import latency_section
from odtpack_simulator.result import Origin, SimulationResult, load_result
from tests.cli.conftest import assert_refused, run
from tests.reports.demo import stored_result
from tests.reports.hostile import hostile_result
from tests.simulator.changed import changed
from tests.simulator.factory import make_result

__all__ = ["run"]

NAMES = ["google/pixel-8a", "raspberrypi/pi-5"]
BUDGETS = '[budgets]\npeak_memory = "250 MB"\naccuracy_floor = 0.5\n'


def made(scale: float, day: int, budgets: str = BUDGETS) -> SimulationResult:
    result = make_result(NAMES, scale=scale)
    origin = Origin(commit=f"{day:07x}", date=f"2026-11-{day:02}T08:00:00+00:00")
    return judge(result.model_copy(update={"origin": origin}), parse_budgets(budgets.encode()))


def peak(result: SimulationResult) -> float:
    (check, *_) = [c for _, c in result.all_checks() if c.metric == "peak_memory"]
    assert check.actual is not None
    return check.actual


def test_trends_stand_in_the_order_of_their_dates():
    first, last = made(1.0, 3), made(1.2, 9)
    page = render_history([last, first]).decode().replace("\N{NO-BREAK SPACE}", " ")
    assert page == render_history([first, last]).decode().replace("\N{NO-BREAK SPACE}", " ")
    assert page.index("2026-11-03 08:00") < page.index("2026-11-09 08:00")
    change = 100 * (peak(last) / peak(first) - 1)
    assert f"+{change:.1f} % in all" in page
    assert f"{100 * (1 - peak(last) / 250e6):.1f} % left" in page
    for device in first.devices:
        assert device.title in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_of_several_limits_the_one_that_fails_is_shown():
    both = '[budgets]\nstep_latency = ["1 h", "1 us"]\n'
    result = made(1.0, 3, both)
    page = render_history([result]).decode().replace("\N{NO-BREAK SPACE}", " ")
    assert "at most 1 µs" in page
    assert "at most 1 h" not in page
    rows = latency_section(result)["rows"]
    assert [row.state for row in rows] == ["fail", "fail", ""]


def test_a_result_says_what_its_verdict_is_of():
    """Also where no limit is drawn."""
    few = "[budgets]\naccuracy_floor = 0.96"
    assert ">Small data</span></td>" in render_history([made(1.0, 3, few)]).decode()


def test_dates_are_compared_in_utc_and_what_is_none_comes_first():
    dates = {  # commit -> date, in the order in which they are to stand
        "a000000": "in spring", "b000000": None, "c000000": "0001-01-01T00:00+23:00",
        "d000000": "2026-11-03T07:00:00+02:00", "e000000": "2026-11-03T05:30Z",
        "f000000": "2026-11-03T05:30:59", "1000000": "2026-11-03T05:30:01+00:00",
        "2000000": "2026-11-02T23:00:00-08:00",
    }  # fmt: skip
    results = [
        changed(made(1.0, 1), origin={"commit": commit, "date": date})
        for commit, date in dates.items()
    ]
    page = render_history([*results[5::-1], *results[6:]]).decode()
    stand = sorted(dates, key=page.index)
    assert stand == ["c000000", "b000000", "a000000", "d000000", "f000000", "e000000",
                     "1000000", "2000000"]  # fmt: skip
    assert page.count("not a date") == 2
    assert "2026-11-03 05:00" in page
    assert "2026-11-03 07:00" in page  # that of the evening before in the west


@pytest.mark.parametrize(("budgets", "text"), [
    (BUDGETS, "peak memory {left} left"),
    ('[budgets]\npeak_memory = "50 MB"', "peak memory over by {over}"),
    ('[budgets]\npackage_size = "0 B"\npeak_memory = "250 MB"', "package size over"),
    ("", "pass"),
    ('[budgets]\nenergy = "1 kJ"', "1 not judged"),
    ("[budgets]\naccuracy_floor = 0.96", "accuracy floor 0.61 % above"),  # on too few samples
])  # fmt: skip
def test_a_badge_names_the_tightest_budget(budgets, text):
    result = made(1.0, 1, budgets)
    share = (
        {
            "left": f"{100 * (1 - peak(result) / 250e6):.1f} %",
            "over": f"{100 * (peak(result) / 50e6 - 1):.1f} %",
        } if "peak" in text else {}
    )  # fmt: skip
    found = badge_text(result)
    assert found.startswith(text.format(**share)) or text in found
    assert json.loads(render_badge(result, "json"))["message"] == found
    drawn = ElementTree.fromstring(render_badge(result, "svg"))  # noqa: S314 - our own
    assert drawn.attrib["aria-label"] == f"odtpack: {found}"


def test_several_results_are_judged_at_once(run, tmp_path):
    (tmp_path / "budgets.toml").write_text(BUDGETS)
    paths = [tmp_path / f"{name}.json" for name in ("good", "bad")]
    for path, scale in zip(paths, (1.0, 5.0), strict=True):
        path.write_text(made(scale, 1, "").to_json())
    words = ["--budget", tmp_path / "budgets.toml", "--json"]
    out = ["--report", f"html:{tmp_path}/{{name}}.html", "--badge", tmp_path / "{name}.svg"]
    out += ["--badge", tmp_path / "{name}.badge.json"]
    outcome = run("judge", *paths, *words, *out, code=1)
    assert [each["verdict"] == "fail" for each in outcome.json()] == [False, True]
    written = {path.name for path in tmp_path.iterdir()}
    ends = ("html", "svg", "badge.json")
    assert {f"{name}.{end}" for name in ("good", "bad") for end in ends} <= written
    assert run("judge", paths[0], *words).json() == outcome.json()[0]
    assert_refused(run("judge", *paths, "--report", f"html:{tmp_path}/one.html"), "report-twice")
    assert_refused(run("judge", *paths, "--badge", tmp_path / "one.svg"), "report-twice", "{name}")
    assert_refused(run("judge", *paths, "--badge", tmp_path / "one.png"), "usage", "--badge")
    page = tmp_path / "history.html"
    run("history", *paths, "--budget", tmp_path / "budgets.toml", "--out", page, code=0)
    assert "2 results, the last one: fail" in page.read_text()
    assert_refused(run("history", *paths, "--out", paths[0]), "cannot-write")


def test_a_device_of_ones_own_may_be_new(run, tmp_path):
    """Budgets name it, and results from before it do not have it."""
    budget, page = tmp_path / "budgets.toml", tmp_path / "history.html"
    budget.write_text(f'{BUDGETS}[device."acme/one"]\nstep_latency = "1 us"\n')
    paths = [tmp_path / f"{name}.json" for name in ("old", "new")]
    old = made(1.0, 1)
    own = changed(old.devices[0], name="acme/one", title="Acme One")
    new = changed(made(1.0, 2), devices=[*old.devices, own])
    for path, result in zip(paths, (old, new), strict=True):
        path.write_text(result.to_json())
    words = "--budget", budget
    assert [each["verdict"] for each in run("judge", *paths, *words, "--json", code=1).json()] == [
        "pass", "fail"
    ]  # fmt: skip
    run("history", *paths, *words, "--out", page, code=0)
    assert "Acme One" in page.read_text()
    for pair in (paths, paths[::-1]):
        run("compare", *pair, *words)
        assert compare(*map(load_result, pair), parse_budgets(budget.read_bytes())).devices
    assert_refused(run("judge", paths[0], *words), "budgets-unknown-device")


def test_history_leaves_results_of_other_versions_out(run, tmp_path):
    old, new, page = (tmp_path / name for name in ("old.json", "new.json", "history.html"))
    text = made(1.0, 1).to_json()
    new.write_text(text)
    old.write_text(text.replace('"schema_version": 4', '"schema_version": 3'))
    outcome = run("history", old, new, "--out", page, code=0)
    assert f"warning: {old} is left out" in outcome.err
    assert "1 result, the last one" in page.read_text()
    assert_refused(run("history", old, "--out", page), "result-version", str(old))


# Markdown read by an independent parser of CommonMark with tables.

PARSER = MarkdownIt("commonmark").enable("table")
COMMENT = 65_536


def page(result: SimulationResult) -> str:
    return str(PARSER.render(render_markdown(result).decode("utf-8")))


def text_of(html: str) -> str:
    return re.sub(r"<[^>]*>", " ", html)


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return stored_result()


def test_verdict_devices_and_fixes(result):
    html = page(result)
    text = text_of(html)
    assert "2 of 6 devices pass" in text
    assert text.index("What to change first") < text.index("Devices")
    table = html[html.index("<table>") : html.index("</table>")]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)[1:]
    assert len(rows) == len(result.devices)
    words = {"pass": "Pass", "warn": "Warning", "fail": "Fail", "not judged": "Not judged"}
    found = {re.findall(r"<td.*?>(.*?)</td>", row, re.S)[0]: row for row in rows}
    for device in result.devices:
        row = found[f"{device.title} *"]  # the mark of a profile that is not validated
        assert words[device.verdict] in row
    assert "not validated on hardware" in text


def test_worst_devices_come_first(result):
    text = render_markdown(result).decode()
    order = [text.index(f"| {device.title} ") for device in result.devices]
    verdicts = [
        d.verdict for _, d in sorted(zip(order, result.devices, strict=True), key=lambda x: x[0])
    ]
    ranks = [["fail", "warn", "not judged", "pass"].index(verdict) for verdict in verdicts]
    assert ranks == sorted(ranks)


def test_details_open_and_close(result):
    text = render_markdown(result).decode()
    assert text.count("<details>") == text.count("</details>") >= 4
    assert "The whole training on each device" in text
    assert "bit for bit" in text


@pytest.mark.parametrize("copies", [40, 400])
def test_it_fits_into_a_comment_and_says_what_is_missing(result, copies):
    data = render_markdown(result.model_copy(update={"devices": result.devices * copies}))
    assert len(data) < COMMENT
    text = data.decode()
    left = sum(int(n) for n in re.findall(r"_(\d+) more devices left out", text))
    shown = sum(text.count(f"| {device.title} \\*") for device in result.devices)
    assert left + shown == 6 * copies
    assert left > 0 or copies == 40
    assert "left out" in text
    assert text.count("<details>") == text.count("</details>")
    # What is cut are passing devices, not failing ones, as long as those fit.
    if copies == 40:
        assert text.count("| ❌ Fail |") >= 2 * copies


def test_hostile_names_stay_text():
    html = str(PARSER.render(render_markdown(hostile_result()).decode("utf-8")))
    tags = set(re.findall(r"<([a-z0-9]+)", html))
    assert tags <= set(re.findall(r"<([a-z0-9]+)", page(stored_result())))
    assert "<a " not in html
    assert "<script" not in html
    text = text_of(html)
    # GitHub turns these into mentions, references and links even where Markdown does not.
    assert not re.search(r"@user|#1\b|https?://|www\.a", re.sub(r"<code>.*?</code>", "", html))
    assert "\x00" not in text
    assert "\u202e" not in text


def test_a_baseline_and_sparse_results():
    for sparse in (make_result([]), judge(make_result([])), make_result(["apple/iphone-12-mini"])):
        assert render_markdown(sparse).startswith(b"## ")
    assert render_markdown(stored_result()) == render_markdown(stored_result())
