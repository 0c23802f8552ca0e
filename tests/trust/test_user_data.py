"""What reports carry of samples and people: nothing that is not said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.cli._describe import of_fleet, of_properties, of_simulation
from odtpack_simulator.values.text import shown_path
from tests import zoo
from tests.cli.conftest import Run, run

__all__ = ["run"]


@pytest.mark.parametrize(
    ("size", "held_out", "words"),
    [(32, 50, []), (1, 50, ["single samples"]), (8, 1, ["Only one sample"]), (2, 2, [])],
)
def test_figures_of_single_samples(size: int, held_out: int, words: list[str]) -> None:
    result: Any = SimpleNamespace(data=SimpleNamespace(batch_size=size, held_out_samples=held_out))
    found = list(of_simulation(result))
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.parametrize(("clients", "said"), [(0, 0), (5, 1), (19, 1), (20, 0), (500, 0)])
def test_figures_of_single_clients(clients: int, said: int) -> None:
    fairness = SimpleNamespace(clients=clients) if clients else None
    result: Any = SimpleNamespace(fairness=fairness, disturbed=None)
    assert len(list(of_fleet(result))) == said


def test_properties_of_an_app() -> None:
    assert list(of_properties(["odtpack.schedule", "odtpack.epochs"])) == []
    (found,) = of_properties(["odtpack.schedule", "owner", *(f"p{i}" for i in range(9))])
    assert "'owner'" in found
    assert "and 5 more" in found


def test_paths_do_not_name_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "ada" / "work"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    assert shown_path(Path("models/package")) == "models/package"
    assert shown_path(home / "models" / "package") == "models/package"
    assert shown_path(tmp_path / "ada" / "package") == "package"
    assert shown_path(Path("/")) == "/"


def test_a_report_holds_no_sample(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that could be told by its numbers, in no form in which they might be written."""
    home = tmp_path / "ada-lovelace"
    build_package(zoo.mlp((4, 3, 2)), home / "package", loss="cross_entropy")
    random = np.random.default_rng(0)
    data = random.random((12, 4), np.float32) + np.float32(0.31415927)
    np.savez(home / "data.npz", input=data, labels=np.arange(12) % 2)
    monkeypatch.chdir(home)
    reports = [f"{kind}:{tmp_path / f'r.{kind}'}" for kind in ("json", "html", "junit")]
    outcome = run(
        "simulate", home / "package", "--data", home / "data.npz", "--device", "pi-5",
        "--epochs", 1, "--batch-size", 1,
        *(word for each in reports for word in ("--report", each)),
    )  # fmt: skip
    assert outcome.code in (0, 1), outcome.err
    assert "the result contains losses of single samples" in outcome.err
    for kind in ("json", "html", "junit"):
        text = (tmp_path / f"r.{kind}").read_text()
        assert "ada-lovelace" not in text
        for value in data.ravel():
            assert str(value)[:8] not in text
    assert json.loads((tmp_path / "r.json").read_text())["package"]["path"] == "package"
