import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx.helper
import onnxruntime
import pytest

from odtpack_runtime import Module, OdtpackError, Optimizer, UnknownNameError
from odtpack_runtime.export import inference_model as export_module
from tests.programs import ran
from tests.refused import refused
from tests.runtime import models

X = np.arange(6, dtype=np.float32).reshape(2, 3)
T = np.ones((2, 2), np.float32)


def run(path: Path, **feeds: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [node.name for node in session.get_inputs()] == list(feeds)
    return session.run(None, feeds)


def test_the_exported_model_has_the_current_parameters(regression, tmp_path):
    module = regression.module()
    module(X, T)
    Optimizer(regression.sgd, module).step()
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["prediction"])
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {tensor.name for tensor in model.graph.initializer} == {"W", "b", "scale"}
    assert [node.op_type for node in model.graph.node] == ["Mul", "MatMul", "Add"]
    assert list(model.metadata_props) == []
    (prediction,) = run(path, input=X)
    values = models.Regression.of(module.state)
    np.testing.assert_allclose(prediction, (X * values.scale) @ values.W + values.b, rtol=1e-5)
    before = path.read_bytes()
    module.export_model_for_inferencing(path, ["prediction"])
    assert path.read_bytes() == before


def test_any_value_can_be_an_output(regression, tmp_path):
    module = regression.module()
    parameters = module.state.parameters
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["product", "scaled"])
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {tensor.name for tensor in model.graph.initializer} == {"W", "scale"}
    product, scaled = run(path, input=X)
    assert np.array_equal(scaled, X * parameters["scale"].data)
    np.testing.assert_allclose(product, scaled @ parameters["W"].data, rtol=1e-6)
    # The loss needs the target, so the target remains an input.
    module.export_model_for_inferencing(path, ["loss", "prediction"])
    loss, prediction = run(path, input=X, target=T)
    np.testing.assert_allclose(loss, ((prediction - T) ** 2).mean(), rtol=1e-6)


CONTROL_FLOW = f"""{models.HEADER}
evaluation (float[batch, 3] input, float[batch, 2] target, float[3, 2] W, float[3] scale,
            float[2] b)
        => (float loss, float[batch, 2] prediction)
{{
    scaled = Mul(input, scale) total = ReduceSum<keepdims = 0>(scaled)
    half = Constant<value_float = 0.5>() positive = Greater(total, half) unused = Add(b, b)
    prediction = If (positive) <
        then_branch = positive_branch () => (float[batch, 2] p) {{ p = MatMul(scaled, W) }},
        else_branch = negative_branch () => (float[batch, 2] q) {{
            r = MatMul(scaled, W) q = Add(r, b)
        }}
    >
    difference = Sub(prediction, target) square = Mul(difference, difference)
    loss = ReduceMean<keepdims = 0>(square)
}}"""


def test_values_that_a_subgraph_reads_are_kept(regression, tmp_path):
    evaluation = models.write(tmp_path, "control.onnx", CONTROL_FLOW)
    module = Module(regression.training, regression.state(), evaluation)
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["prediction"])
    assert "unused" not in [node.output[0] for node in onnx.load(path).graph.node]
    for sign in (1, -1):
        (prediction,) = run(path, input=sign * X)
        assert np.array_equal(prediction, module.eval()(sign * X, T)[1])


def test_values_of_unknown_type_can_be_outputs(regression, tmp_path):
    gelu = "activated = com.microsoft.QuickGelu(scaled) product = MatMul(activated, W)"
    text = models.REGRESSION_EVAL.replace("product = MatMul(scaled, W)", gelu)
    text = text.replace('["" : 17]', '["" : 17, "com.microsoft" : 1]')
    evaluation = models.write(tmp_path, "contrib.onnx", text)
    state = regression.state()
    module = Module(regression.training, state, evaluation)
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["activated"])
    scaled = X * state.parameters["scale"].data.astype(np.float64)
    expected = scaled / (1 + np.exp(-1.702 * scaled))
    np.testing.assert_allclose(run(path, input=X)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("names", "kind"), [
    (["nothing"], UnknownNameError), (["prediction", "nothing"], UnknownNameError),
    (["input"], UnknownNameError), (["W"], UnknownNameError), ([], OdtpackError),
    (["prediction", "prediction"], OdtpackError), ("prediction", TypeError), ([1], TypeError),
])  # fmt: skip
def test_names_that_cannot_be_outputs(regression, tmp_path, names, kind):
    with pytest.raises(kind):
        regression.module().export_model_for_inferencing(tmp_path / "inference.onnx", names)
    assert not (tmp_path / "inference.onnx").exists()


