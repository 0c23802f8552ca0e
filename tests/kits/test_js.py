"""The JavaScript kit in Node against Python on the version of ONNX Runtime that npm has."""

import re
import statistics

import numpy as np
import pytest

from tests.kits import javascript, js_fixtures, web
from tests.kits.harness import contents, needs
from tests.kits.javascript import KIT, NODE, node, train
from tests.kits.js_fixtures import guide_code
from tests.programs import ran

pytestmark = needs(javascript.unavailable())
packages, batch, suite = js_fixtures.packages, js_fixtures.batch, js_fixtures.suite
digits_package = js_fixtures.digits_package


def test_node_passes_the_conformance_suite_to_the_bit(suite, npm):
    results = node("suite.mjs", suite, "exact", kit=npm / "odtpack")
    assert len(results) >= 50
    # A number is the largest difference; where the suite asks for the same bits it is 0.
    assert {name: result for name, result in results.items() if isinstance(result, str)} == {}


def test_node_does_not_grow_over_thirty_thousand_steps(packages, batch):
    task = {"package": packages["adamw"], "data": batch, "steps": 30_000}
    resident = train(task, "node", collect=True)["resident"]
    # The first third warms up caches and the compiler. What leaks grows in both that follow, by
    # 200 bytes a step or more; the allocator takes a large page once.
    ends = [statistics.median(resident[end - 4 : end]) for end in (20, 40, 60)]
    assert min(ends[1] - ends[0], ends[2] - ends[1]) < 2e6, resident


def test_units():
    ran(NODE, "--test", "test/", cwd=KIT)


def test_the_guides_code_for_node_trains(digits_package, tmp_path):
    code, _, loop, update = guide_code()
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 320)
    images = rng.random((320, 64), np.float32) + labels[:, None].astype(np.float32) / 10
    images.tofile(tmp_path / "images.bin")
    labels.tofile(tmp_path / "labels.bin")
    (tmp_path / "package").symlink_to(digits_package)
    modules = tmp_path / "node_modules"
    modules.mkdir()
    (modules / "odtpack").symlink_to(KIT)
    for name in ("flatbuffers", "onnxruntime-node", "onnxruntime-common"):
        (modules / name).symlink_to(web.MODULES / name)
    (tmp_path / "train.mjs").write_text(code)
    losses = []
    for _ in range(2):  # the second run goes on from the first, which was at its end
        done = ran(NODE, "train.mjs", cwd=tmp_path)
        losses.append(float(done.stdout.splitlines()[-1].split()[0]))
    assert losses[0] == losses[1] < 2.3
    assert (tmp_path / "personal.onnx").stat().st_size > 2_000

    (tmp_path / "personal.onnx").unlink()
    samples = re.search(r"^import \* as ort.*?^}$", code, re.M | re.S)
    given = f"import {{ readFileSync }} from 'node:fs';\n{samples[0]}\n"
    given += "const batches = [0, 1].map(batch);\n"
    (tmp_path / "train.mjs").write_text(given + loop)
    done = ran(NODE, "train.mjs", cwd=tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["61", "62"]  # goes on
    assert (tmp_path / "personal.onnx").is_file()

    (tmp_path / "package-2").symlink_to(digits_package)
    (tmp_path / "update.mjs").write_text(update)
    ran(NODE, "update.mjs", cwd=tmp_path)
    assert contents(tmp_path / "trained-2.ckpt") == contents(tmp_path / "trained.ckpt")


def test_code_for_onnxruntime_training_runs_as_it_was(digits_package):
    """The calls of the old API, with the files of a package."""
    found = node("former.mjs", digits_package)
    assert found["names"] == [["input", "labels"], ["loss", "output"]]
    assert (found["both"], found["one"]) == (["loss", "output"], ["output"])
    assert found["size"] == found["length"] > 500
    assert found["before"] == found["after"] != found["zeros"]
    assert found["zeros"] == pytest.approx(np.log(10))
    assert (found["busy"], found["unmoved"], found["unknown"]) == ("busy", True, "unknown-output")
    scores = np.array(found["outputs"]).reshape(2, 10)
    labels = np.array([1, 2])
    assert found["evaluation"]["accuracy"] == (scores.argmax(axis=1) == labels).mean()
    right = np.log(np.exp(scores).sum(axis=1)) - scores[[0, 1], labels]
    assert found["evaluation"]["loss"] == pytest.approx(right.mean(), rel=1e-5)
    assert found["evaluation"]["samples"] == 4
