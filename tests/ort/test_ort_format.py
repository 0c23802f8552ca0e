"""Models in ORT format: what they hold, their place in the package, and how they train."""

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.tools.ort_format_model
import pytest

from odtpack.build import build_package
from odtpack.choices import OrtFormat, Platform, Style
from odtpack.errors import OdtpackError
from odtpack.ort import session_runs
from odtpack.ort.files import Inference, add_ort_files
from odtpack.ort.format import RuntimeOptimizations, convert_model, convert_variants, recorded_level
from odtpack.ort.session_runs import TRAINING_MODELS, SampleFeeds
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.files.records import InvalidRecordError
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SessionInfo
from odtpack_runtime.session.options import default_session_options
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_arenas, plan_memory
from odtpack_simulator.replay.job import Job, SamplePlan
from odtpack_simulator.replay.replay import run_training_child, with_sessions
from tests import zoo
from tests.model_text import LEVELS
from tests.ort.models import BOTH_STYLES, EVERYTHING, MODELS, package_of
from tests.packaging_tools import batch, losses_of_steps
from tests.refused import refused

LEVEL_VARIABLE = "ORT_CONVERT_ONNX_MODELS_TO_ORT_OPTIMIZATION_LEVEL"


def content(path: Path) -> list[Any]:
    """Nodes in order, and initializers sorted: ONNX Runtime writes them in any order."""
    module = importlib.import_module("ort_flatbuffers_py.fbs.InferenceSession")
    graph = module.InferenceSession.GetRootAsInferenceSession(path.read_bytes(), 0).Model().Graph()
    nodes = [
        (node.OpType(), node.Domain(), node.SinceVersion(),
         [node.Inputs(i) for i in range(node.InputsLength())],
         [node.Outputs(i) for i in range(node.OutputsLength())])
        for node in map(graph.Nodes, range(graph.NodesLength()))
    ]  # fmt: skip
    tensors = map(graph.Initializers, range(graph.InitializersLength()))
    return [nodes, sorted((tensor.Name(), bytes(tensor.RawDataAsNumpy())) for tensor in tensors)]


@pytest.mark.parametrize("platform", [None, *Platform])
@pytest.mark.parametrize("style", Style)
def test_the_content_is_that_of_the_reference_converter(
    style, platform, tmp_path, monkeypatch,
    shared_package,
):  # fmt: skip
    from onnxruntime.tools.convert_onnx_models_to_ort import (
        OptimizationStyle,
        convert_onnx_models_to_ort,
    )

    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
    package = shared_package("cnn", None)
    for key in ("training_model", "eval_model"):
        model = getattr(package, key)
        monkeypatch.setenv(LEVEL_VARIABLE, recorded_level(model))
        folder = tmp_path / key
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            name = None if platform is None else platform.value
            styles = [OptimizationStyle[style.name.title()]]
            convert_onnx_models_to_ort(model, folder, styles, target_platform=name)
        (expected,) = folder.glob("*.ort")
        runtime: RuntimeOptimizations | None = "save" if style is Style.RUNTIME else None
        convert_model(model, tmp_path / "own.ort", platform=platform, runtime=runtime)
        assert content(tmp_path / "own.ort") == content(expected)
        # ONNX Runtime writes some tables in an order that varies, and so pads differently.
        size = (tmp_path / "own.ort").stat().st_size
        assert size == pytest.approx(expected.stat().st_size, rel=0.01)


def test_only_amd64_lays_convolutions_out_in_blocks(tmp_path):
    model = tmp_path / "forward.onnx"
    onnx.save(zoo.cnn(size=8, width=(8, 16), classes=4), model)
    domains = {}
    for platform in (None, *Platform):
        convert_model(model, tmp_path / "m.ort", platform=platform)
        domains[platform] = {domain for _, domain, *_ in content(tmp_path / "m.ort")[0]}
    assert b"com.microsoft.nchwc" in domains[Platform.AMD64]
    assert b"com.microsoft.nchwc" not in domains[Platform.ARM] | domains[None]


