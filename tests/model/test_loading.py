"""Models that are hostile or odd before anything is differentiated."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from odtpack import optimizers
from odtpack.build import build_package
from odtpack.graph.graphs import dims_of
from odtpack.model.loading import load_model, named_cause
from odtpack.recipe.draft import draft
from odtpack_runtime import OdtpackError
from tests.model_text import add_initializers, parsed, run
from tests.packaging_tools import built_training
from tests.refused import refused

# Nodes whose size ONNX Runtime and the standard's inference see differently.
POOLED = [
    ("MaxPool <kernel_shape = [2, 2], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1>", 17),
    ("MaxPool <kernel_shape = [3, 1], strides = [2, 2], pads = [1, 0, 0, 0], ceil_mode = 1>", 12),
    ("MaxPool <kernel_shape = [2, 2], strides = [4, 3], dilations = [2, 1], ceil_mode = 1>", 17),
    ('MaxPool <kernel_shape = [3, 2], dilations = [2, 3], auto_pad = "SAME_UPPER">', 22),
    ("AveragePool <kernel_shape = [2, 2], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1>",
     17),
    ("AveragePool <kernel_shape = [2, 1], strides = [3, 3], count_include_pad = 1, ceil_mode = 1>",
     20),
    ('AveragePool <kernel_shape = [2, 2], strides = [3, 3], auto_pad = "VALID", ceil_mode = 1>',
     17),
    ("AveragePool <kernel_shape = [2, 2], strides = [2, 3], count_include_pad = 1, ceil_mode = 1>",
     17),
    ("AveragePool <kernel_shape = [2, 3], strides = [2, 4], pads = [0, 1, 0, 2], ceil_mode = 1,"
     " count_include_pad = 1>", 17),
    ("LpPool <kernel_shape = [2, 1], strides = [3, 2], ceil_mode = 1>", 18),
    ('LpPool <kernel_shape = [1, 1], strides = [2, 2], auto_pad = "SAME_LOWER", ceil_mode = 1>',
     18),
    ('ConvTranspose <strides = [3, 3], output_padding = [1, 2], auto_pad = "SAME_UPPER">', 17),
    ('ConvTranspose <strides = [2, 3], output_padding = [0, 1], auto_pad = "SAME_LOWER">', 17),
    ('Resize <axes = [-2, -1], keep_aspect_ratio_policy = "not_larger">', 18),
]  # fmt: skip
OTHERS = {"ConvTranspose": ", k", "Resize": ", , , sizes"}


@pytest.mark.parametrize(("call", "opset"), POOLED)
def test_gradient_at_and_behind_a_size_that_the_standard_sees_differently(call, opset, tmp_path):
    """Means took their number from the standard's inference."""
    text = f"""g (float[batch, 1, 5, 6] x) => (float[batch, 1, 1, 1] y) {{
        k = Constant <value = float[1, 1, 2, 2] {{1, 2, 3, 4}}> ()
        sizes = Constant <value = int64[2] {{8, 9}}> ()
        a = Mul (x, v) p = {call} (a{OTHERS.get(call.split(maxsplit=1)[0], "")})
        s = Mul (p, w) y = GlobalAveragePool (s)
    }}"""
    one = np.ones((1, 1, 1, 1), np.float32)
    model = parsed(text, opset, v=one, w=one)
    x = np.random.default_rng(0).random((2, 1, 5, 6), np.float32)
    mean = run(model, {"x": x})["y"]
    state, _, optimizer = built_training(model, tmp_path, loss="l1", optimizer=optimizers.SGD())
    optimizer.set_learning_rate(1.0)
    optimizer.step_on(x, np.zeros_like(mean))
    for name in "vw":
        gradient = 1 - state.parameters[name].data.item()
        np.testing.assert_allclose(gradient, mean.mean(), rtol=1e-5)


