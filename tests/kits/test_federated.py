"""A round whose clients are phones of other kits: their checkpoints average with Python's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.flower import fedavg
from odtpack_runtime.checkpoint.format import read_checkpoint
from tests.kits import javascript, kotlin_kit
from tests.kits.harness import needs
from tests.packages.samples import build, small_model

MISSING = kotlin_kit.unavailable() or javascript.unavailable()
pytestmark = needs(MISSING)
EXAMPLES = (8, 24, 13)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build(tmp_path / "package", small_model())


def task(package: Path, folder: Path, client: int) -> dict[str, Any]:
    """What a client trains on: samples of its own."""
    rng = np.random.default_rng(client)
    own = folder / str(client)
    own.mkdir(exist_ok=True)
    images = rng.standard_normal((EXAMPLES[client], 1, 8, 8), dtype=np.float32)
    labels = rng.integers(0, 3, EXAMPLES[client])
    data = javascript.save_batch(own, input=images, labels=labels)
    return {"package": package, "data": data, "steps": 5 + client, "rate": 0.01}


def arrays(path: Path) -> dict[str, bytes]:
    data = read_checkpoint(path)
    return {name: array.tobytes() for name, array in {**data.trainable, **data.frozen}.items()}


def test_checkpoints_of_kotlin_and_javascript_average_with_pythons(package, tmp_path):
    """Python trains a second time for each kit, on its version of ONNX Runtime."""
    sent: dict[str, list[tuple[Path, int]]] = {"kits": [], "python": []}
    for client, (kit, where) in enumerate(
        ((kotlin_kit, "kotlin"), (javascript, "node"), (javascript, "python"))
    ):
        for name, runs in (("kits", where), ("python", "python")):
            path = tmp_path / f"{name}{client}.ckpt"
            kit.train({**task(package, tmp_path, client), "save": path}, runs)
            sent[name].append((path, EXAMPLES[client]))
    for name, answers in sent.items():
        assert fedavg(package, answers, tmp_path / name) == [None, None, None]
    assert arrays(tmp_path / "kits") == arrays(tmp_path / "python")
    assert arrays(tmp_path / "kits") != arrays(package / "checkpoint")
    mean = read_checkpoint(tmp_path / "kits").trainable
    each = [read_checkpoint(path).trainable for path, _ in sent["kits"]]
    for name, array in mean.items():
        wanted = np.average([one[name] for one in each], axis=0, weights=EXAMPLES)
        np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-7)
