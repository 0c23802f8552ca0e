"""The native core on a plug-in's device: WebGPU on a driver in software, from C++, C# and Swift."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from benchmarks import gpu
from odtpack.adapters import AdapterSpec
from odtpack_runtime import CheckpointState, Module, Package, save_adapter
from odtpack_runtime.package.adapter import read_onnx_adapter
from tests import zoo
from tests.kits import cpp_kit, csharp_kit, harness, swift_kit
from tests.kits.harness import needs
from tests.packaging_tools import built_package
from tests.software_gpu import CHROMIUM, TRIED, package_of, reason_without

WITHOUT = reason_without()
KITS = {"cpp": cpp_kit, "csharp": csharp_kit, "swift": swift_kit}
pytestmark = [pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT), *needs(cpp_kit.unavailable())]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader of Vulkan, for programs that are started."""
    known = os.environ.get("LD_LIBRARY_PATH")
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(filter(None, (known, str(CHROMIUM)))))


def library() -> str:
    import onnxruntime_ep_webgpu

    return str(onnxruntime_ep_webgpu.get_library_path())


@pytest.mark.parametrize(
    ("kit", "network", "plain"),
    [("cpp", "mlp", True), ("cpp", "cnn", False), ("cpp", "decoder", False),
     ("csharp", "mlp", True), ("swift", "mlp", True)],
)  # fmt: skip
def test_trains_on_the_device_as_on_the_processor(kit, network, plain, packages, tmp_path):
    if KITS[kit].unavailable() is not None:
        pytest.skip(str(KITS[kit].unavailable()))
    folder = package_of(network, "webgpu", packages)
    package = Package.open(folder)
    names = [each.name for each in package.manifest.inputs]
    good = gpu.batch_of(package, 2, other=4)
    batches = [good]
    if kit == "cpp" and plain:
        batches.append([np.full_like(good[0], np.nan), *good[1:]])
    steps = [
        harness.save_batch(tmp_path / str(i), dict(zip(names, each, strict=True)))
        for i, each in enumerate(batches)
    ]
    found: list[dict[str, Any]] = []
    for device in ({}, {"device": {"library": library()}}):
        job = {
            "package": folder, "steps": steps, "evaluation": steps[0], "count": 5, "threads": 1,
            "plain": plain, "step_model": not plain, "learning_rate": 0.01, "resume": 2,
            "save": f"{len(found)}.ckpt", "export": f"{len(found)}.onnx",
        }  # fmt: skip
        found.append(KITS[kit].measure({**job, **device}, tmp_path))
    for key in ("losses", "evaluation"):
        here, there = (np.array(each[key]) for each in found)
        there[np.isnan(here)] = np.nan  # a GPU's Relu makes 0 of a NaN; the gradients have it
        np.testing.assert_allclose(there, here, rtol=2e-5)
    vectors = []
    for index in range(2):
        state = CheckpointState.load_checkpoint(tmp_path / f"{index}.ckpt")
        module = Module(package.training_model, state, package.eval_model)
        vectors.append(module.get_contiguous_parameters(True).numpy())
    # AdamW moves elements whose gradients are rounding by the rate, one way or the other.
    assert np.mean(np.abs(vectors[1] - vectors[0]) < 1e-4) > 0.99
    if kit == "cpp":
        outputs = []
        feeds = dict(zip(names, good, strict=True))
        for index in range(2):
            session = onnxruntime.InferenceSession(tmp_path / f"{index}.onnx")
            given = {each.name: feeds[each.name] for each in session.get_inputs()}
            outputs.append(session.run(None, given)[0])
        np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("network", TRIED)