@pytest.mark.parametrize(("level", "fused"), [("basic", False), ("extended", True)])
def test_the_level_is_the_one_that_the_model_records(level, fused, tmp_path):
    model = onnx.load(package_of("cnn", tmp_path / "p").eval_model)
    onnx.helper.set_model_props(model, {"odtpack.optimization_level": level})
    onnx.save(model, tmp_path / "m.onnx")
    convert_model(tmp_path / "m.onnx", tmp_path / "m.ort")
    assert (b"FusedConv" in {name for name, *_ in content(tmp_path / "m.ort")[0]}) is fused


def test_names():
    assert OrtFormat().names("m") == ["m.ort"]
    assert BOTH_STYLES.names("m") == ["m.ort", "m.with_runtime_opt.ort"]
    assert OrtFormat(platforms=(Platform.ARM,)).names("m") == ["m.ort"]
    ends = ("arm.ort", "arm.with_runtime_opt.ort", "amd64.ort", "amd64.with_runtime_opt.ort")
    assert EVERYTHING.names("m") == [f"m.{end}" for end in ends]


def losses_of(package: Package, models: dict[str, Path], level: str, **entries: str) -> list[float]:
    """Losses of five steps and of an evaluation."""
    options = default_session_options(models["training_model"])
    options.graph_optimization_level = LEVELS[level]
    for key, value in entries.items():
        options.add_session_config_entry(key.replace("__", "."), value)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(models["training_model"], state, models["eval_model"], session_options=options)
    optimizer = Optimizer(models["optimizer_model"], module)
    optimizer.set_learning_rate(0.01)
    feeds = SampleFeeds(package)("training_model", package.training_model)
    batch = [feeds[item.name] for item in package.manifest.inputs]
    losses = losses_of_steps(module, optimizer, [batch] * 5)
    evaluated = module.eval()(*batch)
    return [*losses, float(evaluated[0] if isinstance(evaluated, tuple) else evaluated)]


@pytest.mark.parametrize("name", MODELS)
def test_training_from_ort_format_is_training_from_onnx(name, tmp_path):
    package = package_of(name, tmp_path, BOTH_STYLES)
    plain = {key: getattr(package, key) for key in TRAINING_MODELS}
    # Parameters are inputs, so there is no constant convolution weight to lay out anew, and
    # both levels give the evaluation model the same graph.
    expected = losses_of(package, plain, "extended")
    assert expected[4] < expected[0]
    fixed = {key: package.ort_model(key) for key in TRAINING_MODELS}
    assert losses_of(package, fixed, "all") == expected
    late = {key: package.ort_model(key, "runtime") for key in TRAINING_MODELS}
    for replay in "01":
        entry = {"session__enable_saved_runtime_optimizations": replay}
        np.testing.assert_allclose(losses_of(package, late, "all", **entry), expected, rtol=1e-5)


def test_the_manifest_lists_every_file(tmp_path):
    package = package_of("mlp", tmp_path / "p", EVERYTHING)
    files = package.manifest.files
    held = {path.name for path in package.path.iterdir()} - {"manifest.json"}
    assert held == {file.path for file in files.all()}
    assert len(files.all()) == len(held)
    models = [file for file in files.extra if file.role == "ort_model"]
    assert {(f.of, f.style, f.platform) for f in models} == {
        (key, style.value, platform.value)
        for key in TRAINING_MODELS
        for style in Style
        for platform in Platform
    }
    configs = [file for file in files.extra if file.role != "ort_model"]
    assert sorted((file.path, file.role, file.of) for file in configs) == [
        ("eval_model.required_operators.config", "operators_config", "eval_model"),
        ("optimizer_model.required_operators.config", "operators_config", "optimizer_model"),
        ("required_operators.config", "operators_config", None),
        ("required_operators_and_types.config", "operators_and_types_config", None),
        ("training_model.required_operators.config", "operators_config", "training_model"),
    ]


