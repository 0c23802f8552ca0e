"""Groups that native kernels compute row by row are close to exact, and train as their bodies."""

import math

import numpy as np
import onnx.reference
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack.optimizers import SGD
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.native import DOMAIN
from tests import native_library, packaging_tools, zoo
from tests.model_text import nodes
from tests.native_library import kernel_model, session, unaligned

PROGRAMS = {  # nodes, what they read and what they give
    "GELU": ("""u = Mul(x, k) e = Erf(u) h = HardSigmoid<alpha = 0.5>(e) q = Mul(u, u)
        d = Sub(n, q) p = Exp(d) t = Mul(u, p) s = Add(h, t) dx = Mul(g, s)
        db = ReduceSum<keepdims = 0>(dx, leading)""", "g x k n", "dx db"),
    "normalization": ("""a = Mul(g, w) m = ReduceMean<axes = [-1]>(a) c = Sub(a, m)
        y = Sub(x, mean) z = Mul(y, scale) b = Mul(a, z) o = ReduceMean<axes = [-1]>(b)
        f = Mul(z, o) h = Sub(c, f) dx = Mul(h, scale) j = Mul(g, z)
        dw = ReduceSum<keepdims = 0>(j, leading) db = ReduceSum<keepdims = 0>(g, leading)""",
        "g x mean scale w", "dx dw db"),
    "softmax": ("""a = Mul(x, g) b = ReduceSum(a, last) c = Sub(g, b) d = Mul(x, c)
        dx = Div(d, k)""", "g x k", "dx"),
    "logarithm of a sum": ("""m = ReduceMax<axes = [-1]>(x) c = Sub(x, m) e = Exp(c)
        s = ReduceSum(e, last) l = Log(s) rows = Add(l, m) dx = Div(e, s)""", "x", "dx rows"),
    "gates": ("""s = Sigmoid(x) t = Tanh(g) p = Mul(s, t) q = Sub(p, scale) positive = Less(n, q)
        dx = Where(positive, q, w) rows = ReduceSum(p, last)
        db = ReduceSum<keepdims = 0>(q, leading)""", "g x scale w n", "dx rows db"),
}  # fmt: skip


def row_model(name: str, dims: tuple[int, ...], *, fresh: bool) -> onnx.ModelProto:
    """A model of a program; ``fresh``: on values whose memory its results may take."""
    text, inputs, outputs = PROGRAMS[name]
    kinds = {"k": (), "n": (), "w": dims[-1:], "mean": (*dims[:-1], 1), "scale": (*dims[:-1], 1)}
    axes = {"leading": [*range(len(dims) - 1)], "last": [len(dims) - 1]}
    constants = [
        f"{key} = Constant<value = int64[{len(value)}] {{{', '.join(map(str, value))}}}>()"
        for key, value in axes.items() if f"{key})" in text
    ]  # fmt: skip
    shapes = {each: kinds.get(each, dims) for each in inputs.split()}
    model = kernel_model(nodes(" ".join([*constants, text])), shapes, outputs.split())
    if fresh:
        model.graph.node[0].input[:] = [f"{each}_fresh" for each in shapes]
        for node in nodes(" ".join(f"{each}_fresh = Abs({each})" for each in shapes)):
            model.graph.node.insert(0, node)
    return model


def shapes_of(model: onnx.ModelProto) -> dict[str, list[int]]:
    return {
        value.name: [each.dim_value for each in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }


@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3, 40]), min_size=1, max_size=2),
    st.sampled_from([1, 5, 16, 31, 128, 513, 1100]),
    st.booleans(),
)
@example([0, 2], 7, False)
def test_results_are_close_to_those_in_float64(name, leading, width, fresh):
    """Random lengths, on memory that is not aligned, in place or not."""
    dims = (*leading, width)
    model = row_model(name, dims, fresh=fresh)
    random = np.random.default_rng(width)
    feeds = {
        each: unaligned(random.standard_normal(shape)).astype(np.float32)
        for each, shape in shapes_of(model).items()
    }
    exact = onnx.reference.ReferenceEvaluator(model)
    wanted = exact.run(None, {key: value.astype(np.float64) for key, value in feeds.items()})
    found = session(model, native=True).run(None, feeds)
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape
        scale = np.abs(one).max(initial=1e-3)
        np.testing.assert_allclose(
            other, one, rtol=0, atol=2e-6 * float(scale) * math.log2(width + 8)
        )


