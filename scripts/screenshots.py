"""Take the pictures of the report that the documentation shows, in headless Chromium.

    python -m scripts.screenshots            draw the stored result again, when the page changed
    python -m scripts.screenshots --renew    store the made-up result anew before

The result is stored, so that a changed device profile or budget does not ask for new pictures.
``docs/images/pictures.json`` records which page they show; ``tests/reports/test_pictures.py``
compares it with the page that the code draws today.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from odtpack_simulator.reports.html_report import render_html
from tests.reports.browser import Browser
from tests.reports.demo import STORED, demo_result, stored_result

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RECORD = IMAGES / "pictures.json"
DEVICES = [
    "apple/iphone-12-mini",
    "apple/iphone-16-pro",
    "google/pixel-8a",
    "raspberrypi/pi-4",
    "raspberrypi/zero-2-w",
    "samsung/galaxy-a12",
]


@dataclass(frozen=True)
class Picture:
    """A cut of the page: its width, height and top (a section, or the top of the page)."""

    width: int
    height: int
    scale: float
    dark: bool = False
    phone: bool = False
    section: str | None = None


PICTURES = {
    "report.png": Picture(1200, 1470, 1.25),
    "report-dark.png": Picture(1200, 1150, 1.25, dark=True, section="learning"),
    "report-phone.png": Picture(360, 780, 2.0, phone=True),
}


def page() -> bytes:
    """The page that the pictures show."""
    return render_html(stored_result())


def take(folder: Path, names: list[str] | None = None) -> dict[str, Path]:
    """Take pictures into a folder; their paths by name."""
    written = {}
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        path = Path(profile) / "report.html"
        path.write_bytes(page())
        for name in names or list(PICTURES):
            picture = PICTURES[name]
            browser.open(
                path,
                width=picture.width,
                scale=picture.scale,
                phone=picture.phone,
                dark=picture.dark,
            )
            top = 0
            if picture.section:
                top = browser.evaluate(f"document.getElementById('{picture.section}').offsetTop")
            written[name] = folder / name
            written[name].write_bytes(
                browser.screenshot(top=max(0, top - 24), height=picture.height)
            )
    return written


def main() -> None:
    """Renew what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--renew", action="store_true", help="store the made-up result anew")
    if parser.parse_args().renew:
        content = demo_result(DEVICES).model_dump(mode="json")
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        STORED.write_text(f"{text}\n", "utf-8")
    for path in take(IMAGES).values():
        print(f"wrote {path.relative_to(ROOT)}")
    record = {
        "page_sha256": hashlib.sha256(page()).hexdigest(),
        "pictures": {
            name: hashlib.sha256((IMAGES / name).read_bytes()).hexdigest() for name in PICTURES
        },
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
