import numpy as np
import onnx_ir as ir
import pytest
import torch

from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops
from odtpack.passes import batch_norm
from tests.passes.tools import check, op_types, parse, run
from tests.refused import refused

NORM = """
norm (float[{shape}] x, float[3] scale, float[3] bias, float[3] mean, float[3] var)
    => (float[{shape}] {outputs}) {{ {body} }}
"""
TRAIN = (
    "y, m2, v2 = BatchNormalization <training_mode = 1 {attributes}> (x, scale, bias, mean, var)"
)


def _model(body="", shape="N, 3, 4, 5", attributes="", outputs="y", opset=17):
    body = body or TRAIN.format(attributes=attributes)
    text = NORM.format(shape=shape, body=body, outputs=outputs)
    return parse(text, opset, domains=[INTERNAL_DOMAIN])


def _feeds(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal(3, dtype=np.float32) for name in ("scale", "bias", "mean")
    }
    feeds["var"] = random.random(3, dtype=np.float32) + 0.5
    # Far from zero mean: a variance as a difference of squares would lose its digits.
    feeds["x"] = random.standard_normal(shape, dtype=np.float32) * 3 + 20
    return feeds


def _lowered(model: ir.Model) -> ir.Model:
    """Marked and written out, the updates of the statistics as further outputs."""
    batch_norm.mark(model.graph)
    updates = batch_norm.lower(Ops(model.graph, "new/"), model.graph)
    assert INTERNAL_DOMAIN not in {node.domain for node in model.graph}
    model.graph.opset_imports.pop(INTERNAL_DOMAIN)
    for update in updates:
        update.update.name = f"{update.name}.out"
        update.update.shape = ir.Shape([3])
        model.graph.outputs.append(update.update)
    return check(model)


@pytest.mark.parametrize("shape", [(7, 3), (5, 3, 6), (4, 3, 4, 5), (2, 3, 2, 3, 4), (2, 3)])
@pytest.mark.parametrize(
    ("attributes", "momentum", "epsilon"),
    [("", 0.9, 1e-5), (", momentum = 0.6, epsilon = 0.1", 0.6, 0.1)],
)
def test_agrees_with_pytorch(shape, attributes, momentum, epsilon):
    model = _lowered(_model(shape=", ".join(["N", *map(str, shape[1:])]), attributes=attributes))
    feeds = _feeds(shape)
    results = run(model, feeds)
    given = {name: torch.from_numpy(value).double() for name, value in feeds.items()}
    # PyTorch counts the momentum the other way round.
    expected = torch.nn.functional.batch_norm(
        *(given[name] for name in ("x", "mean", "var", "scale", "bias")),
        training=True, momentum=1 - momentum, eps=epsilon,
    )  # fmt: skip
    np.testing.assert_allclose(results["y"], expected.numpy(), rtol=1e-4, atol=1e-4)
    # PyTorch writes the statistics in place, the variance unbiased.
    np.testing.assert_allclose(results["mean.out"], given["mean"].numpy(), rtol=1e-6)
    np.testing.assert_allclose(results["var.out"], given["var"].numpy(), rtol=1e-5)


def test_one_element_has_no_variance():
    results = run(_lowered(_model(shape="N, 3, 1, 1")), _feeds((1, 3, 1, 1)))
    assert all(np.isfinite(value).all() for value in results.values())
    np.testing.assert_allclose(results["var.out"], 0.9 * _feeds((1, 3, 1, 1))["var"], rtol=1e-6)


def _layer(feeds: dict[str, np.ndarray], number: str = "") -> torch.nn.BatchNorm2d:
    """PyTorch's layer of these values."""
    layer = torch.nn.BatchNorm2d(3, momentum=0.1).double()
    names = ("scale", "bias", f"mean{number}", f"var{number}")
    layer.weight.data, layer.bias.data, layer.running_mean, layer.running_var = (
        torch.from_numpy(feeds[name]).double() for name in names
    )
    return layer


