"""Mixed precision: float16 where it may be, and a loss scale that is as good as none."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from benchmarks.decoder.model import Shape, write_model
from odtpack.build import build_package
from odtpack.optimizers import AdamW
from odtpack.passes.precision import GROWS_AFTER
from odtpack_runtime import CheckpointState
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.loop import train_step
from tests import zoo
from tests.model_text import retyped
from tests.packaging_tools import open_training
from tests.refused import refused
from tests.training.test_not_finite import contents, opened, package_of

SCALE, GOOD = "mixed.loss_scale", "mixed.good_steps"
MLP = zoo.mlp((6, 5, 3))
RATE = 1e-3  # with larger ones the last digit of a parameter changes where a CNN ends
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value):RuntimeWarning")
Batch = tuple[np.ndarray, ...]


class ConvTranspose(OpRun):
    """That of PyTorch, as that of onnx.reference takes no groups of one channel."""

    def _run(self, x: np.ndarray, w: np.ndarray, **settings: Any) -> tuple[np.ndarray]:
        tensors = (torch.tensor(each, dtype=torch.float32) for each in (x, w))
        y = torch.nn.functional.conv_transpose2d(
            *tensors, groups=settings["group"] or 1, stride=settings["strides"]
        )
        top, left, bottom, right = settings["pads"] or (0, 0, 0, 0)
        y = y[:, :, top : y.shape[2] - bottom, left : y.shape[3] - right]
        return (y.numpy().astype(x.dtype),)


def cnn(_: Path) -> tuple[Any, str, Callable[[], Batch]]:
    random = np.random.default_rng(0)
    classes = random.standard_normal((10, 1, 8, 8))

    def batch() -> Batch:
        labels = random.integers(0, 10, 32)
        return (classes[labels] + random.standard_normal((32, 1, 8, 8))).astype("f"), labels

    return zoo.cnn(size=8, width=(8, 16), hidden=32), "cross_entropy", batch


def decoder(folder: Path) -> tuple[Any, str, Callable[[], Batch]]:
    random = np.random.default_rng(0)
    follows = random.permutation(40)

    def batch() -> Batch:
        tokens = random.integers(0, 40, (12, 4))
        for before, now in itertools.pairwise(tokens):
            np.copyto(now, follows[before], where=random.random(4) < 0.9)
        return (np.ascontiguousarray(tokens.T),) * 2

    return write_model(Shape("tiny", 1, 32, 2, 1, 48, 40), folder), "next_token", batch


def in_float16(package: Package, batches: list[Batch]) -> tuple[list[float], int]:
    """Train with every float16 value rounded, whatever kernels ONNX Runtime has."""
    training = ReferenceEvaluator(str(package.training_model), new_ops=[ConvTranspose])
    update = ReferenceEvaluator(str(package.optimizer_model))
    state = CheckpointState.load_checkpoint(package.checkpoint)
    values = {name: each.data for name, each in state.parameters.items.items()}
    trained = state.arrays(trainable=True)
    moments = {name: [np.zeros(p.size, "f")] * 2 for name, p in trained.items()}
    names, losses, step = [each.name for each in package.manifest.inputs], [], 0
    for batch in batches:
        buffers = {f"{n}_grad.accumulation.buffer": np.zeros_like(p) for n, p in trained.items()}
        feeds = dict(zip(names, batch, strict=True)) | values | buffers
        given = training.run(None, feeds | {"lazy_reset_grad": np.array([True])})
        results = dict(zip(training.output_names, given, strict=True))
        losses.append(float(given[0]))
        values |= {name: results[f"{name}.update.out"] for name in (SCALE, GOOD)}
        gradients = {name: results[f"{name}_grad.accumulation.out"] for name in trained}
        finite = all(np.isfinite(each).all() for each in gradients.values())
        assert finite == bool(values[GOOD])
        step += finite
        for name, gradient in gradients.items() if finite else ():
            vectors = [values[name].ravel(), gradient.ravel(), *moments[name]]
            rate = [np.array([RATE], "f"), np.array([step])]
            made = update.run(None, dict(zip(update.input_names, rate + vectors, strict=True)))
            values[name], moments[name] = made[0].reshape(trained[name].shape), made[1:]
    return losses, len(batches) - step


@pytest.mark.parametrize("rounded", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("network", [cnn, decoder])
def test_200_steps_end_as_in_float32(tmp_path, network, rounded):
    """By the kernels that the processor has, and where each float16 value is one."""
    model, loss, batch = network(tmp_path)
    batches = [batch() for _ in range(200)]
    ends = {}
    for precision in ("model", "mixed"):
        folder = tmp_path / precision
        folder.mkdir()
        package = package_of(model, folder, loss=loss, precision=precision)
        if rounded and precision == "mixed":
            losses, skipped = in_float16(package, batches)
            assert skipped <= 2
        else:
            _, optimizer = opened(package)
            optimizer.set_learning_rate(RATE)
            losses = [float(np.ravel(optimizer.step_on(*each))[0]) for each in batches]
        ends[precision] = np.mean(losses[-20:])
        assert ends[precision] < losses[0] / 2
    assert ends["mixed"] == pytest.approx(ends["model"], rel=0.02)


def test_what_is_computed_in_float16(tmp_path):
    model = zoo.transformer_encoder(vocab=20, d=16, layers=1, heads=2, T=8, ff=32)
    package = package_of(model, tmp_path, precision="mixed")
    graph = onnx.shape_inference.infer_shapes(onnx.load(package.training_model)).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {each.name: each.type.tensor_type.elem_type for each in values}
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    read = {op: {types[n.input[0]] for n in graph.node if n.op_type == op} for op in
            ("MatMul", "Gemm", "Softmax", "LogSoftmax", "ReduceMean")}  # fmt: skip
    assert read["MatMul"] | read["Gemm"] == {half}
    assert read["Softmax"] | read["LogSoftmax"] | read["ReduceMean"] == {single}
    assert half not in {types[each.name] for each in (*graph.input, *graph.output)}


STEPS = {
    "two models": {}, "step model": {"step_model": "always"},
    "accumulation": {"accumulation_steps": 2}, "clip by norm": {"clip_norm": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_an_overflow_skips_one_step(tmp_path, options):
    package = package_of(MLP, tmp_path, AdamW(), precision="mixed", **options)
    random = np.random.default_rng(0)
    batches = [(random.standard_normal((4, 6), "f"), random.integers(0, 3, 4)) for _ in range(4)]
    several = [0] * options.get("accumulation_steps", 1)
    found = []
    for injected in (False, True):
        module, optimizer = opened(package, whole="step_model" in options)
        for index in (0, 1, 2, 3):
            if index == 2 and injected:
                before = contents(module)
                module.state.parameters[SCALE] = np.array([np.inf], "f")
                assert np.isfinite(train_step(module, optimizer, [batches[0]]))
                assert module.skipped_steps == 1
                assert module.last_not_finite.code == "gradient-not-finite"
                after = contents(module)
                assert {n for n in before if after[n] != before[n]} == {SCALE, GOOD}
                assert module.state.parameters[GOOD].data == 0
                module.state.parameters[SCALE] = np.array([256], "f")
            train_step(module, optimizer, [batches[index] for _ in several])
        assert module.skipped_steps == injected
        found.append(contents(module))
    without, with_one = found
    # A power of two changes no digit.
    assert {n for n in without if without[n] != with_one[n]} == {SCALE, GOOD}


@pytest.mark.parametrize(("scale", "good", "spoil", "expected"), [
    (2.0**20, 7, False, (2.0**19, 0)),
    (2.0**4, 0, False, (2.0**4, 1)),
    (2.0**4, GROWS_AFTER - 1, False, (2.0**5, GROWS_AFTER)),
    (2.0**5, GROWS_AFTER, False, (2.0**5, 1)),
    (2.0**20, 7, True, (2.0**20, 7)),  # it is the loss: another scale changes nothing
])  # fmt: skip
def test_the_scale_follows_the_gradients(tmp_path, scale, good, spoil, expected):
    package = package_of(MLP, tmp_path, precision="mixed")
    state = CheckpointState.load_checkpoint(package.checkpoint)
    values = {name: each.data for name, each in state.parameters.items.items()}
    values |= {SCALE: np.array([scale], "f"), GOOD: np.array([good], "f")}
    buffers = {
        f"{n}_grad.accumulation.buffer": np.zeros_like(p)
        for n, p in state.arrays(trainable=True).items()
    }
    x = np.ones((4, 6), "f") * (np.nan if spoil else 1)
    feeds = values | buffers | {"input": x, "labels": np.array([0, 1, 2, 0])}
    model = ReferenceEvaluator(str(package.training_model))
    names = [f"{SCALE}.update.out", f"{GOOD}.update.out"]
    found = model.run(names, feeds | {"lazy_reset_grad": np.array([True])})
    assert tuple(float(each.item()) for each in found) == expected


def test_a_float16_model_keeps_its_types_and_gets_a_scale(tmp_path):
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float16)
    batch = (x, np.array([0, 1, 2, 1]))
    model, losses = retyped(MLP, np.float16), []
    for precision in ("model", "mixed"):
        folder = tmp_path / precision
        folder.mkdir()
        _, optimizer = opened(package_of(model, folder, precision=precision))
        losses.append([float(optimizer.step_on(*batch)) for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)


def test_the_scale_is_saved_and_resumed(tmp_path):
    package = package_of(MLP, tmp_path, AdamW(), precision="mixed")
    batch = (np.ones((4, 6), "f"), np.array([0, 1, 2, 1]))
    module, optimizer = opened(package)
    module.state.parameters[SCALE] = np.array([np.inf], "f")
    for _ in range(3):
        optimizer.step_on(*batch)
    CheckpointState.save_checkpoint(module.state, tmp_path / "c", include_optimizer_state=True)
    state, again, resumed = open_training(package.path, checkpoint=tmp_path / "c")
    assert contents(again) == contents(module)
    assert (state.parameters[SCALE].data, state.parameters[GOOD].data) == (2.0**24, 2)
    for each in (optimizer, resumed):
        each.step_on(*batch)
    assert contents(again) == contents(module)


@pytest.mark.parametrize("options", [
    {"runtime": "ort-training"},
    {"privacy_clip": 1.0},
    {"segments": True, "adapter": "lora", "adapter_on": ("fc1",)},
])  # fmt: skip
def test_what_keeps_no_loss_scale_is_refused(tmp_path, options):
    with refused("mixed-precision"):
        build_package(MLP, tmp_path / "p", loss="cross_entropy", precision="mixed", **options)
    assert not (tmp_path / "p").exists()
