"""Every model that the product writes passes the ONNX checker, with full shape inference."""

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.capi import onnxruntime_pybind11_state
from torch import nn

from odtpack import targets
from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.choices import OrtFormat
from odtpack.cli import main
from odtpack.errors import OdtpackError
from odtpack.ort import kernel_needs
from odtpack.ort.files import add_ort_files
from odtpack.ort.kernel_needs import oldest_runtime, require
from odtpack.package.task import _Collector, paused_collector
from odtpack_runtime import CheckpointState, Package
from odtpack_runtime.package.verify import write_inference_model
from scripts.kernel_table import listed
from tests import zoo
from tests.exported.export import export
from tests.model_text import parsed
from tests.packaging_tools import open_training, trainable_names
from tests.refused import refused


def _exported(exporter: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(40, 3),
        ).eval()
        return export(module, {"x": torch.randn(2, 5, 8)}, folder / "model.onnx", exporter)

    return write


def _zoo(folder: Path) -> Path:
    onnx.save(zoo.mlp(), folder / "model.onnx")
    return folder / "model.onnx"


MODELS = {"torchscript": _exported("torchscript"), "dynamo": _exported("dynamo"), "zoo": _zoo}
STEP_MODELS = {"zoo": {"step_model.onnx"}}
"""The model with 2^18 trained elements has a step model."""


def _check(folder: Path) -> set[str]:
    template = folder / "inference_template.onnx"  # a model once its parameters are appended
    paths = sorted(set(folder.glob("*.onnx")) - {template})
    for path in paths:
        onnx.checker.check_model(str(path), full_check=True)
    return {path.name for path in paths}