def test_a_layer_used_twice_updates_twice():
    body = (
        "a, m2, v2 = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)"
        "n = Neg(a)"
        "y, m3, v3 = BatchNormalization <training_mode = 1> (n, scale, bias, mean, var)"
    )
    model = _model(body)
    assert graphs.running_statistics(model.graph) == ["mean", "var"]
    results, feeds = run(_lowered(model), _feeds((2, 3, 4, 5))), _feeds((2, 3, 4, 5))
    layer = _layer(feeds)
    y = layer(-layer(torch.from_numpy(feeds["x"]).double()))
    np.testing.assert_allclose(results["y"], y.detach().numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results["mean.out"], layer.running_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(results["var.out"], layer.running_var.numpy(), rtol=1e-5)


def test_layers_of_one_size_share_their_count_and_one_update():
    """Five layers with statistics of one size, the last on another plane."""
    layers, text = 5, ""
    values = [f"float[3] {name}{i}" for i in range(layers) for name in ("mean", "var")]
    for i in range(layers):
        if i == layers - 1:
            text += f"x{i} = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (y{i - 1})"
        elif i:
            text += f"x{i} = Neg(y{i - 1})"
        text += (
            f"y{i}, m{i}, v{i} = BatchNormalization <training_mode = 1> "
            f"(x{i}, scale, bias, mean{i}, var{i})"
        )
    model = parse(
        f"norm (float[N, 3, 4, 6] x0, float[3] scale, float[3] bias, {', '.join(values)}) "
        f"=> (float[N, 3, 2, 3] y{layers - 1}) {{ {text} }}",
        17,
        domains=[INTERNAL_DOMAIN],
    )
    model = _lowered(model)
    types = op_types(model.graph)
    assert (types.count("Size"), types.count("Split")) == (2, 1)
    random = np.random.default_rng(1)
    feeds = {
        str(value.name): random.random([d if isinstance(d, int) else 5 for d in value.shape or ()])
        .astype(np.float32)
        for value in model.graph.inputs
    }  # fmt: skip
    results = run(model, feeds)
    x = torch.from_numpy(feeds["x0"]).double()
    for i in range(layers):
        norm = _layer(feeds, str(i))
        if i:
            x = torch.nn.functional.max_pool2d(x, 2) if i == layers - 1 else -x
        x = norm(x)
        np.testing.assert_allclose(results[f"mean{i}.out"], norm.running_mean, rtol=1e-5)
        np.testing.assert_allclose(results[f"var{i}.out"], norm.running_var, rtol=1e-5)
    np.testing.assert_allclose(results[f"y{layers - 1}"], x.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("outputs", ["y, m2, v2", "y, m2, v2, m3, v3"])
def test_outputs_meant_training_before_opset_14(outputs):
    model = _model(f"{outputs} = BatchNormalization (x, scale, bias, mean, var)", opset=13)
    (node,) = model.graph
    assert graphs.is_training_batch_norm(node)
    assert [update.name for update in _updates(model)] == ["mean", "var"]


def _updates(model: ir.Model) -> list[batch_norm.RunningStatistic]:
    batch_norm.mark(model.graph)
    return batch_norm.lower(Ops(model.graph, "new/"), model.graph)


@pytest.mark.parametrize("opset", [9, 13, 14, 17])
def test_inference_mode_is_left_alone(opset):
    model = _model("y = BatchNormalization (x, scale, bias, mean, var)", opset=opset)
    assert graphs.running_statistics(model.graph) == []
    assert _updates(model) == []
    assert op_types(model.graph) == ["BatchNormalization"]


@pytest.mark.parametrize("shape", ["N", "N, C"])
def test_unknown_channels_are_refused(shape):
    """A single axis, too, which ONNX allows for a single channel."""
    model = _model(shape=shape)
    with refused("unknown-shape"):
        _updates(model)
    x = model.graph.inputs[0]
    with pytest.raises(OdtpackError, match="'x'"):
        batch_norm.count_per_channel(Ops(model.graph, "new/"), x, ir.DataType.FLOAT)


def test_evaluation_uses_the_running_statistics():
    model = _model(attributes=", epsilon = 0.25")
    batch_norm.to_evaluation(model.graph)
    model.graph.opset_imports.pop(INTERNAL_DOMAIN)
    feeds = _feeds((2, 3, 4, 5))
    (y,) = run(check(model), feeds).values()
    shaped = {name: value.reshape(3, 1, 1) for name, value in feeds.items() if name != "x"}
    expected = (feeds["x"] - shaped["mean"]) / np.sqrt(shaped["var"] + 0.25)
    np.testing.assert_allclose(y, expected * shaped["scale"] + shaped["bias"], rtol=1e-4)


READ_ELSEWHERE = [
    *(("batch-norm-statistics-used", name, "hands its statistics") for name in ("m2", "v2")),
    # Their update is written into their memory, perhaps before the other node reads it.
    *(("statistic-shared", name, f"'{name}'") for name in ("mean", "var")),
]


@pytest.mark.parametrize(("code", "name", "why"), READ_ELSEWHERE)
def test_statistics_read_by_other_nodes_are_refused(code, name, why):
    body = TRAIN.format(attributes="") + f" z = Neg({name})"
    with refused(code, why):
        batch_norm.mark(_model(body, outputs="y, float[3] z").graph)


@pytest.mark.parametrize("name", ["m2", "v2"])
def test_statistics_returned_are_refused(name):
    with pytest.raises(OdtpackError, match="statistics"):
        batch_norm.mark(_model(outputs=f"y, float[3] {name}").graph)


def test_names_that_the_model_has_stay_its_own():
    model = _model()
    y = model.graph.outputs[0]
    model.graph.append(ir.node("Neg", [y], name="other"))
    other = model.graph[-1].outputs[0]
    other.name, other.type, other.shape = "y.mean", y.type, y.shape
    model.graph.outputs.append(other)
    results = run(_lowered(model), _feeds((2, 3, 4, 5)))
    np.testing.assert_array_equal(results["y.mean"], -results["y"])
