"""Models in float16 and float64: what their packages hold, and that they follow PyTorch."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from torch import nn

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.model.loading import load_model
from odtpack.package.coverage import find_obstacles
from odtpack_runtime import CheckpointState, Optimizer
from tests import zoo
from tests.model_text import computed, parsed, retyped, with_arrays
from tests.packaging_tools import (
    LOSSES,
    batch,
    generate,
    losses_of_steps,
    open_module,
    open_training,
    statistic_names,
    trainable_names,
)
from tests.refused import refused
from tests.sweep import split
from tests.training import runs
from tests.training.forward import linear, make


def round_epsilons(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.eps = float(np.float32(layer.eps))


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float32 model with its parameters rounded to float16."""

    def narrow(_: str, array: np.ndarray) -> np.ndarray:
        small = array.dtype != np.float32 or array.size == 1
        return array if small else array.astype(np.float16).astype(np.float32)

    return with_arrays(model, narrow)


SMALL_TRANSFORMER = {"vocab": 50, "d": 32, "layers": 2, "heads": 4, "T": 16, "ff": 64}
MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], int, float]] = {
    "mlp": (lambda: zoo.mlp((20, 30, 15, 10)), 16, 0.1),
    "cnn": (lambda: zoo.cnn(size=14, width=(8, 12), hidden=16), 8, 0.1),
    "transformer": (lambda: zoo.transformer_encoder(**SMALL_TRANSFORMER, opset=17), 4, 0.05),
    "transformer-opset13": (lambda: zoo.transformer_encoder(**SMALL_TRANSFORMER, opset=13), 4,
                            0.05),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_float64_follows_pytorch(name, tmp_path):
    build, size, rate = MODELS[name]
    model = build()
    x, labels = batch(model, size)
    generate(retyped(model, np.float64), tmp_path)
    data = x.astype(np.float64) if x.dtype.kind == "f" else x
    ours = runs.ours(tmp_path, data, labels, rate)
    # Learning rates, and attributes of nodes, are float32.
    theirs = runs.pytorch(model, x, labels, float(np.float32(rate)), prepare=round_epsilons)
    assert theirs.losses[-1] < 0.9 * theirs.losses[0]
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-10)
    np.testing.assert_allclose(ours.eval_loss, theirs.eval_loss, rtol=1e-10)
    for parameter, value in theirs.values.items():
        assert ours.values[parameter].dtype == np.float64
        np.testing.assert_allclose(ours.values[parameter], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("level", ["off", "default"])
@pytest.mark.parametrize("name", MODELS)
def test_float16_follows_pytorch(name, level, tmp_path):
    build, size, rate = MODELS[name]
    model = rounded(build())
    x, labels = batch(model, size)
    if x.dtype.kind == "f":
        x = x.astype(np.float16).astype(np.float32)
    generate(retyped(model, np.float16), tmp_path)
    options = None
    if level == "off":
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = x.astype(np.float16) if x.dtype.kind == "f" else x
    ours = runs.ours(tmp_path, data, labels, rate, options=options)
    theirs = runs.pytorch(model, x, labels, rate)
    assert theirs.losses[-1] < 0.9 * theirs.losses[0]
    # A number of float16 is right to 2^-11 = 5e-4 of itself.
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-3)
    initial = runs.initial(model)
    for parameter, value in theirs.values.items():
        assert ours.values[parameter].dtype == np.float32
        error = np.linalg.norm(ours.values[parameter] - value)
        way = np.linalg.norm(value - initial[parameter])
        # The way is a sum of gradients whose numbers are each right to a few times 2^-11.
        assert error < 1e-2 * way + 1e-5, parameter


@pytest.mark.parametrize("loss", LOSSES)
def test_float16_losses_are_computed_in_float32(loss, tmp_path):
    """Large and small values, whose squares and means float16 cannot hold."""
    model = retyped(linear(), np.float16)
    state, module, _ = open_training(make(model, tmp_path, loss=LOSSES[loss]))
    random = np.random.default_rng(0)
    x = random.standard_normal((500, 3)).astype(np.float16) * np.float16(100)
    specs = module.input_specs()
    assert [spec.dtype for spec in specs] == [np.float16, np.int64 if loss == "cross_entropy"
                                              else np.float32]  # fmt: skip
    target = random.integers(0, 2, 500 if loss == "cross_entropy" else (500, 2))
    value = module(x, target.astype(specs[1].dtype))
    assert value.dtype == np.float32
    assert np.isfinite(value)
    w, b = (state.parameters[n].data.astype(np.float16).astype(np.float64) for n in "wb")
    y = x.astype(np.float64) @ w + b
    if loss == "cross_entropy":
        terms = np.logaddexp(y[:, 0], y[:, 1]) - y[np.arange(500), target]
    else:
        terms = {
            "mse": (y - target) ** 2,
            "l1": np.abs(y - target),
            "bce_with_logits": np.logaddexp(0, y) - y * target,
        }[loss]
    np.testing.assert_allclose(value, terms.mean(), rtol=1e-3)
    gradient = state.parameters["w"].grad
    assert gradient.dtype == np.float32
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("stages", split([2, 7], lambda stages: stages == 2))
def test_float16_batch_normalization_keeps_statistics(stages, tmp_path):
    """A float16 MobileNetV2 with statistics, kept in float16 as the model has them."""
    model = rounded(zoo.mobilenet_v2(batch_norm="train", stages=stages))
    x, labels = batch(model, 4)
    x = x.astype(np.float16).astype(np.float32)
    generate(retyped(model, np.float16), tmp_path, frozen_params=statistic_names(model))
    ours = runs.ours(tmp_path, x.astype(np.float16), labels, 0.01, steps=1)
    theirs = runs.pytorch(model, x, labels, 0.01, steps=1)
    assert ours.losses == pytest.approx(theirs.losses, rel=5e-3)
    for name in statistic_names(model):
        assert ours.values[name].dtype == np.float16
        np.testing.assert_allclose(ours.values[name], theirs.values[name], rtol=5e-3, atol=5e-3)


