"""What is wrong in the reference (onnxruntime-training 1.19.2), and is not here.

Each test names the defect that was measured there. Numbers are compared with PyTorch in float64.
"""

import os
import signal

import numpy as np
import onnx.parser
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor
from torch.nn import functional as F

from odtpack.artifacts import LossType, OptimType
from odtpack_runtime import CheckpointState, LinearLRScheduler, Module, OdtpackError
from tests import zoo
from tests.model_text import computed, parsed
from tests.packaging_tools import generate, open_module, open_training
from tests.programs import started
from tests.reference.packaged import Forward, follows, package, random
from tests.refused import refused
from tests.training.forward import linear, make

# 1. LinearLRScheduler hands its arguments on in the wrong order


def test_01_the_scheduler_warms_up_for_the_warm_up(tmp_path):
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


def test_02_the_learning_rate_is_restored(tmp_path):
    state, module, optimizer = package(tmp_path, linear(), ["w"], optimizer=OptimType.AdamW)
    optimizer.set_learning_rate(0.25)
    module(random(4, 3), random(4, 2))
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    _, _, resumed = open_training(tmp_path, checkpoint=tmp_path / "c")
    assert resumed.get_learning_rate() == 0.25
    assert resumed.step_count == 1


# 6. Crashes


def test_06_evaluation_without_an_evaluation_model(tmp_path):
    module = open_module(make(linear(), tmp_path))
    with refused("no-eval-model"):
        module.eval()(random(4, 3), random(4, 2))
    assert np.isfinite(module.train()(random(4, 3), random(4, 2)))


@pytest.mark.parametrize("training", [True, False])
def test_06_an_empty_batch(training, tmp_path):
    _, module, _ = package(tmp_path, linear(), ["w"], LossType.CrossEntropyLoss)
    with refused("empty-batch"):
        module.train(training)(np.zeros((0, 3), np.float32), np.zeros(0, np.int64))
    assert np.isfinite(module(random(4, 3), np.array([0, 1, 1, 0])))


@pytest.mark.parametrize("label", [-1, 2, 2**62, -(2**63)])
@pytest.mark.parametrize("training", [True, False])
def test_06_labels_out_of_range(label, training, tmp_path):
    state, module, _ = package(tmp_path, linear(), ["w"], LossType.CrossEntropyLoss)
    with refused("label-out-of-range", f"label {label} at \\[2\\]"):
        module.train(training)(random(4, 3), np.array([0, 1, label, 0]))
    assert not state.parameters["w"].grad.any()


# 9. Types (more in tests/training/test_types.py), export, state of the optimizer


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_09_models_of_other_types(dtype, tmp_path):
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


def test_09_export_from_an_ort_model(tmp_path):
    make(linear(), tmp_path, ort_format=True)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.ort", state, tmp_path / "eval_model.ort")
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["y"])
    x = random(4, 3)
    wanted = x @ state.parameters["w"].data + state.parameters["b"].data
    np.testing.assert_allclose(computed(path, x=x)[0], wanted, rtol=1e-5, atol=1e-6)


def test_09_sgd_keeps_no_moments(tmp_path):
    state, module, optimizer = package(tmp_path, zoo.mlp((30, 40, 10)), ["fc1.weight"])
    module(random(4, 30), random(4, 10))
    optimizer.step()
    for name, options in (("without", False), ("with", True)):
        CheckpointState.save_checkpoint(state, tmp_path / name, include_optimizer_state=options)
    sizes = [(tmp_path / name).stat().st_size for name in ("without", "with")]
    assert sizes[1] - sizes[0] < 300  # of 4800 bytes of parameters


def test_09_sgd_refuses_the_state_of_adamw(tmp_path):
    state, module, optimizer = package(tmp_path / "a", linear(), ["w"], optimizer=OptimType.AdamW)
    module(random(4, 3), random(4, 2))
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    package(tmp_path / "s", linear(), ["w"])
    with refused("optimizer-mismatch"):
        open_training(tmp_path / "s", checkpoint=tmp_path / "c")


# 10. AdamW


def test_10_adamw_is_the_formula_that_is_documented(tmp_path):
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


