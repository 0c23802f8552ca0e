import hashlib
import json
import re
import struct

import pytest

from odtpack_simulator.figures.judge import judge
from odtpack_simulator.reports import render_report, report_formats
from odtpack_simulator.reports.html_report import render_html
from odtpack_simulator.reports.simulation import TOPICS, unknown_rows
from odtpack_simulator.result import SimulationResult
from scripts.screenshots import DEVICES, IMAGES, PAGES, PICTURES, RECORD, ROOT, digests, take
from tests.reports.browser import CHROMIUM
from tests.reports.demo import STORED, demo_result, stored_result
from tests.reports.hostile import hostile_result
from tests.reports.page import Page
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result

SECTIONS = ["devices", "learning", "memory", "latency", "checks", "provenance"]
ALL_SECTIONS = [*SECTIONS[:4], "campaign", "interruptions", *SECTIONS[4:]]
WORDS = {"pass": "Pass", "warn": "Warning", "fail": "Fail", "not judged": "Not judged"}


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return stored_result()


@pytest.fixture(scope="module")
def html(result: SimulationResult) -> str:
    return render_html(result).decode("utf-8")


def section(html: str, name: str) -> str:
    start = html.index(f'<section id="{name}"')
    return html[start : html.index("</section>", start)]


def inside(html: str, name: str) -> Page:
    return Page(section(html, name) + "</section>")


def test_sections_and_headline(html, result):
    page = Page(html)
    ids = [name for name in page.ids() if not name.startswith(("icon-", "device-"))]
    assert ids == ["first", *ALL_SECTIONS]
    passed = sum(device.verdict == "pass" for device in result.devices)
    assert f"{passed} of {len(result.devices)} devices pass" in page.text
    assert "What to change first" in page.text
    for device in result.devices:
        assert device.title in page.text
        for figure in device.figures:
            assert figure.source in page.text


MARKED = ("first", "devices", "learning", "memory", "latency", "campaign")


@pytest.mark.parametrize(("name", "words"), [
    *((name, "not validated on hardware") for name in MARKED), ("memory", "Training step"),
    ("memory", "measured 338 MB (-2.1 %)"), ("memory", "Checkpoint saved"),
    ("memory", "not measured"), ("memory", "limit of Raspberry Pi Zero 2 W, 336 MB"),
    ("memory", "The other limits are above the drawing"), ("latency", "compute-bound"),
    ("latency", "memory-bound"), ("latency", "7.7 FLOP/B"),
    ("latency", "119 GFLOP/s"),  # 1.62e9 FLOP in 0.331 x 41.3 ms
])  # fmt: skip
def test_what_sections_say(html, name, words):
    assert words in inside(html, name).text


def test_validated_profiles_are_not_marked():
    result = stored_result(["google/pixel-8a"])
    text = Page(render_html(on_devices(result, validated=True)).decode()).text
    assert "not validated on hardware" not in text
    assert "validated on hardware" in text


def test_the_matrix_says_every_verdict_in_words(html, result):
    rows = re.findall(r"<tr>(.*?)</tr>", section(html, "devices"), re.S)[1:]
    assert len(rows) == len(result.devices)
    for device, row in zip(result.devices, rows, strict=True):
        assert device.title in row.replace("\N{NO-BREAK SPACE}", " ")
        verdict = re.search(r'class="whole">.*?</svg> (.*?)</span>', row, re.S)
        assert verdict[1] == WORDS[device.verdict]
        cells = re.findall(r"<td data-label=.*?</td>", row, re.S)
        assert len(cells) == len(TOPICS)
        for cell in cells:
            if "<svg" in cell:  # a symbol never stands without its word
                assert re.search(r'class="sr">(.*?): </span>', cell)[1] in WORDS.values()


def test_curves_of_a_few_devices_can_be_switched_without_scripts(html):
    page = inside(html, "learning")
    radios = [a for tag, a in page.tags if tag == "input"]
    assert [radio["type"] for radio in radios] == ["radio"] * 5
    labels = [a["for"] for tag, a in page.tags if tag == "label"]
    assert labels == [radio["id"] for radio in radios]
    assert sum("checked" in radio for radio in radios) == 1
    charts = [a["aria-label"] for tag, a in page.tags if tag == "svg" and "aria-label" in a]
    for against in ("time", "energy", "number of sessions"):
        assert sum(f"against {against} on" in label for label in charts) == 2 * 5
    assert "95 % interval 95.2 % to 97.6 %" in page.text
    for radio in radios:  # each has its rule
        assert f"#{radio['id']}:checked" in html


def test_reasons_of_what_is_not_judged(html):
    rows = unknown_rows(stored_result())
    assert {row.outcome for row in rows} == {"not judged"}
    found = {(row.figures, row.reason) for row in rows}
    assert ("battery, battery per session", "the device has no battery") in found
    page = inside(html, "campaign")
    assert [a for tag, a in page.tags if tag == "table" and a.get("class") == "cards dense"]
    for row in rows:
        assert row.figures in page.text
        assert row.reason in page.text


