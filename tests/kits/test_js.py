"""The JavaScript kit against Python: the same bits in Node, the same training in a browser.

``onnxruntime-node`` on npm is a release or so older than the wheel. ``make kits-js`` installs
the wheel of the same version in a folder of its own, and comparisons to the bit are with that.
"""

from __future__ import annotations

import base64
import json
import random
import re
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack import zoo
from odtpack.optimizers import make_optimizer
from odtpack.update import Clip, Update
from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint_format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint_writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.kits import javascript, web
from tests.kits.javascript import KIT, NODE, SCRIPTS, node, save_batch, train
from tests.packages.samples import build
from tests.peer import client
from tests.reports.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(
    javascript.unavailable() is not None, reason=str(javascript.unavailable())
)
STEPS = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": make_optimizer("sgd", {"momentum": 0.9})},
    "adafactor": {"optimizer": make_optimizer("adafactor", {})},
    "clipped": {"update": Update(clip=Clip(norm=0.5))},
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packages of a small CNN for several optimizers."""
    folder = tmp_path_factory.mktemp("packages")
    model = zoo.cnn(size=8, width=(4, 8), classes=3)
    return {name: build(folder / name, model, **each) for name, each in OPTIONS.items()}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, packages: dict[str, Path]) -> dict[str, Any]:
    """A batch of noise with labels."""
    inputs = json.loads((packages["adamw"] / "manifest.json").read_text())["inputs"]
    rng = np.random.default_rng(3)
    shape = [8, *inputs[0]["shape"][1:]]
    return save_batch(
        tmp_path_factory.mktemp("batch"),
        **{
            inputs[0]["name"]: rng.standard_normal(shape, dtype=np.float32),
            "labels": rng.integers(0, 3, 8),
        },
    )


def contents(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint says, with arrays as bytes."""
    data = read_checkpoint(path)
    optimizer = data.optimizer
    arrays = {**data.trainable, **data.frozen}
    moments = optimizer.moments if optimizer else {}
    return {
        "arrays": {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()},
        "trained": sorted(data.trainable),
        "moments": {name: [m.tobytes() for m in own] for name, own in moments.items()},
        "optimizer": optimizer
        and (optimizer.step, optimizer.learning_rate, optimizer.groups, optimizer.kind),
        "properties": data.properties,
    }


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conformance suite, written by Python on the version of ONNX Runtime that Node has."""
    folder = tmp_path_factory.mktemp("suite") / "vectors"
    javascript.python("tests.kits.vectors", "--out", folder)
    assert json.loads((folder / "index.json").read_text())["onnxruntime"] == (
        javascript.runtime_version()
    )
    return folder


def test_node_passes_the_conformance_suite_to_the_bit(suite: Path) -> None:
    results = node("suite.mjs", suite, "exact")
    assert len(results) >= 50
    # A number is the largest difference; where the suite asks for the same bits it is 0.
    assert {name: result for name, result in results.items() if isinstance(result, str)} == {}


@pytest.mark.parametrize("name", OPTIONS)
def test_node_trains_to_the_same_bits_as_python(
    name: str, packages: dict[str, Path], batch: dict[str, Any], tmp_path: Path
) -> None:
    task = {"package": packages[name], "data": batch, "steps": STEPS, "rate": 0.01}
    found = train({**task, "save": tmp_path / "node.ckpt"}, "node")
    wanted = train({**task, "save": tmp_path / "python.ckpt"}, "python")
    assert found["losses"] == wanted["losses"]
    assert found["losses"][-1] < found["losses"][0]
    assert contents(tmp_path / "node.ckpt") == contents(tmp_path / "python.ckpt")


@pytest.mark.parametrize("order", [("node", "python"), ("python", "node")])
def test_a_training_begun_in_one_goes_on_in_the_other(
    order: tuple[str, str], packages: dict[str, Path], batch: dict[str, Any], tmp_path: Path
) -> None:
    task = {"package": packages["adamw"], "data": batch, "steps": STEPS}
    whole = train({**task, "rate": 0.01, "save": tmp_path / "whole"}, "python")["losses"]
    half = {**task, "steps": STEPS // 2}
    first = train({**half, "rate": 0.01, "save": tmp_path / "half"}, order[0])["losses"]
    rest = train({**half, "checkpoint": tmp_path / "half", "save": tmp_path / "end"}, order[1])[
        "losses"
    ]
    assert first + rest == whole
    assert contents(tmp_path / "end") == contents(tmp_path / "whole")


@pytest.mark.peer
@pytest.mark.skipif(client.peer_available() is not None, reason=str(client.peer_available()))
def test_a_checkpoint_of_node_loads_in_the_reference(
    packages: dict[str, Path], batch: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "node.ckpt"
    train({"package": packages["adamw"], "data": batch, "steps": 3, "save": saved}, "node")
    read = client.run_job("load", checkpoint=saved, parameters=tmp_path / "read.npz")
    data = read_checkpoint(saved)
    with np.load(tmp_path / "read.npz") as values:
        for name, array in {**data.trainable, **data.frozen}.items():
            np.testing.assert_array_equal(values[name], array)
    assert {n for n, p in read["parameters"].items() if p["requires_grad"]} == set(data.trainable)


def test_node_loses_nothing_when_it_is_killed_in_saves(tmp_path: Path) -> None:
    """200 kills, half of them of checkpoints with a data file of their own."""
    rng = random.Random(5)
    arrays = {f"p{i}": np.zeros(20_000, np.float32) for i in range(8)}
    for limit in (2**30, 1000):
        path = tmp_path / f"state-{limit}"
        write_checkpoint(path, CheckpointData(arrays, {}, properties={"number": 0}))
        last = 0
        for _ in range(100):
            command = [str(NODE), SCRIPTS / "saves.mjs", KIT, path, path, str(limit)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(rng.uniform(0, 0.03))
                process.send_signal(signal.SIGKILL)
                rest = process.stdout.read()
            data = read_checkpoint(path)
            number = data.properties["number"]
            assert isinstance(number, int)
            assert number > last
            assert number >= max(map(int, rest.split("\n")[:-1]), default=0)
            assert all((array == number).all() for array in data.trainable.values())
            last = number
    assert len(list(tmp_path.glob(".*.tmp"))) <= 2


def test_a_full_disk_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state"
    arrays = {"p": np.zeros(200_000, np.float32)}
    write_checkpoint(path, CheckpointData(arrays, {}, properties={"number": 0}))
    before = path.read_bytes()

    def no_more_than_a_little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = subprocess.run(
        [str(NODE), SCRIPTS / "saves.mjs", KIT, path, path, str(2**30)],
        capture_output=True, text=True, check=False, preexec_fn=no_more_than_a_little,
    )  # fmt: skip
    assert "file-not-written" in done.stderr
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_500_damaged_files_end_in_one_clear_error(
    packages: dict[str, Path], batch: dict[str, Any], tmp_path: Path
) -> None:
    rng = random.Random(11)
    good = tmp_path / "good"
    train({"package": packages["adamw"], "data": batch, "steps": 1, "save": good}, "node")
    source = bytearray(good.read_bytes())
    folder = tmp_path / "damaged"
    folder.mkdir()
    head = 3000  # where the tables are
    expected = {}
    for number in range(300):
        damaged = bytearray(source)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(head)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if number % 5 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        path = folder / f"checkpoint-{number:03}"
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
            expected[path.name] = "loaded"
        except OdtpackError as error:
            expected[path.name] = error.code
    files = {path.name: path.read_bytes() for path in packages["adamw"].iterdir()}
    for number in range(200):
        target = folder / f"package-{number:03}"
        target.mkdir()
        name = rng.choice(list(files)) if number % 2 else "manifest.json"
        damaged = bytearray(files[name])
        if number % 7 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        else:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        for other, data in files.items():
            (target / other).write_bytes(damaged if other == name else data)
        if name != "manifest.json":
            expected[target.name] = "package-changed"
    results = node("hostile.mjs", folder)
    assert len(results) == 500
    assert [result for result in results.values() if result.startswith("unclear")] == []
    assert {name: results[name] for name in expected} == expected


def test_node_does_not_grow_over_ten_thousand_steps(
    packages: dict[str, Path], batch: dict[str, Any]
) -> None:
    task = {"package": packages["adamw"], "data": batch, "steps": 10_000}
    resident = train(task, "node", collect=True)["resident"]
    # The second half against the first, which warms up caches and the compiler.
    middle = statistics.median(resident[len(resident) // 2 - 4 : len(resident) // 2])
    assert statistics.median(resident[-4:]) - middle < 2e6


def test_units() -> None:
    done = subprocess.run(
        [str(NODE), "--test", "test/kit.test.mjs"],
        cwd=KIT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
    with Browser(tmp_path_factory.mktemp("chromium"), served=True, options=options) as opened:
        yield opened


TRAIN = """(async () => {
  const task = %s;
  const arrays = { float32: Float32Array, int64: BigInt64Array };
  const session = await kit.TrainingSession.create({ package: '/files/package' }, %s);
  session.setLearningRate(task.rate);
  const feeds = {};
  for (const [name, { dtype, shape }] of Object.entries(task.data)) {
    const bytes = await (await fetch(`/files/${name}.bin`)).arrayBuffer();
    feeds[name] = new ort.Tensor(dtype, new arrays[dtype](bytes), shape);
  }
  const losses = [];
  for (let step = 0; step < task.steps; step++) {
    losses.push(session.lossOf(await session.runTrainStep(feeds)));
    await session.runOptimizerStep();
    await session.lazyResetGrad();
  }
  const folder = await navigator.storage.getDirectory();
  const file = await folder.getFileHandle('trained.ckpt', { create: true });
  await session.saveCheckpoint(file);
  const again = await kit.CheckpointState.load(file);
  const bytes = new Uint8Array(await (await file.getFile()).arrayBuffer());
  let text = '';
  for (const byte of bytes) text += String.fromCharCode(byte);
  return { losses, threads: ort.env.wasm.numThreads, isolated: crossOriginIsolated,
           saved: btoa(text), step: again.optimizer.step };
})().catch((error) => ({ code: error.code, what: String(error) }))"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("threads", [1, 2])
def test_chromium_trains_as_python_does(
    threads: int,
    packages: dict[str, Path],
    batch: dict[str, Any],
    browsers: Browser,
    tmp_path: Path,
) -> None:
    task = {"package": packages["adamw"], "data": batch, "steps": STEPS, "rate": 0.01}
    wanted = train({**task, "save": tmp_path / "python.ckpt"}, "python")["losses"]
    found = in_browser(browsers, task, tmp_path, query=f"?threads={threads}")
    assert (found["threads"], found["isolated"]) == (threads, True)
    for loss, right in zip(found["losses"], wanted, strict=True):
        assert abs(loss - right) <= 2e-6 * max(1, abs(right))
    assert found["step"] == STEPS
    # What a browser saves, Python goes on with.
    (tmp_path / "browser.ckpt").write_bytes(base64.b64decode(found["saved"]))
    state = CheckpointState.load_checkpoint(tmp_path / "browser.ckpt")
    for name, array in read_checkpoint(tmp_path / "python.ckpt").trainable.items():
        np.testing.assert_allclose(state.parameters[name].data, array, atol=1e-4)
    resumed = {**task, "checkpoint": tmp_path / "browser.ckpt", "steps": 1}
    assert train(resumed, "python")["losses"][0] < wanted[0]


