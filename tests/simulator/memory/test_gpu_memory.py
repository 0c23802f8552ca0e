"""Planned GPU memory against what the provider's allocator holds, on a driver in software."""

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.decoder.model import Shape, write_model
from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, Optimizer, Package
from odtpack_runtime.training import first_step
from odtpack_simulator.memory.gpu_memory import Buffers, plan_gpu_memory
from tests.software_gpu import CHROMIUM, reason_without
from tests.sweep import split_rows

STEPS = 3
SOURCE = Path(__file__).parents[2] / "vulkan_buffers.c"


def trained(folder: Path, counter: str, step_model: bool, size: int) -> int:
    """Bytes of storage buffers after some steps, an evaluation and one more step."""
    first_step.compare_step = lambda *_: None
    package = Package.open(folder)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(
        package.training_model, state, package.eval_model, device="webgpu",
        step_model_uri=package.step_model if step_model else None,
    )  # fmt: skip
    optimizer = Optimizer(package.optimizer_model, module)
    batch = gpu.batch_of(package, size, other=8)
    for _ in range(STEPS):
        optimizer.step_on(*batch)
    module.eval()(*batch)
    module.train()
    optimizer.step_on(*batch)
    count = ctypes.CDLL(counter).storage_bytes
    count.restype = ctypes.c_uint64
    return int(count())


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver that counts, before Chromium's."""
    if reason := reason_without() or ("" if shutil.which("gcc") else "no C compiler"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("driver")
    built = folder / "libcounted.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)
    driver = {"library_path": str(built), "api_version": "1.0.5"}
    (folder / "driver.json").write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}))
    return built


def held_by(built: Path, step_model: bool, size: int, counter: Path) -> int:
    """Bytes that the provider holds in a process of its own."""
    known = {
        "VK_ICD_FILENAMES": str(counter.with_name("driver.json")),
        "DRIVER": str(CHROMIUM / "libvk_swiftshader.so"),
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__, built, counter, str(int(step_model)), str(size)],
        env=os.environ | known, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


CASES = [
    *itertools.product(("big-mlp", "cnn"), (16,), (False, True)),
    *itertools.product(("mobilenet", "transformer", "decoder"), (2,), (False, True)),
]


@pytest.mark.parametrize(
    ("network", "size", "step_model"), split_rows(CASES, lambda _, size, step: size == 16 and step)
)
def test_planned_is_what_the_allocator_holds(network, size, step_model, counter, tmp_path):
    gpu.build(tmp_path, small=True, names=[network], targets=["webgpu"])
    built = tmp_path / network / "webgpu"
    held = held_by(built, step_model, size, counter)
    package = Package.open(built)
    batch = gpu.batch_of(package, size, other=8)
    shapes = {i.name: a.shape for i, a in zip(package.manifest.inputs, batch, strict=True)}
    planned = plan_gpu_memory(package, shapes, step_model=step_model)
    print(network, step_model, planned, held)
    assert planned == pytest.approx(held, rel=0.1)


@pytest.mark.sweep
def test_one_segment_of_weights_is_held_at_a_time(counter, tmp_path):
    held, stored = [], []
    for layers in (2, 6):
        folder = tmp_path / str(layers)
        folder.mkdir()
        model = write_model(Shape("wide", layers, 256, 4, 2, 512, 50), folder)
        build_package(
            model, folder / "package", loss="next_token", adapter="lora",
            adapter_on=("*v_proj*",), base="int8", segments=True, runtime="webgpu",
        )  # fmt: skip
        stored.append((folder / "package" / "segments.weights").stat().st_size)
        state = CheckpointState.load_checkpoint(Package.open(folder / "package").checkpoint)
        trained = sum(array.nbytes for array in state.arrays(trainable=True).values())
        # Parameters, gradients and two moments lie there all the time.
        held.append(held_by(folder / "package", False, 2, counter) - 4 * trained)
    print(held, stored)
    assert stored[1] - stored[0] > 2e6
    assert held[1] - held[0] < (stored[1] - stored[0]) / 10


def test_buffers_are_rounded_and_taken_again_and_so_many_are_kept():
    buffers = Buffers()
    assert [buffers.take(each) for each in (1, 600, 2**28 + 1)] == [64, 2048, 2**28 + 16]
    assert buffers.most == 64 + 2048 + 2**28 + 16
    for size in (64, 2048, 2**28 + 16):
        buffers.give_back(size)
    buffers.take(2000)  # that of 2048, and none of the largest size is kept
    assert buffers.take(2**28 - 15) == 2**28
    assert buffers.most == 64 + 2048 + 2**28 + 16
    three = [buffers.take(44236800) for _ in range(3)]
    peak = buffers.most
    for size in three:
        buffers.give_back(size)
    buffers.take(26214400)  # in the place of the third, of which two are kept
    assert buffers.most == peak


if __name__ == "__main__":
    reason_without()
    held = trained(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
    print(held, flush=True)
    os._exit(0)  # how the driver in software is unloaded is not what is measured
