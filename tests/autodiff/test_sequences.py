"""Sequence operators whose members are known become Split, Concat or nothing at all."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from odtpack.autodiff.expand import expand
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import dims_of, nodes_of
from odtpack.graph.inference import infer_shapes
from odtpack.model.loading import load_model
from tests.autodiff.oracle import LEVELS, add_gradients, normal, run, session
from tests.model_text import parsed
from tests.refused import refused

INTS = {"zero": 0, "one": 1, "two": 2, "three": 3, "last": -1}
CONSTANTS = " ".join(f"{n} = Constant <value = int64 {{{v}}}> ()" for n, v in INTS.items())
SIZES = "sizes = Constant <value = int64[3] {1, 2, 3}> ()"


def model(body: str, outputs: str, opset: int = 17, batch: str = "3") -> ir.Model:
    head = f"g (float[{batch}, 6] x, int64 at) => ({outputs})"
    return load_model(parsed(f"{head} {{ {CONSTANTS} {SIZES} {body} }}", opset))


# what it is in PyTorch, the graph, the shape of its output
ROWS = [
    ("chunk", lambda x: x.chunk(3, 1)[1] * 2, "float[3, 2] y",
     "s = SplitToSequence<axis = 1>(x, two) m = SequenceAt(s, one) y = Add(m, m)"),
    ("uneven chunk", lambda x: x[:, 4:] * 1, "float[3, 2] y",
     "s = SplitToSequence<axis = -1>(x, four) y = SequenceAt(s, last)"),
    ("split", lambda x: x[:, 1:3] * x[:, 3:5], "float[3, 2] y",
     "s = SplitToSequence<axis = 1>(x, sizes) a = SequenceAt(s, one) b = SequenceAt(s, last)"
     " c = Slice(b, pair0, pair2, pair1) y = Mul(a, c)"),
    ("unbind", lambda x: x[0].sin() + x[2], "float[6] y",
     "s = SplitToSequence<axis = 0, keepdims = 0>(x) a = SequenceAt(s, zero) b = Sin(a)"
     " c = SequenceAt(s, two) y = Add(b, c)"),
    ("unbind by a length", lambda x: x[:, 0].sin() + x[:, 2], "float[3] y",
     "s = SplitToSequence<axis = 1, keepdims = 0>(x, one) a = SequenceAt(s, zero) b = Sin(a)"
     " c = SequenceAt(s, two) y = Add(b, c)"),
    ("stack", lambda x: torch.stack([x, x.sin()], 1), "float[3, 2, 6] y",
     "a = Sin(x) s = SequenceConstruct(x, a) y = ConcatFromSequence<axis = 1, new_axis = 1>(s)"),
    ("cat of a list", lambda x: torch.cat([x.sin(), x, x.exp()], 1), "float[3, 18] y",
     "a = Sin(x) b = Exp(x) e = SequenceEmpty<dtype = 1>() s = SequenceInsert(e, x)"
     " t = SequenceInsert(s, b) u = SequenceInsert(t, a, zero)"
     " y = ConcatFromSequence<axis = 1>(u)"),
    ("erased", lambda x: x.sin() * 1, "float[3, 6] y",
     "a = Sin(x) b = Exp(x) s = SequenceConstruct(b, a, x) t = SequenceErase(s)"
     " v = Identity(t) u = SequenceErase(v, zero) y = SequenceAt(u, zero)"),
    ("length", lambda x: x * 3, "float[3, 6] y",
     "s = SplitToSequence<axis = 1>(x, two) n = SequenceLength(s) f = CastLike(n, x)"
     " y = Mul(x, f)"),
]  # fmt: skip
MORE = (
    "four = Constant <value = int64 {4}> () pair0 = Constant <value = int64[1] {0}> () "
    "pair1 = Constant <value = int64[1] {1}> () pair2 = Constant <value = int64[1] {2}> () "
)


@pytest.mark.parametrize("opset", [12, 17, 24])
@pytest.mark.parametrize(
    ("function", "outputs", "body"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_gradient_is_that_of_pytorch(function, outputs, body, opset):  # type: ignore[no-untyped-def]
    if opset < 15:  # without CastLike, and Identity of sequences
        body = body.replace("CastLike(n, x)", "Cast<to = 1>(n)")
        body = body.replace("v = Identity(t) u = SequenceErase(v,", "u = SequenceErase(t,")
    live, names = add_gradients(expand(model(MORE + body, outputs, opset), ["x"]), ["x"])
    left = {"SequenceAt", "ConcatFromSequence", "SequenceLength"}
    assert not left & {node.op_type for node in live.graph}
    x = torch.tensor(normal(3, 6), dtype=torch.float64, requires_grad=True)
    y = function(x)
    seed = normal(*y.shape, seed=1)
    (expected,) = torch.autograd.grad((y * torch.tensor(seed)).sum(), [x])
    for level in LEVELS:
        found = run(live, {"x": normal(3, 6), "at": np.array(0), "seed_y": seed}, level)
        np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[names["x"]], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("body", "batch", "operator"), [
    ("s = SequenceConstruct(x, x) y = SequenceAt(s, at)", "3", "SequenceAt"),
    ("s = SplitToSequence<axis = 0>(x, two) y = SequenceAt(s, one)", "n", "SequenceAt"),
    ("s = SplitToSequence<axis = 1>(x, at) y = SequenceAt(s, one)", "3", "SequenceAt"),
    ("s = SequenceConstruct(x, x) y = SequenceAt(s, three)", "3", "SequenceAt"),
])  # fmt: skip
def test_what_is_known_only_when_the_model_runs_is_refused(body, batch, operator):
    expanded = expand(model(body, "float[n, 6] y", batch=batch), ["x"])
    with refused("no-gradient", f"operator {operator} .* has no gradient"):
        add_gradients(expanded, ["x"])


def test_elements_inside_of_a_branch_have_the_shape_of_a_run():
    """The standard ignores keepdims beside a length, ONNX Runtime does not."""
    body = (
        "f = Equal(at, zero) y = If (f) <then_branch = t () => (float[p, q] a) {"
        " s = SplitToSequence<axis = 1, keepdims = 0>(x, one) b = SequenceAt(s, zero)"
        " c = SequenceConstruct(b, b) a = ConcatFromSequence<axis = 1, new_axis = 1>(c) },"
        " else_branch = e () => (float[r, s] d) { d = Slice(x, pair0, pair2, pair1) }>"
    )
    loaded = model(MORE + body, "float[3, 2] y")
    inner = {v.name: dims_of(v) for node in nodes_of(loaded.graph) for v in node.outputs}
    assert inner["b"] == (3,)
    for level in LEVELS:
        (found,) = run(loaded, {"x": normal(3, 6), "at": np.array(0)}, level).values()
        np.testing.assert_array_equal(found, normal(3, 6)[:, [0, 0]])


def test_a_list_that_a_loop_returns_twice_has_no_gradient():
    text = """g (int64 m, float[3] h, float[3] w) => (float[n, 3] y, float[k, 3] z) {
      empty = SequenceEmpty()
      one, two = Loop <body = turn (int64 i, bool go, seq(float[3]) s, seq(float[3]) r)
          => (bool on, seq(float[3]) t, seq(float[3]) t) {
        on = Identity(go) b = Mul(h, w) t = SequenceInsert(s, b) }> (m, , empty, empty)
      y = ConcatFromSequence <axis = 0, new_axis = 1> (one)
      z = ConcatFromSequence <axis = 0, new_axis = 1> (two) }"""
    with refused("no-gradient", "ConcatFromSequence"):
        add_gradients(expand(load_model(parsed(text, 17)), ["w"]), ["w"])


@pytest.mark.parametrize(("new_axis", "part"), [(0, "float[1, 3]"), (1, "float[3]")])
def test_what_a_loop_appends_in_each_turn_is_stacked(new_axis, part):
    text = f"""g (int64 m, {part} h, float[3] w) => (float[n, 3] y, {part} last, float[q] sums) {{
      empty = SequenceEmpty()
      last, list, sums = Loop <body = turn (int64 i, bool go, {part} a, seq({part}) s)
          => (bool on, {part} b, seq({part}) t, float c) {{
        on = Identity(go) b = Mul(a, w) t = SequenceInsert(s, b)
        c = ReduceSum <keepdims = 0> (a) }}> (m, , h, empty)
      y = ConcatFromSequence <axis = 0, new_axis = {new_axis}> (list) }}"""
    live, names = add_gradients(expand(load_model(parsed(text, 17)), ["w"]), ["w"])
    h, w = torch.tensor(normal(3)), torch.tensor(normal(3, seed=1), requires_grad=True)
    powers = torch.stack([h * w**k for k in range(5)])
    seeds = {"y": normal(4, 3, seed=2), "last": normal(3, seed=3), "sums": normal(4, seed=4)}
    expected = {"y": powers[1:], "last": powers[4], "sums": powers[:4].sum(1)}
    sum((expected[name] * torch.tensor(seed)).sum() for name, seed in seeds.items()).backward()
    first = h.numpy() if new_axis else h.numpy()[None]
    feeds = {f"seed_{name}": seed for name, seed in seeds.items()}
    feeds["seed_last"] = feeds["seed_last"].reshape(first.shape)
    for level in LEVELS:
        found = run(live, {"m": np.array(4), "h": first, "w": w.detach().numpy(), **feeds}, level)
        for name, value in expected.items():
            ours = found[name].reshape(value.shape)
            np.testing.assert_allclose(ours, value.detach(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[names["w"]], w.grad, rtol=1e-4, atol=1e-5)


POSITIONS = {
    "SequenceInsert": "t = SequenceInsert(s, z, p) y = ConcatFromSequence <axis = 0> (t)",
    "SequenceErase": "t = SequenceErase(s, p) y = ConcatFromSequence <axis = 0> (t)",
    "SequenceAt": "y = SequenceAt(s, p)",
}


@pytest.mark.parametrize("place", range(-4, 5))
@pytest.mark.parametrize("operator", POSITIONS)
def test_a_position_is_where_the_runtime_counts_it(operator, place):
    """Against ONNX Runtime's own sequences; y is linear, so that differences are exact."""
    proto = parsed(
        "g (float[1] a, float[1] b, float[1] c, float[1] z) => (float[n] y) { "
        f"p = Constant <value = int64 {{{place}}}> () s = SequenceConstruct(a, b, c) "
        f"{POSITIONS[operator]} }}"
    )
    x = {name: normal(1, seed=seed) for seed, name in enumerate("abcz")}
    forward = session(proto, "off")
    expanded = expand(infer_shapes(ir.from_proto(proto)), list(x))
    first, last = -3, 3 if operator == "SequenceInsert" else 2
    if not first <= place <= last:
        with pytest.raises(Exception, match="Invalid sequence index"):
            forward.run(None, x)
        with pytest.raises(OdtpackError, match="has no gradient"):
            add_gradients(expanded, list(x))
        return
    (y,) = forward.run(None, x)
    live, names = add_gradients(expanded, list(x))
    seed = normal(*y.shape, seed=5)
    found = run(live, {**x, "seed_y": seed})
    np.testing.assert_array_equal(found["y"], y)
    for name, array in x.items():
        (moved,) = forward.run(None, {**x, name: array + 1})
        gradient = found[names[name]] if name in names else np.zeros(1)
        np.testing.assert_allclose(gradient, [((moved - y) * seed).sum()], atol=1e-6, err_msg=name)
