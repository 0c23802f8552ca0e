"""What the tests of the JavaScript kit share: packages, a batch, the suite, the guide's code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from odtpack.optimizers import make_optimizer
from tests import zoo
from tests.kits import harness, javascript
from tests.kits.vectors import write_suite
from tests.once import made_once
from tests.packages.samples import build

STEPS = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": make_optimizer("sgd", {"momentum": 0.9})},
    "adafactor": {"optimizer": make_optimizer("adafactor", {})},
    "clipped": {"clip_norm": 0.5},
    "mixed": {"precision": "mixed"},
}
packages, batch = harness.packages_of(OPTIONS), harness.batch


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conformance suite, written by Python on the version of ONNX Runtime that Node has."""
    built = made_once(tmp_path_factory, "suite", write_suite)
    words = ("tests.kits.vectors", "--packages", built, "--out")
    folder = made_once(
        tmp_path_factory, "suite-of-node", lambda folder: javascript.python(*words, folder)
    )
    assert json.loads((folder / "index.json").read_text())["onnxruntime"] == (
        javascript.runtime_version()
    )
    return folder


GUIDE = javascript.ROOT / "docs" / "guides" / "javascript.md"


def guide_code() -> tuple[str, str, str, str]:
    """The code of the guide: for Node, for a browser without a bundler, the loop, and an update."""
    found = re.findall(r"^```js\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    loop, node, _bundled, browser, _generate, update = found
    return node, browser, loop, update


@pytest.fixture(scope="module")
def digits_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = zoo.cnn(size=8, width=(4, 8))
    folder = tmp_path_factory.mktemp("guide") / "package"
    return build(folder, model, outputs=("output",))
