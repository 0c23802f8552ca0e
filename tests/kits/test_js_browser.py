"""The JavaScript kit in Chromium against Python: WebAssembly on one thread and on two, WebGPU."""

import base64
import re
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks import gpu
from benchmarks.decoder.model import SHAPES, write_model
from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Generator, Package
from odtpack_runtime.checkpoint.format import read_checkpoint
from tests import zoo
from tests.kits import javascript, js_fixtures, web
from tests.kits.harness import needs
from tests.kits.javascript import train
from tests.kits.js_fixtures import GUIDE, STEPS, guide_code
from tests.kits.measured import check_measurements
from tests.kits.test_decoder import built as built_decoder
from tests.kits.test_segments import built, three_lengths
from tests.reports.browser import CHROMIUM, Browser
from tests.software_gpu import NETWORKS, TRIED, package_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    *needs(javascript.unavailable()),
]
packages, batch, suite = js_fixtures.packages, js_fixtures.batch, js_fixtures.suite
digits_package = js_fixtures.digits_package


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = (
        *("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"),
        *("--enable-precise-memory-info", "--js-flags=--expose-gc"),
    )
    with Browser(tmp_path_factory.mktemp("chromium"), served=True, options=options) as opened:
        yield opened


def trained_as_in_python(found, wanted, task, folder):
    """Check losses, and what the browser saved, with which Python goes on."""
    for loss, right in zip(found["losses"], wanted, strict=True):
        assert abs(loss - right) <= 2e-6 * max(1, abs(right))
    (folder / "browser.ckpt").write_bytes(base64.b64decode(found["saved"]))
    state = CheckpointState.load_checkpoint(folder / "browser.ckpt")
    for name, array in read_checkpoint(folder / "python.ckpt").trainable.items():
        np.testing.assert_allclose(state.parameters[name].data, array, atol=1e-4)
    resumed = {**task, "checkpoint": folder / "browser.ckpt", "steps": 1}
    assert train(resumed, "python")["losses"][0] < wanted[0]


@pytest.mark.parametrize("threads", [1, 2])
def test_chromium_trains_as_python_does(threads, packages, batch, browsers, tmp_path):
    task = {"package": packages["adamw"], "data": batch, "steps": STEPS, "rate": 0.01}
    wanted = train({**task, "save": tmp_path / "python.ckpt"}, "python")["losses"]
    found = in_browser(browsers, task, tmp_path, query=f"?threads={threads}")
    assert (found["threads"], found["isolated"]) == (threads, True)
    assert (found["step"], found["checked"], found["kept"]) == (STEPS, True, 2)
    nothing, recovered, saves = found["recovered"]
    assert nothing is saves is None
    assert "of optimizer step 20: what was trained since is lost" in recovered
    trained_as_in_python(found, wanted, task, tmp_path)


def test_chromium_trains_segment_by_segment(browsers, tmp_path):
    model = write_model(SHAPES["small"], tmp_path / "model")
    package = built(model, tmp_path / "package", base="int4")
    task = {"package": package, "batches": three_lengths(tmp_path), "steps": 7, "rate": 0.01}
    wanted = train({**task, "save": tmp_path / "python.ckpt"}, "python")["losses"]
    found = in_browser(browsers, task, tmp_path)
    assert wanted[6] < wanted[0]
    trained_as_in_python(found, wanted, task, tmp_path)


def test_chromium_writes_an_adapter_and_generates(browsers, tmp_path):
    package = built_decoder("genai-qwen2-int4", tmp_path / "package")
    ids = np.random.default_rng(1).integers(0, 128, (2, 12))
    task = {"package": package.path, "data": javascript.save_batch(tmp_path, input_ids=ids),
            "prompt": [*range(3, 9)]}  # fmt: skip
    found = in_browser(browsers, task, tmp_path, program="generate")
    (tmp_path / "it.onnx_adapter").write_bytes(base64.b64decode(found["saved"]))
    generator = Generator(package)
    generator.add_adapter("it", tmp_path / "it.onnx_adapter")
    wanted = [*generator.generate(task["prompt"], adapter="it", max_tokens=9)]
    assert found["found"] == [wanted] * 3
    assert wanted != [*generator.generate(task["prompt"], max_tokens=9)]


def test_chromium_does_not_grow_with_steps(packages, batch, browsers, tmp_path):
    task = {"package": packages["adamw"], "data": batch, "steps": 2001, "rate": 0.001}
    held = in_browser(browsers, {**task, "measure": [500, 1250, 2000]}, tmp_path)["held"]
    wasm, heap = zip(*held, strict=True)
    assert wasm[0] > 10e6
    assert len(set(wasm)) == 1
    assert heap[2] - heap[1] < 0.5e6


