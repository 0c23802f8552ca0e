"""What an app may do with a session of the JavaScript kit, again and again, in Node and Chromium.

``ODTPACK_STRESS=200`` in the environment says how often, which is 20 by default.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kits import javascript, js_stress, web
from tests.kits.harness import needs
from tests.packages.samples import build
from tests.reports.browser import CHROMIUM, Browser

TIMES = int(os.environ.get("ODTPACK_STRESS", "20"))
pytestmark = needs(javascript.unavailable())


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sessions") / "package")


def test_sessions_in_node() -> None:
    js_stress.js(TIMES)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_sessions_in_a_browser() -> None:
    js_stress.chromium(TIMES)


SECRETS = """(async () => {
  const attempt = (path) => {
    const entry = { path, size_bytes: 6, sha256: '0'.repeat(64) };
    return kit.TrainingPackage.open('/package').then(async (opened) => {
      await opened.file(entry);
      return 'read';
    }, (error) => error.code).catch((error) => error.code);
  };
  const found = {};
  for (const path of %s) found[path] = await attempt(path);
  return found;
})()"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_package_fetches_nothing_outside_of_its_folder(package: Path, tmp_path: Path) -> None:
    """Addresses that mean more than a name are refused, and signs in names are names."""
    outside = (
        "%2e%2e/secret", ".%2e/secret", " ../secret", " /secret", "\t/secret", "..\\secret",
        "../secret", "/secret", "//127.0.0.1/secret", "http:secret", "\ud800", "?secret", "x/ ",
    )  # fmt: skip
    inside = {
        "a#b": "a%23b",
        "100% right": "100%25%20right",
        "a b/ä": "a%20b/%C3%A4",
        "%41": "%2541",
    }
    asked: list[str] = []
    with (
        Browser(tmp_path, served=True) as browser,
        web.serve({**web.FOLDERS, "package": package}, asked=asked) as address,
    ):
        web.open_kit(browser, f"{address}?threads=1")
        asked.clear()
        found = browser.evaluate(SECRETS % json.dumps([*outside, *inside]))
    fetched = {path for path in asked if "manifest" not in path and path.startswith("/package/")}
    assert [path for path in asked if not path.startswith("/package/")] == []
    assert {found[path] for path in inside} == {"package-incomplete"}  # asked for, and not there
    assert {f"/package/{each}" for each in inside.values()} <= fetched
    # `%2e%2e` is an odd name in a package, and no way out of it.
    odd = {"%2e%2e/secret": "package-incomplete", ".%2e/secret": "package-incomplete"}
    for path in outside:
        assert found.get(path, "package-path") == odd.get(path, "package-path"), path
