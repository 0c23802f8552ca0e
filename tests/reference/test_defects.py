"""What is wrong in the reference (onnxruntime-training 1.19.2), and is not here.

Each test names the defect that was measured there. Numbers are held to PyTorch in float64.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional as F

from odtpack.artifacts import LossType, OptimType
from odtpack_runtime import CheckpointState, LinearLRScheduler, Module, OdtpackError
from tests import zoo
from tests.packaging_tools import generate, open_training
from tests.reference.packaged import follows, package, parsed, random
from tests.training.forward import linear, make

# 1. LinearLRScheduler hands its arguments on in the wrong order


def test_01_the_scheduler_warms_up_for_the_warm_up(tmp_path: Path) -> None:
    _, module, optimizer = package(tmp_path, linear(), ["w", "b"])
    scheduler = LinearLRScheduler(
        optimizer, warmup_step_count=2, total_step_count=10, initial_lr=0.8
    )
    rates = []
    for _ in range(10):
        module(random(4, 3), random(4, 2))
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.get_learning_rate())
    wanted = [0.4, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    np.testing.assert_allclose(rates, wanted, atol=1e-7)


# 2. The learning rate is not restored


def test_02_the_learning_rate_is_restored(tmp_path: Path) -> None:
    state, module, optimizer = package(tmp_path, linear(), ["w"], optimizer=OptimType.AdamW)
    optimizer.set_learning_rate(0.25)
    module(random(4, 3), random(4, 2))
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    _, _, resumed = open_training(tmp_path, checkpoint=tmp_path / "c")
    assert resumed.get_learning_rate() == 0.25
    assert resumed.step_count == 1


# 6. Crashes


def test_06_evaluation_without_an_evaluation_model(tmp_path: Path) -> None:
    make(linear(), tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    with pytest.raises(OdtpackError) as caught:
        module.eval()(random(4, 3), random(4, 2))
    assert caught.value.code == "no-eval-model"
    assert np.isfinite(module.train()(random(4, 3), random(4, 2)))


@pytest.mark.parametrize("training", [True, False])
def test_06_an_empty_batch(training: bool, tmp_path: Path) -> None:
    _, module, _ = package(tmp_path, linear(), ["w"], LossType.CrossEntropyLoss)
    with pytest.raises(OdtpackError) as caught:
        module.train(training)(np.zeros((0, 3), np.float32), np.zeros(0, np.int64))
    assert caught.value.code == "empty-batch"
    assert np.isfinite(module(random(4, 3), np.array([0, 1, 1, 0])))


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_06_pooling_directly_on_what_is_trained(kind: str, tmp_path: Path) -> None:
    model = parsed(
        f"(float[1, 2, 2, 2] x) => (float[1, 2, 2, 2] y) {{"
        f" p = {kind} <kernel_shape = [2, 2], strides = [2, 2]>(image) y = Mul(p, x) }}",
        image=random(1, 2, 4, 4),
    )
    pool = F.max_pool2d if kind == "MaxPool" else F.avg_pool2d
    follows(tmp_path, model, ["image"], random(1, 2, 2, 2, seed=1),
            lambda x, image: pool(image, 2) * x)  # fmt: skip


@pytest.mark.parametrize("positive", [True, False])
def test_06_an_if_on_the_way(positive: bool, tmp_path: Path) -> None:
    """The condition is known only when the model runs; both branches capture parameters."""
    model = parsed(
        "(float[N, 3] x) => (float[N, 2] y) <float zero = {0.0}> {"
        " h = MatMul(x, w) total = ReduceSum <keepdims = 0>(x) flag = Greater(total, zero)"
        " t = If (flag) <"
        "   then_branch = yes () => (float[N, 2] a) { a = Tanh(h) },"
        "   else_branch = no () => (float[N, 2] c) { s = Mul(h, gain) c = Sigmoid(s) }>"
        " y = Add(t, shift) }",
        w=random(3, 2), gain=random(2, seed=1), shift=random(2, seed=2),
    )  # fmt: skip
    x = np.abs(random(4, 3)) * (1 if positive else -1)

    def forward(x: Tensor, w: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        h = x @ w
        # 0 gain: the branch that is not taken gives a gradient of zero.
        return (torch.tanh(h) + 0 * gain if positive else torch.sigmoid(h * gain)) + shift

    follows(tmp_path, model, ["w", "gain", "shift"], x, forward)


@pytest.mark.parametrize("label", [-1, 2, 2**62, -(2**63)])
@pytest.mark.parametrize("training", [True, False])
def test_06_labels_out_of_range(label: int, training: bool, tmp_path: Path) -> None:
    state, module, _ = package(tmp_path, linear(), ["w"], LossType.CrossEntropyLoss)
    with pytest.raises(OdtpackError, match=f"label {label} at \\[2\\]") as caught:
        module.train(training)(random(4, 3), np.array([0, 1, label, 0]))
    assert caught.value.code == "label-out-of-range"
    assert not state.parameters["w"].grad.any()


# 9. Types (more in tests/training/test_types.py), export, state of the optimizer


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_09_models_of_other_types(dtype: type, tmp_path: Path) -> None:
    name = {np.float16: "float16", np.float64: "double"}[dtype]
    model = parsed(f"({name}[N, 3] x) => ({name}[N, 2] y) {{ y = MatMul(x, w) }}",
                   w=random(3, 2).astype(dtype))  # fmt: skip
    state, module, optimizer = package(tmp_path, model, ["w"], LossType.CrossEntropyLoss)
    optimizer.set_learning_rate(0.5)
    x, labels = random(8, 3).astype(dtype), np.array([0, 1] * 4)
    w = torch.tensor(state.parameters["w"].data).double().requires_grad_()
    theirs = torch.optim.SGD([w], lr=0.5)
    rounding = {np.float16: 2e-3, np.float64: 1e-12}[dtype]
    for _ in range(5):
        theirs.zero_grad()
        loss = F.cross_entropy(torch.from_numpy(x).double() @ w, torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        theirs.step()
        np.testing.assert_allclose(module(x, labels), loss.item(), rtol=rounding)
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(
        state.parameters["w"].data, w.detach().numpy(), rtol=rounding, atol=rounding
    )


def test_09_export_from_an_ort_model(tmp_path: Path) -> None:
    make(linear(), tmp_path, ort_format=True)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.ort", state, tmp_path / "eval_model.ort")
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["y"])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = random(4, 3)
    wanted = x @ state.parameters["w"].data + state.parameters["b"].data
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, rtol=1e-5, atol=1e-6)


def test_09_sgd_keeps_no_moments(tmp_path: Path) -> None:
    state, module, optimizer = package(tmp_path, zoo.mlp((30, 40, 10)), ["fc1.weight"])
    module(random(4, 30), random(4, 10))
    optimizer.step()
    for name, options in (("without", False), ("with", True)):
        CheckpointState.save_checkpoint(state, tmp_path / name, include_optimizer_state=options)
    sizes = [(tmp_path / name).stat().st_size for name in ("without", "with")]
    assert sizes[1] - sizes[0] < 300  # of 4800 bytes of parameters


def test_09_sgd_refuses_the_state_of_adamw(tmp_path: Path) -> None:
    state, module, optimizer = package(tmp_path / "a", linear(), ["w"], optimizer=OptimType.AdamW)
    module(random(4, 3), random(4, 2))
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    package(tmp_path / "s", linear(), ["w"])
    with pytest.raises(OdtpackError) as caught:
        open_training(tmp_path / "s", checkpoint=tmp_path / "c")
    assert caught.value.code == "optimizer-mismatch"


# 10. AdamW


def test_10_adamw_is_the_formula_that_is_documented(tmp_path: Path) -> None:
    """Not torch.optim.AdamW's: epsilon is added before the correction of the bias."""
    state, module, optimizer = package(tmp_path, linear(), ["w", "b"], optimizer=OptimType.AdamW)
    optimizer.set_learning_rate(0.01)
    p = {name: parameter.data.astype(np.float64) for name, parameter in state.parameters}
    m, v = ({name: np.zeros_like(value) for name, value in p.items()} for _ in "mv")
    for t in range(1, 6):
        module.lazy_reset_grad()
        module(random(8, 3, seed=t), random(8, 2, seed=t + 20))
        optimizer.step()
        for name, parameter in state.parameters:
            g = parameter.grad.astype(np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            p[name] -= rate * m[name] / (np.sqrt(v[name]) + 1e-6)
            np.testing.assert_allclose(parameter.data, p[name], rtol=1e-5, atol=1e-7)


# 11. Average pools, kills, hostile files


def test_11_an_average_pool_with_a_dynamic_batch(tmp_path: Path) -> None:
    model = parsed(
        "(float[N, 2, 6, 6] x) => (float[N, 3, 2, 2] y) { c = Conv(x, w)"
        " y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]>(c) }",
        w=random(3, 2, 3, 3),
    )
    _, module, _ = follows(tmp_path, model, ["w"], random(2, 2, 6, 6, seed=1),
                           lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2))  # fmt: skip
    for size in (1, 5):
        assert np.isfinite(module(random(size, 2, 6, 6), random(size, 3, 2, 2)))


KILLED_WHILE_SAVING = """
import sys
from odtpack_runtime import CheckpointState
state = CheckpointState.load_checkpoint(sys.argv[1])
while True:
    CheckpointState.save_checkpoint(state, sys.argv[2])
    print("saved", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_11_killed_while_it_saves(tmp_path: Path) -> None:
    generate(zoo.mlp((784, 500, 10)), tmp_path)
    target = tmp_path / "progress"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_SAVING, tmp_path / "checkpoint", target],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert len(CheckpointState.load_checkpoint(target).parameters) == 4


def test_11_an_initializer_with_too_few_bytes(tmp_path: Path) -> None:
    model = linear()
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    with pytest.raises(OdtpackError, match="bytes"):
        make(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_11_external_data_behind_a_link_that_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(24))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").symlink_to(tmp_path / "secret")
    model = linear()
    w = model.graph.initializer[0]
    w.ClearField("raw_data")
    w.data_location = TensorProto.EXTERNAL
    entry = w.external_data.add()
    entry.key, entry.value = "location", "weights"
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(OdtpackError, match="weights"):
        make(path, tmp_path / "a")
    assert not (tmp_path / "a").exists()
