"""The JavaScript kit in Node with packages that are trained segment by segment."""

import json
import shutil
from pathlib import Path

import numpy as np

from benchmarks.decoder.model import Shape, write_model
from odtpack_runtime import CheckpointState, OdtpackError, load_adapter, save_adapter
from odtpack_runtime.package import adapter
from odtpack_runtime.package.adapter import CONFIG, TENSORS, read_onnx_adapter, write_onnx_adapter
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.planning import held_weights
from odtpack_simulator.memory.process_memory import child_environment
from tests.kits import javascript, test_segments
from tests.kits.harness import contents, needs
from tests.kits.javascript import node, save_batch, train
from tests.kits.test_segments import built

pytestmark = needs(javascript.unavailable())
FORMS = ("it.onnx_adapter", "peft")
packages, batches = test_segments.packages, test_segments.batches


def test_gradients_of_several_batches_make_a_step(packages, batches, tmp_path):
    model = packages["int4"].parent / "model"
    package = built(model / "model.onnx", tmp_path / "package", base="int4", accumulation_steps=2)
    task = {"package": package, "batches": batches, "steps": 4, "rate": 0.01, "accumulate": 2}
    found = [train({**task, "save": tmp_path / kit}, kit) for kit in ("node", "python")]
    assert found[0]["losses"] == found[1]["losses"]
    assert len(set(found[0]["losses"])) == 8
    assert contents(tmp_path / "node") == contents(tmp_path / "python")


def test_adapters_are_written_and_read_as_python_does(packages, batches, tmp_path):
    """Each reads what the other wrote; damaged ones are refused alike and change nothing."""
    task = {"package": packages["int4"], "batches": batches, "steps": 3, "rate": 0.01}
    train({**task, "save": tmp_path / "python.ckpt"}, "python")
    package = Package.open(packages["int4"])
    state = CheckpointState.load_checkpoint(tmp_path / "python.ckpt")
    good, bad = tmp_path / "python", tmp_path / "damaged"
    for folder in (good, tmp_path / "node", bad):
        folder.mkdir()
    for form in FORMS:
        save_adapter(package, state, good / form)
    damage(good, bad)
    expected, loaded = {}, {}
    for path in bad.iterdir():
        fresh = CheckpointState.load_checkpoint(package.checkpoint)
        try:
            load_adapter(package, fresh, path)
            expected[path.name], loaded[path] = "loaded", fresh
        except OdtpackError as error:
            expected[path.name] = error.code
    assert {"adapter-corrupt", "adapter-mismatch", "peft-invalid"} < set(expected.values())
    assert node("adapters.mjs", package.path, tmp_path, *FORMS) == expected
    assert len(loaded) > 2
    for path, fresh in loaded.items():
        read = CheckpointState.load_checkpoint(f"{path}.ckpt")
        for name, value in fresh.arrays(trainable=True).items():
            np.testing.assert_array_equal(read.parameters[name].data, value)
    wanted = state.arrays(trainable=True)
    for form in FORMS:
        again = CheckpointState.load_checkpoint(package.checkpoint)
        load_adapter(package, again, tmp_path / "node" / form)
        for read in (again, CheckpointState.load_checkpoint(tmp_path / f"{form}.ckpt")):
            for name, value in wanted.items():
                np.testing.assert_array_equal(read.parameters[name].data, value)
    configs = [folder / "peft" / CONFIG for folder in (good, tmp_path / "node")]
    assert configs[0].read_bytes() == configs[1].read_bytes()


def damage(good: Path, bad: Path) -> None:
    """Files and folders of an adapter with a thing wrong in each."""
    rng = np.random.default_rng(5)
    source = (good / FORMS[0]).read_bytes()
    (bad / "short.onnx_adapter").write_bytes(source[:-8])
    tensors = read_onnx_adapter(good / FORMS[0])
    first, *others = sorted(tensors)
    write_onnx_adapter(bad / "less.onnx_adapter", {name: tensors[name] for name in others})
    write_onnx_adapter(bad / "more.onnx_adapter", {**tensors, "more": tensors[first]})
    write_onnx_adapter(bad / "turned.onnx_adapter", {**tensors, first: tensors[first].T.copy()})
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    write_onnx_adapter(bad / "wide.onnx_adapter", wide)
    for number in range(100):
        damaged = bytearray(source)
        damaged[rng.integers(0, 400)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        (bad / f"{number}.onnx_adapter").write_bytes(damaged)
    config = json.loads((good / "peft" / CONFIG).read_text())
    for name, change in {
        "rank": {"r": 5}, "alpha": {"lora_alpha": 3.0}, "kind": {"peft_type": "IA3"},
        "pattern": {"rank_pattern": {"q_proj": 2}}, "bias": {"bias": "all"},
        "no rank": {"r": "4"}, "rslora": {"use_rslora": True, "lora_alpha": 4.0},
        "pissa": {"init_lora_weights": "pissa"}, "eva": {"init_lora_weights": "eva"},
        "odd start": {"init_lora_weights": {"toString": 1}},
    }.items():  # fmt: skip
        shutil.copytree(good / "peft", bad / name)
        (bad / name / CONFIG).write_text(json.dumps({**config, **change}))
    for name, cut in {"short": -4, "no header": 4}.items():
        shutil.copytree(good / "peft", bad / name)
        (bad / name / TENSORS).write_bytes((good / "peft" / TENSORS).read_bytes()[:cut])
    (bad / "empty").mkdir()
    shutil.copytree(good / "peft", bad / "half")
    narrow = (value.astype(np.float16) for value in tensors.values())
    bits = (value if i % 2 else value.view(np.uint16) for i, value in enumerate(narrow))  # bfloat16
    adapter._write_safetensors(bad / "half" / TENSORS, dict(zip(tensors, bits, strict=True)))


def test_weights_of_one_segment_are_in_memory(tmp_path, monkeypatch):
    """Beside what the plan counts there are Node's own, and what its collector finds later."""
    for variable, value in child_environment().items():  # what is freed goes back at once
        monkeypatch.setenv(variable, value)
    shape = Shape("deep", 8, 512, 8, 2, 1408, 1000)
    package = built(write_model(shape, tmp_path / "model"), tmp_path / "package")
    opened = Package.open(package)
    total = (package / "segments.weights").stat().st_size
    held = held_weights(opened, "js", fetched=False)
    assert total > 80e6
    assert held < total / 8
    ids = np.random.default_rng(2).integers(0, shape.words, (1, 64))
    data = save_batch(tmp_path, input_ids=ids, labels=ids)
    task = {"package": package, "data": data, "steps": 5, "evaluate": True}
    read, fetched = (train({**task, "fetched": each}, "node")["taken"] for each in (False, True))
    use = session_use(opened.manifest, "js")._replace(weights_bytes=held)
    plan = plan_memory(opened, dict.fromkeys(data, ids.shape), use)
    assert fetched - read > 0.7 * total
    assert 0 < read - plan.peak.nbytes < 64 * 2**20
