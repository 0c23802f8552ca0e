"""The JavaScript kit in Node against Python: the same bits.

``onnxruntime-node`` on npm is a release or so older than the wheel. ``make kits`` installs
the wheel of the same version in a folder of its own, and comparisons to the bit are with that.
"""

import json
import random
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.kits import harness, javascript, js_fixtures, web
from tests.kits.harness import Packages, Saved, contents, needs
from tests.kits.javascript import KIT, NODE, SCRIPTS, node, train
from tests.kits.js_fixtures import OPTIONS, STEPS, guide_code
from tests.kits.kills import KITS, loses_nothing
from tests.kits.measured import check_measurements
from tests.programs import ran

pytestmark = needs(javascript.unavailable())
packages, batch, suite = js_fixtures.packages, js_fixtures.batch, js_fixtures.suite
digits_package = js_fixtures.digits_package


def test_node_passes_the_conformance_suite_to_the_bit(suite: Path, npm: Path) -> None:
    results = node("suite.mjs", suite, "exact", kit=npm / "odtpack")
    assert len(results) >= 50
    # A number is the largest difference; where the suite asks for the same bits it is 0.
    assert {name: result for name, result in results.items() if isinstance(result, str)} == {}


@pytest.mark.parametrize("name", OPTIONS)
def test_node_trains_to_the_same_bits_as_python(
    name: str, packages: Packages, batch: Saved, tmp_path: Path
) -> None:
    harness.same_bits(train, "node", packages[name], batch, STEPS, tmp_path)


@pytest.mark.parametrize("order", [("node", "python"), ("python", "node")])
def test_a_training_begun_in_one_goes_on_in_the_other(
    order: tuple[str, str], packages: Packages, batch: Saved, tmp_path: Path
) -> None:
    harness.goes_on(train, order, packages["adamw"], batch, STEPS, tmp_path)


@harness.needs_reference
def test_a_checkpoint_of_node_loads_in_the_reference(
    packages: Packages, batch: Saved, tmp_path: Path
) -> None:
    saved = tmp_path / "node.ckpt"
    train({"package": packages["adamw"], "data": batch, "steps": 3, "save": saved}, "node")
    harness.loads_in_the_reference(saved)


@pytest.mark.parametrize("limit", [2**30, 1000])
def test_100_kills_in_saves_lose_nothing(limit: int, tmp_path: Path) -> None:
    loses_nothing(KITS["Node.js"][1], tmp_path, limit)


def test_a_full_disk_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state"
    words = [NODE, SCRIPTS / "saves.mjs", KIT, path, 2**30, "replace"]
    assert "file-not-written" in harness.keeps_its_file_on_a_full_disk(words, path)


def test_500_damaged_files_end_in_one_clear_error(
    packages: Packages, batch: Saved, tmp_path: Path
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


def test_node_does_not_grow_over_thirty_thousand_steps(packages: Packages, batch: Saved) -> None:
    task = {"package": packages["adamw"], "data": batch, "steps": 30_000}
    resident = train(task, "node", collect=True)["resident"]
    # The first third warms up caches and the compiler. What leaks grows in both that follow, by
    # 200 bytes a step or more; the allocator takes a large page once.
    ends = [statistics.median(resident[end - 4 : end]) for end in (20, 40, 60)]
    assert min(ends[1] - ends[0], ends[2] - ends[1]) < 2e6, resident


def test_units() -> None:
    ran(NODE, "--test", "test/", cwd=KIT)


def test_the_guides_code_for_node_trains(digits_package: Path, tmp_path: Path) -> None:
    code, _, loop, update = guide_code()
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
        done = ran(NODE, "train.mjs", cwd=tmp_path)
        losses.append(float(done.stdout.splitlines()[-1].split()[0]))
    assert losses[0] == losses[1] < 2.3
    assert (tmp_path / "personal.onnx").stat().st_size > 2_000

    (tmp_path / "personal.onnx").unlink()
    samples = re.search(r"^import \* as ort.*?^}$", code, re.M | re.S)
    given = f"import {{ readFileSync }} from 'node:fs';\n{samples[0]}\n"
    given += "const batches = [0, 1].map(batch);\n"
    (tmp_path / "train.mjs").write_text(given + loop)
    done = ran(NODE, "train.mjs", cwd=tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["61", "62"]  # goes on
    assert (tmp_path / "personal.onnx").is_file()

    (tmp_path / "package-2").symlink_to(digits_package)
    (tmp_path / "update.mjs").write_text(update)
    ran(NODE, "update.mjs", cwd=tmp_path)
    assert contents(tmp_path / "trained-2.ckpt") == contents(tmp_path / "trained.ckpt")


def test_code_for_onnxruntime_training_runs_as_it_was(digits_package: Path, tmp_path: Path) -> None:
    """The calls of the old API, with the files of a package."""
    script = tmp_path / "old.mjs"
    script.write_text(f"""
import {{ TrainingSession }} from {json.dumps(str(KIT / "dist" / "index.js"))};
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
const other = {{ ...feeds, input: new Tensor('float32', new Float32Array(128), [2, 1, 8, 8]) }};
const alone = (await session.runTrainStep(feeds)).loss.data[0];
const second = session.runTrainStep(feeds);
const busy = await session.runTrainStep(other).then(() => 'ran', (error) => error.code);
const unmoved = (await second).loss.data[0] === alone;
const unknown = await session.runTrainStep(feeds, ['no']).then(() => 'ran', (error) => error.code);
await session.release();
console.log(JSON.stringify({{
  names, both: Object.keys(both), one: Object.keys(one), size, length: buffer.data.length,
  before, zeros, after, busy, unmoved, unknown, outputs: Array.from(outputs), evaluation,
}}));
""")
    found = json.loads(ran(NODE, script).stdout)
    assert found["names"] == [["input", "labels"], ["loss", "output"]]
    assert (found["both"], found["one"]) == (["loss", "output"], ["output"])
    assert found["size"] == found["length"] > 500
    assert found["before"] == found["after"] != found["zeros"]
    assert found["zeros"] == pytest.approx(np.log(10))
    assert (found["busy"], found["unmoved"], found["unknown"]) == ("busy", True, "unknown-output")
    scores = np.array(found["outputs"]).reshape(2, 10)
    labels = np.array([1, 2])
    assert found["evaluation"]["accuracy"] == (scores.argmax(axis=1) == labels).mean()
    right = np.log(np.exp(scores).sum(axis=1)) - scores[[0, 1], labels]
    assert found["evaluation"]["loss"] == pytest.approx(right.mean(), rel=1e-5)
    assert found["evaluation"]["samples"] == 4


def test_the_benchmark_writes_every_measurement(tmp_path: Path) -> None:
    script = tmp_path / "benchmark.mjs"
    script.write_text(f"""
import {{ benchmark }} from {json.dumps(str(KIT / "dist" / "index.js"))};
const folder = {json.dumps(str(tmp_path))};
console.log(JSON.stringify(await benchmark({{ folder, memoryLimit: 500_000_000 }})));
""")
    done = ran(NODE, script)
    version = javascript.runtime_version()
    check_measurements(done.stdout, "js", version, unmeasured=("read_bytes_per_second",))
    assert list(tmp_path.iterdir()) == [script]
