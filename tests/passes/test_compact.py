"""Small models: the same results, fewer bytes, and the names that are a contract."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack.passes.compact import compact
from tests.passes.tools import op_types, parse, random_feeds, run

CHAIN = """
g (float[batch, 4] x, float[4] weight) => (float[batch, 4] result)
<float[4] one = {1, 1, 1, 1}, float[4] other_one = {1, 1, 1, 1}> {
  [node_with_a_long_name] a_value_with_a_long_name = Add(x, one)
  b_value_with_a_long_name = Mul(a_value_with_a_long_name, weight)
  c_value_with_a_long_name = Add(b_value_with_a_long_name, other_one)
  result = Identity(c_value_with_a_long_name)
}
"""


def names(model: ir.Model) -> set[str]:
    return {value.name for node in model.graph for value in node.outputs}


def assert_same_results(one: ir.Model, other: ir.Model, **sizes: int) -> None:
    """Bit for bit, without optimizations."""
    feeds = random_feeds(one, **sizes)
    expected = run(one, feeds)
    for name, array in run(other, feeds).items():
        np.testing.assert_array_equal(array, expected[name], strict=True)


def test_names_are_short_but_for_inputs_and_outputs():
    model = parse(CHAIN)
    small = compact(model.clone(), keep_names=False)
    assert [value.name for value in small.graph.inputs] == ["x", "weight"]
    assert [value.name for value in small.graph.outputs] == ["result"]
    assert names(small) == {"b", "c", "d", "result"}  # a is the constant
    assert [node.name for node in small.graph] == ["b", "c", "d", "result"]
    assert_same_results(model, small, batch=3)


def test_short_names_avoid_those_that_are_taken():
    model = parse("g (float[4] a, float[4] c) => (float[4] b) { t = Add(a, c) b = Neg(t) }")
    small = compact(model.clone(), keep_names=False)
    assert names(small) == {"d", "b"}
    assert_same_results(model, small)


def test_names_are_the_same_every_time():
    texts = {str(ir.to_proto(compact(parse(CHAIN), keep_names=False))) for _ in range(3)}
    assert len(texts) == 1


def test_names_can_be_kept():
    model = parse(CHAIN)
    small = compact(model.clone(), keep_names=True)
    assert names(small) == names(model)
    assert [node.name for node in small.graph] == [node.name for node in model.graph]
    assert set(small.graph.initializers) == {"one"}
    assert_same_results(model, small, batch=3)


def test_names_in_branches_differ_from_those_around_them():
    model = parse("""
    g (float[4] x, float[1] sign) => (float[4] y) <float[1] zero = {0}> {
      condition = Greater(sign, zero) scaled = Add(x, zero)
      y = If(condition) <
        then_branch = yes () => (float[4] doubled) { inner = Neg(scaled) doubled = Neg(inner) },
        else_branch = no () => (float[4] negated) { negated = Neg(scaled) }
      >
    }""")
    small = compact(model.clone(), keep_names=False)
    found = [value.name for node in small.graph.all_nodes() for value in node.outputs]
    assert len(set(found)) == len(found)
    assert all(len(name) == 1 for name in found)
    for sign in (1, -1):
        feeds = {"x": np.arange(4, dtype=np.float32), "sign": np.float32([sign])}
        np.testing.assert_array_equal(run(small, feeds)["y"], run(model, feeds)["y"])


def test_types_go_that_inference_finds():
    assert not ir.to_proto(compact(parse(CHAIN), keep_names=False)).graph.value_info


def test_shapes_stay_that_inference_does_not_find():
    """The packager may know a shape that follows from data."""
    model = parse("g (float[6] x, int64[2] s) => (float[n, m] y) { t = Reshape(x, s) y = Neg(t) }")
    model.graph[0].outputs[0].shape = ir.Shape([2, 3])
    (info,) = ir.to_proto(compact(model, keep_names=False)).graph.value_info
    assert [dim.dim_value for dim in info.type.tensor_type.shape.dim] == [2, 3]


def test_attributes_with_their_default_go():
    model = parse("""g (float[4, 4] x, float[4, 4] w) => (float[1, 4] y) {
      t = Gemm <alpha: float = 1.0, beta: float = 0.5, transB: int = 0, transA: int = 1> (x, w)
      y = ReduceMax <axes = [0], keepdims: int = 1> (t)
    }""")
    small = compact(model.clone(), keep_names=True)
    assert [set(node.attributes) for node in small.graph] == [{"beta", "transA"}, {"axes"}]
    assert_same_results(model, small)


def test_notes_of_exporters_go():
    model = parse(CHAIN)
    model.graph[0].metadata_props["stack_trace"] = "in forward\n" * 50
    model.graph[0].doc_string = "a text"
    model.graph.doc_string = "another"
    proto = ir.to_proto(compact(model, keep_names=True))
    assert b"forward" not in proto.SerializeToString()
    assert b"text" not in proto.SerializeToString()
    assert not proto.graph.doc_string


# At most a one in each column, none in some, several in a row.
BAND = np.repeat(np.eye(6, 9, 1, dtype=np.float32), 40, axis=1)
COUNTS = np.arange(256, dtype=np.float32).reshape(16, 16)
ONE_EACH, BYTES = ["Cast", "Equal", "Cast"], ["Cast"]
CONSTANTS: dict[str, tuple[np.ndarray, list[str]]] = {
    "identity": (np.eye(40, dtype=np.float32), ONE_EACH),
    "band": (BAND, ONE_EACH),
    "band-transposed": (BAND.T.copy(), ONE_EACH),
    "counts": (COUNTS, BYTES),
    "several-ones": (np.ones((20, 30), np.float32), BYTES),
    "small": (np.eye(3, dtype=np.float32), []),
    "fractions": (COUNTS + np.float32(0.5), []),
    "negative": (-COUNTS, []),
    "negative-zero": (np.full((20, 30), -0.0, np.float32), []),
    "too-large": (COUNTS + 1, []),
    "infinite": (np.full((20, 30), np.inf, np.float32), []),
}


def with_constant(array: np.ndarray) -> ir.Model:
    """y = x + array."""
    rows, columns = array.shape
    model = parse(f"g (float[{rows}, {columns}] x) => (float[m, n] y) {{ y = Add(x, x) }}")
    constant = ir.val("c", const_value=ir.tensor(array, name="c"))
    model.graph.register_initializer(constant)
    model.graph[0].replace_input_with(1, constant)
    return model


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_in_bytes(name):
    """Exactly the same values."""
    array, expanded = CONSTANTS[name]
    model = with_constant(array)
    small = compact(model.clone(), keep_names=False)
    assert op_types(small.graph) == [*expanded, "Add"]
    assert_same_results(model, small)
    if expanded:
        before, after = (ir.to_proto(each).ByteSize() for each in (model, small))
        assert after < 0.5 * before


def test_expanded_constants_are_constants_of_a_session(tmp_path):
    small = compact(with_constant(BAND), keep_names=False)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(ir.to_proto(small).SerializeToString(), options)
    optimized = onnx.load(options.optimized_model_filepath)
    assert [node.op_type for node in optimized.graph.node] == ["Add"]
    (tensor,) = optimized.graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), BAND)
