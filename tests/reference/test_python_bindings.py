"""Every test of the reference's suite for ``onnxruntime.training.api``, by what it checks.

Written anew: the name of each test is that of its counterpart in ONNX Runtime's
``orttraining_test_ort_apis_py_bindings.py``. Where that one accepts a defect, this one does not.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from odtpack.artifacts import LossType, OptimType
from odtpack_runtime import (
    CheckpointState,
    LinearLRScheduler,
    Module,
    OdtpackError,
    Optimizer,
    UnknownKeyError,
    WrongTypeError,
)
from tests import zoo
from tests.model_text import computed, parsed
from tests.packaging_tools import OPTIMIZERS, generate, open_module, open_training, trainable_names
from tests.refused import refused
from tests.torch_twins import twin
from tests.training.forward import make

MODEL = zoo.mlp((784, 500, 10))
NAMES = trainable_names(MODEL)


def data(size: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((size, 784), dtype=np.float32), random.integers(0, 10, size)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(
        MODEL, tmp_path_factory.mktemp("package"), OptimType.AdamW,
        nominal_checkpoint=True, additional_output_names=["output"],
    )  # fmt: skip


def pytorch() -> nn.Module:
    return twin(MODEL).double()


def pytorch_loss(module: nn.Module, x: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    return F.cross_entropy(module(torch.from_numpy(x).double()), torch.from_numpy(labels))


def test_train_step(package):
    """The loss, and beyond the reference's test every gradient."""
    state, module, _ = open_training(package)
    x, labels = data()
    theirs = pytorch()
    loss = pytorch_loss(theirs, x, labels)
    loss.backward()
    ours, logits = module(x, labels)
    np.testing.assert_allclose(ours, loss.item(), rtol=1e-6)
    assert logits.shape == (64, 10)
    for name, parameter in theirs.named_parameters():
        found = state.parameters[name].grad
        np.testing.assert_allclose(found, parameter.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_eval_step(package):
    state, module, _ = open_training(package)
    x, labels = data()
    loss, logits = module.eval()(x, labels)
    theirs = pytorch()
    np.testing.assert_allclose(loss, pytorch_loss(theirs, x, labels).item(), rtol=1e-6)
    wanted = theirs(torch.from_numpy(x).double()).detach().numpy()
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)
    assert not any(parameter.grad.any() for _, parameter in state.parameters)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_step(optimizer, tmp_path):
    """Parameters change, and by what PyTorch's SGD says."""
    state, module, stepper = open_training(generate(MODEL, tmp_path, OPTIMIZERS[optimizer]))
    x, labels = data()
    before = {name: parameter.data.copy() for name, parameter in state.parameters}
    module(x, labels)
    gradients = {name: parameter.grad.copy() for name, parameter in state.parameters}
    stepper.step()
    for name, parameter in state.parameters:
        assert not np.array_equal(parameter.data, before[name])
        assert np.array_equal(parameter.grad, gradients[name])  # they are not cleared
        if optimizer == "sgd":
            wanted = before[name] - np.float32(0.001) * gradients[name]
            np.testing.assert_allclose(parameter.data, wanted, rtol=1e-6)


def test_get_and_set_lr(package):
    _, _, optimizer = open_training(package)
    assert optimizer.get_learning_rate() == pytest.approx(0.001)
    optimizer.set_learning_rate(0.5)
    assert optimizer.get_learning_rate() == 0.5


def test_scheduler_step(package):
    _, module, optimizer = open_training(package)
    scheduler = LinearLRScheduler(optimizer, 1, 2, 0.2)
    assert optimizer.get_learning_rate() == 0
    found = []
    for _ in range(2):
        module(*data())
        optimizer.step()
        scheduler.step()
        found.append(optimizer.get_learning_rate())
    assert found == pytest.approx([0.2, 0.0])


def test_training_module_checkpoint(package, tmp_path):
    state, module, optimizer = open_training(package)
    module(*data())
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "trained")
    loaded = CheckpointState.load_checkpoint(tmp_path / "trained")
    for name, parameter in loaded.parameters:
        assert np.array_equal(parameter.data, state.parameters[name].data)
        assert parameter.requires_grad
    again = Module(package / "training_model.onnx", loaded)
    old, new = module.get_contiguous_parameters(), again.get_contiguous_parameters()
    assert np.array_equal(old.numpy(), new.numpy())


