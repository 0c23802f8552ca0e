"""The report in a real browser: nothing loads, overflows or is too faint, on desk and phone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from odtpack_simulator.figures.compare import compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.reports.comparison import render_comparison
from odtpack_simulator.reports.history import render_history
from odtpack_simulator.reports.html_report import render_html
from odtpack_simulator.result import SimulationResult
from tests.reports.browser import CHROMIUM, Browser
from tests.reports.demo import stored_result
from tests.reports.hostile import hostile_result
from tests.simulator.changed import changed
from tests.simulator.factory import make_result

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
WIDTHS = [320, 360, 390, 600, 768, 920, 1040, 1121, 1280]
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3, for text
LEAST_GRAPHIC_CONTRAST = 3.0  # 1.4.11, for what one must see to understand a drawing

# Relative luminance and contrast as WCAG defines them.
CONTRAST = """
const rgb = (text) => { const v = text.match(/[\\d.]+/g).map(Number);
  return text.startsWith('color(') ? v.slice(0, 3).map((x) => 255 * x) : v.slice(0, 3); };
const linear = (c) => (c /= 255, c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const luminance = (c) => [0.2126, 0.7152, 0.0722].reduce((s, w, i) => s + w * linear(c[i]), 0);
const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05); };
const behind = (e) => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor;
  if (c !== 'rgba(0, 0, 0, 0)' && c !== 'transparent') return rgb(c); }
  return [255, 255, 255]; };