@pytest.mark.parametrize("name", MODELS)
def test_packages_and_exported_models(name, tmp_path):
    model, package = MODELS[name](tmp_path), tmp_path / "package"
    build_package(model, package, loss="cross_entropy", ort_format=OrtFormat(), frozen_storage=None)
    output = onnx.load(model).graph.output[0].name
    _, module, _ = open_training(package)
    module.export_model_for_inferencing(package / "inference.onnx", [output])
    exported = tmp_path / "by_command.onnx"  # the command writes nothing into a package
    assert main(["export", str(package), "--out", str(exported)]) == 0
    exported.rename(package / exported.name)
    opened = Package.open(package)
    parameters = CheckpointState.load_checkpoint(opened.checkpoint).parameters
    write_inference_model(
        opened, {name: each.data for name, each in parameters}, package / "completed.onnx"
    )
    assert _check(package) == {
        "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "inference.onnx",
        "by_command.onnx", "completed.onnx", *STEP_MODELS.get(name, ()),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_artifacts(name, tmp_path):
    model, folder = MODELS[name](tmp_path), tmp_path / "artifacts"
    names = trainable_names(onnx.load(model)) if name == "zoo" else ["*"]
    generate_artifacts(
        model, requires_grad=names, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )  # fmt: skip
    models = {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"}
    assert _check(folder) == models | STEP_MODELS.get(name, set())


# What a build leaves to Python's cyclic garbage collector, and what it leaves alone.


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector as most programs know it; the tests' own heap is frozen."""
    monkeypatch.setattr(_Collector, "frozen", False)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@paused_collector()
def leave_a_knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def is_young(thing: object) -> bool:
    return any(each is thing for each in gc.get_objects(generation=0))


@pytest.mark.usefixtures("nothing_frozen")
def test_the_next_build_frees_what_one_left():
    left = leave_a_knot()
    knot = left()
    assert knot is not None
    assert not is_young(knot)
    assert gc.get_freeze_count() == 0
    del knot
    leave_a_knot()
    assert left() is None


def test_what_a_program_froze_stays_frozen():
    before = gc.get_freeze_count()
    assert before > 10_000  # by tests/conftest.py
    left = leave_a_knot()
    assert gc.get_freeze_count() == before
    gc.collect(0)  # which a young object does not survive
    assert left() is None


def test_frozen_objects_are_counted_once(monkeypatch):
    counted: list[int] = []
    monkeypatch.setattr(_Collector, "frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1)
    leave_a_knot()
    leave_a_knot()
    assert counted == [1]


def test_a_paused_collector_stays_paused():
    gc.disable()
    try:
        leave_a_knot()
        assert not gc.isenabled()
    finally:
        gc.enable()


# The oldest ONNX Runtime that loads a package follows from its kernels and their types.

TABLE = json.loads(Path(kernel_needs.__file__).with_name("kernels.json").read_bytes())


def model(text: str, opset: int = 13) -> ir.Model:
    return ir.from_proto(parsed(text, opset, ir_version=7))


@pytest.mark.parametrize(("text", "release"), [
    # The split value has no declared type: it is inferred.
    ("(float[4] x) => (bool[2] y) { b = Cast<to=9>(x) y, z = Split(b) }", "1.14"),
    ("(float[4] x) => (float[2] y) { y, z = Split(x) }", "1.8"),
    ("(float16[4] x) => (float16[4] y) { y = Clip(x) }", "1.8"),  # computed as float
    ("(int32[4] x) => (int32[4] y) { y = Clip(x) }", "1.14"),
])  # fmt: skip
def test_types_count(text, release):
    assert oldest_runtime([model(text)]).name == release


def test_types_inside_bodies_count():
    text = """(bool c, int32[4] x) => (int32[4] y) {
      y = If (c) <then_branch = t () => (int32[4] a) { a = Clip(x) },
                  else_branch = e () => (int32[4] b) { b = Identity(x) }> }"""
    need = oldest_runtime([model(text)])
    assert need.name == "1.14"
    assert need.why == "Clip of opset 13 with int32"


def test_a_release_that_knows_an_opset_may_lack_its_kernels():
    need = oldest_runtime([model("(float[4] x) => (float[4] y) { y = Identity(x) }", opset=19)])
    assert targets.lowest_target(19).name == "1.15"
    assert (need.name, need.why) == ("1.16", "Identity of opset 19")


def test_all_that_is_too_new_is_named():
    text = "(int32[4] x) => (int32[4] y) { z = Clip(x)  y = Identity(z) }"
    with pytest.raises(OdtpackError, match=r"Identity of opset 19.*; Clip of opset 13 with int32"):
        require("1.13", oldest_runtime([model(text, opset=19)]))


def test_the_demo_says_what_loads_it(tmp_path):
    demo = zoo.cnn(size=8, width=(16, 32))
    assert build_package(demo, tmp_path / "p", loss="cross_entropy").minimum_onnxruntime == "1.12"
    with pytest.raises(OdtpackError, match=r"1\.11.*1\.12") as error:
        build_package(demo, tmp_path / "q", loss="cross_entropy", onnxruntime="1.11")
    assert error.value.code in ("target-cannot-load", "opset-too-new")
    assert not (tmp_path / "q").exists()
    build_package(demo, tmp_path / "q", loss="cross_entropy", onnxruntime="1.12")


def test_files_in_ort_format_count(tmp_path):
    mlp = zoo.mlp((6, 5, 4))
    built = build_package(
        mlp, tmp_path / "p", loss="cross_entropy", ort_format=OrtFormat(), onnxruntime="1.16"
    )
    assert built.minimum_onnxruntime == "1.16"
    with refused("target-cannot-load", "ORT format"):
        build_package(
            mlp, tmp_path / "q", loss="cross_entropy", ort_format=OrtFormat(), onnxruntime="1.15"
        )
    assert not (tmp_path / "q").exists()
    assert build_package(mlp, tmp_path / "q", loss="cross_entropy").minimum_onnxruntime == "1.12"
    add_ort_files(Package.open(tmp_path / "q"), OrtFormat())
    assert Package.open(tmp_path / "q").manifest.minimum_onnxruntime == "1.16"


def test_the_targets_are_those_of_the_table():
    for release, formats in TABLE["formats"].items():
        version = targets.parsed(release)[:2]
        newest = [target for target in targets.TARGETS if target.version <= version][-1]
        assert (newest.opset, newest.ir_version) == (formats["opset"], formats["ir_version"])


def test_the_table_has_the_kernels_of_the_installed_release():
    """Every kernel that this ONNX Runtime lists is in the table, at some release.

    A release may be newer than the table: it still has all that takes float32.
    """
    kernels = [
        (k.domain or "ai.onnx", k.op_name, k.version_range, dict(k.type_constraints))
        for k in onnxruntime_pybind11_state.get_all_opkernel_def()
        if k.provider == "CPUExecutionProvider"
    ]
    here = {(*k[:4], _short(k[4])) for k in listed(kernels)}
    held = {
        (domain, *_name_and_version(key), constraint, name)
        for domain, operators in TABLE["kernels"].items()
        for key, constraints in operators.items()
        for constraint, since in constraints.items()
        for names in since.values()
        for name in names
    }
    newest = max(targets.parsed(release)[:2] for release in TABLE["formats"])
    if targets.parsed(onnxruntime.__version__)[:2] > newest:
        standard = {kernel for kernel in held if kernel[0] == "ai.onnx" and kernel[4] == "float"}
        assert not standard - here
    else:
        assert not here - held


def _name_and_version(key: str) -> tuple[str, int]:
    name, version = key.split(";")
    return name, int(version)


def _short(name: str) -> str:
    return name.removeprefix("tensor(").removesuffix(")") if name.startswith("tensor(") else name