@pytest.mark.parametrize("trainable_only", [True, False])
@pytest.mark.parametrize("with_frozen", [True, False])
def test_copy_buffer_to_parameters(trainable_only, with_frozen, tmp_path):
    frozen = NAMES[:2] if with_frozen else []
    trained = [name for name in NAMES if name not in frozen]
    generate(MODEL, tmp_path, OptimType.AdamW, requires_grad=trained, frozen_params=frozen)
    state, module, optimizer = open_training(tmp_path)
    before = module.get_contiguous_parameters(trainable_only)
    size = sum(state.parameters[n].data.size for n in (trained if trainable_only else NAMES))
    assert module.get_parameters_size(trainable_only) == size == before.numpy().size
    module(*data())
    optimizer.step()
    after = module.get_contiguous_parameters(trainable_only).numpy()
    assert not np.array_equal(before.numpy(), after)
    module.copy_buffer_to_parameters(before, trainable_only)
    restored = module.get_contiguous_parameters(trainable_only).numpy()
    assert np.array_equal(restored, before.numpy())


def test_export_model_for_inferencing(package, tmp_path):
    _, module, optimizer = open_training(package)
    x, labels = data()
    module(x, labels)
    optimizer.step()
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["output"])
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert [value.name for value in onnx.load(path).graph.input] == ["input"]
    (logits,) = computed(path, input=x)
    np.testing.assert_allclose(logits, module.eval()(x, labels)[1], rtol=1e-5, atol=1e-5)


def test_cuda_execution_provider(package):
    """There is no other device; the reference's test only makes the Module."""
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    with refused("unsupported-device", "cuda"):
        Module(package / "training_model.onnx", state, device="cuda")


@pytest.mark.parametrize(("value", "kept"), [
    (0, 0), (5, 5), (-7, -7), (2**40, 2**40), (True, 1), (0.0, 0.0), (1.0, 1.0), (-0.25, -0.25),
    (np.float32(2.0), 2.0),  # an int in the reference
    ("", ""), ("Hello", "Hello"), (b"bytes", "bytes"),
])  # fmt: skip
@pytest.mark.parametrize("with_module", [True, False])
def test_add_get_property(value, kept, with_module, package, tmp_path):
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    if with_module:
        Module(package / "training_model.onnx", state)
    assert len(state.properties) == 0
    state.properties["property"] = value
    assert "property" in state.properties
    assert len(state.properties) == 1
    assert list(state.properties) == [("property", kept)]
    CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    found = CheckpointState.load_checkpoint(tmp_path / "checkpoint").properties["property"]
    assert (found, type(found)) == (kept, type(kept))


def test_properties_of_other_kinds(package):
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    for value in (None, [1, 2], {"a": 1}):
        with pytest.raises(WrongTypeError):
            state.properties["property"] = value
    with pytest.raises(KeyError):
        state.properties["property"]
    state.properties["property"] = 1
    state.properties["property"] = "of another type"
    assert state.properties["property"] == "of another type"


def test_get_input_output_names(package):
    """In the order of a call: the user's inputs and outputs only."""
    _, module, _ = open_training(package)
    for mode in (True, False):
        assert module.train(mode).input_names() == ["input", "labels"]
        assert module.output_names() == ["loss", "output"]


CUSTOM = """(float[N, 3] x) => (float[N, 2] y)
    { c = test.customop.Prepare(x) h = MatMul(c, w) y = Add(h, b) }"""


def test_ort_custom_ops(tmp_path):
    """A custom operator stands in front of what is trained, and the session's options load it."""
    weights = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
    model = parsed(CUSTOM, domains=["test.customop"], **weights)
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, ["N", 3])
    )
    make(model, tmp_path, optimizer=None)
    for name in ("training", "eval"):
        nodes = onnx.load(tmp_path / f"{name}_model.onnx").graph.node
        assert ("test.customop", "Prepare") in {(node.domain, node.op_type) for node in nodes}
    with refused("model-not-loadable", "Prepare"):
        open_module(tmp_path)
    options = onnxruntime.SessionOptions()
    with pytest.raises(Exception, match="no-such-library"):
        options.register_custom_ops_library("no-such-library.so")


STRINGS = """(string[N, 1] words) => (float[N, 2] y) {
    i = ai.onnx.ml.LabelEncoder <keys_strings = ["zero", "one", "two"],
                                 values_floats = [0.0, 1.0, 2.0], default_float = 5.0>(words)
    h = MatMul(i, w) y = Add(h, b) }"""


