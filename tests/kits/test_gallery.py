"""The training loops of the example projects, in each kit's language."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from odtpack.cli import model
from odtpack_runtime.checkpoint.format import read_checkpoint
from tests.cli.test_gallery import commands, run_command
from tests.kits import javascript, kotlin_kit, swift_kit
from tests.kits.kotlin_kit import finish
from tests.once import made_once

pytestmark = pytest.mark.kits
EXAMPLES = model.names()
STEPS = 25
each_example = pytest.mark.parametrize("name", EXAMPLES)


@pytest.fixture
def project(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its package and its samples."""

    def make(folder: Path) -> None:
        model.write_example(name, folder)
        for words in commands((folder / "README.md").read_text())[:3]:
            run_command(words, folder)

    return shutil.copytree(made_once(tmp_path_factory, f"gallery-{name}", make), tmp_path / name)


def check(project: Path, words: Sequence[str]) -> None:
    """All steps are made, or all but those of a batch with a NaN, which is passed over."""
    finish([*words], cwd=project)
    assert read_checkpoint(project / "trained.ckpt").optimizer.step == STEPS
    assert (project / "personal.onnx").stat().st_size > 0
    manifest = json.loads((project / "package" / "manifest.json").read_text())
    name = next((each["name"] for each in manifest["inputs"] if each["dtype"] == "float32"), None)
    if name is None:
        return
    with (project / "data" / f"{name}.bin").open("r+b") as samples:
        samples.write(np.float32(np.nan).tobytes())
    (project / "trained.ckpt").unlink()
    finish([*words], cwd=project)
    state, each = read_checkpoint(project / "trained.ckpt"), manifest.get("accumulation_steps", 1)
    assert state.properties["app.batches"] == STEPS * each
    # A step of several batches is made of the others.
    assert 0 < state.optimizer.step < STEPS + (each > 1)


@each_example
@pytest.mark.skipif(javascript.unavailable() is not None, reason=str(javascript.unavailable()))
def test_in_node(project):
    modules = project / "node_modules"
    modules.mkdir()
    (modules / "odtpack").symlink_to(javascript.KIT)
    for name in ("onnxruntime-node", "onnxruntime-common"):
        (modules / name).symlink_to(javascript.KIT / "node_modules" / name)
    check(project, [str(javascript.NODE), "train.mjs", str(STEPS)])


@pytest.fixture(scope="module")
def kotlin_loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The loops of all projects, each in a Kotlin package of its own."""
    folder = tmp_path_factory.mktemp("kotlin")
    sources = []
    for number, name in enumerate(EXAMPLES):
        model.write_example(name, folder / name)
        sources.append(folder / name / "Train.kt")
        sources[-1].write_text(f"package example{number}\n{sources[-1].read_text()}")
    kotlin_kit.compile_kotlin(folder / "classes", sources)
    return folder / "classes"


@each_example
@pytest.mark.skipif(kotlin_kit.unavailable() is not None, reason=str(kotlin_kit.unavailable()))
def test_on_the_jvm(kotlin_loops, project, name):
    path = os.pathsep.join([str(kotlin_loops), kotlin_kit.class_path()])
    main = f"example{EXAMPLES.index(name)}.TrainKt"
    check(project, ["java", *kotlin_kit.OPTIONS, "-cp", path, main, str(STEPS)])


@pytest.fixture(scope="module")
def swift_loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The loops of all projects, built at once."""
    folder = tmp_path_factory.mktemp("swift")
    programs = {}
    for name in EXAMPLES:
        model.write_example(name, folder / name)
        programs[f"run-{name}"] = {"main.swift": (folder / name / "Train.swift").read_text()}
    swift_kit.apps(folder, programs)
    return folder


@each_example
@pytest.mark.skipif(swift_kit.unavailable() is not None, reason=str(swift_kit.unavailable()))
def test_in_swift(swift_loops, project, name):
    check(project, swift_kit.command(swift_loops / f"run-{name}", STEPS))