@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
def test_infinities_and_nan_are_those_of_the_body(name):
    """Where the body has a number, the kernel has one close to it; else the same."""
    model = row_model(name, (64, 33), fresh=False)
    random = np.random.default_rng(1)
    feeds = {}
    for each, shape in shapes_of(model).items():
        array = random.standard_normal(shape)
        special = random.choice([np.inf, -np.inf, np.nan, 0.0, 1e30], array.shape)
        feeds[each] = np.where(random.random(array.shape) < 0.01, special, array).astype("f")
    with np.errstate(all="ignore"):
        wanted, found = (session(model, native=each).run(None, feeds) for each in (False, True))
    assert not np.isfinite(wanted[0]).all()
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize(("operator", "exact", "low", "high"), [
    ("Exp", np.exp, -87, 88.7),
    ("Erf", np.vectorize(math.erf), -5, 5),
    ("Tanh", np.tanh, -12, 12),
    ("Sigmoid", lambda x: 1 / (1 + np.exp(-x)), -85, 80),
    ("Log", np.log, 1e-30, 10),
])  # fmt: skip
def test_functions_are_within_two_units_in_the_last_place(operator, exact, low, high):
    """Over the range where they are neither 0 nor infinite."""
    values = np.concatenate([np.linspace(low, high, 200_001), np.linspace(0.01, 1.5, 100_000)])
    values = values.astype(np.float32)
    model = kernel_model(nodes(f"b = {operator}(a)"), {"a": values.shape}, ["b"])
    (found,) = session(model, native=True).run(None, {"a": values})
    wanted = exact(values.astype(np.float64))  # type: ignore[operator]
    unit = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    assert (np.abs(found - wanted) / unit).max() < 2.1


@pytest.mark.kernels
@pytest.mark.parametrize("other", [(1, 16), (8, 1, 16), (1, 1)])
def test_what_is_repeated_where_the_model_does_not_say_so_is_an_error(other):
    """Results would have another shape than those of the body."""
    body = nodes("y = Exp(x) z = Mul(y, g)")
    model = kernel_model(body, {"x": other, "g": (8, 16)}, ["y", "z"])
    feeds = {"x": np.ones(other, np.float32), "g": np.ones((8, 16), np.float32)}
    with pytest.raises(Exception, match="not those of rows"):
        session(model, native=True).run(None, feeds)


@pytest.mark.usefixtures("kernels")
def test_a_transformer_trains_as_without(tmp_path):
    """Its backward pass has groups of GELU and LayerNormalization, verified as a stranger's."""
    model = zoo.transformer_encoder(vocab=50, d=32, layers=1, heads=2, T=16, ff=64)
    build_package(model, tmp_path, loss="cross_entropy", optimizer=SGD(), native=True)
    assert verify_package(tmp_path, limits=Limits()).steps
    made = onnx.load(tmp_path / "training_model.onnx")
    wrapped = {each.op_type for each in made.graph.node if each.domain == DOMAIN}
    inside = [{n.op_type for n in each.node} for each in made.functions if each.name in wrapped]
    assert [each for each in inside if {"Exp", "Erf", "HardSigmoid"} <= each]
    assert [each for each in inside if {"ReduceMean", "ReduceSum"} <= each]
    batch = packaging_tools.batch(model, 4)
    plain, kernels = (
        native_library.train(tmp_path, batch, tmp_path / f"{native}-", native=native, steps=5)[0]
        for native in (False, True)
    )
    np.testing.assert_allclose(kernels, plain, rtol=1e-5)
    assert plain[-1] < plain[0]


@pytest.mark.sweep
def test_threads_give_the_same_bits_without_a_race(monkeypatch):
    """ONNX Runtime's threads are not instrumented: the kernels run on others."""
    monkeypatch.setattr(native_library, "APART", "thread")
    for name in PROGRAMS:
        model = row_model(name, (3001, 100), fresh=False)
        feeds = {}
        for each, dims in shapes_of(model).items():
            counted = np.arange(np.prod(dims, dtype=int)).reshape(dims)
            feeds[each] = (0.25 + counted * 7 % 31 / 16).astype(np.float32)
        session(model, native=True).run(None, feeds)