def in_browser(
    browser: Browser,
    task: dict[str, Any],
    tmp_path: Path,
    *,
    query: str = "",
    module: str = "ort.wasm.min.mjs",
    options: str = "{ ort }",
) -> dict[str, Any]:
    """Train in a page that is served a package and a batch."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "package").symlink_to(task["package"])
    for name, each in task["data"].items():
        (files / f"{name}.bin").symlink_to(each["file"])
    page = web.PAGE.replace("ort.wasm.min.mjs", module)
    with web.serve({**web.FOLDERS, "files": files}, page) as address:
        open_kit(browser, address + query)
        text = TRAIN % (json.dumps(task, default=str), options)
        return dict(browser.evaluate(text))


def open_kit(browser: Browser, address: str) -> None:
    browser.open(address)
    until = time.monotonic() + 60
    while not browser.evaluate("Boolean(window.kit)"):
        assert time.monotonic() < until, browser.console
        time.sleep(0.05)


SUITE = """(async () => {
  const { runSuite } = await import('/scripts/conformance.mjs');
  const at = (path) => new URL(`/suite/${path}`, location.href);
  const read = async (path) => new Uint8Array(await (await fetch(at(path))).arrayBuffer());
  window.results = await runSuite({ kit, ort, read, at, exact: false });
})().catch((error) => { window.results = { failed: String(error) }; }), 1"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("threads", [1, 2])
def test_chromium_passes_the_conformance_suite(
    threads: int, suite: Path, browsers: Browser
) -> None:
    with web.serve({**web.FOLDERS, "scripts": SCRIPTS, "suite": suite}) as address:
        open_kit(browsers, f"{address}?threads={threads}")
        browsers.evaluate(SUITE)
        until = time.monotonic() + 600
        while not browsers.evaluate("Boolean(window.results)"):
            assert time.monotonic() < until, "the suite does not end"
            time.sleep(0.5)
        results = browsers.evaluate("window.results")
    assert len(results) >= 50
    assert {name: result for name, result in results.items() if isinstance(result, str)} == {}


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("module", ["ort.webgpu.min.mjs", "ort.all.min.mjs"])
def test_webgpu_trains_right_or_is_refused(
    module: str,
    packages: dict[str, Path],
    batch: dict[str, Any],
    browsers: Browser,
    tmp_path: Path,
) -> None:
    task = {"package": packages["adamw"], "data": batch, "steps": STEPS, "rate": 0.01}
    wanted = train(task, "python")["losses"]
    browsers.console.clear()
    options = "{ ort, executionProviders: ['webgpu'] }"
    found = in_browser(browsers, task, tmp_path, module=module, options=options)
    if "code" in found:
        # The provider of ort.all 1.30 passes a limit of storage buffers, without an error.
        assert found["code"] == "unsupported-device"
        assert "does not run right on webgpu: " in found["what"]
    else:
        np.testing.assert_allclose(found["losses"], wanted, rtol=1e-4)


