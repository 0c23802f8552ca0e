"""``inspect`` of a package: the tree of sizes; ``build --frozen-dtype``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import zoo
from tests.cli.conftest import Run, Shared


def test_tree(run: Run, shared: Shared) -> None:
    outcome = run("inspect", shared.package)
    assert outcome.code == 0
    for path in shared.package.iterdir():
        (line,) = (row for row in outcome.out.splitlines() if path.name in row)
        assert "%" in line


def test_json(run: Run, shared: Shared) -> None:
    sizes = run("inspect", shared.package, "--json").json()["sizes"]
    assert sizes["size_bytes"] == sum(path.stat().st_size for path in shared.package.iterdir())
    assert {part["name"] for part in sizes["parts"]} == {p.name for p in shared.package.iterdir()}


def test_reports(run: Run, shared: Shared, tmp_path: Path) -> None:
    page, data = tmp_path / "sizes.html", tmp_path / "sizes.json"
    outcome = run(
        "inspect", shared.package, "--report", f"html:{page}", "--report", f"json:{data}", "--json"
    )
    assert outcome.code == 0
    assert json.loads(data.read_text()) == outcome.json()["sizes"]
    assert shared.package.name in page.read_text()


@pytest.mark.parametrize(
    ("of", "destination", "code"),
    [
        ("package", "pdf:x.pdf", "report-format-unknown"),
        ("package", "html:missing/x.html", "cannot-write"),
        ("model", "html:x.html", "option-not-used"),
    ],
)
def test_bad_reports(
    run: Run, shared: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    of: str, destination: str, code: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    outcome = run("inspect", getattr(shared, of), "--report", destination)
    assert outcome.code == 2
    assert f"error[{code}]" in outcome.err
    assert not list(tmp_path.iterdir())


def test_a_report_does_not_replace_a_file_of_the_package(run: Run, shared: Shared) -> None:
    before = (shared.package / "checkpoint").read_bytes()
    outcome = run("inspect", shared.package, "--report", f"html:{shared.package / 'checkpoint'}")
    assert outcome.code == 2
    assert (shared.package / "checkpoint").read_bytes() == before


def test_frozen_dtype(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(zoo.transformer_encoder(layers=1, d=64, ff=64, T=8, vocab=50), model)
    arguments = ("build", model, "--loss", "cross_entropy", "--train", "classifier.*", "--json")
    plain = run(*arguments, "--out", tmp_path / "plain").json()
    half = run(*arguments, "--out", tmp_path / "half", "--frozen-dtype", "float16").json()
    stored = [p for p in half["parameters"] if p["dtype"] == "float16"]
    assert stored
    assert all(p["role"] == "frozen" and p["model_dtype"] == "float32" for p in stored)
    saved = sum(2 * int(np.prod(p["shape"])) for p in stored)
    sizes = [c["files"]["checkpoint"]["size_bytes"] for c in (plain, half)]
    assert sizes[0] - sizes[1] == pytest.approx(saved, abs=32 * len(stored))  # tensors are aligned
    outcome = run("inspect", tmp_path / "half")
    assert f"{len(stored)} of them are float32 in the model" in outcome.out


def test_frozen_dtype_without_frozen_weights(run: Run, shared: Shared, tmp_path: Path) -> None:
    outcome = run(
        "build", shared.model, "--out", tmp_path / "p", "--loss", "cross_entropy",
        "--frozen-dtype", "int8",
    )  # fmt: skip
    assert outcome.code == 2
    assert "error[storage-not-used]" in outcome.err
