"""A recipe gives an encoder a head, as ``odtpack head`` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odtpack.errors import OdtpackError
from odtpack.fit.finalists import Surroundings, recipe_text
from odtpack.recipe import BuildSpec, read_recipe
from odtpack.recipe.key import cache_key
from odtpack_runtime import CheckpointState
from tests.cli.conftest import Run
from tests.recipe.conftest import run
from tests.test_docs import prepare_encoder

__all__ = ["run"]

ABOVE = 'model = "encoder.onnx"\npackage = "package"\n'
BELOW = '[loss]\nkind = "cross_entropy"\n\n[parameters]\ntrain = ["head.*"]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare_encoder(tmp_path)
    return tmp_path


def written(folder: Path, head: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(f"{ABOVE}\n[head]\n{head}\n{BELOW}")
    return path


def test_the_package_is_that_of_the_command_and_a_build(run: Run, folder: Path) -> None:
    recipe = written(folder, 'pool = "mean"\nclasses = 3\nseed = 7\n')
    assert run("build", "--recipe", recipe).code == 0
    model, encoder = folder / "classifier.onnx", folder / "encoder.onnx"
    asked = ("--pool", "mean", "--classes", 3, "--seed", 7, "--out", model)
    assert run("head", encoder, *asked).code == 0
    built = ("--loss", "cross_entropy", "--train", "head.*", "--out", folder / "other")
    assert run("build", model, *built).code == 0
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"):
        assert (folder / "package" / name).read_bytes() == (folder / "other" / name).read_bytes()
    manifests = [
        json.loads((folder / p / "manifest.json").read_text()) for p in ("package", "other")
    ]
    assert manifests[0]["recipe_digest"] == manifests[1]["recipe_digest"]
    state = CheckpointState.load_checkpoint(folder / "package" / "checkpoint")
    assert state.parameters["head.weight"].data.shape == (3, 4)


def test_every_key_of_the_head_decides_the_package(folder: Path) -> None:
    mean = 'pool = "mean"\nclasses = 3'
    heads = (mean, 'pool = "cls"\nclasses = 3', 'pool = "mean"\nclasses = 4',
             f"{mean}\nseed = 1", f'{mean}\ninput = "hidden"')  # fmt: skip
    keys = {cache_key(BuildSpec.of(read_recipe(written(folder, head)))) for head in heads}
    assert len(keys) == len(heads)


@pytest.mark.parametrize(
    ("head", "key"),
    [
        ('pool = "max"\nclasses = 3', "head.pool"),
        ('pool = "cls"\nclasses = 0', "head.classes"),
        ('pool = "cls"', "head.classes"),
        ('pool = "cls"\nclasses = 3\nwidth = 4', "head.width"),
    ],
)
def test_what_is_no_head_is_refused_with_its_key(folder: Path, head: str, key: str) -> None:
    with pytest.raises(OdtpackError) as caught:
        read_recipe(written(folder, head))
    assert caught.value.code == "recipe-invalid"
    assert key in caught.value.what


def test_a_head_that_does_not_fit_is_refused_with_the_model(run: Run, folder: Path) -> None:
    for head, code in (("none", "head-without-input"), ('cls"\ninput = "no', "unknown-output")):
        outcome = run("build", "--recipe", written(folder, f'pool = "{head}"\nclasses = 3'))
        assert outcome.code == 2
        assert f"[{code}]" in outcome.err
        assert "encoder.onnx" in outcome.err
    assert not (folder / "package").exists()


def test_a_recipe_that_is_written_again_keeps_its_head(folder: Path) -> None:
    head = 'pool = "mean"\nclasses = 3\nseed = 7\ninput = "hidden"'
    spec = BuildSpec.of(read_recipe(written(folder, head)))
    around = Surroundings(folder=folder, package="package")
    (folder / "recipe.toml").write_text(recipe_text(spec, 8, around))
    assert BuildSpec.of(read_recipe(folder / "recipe.toml")).head == spec.head