GUIDE = javascript.ROOT / "docs" / "guides" / "javascript.md"


def guide_code() -> tuple[str, str]:
    """The code of the guide: for Node, and for a browser."""
    found = re.findall(r"^```js\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    assert len(found) == 2
    return found[0], found[1]


@pytest.fixture(scope="module")
def digits_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = zoo.cnn(size=8, width=(4, 8))
    folder = tmp_path_factory.mktemp("guide") / "package"
    return build(folder, model, outputs=("output",))


def test_the_guides_code_for_node_trains(digits_package: Path, tmp_path: Path) -> None:
    code = guide_code()[0]
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 320)
    images = rng.random((320, 64), np.float32) + labels[:, None].astype(np.float32) / 10
    images.tofile(tmp_path / "images.bin")
    labels.tofile(tmp_path / "labels.bin")
    (tmp_path / "package").symlink_to(digits_package)
    modules = tmp_path / "node_modules"
    modules.mkdir()
    (modules / "odtpack").symlink_to(KIT)
    for name in ("flatbuffers", "onnxruntime-node", "onnxruntime-common"):
        (modules / name).symlink_to(web.MODULES / name)
    (tmp_path / "train.mjs").write_text(code)
    losses = []
    for _ in range(2):  # the second run goes on from the first, which was at its end
        done = subprocess.run(
            [str(NODE), "train.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.splitlines()[-1].split()[0]))
    assert losses[0] == losses[1] < 2.3
    assert (tmp_path / "personal.onnx").stat().st_size > 2_000


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_guides_code_for_a_browser_trains(digits_package: Path, browsers: Browser) -> None:
    (imports,) = re.findall(r"^```html\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    page = f"<!doctype html><title></title>{imports}<script type=module>{guide_code()[1]}</script>"
    with web.serve({**web.FOLDERS, "package": digits_package}, page) as address:
        browsers.console.clear()
        browsers.open(address)
        until = time.monotonic() + 60
        while not browsers.evaluate("document.title"):
            assert time.monotonic() < until, browsers.console
            time.sleep(0.05)
        loss, dims, size, step = browsers.evaluate("document.title").split(" ")
    assert 0 < float(loss) < 10
    assert (dims, step) == ("2,10", "1")
    assert int(size) > 2_000


def test_code_for_onnxruntime_training_runs_as_it_was(digits_package: Path, tmp_path: Path) -> None:
    """The calls of the old API, with the files of a package."""
    script = tmp_path / "old.mjs"
    script.write_text(f"""
import {{ benchmark, TrainingSession }} from {json.dumps(str(KIT / "dist" / "index.js"))};
const at = {json.dumps(str(digits_package))};
const session = await TrainingSession.create({{
  checkpointState: `${{at}}/checkpoint`, trainModel: `${{at}}/training_model.onnx`,
  evalModel: `${{at}}/eval_model.onnx`, optimizerModel: `${{at}}/optimizer_model.onnx`,
}}, {{ intraOpNumThreads: 1 }});
const {{ Tensor }} = session.ort;
const feeds = {{
  input: new Tensor('float32', new Float32Array(128).fill(0.5), [2, 1, 8, 8]),
  labels: new Tensor('int64', BigInt64Array.of(1n, 2n), [2]),
}};
const names = [session.trainingInputNames, session.evalOutputNames];
const both = await session.runTrainStep(feeds);
const one = await session.runTrainStep(feeds, ['output'], {{ logSeverityLevel: 2 }});
await session.runOptimizerStep();
await session.lazyResetGrad();
const size = await session.getParametersSize(true);
const buffer = await session.getContiguousParameters(true);
const before = (await session.runEvalStep(feeds)).loss.data[0];
const bytes = new Uint8Array(buffer.data.buffer);
await session.loadParametersBuffer(new Uint8Array(bytes.length), true);
const zeros = (await session.runEvalStep(feeds)).loss.data[0];
await session.loadParametersBuffer(bytes, true);
const after = (await session.runEvalStep(feeds)).loss.data[0];
const outputs = (await session.predict({{ input: feeds.input }})).output.data;
const evaluation = await session.evaluate([feeds, feeds]);
const figures = await benchmark(at, {{ steps: 3, intraOpNumThreads: 1 }});
const second = session.runTrainStep(feeds);
const busy = await session.runTrainStep(feeds).then(() => 'ran', (error) => error.code);
await second;
await session.release();
console.log(JSON.stringify({{
  names, both: Object.keys(both), one: Object.keys(one), size, length: buffer.data.length,
  before, zeros, after, busy, outputs: Array.from(outputs), evaluation, figures,
}}));
""")
    done = subprocess.run([str(NODE), script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == [["input", "labels"], ["loss", "output"]]
    assert (found["both"], found["one"]) == (["loss", "output"], ["output"])
    assert found["size"] == found["length"] > 500
    assert found["before"] == found["after"] != found["zeros"]
    assert found["zeros"] == pytest.approx(np.log(10))
    assert found["busy"] == "busy"
    scores = np.array(found["outputs"]).reshape(2, 10)
    labels = np.array([1, 2])
    assert found["evaluation"]["accuracy"] == (scores.argmax(axis=1) == labels).mean()
    right = np.log(np.exp(scores).sum(axis=1)) - scores[[0, 1], labels]
    assert found["evaluation"]["loss"] == pytest.approx(right.mean(), rel=1e-5)
    assert found["evaluation"]["samples"] == 4
    figures = found["figures"]
    assert (figures["kit"], figures["steps"]) == ("javascript", 3)
    assert figures["onnxruntime"] == javascript.runtime_version()
    assert all(figures[key] > 0 for key in figures if key.endswith(("_ms", "_bytes")))