def test_gradients_and_steps_of_all_networks(network, packages, tmp_path):
    """Gradients as a step of SGD at a large rate leaves them, then steps of both optimizers."""
    folder = package_of(network, "webgpu-sgd", packages)
    package, good = Package.open(folder), gpu.first_batch(folder.parent)
    names = [each.name for each in package.manifest.inputs]
    steps = [harness.save_batch(tmp_path, dict(zip(names, good, strict=True)))]
    is_conditioned = all(each.role != "state" for each in package.manifest.parameters)
    devices: list[dict[str, Any]] = [{}, {"device": {"library": library()}}]

    def trained(target: str, rate: float, count: int) -> tuple[list[Any], list[Any]]:
        """Losses, and parameters by name, of the processor and of the device."""
        losses, parameters = [], []
        for index, device in enumerate(devices):
            job = {
                "package": package_of(network, target, packages), "steps": steps, "count": count,
                "learning_rate": rate, "save": f"{index}.ckpt", "threads": 1,
            }  # fmt: skip
            losses.append(np.array(cpp_kit.measure({**job, **device}, tmp_path)["losses"]))
            state = CheckpointState.load_checkpoint(tmp_path / f"{index}.ckpt")
            parameters.append({n: p.data for n, p in state.parameters if p.requires_grad})
        return losses, parameters

    start = CheckpointState.load_checkpoint(package.checkpoint).parameters
    _, after = trained("webgpu-sgd", gpu.LARGE_RATE, 1)
    gradients = [
        {name: (start[name].data - data) / gpu.LARGE_RATE for name, data in each.items()}
        for each in after
    ]
    exact = np.load(folder.parent / gpu.EXACT)
    off, bad = gpu.compared(*gradients, exact)
    assert not bad, (bad, off)
    for target in ("webgpu", "webgpu-sgd"):
        losses, after = trained(target, 1e-3, 5 if is_conditioned else 1)
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
        for name, gradient in gradients[0].items():
            if gpu.is_known(gradient, exact[name]):
                assert gpu.settled(after[0][name], after[1][name], gradient) <= gpu.BAR, name


def test_an_adapter_is_written_and_read_where_it_is_trained(tmp_path):
    """Without a save before it, which would bring the values from the device."""
    build = {"runtime": "webgpu", "adapter": AdapterSpec("lora", ("fc1*",), (), 2, 4.0)}
    package = built_package(zoo.mlp((16, 12, 4)), tmp_path / "package", **build)
    first, batch = tmp_path / "first.onnx_adapter", gpu.batch_of(package, 8, other=4)
    save_adapter(package, CheckpointState.load_checkpoint(package.checkpoint), first)
    names = [each.name for each in package.manifest.inputs]
    steps = [harness.save_batch(tmp_path, dict(zip(names, batch, strict=True)))]
    found = []
    for index, device in enumerate(({}, {"device": {"library": library()}})):
        job = {
            "package": package.path, "steps": steps, "count": 10, "learning_rate": 0.05,
            "adapters": [tmp_path / f"{index}.onnx_adapter"], "again": first, **device,
        }  # fmt: skip
        done = cpp_kit.run("decoder", harness.job_file(job, tmp_path))
        assert done.returncode == 0, done.stderr
        losses = [float(line) for line in done.stdout.split()]
        found.append((losses, read_onnx_adapter(tmp_path / f"{index}.onnx_adapter")))
    (here, ours), (there, theirs) = found
    assert here[1] - here[0] > 0.1
    np.testing.assert_allclose(there, here, rtol=1e-4)
    start = read_onnx_adapter(first)
    for name, array in ours.items():
        assert np.abs(array - start[name]).max() > 0.01
        np.testing.assert_allclose(theirs[name], array, atol=1e-3)


def test_what_is_no_plug_in_is_refused(packages, tmp_path):
    package, path = package_of("mlp", "webgpu", packages), tmp_path / "job.json"
    job = {"package": package, "device": {"library": __file__}, "steps": []}
    path.write_text(json.dumps(job, default=str))
    done = cpp_kit.run("measure", path)
    assert done.returncode == 2
    assert "code: unsupported-device" in done.stderr
