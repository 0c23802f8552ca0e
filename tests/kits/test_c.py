"""The C interface of the C++ kit: C99, with an ONNX Runtime that the program opens itself."""

import re
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import default_session_options
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.training.loop import loss_of
from tests import zoo
from tests.kits.cpp_kit import DEPENDENCIES, KIT, ROOT, SANITIZE, unavailable
from tests.kits.harness import needs
from tests.packages.samples import build
from tests.packaging_tools import open_training
from tests.programs import ran

pytestmark = needs(unavailable())
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
FLAGS = ("-I", KIT / "include", "-isystem", DEPENDENCIES / "include")


def run(*words: object) -> str:
    return ran(*words).stdout


def compiled(folder: Path, *options: str) -> Path:
    """The object file of the interface."""
    target = folder / "odtpack.o"
    run("g++", "-std=c++17", "-O0", *options, "-Wall", "-Wextra", "-Werror", *FLAGS,
        "-c", KIT / "src" / "odtpack.cpp", "-o", target)  # fmt: skip
    return target


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That with sanitizers."""
    return compiled(tmp_path_factory.mktemp("core"), *SANITIZE.split())


def test_nothing_of_onnx_runtime_is_linked(core):
    symbols = run("nm", core)
    assert not re.findall(r"^ +U .*(?:Ort|onnx).*$", symbols, re.M)
    assert "T odtpack_session_create" in symbols


@pytest.mark.parametrize("compiler", [
    ("gcc", "-std=c99"), ("g++", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-x", "c++"),
])  # fmt: skip
def test_c_trains_as_python_does(compiler, core, tmp_path):
    """A caller in C99, and one in C++ that knows no exceptions."""
    check_training(compiler, core, "address,undefined", tmp_path)


def test_numbers_are_read_while_a_session_trains(tmp_path):
    core = compiled(tmp_path, "-fsanitize=thread")
    check_training(("gcc", "-std=c99", "-fsanitize=thread"), core, "thread", tmp_path)


def check_training(compiler: tuple[str, ...], core: Path, sanitizers: str, tmp_path: Path) -> None:
    package = build(tmp_path / "package", zoo.cnn(size=8, width=(4, 8), classes=3))
    rng = np.random.default_rng(3)
    images = rng.standard_normal((8, 1, 8, 8), dtype=np.float32)
    labels = rng.integers(0, 3, 8)
    images.tofile(tmp_path / "images")
    labels.tofile(tmp_path / "labels")
    run(*compiler, "-g", *WARNINGS, *FLAGS, "-c", ROOT / "tests" / "kits" / "c" / "train.c",
        "-o", tmp_path / "train.o")  # fmt: skip
    run("g++", f"-fsanitize={sanitizers}", tmp_path / "train.o", core, "-ldl", "-pthread",
        "-o", tmp_path / "train")  # fmt: skip
    saved = tmp_path / "c.ckpt"
    printed = run(
        "env", "ASAN_OPTIONS=detect_leaks=0", tmp_path / "train",
        DEPENDENCIES / "lib" / "libonnxruntime.so", package, tmp_path / "images",
        tmp_path / "labels", saved,
    )  # fmt: skip

    options = default_session_options(package / "training_model.onnx", threads=1)
    state, module, optimizer = open_training(package, options)
    losses = []
    for step in range(12):
        optimizer.set_learning_rate(0.01 * (step / 2 if step < 2 else (12 - step) / 10))
        losses.append(float(module(images, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    losses.append(loss_of(module.eval()(images, labels)))
    assert [float(line) for line in printed.split()] == losses
    data, before = read_checkpoint(saved), read_checkpoint(tmp_path / "c.ckpt.previous")
    assert (data.optimizer.step, before.optimizer.step) == (12, 6)
    for name, array in data.trainable.items():
        np.testing.assert_array_equal(array, np.asarray(state.parameters[name].data))


def test_what_the_guide_shows_compiles(tmp_path):
    guide = (ROOT / "docs" / "guides" / "cpp.md").read_text()
    session, tokens = re.findall(r"^```c\n(.*?)^```$", guide, re.M | re.S)
    source = tmp_path / "guide.c"
    source.write_text(
        '#include <stdio.h>\n#include "odtpack.h"\n'
        "void open_session(const OrtEnv* env, odtpack_package* package, odtpack_state* state) {\n"
        f"{session}{tokens}odtpack_session_release(session);\n}}\n"
    )
    run("gcc", "-std=c99", "-fsyntax-only", *WARNINGS, *FLAGS, source)
