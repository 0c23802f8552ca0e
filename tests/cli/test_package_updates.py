"""``odtpack diff``, ``odtpack delta`` and ``odtpack apply``."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack.update.diff_model import PackageDiff
from tests.cli.conftest import Run, Shared, assert_refused, tree
from tests.packages.samples import small_model, with_values


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The shared package with another head and a further output."""
    model = with_values(small_model(), "fc.bias")
    build_package(model, tmp_path / "newer", loss="cross_entropy", outputs=["flatten/Flatten"])
    return tmp_path / "newer"


class TestDiff:
    def test_text(self, run: Run, shared: Shared, newer: Path) -> None:
        outcome = run("diff", shared.package, newer)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("compatible: a trained checkpoint opens as it is")
        for words in ("calls must change", "output 'flatten/Flatten' is new", "fc.bias", "3 of 3"):
            assert words in outcome.out

    def test_json_is_as_the_schema_says(self, run: Run, shared: Shared, newer: Path) -> None:
        outcome = run("diff", shared.package, newer, "--format", "json")
        assert outcome.code == 0
        found = PackageDiff.model_validate_json(outcome.out)
        assert [change.name for change in found.parameters] == ["fc.bias"]
        assert outcome.err == ""

    def test_markdown(self, run: Run, shared: Shared, newer: Path) -> None:
        outcome = run("diff", shared.package, newer, "--format", "markdown")
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("**compatible: ")
        for title in ("### Trained checkpoints", "### App", "### Files", "### Parameters"):
            assert title in outcome.out

    def test_no_package(self, run: Run, shared: Shared, tmp_path: Path) -> None:
        assert_refused(run("diff", shared.package, tmp_path / "absent"), "package-not-found")
        assert_refused(run("diff", shared.model, shared.package), "manifest-invalid")


class TestDeltaAndApply:
    def test_there(self, run: Run, shared: Shared, newer: Path, tmp_path: Path) -> None:
        update, phone = tmp_path / "update.zip", tmp_path / "phone"
        shutil.copytree(shared.package, phone)
        outcome = run("delta", shared.package, newer, "--out", update, "--json")
        assert outcome.code == 0
        content = outcome.json()
        assert content["size_bytes"] == update.stat().st_size
        assert content["package_bytes"] == sum(map(len, tree(newer).values()))  # type: ignore[arg-type]
        kinds = {file["path"]: file["kind"] for file in content["files"]}
        assert kinds["optimizer_model.onnx"] == "copy"
        assert kinds["checkpoint"] == "whole"
        assert f"wrote {update}" in outcome.err
        beside = run("apply", phone, update, "--out", tmp_path / "beside")
        assert (beside.code, beside.out) == (0, "")
        assert tree(tmp_path / "beside") == tree(newer)
        assert tree(phone) == tree(shared.package)
        assert run("apply", phone, update).code == 0
        assert tree(phone) == tree(newer)

    def test_the_wrong_package(self, run: Run, shared: Shared, newer: Path, tmp_path: Path) -> None:
        update = tmp_path / "update.zip"
        assert run("delta", newer, shared.package, "--out", update).code == 0
        build_package(small_model(), tmp_path / "third", loss="mse")
        assert_refused(run("apply", tmp_path / "third", update), "delta-base")

    def test_a_damaged_update(self, run: Run, shared: Shared, newer: Path, tmp_path: Path) -> None:
        update = tmp_path / "update.zip"
        assert run("delta", shared.package, newer, "--out", update).code == 0
        data = bytearray(update.read_bytes())
        data[len(data) // 2] ^= 4
        update.write_bytes(data)
        before = tree(shared.package)
        assert_refused(run("apply", shared.package, update), "delta-damaged")
        assert_refused(run("apply", shared.package, shared.data), "delta-damaged")
        assert_refused(run("apply", shared.package, tmp_path / "absent"), "delta-not-found")
        assert tree(shared.package) == before

    def test_where_the_update_goes(self, run: Run, shared: Shared, newer: Path) -> None:
        before = tree(newer)
        for out in (newer, newer / "checkpoint", newer / "absent" / "delta"):
            assert_refused(run("delta", shared.package, newer, "--out", out), "cannot-write")
        assert tree(newer) == before


def test_a_model_whose_weights_all_moved_a_little(run: Run, shared: Shared, tmp_path: Path) -> None:
    model = onnx.load(shared.model)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor) * np.float32(1.001)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    build_package(model, tmp_path / "new", loss="cross_entropy")
    update = tmp_path / "update.zip"
    outcome = run("delta", shared.package, tmp_path / "new", "--out", update, "--json")
    files: list[dict[str, str]] = outcome.json()["files"]  # type: ignore[assignment]
    held = {file["path"] for file in files if file["kind"] == "whole"}
    assert held == {"manifest.json", "checkpoint"}  # the models are the same
