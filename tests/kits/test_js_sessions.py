"""What an app may do with a session of the JavaScript kit, again and again, in Node and Chromium.

``ODTPACK_STRESS=200`` in the environment says how often, which is 20 by default.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from tests.kits import javascript, web
from tests.kits.javascript import SCRIPTS, node
from tests.packages.samples import build
from tests.reports.browser import CHROMIUM, Browser
from tests.training.test_not_finite import rooted

TIMES = int(os.environ.get("ODTPACK_STRESS", "20"))
pytestmark = [
    pytest.mark.kits,
    pytest.mark.skipif(javascript.unavailable() is not None, reason=str(javascript.unavailable())),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with running statistics, whose training model returns the loss alone."""
    model = zoo.mobilenet_v2(size=16, classes=3, width_mult=0.25, batch_norm="train", stages=1)
    folder = build(tmp_path_factory.mktemp("sessions") / "package", model)
    content = json.loads((folder / "manifest.json").read_text())
    assert {each["role"] for each in content["parameters"]} == {"trainable", "state"}
    assert [each["name"] for each in content["outputs"]] == ["loss"]
    return folder


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose loss is finite and of which one gradient is not, with a step model."""
    folder = tmp_path_factory.mktemp("roots") / "package"
    return build(folder, rooted(), step_model="always")


def check(found: dict[str, list[Any]]) -> None:
    """Every round came to the same: the one thing that each key may have."""
    assert {key: values for key, values in found.items() if len(values) > 1} == {}
    once = {key: value for key, (value,) in found.items()}
    not_finite = {"code": "loss-not-finite", "step": 3, "parameters": []}
    gradient = {"code": "gradient-not-finite", "step": 1}
    assert once == {
        "evaluation": [["loss", "output"], ["output"], True],
        "null tensor": "input-type",
        "closed during a step": [["ok", "ok", "ok"], True],
        "after close": ["closed"],
        "what remains": [1, 0, 2],
        "during a step": ["busy"],
        "the step itself": "ok",
        "two calls change nothing": True,
        "not finite": ["NaN", True, 2, 1, not_finite],
        "one of three": True,
        "stop": ["loss-not-finite", 0, 1],
        "gradient": [True, True, 0, 2, {**gradient, "parameters": ["second"]}],
        "stop at a gradient": ["gradient-not-finite", True, 0, 1],
    }


def test_sessions_in_node(package: Path, roots: Path) -> None:
    check(node("stress.mjs", package, roots, str(TIMES)))


STRESS = """(async () => {
  const { stress } = await import('/scripts/sessions.mjs');
  window.results = await stress({ kit, ort, source: '/package', roots: '/roots', times: %d });
})().catch((error) => { window.results = { failed: [error.stack] }; }), 1"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_sessions_in_a_browser(package: Path, roots: Path, tmp_path: Path) -> None:
    folders = {**web.FOLDERS, "package": package, "roots": roots, "scripts": SCRIPTS}
    with Browser(tmp_path, served=True) as browser, web.serve(folders) as address:
        web.open_kit(browser, f"{address}?threads=1")
        browser.evaluate(STRESS % TIMES)
        while not (results := browser.evaluate("window.results")):
            time.sleep(0.2)
    check(results)


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
    strangers = [path for path in asked if not path.startswith("/package/")]
    assert strangers == []
    assert {found[path] for path in inside} == {"package-incomplete"}  # asked for, and not there
    assert {f"/package/{each}" for each in inside.values()} <= fetched
    # `%2e%2e` is an odd name in a package, and no way out of it.
    odd = {"%2e%2e/secret": "package-incomplete", ".%2e/secret": "package-incomplete"}
    for path in outside:
        assert found.get(path, "package-path") == odd.get(path, "package-path"), path