def test_interruptions_are_told_and_drawn(html, result):
    part = section(html, "interruptions")
    assert part.count('class="event"') == len(result.interruption.interruptions)
    assert "bit for bit" in part
    other = render_html(changed(result, interruption={"equal": False, "detail": ""})).decode()
    assert "did not end with the same weights" in section(other, "interruptions")


def test_drawings_have_words_and_tables_have_headers(html):
    page = Page(html)
    for drawing in page.drawings:
        hidden = drawing.get("aria-hidden") == "true"
        named = drawing.get("role") == "img" and bool(drawing.get("aria-label"))
        assert hidden != named, drawing
    heads = [attributes for tag, attributes in page.tags if tag == "th"]
    assert heads
    assert all(head.get("scope") in {"col", "row"} for head in heads)
    plots = [a for tag, a in page.tags if tag == "svg" and "plot" in a.get("class", "")]
    assert len(plots) > 20
    assert all(a["role"] == "img" and len(a["aria-label"]) > 10 for a in plots)


def test_fifty_devices():
    result = stored_result()
    page = Page(render_html(changed(result, devices=result.devices * 9)).decode())
    assert page.text.count("Raspberry Pi Zero 2 W") >= 5
    assert "5 of 54" in page.text


def test_page_is_one_file_that_loads_nothing(html):
    page = Page(html)
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in page.tags
    }
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
            if name in attributes:
                assert attributes[name].startswith("#") or attributes[name] == "data:,", tag
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?://|url\(|@import", html)
    assert "default-src 'none'" in html


def test_links_lead_somewhere(html):
    page = Page(html)
    ids = page.ids()
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids


def test_same_result_gives_the_same_bytes():
    assert render_html(stored_result()) == render_html(stored_result())


def test_hostile_names_stay_text(html):
    page = Page(render_html(hostile_result()).decode("utf-8"))
    plain = Page(html)
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert page.text.count("<script>alert(1)</script>") > 20
    assert "49" not in re.findall(r"\{\{7\*7\}\}|49\x00", page.text)


@pytest.mark.parametrize("result", [
    make_result([]), judge(make_result([])), make_result(["web/phone"]),
    judge(make_result(["google/pixel-8a"])),
], ids=["no devices", "no devices, judged", "not judged", "no budgets"])  # fmt: skip
def test_sparse_results(result):
    page = Page(render_html(result).decode("utf-8"))
    assert set(SECTIONS) <= set(page.ids())


def test_empty_measurements():
    result = changed(
        make_result(["web/phone"]),
        training=dict.fromkeys(("eval_loss_before", "eval_loss_after", "metric_after"))
        | {"losses": []},
        latency_host={"steps_ms": [0.0], "by_operator": []},
        memory={"timeline": [], "tensors_at_peak": [], "measured_peak_bytes": None},
    )
    page = Page(render_html(judge(result)).decode("utf-8"))
    assert "predicted, not measured" in page.text
    assert "Not judged: neither the host's steps" in page.text


def test_diverged_training_is_said():
    training = {"losses": [2.0, None], "eval_loss_after": None}
    result = changed(make_result(["google/pixel-8a"]), training=training)
    assert "not finite" in Page(render_html(judge(result)).decode()).text


def test_budget_to_paste_appears_only_without_budgets(html):
    assert "No budgets were given" not in html
    text = Page(render_html(judge(make_result(["google/pixel-8a"]))).decode("utf-8")).text
    assert "No budgets were given" in text
    assert 'step_latency = "' in text


# The pictures in the documentation show the page that the code draws.

AGAIN = "run: python -m scripts.screenshots"


def size(png: bytes) -> tuple[int, int]:
    """Width and height in the header of a PNG."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def expected(name: str) -> tuple[int, int]:
    picture = PICTURES[name]
    return round(picture.width * picture.scale), round(picture.height * picture.scale)


def test_the_committed_pictures_are_current():
    record = json.loads(RECORD.read_text())
    assert record["pages"] == digests(), AGAIN
    assert set(record["pictures"]) == set(PICTURES)
    for name, digest in record["pictures"].items():
        data = (IMAGES / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, AGAIN
        assert size(data) == expected(name)
        assert len(data) < 600_000


def test_every_picture_is_shown_and_described():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in pages)
    for name in PICTURES:
        assert f"images/{name}" in text, name
    assert {path.name for path in IMAGES.glob("*.png")} == set(PICTURES)


def test_the_stored_result_shows_everything():
    """A picture of a page that lacks a section would be of little use."""
    html = PAGES["made-up"]().decode()
    for name in ("first", "devices", "learning", "memory", "latency", "campaign", "interruptions"):
        assert f'<section id="{name}"' in html
    assert STORED.stat().st_size < 200_000


def test_the_stored_result_can_be_made_again():
    """What profiles and the judge say today may differ; devices, and that it is drawn, may not."""
    result = demo_result(DEVICES)
    assert [device.name for device in result.devices] == DEVICES
    assert [device.name for device in stored_result().devices] == DEVICES
    for name in report_formats():
        assert len(render_report(result, name)) > 1000


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pictures_can_be_taken(tmp_path):
    for name, path in take(tmp_path).items():
        data = path.read_bytes()
        assert size(data) == expected(name)
        assert len(data) > 20_000  # an empty page compresses to less
