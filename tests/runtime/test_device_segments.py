"""A package of segments on a device: one segment's frozen weights lie there at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.decoder.model import Shape, write_model
from benchmarks.gpu import batch_of
from odtpack_runtime import CheckpointState, Module, Package
from odtpack_runtime.session.device import Device
from tests.packaging_tools import built_package, open_training
from tests.refused import refused
from tests.software_gpu import reason_without

WITHOUT = reason_without()
webgpu = pytest.param(
    "webgpu", marks=[pytest.mark.sweep, pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)]
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that was found right before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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


class Training:
    def __init__(self, package: Package, device: str, checkpoint: Path | None = None) -> None:
        opened = open_training(package.path, checkpoint=checkpoint, device=device)
        self.state, self.module, self.optimizer = opened
        self.batch = batch_of(package, 2, 6)

    def gradients(self) -> dict[str, np.ndarray]:
        self.module(*self.batch)
        self.module(*self.batch)  # adds to the gradients of the first one
        found = {n: p.grad.copy() for n, p in self.state.parameters if p.grad is not None}
        self.module.lazy_reset_grad()
        return found

    def steps(self, count: int) -> list[float]:
        losses = [float(self.optimizer.step_on(*self.batch)) for _ in range(count)]
        evaluated = self.module.eval()(*self.batch)
        self.module.train()
        return [*losses, float(evaluated[0] if isinstance(evaluated, tuple) else evaluated)]

    def vector(self) -> np.ndarray:
        return self.module.get_contiguous_parameters(True).numpy().copy()


@pytest.mark.parametrize("device", ["CPUExecutionProvider", webgpu])
@pytest.mark.parametrize(("base", "optimizer"), [("int4", "adamw"), ("int8", "sgd"), (None, "sgd")])
def test_segments_train_there_as_on_the_processor(device, base, optimizer, tmp_path):
    package = built(tmp_path, base, optimizer)
    here, there = Training(package, "cpu"), Training(package, device)
    expected = here.gradients()
    for name, found in there.gradients().items():
        off = np.abs(found - expected[name]).max() / (np.abs(expected[name]).max() or 1)
        assert off < 1e-5, (name, off)
    losses = here.steps(5)
    np.testing.assert_allclose(there.steps(5), losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(there.vector(), here.vector(), rtol=1e-5, atol=2e-6)
    path = tmp_path / "saved.ckpt"
    CheckpointState.save_checkpoint(there.state, path, include_optimizer_state=True)
    resumed = Training(package, device, path)
    np.testing.assert_array_equal(resumed.vector(), there.vector())
    np.testing.assert_allclose(resumed.steps(2), here.steps(2), rtol=1e-5)


def test_a_wrong_device_is_refused(int8, monkeypatch):
    real = Device.session

    def wrong(self: Device, model: str | bytes, options: Any) -> Any:
        assert isinstance(model, str)
        proto = onnx.load(model)
        for node in proto.graph.node:
            node.op_type = "Softsign" if node.op_type == "Sigmoid" else node.op_type
        return real(self, proto.SerializeToString(), options)

    monkeypatch.setattr(Device, "session", wrong)
    training = Training(int8, "CPUExecutionProvider")
    before = training.vector()
    with refused("device-wrong"):
        training.optimizer.step_on(*training.batch)
    np.testing.assert_array_equal(training.vector(), before)


def test_values_between_segments_stay_there(int8, tmp_path):
    state = CheckpointState.load_checkpoint(int8.checkpoint)
    with refused("unsupported-device", "keep activations in a file"):
        Module(int8.training_model, state, device="CPUExecutionProvider", activations=tmp_path)
