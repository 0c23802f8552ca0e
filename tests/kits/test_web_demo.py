"""The web demo learns what is drawn: strokes with a mouse in a real browser, offline."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.web_demo.build import CLASSES, build, serve
from odtpack_simulator.measure.measured_profile import imported_profile, load_measurements
from tests.kits import javascript
from tests.kits.harness import needs
from tests.kits.web import wait
from tests.packaging_tools import open_training
from tests.reports.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    *needs(javascript.unavailable()),
]
Stroke = list[tuple[int, int]]
LETTERS: dict[str, list[Stroke]] = {
    "A": [[(80, 230), (140, 50)], [(140, 50), (200, 230)], [(100, 160), (180, 160)]],
    "K": [[(90, 50), (90, 230)], [(190, 50), (92, 140)], [(92, 140), (195, 230)]],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    return build(tmp_path_factory.mktemp("demo") / "page")


@pytest.fixture
def page(demo: Path, tmp_path: Path) -> Iterator[Browser]:
    with opened(demo, tmp_path) as browser:
        yield browser


@contextmanager
def opened(demo: Path, tmp_path: Path, options: Sequence[str] = ()) -> Iterator[Browser]:
    profile = tmp_path / "profile"
    with serve(demo) as (address, _), Browser(profile, served=True, options=options) as browser:
        downloads = {"behavior": "allow", "downloadPath": str(tmp_path)}
        browser.send("Page.setDownloadBehavior", downloads)
        browser.open(address)
        wait(browser, "document.body.dataset.ready === 'true'")
        yield browser


def wait_for(file: Path) -> None:
    until = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.1)


def draw(browser: Browser, letter: str, shift: int = 0) -> None:
    """Draw a letter with the mouse, as many pixels to the right."""
    left, top, width = browser.evaluate(
        "(({left, top, width}) => [left, top, width])"
        "(document.getElementById('pad').getBoundingClientRect())"
    )

    def mouse(kind: str, x: float, y: float) -> None:
        scale = width / 280
        place = {"x": left + (x + shift) * scale, "y": top + y * scale}
        buttons = {"button": "left", "buttons": 1, "clickCount": 1}
        browser.send("Input.dispatchMouseEvent", {"type": kind, **place, **buttons})

    for (x, y), (to_x, to_y) in LETTERS[letter]:
        mouse("mousePressed", x, y)
        for part in range(1, 9):
            mouse("mouseMoved", x + (to_x - x) * part / 8, y + (to_y - y) * part / 8)
        mouse("mouseReleased", to_x, to_y)
    wait(browser, "document.getElementById('guess').textContent.includes('reads')")


def read(browser: Browser) -> str:
    """What the network reads once it has seen the last stroke."""
    wait(browser, "!document.body.dataset.reading")
    return str(browser.evaluate("document.querySelector('#guess b').textContent"))


def teach(browser: Browser, letter: str) -> None:
    browser.evaluate(
        f"document.querySelector('#keys button[aria-label=\"It is {letter}\"]').click()"
    )
    wait(browser, "!document.body.dataset.learning")


def test_it_learns_letters_that_are_drawn(page, tmp_path, demo):
    before = {}
    for letter in LETTERS:
        draw(page, letter)
        before[letter] = read(page)
        teach(page, letter)
    assert not set(before.values()) & set(LETTERS)  # it had never seen a letter
    for letter in LETTERS:
        draw(page, letter, shift=8)
        assert read(page) == letter
        teach(page, letter)
    figures = page.evaluate(
        "Object.fromEntries(['loss', 'accuracy', 'steps', 'speed', 'memory'].map("
        "(name) => [name, document.getElementById(name).textContent]))"
    )
    assert figures["accuracy"] == "100 % of 4"
    assert float(figures["loss"]) < 1
    assert int(figures["steps"]) == 320
    assert float(figures["memory"].split()[0]) > 0.1
    assert set(page.console) <= {"No available adapters."}  # which Chromium says when it is asked
    assert "in WebAssembly on 2 thread(s), as there is no WebGPU" in where(page)
    assert steps_of(page, demo / "package", tmp_path) == 320


def test_it_learns_on_webgpu_where_there_is_some(demo, tmp_path):
    options = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
    with opened(demo, tmp_path, options) as page:
        assert "with WebGPU on " in where(page)
        draw(page, "A")
        assert read(page) != "A"
        page.evaluate("document.querySelector('[aria-label=\"It is A\"]').click()")
        wait(page, "Number(document.getElementById('steps').textContent) >= 3")
        page.evaluate("document.getElementById('pause').click()")
        wait(page, "!document.body.dataset.learning")
        steps = int(page.evaluate("document.getElementById('steps').textContent"))
        assert page.console == []
        assert steps_of(page, demo / "package-webgpu", tmp_path) == steps


def where(page: Browser) -> str:
    """What the page says of where it trains."""
    return str(page.evaluate("document.getElementById('where').textContent"))


def steps_of(page: Browser, package: Path, tmp_path: Path) -> int:
    """Steps of the checkpoint that the page offers, from which Python resumes."""
    page.evaluate("document.getElementById('download').click()")
    saved = tmp_path / "trained.ckpt"
    wait_for(saved)
    _, _, optimizer = open_training(package, checkpoint=saved)
    return optimizer.step_count


@pytest.mark.parametrize("gpu", [True, False])
def test_it_measures_the_device(gpu, demo, tmp_path):
    """The file that the page offers becomes a profile, under which a training is simulated."""
    options = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader") if gpu else ()
    with serve(demo) as (address, _), Browser(tmp_path, served=True, options=options) as page:
        downloads = {"behavior": "allow", "downloadPath": str(tmp_path)}
        page.send("Page.setDownloadBehavior", downloads)
        page.open(f"{address}measure.html")
        page.evaluate("document.getElementById('measure').click()")
        wait(page, "document.body.dataset.ended")
        said = str(page.evaluate("document.getElementById('status').textContent"))
        assert ("no WebGPU" in said) != gpu, said
        page.evaluate("document.getElementById('download').click()")
        file = tmp_path / "measurements.json"
        wait_for(file)
    measured = load_measurements(file)
    assert (measured.gpu is not None) == gpu
    made = imported_profile(measured, name="someone/phone", title="Phone")
    assert made.os == "web"
    assert made.cpu.fp32_gemm is not None
    rates = made.gpu and (made.gpu.fp32_gemm, made.gpu.bandwidth, made.gpu.operator)
    assert all(figure.value > 0 for figure in rates or ()) if gpu else rates is None


@pytest.fixture(scope="module")
def screen(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str]]:
    """A browser, and the address of the demo."""
    profile = tmp_path_factory.mktemp("screen") / "profile"
    with serve(demo) as (address, _), Browser(profile, served=True) as browser:
        yield browser, address


@pytest.mark.parametrize("name", ["", "measure.html"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_fits_on_every_screen(width, name, screen):
    browser, address = screen
    browser.open(f"{address}{name}", width=width, phone=width < 700)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    keys = browser.evaluate("document.querySelectorAll('#keys button').length")
    assert keys == (0 if name else CLASSES)


def test_nothing_of_the_page_comes_from_elsewhere(demo):
    for path in ("index.html", "app.js", "measure.html", "measure.js", "style.css"):
        text = (demo / path).read_text()
        assert "http:" not in text
        assert "https:" not in text
    manifest = json.loads((demo / "package" / "manifest.json").read_text())
    assert manifest["layout"]["dtype"] == "float32"