def _claim(package: Path, path: str) -> None:
    """The manifest says that a file lies elsewhere."""
    manifest = json.loads((package / "manifest.json").read_text())
    manifest["files"]["extra"][0]["path"] = path
    del manifest["digest"]
    (package / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("change", ["damaged", "missing", "outside"])
def test_a_changed_file_is_refused(change, tmp_path):
    path = package_of("mlp", tmp_path, OrtFormat()).ort_model("eval_model")
    if change == "damaged":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif change == "missing":
        path.unlink()
    else:
        _claim(tmp_path, "../training_model.ort")
    codes = {"damaged": "changed", "missing": "incomplete", "outside": "path"}
    with refused(f"package-{codes[change]}"):
        Package.open(tmp_path)


def test_a_model_that_is_not_held(tmp_path):
    package = package_of("mlp", tmp_path, OrtFormat())
    with pytest.raises(OdtpackError, match="no eval_model in ORT format of style runtime for arm"):
        package.ort_model("eval_model", "runtime", "arm")


def test_a_package_gets_ort_format_later(tmp_path):
    plain = package_of("cnn", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    add_ort_files(plain, EVERYTHING)
    package = Package.open(tmp_path)
    add_ort_files(package, OrtFormat())
    package = Package.open(tmp_path)
    expected = {file.path for file in package.manifest.files.extra} | names
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert package.ort_model("training_model").name == "training_model.ort"
    assert "training_model.arm.ort" not in expected


def test_an_inference_model_stays_when_ort_format_is_written_anew(tmp_path):
    package = package_of("cnn", tmp_path)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    inference = Inference(("output",), state.arrays(trainable=True))
    add_ort_files(package, OrtFormat(), inference)
    add_ort_files(Package.open(tmp_path), EVERYTHING)
    package = Package.open(tmp_path)
    x = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    paths = [package.ort_model("inference_model", "fixed", p.value) for p in Platform]
    sessions = [onnxruntime.InferenceSession(str(path)) for path in paths]
    forward = onnxruntime.InferenceSession(MODELS["cnn"][0]().SerializeToString())
    (expected,) = forward.run(None, {"input": x})
    for session in sessions:
        (result,) = session.run(None, {"input": x})
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


def test_a_refused_conversion_leaves_the_package_as_it_was(tmp_path, monkeypatch):
    package = package_of("mlp", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(model: Path, *rest: Any) -> Any:
        if "optimizer" in model.name:
            raise OdtpackError("ort-conversion-failed", "no")
        return convert_variants(model, *rest)

    monkeypatch.setattr("odtpack.ort.files.convert_variants", refuse)
    with pytest.raises(OdtpackError, match="no"):
        add_ort_files(package, EVERYTHING)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_build_into_a_package_removes_nothing_that_a_manifest_claims_outside(tmp_path):
    package = package_of("mlp", tmp_path / "p", OrtFormat())
    (tmp_path / "mine.txt").write_text("mine")
    _claim(package.path, "../mine.txt")
    build_package(MODELS["mlp"][0](), package.path, loss="cross_entropy")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_model_that_onnx_runtime_refuses(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with refused("ort-conversion-failed"):
        convert_model(tmp_path / "m.onnx", tmp_path / "m.ort")
    assert not (tmp_path / "m.ort").exists()


# The arena that a build fits to the plan holds less in a real training.

SIZE = 8


@pytest.fixture(scope="module")
def mobile(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """MobileNetV2 for small images, whose requests are of many sizes."""
    folder = tmp_path_factory.mktemp("mobile")
    model = zoo.mobilenet_v2(size=64, width_mult=0.5)
    build_package(model, folder / "package", loss="cross_entropy")
    inputs, labels = batch(model, 5 * SIZE)
    np.save(folder / "input.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return Package.open(folder / "package")


def shapes(package: Package) -> dict[str, tuple[int, ...]]:
    return {n: (SIZE, *array.shape[1:]) for n, array in _data(package).items()}


def with_session(package: Package, **changes: int | None) -> Package:
    session = package.manifest.session
    assert session is not None
    changed = dataclasses.replace(session, **changes)
    return dataclasses.replace(
        package, manifest=dataclasses.replace(package.manifest, session=changed)
    )


def usual(package: Package) -> Package:
    return with_session(package, initial_chunk_size_bytes=None, max_dead_bytes_per_chunk=None)


def planned(package: Package, ballast: int = 0, evaluates: bool = True) -> int:
    plans = plan_arenas(package, shapes(package), session_use(package.manifest))
    return plans.plan(package.manifest.session, ballast=ballast, evaluates=evaluates).peak.nbytes


def test_a_real_training_takes_less(mobile):
    assert planned(usual(mobile)) - planned(mobile) > 2**20
    peaks = []
    for package in (usual(mobile), mobile):
        (package.path / "manifest.json").write_text(package.manifest.to_json())
        found = run_training_child(_job(package)).peak_bytes
        if found is None:
            pytest.skip("memory is measured on Linux only")
        peaks.append(found)
    assert peaks[0] - peaks[1] > 2**19


def test_no_other_settings_hold_less_in_kits_that_differ_a_little(mobile):
    def most(package: Package) -> int:
        others = (planned(package, ballast) - ballast for ballast in (0, *session_runs._BALLASTS))
        return max(planned(package, evaluates=False), *others)

    least = most(mobile)
    for first in (2**20, 2**22, 2**23, 2**24):
        for dead in (None, 2**16):
            other = with_session(
                mobile, initial_chunk_size_bytes=first, max_dead_bytes_per_chunk=dead
            )
            assert least <= most(other), (first, dead)


def test_what_the_arena_must_hold_besides_is_counted(mobile):
    """A MiB that lies in the way takes about a MiB, unless the arena grows for it."""
    assert planned(mobile, 2**20) >= planned(mobile) + 2**19


def test_a_budget_is_kept_with_the_arena_that_it_was_planned_with(tmp_path):
    """It is planned without the step model, so that one decides nothing about the arena."""
    model = zoo.mobilenet_v2(size=64, width_mult=0.5)
    budget = 33_000_000
    build_package(
        model, tmp_path / "package", loss="cross_entropy", memory_budget=f"{budget} B",
        memory_batch=SIZE, self_check=False,
    )  # fmt: skip
    package = Package.open(tmp_path / "package")
    assert package.step_model is not None
    sizes = {i.name: (SIZE, *i.shape[1:]) for i in package.manifest.inputs}
    assert plan_memory(package, sizes).peak.nbytes <= budget  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["initial_chunk_size_bytes", "max_dead_bytes_per_chunk"])
@pytest.mark.parametrize("size", [-1, 0, 255, 2**30 + 1, 2.5, "1 MB"])
def test_sizes_that_make_no_sense_are_refused(key, size):
    with pytest.raises(InvalidRecordError, match=key):
        SessionInfo.read({"optimization_level": "all", key: size})


def _data(package: Package) -> dict[str, np.ndarray]:
    return {name: np.load(package.path.parent / f"{name}.npy") for name in ("input", "labels")}


def _job(package: Package) -> Job:
    folder = package.path.parent
    data = {name: str(folder / f"{name}.npy") for name in ("input", "labels")}
    files = (package.training_model, package.eval_model, package.optimizer_model)
    job = Job(
        "train", *map(str, files), str(package.checkpoint), str(folder), data,
        SamplePlan(5 * SIZE, SIZE, 1, 0, full_batches=True), learning_rate=1e-3, threads=1,
    )  # fmt: skip
    return with_sessions(job, package, session_use(package.manifest))
