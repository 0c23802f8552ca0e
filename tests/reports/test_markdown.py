"""Markdown read by an independent parser of CommonMark with tables."""

import re

import pytest
from markdown_it import MarkdownIt

from odtpack_simulator.figures.judge import judge
from odtpack_simulator.reports.markdown_report import render_markdown
from odtpack_simulator.result.result import SimulationResult
from tests.reports.demo import stored_result
from tests.reports.hostile import hostile_result
from tests.simulator.factory import make_result

PARSER = MarkdownIt("commonmark").enable("table")
COMMENT = 65_536


def page(result: SimulationResult) -> str:
    return str(PARSER.render(render_markdown(result).decode("utf-8")))


def text_of(html: str) -> str:
    return re.sub(r"<[^>]*>", " ", html)


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return stored_result()


def test_verdict_devices_and_fixes(result: SimulationResult) -> None:
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


def test_worst_devices_come_first(result: SimulationResult) -> None:
    text = render_markdown(result).decode()
    order = [text.index(f"| {device.title} ") for device in result.devices]
    verdicts = [
        d.verdict for _, d in sorted(zip(order, result.devices, strict=True), key=lambda x: x[0])
    ]
    ranks = [["fail", "warn", "not judged", "pass"].index(verdict) for verdict in verdicts]
    assert ranks == sorted(ranks)


def test_details_open_and_close(result: SimulationResult) -> None:
    text = render_markdown(result).decode()
    assert text.count("<details>") == text.count("</details>") >= 4
    assert "The whole training on each device" in text
    assert "bit for bit" in text


@pytest.mark.parametrize("copies", [40, 400])
def test_it_fits_into_a_comment_and_says_what_is_missing(
    result: SimulationResult, copies: int
) -> None:
    many = result.model_copy(update={"devices": result.devices * copies})
    data = render_markdown(many)
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


def test_hostile_names_stay_text() -> None:
    data = render_markdown(hostile_result())
    html = str(PARSER.render(data.decode("utf-8")))
    tags = set(re.findall(r"<([a-z0-9]+)", html))
    assert tags <= set(re.findall(r"<([a-z0-9]+)", page(stored_result())))
    assert "<a " not in html
    assert "<script" not in html
    text = text_of(html)
    # GitHub turns these into mentions, references and links even where Markdown does not.
    assert not re.search(r"@user|#1\b|https?://|www\.a", re.sub(r"<code>.*?</code>", "", html))
    assert "\x00" not in text
    assert "\u202e" not in text


def test_a_baseline_and_sparse_results() -> None:
    for sparse in (make_result([]), judge(make_result([])), make_result(["apple/iphone-12-mini"])):
        assert render_markdown(sparse).startswith(b"## ")
    assert render_markdown(stored_result()) == render_markdown(stored_result())