@pytest.mark.parametrize("source", ["onnx", "ort"])
@pytest.mark.parametrize("destination", ["onnx", "ort"])
def test_from_and_to_ort_format(regression, tmp_path, source, destination):
    evaluation = regression.evaluation
    if source == "ort":
        evaluation = models.to_ort(evaluation, tmp_path / "eval.ort")
    state = regression.state()
    module = Module(regression.training, state, evaluation)
    state.parameters["b"].data = np.float32([3, -4])
    _, expected = module.eval()(X, T)
    path = tmp_path / f"inference.{destination}"
    module.export_model_for_inferencing(path, ["prediction"])
    assert (path.read_bytes()[4:8] == b"ORTM") == (destination == "ort")
    (prediction,) = run(path, input=X)
    np.testing.assert_allclose(prediction, expected, rtol=1e-6)
    if destination == "onnx":
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert {tensor.name for tensor in model.graph.initializer} == {"W", "b", "scale"}
        assert [entry.domain for entry in model.opset_import] == [""]


def test_a_value_that_the_conversion_to_ort_format_dropped(regression, tmp_path):
    evaluation = models.to_ort(regression.evaluation, tmp_path / "e.ort")
    module = Module(regression.training, regression.state(), evaluation)
    with refused("unknown-output", "prediction", kind=UnknownNameError):
        module.export_model_for_inferencing(tmp_path / "inference.onnx", ["product"])


def test_an_evaluation_model_that_is_damaged(regression, tmp_path):
    path = models.to_ort(regression.evaluation, tmp_path / "eval.ort")
    module = Module(regression.training, regression.state(), path)
    for content in (path.read_bytes()[:64], b"not a model at all"):
        path.write_bytes(content)
        with refused("model-not-loadable"):
            module.export_model_for_inferencing(tmp_path / "inference.onnx", ["prediction"])
        assert not (tmp_path / "inference.onnx").exists()


def test_evaluation_models_that_are_mutated(regression, tmp_path):
    """Whatever stands in the file, it is exported or there is one clear error."""
    module = regression.module()
    whole = regression.evaluation.read_bytes()
    random = np.random.default_rng(0)
    codes = Counter()
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(random.integers(1, 4)):
            data[random.integers(len(data))] = random.integers(256)
        cut = random.integers(len(data)) if random.random() < 0.3 else len(data)
        regression.evaluation.write_bytes(data[:cut])
        path = tmp_path / "inference.onnx"
        try:
            module.export_model_for_inferencing(path, ["prediction", "scaled"])
            codes["written"] += 1
        except OdtpackError as error:
            codes[error.code] += 1
    assert codes.keys() <= {"written", "model-not-loadable", "unknown-output"}
    assert min(codes.values()) >= 5


def test_a_model_that_is_too_large(regression, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "MAX_MODEL_SIZE", 100)
    with refused("model-too-large"):
        regression.module().export_model_for_inferencing(tmp_path / "m.onnx", ["prediction"])


WITHOUT_ONNX = """
import sys
sys.modules["onnx"] = None
from odtpack_runtime import CheckpointState, Module
folder = sys.argv[1]
state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
module = Module(f"{folder}/training_model.onnx", state, f"{folder}/eval_model.onnx")
module.export_model_for_inferencing(f"{folder}/inference.onnx", ["prediction", "product"])
"""


def test_without_the_onnx_package(regression):
    ran(sys.executable, "-W", "error", "-c", WITHOUT_ONNX, regression.folder)
    path = regression.folder / "inference.onnx"
    onnx.checker.check_model(onnx.load(path), full_check=True)
    prediction, _ = run(path, input=X)
    assert np.array_equal(prediction, regression.module().eval()(X, T)[1])