@pytest.mark.parametrize(("call", "opset", "why"), [
    ('p = Resize <axes = [2, -1], keep_aspect_ratio_policy = "not_larger"> (x, , , sizes)', 18,
         "positive axes alone"),
    ("p, i = MaxPool <kernel_shape = [2, 2], strides = [4, 3], dilations = [2, 1],"
         " ceil_mode = 1> (x)", 17, "indices"),
    ('p = LpPool <kernel_shape = [1, 1], strides = [1, 3], auto_pad = "SAME_UPPER",'
         " ceil_mode = 1> (x)", 18, "gaps"),
])  # fmt: skip
def test_a_size_that_cannot_be_had_is_refused(call, opset, why):
    text = "g (float[batch, 1, 5, 6] x) => (float[batch, 1, h, w] p) <int64[2] sizes = {8, 9}>"
    model = parsed(f"{text} {{ {call} }}", opset)
    with refused("unsupported-node", why) as error:
        load_model(model)
    assert error.value.hint == "change the node in the model"


def test_a_vector_declared_absurdly_long_is_not_propagated():
    model = parsed(
        "g (int64[1000000000000] a, int64[1000000000000] b, float[2] x) => (float[2] y) "
        "{ c = Add(a, b) y = Relu(x) }"
    )
    assert load_model(model).graph.outputs[0].name == "y"


def test_annotations_that_contradict_the_graph_do_not_count():
    """ONNX Runtime ignores them. Believed, they leave out a sum over the samples, in silence."""
    text = """g (float[5, 6] x, float[5] t) => (float y)
    <float[1, 4] h, float[1, 4] b, float[7, 7, 7] s, int32[3] d, float e, float[5, 4] u> {
        h = MatMul(x, w) b = Add(h, bias) s = ReduceSum<keepdims = 0>(b, one) d = Sub(s, t)
        e = Mul(d, d) u = custom.Custom(e) y = ReduceMean<keepdims = 0>(e)
    }"""
    values = {"w": np.ones((6, 4), np.float32), "bias": np.zeros(4, np.float32), "one": [1]}
    graph = load_model(parsed(text, domains=["custom"], **values)).graph
    shapes = {value.name: dims_of(value) for node in graph for value in node.outputs}
    assert shapes["h"] == shapes["b"] == (5, 4)
    assert shapes["s"] == shapes["d"] == shapes["e"] == (5,)
    assert shapes["u"] == (5, 4)  # nothing else says what the operator makes
    assert {value.dtype for node in graph for value in node.outputs} == {ir.DataType.FLOAT}


def test_a_bias_behind_a_wrong_annotation_has_the_right_gradient(tmp_path):
    text = "g (float[5, 3] x) => (float[5, 4] y) <float[1, 4] h, float[1, 4] y>"
    rng = np.random.default_rng(2)
    w, bias, x = (rng.normal(size=s).astype(np.float32) for s in ((3, 4), (4,), (5, 3)))
    target = rng.normal(size=(5, 4)).astype(np.float32)
    model = parsed(f"{text} {{ h = MatMul(x, w) y = Add(h, bias) }}", w=w, bias=bias)
    options = {"loss": "mse", "optimizer": optimizers.SGD(), "self_check": False}
    state, module, optimizer = built_training(model, tmp_path, **options)
    optimizer.set_learning_rate(1.0)
    module(x, target)
    optimizer.step()
    expected = bias - (2 * (x @ w + bias - target) / 20).sum(axis=0)
    np.testing.assert_allclose(state.parameters["bias"].data, expected, rtol=1e-5, atol=1e-6)


def test_absent_inputs_at_the_end_of_a_node_are_dropped():
    text = "g (float[2, 4] x, float[4] scale) => (float[2, 4] y)"
    (node,) = load_model(parsed(f"{text} {{ y = LayerNormalization(x, scale, ) }}")).graph
    assert [value.name for value in node.inputs if value is not None] == ["x", "scale"]
    assert len(node.inputs) == 2


