"""A Module on another device: the processor's provider with memory of its own, and WebGPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from benchmarks.decoder.model import Shape, write_model
from benchmarks.gpu import batch_of
from odtpack.build import build_package
from odtpack.passes import precision
from odtpack_runtime import CheckpointState, Module, OdtpackError, Package
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES
from odtpack_runtime.training import first_step
from tests import zoo
from tests.model_text import parsed
from tests.packaging_tools import built_package, open_training
from tests.refused import refused
from tests.software_gpu import package_of, reason_without

WITHOUT = reason_without()
webgpu = pytest.param("webgpu", marks=pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT))


def _without_cuda() -> str:
    """Why there is no CUDA here, or nothing."""
    model = parsed("(float[1] x) => (float[1] y) { y = Neg(x) }", 13).SerializeToString()
    try:
        Device("cuda").session(model, onnxruntime.SessionOptions())
    except OdtpackError as error:
        return f"CUDA: {error.what}"
    return ""


NO_CUDA = _without_cuda()
cuda = pytest.param("cuda", marks=pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA))
DEVICES = ["CPUExecutionProvider", webgpu, cuda]
X = np.random.default_rng(0).standard_normal((4, 6)).astype("f")
BATCH = (X, np.array([0, 1, 2, 1]))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that was found right before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("device") / "package"
    return built_package(zoo.mlp((6, 5, 3)), folder, runtime="webgpu", step_model="always")


class Training:
    def __init__(self, package, device, checkpoint=None, step=False):
        options = {"device": device, "step_model_uri": package.step_model if step else None}
        opened = open_training(package.path, checkpoint=checkpoint, **options)
        self.state, self.module, self.optimizer = opened

    def steps(self, count: int, accumulate: int = 2) -> list[float]:
        losses = []
        for _ in range(count):
            losses += [float(self.module(*BATCH)) for _ in range(accumulate)]
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return losses

    def vector(self) -> np.ndarray:
        return self.module.get_contiguous_parameters(True).numpy().copy()


@pytest.mark.parametrize("device", DEVICES)
def test_trains_saves_and_resumes_as_the_processor(package, device, tmp_path):
    here, there = Training(package, "cpu"), Training(package, device)
    for training in (here, there):
        training.losses = training.steps(2)  # type: ignore[attr-defined]
        path = tmp_path / f"{training is here}.ckpt"
        CheckpointState.save_checkpoint(training.state, path, include_optimizer_state=True)
    resumed = Training(package, device, tmp_path / "False.ckpt")
    for training in (here, there, resumed):
        training.state.parameters["fc1.bias"] = np.full(5, 0.25, "f")  # counts on the device too
        training.losses = training.steps(2)  # type: ignore[attr-defined]
    for training in (there, resumed):
        np.testing.assert_allclose(training.losses, here.losses, rtol=1e-5)
        np.testing.assert_allclose(training.vector(), here.vector(), rtol=1e-5, atol=1e-6)
    evaluated = [t.module.eval()(*BATCH)[0] for t in (here, there)]
    np.testing.assert_allclose(evaluated[1], evaluated[0], rtol=1e-5)
    for training in (here, there):
        training.module.export_model_for_inferencing(tmp_path / "m.onnx", ["output"])
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
        training.output = session.run(None, {"input": X})[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(there.output, here.output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [False, True])
def test_what_is_not_finite_changes_nothing(package, device, step):
    training = Training(package, device, step=step)
    training.optimizer.step_on(*BATCH)
    bad = np.where(X[0, 0] == X, np.float32(np.inf), X), BATCH[1]
    before = training.vector()
    training.optimizer.step_on(*bad)
    assert training.module.skipped_steps == 1
    after = training.vector()
    assert np.isfinite(after).all()
    if not step:
        np.testing.assert_array_equal(after, before)
        training.module(*BATCH)
        kept = training.state.parameters["fc2.bias"].grad.copy()
        training.module(*bad)  # adds to the gradient, and is taken back
        np.testing.assert_array_equal(training.state.parameters["fc2.bias"].grad, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_left_of_a_skipped_step(package, device):
    """Its gradients are zero there as well, for all sessions of the state."""
    training = Training(package, device)
    second = Module(package.training_model, training.state, device=device)
    training.steps(1)
    before = training.vector()
    second(np.full_like(X, np.nan), BATCH[1])
    second.lazy_reset_grad()
    training.optimizer.step()
    assert np.array_equal(training.vector(), before)
    assert training.optimizer.step_count == 1
    assert not training.module.flat.gradients.any()
    other = Training(package, device)
    for each in (training, other):
        each.steps(2 - each.optimizer.step_count)
    assert np.array_equal(training.vector(), other.vector())


def mistake(patch: pytest.MonkeyPatch, operator: str) -> None:
    """Devices compute Softsign in the place of an operator."""
    real = Device.session

    def wrong(self: Device, model: str | bytes, options: Any) -> Any:
        proto = onnx.load(model) if isinstance(model, str) else onnx.load_from_string(model)
        for node in proto.graph.node:
            node.op_type = "Softsign" if node.op_type == operator else node.op_type
        return real(self, proto.SerializeToString(), options)

    patch.setattr(Device, "session", wrong)


def test_a_wrong_device_is_refused_and_the_operator_named(package, monkeypatch):
    mistake(monkeypatch, "Relu")
    training = Training(package, "CPUExecutionProvider")
    before = training.vector()
    with refused("device-wrong", "Relu"):
        training.module(*BATCH)
    np.testing.assert_array_equal(training.vector(), before)


def test_devices_that_are_not_there_and_states_that_live_elsewhere(package):
    with refused("unsupported-device", "abacus"):
        Training(package, "abacus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "get_ep_devices", list, raising=False)
        patch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
        for _ in range(2):  # ONNX Runtime takes each plug-in once
            with refused("unsupported-device", "no device 'webgpu'"):
                Device("webgpu")
    training = Training(package, "cpu")
    with refused("unsupported-device", "load the checkpoint again"):
        Module(package.training_model, training.state, device="CPUExecutionProvider")


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
def test_what_a_plug_in_computed_right_is_not_compared_again(package, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compared = []
    real = first_step._compare_step
    monkeypatch.setattr(
        first_step, "_compare_step", lambda *given: (compared.append(1), real(*given))
    )
    for step in (False, False, True, True):
        Training(package, "webgpu", step=step).optimizer.step_on(*BATCH)
    assert len(compared) == len(list(tmp_path.rglob("right-*"))) == 2


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
@pytest.mark.parametrize("network", ["cnn", "decoder"])
def test_networks_on_webgpu(network, tmp_path):
    from benchmarks import gpu

    folder = package_of(network, "webgpu", tmp_path)
    found = gpu.check(folder, "webgpu", gpu.first_batch(folder.parent), thorough=False)
    assert found["passed"], found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [False, True])
def test_an_overflow_skips_one_step_there(device, step, tmp_path, monkeypatch):
    """With everything in float32, as the adapter in software has nothing else."""
    monkeypatch.setattr(precision, "narrow", lambda _: False)
    monkeypatch.setitem(precision.STATES, LOSS_SCALE_NAMES[0], np.inf)
    build_package(
        zoo.mlp((6, 5, 3)), tmp_path / "p", loss="cross_entropy", runtime="webgpu",
        step_model="always", precision="mixed",
    )  # fmt: skip
    trainings = [
        Training(Package.open(tmp_path / "p"), each, step=step) for each in ("cpu", device)
    ]
    losses = [[float(each.optimizer.step_on(*BATCH)) for _ in range(4)] for each in trainings]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[1][0] == losses[1][1] > losses[1][2] > losses[1][3]
    for each in trainings:
        assert (each.module.skipped_steps, each.optimizer.step_count) == (1, 3)
        assert [each.state.parameters[n].data.item() for n in LOSS_SCALE_NAMES] == [2.0**24, 3]


@pytest.mark.parametrize("device", [webgpu])
def test_mixed_precision_needs_float16_there(device, tmp_path):
    build_package(
        zoo.mlp((6, 5, 3)), tmp_path / "p", loss="cross_entropy", runtime="webgpu",
        precision="mixed",
    )  # fmt: skip
    here, there = (Training(Package.open(tmp_path / "p"), each) for each in ("cpu", device))
    found: list[float] | str
    try:
        found = there.steps(2)
    except OdtpackError as error:
        found = error.code
    if isinstance(found, str):
        assert found == "unsupported-device"  # not as `run-failed`
    else:
        np.testing.assert_allclose(found, here.steps(2), rtol=1e-2)


def test_a_float64_model_has_a_step_model(tmp_path):
    """The provider knows no float64: the models run on the processor."""
    w = np.arange(18.0).reshape(6, 3) / 9
    model = parsed("(double[N, 6] x) => (double[N, 3] y) { y = MatMul(x, w) }", w=w)
    package = built_package(model, tmp_path, runtime="webgpu", step_model="always")
    assert package.step_model is not None


# Of a package of segments one segment's frozen weights lie there at a time.
SWEPT = pytest.param(*webgpu.values, marks=[pytest.mark.sweep, *webgpu.marks])


def built(folder: Path, base: Any, optimizer: str = "adamw", layers: int = 2) -> Package:
    """A decoder whose layers are two segments each."""
    folder.mkdir(exist_ok=True)
    model = write_model(Shape("tiny", layers, 64, 4, 2, 96, 50), folder)
    return built_package(
        model, folder / "package", loss="next_token", adapter="lora", adapter_on=("*proj*",),
        base=base, segments=True, runtime="webgpu", optimizer=optimizer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return built(tmp_path_factory.mktemp("int8"), "int8")


class SegmentTraining(Training):
    def __init__(self, package: Package, device: str, checkpoint: Path | None = None) -> None:
        super().__init__(package, device, checkpoint)
        self.batch = batch_of(package, 2, 6)

    def gradients(self) -> dict[str, np.ndarray]:
        self.module(*self.batch)
        self.module(*self.batch)  # adds to the gradients of the first one
        found = {n: p.grad.copy() for n, p in self.state.parameters if p.grad is not None}
        self.module.lazy_reset_grad()
        return found

    def losses_of(self, count: int) -> list[float]:
        losses = [float(self.optimizer.step_on(*self.batch)) for _ in range(count)]
        evaluated = self.module.eval()(*self.batch)
        self.module.train()
        return [*losses, float(evaluated[0] if isinstance(evaluated, tuple) else evaluated)]


@pytest.mark.parametrize("device", ["CPUExecutionProvider", SWEPT])
@pytest.mark.parametrize(("base", "optimizer"), [("int4", "adamw"), ("int8", "sgd"), (None, "sgd")])
def test_segments_train_there_as_on_the_processor(device, base, optimizer, tmp_path):
    package = built(tmp_path, base, optimizer)
    here, there = SegmentTraining(package, "cpu"), SegmentTraining(package, device)
    expected = here.gradients()
    for name, found in there.gradients().items():
        off = np.abs(found - expected[name]).max() / (np.abs(expected[name]).max() or 1)
        assert off < 1e-5, (name, off)
    losses = here.losses_of(5)
    np.testing.assert_allclose(there.losses_of(5), losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(there.vector(), here.vector(), rtol=1e-5, atol=2e-6)
    path = tmp_path / "saved.ckpt"
    CheckpointState.save_checkpoint(there.state, path, include_optimizer_state=True)
    resumed = SegmentTraining(package, device, path)
    np.testing.assert_array_equal(resumed.vector(), there.vector())
    np.testing.assert_allclose(resumed.losses_of(2), here.losses_of(2), rtol=1e-5)


def test_a_wrong_device_is_refused_by_segments(int8, monkeypatch):
    mistake(monkeypatch, "Sigmoid")
    training = SegmentTraining(int8, "CPUExecutionProvider")
    before = training.vector()
    with refused("device-wrong"):
        training.optimizer.step_on(*training.batch)
    np.testing.assert_array_equal(training.vector(), before)


def test_values_between_segments_stay_there(int8, tmp_path):
    state = CheckpointState.load_checkpoint(int8.checkpoint)
    with refused("unsupported-device", "keep activations in a file"):
        Module(int8.training_model, state, device="CPUExecutionProvider", activations=tmp_path)
