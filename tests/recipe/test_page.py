"""The page on recipes: its example builds and replays, its commands run in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odtpack.recipe import read_recipe
from odtpack.recipe.draft import SCHEMA_NAME
from odtpack_runtime import Package
from tests.recipe.conftest import Run
from tests.test_docs import ROOT, blocks, odtpack, prepare_encoder
from tests.test_docs import folder as digits

PAGE = ROOT / "docs" / "recipe.md"

__all__ = ["digits"]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    text, *_ = blocks(PAGE, "toml")
    path = tmp_path / "personal.toml"
    path.write_text(text)
    return path


def test_example_and_commands(example: Path, digits: Path, run: Run) -> None:
    # Of all blocks, since what stands between two of them looks like one without a language.
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    commands = [line for language, text in found if not language for line in text.splitlines()]
    assert len(commands) == 4
    for command in commands:
        odtpack(run, command.removeprefix("odtpack "), digits)
    assert (digits / "personal" / "training_model.ort").is_file()
    assert (digits / SCHEMA_NAME).read_text() == (
        ROOT / "docs" / "schemas" / SCHEMA_NAME
    ).read_text()


def test_example_is_complete(example: Path) -> None:
    """Every table is in it but those of which the page has further examples."""
    table = read_recipe(example).table
    assert table.model_fields_set == set(type(table).model_fields) - {
        "head", "adapter", "privacy", "inputs", "losses", "sizes",
    }  # fmt: skip


def test_example_of_a_head(run: Run, tmp_path: Path) -> None:
    prepare_encoder(tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(blocks(PAGE, "toml")[1])
    assert run("build", "--recipe", path).code == 0
    manifest = Package.open(tmp_path / "classifier").manifest
    trained = {p.name: p.shape for p in manifest.parameters if p.role == "trainable"}
    assert trained == {"head.weight": (4, 4), "head.bias": (4,)}


def test_example_of_an_adapter(run: Run, digits: Path) -> None:
    path = digits / "recipe.toml"
    path.write_text(blocks(PAGE, "toml")[2])
    assert run("build", "--recipe", path).code == 0
    manifest = Package.open(digits / "adapted").manifest
    assert manifest.adapter is not None
    trained = {p.name: p.shape for p in manifest.parameters if p.role == "trainable"}
    assert set(trained) == {*manifest.adapter.parameters, "fc.bias"}
    assert trained["base_model.model.fc.lora_A.weight"][0] == 4


def test_example_of_private_training(run: Run, digits: Path) -> None:
    path = digits / "recipe.toml"
    path.write_text(blocks(PAGE, "toml")[3])
    assert run("build", "--recipe", path).code == 0
    privacy = Package.open(digits / "private").manifest.privacy
    assert privacy is not None
    assert (privacy.clip_norm, privacy.noise_multiplier) == (1.0, 1.1)


def test_options_of_the_page_exist(run: Run) -> None:
    text = run("build", "--help").out + run("simulate", "--help").out
    table = PAGE.read_text().partition("| option | key |")[2].partition("## Keys")[0]
    options = [
        word.strip("`,") for line in table.splitlines() for word in line.split() if "--" in word
    ]
    options = [option for option in options if not option.startswith("|")]
    assert len(options) > 20
    for option in options:
        assert f"{option} " in text, option