def test_a_float16_package(tmp_path):
    """Master values, gradients and checkpoint are float32; the exported model is float16."""
    model = retyped(zoo.mlp((20, 30, 15, 10)), np.float16)
    forward = tmp_path / "forward.onnx"
    onnx.save(model, forward)
    folder = generate(model, tmp_path / "package", OptimType.AdamW)
    names = trainable_names(model)
    entries = json.loads((folder / "manifest.json").read_text())["parameters"]
    assert {(p["dtype"], p["model_dtype"]) for p in entries} == {("float32", "float16")}
    state, module, optimizer = open_training(folder)
    x, labels = batch(zoo.mlp((20, 30, 15, 10)), 8)
    x = x.astype(np.float16)
    module(x, labels)
    optimizer.set_learning_rate(1e-5)
    before = {name: parameter.data.copy() for name, parameter in state.parameters}
    optimizer.step()
    for name, parameter in state.parameters:
        assert parameter.data.dtype == np.float32
        assert parameter.grad.dtype == np.float32
        # A step so small that float16 values would swallow it.
        moved = parameter.data != before[name]
        assert moved[parameter.grad != 0].mean() > 0.95
    assert module.get_contiguous_parameters().numpy().dtype == np.float32
    CheckpointState.save_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    loaded = CheckpointState.load_checkpoint(tmp_path / "c")
    assert all(np.array_equal(loaded.parameters[n].data, p.data) for n, p in state.parameters)
    exported = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(exported, ["output"])
    inference = onnx.load(exported)
    onnx.checker.check_model(inference, full_check=True)
    assert [node.op_type for node in inference.graph.node] == [n.op_type for n in model.graph.node]
    assert {t.name for t in inference.graph.initializer} == set(names)
    assert all(t.data_type == TensorProto.FLOAT16 for t in inference.graph.initializer)
    assert abs(exported.stat().st_size - forward.stat().st_size) < 500
    for tensor in inference.graph.initializer:
        wanted = state.parameters[tensor.name].data.astype(np.float16)
        assert np.array_equal(numpy_helper.to_array(tensor), wanted)
    assert computed(exported, input=x)[0].dtype == np.float16


def test_a_value_that_float16_cannot_hold_is_not_exported(tmp_path):
    state, module, _ = open_training(make(retyped(linear(), np.float16), tmp_path))
    state.parameters["w"].data[0, 0] = 1e5
    with refused("value-out-of-range", "'w'"):
        module.export_model_for_inferencing(tmp_path / "inference.onnx", ["y"])
    assert not (tmp_path / "inference.onnx").exists()


def test_mixed_types_train_in_the_widest(tmp_path):
    """A double head on a float32 trunk, with a frozen float16 table in front."""
    random = np.random.default_rng(0)
    table, trunk, w = (random.standard_normal(s) for s in ((5, 3), (3, 4), (4, 2)))
    arrays = {"table": table.astype(np.float16), "trunk": trunk.astype(np.float32), "w": w}
    model = parsed(
        "(int64[N] i) => (double[N, 2] y) { row = Gather(table, i) wide = Cast<to = 1>(row)"
        " h = MatMul(wide, trunk) d = Cast<to = 11>(h) y = MatMul(d, w) }",
        **arrays,
    )
    generate_artifacts(model, ["trunk", "w"], ["table"], LossType.MSELoss, OptimType.SGD, tmp_path)
    state, module, optimizer = open_training(tmp_path)
    dtypes = {name: parameter.data.dtype for name, parameter in state.parameters}
    assert dtypes == {"table": np.float16, "trunk": np.float64, "w": np.float64}
    i, target = np.array([0, 4, 4, 2]), random.standard_normal((4, 2))
    loss = module(i, target)
    h = arrays["table"][i].astype(np.float32) @ arrays["trunk"]
    error = h.astype(np.float64) @ w - target
    np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-6)
    np.testing.assert_allclose(state.parameters["w"].grad, h.T @ error / 4, rtol=1e-5)
    optimizer.step()
    everything = module.get_contiguous_parameters()
    assert everything.numpy().dtype == np.float64
    assert everything.numpy().size == 15 + 12 + 8
    module.copy_buffer_to_parameters(np.zeros(35), trainable_only=False)
    assert not any(parameter.data.any() for _, parameter in state.parameters)
    module.copy_buffer_to_parameters(everything, trainable_only=False)
    assert np.array_equal(state.parameters["table"].data, arrays["table"])