"""
FAINT_TEXT = f"""(() => {{ {CONTRAST}
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {{
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    const svg = e.closest('svg');
    const disc = e.classList.contains('badge-text');
    const ink = rgb(svg ? style.fill : style.color);
    const ground = disc ? rgb(getComputedStyle(e.previousElementSibling).fill) : behind(e);
    const value = contrast(ink, ground);
    found.push([value, walker.currentNode.data.trim().slice(0, 40)]);
  }}
  return found.sort((a, b) => a[0] - b[0]); }})()"""
FAINT_MARKS = f"""(() => {{ {CONTRAST}
  const paint = {{'.bar': 'fill', '.bar.memory': 'fill', '.bar.other': 'fill', '.bar.over': 'fill',
    '.series': 'stroke', '.series.second': 'stroke', '.limit': 'stroke', '.tick-mark': 'stroke',
    '.warning-mark': 'stroke', '.whisker': 'stroke', '.dot': 'stroke', '.diamond': 'stroke',
    '.ring': 'stroke', '.event': 'stroke', '.icon': 'stroke'}};
  return Object.entries(paint).map(([selector, kind]) => {{
    const e = [...document.querySelectorAll(selector)].find((x) => x.getClientRects().length);
    return [selector, e ? contrast(rgb(getComputedStyle(e)[kind]), behind(e)) : 0]; }}); }})()"""
# Elements whose content sticks out of them, or out of the page.
STICKS_OUT = """(() => {
  const width = document.documentElement.clientWidth;
  const found = [];
  for (const e of document.querySelectorAll(
      'td, th, dd, dt, li, p, figure, section, .label, .figure, .panel, h1, h2, h3')) {
    if (!e.getClientRects().length || e.closest('.sr') || e.closest('thead')) continue;
    const box = e.getBoundingClientRect();
    if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline'
        || box.right > width + 0.5)
      found.push(e.tagName + '.' + e.className + ' ' + e.textContent.trim().slice(0, 40));
  }
  return found; })()"""
# Labels of a drawing that cover each other; badges are numbered and stand in the table as well.
OVERLAPS = """(() => {
  const found = [];
  for (const plot of document.querySelectorAll('svg.plot, svg.axis-row')) {
    const texts = [...plot.querySelectorAll('text:not(.badge-text)')]
      .map((e) => [e.getBoundingClientRect(), e.textContent]).filter(([b]) => b.width);
    texts.forEach(([a, x], i) => texts.slice(i + 1).forEach(([b, y]) => {
      if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
        found.push(x + ' / ' + y); }));
  }
  return found; })()"""
OPEN_ALL = "document.querySelectorAll('details').forEach((e) => { e.open = true; })"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def write(folder: Path, result: SimulationResult) -> Path:
    path = folder / "report.html"
    path.write_bytes(render_html(result))
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page"), stored_result())


def fifty() -> SimulationResult:
    result = stored_result()
    return result.model_copy(update={"devices": result.devices * 9})


def test_it_opens_without_a_word_on_the_console(browser, page):
    browser.console.clear()
    browser.open(page)
    assert browser.evaluate("document.querySelectorAll('svg.plot').length") > 20
    assert browser.console == []


def test_console_messages_would_be_seen(browser, page, tmp_path):
    text = page.read_text("utf-8")
    bad = tmp_path / "bad.html"
    bad.write_text(text.replace("</main>", "<img src='https://a.example/b.png'></main>"), "utf-8")
    browser.console.clear()
    browser.open(bad)
    assert any("Content Security Policy" in line for line in browser.console)


@pytest.mark.parametrize(
    ("result", "widths"),
    [(stored_result, WIDTHS), (hostile_result, WIDTHS), (fifty, [360, 1280])],
    ids=["demo", "hostile", "fifty devices"],
)
def test_it_fits_every_width(
    browser, result, widths, tmp_path,
):  # fmt: skip
    path = write(tmp_path, result())
    for width in widths:
        browser.open(path, width=width, phone=width < 700)
        browser.evaluate(OPEN_ALL)
        whole = browser.evaluate("document.documentElement.scrollWidth")
        assert whole <= width, (width, whole)
        assert browser.evaluate(STICKS_OUT) == [], width


def compared() -> bytes:
    """Verdicts that changed, checks that fail, and figures in their longest forms."""
    base = changed(stored_result(), training={"eval_loss_after": 1.3456e-05})
    names = [device.name for device in base.devices]
    head = changed(make_result(names, scale=1.4), training={"eval_loss_after": 1.2345e-05})
    budgets = parse_budgets(b'[budgets]\npeak_memory = "+5 %"\nstep_latency = "20 ms"\n')
    return render_comparison(compare(base, head, budgets))


def trends() -> bytes:
    budgets = parse_budgets(b'[budgets]\npeak_memory = "200 MB"\ntime_to_finish = "1 min"\n')
    return render_history([judge(each, budgets) for each in (stored_result(), hostile_result())])


@pytest.mark.parametrize("render", [compared, trends])
def test_the_other_pages_fit_every_width(browser, render, tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(render())
    for width in WIDTHS:
        browser.open(path, width=width, phone=width < 700)
        browser.evaluate(OPEN_ALL)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(STICKS_OUT) == [], width


@pytest.mark.parametrize("width", WIDTHS)
def test_labels_of_drawings_do_not_overlap(browser, page, width):
    browser.open(page, width=width, phone=width < 700)
    assert browser.evaluate("document.querySelectorAll('svg.plot text').length") > 40
    assert browser.evaluate(OVERLAPS) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_marks_have_contrast(browser, page, *, dark):
    browser.open(page, dark=dark)
    browser.evaluate(OPEN_ALL)
    grounds = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, json.loads(f"[{grounds[4:-1]}]"))) < 128) == dark
    texts = browser.evaluate(FAINT_TEXT)
    assert len(texts) > 500
    assert texts[0][0] >= LEAST_CONTRAST, texts[:5]
    for selector, value in browser.evaluate(FAINT_MARKS):
        assert value >= LEAST_GRAPHIC_CONTRAST, selector


def test_the_device_switch_shows_one_device_at_a_time(browser, page):
    browser.open(page)
    shown = "[...document.querySelectorAll('.panel')].map((e) => e.offsetHeight > 0)"
    assert browser.evaluate(shown) == [True, False, False, False, False]
    browser.evaluate("document.querySelectorAll('.switch > label')[3].click()")
    assert browser.evaluate(shown) == [False, False, False, True, False]
    # With the keyboard: a radio group moves with the arrow keys.
    browser.evaluate("document.getElementById('device-4').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.send(
            "Input.dispatchKeyEvent",
            {"type": kind, "key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39},
        )
    assert browser.evaluate(shown) == [False, False, False, False, True]


def test_print_shows_every_device(browser, page):
    browser.open(page)
    browser.send("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        heights = browser.evaluate(
            "[...document.querySelectorAll('.panel')].map((e) => e.offsetHeight > 0)"
        )
    finally:
        browser.send("Emulation.setEmulatedMedia", {"media": ""})
    assert heights == [True] * 5


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_peak_is_named_below_the_parts(browser, tmp_path, width):
    browser.open(write(tmp_path, make_result(["google/pixel-8a"])), width=width)
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate(OVERLAPS) == []


@pytest.mark.parametrize("width", [768, 1280])
def test_names_of_checks_break_between_words_only(browser, page, width):
    """Long messages beside them squeeze the column: "Packa/ge size" helps nobody."""
    browser.open(page, width=width)
    broken = browser.evaluate(
        """[...document.querySelectorAll('table.checks td:first-child *')].flatMap((cell) =>
             [...cell.childNodes].filter((n) => n.nodeType === 3).flatMap((node) =>
               [...node.data.matchAll(/\\S+/g)].filter((word) => {
                 const range = document.createRange();
                 range.setStart(node, word.index);
                 range.setEnd(node, word.index + word[0].length);
                 const tops = [...range.getClientRects()].map((r) => Math.round(r.top));
                 return new Set(tops).size > 1;
               }).map((word) => word[0])))"""
    )
    assert broken == []
    assert browser.evaluate("document.querySelectorAll('table.checks td:first-child').length") > 5
