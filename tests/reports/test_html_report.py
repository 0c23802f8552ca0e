import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from odtpack_runtime.reports.html_report import render_html
from odtpack_runtime.simulator.budgets import judge, parse_budgets
from odtpack_runtime.simulator.result import SimulationResult
from tests.simulator.factory import make_result

BUDGETS = b"""
[budgets]
package_size = "6 MB"
peak_memory = "500 MB"
step_latency = { limit = "100 ms", level = "warn" }
time_to_finish = "1 min"
[class.linux]
step_latency = "100 ms"
"""
SECTIONS = ["devices", "loss", "memory", "latency", "checks", "provenance"]
WIDTHS = [320, 390, 768, 920, 1280]
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, attributes, ids and text of a page; checks that tags nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.open: list[str] = []
        self.hidden = 0
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data.replace("\N{NO-BREAK SPACE}", " ")

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]


def mixed() -> SimulationResult:
    return judge(make_result(scale=2.0), parse_budgets(BUDGETS))


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(mixed()).decode("utf-8")


def test_sections_and_headline(html: str) -> None:
    page = Page(html)
    assert [name for name in page.ids() if not name.startswith("icon-")] == ["first", *SECTIONS]
    result = mixed()
    passed = sum(device.verdict == "pass" for device in result.devices)
    assert f"{passed} of {len(result.devices)} devices pass" in page.text
    assert "What to change first" in page.text
    for device in result.devices:
        assert device.title in page.text
        for figure in device.figures:
            assert figure.source in page.text
    assert page.text.count("not validated on hardware") >= 2 * len(result.devices)


def test_every_verdict_is_told_in_words(html: str) -> None:
    words = {"pass": "Pass", "warn": "Warning", "fail": "Fail", "not judged": "Not judged"}
    text = Page(html).text
    table = text[text.index("Whole training") : text.index("Loss", text.index("Whole training"))]
    for device in mixed().devices:
        after = table[table.index(device.title) + len(device.title) :]
        found = re.search("Pass|Warning|Fail|Not judged", after)
        assert found is not None
        assert found[0] == words[device.verdict], device.name


def test_page_is_one_file_that_loads_nothing(html: str) -> None:
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


def test_links_lead_somewhere(html: str) -> None:
    page = Page(html)
    ids = page.ids()
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids


def test_same_result_gives_the_same_bytes() -> None:
    assert render_html(mixed()) == render_html(mixed())


HOSTILE = (
    "</style></title>\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}\x00\u202e"
)


def hostile_result() -> SimulationResult:
    result = mixed()
    device = result.devices[0]
    check = device.checks[0]
    fails = {"status": "fail", "metric": HOSTILE, "message": HOSTILE, "advice": HOSTILE}
    known = {"metric": "memory_limit", "budget_location": HOSTILE}
    checks = [
        check.model_copy(update=fails),
        check.model_copy(update=fails | known),
    ]
    latency = device.latency.model_copy(update={"basis": HOSTILE, "not_judged": HOSTILE})
    figures = [
        figure.model_copy(update={"source": HOSTILE, "key": HOSTILE}) for figure in device.figures
    ]
    changed = device.model_copy(
        update={
            "title": HOSTILE,
            "name": HOSTILE,
            "checks": checks,
            "latency": latency,
            "figures": figures,
        }
    )
    memory = result.memory.model_copy(
        update={
            "timeline": [
                point.model_copy(update={"node": HOSTILE, "op_type": HOSTILE})
                for point in result.memory.timeline
            ],
            "tensors_at_peak": [
                tensor.model_copy(update={"name": HOSTILE})
                for tensor in result.memory.tensors_at_peak
            ],
        }
    )
    host = result.latency_host.model_copy(
        update={
            "by_operator": [
                cost.model_copy(update={"op_type": HOSTILE})
                for cost in result.latency_host.by_operator
            ]
        }
    )
    package = dict.fromkeys(("path", "loss", "optimizer"), HOSTILE)
    machine = dict.fromkeys(("cpu", "os", "python", "onnxruntime"), HOSTILE)
    return result.model_copy(
        update={
            "devices": [changed, *result.devices[1:]],
            "memory": memory,
            "latency_host": host,
            "package": result.package.model_copy(update=package),
            "host": result.host.model_copy(update=machine),
            "training": result.training.model_copy(update={"metric_name": HOSTILE}),
            "tool_version": HOSTILE,
        }
    )