@pytest.mark.parametrize("before", ["", "n = NonZero(x) flat = Cast<to = 1>(n)"])
def test_shapes_from_before_an_input_was_made_dynamic_do_not_count(before):
    """``batch`` is any number, whatever is declared behind it; 4 is computed, and stays."""
    text = f"""g (float[batch, 4] x, float[4] w) => (float[1, 2, 2] y)
    <float[1, 4] h, float[1, 4] r, int64[3] shape = {{0, 2, 2}}>
    {{ {before} h = Mul(x, w) r = Relu(h) y = Reshape(r, shape) }}"""
    graph = load_model(parsed(text)).graph
    shapes = {value.name: dims_of(value) for node in graph for value in node.outputs}
    assert shapes["h"] == shapes["r"] == ("batch", 4)
    assert shapes["y"] == ("batch", 2, 2)


def test_the_standard_domain_may_be_imported_by_its_long_name():
    model = parsed("g (float[2, 4] x, float[4] w) => (float[2, 4] y) { y = Mul(x, w) }")
    model.opset_import[0].domain = "ai.onnx"
    loaded = load_model(model)
    assert loaded.graph.opset_imports == {"": 17}
    assert [node.op_type for node in loaded.graph] == ["Mul"]


@pytest.mark.parametrize("size", [-1, "-1", "?"])
def test_what_is_not_a_size_is_any_number(size):
    """Some exporters write a dynamic batch so, and ONNX Runtime takes it as one."""
    model = parsed("g (float[batch, 4] x, float[4] w) => (float[batch, 4] y) { y = Mul(x, w) }")
    for info in (model.graph.input[0], model.graph.output[0]):
        dim = info.type.tensor_type.shape.dim[0]
        setattr(dim, "dim_value" if isinstance(size, int) else "dim_param", size)
    graph = load_model(model).graph
    for value in (graph.inputs[0], graph.outputs[0]):
        batch, width = dims_of(value) or ()
        assert (batch in (-1, size) or isinstance(batch, int), width) == (False, 4)


def test_a_reshape_to_computed_sizes_has_a_rank():
    text = """g (float[n, t, 4] x, float[4] w) => (float[rows, 4] y)
    <int64 zero = {0}, int64 one = {1}, int64[1] four = {4}, int64[1] one1 = {1}> {
        shape = Shape(x) n = Gather(shape, zero) t = Gather(shape, one) nt = Mul(n, t)
        flat = Reshape(nt, one1) sizes = Concat <axis = 0> (flat, four) z = Reshape(x, sizes)
        y = Mul(z, w)
    }"""
    values = (value for node in load_model(parsed(text, 12)).graph for value in node.outputs)
    rows, width = dims_of(next(value for value in values if value.name == "z")) or ()
    assert (isinstance(rows, int), width) == (False, 4)


def test_what_follows_a_branch_and_cannot_be_inferred_has_its_annotation():
    text = """g (float[n, 1, 4] x) => (float[n, 4] y)
    <int64[1] one = {1}, float[n, 4] a, float[n, 4] b, float[n, 1, 4] c> {
        shape = Shape(x) size = Gather(shape, one) single = Equal(size, one)
        s = If (single) <
            then_branch = yes () => (float[] s1) { s1 = Squeeze(x, one) },
            else_branch = no () => (float[] s2) { s2 = Identity(x) }>
        c = Neg(s) a = com.example.Own(c) b = com.example.Own(a) y = Softmax <axis = -1> (b)
    }"""
    model = parsed(text, domains=["com.example"])
    found = {v.name: dims_of(v) for node in load_model(model).graph for v in node.outputs}
    assert found["c"] == found["a"] == found["b"] == found["y"] == ("n", 4)


