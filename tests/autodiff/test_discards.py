"""What a model computes and discards, where it is NaN or infinite, takes no part in gradients.

Only differences are the oracle here: PyTorch's autograd multiplies zero by NaN.
"""

import re

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from odtpack.autodiff import discards
from odtpack.autodiff.expand import expand
from tests.autodiff.oracle import LEVELS, STEP, add_gradients, cast_floats, normal, run
from tests.model_text import inferred, parsed

Q, K, V = normal(2, 3, 4), normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2)
MASK = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
BIAS = np.where(MASK, 0, -np.inf).astype(np.float32)
X = np.array([-120, -2, -0.5, 0.5, 2, 120], np.float32)
NUMBERS = (
    "zero = Constant <value = float {0}> () one = Constant <value = float {1}> () "
    "low = Constant <value = float {-inf}> () half = Constant <value = float {0.5}> () "
)
ATTEND = "kt = Transpose <perm = [0, 2, 1]> (k) qk = MatMul(q, kt) s = Mul(qk, half) "
HEAD = "float[2, 3, 4] q, float[2, 5, 4] k, float[2, 5, 4] v, bool[3, 5] mask"
BIASED, SOFTMAX = "b = Where(mask, zero, low) t = Add(s, b) ", "p0 = Softmax <axis = -1> (t) "
OR_ZERO = "nan = IsNaN(p0) p = Where(nan, zero, p0) y = MatMul(p, v)"
# Inputs besides those of HEAD, and what follows ATTEND.
ATTENTION = {
    "a row of NaN is zero": ("", BIASED + SOFTMAX + OR_ZERO),
    "a row of NaN is zero after a cast and a dropout": (
        "", BIASED + SOFTMAX + "p1 = Dropout(p0) p2 = Cast <to = 1> (p1) "
        "nan = IsNaN(p2) p = Where(nan, zero, p2) y = MatMul(p, v)"),
    "what is masked is zero": (
        "", BIASED + SOFTMAX + "p = Where(mask, p0, zero) y = MatMul(p, v)"),
    "the mask is padded": (
        ", bool[3, 4] short",
        "m = Where(short, zero, low) pads = Constant <value = int64[4] {0, 0, 0, 1}> () "
        "b = Pad(m, pads, low) t = Add(s, b) " + SOFTMAX + OR_ZERO),
    "the mask is given in numbers": (
        ", float[3, 5] bias", "t = Add(s, bias) " + SOFTMAX + OR_ZERO),
    "scores are normalized as logarithms": (
        "", BIASED + "p0 = LogSoftmax <axis = -1> (t) "
        "p1 = Where(mask, p0, zero) p = Mul(p1, half) y = MatMul(p, v)"),
    "the scale is divided by twice": (
        ", float[2, 3, 1] norm", "u = Div(s, norm) b = Where(mask, zero, low) t = Add(u, b) "
        + SOFTMAX + OR_ZERO),
}  # fmt: skip
FEEDS = {"short": MASK[:, :4], "q": Q, "k": K, "v": V, "mask": MASK, "bias": BIAS}
FEEDS["norm"] = np.array([[[1], [2], [3]], [[2], [1], [0.5]]], np.float32)
MORE = (
    "on = Greater(x, zero) a0 = Abs(x) far = Neg(a0) minus = Constant <value = float {-1}> () "
    "two = Constant <value = float {2}> () three = Constant <value = float {3}> () "
    "third = Constant <value = float {0.33333333}> () axis = Constant <value = int64[1] {1}> () "
    "shape = Constant <value = int64[2] {2, 3}> () flat = Constant <value = int64[1] {6}> () "
)
# y = ... of x, some of whose elements leave the domain of a function, and a weight w.
FUNCTIONS = {
    "Log": "l = Log(x) m = Mul(l, w) y = Where(on, m, zero)",
    "Log of another view": "l = Log(x) r = Reshape(l, shape) b = Reshape(on, shape) "
    "m = Mul(r, w) z = Where(b, m, zero) y = Reshape(z, flat)",
    "Sqrt": "l = Sqrt(x) m = Mul(l, w) y = Where(on, m, zero)",
    "Pow": "l = Pow(x, half) m = Mul(l, w) y = Where(on, m, zero)",
    "Pow of a weight": "l = Pow(x, w) y = Where(on, l, zero)",
    "Reciprocal": "r = Relu(x) l = Reciprocal(r) m = Mul(l, w) y = Where(on, m, zero)",
    "Div": "r = Relu(x) l = Div(w, r) y = Where(on, l, zero)",
    "Exp of large numbers": "e = Exp(x) l = Sub(e, one) m = Mul(l, w) y = Where(on, x, m)",
    "Asin": "a = Abs(x) in = Less(a, one) l = Asin(x) m = Mul(l, w) y = Where(in, m, x)",
    "Acosh": "in = Greater(x, one) l = Acosh(x) m = Mul(l, w) y = Where(in, m, x)",
    "Cosh": "l = Cosh(x) a = Abs(x) in = Less(a, three) m = Mul(l, w) y = Where(in, m, x)",
    "Sqrt of Relu": "r = Relu(x) s = Sqrt(r) y = Mul(s, w)",
    "Sqrt of Relu, scaled": "r = Relu(x) h = Mul(r, half) n = Reshape(h, flat) s = Sqrt(n) "
    "y = Mul(s, w)",
    "Pow of Clip": "r = Clip(x, zero) s = Pow(r, half) y = Mul(s, w)",
    "Pow of Clip above": "n = Neg(x) r = Clip(n, , zero) p = Neg(r) s = Pow(p, half) y = Mul(s, w)",
    "Sqrt of Max": "r = Max(x, zero) s = Sqrt(r) y = Mul(s, w)",
    "Sqrt of Max of two": "n = Mul(x, half) r = Max(x, n, zero) s = Sqrt(r) y = Mul(s, w)",
    "Sqrt of ThresholdedRelu": "r = ThresholdedRelu(x) s = Sqrt(r) y = Mul(s, w)",
    "Acos of Clip": "r = Clip(x, minus, one) s = Acos(r) y = Mul(s, w)",
    "Acos of Clip to computed bounds": "m1 = Neg(one) r = Clip(x, m1, one) s = Acos(r) "
    "y = Mul(s, w)",
    "Sqrt below a bound": "e = Exp(far) l = Sqrt(e) b = Max(l, half) y = Mul(b, w)",
    "Log below a bound": "e = Exp(far) l = Log(e) b = Clip(l, minus) y = Mul(b, w)",
    "Log inside of Sin": "l = Log(x) s = Sin(l) m = Mul(s, w) y = Where(on, m, zero)",
}
# n = ... of rows one of which is zero: PyTorch's gradient is 0 there, and so are differences.
ROW = "c = Cast <to = 1> (on) m = Mul(x, c) r = Reshape(m, shape) "
SCALED = "v = Reshape(w, shape) u = Mul(v, n) y = Reshape(u, flat)"
NORMS = {
    "norm": "q = Mul(r, r) s = ReduceSum(q, axis) n = Sqrt(s)",
    "norm of three": "a = Abs(r) q = Pow(a, three) s = ReduceSum(q, axis) n = Pow(s, third)",
    "norm of a half": "a = Abs(r) q = Pow(a, half) s = ReduceSum(q, axis) n = Mul(s, s)",
    "deviation": "o = ReduceMean <axes = [1]> (r) d = Sub(r, o) q = Mul(d, d) "
    "e = ReduceMean <axes = [1]> (q) k = Shape <start = -1> (r) f = Cast <to = 1> (k) "
    "g = Mul(e, f) h = Sub(f, one) i = Div(g, h) n = Sqrt(i)",
    "modulus": "a = Mul(r, r) h = Mul(r, half) b = Pow(h, two) q = Add(a, b) n = Sqrt(q)",
    "product of norms": "a = ReduceSumSquare <axes = [1]> (r) b = ReduceL1 <axes = [1]> (r) "
    "q = Mul(a, b) s = Sqrt(q) n = Max(s, half)",
    "weighted norm": "q = Mul(r, r) k = Constant <value = float[3] {2, 0.5, 1}> () f = Mul(q, k) "
    "s = ReduceSum(f, axis) n = Sqrt(s)",
    "distance by a product": "t = Transpose(r) q = MatMul(r, t) f = Max(zero, q) g = Sqrt(f) "
    "n = ReduceSum(g, axis)",
}  # fmt: skip


