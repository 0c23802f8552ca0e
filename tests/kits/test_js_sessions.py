"""What an app may do with sessions of the JavaScript kit, again and again, in Node and Chromium."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.optimizers import GroupRule, make_optimizer
from odtpack_runtime.training.schedules import Cosine, ScheduleSpec
from tests.kits import javascript, js_stress, web
from tests.kits.harness import needs
from tests.kits.javascript import node
from tests.kits.models import cnn, looked_up, roots, scores
from tests.packages.samples import build
from tests.reports.browser import CHROMIUM, Browser

TIMES = int(os.environ.get("ODTPACK_STRESS", "20"))
pytestmark = needs(javascript.unavailable())


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sessions") / "package")


def test_sessions_in_node():
    js_stress.js(TIMES)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_sessions_in_a_browser():
    js_stress.chromium(TIMES)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the calls of ``calls.mjs``."""
    folder = tmp_path_factory.mktemp("calls")
    cosine = ScheduleSpec("cosine", {"warmup_steps": 2, "floor": 0.1}, 0.05)
    for name, (model, options) in {
        "roots": (roots(), {}),
        "groups": (roots(), {"groups": (GroupRule("weight", 0.1, 0.0),)}),
        "sgd": (roots(), {"optimizer": make_optimizer("sgd", {"momentum": 0.9})}),
        "accumulating": (roots(), {"accumulation_steps": 3}),
        "cosine": (roots(), {"schedule": cosine}),
        "words": (looked_up(), {}),
        "narrow": (cnn(), {"train": ["fc.*"], "frozen_storage": "float16"}),
        "scores": (scores(), {}),
    }.items():
        build_package(model, folder / name, loss="cross_entropy", step_model="never", **options)
    return dict(node("calls.mjs", folder))


@pytest.mark.parametrize(
    ("kind", "code"), {"skipped": "NaN", "failed": "run-failed", "shared": "NaN"}.items()
)
def test_gradients_of_a_step_that_is_void_are_never_used(kind, code, found):
    """Nor by another session of the state; optimizer steps count again after a good one."""
    steps = 2 if kind == "shared" else 1
    assert found[kind] == [code, True, True, steps, True, steps + 1]


def test_a_buffer_with_a_value_beyond_float16_changes_nothing(found):
    assert found["narrow"] == ["value-out-of-range", True]


def test_a_reset_begins_the_count_of_batches_again(found):
    assert found["counts"] == [0, 1, 1]


def test_one_batch_is_no_step_of_several(found):
    assert found["single"] == "step-of-several"


def test_a_rate_that_was_set_stays_where_no_step_is_made(found):
    follows, kept, after = found["rates"]
    assert (kept, after < follows) == (0.5, True)


def test_the_schedule_that_the_package_proposes(found):
    assert found["proposed"] == [True, False]
    schedule = json.loads(found["schedule"])
    assert schedule == {"kind": "cosine", "initial_lr": 0.05, "warmup_steps": 2, "floor": 0.1,
                        "total_steps": 10}  # fmt: skip
    cosine = Cosine(total_steps=10, warmup_steps=2, floor=0.1)
    assert found["rates"][0] == np.float32(0.05 * cosine.factor(3))


def test_a_session_that_cannot_be_made_leaves_its_state_alone(found):
    refused = ["model-mismatch", "optimizer-mismatch", True, "optimizer-mismatch"]
    assert found["states"] == [*refused, "number"]  # the session before goes on
    assert found["elsewhere"] == ["unsupported-device", True]
    assert found["files"] == [None, "model-not-found", None]


def test_the_class_of_the_highest_score_is_that_of_numpy(found):
    rows = np.array([[-0.0, 0, -1], [0, np.nan, 2], [np.nan, 1, np.nan], [1, 2, 2]])
    right = rows.argmax(axis=1)
    assert found["accuracies"] == [(right == label).mean() for label in range(3)]


def test_wrong_arguments_are_errors_of_the_kit(found):
    assert found["wrong"] == {}
    assert found["lists"] == ["number"]
    array, failed = found["said"]
    assert "has Int32Array data" in array
    assert "pass BigInt64Array data" in array
    assert "nothing was changed by it" in failed


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
def test_a_package_fetches_nothing_outside_of_its_folder(package, tmp_path):
    """Addresses that mean more than a name are refused, and signs in names are names."""
    outside = (
        "%2e%2e/secret", ".%2e/secret", " ../secret", " /secret", "\t/secret", "..\\secret",
        "../secret", "/secret", "//127.0.0.1/secret", "http:secret", "\ud800", "?secret", "x/ ",
    )  # fmt: skip
    inside = {
        "a#b": "a%23b", "100% right": "100%25%20right", "a b/ä": "a%20b/%C3%A4", "%41": "%2541",
    }  # fmt: skip
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
