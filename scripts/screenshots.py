"""Take the pictures of the report that the documentation shows, in headless Chromium.

    python -m scripts.screenshots            draw the stored results again, when the page changed
    python -m scripts.screenshots --renew    store the made-up result anew before
    python -m scripts.screenshots --demo     run ``odtpack demo``, and store its result before

The results are stored, so that a changed device profile or budget does not ask for new pictures.
Tests compare the pages that are drawn today with ``docs/images/pictures.json``.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from odtpack.cli.device.demo import FAILING_BUDGET, exit_words
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.reports.html_report import Again, render_html
from odtpack_simulator.result import load_result
from scripts.harness import ROOT, options
from tests.reports.browser import Browser
from tests.reports.demo import STORED, demo_result, stored_result

IMAGES = ROOT / "docs" / "images"
RECORD = IMAGES / "pictures.json"
DEMO = ROOT / "tests" / "reports" / "demo_run"
DEVICES = [
    "apple/iphone-12-mini", "apple/iphone-16-pro", "google/pixel-8a", "raspberrypi/pi-4",
    "raspberrypi/zero-2-w", "samsung/galaxy-a12",
]  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A cut of the page: its width, height and top (a section, or the top of the page)."""

    width: int
    height: int
    scale: float
    dark: bool = False
    phone: bool = False
    section: str | None = None
    page: str = "made-up"


PICTURES = {
    "demo.png": Picture(1200, 1340, 1.25, page="demo"),
    "report.png": Picture(1200, 1470, 1.25),
    "report-dark.png": Picture(1200, 1150, 1.25, dark=True, section="learning"),
    "report-phone.png": Picture(360, 780, 2.0, phone=True),
}


def demo_page() -> bytes:
    """The page of the stored run of ``odtpack demo``, as that draws it."""
    result = load_result(DEMO / "report.json")
    budget = DEMO / FAILING_BUDGET
    failing = judge(result, parse_budgets(budget.read_bytes(), f"build/demo/{budget.name}"))
    return render_html(result, again=Again(failing, budget.read_text("utf-8"), exit_words(failing)))


PAGES = {"made-up": lambda: render_html(stored_result()), "demo": demo_page}
"""What draws each page that pictures show."""


def digests() -> dict[str, str]:
    """SHA-256 of each page as it is drawn today, by name."""
    return {name: hashlib.sha256(draw()).hexdigest() for name, draw in PAGES.items()}


def take(folder: Path, names: list[str] | None = None) -> dict[str, Path]:
    """Take pictures into a folder; their paths by name."""
    written = {}
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        for name, draw in PAGES.items():
            Path(profile, f"{name}.html").write_bytes(draw())
        for name in names or list(PICTURES):
            picture, top = PICTURES[name], 0
            browser.open(
                Path(profile, f"{picture.page}.html"), width=picture.width, scale=picture.scale,
                phone=picture.phone, dark=picture.dark,
            )  # fmt: skip
            if picture.section:
                top = browser.evaluate(f"document.getElementById('{picture.section}').offsetTop")
            shot = browser.screenshot(top=max(0, top - 24), height=picture.height)
            written[name] = folder / name
            written[name].write_bytes(shot)
    return written


def main() -> None:
    given = options(__doc__, renew=False, demo=False)
    if given.demo:  # in a folder of the name that the README's has
        DEMO.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "odtpack", "demo", "--out", "build/demo"]
            subprocess.run(command, cwd=folder, check=True)
            for name in ("report.json", FAILING_BUDGET):
                shutil.copyfile(Path(folder, "build", "demo", name), DEMO / name)
    if given.renew:
        content = demo_result(DEVICES).model_dump(mode="json")
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        STORED.write_text(f"{text}\n", "utf-8")
    written = take(IMAGES)
    for path in written.values():
        print(f"wrote {path.relative_to(ROOT)}")
    shown = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in written.items()}
    record = {"pages": digests(), "pictures": shown}
    RECORD.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
