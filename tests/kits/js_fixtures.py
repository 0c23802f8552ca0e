"""What the tests of the JavaScript kit share: packages, a batch, the suite, the guide's code."""

import re
from pathlib import Path

import pytest

from tests import zoo
from tests.kits import harness, javascript
from tests.packages.samples import build

STEPS = 20
packages, batch = harness.packages, harness.batch
suite = harness.suite_on(javascript)


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
