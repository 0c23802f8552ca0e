"""What an app may do with a session of the JavaScript kit, again and again, in Node and Chromium.

``js`` and ``chromium`` take how often, and raise an AssertionError where a round differs.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests import zoo
from tests.kits import web
from tests.kits.javascript import node
from tests.packages.samples import build
from tests.reports.browser import Browser
from tests.training.test_not_finite import rooted


def packages(folder: Path) -> tuple[Path, Path]:
    """One package with running statistics, one whose loss is finite and a gradient is not."""
    model = zoo.mobilenet_v2(size=16, classes=3, width_mult=0.25, batch_norm="train", stages=1)
    package = build(folder / "package", model)
    content = json.loads((package / "manifest.json").read_text())
    assert {each["role"] for each in content["parameters"]} == {"trainable", "state"}
    assert [each["name"] for each in content["outputs"]] == ["loss"]
    return package, build(folder / "roots", rooted(), step_model="always")


def check(found: dict[str, list[Any]]) -> None:
    """Every round came to the same: the one thing that each key may have."""
    assert {key: values for key, values in found.items() if len(values) > 1} == {}
    once = {key: value for key, (value,) in found.items()}
    not_finite = {"code": "loss-not-finite", "step": 3, "parameters": []}
    gradient = {"code": "gradient-not-finite", "step": 1, "parameters": ["second"]}
    assert once == {
        "evaluation": [["loss", "output"], ["output"], True], "null tensor": "input-type",
        "disposed tensors": ["input-type", "input-type"],
        "plain objects": [True, "ok", "input-shape", "input-shape", "input-type"],
        "rates": [*["bad-learning-rate"] * 4, False],
        "two sessions of a state": [True, [*["optimizer-mismatch"] * 4, "ok"], 0, 1, True],
        "a model that does not load": ["model-not-loadable", 2, 2],
        "closed during a step": [["ok", "ok", "ok"], True], "after close": ["closed"],
        "what remains": [1, 0, 2], "during a step": ["busy"], "the step itself": "ok",
        "two calls change nothing": True, "not finite": ["NaN", True, 2, 1, not_finite],
        "one of three": True, "stop": ["loss-not-finite", 0, 1],
        "gradient": [True, True, 0, 2, gradient],
        "stop at a gradient": ["gradient-not-finite", True, 0, 1],
    }  # fmt: skip


def js(times: int) -> None:
    """In Node."""
    with tempfile.TemporaryDirectory(prefix="odtpack-stress-") as folder:
        check(node("stress.mjs", *packages(Path(folder)), str(times)))


def chromium(times: int) -> None:
    """In a browser."""
    with tempfile.TemporaryDirectory(prefix="odtpack-stress-") as name:
        folder = Path(name)
        package, roots = packages(folder)
        folders = {**web.FOLDERS, "package": package, "roots": roots}
        with Browser(folder, served=True) as browser, web.serve(folders) as address:
            web.open_kit(browser, f"{address}?threads=1")
            check(web.run(browser, "sessions", times))