def test_11_an_average_pool_with_a_dynamic_batch(tmp_path):
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
def test_11_killed_while_it_saves(tmp_path):
    generate(zoo.mlp((784, 500, 10)), tmp_path)
    target = tmp_path / "progress"
    with started(KILLED_WHILE_SAVING, tmp_path / "checkpoint", target) as process:
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert len(CheckpointState.load_checkpoint(target).parameters) == 4


def test_11_an_initializer_with_too_few_bytes(tmp_path):
    model = linear()
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    with pytest.raises(OdtpackError, match="bytes"):
        make(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_11_external_data_behind_a_link_that_leaves_the_folder(tmp_path):
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


# Gradients and losses that the reference (onnxruntime-training 1.19.2) gets wrong.
#
# Each test names the defect that was measured there. Numbers are compared with PyTorch in float64.

# 3., 6. and 8. Gradients that are silently wrong, of nodes that leave optional parts out too


def padded(x: Tensor, w: Tensor, mode: str, stride: int) -> Tensor:
    pads = []
    for size, kernel in zip(x.shape[:1:-1], w.shape[:1:-1], strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        small = total // 2
        pads += [small, total - small] if mode == "SAME_UPPER" else [total - small, small]
    return F.conv2d(F.pad(x, pads), w, stride=stride)


X, POSITIVE = random(4, 3), np.abs(random(4, 3))
PARTS = (slice(0, 2), slice(2, 4), slice(4, 5))
# The condition is known only when the model runs; both branches capture parameters.
IF = """(float[N, 3] x) => (float[N, 2] y) <float zero = {0.0}> {
    h = MatMul(x, w) total = ReduceSum <keepdims = 0>(x) flag = Greater(total, zero)
    t = If (flag) < then_branch = yes () => (float[N, 2] a) { a = Tanh(h) },
        else_branch = no () => (float[N, 2] c) { s = Mul(h, gain) c = Sigmoid(s) }>
    y = Add(t, shift) }"""
GATED = {"w": random(3, 2), "gain": random(2, seed=1), "shift": random(2, seed=2)}
# A graph, what of it is trained, x, and the same in PyTorch.
GRAPHS: dict[str, tuple[str, dict[str, np.ndarray], np.ndarray, Forward]] = {
    # An even kernel, so that the two sides of the padding differ.
    **{f"convolutions that pad by themselves, {mode} {stride}": (
        "(float[N, 2, 7, 6] x) => (float[N, 3, h, w] y) {"
        f' h0 = Conv <auto_pad = "{mode}", strides = [{stride}, {stride}]>(x, first)'
        f' y = Conv <auto_pad = "{mode}", strides = [{stride}, {stride}]>(h0, second) }}',
        {"first": random(4, 2, 4, 2, seed=1), "second": random(3, 4, 2, 3, seed=2)},
        random(2, 2, 7, 6),
        lambda x, first, second, way=(mode, stride): padded(padded(x, first, *way), second, *way))
       for mode in ("SAME_UPPER", "SAME_LOWER") for stride in (1, 2)},
    **{f"a split of whose outputs {used} is read": (
        f"(float[N, 3] x) => (float[N, {1 + (used < 2)}] y) <int64[3] sizes = {{2, 2, 1}}>"
        " { h = MatMul(x, w) a, b, c = Split <axis = 1>(h, sizes)"
        f" t = Tanh({'abc'[used]}) y = Add(t, shift) }}",
        {"w": random(3, 5), "shift": random(1 if used == 2 else 2, seed=1)}, X,
        lambda x, w, shift, part=PARTS[used]: torch.tanh((x @ w)[:, part]) + shift)
       for used in range(3)},
    **{f"{kind} directly on what is trained": (
        "(float[1, 2, 2, 2] x) => (float[1, 2, 2, 2] y) {"
        f" p = {kind} <kernel_shape = [2, 2], strides = [2, 2]>(image) y = Mul(p, x) }}",
        {"image": random(1, 2, 4, 4)}, random(1, 2, 2, 2, seed=1),
        lambda x, image, pool=pool: pool(image, 2) * x)
       for kind, pool in (("MaxPool", F.max_pool2d), ("AveragePool", F.avg_pool2d))},
    # 0 gain: the branch that is not taken gives a gradient of zero.
    "an If on the way, true": (
        IF, GATED, POSITIVE, lambda x, w, gain, shift: torch.tanh(x @ w) + 0 * gain + shift),
    "an If on the way, false": (
        IF, GATED, -POSITIVE, lambda x, w, gain, shift: torch.sigmoid(x @ w * gain) + shift),
    "a layer normalization with one output": (
        "(float[N, 3] x) => (float[N, 4] y) {"
        " h = MatMul(x, w) y = LayerNormalization(h, scale, bias) }",
        {"w": random(3, 4), "scale": random(4, seed=1), "bias": random(4, seed=2)}, random(5, 3),
        lambda x, w, scale, bias: F.layer_norm(x @ w, (4,), scale, bias)),
    "a transpose without perm": (
        "(float[4, 3] x) => (float[2, 4] y) { h = MatMul(x, w) y = Transpose(h) }",
        {"w": random(3, 2)}, X, lambda x, w: (x @ w).T),
    "the exponent of a power": (
        "(float[N, 3] x) => (float[N, 3] y) { y = Pow(x, e) }", {"e": random(3)},
        np.abs(random(4, 3, seed=1)) + 0.1, lambda x, e: x**e),
    **{f"padding by {mode}": (
        "(float[N, 2, 4] x) => (float[N, 2, 7] y) <int64[6] pads = {0, 0, 2, 0, 0, 1}>"
        f' {{ h = Mul(x, w) y = Pad <mode = "{mode}">(h, pads) }}',
        {"w": random(4)}, random(3, 2, 4, seed=1),
        lambda x, w, theirs=theirs: F.pad(x * w, (2, 1), mode=theirs))
       for mode, theirs in (("reflect", "reflect"), ("edge", "replicate"))},
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_03_06_and_08_gradients_are_those_of_pytorch(name, tmp_path):
    text, trained, x, forward = GRAPHS[name]
    follows(tmp_path, parsed(text, **trained), list(trained), x, forward)


# 4. and 5. Batch normalization

NORM = """(float[N, 3, 5, 5] x) => (float[N, 2] y)
    { c = Conv <pads = [1, 1, 1, 1]>(x, kernel)
      n{outputs} = BatchNormalization {mode}(c, scale, bias, mean, var)
      r = Relu(n) p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, head) }"""


def norm_model(training: bool, opset: int = 17) -> onnx.ModelProto:
    text = NORM.replace("{outputs}", ", m2, v2" if training else "")
    text = text.replace("{mode}", "<training_mode = 1>" if training else "")
    generator = np.random.default_rng(5)
    return parsed(
        text, opset,
        kernel=random(4, 3, 3, 3), scale=generator.uniform(0.5, 1.5, 4).astype(np.float32),
        bias=random(4, seed=1), mean=random(4, seed=2),
        var=generator.uniform(0.5, 2, 4).astype(np.float32), head=random(4, 2, seed=3),
    )  # fmt: skip


def norm_forward(x: Tensor, mean: Tensor, var: Tensor, training: bool, **p: Tensor) -> Tensor:
    h = F.conv2d(x, p["kernel"], padding=1)
    h = F.batch_norm(h, mean, var, p["scale"], p["bias"], training, 0.1, 1e-5)
    return F.relu(h).mean((2, 3)) @ p["head"]


@pytest.mark.parametrize("train", [["kernel"], ["kernel", "scale", "bias", "head"]])
def test_04_a_frozen_batch_normalization_stays_frozen(train, tmp_path):
    """Exported in inference mode, its running statistics are used, and stay as they are."""
    model = norm_model(training=False)
    all_values = {t.name: torch.tensor(numpy_helper.to_array(t)).double()
                  for t in model.graph.initializer}  # fmt: skip

    def forward(x: Tensor, **trained: Tensor) -> Tensor:
        return norm_forward(x, training=False, **{**all_values, **trained})

    x = random(4, 3, 5, 5, seed=7)
    _, module, optimizer = follows(tmp_path, model, train, x, forward)
    target = random(4, 2)
    for _ in range(3):
        loss = module.train()(x, target)
        assert loss == pytest.approx(float(module.eval()(x, target)), rel=1e-6)
        optimizer.step()
        module.lazy_reset_grad()
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["y"])
    kept = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for name in ("mean", "var"):
        assert np.array_equal(kept[name], all_values[name].numpy().astype(np.float32))


@pytest.mark.parametrize("opset", [14, 17])
def test_05_and_11_a_training_batch_normalization_is_that_of_pytorch(opset, tmp_path):
    """Over steps: the running variance is unbiased; it evaluates, and it exports."""
    train = ["kernel", "scale", "bias", "head"]
    state, module, optimizer = package(tmp_path, norm_model(training=True, opset=opset), train)
    optimizer.set_learning_rate(0.1)
    tensors = {name: torch.tensor(parameter.data).double() for name, parameter in state.parameters}
    for name in train:
        tensors[name].requires_grad_()
    theirs = torch.optim.SGD([tensors[name] for name in train], lr=0.1)
    for seed in range(4):
        x, target = random(3, 3, 5, 5, seed=seed), random(3, 2, seed=seed + 50)
        theirs.zero_grad()
        y = norm_forward(torch.from_numpy(x).double(), training=True, **tensors)
        loss = F.mse_loss(y, torch.from_numpy(target).double())
        loss.backward()  # type: ignore[no-untyped-call]
        theirs.step()
        np.testing.assert_allclose(module.train()(x, target), loss.item(), rtol=1e-5)
        optimizer.step()
        module.lazy_reset_grad()
        for name, parameter in state.parameters:
            wanted = tensors[name].detach().numpy()
            np.testing.assert_allclose(parameter.data, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
        y = norm_forward(torch.from_numpy(x).double(), training=False, **tensors)
        wanted = F.mse_loss(y, torch.from_numpy(target).double()).item()
        np.testing.assert_allclose(module.eval()(x, target), wanted, rtol=1e-4)
    for name in ("training", "eval"):
        onnx.checker.check_model(onnx.load(tmp_path / f"{name}_model.onnx"), full_check=True)
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["y"])
    np.testing.assert_allclose(computed(path, x=x)[0], y.detach().numpy(), rtol=1e-4, atol=1e-5)


# 7. Losses (weights, reductions and ignored labels: tests of the losses)


def test_07_binary_cross_entropy_of_large_logits(tmp_path):
    state, module, _ = package(tmp_path, linear(), ["w", "b"], LossType.BCEWithLogitsLoss)
    x = random(4, 3) * 1e4
    target = np.array([[0, 1], [1, 0], [1, 1], [0, 0]], np.float32)
    w, b = (torch.tensor(state.parameters[n].data).double().requires_grad_() for n in "wb")
    loss = F.binary_cross_entropy_with_logits(
        torch.from_numpy(x).double() @ w + b, torch.from_numpy(target).double()
    )
    np.testing.assert_allclose(module(x, target), loss.item(), rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, [w])
    np.testing.assert_allclose(state.parameters["w"].grad, gradient.numpy(), rtol=1e-5)


def test_07_cross_entropy_of_pixels(tmp_path):
    """Labels [N, H, W] for a prediction [N, C, H, W], with the classes on axis 1."""
    model = parsed("(float[N, 2, 4, 5] x) => (float[N, 3, 4, 5] y) { y = Conv(x, w) }",
                   w=random(3, 2, 1, 1))  # fmt: skip
    state, module, _ = package(tmp_path, model, ["w"], LossType.CrossEntropyLoss)
    assert [spec.shape for spec in module.input_specs()] == [("N", 2, 4, 5), ("N", 4, 5)]
    x, labels = random(2, 2, 4, 5, seed=3), np.random.default_rng(0).integers(0, 3, (2, 4, 5))
    w = torch.tensor(state.parameters["w"].data).double().requires_grad_()
    loss = F.cross_entropy(F.conv2d(torch.from_numpy(x).double(), w), torch.from_numpy(labels))
    np.testing.assert_allclose(module(x, labels), loss.item(), rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss, [w])
    np.testing.assert_allclose(state.parameters["w"].grad, gradient.numpy(), rtol=1e-4, atol=1e-7)


# 8. Nodes that leave optional outputs, inputs or attributes out


def test_08_softmax_cross_entropy_loss_with_one_output(tmp_path):
    """A model that computes its own loss with the standard's operator."""
    model = parsed(
        "(float[N, 3] x, int64[N] labels) => (float loss) {"
        " h = MatMul(x, w) loss = SoftmaxCrossEntropyLoss(h, labels) }",
        w=random(3, 4),
    )
    state, module, _ = package(tmp_path, model, ["w"], None)
    x, labels = random(5, 3), np.array([0, 3, 1, 2, 2])
    w = torch.tensor(state.parameters["w"].data).double().requires_grad_()
    loss = F.cross_entropy(torch.from_numpy(x).double() @ w, torch.from_numpy(labels))
    np.testing.assert_allclose(module(x, labels), loss.item(), rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss, [w])
    np.testing.assert_allclose(state.parameters["w"].grad, gradient.numpy(), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(module.eval()(x, labels), loss.item(), rtol=1e-6)


def test_08_dropout_without_a_mask(tmp_path):
    """What is dropped is scaled and passes no gradient; evaluation drops nothing."""
    model = parsed(
        "(float[N, 40] x) => (float[N, 40] y) <float ratio = {0.25}, bool on = {1}>"
        " { h = Mul(x, w) y = Dropout(h, ratio, on) }",
        w=np.ones(40, np.float32),
    )
    state, module, _ = package(tmp_path, model, ["w"])
    x, target = np.ones((50, 40), np.float32), np.zeros((50, 40), np.float32)
    # y is 0 or 4/3, so that the loss tells how much was kept, and 2 y dy / dw the same again.
    kept = float(module(x, target)) / (4 / 3) ** 2
    assert 0.7 < kept < 0.8
    gradient = state.parameters["w"].grad
    np.testing.assert_allclose(gradient.sum(), 2 * kept * (4 / 3) ** 2, rtol=1e-4)
    assert module.eval()(x, target) == 1


def test_08_a_bidirectional_lstm_without_initial_states(tmp_path):
    theirs = torch.nn.LSTM(3, 4, bidirectional=True).double()
    order = [0, 3, 1, 2]  # PyTorch has input, forget, cell, output; ONNX input, output, forget...

    def stacked(kind: str) -> np.ndarray:
        parts = [getattr(theirs, f"{kind}_l0{end}").detach().numpy() for end in ("", "_reverse")]
        gates = [part.reshape(4, 4, -1)[order].reshape(16, -1) for part in parts]
        return np.stack(gates).astype(np.float32)

    w, r = stacked("weight_ih"), stacked("weight_hh")
    b = np.concatenate([stacked("bias_ih"), stacked("bias_hh")], axis=1).squeeze(2)
    model = parsed(
        "(float[5, N, 3] x) => (float[5, 2, N, 4] y)"
        ' { y = LSTM <direction = "bidirectional", hidden_size = 4>(x, w, r, b) }',
        w=w, r=r, b=b,
    )  # fmt: skip
    state, module, _ = package(tmp_path, model, ["w", "r", "b"])
    x, target = random(5, 2, 3), random(5, 2, 2, 4, seed=1)
    with torch.no_grad():  # the weights as the package has them
        for parameter in theirs.parameters():
            parameter.copy_(parameter.float().double())
    y = theirs(torch.from_numpy(x).double())[0].reshape(5, 2, 2, 4).transpose(1, 2)
    loss = F.mse_loss(y, torch.from_numpy(target).double())
    loss.backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(module(x, target), loss.item(), rtol=1e-5)
    for name, kind in (("w", "weight_ih"), ("r", "weight_hh")):
        parts = [getattr(theirs, f"{kind}_l0{end}").grad.numpy() for end in ("", "_reverse")]
        wanted = np.stack([part.reshape(4, 4, -1)[order].reshape(16, -1) for part in parts])
        np.testing.assert_allclose(state.parameters[name].grad, wanted, rtol=1e-4, atol=1e-7)