def check(head: str, body: str, feeds: dict[str, np.ndarray], wrt: list[str]) -> None:
    text = f"net ({head}) => (float[a] y) {{ {NUMBERS} {body} }}"
    if "q" in wrt:
        text = text.replace("float[a] y", "float[2, 3, 4] y")
    model, names = add_gradients(expand(inferred(text), wrt), wrt)
    seed = normal(*((2, 3, 4) if "q" in wrt else X.shape), seed=5)
    double = parsed(text.replace("float", "double").replace("= 1>", "= 11>"))
    evaluator = ReferenceEvaluator(double)
    wide = {name: cast_floats(array, np.float64) for name, array in feeds.items()}

    def loss(**moved: np.ndarray) -> float:
        with np.errstate(all="ignore"):
            (y,) = evaluator.run(None, {**wide, **moved})
        return float((y * seed).sum())

    for level in LEVELS:
        found = run(model, {**feeds, "seed_y": seed}, level)
        for name in wrt:
            x = wide[name]
            steps = (d.reshape(x.shape) * STEP for d in np.eye(x.size))
            slopes = [loss(**{name: x + d}) - loss(**{name: x - d}) for d in steps]
            expected = np.reshape(slopes, x.shape) / (2 * STEP)
            assert np.isfinite(expected).all()
            np.testing.assert_allclose(
                found[names[name]], expected, rtol=1e-4, atol=1e-5, err_msg=f"{name} ({level})"
            )


