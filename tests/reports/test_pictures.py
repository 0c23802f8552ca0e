"""The pictures in the documentation show the page that the code draws."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest

from odtpack_simulator.reports import render_report, report_formats
from scripts.screenshots import DEVICES, IMAGES, PAGES, PICTURES, RECORD, ROOT, digests, take
from tests.reports.browser import CHROMIUM
from tests.reports.demo import STORED, demo_result, stored_result

AGAIN = "run: python -m scripts.screenshots"


def size(png: bytes) -> tuple[int, int]:
    """Width and height in the header of a PNG."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def expected(name: str) -> tuple[int, int]:
    picture = PICTURES[name]
    return round(picture.width * picture.scale), round(picture.height * picture.scale)


def test_the_committed_pictures_are_current() -> None:
    record = json.loads(RECORD.read_text())
    assert record["pages"] == digests(), AGAIN
    assert set(record["pictures"]) == set(PICTURES)
    for name, digest in record["pictures"].items():
        data = (IMAGES / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, AGAIN
        assert size(data) == expected(name)
        assert len(data) < 600_000


def test_every_picture_is_shown_and_described() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in pages)
    for name in PICTURES:
        assert f"images/{name}" in text, name
    assert {path.name for path in IMAGES.glob("*.png")} == set(PICTURES)


def test_the_stored_result_shows_everything() -> None:
    """A picture of a page that lacks a section would be of little use."""
    html = PAGES["made-up"]().decode()
    for name in ("first", "devices", "learning", "memory", "latency", "campaign", "interruptions"):
        assert f'<section id="{name}"' in html
    assert STORED.stat().st_size < 200_000


def test_the_stored_result_can_be_made_again() -> None:
    """What profiles and the judge say today may differ; devices, and that it is drawn, may not."""
    result = demo_result(DEVICES)
    assert [device.name for device in result.devices] == DEVICES
    assert [device.name for device in stored_result().devices] == DEVICES
    for name in report_formats():
        assert len(render_report(result, name)) > 1000


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pictures_can_be_taken(tmp_path: Path) -> None:
    for name, path in take(tmp_path).items():
        data = path.read_bytes()
        assert size(data) == expected(name)
        assert len(data) > 20_000  # an empty page compresses to less
