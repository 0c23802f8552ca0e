"""``odtpack diff``."""

from __future__ import annotations

from pathlib import Path

import pytest

from odtpack.build import build_package
from odtpack.update.diff import PackageDiff
from tests.cli.conftest import Run, Shared, assert_refused
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
        assert outcome.out.startswith("compatible: a trained checkpoint can be used unchanged")
        for words in ("calls must change", "output 'flatten/Flatten' is new", "fc.bias", "3 of 3"):
            assert words in outcome.out

    def test_json_is_as_the_schema_says(self, run: Run, shared: Shared, newer: Path) -> None:
        outcome = run("diff", shared.package, newer, "--format", "json")
        assert outcome.code == 0
        found = PackageDiff.model_validate_json(outcome.out)
        assert [change.name for change in found.parameters] == ["fc.bias"]
        assert outcome.err == ""
        assert run("diff", shared.package, newer, "--json").out == outcome.out

    def test_markdown(self, run: Run, shared: Shared, newer: Path) -> None:
        outcome = run("diff", shared.package, newer, "--format", "markdown")
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("**compatible: ")
        for title in ("### Trained checkpoints", "### App", "### Files", "### Parameters"):
            assert title in outcome.out

    def test_no_package(self, run: Run, shared: Shared, tmp_path: Path) -> None:
        assert_refused(run("diff", shared.package, tmp_path / "absent"), "package-not-found")
        assert_refused(run("diff", shared.model, shared.package), "manifest-invalid")