@pytest.mark.parametrize("form", ATTENTION)
def test_gradients_of_attention_survive_a_row_that_is_masked_as_a_whole(form):
    more, body = ATTENTION[form]
    feeds = {name: array for name, array in FEEDS.items() if f" {name}" in HEAD + more}
    check(HEAD + more, ATTEND + body, feeds, ["q", "k", "v"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_survive_arguments_outside_of_a_domain(name):
    body = FUNCTIONS[name]
    w = np.array([0.5, 1.5, 2.5], np.float32)
    if name != "Log of another view":
        w = np.tile(w, 2)
    head = f"float[6] x, float[{len(w)}] w"
    check(head, MORE + body, {"x": X, "w": w}, ["x", "w"])


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_is_zero_has_a_gradient(name):
    body = f"{ROW} {NORMS[name]} {SCALED}"
    w = normal(len(X), seed=3)
    check("float[6] x, float[6] w", MORE + body, {"x": X / 50, "w": w}, ["x", "w"])


@pytest.mark.parametrize("metric", ["{-1, 1, 1}", "{1, 1, -1}"])
@pytest.mark.parametrize("tail", ["n = Where(in, d, zero)", "m = Exp(d) n = Where(in, m, zero)"])
def test_a_sum_with_negative_factors_is_no_norm(metric, tail):
    """A product of Minkowski is negative in places, where its root is NaN."""
    body = (
        f"r = Reshape(x, shape) q = Mul(r, r) k = Constant <value = float[3] {metric}> () "
        f"p = Mul(q, k) s = ReduceSum(p, axis) in = Greater(s, zero) d = Sqrt(s) {tail} {SCALED}"
    )
    x = np.array([3, 1, 1, 1, 2, 1], np.float32)
    x = x if metric.startswith("{-") else x[::-1].copy()
    check("float[6] x, float[6] w", MORE + body, {"x": x, "w": normal(6, seed=3)}, ["x", "w"])


UNCHANGED = {
    "an epsilon is added to a mean of squares": (
        "float[3, 5] x, bool[3, 5] mask",
        "q = Mul(x, x) m = ReduceMean <axes = [1]> (q) e = Add(m, half) s = Sqrt(e) p = Div(x, s) "
        "y = Add(p, half)"),
    "nothing is discarded": ("float[3, 5] x", "y = Softmax <axis = -1> (x)"),
    "scores are masked with a large number": (
        "float[3, 5] x, bool[3, 5] mask",
        "big = Constant <value = float {-1e9}> () t = Where(mask, x, big) "
        "p = Softmax <axis = -1> (t) y = Where(mask, p, zero)"),
    "the slope is finite": ("float[3, 5] x, bool[3, 5] mask",
                            "p = Mul(x, half) t = Tanh(p) y = Where(mask, t, zero)"),
    "the divisor is known": (
        "float[3, 5] x, bool[3, 5] mask",
        "n = Shape(x) f = Cast <to = 1> (n) d = ReduceMax <keepdims = 0> (f) r = Sqrt(d) "
        "p = Div(x, r) y = Where(mask, p, low)"),
}  # fmt: skip


@pytest.mark.parametrize("why", UNCHANGED)
def test_a_gradient_that_cannot_be_nan_is_not_guarded(why):
    head, body = UNCHANGED[why]
    text = f"net ({head}) => (float[3, 5] y) {{ {NUMBERS} {body} }}"
    model = inferred(text)
    before = len(model.graph)
    add_gradients(model, ["x"])
    added = [node.op_type for node in list(model.graph)[before:]]
    assert "IsNaN" not in added
    assert added.count("Where") == len(re.findall(r"Where\(mask, [pxt]", text))


MASKS = {
    "a convolution follows": "r = Relu(x) c = Conv(r, k) y = Sqrt(c)",
    "the logarithm is of what is above a number": "p = Clip(x, small) y = Log(p)",
    "a norm is above a number": "n = ReduceL2 <axes = [1], keepdims = 1> (x) m = Max(n, small) "
    "y = Div(x, m)",
    "a sum of what is not negative is above a number": "r = Relu(x) s = ReduceSum <keepdims = 1> "
    "(r, axis) m = Add(s, small) y = Div(r, m)",
    "a normalization follows": "r = Relu(x) n = ReduceMean <axes = [1], keepdims = 1> (r) "
    "c = Sub(r, n) q = Mul(c, c) v = ReduceMean <axes = [1], keepdims = 1> (q) e = Add(v, small) "
    "d = Sqrt(e) y = Div(c, d)",
    "a power of more than one follows": "r = Relu(x) y = Pow(r, more)",
    "a logarithm of a sigmoid follows": "r = Relu(x) s = Sigmoid(r) y = Log(s)",
}


@pytest.mark.parametrize("why", MASKS)
def test_a_mask_whose_cotangent_is_finite_stays_a_product(why):
    numbers = (
        "small = Constant <value = float {1e-6}> () more = Constant <value = float {1.5}> () "
        "axis = Constant <value = int64[1] {1}> () "
    )
    text = f"net (float[1, 2, 4] x, float[2, 2, 1] k) => (float[a, b, c] y) {{ {numbers}"
    graph = inferred(f"{text}{MASKS[why]} }}").graph
    assert discards.before_poles(graph, set(), set()) == set()
