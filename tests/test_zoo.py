"""The reference models against their PyTorch twins and against facts published elsewhere."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch.nn.functional import cross_entropy

import odtpack
from tests import zoo
from tests.torch_twins import losses_of, twin

SMALL = {
    "mlp": ("mlp", {"sizes": (12, 9, 7, 5)}),
    "cnn": ("cnn", {"channels": 2, "size": 10, "classes": 3, "width": (4, 6)}),
    "cnn_hidden": ("cnn", {"size": 8, "width": (3, 4), "hidden": 7}),
    "mobilenet_v2": ("mobilenet_v2", {"size": 33, "classes": 4, "width_mult": 0.25}),
    "mobilenet_v2_eval": ("mobilenet_v2",
                          {"size": 33, "classes": 4, "width_mult": 0.25, "batch_norm": "eval"}),
    "transformer_encoder": ("transformer_encoder",
                            {"vocab": 11, "d": 8, "layers": 2, "heads": 2, "T": 5, "ff": 12,
                             "classes": 3}),
}  # fmt: skip
TRAIN_NORM = {"size": 48, "classes": 4, "width_mult": 0.25, "batch_norm": "train"}


def example_input(model: onnx.ModelProto, batch: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    tensor = model.graph.input[0].type.tensor_type
    shape = [batch, *(dim.dim_value for dim in tensor.shape.dim[1:])]
    if tensor.elem_type == onnx.TensorProto.INT64:
        vocab = next(
            t.dims[0] for t in model.graph.initializer if t.name == "token_embedding.weight"
        )
        return random.integers(0, vocab, shape)
    return random.standard_normal(shape, dtype=np.float32)


def scatter_parameters(model: onnx.ModelProto) -> None:
    """Moves zeros and ones (biases, scales, statistics) away from where mistakes cancel out."""
    random = np.random.default_rng(7)
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        moved = values * random.uniform(0.8, 1.2, values.shape)
        if not tensor.name.endswith("running_var"):
            moved += random.uniform(-0.05, 0.05, values.shape)
        tensor.CopyFrom(onnx.numpy_helper.from_array(moved.astype(np.float32), tensor.name))


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (output,) = session.run(["output"], {"input": x})
    return output


@pytest.mark.parametrize("opset", [12, 13, 17, 21])
@pytest.mark.parametrize("case", SMALL)
def test_forward_equals_pytorch(case, opset):
    name, arguments = SMALL[case]
    model = zoo.MODELS[name](**arguments, opset=opset)
    scatter_parameters(model)
    onnx.checker.check_model(model, full_check=True)
    x = example_input(model, batch=3)
    expected = twin(model)(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(run(model, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_default_size_equals_pytorch(name):
    model = zoo.MODELS[name]()
    onnx.checker.check_model(model, full_check=True)
    x = example_input(model, batch=2)
    expected = twin(name)(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(run(model, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", range(12, 24))
@pytest.mark.parametrize("case", SMALL)
def test_every_opset_is_checked_and_loads(case, opset):
    name, arguments = SMALL[case]
    model = zoo.MODELS[name](**arguments, opset=opset)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
    assert model.ir_version == (8 if opset <= 17 else 10)
    assert [value.name for value in model.graph.input] == ["input"]
    assert [value.name for value in model.graph.output] == ["output"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for batch in (1, 2):
        assert np.isfinite(run(model, example_input(model, batch))).all()


def test_batch_norm_in_training_mode_equals_pytorch():
    # The evaluator of the standard is the witness: it states what the statistics become.
    model = zoo.mobilenet_v2(**TRAIN_NORM, opset=15)
    scatter_parameters(model)
    onnx.checker.check_model(model, full_check=True)
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    statistics = [norm.output[i] for norm in (norms[0], norms[-1]) for i in (1, 2)]
    for name in statistics:
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        )
    x = example_input(model, batch=3)
    assert np.isfinite(run(model, x)).all()
    output, *updated = ReferenceEvaluator(model).run(None, {"input": x})
    module = twin(model)
    assert module.training
    expected = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-3)
    buffers = dict(module.named_buffers())
    for name, values in zip(statistics, updated, strict=True):
        statistic = buffers[name.removesuffix(".next")].numpy()
        np.testing.assert_allclose(values, statistic, rtol=1e-4, atol=1e-5)


def test_running_variance_of_pytorch_is_unbiased():
    model = zoo.mobilenet_v2(**TRAIN_NORM)
    x = torch.from_numpy(example_input(model, batch=3))
    biased, unbiased = twin(model), twin(model, running_var="unbiased")
    biased(x), unbiased(x)
    name = "features.0.1.running_var"
    n = 3 * 24 * 24
    first, second = (dict(m.named_buffers())[name] - 0.9 for m in (biased, unbiased))
    torch.testing.assert_close(first * n / (n - 1), second)
    plain = twin(model).features[0][0](x)
    torch.testing.assert_close(second, 0.1 * plain.var(dim=(0, 2, 3), unbiased=True))


@pytest.mark.parametrize("case", SMALL)
def test_names_and_shapes_are_those_of_the_twin(case):
    name, arguments = SMALL[case]
    model = zoo.MODELS[name](**arguments)
    module = twin(model)
    ours = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    theirs = {name: tuple(value.shape) for name, value in module.named_parameters()}
    assert ours == theirs | {name: tuple(value.shape) for name, value in module.named_buffers()}


def test_mobilenet_v2_has_as_many_parameters_as_published():
    # torchvision's MobileNet_V2_Weights.IMAGENET1K_V1 states num_params 3504872.
    model = zoo.mobilenet_v2(classes=1000, batch_norm="eval")
    learned = [t for t in model.graph.initializer if "running" not in t.name]
    assert sum(int(np.prod(t.dims)) for t in learned) == 3_504_872


@pytest.mark.parametrize("learning_rate", [0.01, 0.05])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("mlp", {}), ("cnn", {}), ("cnn", {"size": 8}), ("cnn", {"hidden": 128}),
     ("mobilenet_v2", {"size": 64, "width_mult": 0.5}),
     ("mobilenet_v2", {"size": 64, "width_mult": 0.5, "batch_norm": "eval"}),
     ("mobilenet_v2", {"size": 64, "width_mult": 0.5, "batch_norm": "train"}),
     ("transformer_encoder", {"d": 64, "T": 16, "ff": 128})],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)  # fmt: skip
def test_ten_steps_of_sgd_lower_the_loss(name, arguments, learning_rate):
    model = zoo.MODELS[name](**arguments)
    module = twin(model)
    x = torch.from_numpy(example_input(model, batch=16))
    labels = torch.arange(16) % 10
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    losses = losses_of(optimizer, lambda: cross_entropy(module(x), labels), 11)
    assert losses[0] < 3
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("name", zoo.MODELS)
def test_same_seed_same_bytes(name):
    build = zoo.MODELS[name]
    assert build(seed=3).SerializeToString() == build(seed=3).SerializeToString()
    assert build(seed=3).SerializeToString() != build(seed=4).SerializeToString()


@pytest.mark.parametrize(("name", "arguments", "culprit"), [
    ("mlp", {"sizes": (4,)}, "sizes"),
    ("mlp", {"sizes": (4, 0, 2)}, "sizes[1]"),
    ("mlp", {"opset": 11}, "opset"),
    ("cnn", {"opset": 24}, "opset"),
    ("cnn", {"size": 3}, "size"),
    ("cnn", {"hidden": 0}, "hidden"),
    ("mobilenet_v2", {"batch_norm": "frozen"}, "batch_norm"),
    ("mobilenet_v2", {"batch_norm": "train", "opset": 13}, "opset 14"),
    ("mobilenet_v2", {"width_mult": 0.0}, "width_mult"),
    ("transformer_encoder", {"d": 10, "heads": 4}, "heads"),
])  # fmt: skip
def test_bad_arguments_are_named(name, arguments, culprit):
    with pytest.raises(ValueError, match=re.escape(culprit)):
        zoo.MODELS[name](**arguments)


def test_the_demos_model_is_one_of_these():
    stored = Path(odtpack.__file__).parent / "demo/digits.onnx"
    model = zoo.cnn(size=8, width=(16, 32), seed=0)
    assert stored.read_bytes() == model.SerializeToString(deterministic=True)