def test_a_name_that_two_axes_of_a_value_have_says_nothing():
    """PyTorch's older exporter gives one to axes of different sizes."""
    text = """
    g (float[n, 4] x, bool[k] which, float[4] w) => (float[same, 4, same] y, float[own, 4] z)
    <int64[1] last = {2}, int64[1] first = {1}> {
        h = Mul(x, w) z = Compress <axis = 0> (h, which) a = Unsqueeze(z, last)
        b = Compress <axis = 1> (h, which) c = Unsqueeze(b, first) y = Mul(a, c)
    }"""
    y, z = load_model(parsed(text)).graph.outputs
    assert dims_of(z) == ("own", 4)
    dims = dims_of(y) or ()
    assert "same" not in dims
    assert dims[0] is None or dims[0] != dims[2]


# Messages, tables and proposals name what the user's model and module have.

FLOATS = np.linspace(-1, 1, 144, dtype=np.float32)
TEXT = """g (float[T, N, 4] x) => (float[T, N, 2] y) <int64[1] axis = {1}> {
    s, last = GRU <hidden_size = 3> (x, "gru.W", "gru.R") flat = Squeeze(s, axis)
    y = MatMul(flat, "fc.weight") turned = Transpose <perm = [1, 2, 0]> (flat)
    spare = Conv(turned, "onnx::Conv_102") whole = Cast <to = 7> (spare)
}"""


@pytest.fixture
def model() -> onnx.ModelProto:
    """A recurrent layer, a linear one, and a convolution whose weight lost its name."""
    shapes = {"gru.W": (1, 9, 4), "gru.R": (1, 9, 3), "fc.weight": (3, 2)}
    shapes["onnx::Conv_102"] = (3, 3, 1)
    proto = parsed(TEXT)
    for node in proto.graph.node:
        node.name = "/conv/Conv" if node.op_type == "Conv" else f"38_{node.op_type}"
    floats = {name: FLOATS[: math.prod(shape)].reshape(shape) for name, shape in shapes.items()}
    add_initializers(proto, floats)
    return proto


def test_a_node_that_was_made_stands_for_the_users(model):
    said = "node '38_MatMul/QuantizeLinear/Div' reads 'fc.weight' and '38_GRU'"
    with pytest.raises(OdtpackError) as caught, named_cause(model):
        raise OdtpackError("unsupported-node", said, hint="--freeze 'onnx::Conv_102'")
    assert caught.value.what == "node '38_MatMul' reads 'fc.weight' and '38_GRU'"
    assert caught.value.hint == "--freeze 'conv.weight'"


def test_a_package_shows_both_names(model, tmp_path, run):
    build_package(model, tmp_path / "p", loss="mse", loss_inputs=("spare",))
    assert "onnx::Conv_102 (conv.weight)" in run("inspect", tmp_path / "p", code=0).out


def test_an_adapter_is_proposed_where_it_can_be(model, tmp_path):
    del model.graph.node[3:]
    onnx.save(model, tmp_path / "model.onnx")
    text = draft(tmp_path / "model.onnx", tmp_path)
    assert '# on = ["fc"]' in text
    build_package(model, tmp_path / "p", loss="mse", adapter="lora", adapter_on=("fc",))


def test_what_only_the_loss_needs_is_told(tmp_path, run):
    """A model with its loss inside also gives its accuracy, which reads the labels."""
    text = """g (float[N, 4] x, int64[N] t) => (float loss, float[N, 3] logits, float accuracy) {
        logits = MatMul(x, w) loss = SoftmaxCrossEntropyLoss(logits, t)
        named = ArgMax <axis = 1, keepdims = 0> (logits) right = Equal(named, t)
        count = Cast <to = 1> (right) accuracy = ReduceMean <keepdims = 0> (count)
    }"""
    proto = parsed(text, w=FLOATS[:12].reshape(4, 3))
    notes: list[str] = []
    outputs = ("logits", "accuracy")
    build_package(proto, tmp_path / "p", loss="none", outputs=outputs, remark=notes.append)
    assert ["'accuracy' needs 't', which 'logits' does not" in note for note in notes] == [True]
    exported = run("export", tmp_path / "p", "--out", tmp_path / "m.onnx", code=0)
    assert "logits, accuracy, from x, t" in exported.err