def test_hostile_names_stay_text(html: str) -> None:
    page = Page(render_html(hostile_result()).decode("utf-8"))
    plain = Page(html)
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert page.text.count("<script>alert(1)</script>") > 20
    assert "49" not in re.findall(r"\{\{7\*7\}\}|49\x00", page.text)


@pytest.mark.parametrize(
    "result",
    [
        make_result([]),
        judge(make_result([])),
        make_result(["web/phone"]),
        judge(make_result(["google/pixel-8a"])),
    ],
    ids=["no devices", "no devices, judged", "not judged", "no budgets"],
)
def test_sparse_results(result: SimulationResult) -> None:
    page = Page(render_html(result).decode("utf-8"))
    assert set(SECTIONS) <= set(page.ids())


def test_empty_measurements() -> None:
    result = make_result(["web/phone"])
    training = result.training.model_copy(
        update={
            "losses": [],
            "eval_loss_before": None,
            "eval_loss_after": None,
            "metric_after": None,
        }
    )
    host = result.latency_host.model_copy(
        update={"steps_ms": [], "by_operator": [], "first_step_ms": None}
    )
    memory = result.memory.model_copy(
        update={"timeline": [], "tensors_at_peak": [], "measured_peak_bytes": None}
    )
    changes = {"training": training, "latency_host": host, "memory": memory}
    page = Page(render_html(judge(result.model_copy(update=changes))).decode("utf-8"))
    assert "predicted, not measured" in page.text
    assert "Not judged: neither the host's steps" in page.text


def test_diverged_training_is_said() -> None:
    result = make_result(["google/pixel-8a"])
    training = result.training.model_copy(update={"losses": [2.0, None], "eval_loss_after": None})
    text = Page(render_html(judge(result.model_copy(update={"training": training}))).decode()).text
    assert "not finite" in text


def test_budget_to_paste_appears_only_without_budgets(html: str) -> None:
    assert "No budgets were given" not in html
    text = Page(render_html(judge(make_result(["google/pixel-8a"]))).decode("utf-8")).text
    assert "No budgets were given" in text
    assert 'step_latency = "' in text


# --- in a real browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
in_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


def dump(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Open a file in headless Chromium without network; its final DOM and console messages."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"),
        f"--user-data-dir={profile}",
        *("--virtual-time-budget=3000", "--dump-dom", *flags),
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


class TestBrowser:
    pytestmark = in_browser

    def test_opens_offline_without_a_word_on_the_console(self, html: str, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        path.write_text(html, "utf-8")
        dom, console = dump(path, tmp_path / "profile")
        assert console == []
        assert set(SECTIONS) <= set(Page(dom).ids())
        assert len(re.findall("<path", dom)) == len(re.findall("<path", html))

    def test_console_messages_would_be_seen(self, html: str, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        path.write_text(
            html.replace("</main>", "<img src='https://a.example/b.png'></main>"), "utf-8"
        )
        _, console = dump(path, tmp_path / "profile")
        assert any("Content Security Policy" in line for line in console)

    @pytest.mark.parametrize("result", [mixed, hostile_result], ids=["mixed", "hostile"])
    def test_fits_phone_and_desk_without_sideways_scrolling(
        self, result: object, tmp_path: Path
    ) -> None:
        page = render_html(result()).replace(b"<details>", b"<details open>")  # type: ignore[operator]
        (tmp_path / "report.html").write_bytes(page)
        frames = "".join(
            f'<iframe src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
            for width in WIDTHS
        )
        script = """
          onload = () => { document.title = [...document.querySelectorAll('iframe')].map((f) =>
            f.contentDocument.documentElement.scrollWidth + '/' + f.clientWidth).join(' '); };
        """
        outer = tmp_path / "outer.html"
        outer.write_text(f"<title></title>{frames}<script>{script}</script>", "utf-8")
        dom, _ = dump(outer, tmp_path / "profile", "--allow-file-access-from-files")
        title = re.findall("<title>(.*?)</title>", dom)[0]
        sizes = [tuple(map(int, pair.split("/"))) for pair in title.split(" ")]
        assert [width for _, width in sizes] == WIDTHS
        assert all(content <= width for content, width in sizes), title