@pytest.mark.parametrize("node", ["Conv(x, w)", "MaxPool <kernel_shape = [3, 3]>(h)"])
def test_float64_windows_on_planes_of_unknown_size_are_refused(node, tmp_path):
    """The pool has a kernel, and its gradient has none."""
    before = "h = Mul(x, w)" if "(h)" in node else ""
    text = f"(double[N, 2, H, W] x) => (double[N, c, h, v] y) {{ {before} y = {node} }}"
    model = parsed(text, w=np.ones((2, 1, 1) if before else (2, 2, 3, 3)))
    with refused("unsupported-in-double", "no float64 kernel"):
        make(model, tmp_path / "package", requires_grad=["w"])
    assert not (tmp_path / "package").exists()


def test_bfloat16_is_refused():
    model = ir.from_proto(linear())
    value = model.graph.initializers["b"]
    tensor = ir.tensor(np.zeros(2, ir.DataType.BFLOAT16.numpy()), dtype=ir.DataType.BFLOAT16)
    value.const_value, value.type = tensor, ir.TensorType(ir.DataType.BFLOAT16)
    cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)})
    value.replace_all_uses_with(cast.outputs[0])
    cast.replace_input_with(0, value)
    model.graph.insert_before(model.graph[0], cast)
    with refused("bfloat16-not-supported", "'b' is of type BFLOAT16"):
        generate_artifacts(model, ["w"], loss=LossType.MSELoss, optimizer=OptimType.SGD)


def test_integers_are_not_trained(tmp_path):
    model = linear(more="z = Add(y, offset)", outputs="float[N, 2] y, float[N, 2] z",
                   offset=np.ones(2, np.float32))  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "count"))
    model.graph.node.append(onnx.helper.make_node("Cast", ["count"], ["c"], to=TensorProto.FLOAT))
    with refused("dtype-not-trainable", "'count' is of type INT64"):
        make(model, tmp_path, requires_grad=["w", "count"])


def test_a_double_checkpoint_resumes(tmp_path):
    make(retyped(linear(), np.float64), tmp_path, optimizer=OptimType.AdamW)
    random = np.random.default_rng(1)
    x, target = random.standard_normal((4, 3)), random.standard_normal((4, 2))

    def steps(folder: Path, count: int, checkpoint: Path | None = None) -> CheckpointState:
        state, module, optimizer = open_training(folder, checkpoint=checkpoint)
        losses_of_steps(module, optimizer, [(x, target)] * count)
        return state

    half = steps(tmp_path, 2)
    CheckpointState.save_checkpoint(half, tmp_path / "half", include_optimizer_state=True)
    resumed, whole = steps(tmp_path, 2, tmp_path / "half"), steps(tmp_path, 4)
    for name, parameter in whole.parameters:
        assert np.array_equal(resumed.parameters[name].data, parameter.data)
        assert parameter.data.dtype == np.float64


def test_an_optimizer_of_another_type_is_refused(tmp_path):
    half, double = (
        make(retyped(linear(), dtype), tmp_path / dtype.__name__)
        for dtype in (np.float16, np.float64)
    )
    with refused("not-an-optimizer"):
        Optimizer(half / "optimizer_model.onnx", open_module(double))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_of_float16(kind, tmp_path):
    """They run in float32; their parameters are float16 in the model, also in the exported one."""
    count = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    random = np.random.default_rng(3)
    shapes = {"w": (1, count * 4, 3), "r": (1, count * 4, 4), "head": (4, 2)}
    arrays = {n: random.uniform(-0.5, 0.5, s).astype(np.float32) for n, s in shapes.items()}
    model = parsed(
        f"(float[5, N, 3] x) => (float[N, 2] y) {{ all, last = {kind} <hidden_size = 4>(x, w, r)"
        " h = Squeeze(last, zero) y = MatMul(h, head) }",
        **arrays, zero=np.array([0]),
    )  # fmt: skip
    model, names = rounded(model), list(shapes)
    x = random.standard_normal((5, 6, 3)).astype(np.float16)
    target = random.standard_normal((6, 2)).astype(np.float32)
    assert find_obstacles(load_model(retyped(model, np.float16)), names, ["y"]) == []
    found = {}
    for dtype in (np.float16, np.float32):
        each = model if dtype is np.float32 else retyped(model, dtype)
        folder = make(each, tmp_path / dtype.__name__, requires_grad=names)
        state, module, _ = open_training(folder)
        loss = module(x.astype(dtype), target)
        found[dtype] = float(loss), [state.parameters[name].grad for name in names]
        module.export_model_for_inferencing(folder / "inference.onnx", ["y"])
        initializers = onnx.load(folder / "inference.onnx").graph.initializer
        kept = {t.data_type for t in initializers if t.name in names}
        assert kept == {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    (half, gradients), (single, wanted) = found[np.float16], found[np.float32]
    assert half == pytest.approx(single, rel=1e-3)
    for ours, theirs in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-3)