def test_string_inputs(tmp_path):
    random = np.random.default_rng(0)
    w, b = (random.standard_normal(s).astype(np.float32) for s in ((1, 2), (2,)))
    model = parsed(STRINGS, domains={"ai.onnx.ml": 3}, w=w, b=b)
    make(model, tmp_path, loss=LossType.CrossEntropyLoss)
    state, module, optimizer = open_training(tmp_path)
    words, labels = np.array([["two"], ["one"], ["three"]]), np.array([0, 1, 1])
    logits = torch.tensor([[2.0], [1.0], [5.0]]) @ torch.from_numpy(w)
    wanted = F.cross_entropy(logits + torch.from_numpy(b), torch.from_numpy(labels))
    for mode in (True, False):
        np.testing.assert_allclose(module.train(mode)(words, labels), wanted.item(), rtol=1e-5)
    optimizer.step()
    assert not np.array_equal(state.parameters["w"].data, w)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_step_with_ort_values(training, package):
    _, module, _ = open_training(package)
    x, labels = data()
    expected = module.train(training)(x, labels)
    module.lazy_reset_grad()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in (x, labels)]
    results = module(*values)
    assert all(isinstance(result, onnxruntime.OrtValue) for result in results)
    for result, array in zip(results, expected, strict=True):
        assert np.array_equal(result.numpy(), array)


def test_get_and_set_parameter_values(package):
    """By name and by iteration, before and after a Module exists; live views of both."""
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    theirs = dict(pytorch().named_parameters())
    assert len(state.parameters) == len(theirs)
    assert [name for name, _ in state.parameters] == sorted(theirs)
    for name, parameter in state.parameters:
        assert name in state.parameters
        assert parameter.name == name
        assert parameter.requires_grad
        assert parameter.grad is None
        np.testing.assert_array_equal(parameter.data, theirs[name].detach().numpy())
    state.parameters["fc1.bias"] = np.ones(500, np.float32)  # an error in the reference
    assert (state.parameters["fc1.bias"].data == 1).all()
    module = Module(package / "training_model.onnx", state, package / "eval_model.onnx")
    optimizer = Optimizer(package / "optimizer_model.onnx", module)
    weight = state.parameters["fc1.weight"]
    view, gradient = weight.data, weight.grad
    assert not gradient.any()
    module(*data())
    assert gradient.any()
    old = view.copy()
    optimizer.step()
    assert not np.array_equal(view, old)
    saved = weight.data.copy()
    weight.data = np.zeros_like(view)
    assert not view.any()
    state.parameters["fc1.weight"] = saved
    assert np.array_equal(view, saved)
    with pytest.raises(UnknownKeyError):
        state.parameters["no such parameter"]
    with pytest.raises(OdtpackError):
        weight.data = np.zeros((3, 3), np.float32)
    with pytest.raises(AttributeError):
        weight.grad = saved  # type: ignore[misc]
    assert "fc1.weight" in repr(state.parameters)  # a TypeError in the reference


def test_model_construction_with_nominal_checkpoint(package):
    """Sizes are known; what needs values says so."""
    full = CheckpointState.load_checkpoint(package / "checkpoint")
    state = CheckpointState.load_checkpoint(package / "nominal_checkpoint")
    module = Module(package / "training_model.onnx", state, package / "eval_model.onnx")
    reference = Module(package / "training_model.onnx", full)
    for trainable_only in (True, False):
        size = reference.get_parameters_size(trainable_only)
        assert module.get_parameters_size(trainable_only) == size > 0
    for use in (
        lambda: module(*data()),
        module.get_contiguous_parameters,
        lambda: state.parameters["fc1.weight"],
    ):
        with refused("nominal-state"):
            use()


def test_train_with_nominal_checkpoint(package, tmp_path):
    state, module, optimizer = open_training(package)
    nominal, other, other_optimizer = open_training(
        package, checkpoint=package / "nominal_checkpoint"
    )
    other.copy_buffer_to_parameters(module.get_contiguous_parameters(), trainable_only=False)
    for seed in range(3):
        ours, theirs = (each(*data(seed=seed))[0] for each in (other, module))
        assert ours == theirs
        for each in (other_optimizer, optimizer):
            each.step()
    CheckpointState.save_checkpoint(nominal, tmp_path / "complete")
    loaded = CheckpointState.load_checkpoint(tmp_path / "complete")
    assert not loaded.is_nominal
    for name, parameter in state.parameters:
        assert np.array_equal(loaded.parameters[name].data, parameter.data)