def in_browser(browser, task, tmp_path, *, query="", module="ort.wasm.min.mjs", program="train"):
    """Run a program of ``js/page.mjs`` in a page that is served a package and a batch."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "package").symlink_to(task["package"])
    for number, batch in enumerate(task.get("batches") or [task["data"]]):
        for name, each in batch.items():
            (files / f"{number}-{name}.bin").symlink_to(each["file"])
    page = web.PAGE.replace("ort.wasm.min.mjs", module)
    with web.serve({**web.FOLDERS, "files": files}, page) as address:
        web.open_kit(browser, address + query)
        return dict(web.run(browser, program, task))


@pytest.mark.parametrize("threads", [1, 2])
def test_chromium_passes_the_conformance_suite(threads, suite, npm, browsers):
    kit = {"odtpack": npm / "odtpack" / "dist", "flatbuffers": npm / "flatbuffers" / "mjs"}
    with web.serve({**web.FOLDERS, **kit, "suite": suite}) as address:
        web.open_kit(browsers, f"{address}?threads={threads}")
        results = web.run(browsers, "suite")
    assert len(results) >= 50
    assert {name: result for name, result in results.items() if isinstance(result, str)} == {}


def test_the_benchmark_measures_arithmetic_in_a_browser(browsers):
    with web.serve(web.FOLDERS) as address:
        web.open_kit(browsers, f"{address}?threads=1")
        code = "kit.benchmark({ ort, memoryLimit: 500_000_000 }).then(JSON.stringify)"
        printed = str(browsers.evaluate(code))
    unmeasured = ("write_bytes_per_second", "read_bytes_per_second", "sync_seconds")
    check_measurements(printed, "js", javascript.runtime_version(), "web", unmeasured)


@pytest.mark.parametrize("module", ["ort.webgpu.min.mjs", "ort.all.min.mjs"])
def test_webgpu_trains_right_or_is_refused(module, packages, batch, browsers, tmp_path):
    task = {"package": packages["adamw"], "data": batch, "steps": STEPS, "rate": 0.01}
    wanted = train(task, "python")["losses"]
    browsers.console.clear()
    task["providers"] = ["webgpu"]
    found = in_browser(browsers, task, tmp_path, module=module)
    if "code" in found:
        # The provider of ort.all 1.30 passes a limit of storage buffers, without an error.
        assert found["code"] == "unsupported-device"
        assert "does not run right on webgpu: " in found["what"]
    else:
        np.testing.assert_allclose(found["losses"], wanted, rtol=1e-4)


def test_the_guides_code_for_a_browser_trains(digits_package, browsers):
    (imports,) = re.findall(r"^```html\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    page = f"<!doctype html><title></title>{imports}<script type=module>{guide_code()[1]}</script>"
    with web.serve({**web.FOLDERS, "package": digits_package}, page) as address:
        browsers.console.clear()
        browsers.open(address)
        web.wait(browsers, "document.title")
        loss, dims, size, step = browsers.evaluate("document.title").split(" ")
    assert 0 < float(loss) < 10
    assert (dims, step) == ("2,10", "1")
    assert int(size) > 2_000


@pytest.mark.parametrize("network", NETWORKS[:3])
def test_webgpu_holds_a_training(network, browsers, tmp_path):
    folder = package_of(network, "webgpu", tmp_path)
    package = Package.open(folder)
    arrays = gpu.batch_of(package, 2, other=4)
    names = [each.name for each in package.manifest.inputs]
    data = javascript.save_batch(tmp_path / "batch", **dict(zip(names, arrays, strict=True)))
    task = {"package": folder, "data": data, "steps": 4, "rate": 0.01}
    wanted = train({**task, "save": tmp_path / "python.ckpt"}, "python")["losses"]
    task["providers"] = ["webgpu"]
    program = {"module": "ort.webgpu.min.mjs", "program": "resident"}
    found = in_browser(browsers, task, tmp_path, **program)
    assert "code" not in found, found
    np.testing.assert_allclose(found["losses"], wanted, rtol=2e-5)
    assert found["part"] == "unsupported-device"
    trained = read_checkpoint(tmp_path / "python.ckpt").trainable
    order = [each.name for each in package.manifest.parameters if each.name in trained]
    vector = np.concatenate([trained[name].ravel() for name in order])
    # AdamW moves elements whose gradients are rounding by the rate, one way or the other.
    assert np.mean(np.abs(np.array(found["vector"]) - vector) < 1e-4) > 0.99
    is_real = arrays[0].dtype == np.float32
    assert found["skipped"] == int(is_real)
    assert found["step"] in (10, 11)  # a step of finite loss is counted, if not for all parameters
    # From the saved state on; every other loss is read, and nothing else.
    rest = found["rest"]
    np.testing.assert_allclose(rest[0], found["evaluated"], rtol=1e-5)
    assert (rest[0], rest[2]) == (rest[1], rest[3])
    assert rest[2] < rest[0] < wanted[0]
    assert found["read"][1] == []
    assert "loss" in found["read"][0]
    # The check of the device opened three models more, once; its result is kept.
    assert found["checks"] == [6, 3]
    assert found["after"]


@pytest.mark.parametrize("network", TRIED)
def test_webgpu_trains_all_networks(network, browsers, tmp_path):
    """Gradients as a step of SGD at a large rate leaves them, then steps of both optimizers."""
    gradients: dict[str, np.ndarray] = {}
    for target in ("webgpu-sgd", "webgpu"):
        folder, scratch = package_of(network, target, tmp_path), tmp_path / f"files-{target}"
        package, arrays = Package.open(folder), gpu.first_batch(folder.parent)
        here = gpu.Subject(folder, "cpu", step_model=False)
        exact = np.load(folder.parent / gpu.EXACT)
        is_conditioned = all(each.role != "state" for each in package.manifest.parameters)
        runs = [(1e-3, 5 if is_conditioned else 1)]
        # Of a training apart: a step in training mode changes running statistics.
        apart = gpu.Subject(folder, "cpu", step_model=False)
        gradients = gradients or apart.gradients(arrays)[1]
        start = {n: p.data.copy() for n, p in here.state.parameters if p.requires_grad}
        if target == "webgpu-sgd":
            runs.append((gpu.LARGE_RATE, 1))
        names = [each.name for each in package.manifest.inputs]
        data = javascript.save_batch(scratch, **dict(zip(names, arrays, strict=True)))
        task = {"package": folder, "data": data, "runs": runs, "providers": ["webgpu"]}
        program = {"module": "ort.webgpu.min.mjs", "program": "trainings"}
        done = in_browser(browsers, task, scratch, **program)
        assert "code" not in done, done
        here.optimizer.set_learning_rate(1e-3)
        losses = [float(here.optimizer.step_on(*arrays)) for _ in range(runs[0][1])]
        np.testing.assert_allclose(done["found"][0]["losses"], losses, rtol=1e-5)
        order = [p.name for p in package.manifest.parameters if p.name in gradients]
        ends = np.cumsum([start[name].size for name in order])[:-1]
        there = [
            {
                name: part.reshape(start[name].shape)
                for name, part in zip(order, np.split(np.array(each["vector"]), ends), strict=True)
            }
            for each in done["found"]
        ]
        for name, gradient in gradients.items():
            if gpu.is_known(gradient, exact[name]):
                right = here.state.parameters[name].data
                assert gpu.settled(right, there[0][name], gradient) <= gpu.BAR, name
        if target == "webgpu-sgd":
            made = {n: (start[n] - after) / gpu.LARGE_RATE for n, after in there[1].items()}
            off, bad = gpu.compared(gradients, made, exact)
            assert not bad, (bad, off)
        exported = onnxruntime.InferenceSession(bytes(done["found"][0]["model"]))
        outputs = [each.name for each in exported.get_outputs()]
        here.module.export_model_for_inferencing(scratch / "model.onnx", outputs)
        feeds = dict(zip(names, arrays, strict=True))
        feeds = {each.name: feeds[each.name] for each in exported.get_inputs()}
        expected = onnxruntime.InferenceSession(scratch / "model.onnx").run(None, feeds)[0]
        found = exported.run(None, feeds)[0]
        assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("provider", ["wasm", "webgpu"])
def test_a_pool_that_stores_positions_trains(provider, browsers, tmp_path):
    model = zoo.cnn(size=8, width=(4, 8))
    pool = next(node for node in model.graph.node if node.op_type == "MaxPool")
    del pool.attribute[:]
    pool.attribute.extend([
        onnx.helper.make_attribute(name, value)
        for name, value in {"kernel_shape": [5, 5], "strides": [2, 2], "pads": [2] * 4}.items()
    ])  # fmt: skip
    package = tmp_path / "package"
    build_package(model, package, loss="cross_entropy", runtime="webgpu")
    random = np.random.default_rng(0)
    data = {"input": random.random((4, 1, 8, 8), np.float32), "labels": random.integers(0, 10, 4)}
    task = {"package": package, "data": javascript.save_batch(tmp_path / "batch", **data),
            "steps": 3, "rate": 0.01}  # fmt: skip
    wanted = train(task, "python")["losses"]
    task["providers"] = [provider]
    found = in_browser(browsers, task, tmp_path, module=f"ort.{provider}.min.mjs")
    assert "code" not in found, found
    np.testing.assert_allclose(found["losses"], wanted, rtol=2e-5)
